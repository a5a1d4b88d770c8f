"""What versions there are, what is in them, and where their bytes are to be had."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response

from mooncake_ray.errors import SnapshotNotFoundError
from mooncake_ray.serve import schema
from mooncake_ray.serve.access import TheDesk, may_read, problems
from mooncake_ray.serve.contents import Volume
from mooncake_ray.serve.redirect import redirect, sent_on

__all__ = ["FileName", "router"]

router = APIRouter(prefix="/v1", dependencies=[Depends(may_read)], responses=problems(401, 403, 422, 500, 503))

FileName = Annotated[
    str, Path(pattern=r"^[A-Za-z0-9_.-]+$", max_length=200, description="`model.safetensors`, or what else the version has")
]
TensorName = Annotated[str, Path(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=500, description="As the model's checkpoint names it")]
LogPath = Annotated[str, Path(pattern=r"^[A-Za-z0-9_./-]+$", max_length=300, description="`deltas.json`, and what it names")]


@router.get("/versions", tags=["versions"])
def versions(desk: TheDesk) -> schema.Versions:
    """The versions that are there, rising."""
    readers = desk.shelf.readers()
    entries = [
        schema.VersionEntry(
            version=e.version,
            whole=e.whole,
            bases=list(e.bases),
            pins=len(desk.store.pins(e.version)) if e.whole else 0,
            readers=readers.get(e.version, 0),
        )
        for e in desk.listing()
    ]
    whole = [e.version for e in entries if e.whole]
    return schema.Versions(versions=entries, latest=max((e.version for e in entries), default=None), latest_whole=max(whole, default=None))


@router.get("/versions/{version}", tags=["versions"], responses=problems(404))
def version(desk: TheDesk, version: schema.VersionPath) -> schema.Version:
    """A whole version: its size, its files."""
    with desk.volume(version) as volume:
        metas = volume.manifest.metas
        return schema.Version(
            version=volume.version,
            nbytes=sum(m.nbytes for m in metas),
            tensors=len(metas),
            dtypes=dict(Counter(m.dtype for m in metas)),
            tag=volume.tag,
            files=[_file(volume, name) for name in volume.files],
            extra=volume.manifest.extra,
        )


def _file(volume: Volume, name: str) -> schema.File:
    content = volume.file(name)
    return schema.File(name=name, nbytes=content.nbytes, etag=content.etag, media_type=content.media_type)


@router.get("/versions/{version}/manifest", tags=["versions"], responses=problems(404))
def manifest(desk: TheDesk, version: schema.VersionPath) -> schema.Manifest:
    """All tensors of a version, where they are in model.safetensors, and what they are to be compared with."""
    with desk.volume(version) as volume:
        tensors = [
            schema.Tensor(
                name=p.meta.name, dtype=p.meta.dtype, shape=list(p.meta.shape), begin=p.begin, end=p.end, digest=f"{p.digest:016x}"
            )
            for p in volume.tensors.values()
        ]
        model = volume.model
        return schema.Manifest(version=volume.version, tag=volume.tag, nbytes=model.nbytes, etag=model.etag, tensors=tensors)


@sent_on(router, "/versions/{version}/files/{name}", tags=["payloads"])
def file(desk: TheDesk, version: schema.VersionPath, name: FileName) -> Response:
    """A file of a version: `model.safetensors` with all tensors, or one of those beside it."""
    return redirect(desk.at(version, lambda number: desk.address_of("versions", number, "files", name)))


@sent_on(router, "/versions/{version}/tensors/{name:path}", tags=["payloads"])
def tensor(desk: TheDesk, version: schema.VersionPath, name: TensorName) -> Response:
    """A tensor's bytes, in C order."""
    return redirect(desk.at(version, lambda number: desk.address_of("versions", number, "tensors", name)))


@router.get("/deltas", tags=["deltas"], responses=problems(404))
def deltas(
    desk: TheDesk,
    base: Annotated[schema.VersionNumber, Query(description="That is held")],
    version: Annotated[schema.VersionNumber, Query(description="That is wanted")],
) -> schema.Delta:
    """The way of fewest bytes from one version to another."""
    way = desk.index().way(base, version)
    if way is None:
        raise SnapshotNotFoundError(f"no deltas lead from version {base} to version {version}")
    steps = [
        schema.DeltaStep(
            base=s.base,
            version=s.version,
            files=[schema.PatchFile(rank=f.rank, file=f.file, nbytes=f.nbytes, changed=f.changed) for f in s.files],
        )
        for s in way
    ]
    return schema.Delta(base=base, version=version, nbytes=sum(s.nbytes for s in way), steps=steps)


@sent_on(router, "/log/{path:path}", tags=["deltas"])
def log(desk: TheDesk, path: LogPath) -> Response:
    """The files of a log of deltas, as they are: `/v1/log` is what a `DeltaReader` takes for its place."""
    return redirect(desk.address_of("log", path))
