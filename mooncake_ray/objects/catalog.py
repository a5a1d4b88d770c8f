"""`Catalog`: batches that are assembled from the rows of many producers, in one place that all workers know.

    catalog = mooncake_ray.Catalog.create("rollouts", capacity_rows=4096)
    catalog.publish(keys, batch, partition="step-7", tags={"version": 7})        # a rollout worker
    catalog.publish(keys, {"reward": rewards}, partition="step-7", create=False) # another one, of the same rows
    with catalog.take(256, fields=["input_ids", "reward"]) as taken:             # a trainer
        batch = taken.ref.get()

Data stays where its producer stored it; what goes through the catalog are refs.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mooncake_ray.data.catalog import Ledger, Listed, NoRoom, Published, Where
from mooncake_ray.errors import ConfigError, GetTimeoutError, SchemaError, StoreFullError
from mooncake_ray.objects.answers import answer
from mooncake_ray.objects.batch_ref import BatchRef
from mooncake_ray.objects.batches import put_batch
from mooncake_ray.objects.catalog_actor import LONGEST_WAIT_S, PUBLISHERS, TAKERS, CatalogActor, Offer
from mooncake_ray.objects.leases import Taken
from mooncake_ray.objects.processes import this_process
from mooncake_ray.objects.renewals import keep

__all__ = ["Catalog", "Taken"]

_ANSWER_S = 60.0  # what waits in the actor waits for about a second, and asks again
_ACTOR = ray.remote(num_cpus=0, max_concurrency=8, concurrency_groups={"publish": PUBLISHERS, "take": TAKERS})(CatalogActor)


class Catalog:
    """A handle. Thread-safe; pickles through any Ray call.

    A row has a key, unique in its partition, fields that may come from several producers, and tags. It goes when every group of consumers
    has acknowledged it. The catalog owns what is published: the rows survive the death of their producer, and those that a dead consumer
    had are for others. They do not survive the catalog itself, which is one actor and holds its books in memory.

    Raises, in every method:
        StoreError: the catalog is gone.
        GetTimeoutError: it did not answer for a minute.
    """

    def __init__(self, actor: ray.actor.ActorHandle, name: str, groups: tuple[str, ...], lease_s: float) -> None:
        """Use `create` or `connect`."""
        self.name, self.groups, self.lease_s = name, groups, lease_s
        self._actor = actor

    @classmethod
    def create(
        cls,
        name: str,
        *,
        capacity_rows: int | None = None,
        capacity_bytes: int | None = None,
        groups: Sequence[str] = ("train",),
        lease_s: float = 60.0,
        namespace: str | None = None,
        detached: bool = False,
    ) -> Catalog:
        """Starts a catalog on this node. It lives as long as a handle of it, or with `detached` until `shutdown`.

        Args:
            name: By which others connect to it.
            capacity_rows: More rows wait until some have gone. Default: no limit.
            capacity_bytes: As many bytes of stored batches, each counted by its part of the rows.
            groups: Of consumers: each group gets every row once.
            lease_s: After so many seconds without a sign of life of who took them, rows are for others. An actor's death is noticed at once.
            namespace: Ray's.

        Raises:
            ConfigError: the name is taken.
            ValueError: a limit is not positive, or a group is there twice.
        """
        Ledger(groups, capacity_rows, capacity_bytes, lease_s)  # says here what is wrong with these
        node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        made = _ACTOR.options(
            name=name,
            namespace=namespace,
            lifetime="detached" if detached else None,
            scheduling_strategy=node,
        )
        try:
            actor = made.remote(tuple(groups), capacity_rows, capacity_bytes, lease_s)
        except ValueError as e:
            raise ConfigError(f"a catalog {name!r} cannot be created: {e}") from e
        return cls._of(actor, name)

    @classmethod
    def connect(cls, name: str, *, namespace: str | None = None) -> Catalog:
        """The catalog of that name.

        Raises:
            ConfigError: there is none.
        """
        try:
            actor = ray.get_actor(name, namespace=namespace)
        except ValueError as e:
            raise ConfigError(f"there is no catalog {name!r}: {e}") from e
        return cls._of(actor, name)

    @classmethod
    def _of(cls, actor: ray.actor.ActorHandle, name: str) -> Catalog:
        settings = answer(f"catalog {name!r}", lambda: actor.settings.remote(), _ANSWER_S)
        return cls(actor, name, *settings)

    def __reduce__(self) -> Any:
        return Catalog, (self._actor, self.name, self.groups, self.lease_s)

    def __repr__(self) -> str:
        return f"Catalog({self.name!r}, groups={list(self.groups)})"

    # ---- producers

    def publish(
        self,
        keys: Sequence[str],
        batch: Any,
        *,
        partition: str = "default",
        tags: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
        operation_id: str | None = None,
        overwrite: bool = False,
        create: bool = True,
        timeout_s: float | None = None,
    ) -> Published:
        """Adds rows, or further fields of rows: all of them or none. When it has answered, this process may die.

        Waits while the catalog is full, unless all rows are there already.

        Args:
            keys: Of the rows of the batch, in order.
            batch: what `put_batch` takes, or the `BatchRef` of what is stored already; None to change tags alone. Its meta_info is not
                kept: what is to be known of rows belongs into tags. Padded columns may be of different widths in different publications:
                read what is taken without padding then (`form="ragged"`).
            partition: A step, a weight version, …
            tags: Texts, numbers, truth values, or None by name: one mapping for all rows, or one for each. They replace those that a row has.
            operation_id: A second publication of that name changes nothing and is answered as the first one was, even by another process.
                Remembered for 65536 publications. Default: a new name.
            overwrite: replace fields that rows have. What was taken before stays as it was.
            create: False: the rows must be there; they may have been acknowledged and gone.
            timeout_s: Seconds to wait for room. Default: no limit.

        Raises:
            SchemaError: a key is there twice, or is no str; a row has a field already, or is unknown; a field cannot be put together with
                what is in the catalog; there are not as many keys, rows, and tags.
            StoreError: the partition is closed, and a row is new.
            StoreFullError: no room within the time, or ever.
        """
        end = _deadline(timeout_s)
        keys = list(keys)
        ref = batch if batch is None or isinstance(batch, BatchRef) else put_batch(batch)
        if ref is not None and len(ref) != len(keys):
            raise SchemaError(f"there are {len(keys)} keys and {len(ref)} rows")
        offer = Offer(partition, keys, ref, tags, overwrite, create)
        operation = operation_id or uuid.uuid4().hex
        while True:
            answer = self._call("publish", operation, offer, _wait_s(end))
            if isinstance(answer, Published):
                return answer
            if _over(end):
                raise _full(self.name, timeout_s, answer)

    def close_partition(self, partition: str | None) -> None:
        """No new rows come to the partition; None: to any, nor to new ones. Takers of it get what is left, and then nothing."""
        self._call("close", partition)

    def drop_partition(self, partition: str) -> int:
        """Removes the rows of a partition, whoever has them, and forgets that it was closed. Returns how many they were."""
        return self._call("drop", partition)

    # ---- consumers

    def take(
        self,
        count: int,
        fields: Sequence[str] | None = None,
        *,
        partition: str | Sequence[str] | None = None,
        group: str | None = None,
        minimum: int | None = None,
        where: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Taken:
        """Takes rows whose fields are there, in the order of their publication, and waits for them.

        They are this process's until it acknowledges or releases them; use it with `with`. The lease is renewed as long as a process has
        the `Taken`, and lost if none does for `lease_s`, or if this process is an actor that dies.

        Args:
            count: At most so many rows.
            fields: That a row must have to be taken, and that the batch will have. Default: those that the first row has by then.
            partition: One or several, one after the other. Default: all.
            group: Of consumers. Default: the first.
            minimum: At least so many rows. Default: `count`.
            where: Conditions on tags: `{"status": "done", "version": {">=": 3}}`; operators: == != < <= > >= in, not in.
            timeout_s: Seconds to wait. Default: no limit.

        Returns:
            Fewer rows than `minimum` only where the partitions are closed and that is all; no rows when there are none any more.

        Raises:
            GetTimeoutError: not enough rows within the time.
            SchemaError: a tag cannot be compared.
            ValueError: there is no such group, or the numbers contradict each other.
        """
        end = _deadline(timeout_s)
        if isinstance(fields, str):
            fields = [fields]
        if fields is not None and not fields:
            raise ValueError("fields must be None or name at least one")
        group = group if group is not None else self.groups[0]
        wanted = {
            "fields": tuple(fields) if fields is not None else None,
            "partitions": (partition,) if isinstance(partition, str) else partition,
            "at_least": count if minimum is None else minimum,
            "at_most": count,
        }
        consumer, condition = this_process(), Where.of(where)
        while True:
            answer = self._call("take", group, consumer, condition, _wait_s(end), wanted)
            if answer is not None:
                taken = Taken(self, *answer)
                keep(taken)
                return taken
            if _over(end):
                raise GetTimeoutError(f"catalog {self.name!r} had fewer than {wanted['at_least']} rows for {group!r} within {timeout_s} s")

    def ack(self, taken: Taken) -> int:
        """The group needs these rows no more. Returns how many. Idempotent.

        Raises:
            LeaseLostError: the lease has ended, and others may have the rows.
        """
        return self._end("ack", taken)

    def release(self, taken: Taken) -> int:
        """Gives the rows back, for others of the group. Returns how many: 0 if the lease has ended. Idempotent."""
        return self._end("release", taken)

    @property
    def identity(self) -> str:
        return self._actor._actor_id.hex()

    def renew(self, leases: Sequence[int]) -> Sequence[int]:
        """For what this process has taken, which is done in the background. Returns those that have ended."""
        return self._call("renew", leases)

    def _end(self, how: str, taken: Taken) -> int:
        if not taken.lease:
            return 0
        before, taken.over = taken.over, True  # no renewal comes between
        try:
            return self._call(how, taken.lease)
        except BaseException:
            taken.over = before
            raise

    # ---- looking

    def list(self, partition: str | None = None) -> list[Listed]:
        """Rows with their tags, fields, and state by group, in the order of their publication."""
        return self._call("list", partition)

    def stats(self) -> dict[str, int | None]:
        """Numbers of now (`rows`, `bytes`, `partitions`, `leases`, `rows_leased`, …) and totals (`rows_published`, `leases_lost`, …)."""
        return self._call("stats")

    def shutdown(self) -> None:
        """Ends the catalog, with all that it owns; what was taken stays readable no longer either. Idempotent."""
        ray.kill(self._actor)

    def _call(self, method: str, *args: Any) -> Any:
        return answer(f"catalog {self.name!r}", lambda: getattr(self._actor, method).remote(*args), _ANSWER_S)


def _deadline(timeout_s: float | None) -> float | None:
    if timeout_s is not None and timeout_s < 0:
        raise ValueError(f"timeout_s must not be negative, got {timeout_s}")
    return None if timeout_s is None else time.monotonic() + timeout_s


def _wait_s(end: float | None) -> float:
    return LONGEST_WAIT_S if end is None else max(0.0, min(LONGEST_WAIT_S, end - time.monotonic()))


def _over(end: float | None) -> bool:
    return end is not None and time.monotonic() >= end


def _full(name: str, timeout_s: float | None, answer: NoRoom) -> StoreFullError:
    return StoreFullError(f"catalog {name!r} had no room within {timeout_s} s: {answer}")
