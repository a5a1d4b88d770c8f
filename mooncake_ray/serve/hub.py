"""Versions as revisions of a model on a Hugging Face hub: `HF_ENDPOINT=http://host:8000/hub`, and `from_pretrained("any/name", revision="12")`
has version 12."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from mooncake_ray.errors import SnapshotNotFoundError
from mooncake_ray.serve import schema
from mooncake_ray.serve.access import TheDesk, may_read, problems
from mooncake_ray.serve.desk import Desk
from mooncake_ray.serve.problems import Problem
from mooncake_ray.serve.redirect import redirect, sent_on
from mooncake_ray.serve.versions import FileName

__all__ = ["router"]

router = APIRouter(prefix="/hub", tags=["hub"], dependencies=[Depends(may_read)], responses=problems(401, 403, 404, 422, 500, 503))

Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9_.-]+$", max_length=100, description="Any: there is one model here")]
Revision = Annotated[
    str, Path(pattern=r"^(main|[0-9]{1,15}|[0-9a-f]{40})$", description="`main` for the latest version, a version, or a version's tag")
]


def _number(desk: Desk, revision: str) -> int:
    """Raises Problem, 404, as the hub says it."""
    by_tag = len(revision) == 40
    for version in reversed(desk.store.versions()) if by_tag else ["latest" if revision == "main" else revision]:
        with suppress(SnapshotNotFoundError), desk.volume(version) as volume:  # one may go at any moment
            if not by_tag or volume.tag == revision:
                return volume.version
    raise Problem(404, "not-found", f"there is no revision {revision!r}", {"X-Error-Code": "RevisionNotFound"})


@router.get("/api/models/{owner}/{repo}", name="hub_model")
def model(desk: TheDesk, owner: Name, repo: Name) -> schema.HubModel:
    """What is in the latest version."""
    return revision_of(desk, owner, repo, "main")


@router.get("/api/models/{owner}/{repo}/revision/{revision}", name="hub_revision")
def revision_of(desk: TheDesk, owner: Name, repo: Name, revision: Revision) -> schema.HubModel:
    """What is in a version."""
    with desk.volume(_number(desk, revision)) as volume:
        return schema.HubModel(id=f"{owner}/{repo}", sha=volume.tag, siblings=[schema.HubFile(rfilename=name) for name in volume.files])


@router.get("/api/models/{owner}/{repo}/tree/{revision}", name="hub_tree")
def tree(desk: TheDesk, owner: Name, repo: Name, revision: Revision) -> list[schema.HubEntry]:
    """The files of a version."""
    with desk.volume(_number(desk, revision)) as volume:
        found = {name: volume.file(name) for name in volume.files}
        return [schema.HubEntry(type="file", path=name, size=c.nbytes, oid=c.etag.strip('"')) for name, c in found.items()]


def _headers(desk: Desk, revision: str, name: str) -> tuple[int, dict[str, str]]:
    with desk.volume(_number(desk, revision)) as volume:
        try:
            content = volume.file(name)
        except SnapshotNotFoundError as e:
            raise Problem(404, "not-found", str(e), {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": volume.tag}) from None
        size = str(content.nbytes)
        return volume.version, {"X-Repo-Commit": volume.tag, "ETag": content.etag, "X-Linked-Etag": content.etag, "X-Linked-Size": size}


@sent_on(router, "/{owner}/{repo}/resolve/{revision}/{name}", name="hub_file")
def file(desk: TheDesk, request: Request, owner: Name, repo: Name, revision: Revision, name: FileName) -> Response:
    """A file of a version."""
    version, headers = _headers(desk, revision, name)
    if request.method == "HEAD":  # what it would be, from here: clients look for these headers before they follow
        return Response(None, 200, headers)
    return redirect(desk.address_of("versions", version, "files", name), headers)
