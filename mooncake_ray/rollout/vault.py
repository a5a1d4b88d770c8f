"""`Vault`: the actor that owns what is stored of a buffer, and remembers what was done to its books.

It decides nothing, so that whatever does may die: who begins anew is told all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import ray

from mooncake_ray.objects import envelopes, install, nodes
from mooncake_ray.objects.batch_ref import BatchRef
from mooncake_ray.objects.catalog_batches import adopt

__all__ = ["Kept", "Memory", "Vault"]

_ENVELOPE_S = 30.0


@dataclass(frozen=True)
class Kept:
    """A parcel that the vault owns."""

    ref: BatchRef
    nodes: frozenset[str]
    """IDs of the nodes that its bytes lie on."""


@dataclass(frozen=True)
class Memory:
    """All that a new life of a buffer needs."""

    snapshot: bytes | None
    """Of its books, pickled; None: they are new."""
    journal: list[bytes]
    """What was done to them since."""
    parcels: dict[str, Kept]


@dataclass
class Vault:
    """An actor with one thread. What it owns dies with it."""

    _parcels: dict[str, Kept] = field(default_factory=dict)
    _snapshot: bytes | None = None
    _journal: list[bytes] = field(default_factory=list)

    def append(
        self, entries: Sequence[bytes], parcels: Mapping[str, BatchRef], retired: Collection[str]
    ) -> tuple[dict[str, Kept], dict[str, str]]:
        """Remembers entries, owns parcels, and lets go of others. Returns the parcels as it owns them; and why it could not own some, which were
        gone before they came."""
        mine, failed = {}, {}
        for name, ref in parcels.items():
            try:
                mine[name] = _kept(adopt(ref).ref)
            except ray.exceptions.RayError as e:
                failed[name] = f"{type(e).__name__}: {e}"
        self._journal += entries
        self._parcels |= mine
        for name in retired:
            self._parcels.pop(name, None)
        return mine, failed

    def checkpoint(self, snapshot: bytes, entries: int) -> None:
        """The first so many entries are in the snapshot."""
        self._snapshot = snapshot
        del self._journal[:entries]

    def recall(self) -> Memory:
        return Memory(self._snapshot, list(self._journal), dict(self._parcels))


def _kept(ref: BatchRef) -> Kept:
    install.open_seams()
    pools = {obj.pool_id for stored in ref.refs for obj in envelopes.named(stored, _ENVELOPE_S)}
    here = ray.get_runtime_context().get_node_id()  # of a pool that no service serves only this node knows
    return Kept(ref, frozenset(nodes.node_of(pool) or here for pool in pools))
