"""What the endpoint says and is told, as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = [
    "Delta",
    "DeltaStep",
    "File",
    "FromGroup",
    "Health",
    "HubEntry",
    "HubFile",
    "HubModel",
    "Lease",
    "Leases",
    "Manifest",
    "Newest",
    "PatchFile",
    "Pin",
    "Problem",
    "Renewal",
    "Stored",
    "Tensor",
    "Transfers",
    "Version",
    "VersionEntry",
    "VersionNumber",
    "VersionPath",
    "Versions",
]


def _whole(value: Any) -> Any:
    """3.0 is an integer in JSON, and true is none."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


VersionNumber = Annotated[int, Field(ge=0, le=10**15)]
VersionPath = Annotated[str, Path(pattern=r"^(latest|[0-9]{1,15})$", description="A number, or `latest`", examples=["latest"])]
Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600, allow_inf_nan=False, strict=True)]


class Problem(BaseModel):
    """An error, as RFC 9457 has it."""

    model_config = ConfigDict(extra="allow")
    type: str
    title: str
    status: int
    detail: str


class VersionEntry(BaseModel):
    """A version in the list."""

    version: int
    whole: bool
    """It can be read as it is; else only from another one and deltas."""
    bases: list[int]
    """Versions from which one delta leads to it."""
    pins: int
    """How many keep it."""
    readers: int
    """How many read it from the replica that answers."""


class Versions(BaseModel):
    """All that are there."""

    versions: list[VersionEntry]
    latest: int | None
    """The newest one, whole or not."""
    latest_whole: int | None


class Newest(BaseModel):
    """The newest version."""

    version: int


class File(BaseModel):
    """A file of a version."""

    name: str
    nbytes: int
    etag: str
    media_type: str


class Version(BaseModel):
    """A whole version."""

    version: int
    nbytes: int
    """Of all tensors."""
    tensors: int
    dtypes: dict[str, int]
    """How many tensors have each."""
    tag: str
    """The same for the same content, whatever replica says so."""
    files: list[File]
    extra: dict[str, Any]
    """What its writer has put with it."""


class Tensor(BaseModel):
    """A tensor of a version."""

    name: str
    dtype: str
    """As torch names it."""
    shape: list[int]
    begin: int
    """Which bytes of model.safetensors it is."""
    end: int
    digest: str
    """Content digest, 64 bits in hexadecimal digits."""


class Manifest(BaseModel):
    """All tensors of a version, as they follow each other in model.safetensors."""

    version: int
    tag: str
    nbytes: int
    """Of model.safetensors."""
    etag: str
    tensors: list[Tensor]


class PatchFile(BaseModel):
    """What changed in what one rank has written."""

    rank: str
    file: str
    """Below /v1/log/."""
    nbytes: int
    changed: int
    """Elements."""


class DeltaStep(BaseModel):
    """From one version to the next."""

    base: int
    version: int
    files: list[PatchFile]


class Delta(BaseModel):
    """The way from one version to another that has fewest bytes."""

    base: int
    version: int
    nbytes: int
    steps: list[DeltaStep]


class Pin(BaseModel):
    """A wish that a version stays."""

    model_config = ConfigDict(extra="forbid")
    ttl_s: Seconds
    """Until it must be renewed; cut to what the endpoint allows."""
    holder: Annotated[str, Field(max_length=200, strict=True)] = ""
    """Who it is, for people."""


class FromGroup(BaseModel):
    """A wish that a group's version is stored."""

    model_config = ConfigDict(extra="forbid")
    version: Annotated[int, Field(ge=0, le=10**15, strict=True), BeforeValidator(_whole)] | None = None
    """That the group must be at; None: whichever it is at."""


class Renewal(BaseModel):
    """A wish that a pin lasts longer."""

    model_config = ConfigDict(extra="forbid")
    ttl_s: Seconds


class Lease(BaseModel):
    """A pin."""

    id: str
    version: int
    holder: str
    expires: float
    """Seconds of Unix time."""
    ttl_s: float
    """What is left of it."""


class Leases(BaseModel):
    """Pins that keep a version."""

    version: int
    leases: list[Lease]
    others: list[str]
    """Names of pins without an end, which were not made here."""


class Stored(BaseModel):
    """A version that is stored now."""

    version: int
    nbytes: int
    tensors: int


class HubFile(BaseModel):
    """A file, as the hub has it."""

    rfilename: str


class HubEntry(BaseModel):
    """A file in a list of them, as the hub has it."""

    type: Literal["file"]
    path: str
    size: int
    oid: str


class HubModel(BaseModel):
    """A version, as the hub has it."""

    id: str
    sha: str
    """The version's tag."""
    siblings: list[HubFile]


class Transfers(BaseModel):
    """Of one replica's data port."""

    active: int
    waiting: int
    limit: int
    refused: int
    """That were told to come again."""
    sent_bytes: int


class Health(BaseModel):
    """Of one replica."""

    status: str
    replica: str
    node: str
    latest: int | None
    transfers: Transfers
