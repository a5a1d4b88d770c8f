"""The actor behind a `Catalog`: the ledger under a lock, the batches it owns, and who waits.

Every call ends within about a second, whether it has got what it waits for or not: the threads of an actor are counted.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from mooncake_ray.data.catalog import Lease, Ledger, Listed, NoRoom, Publication, Published, Where
from mooncake_ray.errors import LeaseLostError
from mooncake_ray.objects.batch_ref import BatchRef
from mooncake_ray.objects.catalog_batches import adopt, assemble
from mooncake_ray.objects.processes import is_dead

__all__ = ["LONGEST_WAIT_S", "PUBLISHERS", "TAKERS", "CatalogActor", "Offer"]

logger = logging.getLogger("mooncake_ray")

LONGEST_WAIT_S = 1.0
PUBLISHERS, TAKERS = 32, 64  # threads that may wait; more callers queue up behind them
_LOOK_EVERY_S = 0.5  # at deadlines, and at whether consumers live


@dataclass(frozen=True)
class Offer:
    """What a producer publishes."""

    partition: str
    keys: Sequence[str]
    ref: BatchRef | None
    """None for tags alone."""
    tags: Any
    overwrite: bool
    create: bool

    def publication(self, fragment: str, kinds: Mapping[str, str], nbytes: int) -> Publication:
        return Publication(self.partition, self.keys, kinds, fragment, nbytes, self.tags, self.overwrite, self.create)


class CatalogActor:
    """A threaded actor. It dies with all that it owns."""

    def __init__(self, groups: Sequence[str], capacity_rows: int | None, capacity_bytes: int | None, lease_s: float) -> None:
        self._ledger = Ledger(groups, capacity_rows, capacity_bytes, lease_s)
        self._fragments: dict[str, BatchRef] = {}
        lock = threading.RLock()
        self._rows_came, self._rows_went = threading.Condition(lock), threading.Condition(lock)
        threading.Thread(target=self._watch, name="mooncake_ray.catalog", daemon=True).start()

    def settings(self) -> tuple[tuple[str, ...], float]:
        """What clients have to know."""
        return tuple(self._ledger.groups), self._ledger.lease_s

    @contextmanager
    def _books(self) -> Iterator[Ledger]:
        """The ledger, for this thread alone. What no row uses after that is let go of."""
        retired: list[BatchRef] = []  # Ray is told when nobody waits for the lock
        with self._rows_came:
            try:
                yield self._ledger
            finally:
                retired += [self._fragments.pop(name) for name in self._ledger.retired() if name in self._fragments]
        del retired

    @ray.method(concurrency_group="publish")
    def publish(self, operation: str, offer: Offer, wait_s: float) -> Published | NoRoom:
        """Makes the rows known, once this process owns what they lie in."""
        end = time.monotonic() + min(wait_s, LONGEST_WAIT_S)
        names = dict.fromkeys(offer.ref.fields if offer.ref is not None else (), "")
        with self._books() as ledger:
            done = ledger.published(operation, offer.publication("", names, 0).digest)
        if done is not None:
            return done
        fragment, kinds, nbytes = uuid.uuid4().hex, {}, 0
        if offer.ref is not None:
            adopted = adopt(offer.ref)
            kinds, nbytes = adopted.kinds, adopted.nbytes
        what = offer.publication(fragment, kinds, nbytes)
        with self._books() as ledger:
            while isinstance(answer := ledger.publish(operation, what), NoRoom):
                left = end - time.monotonic()
                if left <= 0:
                    return answer
                self._rows_went.wait(left)
            if offer.ref is not None and ledger.uses(fragment):  # else the same operation was done meanwhile
                self._fragments[fragment] = adopted.ref
            self._rows_came.notify_all()
        return answer

    @ray.method(concurrency_group="take")
    def take(
        self, group: str, consumer: str, where: Where, wait_s: float, wanted: Mapping[str, Any]
    ) -> tuple[Lease, BatchRef | None] | None:
        """Leases rows; None if there were not enough meanwhile."""
        end = time.monotonic() + min(wait_s, LONGEST_WAIT_S)
        with self._books() as ledger:
            while (lease := ledger.take(group, consumer, time.monotonic(), where=where, **wanted)) is None:
                left = end - time.monotonic()
                if left <= 0:
                    return None
                self._rows_came.wait(left)
            if not lease.rows:
                return lease, None
            fragments = {name: self._fragments[name] for row in lease.rows for name, _ in row.at.values()}
        try:
            return lease, assemble(lease.rows, fragments)
        except BaseException:
            self.release(lease.id)
            raise

    def ack(self, lease: int) -> int:
        with self._books() as ledger:
            rows = ledger.ack(lease)
            self._rows_went.notify_all()
            self._rows_came.notify_all()  # of a closed partition none may be left
        return rows

    def release(self, lease: int) -> int:
        with self._books() as ledger:
            rows = ledger.release(lease)
            self._rows_came.notify_all()
        return rows

    def renew(self, leases: Sequence[int]) -> list[int]:
        """Returns those that have ended."""
        ended = []
        with self._books() as ledger:
            for lease in leases:
                try:
                    ledger.renew(lease, time.monotonic())
                except LeaseLostError:
                    ended.append(lease)
        return ended

    def close(self, partition: str | None) -> None:
        with self._books() as ledger:
            ledger.close(partition)
            self._rows_came.notify_all()
            self._rows_went.notify_all()

    def drop(self, partition: str) -> int:
        with self._books() as ledger:
            rows = ledger.drop(partition)
            self._rows_went.notify_all()
        return rows

    def list(self, partition: str | None) -> list[Listed]:
        with self._books() as ledger:
            return ledger.list(partition)

    def stats(self) -> dict[str, int | None]:
        with self._books() as ledger:
            return ledger.stats()

    def _watch(self) -> None:
        """Frees what dead consumers have."""
        while True:
            time.sleep(_LOOK_EVERY_S)
            with self._books() as ledger:
                if ledger.expire(time.monotonic()):
                    self._rows_came.notify_all()
                consumers = ledger.consumers()
            try:
                dead = [consumer for consumer in consumers if is_dead(consumer)]
            except (ray.exceptions.RayError, RuntimeError, OSError):  # this thread's end would leave rows with the dead
                logger.exception("mooncake_ray: asking Ray whether consumers live failed; trying again")
                dead = []
            with self._books() as ledger:
                if sum(ledger.drop_consumer(consumer) for consumer in dead):
                    self._rows_came.notify_all()
