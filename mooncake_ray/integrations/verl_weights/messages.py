"""What the ranks of an update tell each other. Plain data; no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mooncake_ray.integrations.verl_weights.stream import Named
from mooncake_ray.objects.blobs import Blob

__all__ = ["Bucket", "End", "Patch", "Topology", "Update"]


@dataclass(frozen=True, slots=True)
class Update:
    """One update, as everybody who takes part is told."""

    number: int
    senders: tuple[str, ...]  # IDs of their actors, by rank; "": not an actor
    receivers: tuple[str, ...]
    base: int = -1  # the update whose weights all of them have; -1: there is none


@dataclass(frozen=True, slots=True)
class Topology:
    """What `build_topology` tells every rank."""

    update: Update
    board: Any  # the handle


@dataclass(frozen=True, slots=True)
class Patch:
    """What changed in a bucket: for each of its tensors how many elements. The blob is as `Changes` writes it."""

    blob: Blob
    checksum: int
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of the stream, and where it is."""

    number: int
    blob: Blob
    checksum: int
    tensors: tuple[Named, ...]
    patch: Patch | None = None


@dataclass(frozen=True, slots=True)
class End:
    """What a sender has seen of the stream when it was over: the same as the others, or something is wrong."""

    version: int | None
    digest: str
    buckets: int
    nbytes: int
