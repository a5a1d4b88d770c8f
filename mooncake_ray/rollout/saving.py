"""How a buffer gets onto a disk, by a process of its own on the buffer's node, and back into another one's vault."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mooncake_ray.data import DataProto
from mooncake_ray.errors import GetTimeoutError, ObjectLostError, StoreError
from mooncake_ray.objects.answers import answer
from mooncake_ray.objects.batch_ref import BatchRef
from mooncake_ray.objects.batches import get_batch, put_batch
from mooncake_ray.rollout.books import Books
from mooncake_ray.rollout.ledger import Ledger
from mooncake_ray.rollout.snapshots import BufferSnapshot, BufferSnapshots

__all__ = ["Moment", "Saved", "fill", "save"]

_ANSWER_S = 60.0


@dataclass(frozen=True)
class Moment:
    """A buffer as it was at one moment. What is stored of it is there as long as this is."""

    ledger: bytes
    """Pickled, for a process of the same job."""
    parcels: dict[str, BatchRef]
    node: str
    """ID of the buffer's."""


@dataclass(frozen=True)
class Saved:
    """What a snapshot has."""

    version: int
    last_step: int
    """The one that was committed last; -1: none."""
    groups_begun: int
    """In all, since the beginning."""
    groups_queued: int
    groups_waiting: int
    groups_in_replay: int
    groups_stale: int
    """That steps had, which are not committed, and that have become too old for the queue since: these were dropped, or wait."""
    parcels: int
    nbytes: int
    """Of the files."""


def save(moment: Moment, snapshots: BufferSnapshots, version: int, timeout_s: float) -> Saved:
    """Has a process on the buffer's node write. Raises as `RolloutBuffer.save`."""
    there = NodeAffinitySchedulingStrategy(moment.node, soft=False)
    writing = ray.remote(_write).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(moment, snapshots, version, timeout_s)
    try:
        return ray.get(writing, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as e:
        ray.cancel(writing, force=True)  # what it has left goes with the next version
        raise GetTimeoutError(f"version {version} was not written to {snapshots.directory} within {timeout_s:g} s") from e
    except ray.exceptions.RayTaskError as e:
        raise e.cause from None
    except ray.exceptions.RayError as e:
        raise StoreError(f"version {version} was not written to {snapshots.directory}: {type(e).__name__}: {e}") from e


def _write(moment: Moment, snapshots: BufferSnapshots, version: int, timeout_s: float) -> Saved:
    """In a task."""
    ledger: Ledger = pickle.loads(moment.ledger)
    stale = ledger.take_back()
    end = time.monotonic() + timeout_s
    nbytes = snapshots.save(version, Books.of(ledger), _batches(moment, ledger, end))
    found = ledger.stats()
    counts = (found[name] for name in ("last_step", "groups_begun", "groups_queued", "groups_waiting", "groups_in_replay"))
    return Saved(version, *counts, stale, found["parcels"], nbytes)


def _batches(moment: Moment, ledger: Ledger, end: float) -> Iterator[tuple[str, str, DataProto]]:
    """What is stored of the groups that there are."""
    for name in ledger.stock.holdings:
        try:
            ref = moment.parcels[name]
            batch = get_batch(ref, lazy=True, timeout=max(0.0, end - time.monotonic())).load()
        except ray.exceptions.GetTimeoutError as e:
            raise GetTimeoutError(f"parcel {name} could not be read in time") from e
        except (KeyError, ObjectLostError, ray.exceptions.RayError) as e:
            raise ObjectLostError(
                f"parcel {name} was lost while it was to be saved; when the buffer knows, it can be saved without: {e}"
            ) from e
        yield name, ref.as_put, batch


def fill(vault: ray.actor.ActorHandle, snapshot: BufferSnapshot, ledger: Ledger) -> None:
    """Has a new vault own what a snapshot has of a ledger's groups, and remember the ledger.

    Raises:
        CorruptBlockError: samples are damaged.
        StoreFullError: they do not fit into the pool.
    """
    who = f"the vault of the buffer that is restored from {snapshot.path}"
    for name in ledger.stock.holdings:
        ref = replace(put_batch(snapshot.batch(name)), as_put=snapshot.parcels[name].as_put)
        _, failed = answer(who, lambda name=name, ref=ref: vault.append.remote([], {name: ref}, []), _ANSWER_S)
        if failed:
            raise ObjectLostError(f"parcel {name} was lost while it was restored: {failed[name]}")
    answer(who, lambda: vault.checkpoint.remote(ray.cloudpickle.dumps(ledger), 0), _ANSWER_S)
