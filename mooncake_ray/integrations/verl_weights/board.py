"""`Board`: where the ranks of one update find each other: who has written which bucket, who has got it, and who is no more.

No weights come here. An actor of the driver's, that lives as long as somebody has a handle of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mooncake_ray.errors import PlanError, StaleVersionError, SyncAbortedError
from mooncake_ray.integrations.verl_weights.messages import Bucket, End, Update
from mooncake_ray.sync import lives

__all__ = ["Board", "live_board", "new_board"]

logger = logging.getLogger("mooncake_ray")

_WATCH_S = 1.0
_POLL_S = 10.0  # a call that waits comes back so often, to be made again
_ANSWER_S = 30.0


@dataclass
class _State:
    update: Update
    buckets: dict[int, Bucket] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)
    staged: set[int] = field(default_factory=set)
    taken: dict[int, int] = field(default_factory=dict)  # receiver → how many buckets
    finished: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    error: Exception | None = None

    @property
    def over(self) -> bool:
        return self.error is not None or len(self.finished | self.gone) == len(self.update.receivers)

    @property
    def everywhere(self) -> bool:
        """Whether every receiver has all of it, and may apply it."""
        return len(self.staged) == len(self.update.receivers)

    @property
    def end(self) -> End | None:
        return self.ends[0] if len(self.ends) == len(self.update.senders) else None


class Board:
    """An asynchronous actor: one loop, one update at a time, the newest."""

    def __init__(self) -> None:
        self._state: _State | None = None
        self._changed = asyncio.Condition()
        self._watcher: asyncio.Task[None] | None = None

    async def is_there(self) -> bool:
        return True

    async def open(self, update: Update) -> None:
        """Takes part in an update. The first one ends what was before.

        Raises:
            StaleVersionError: there is a newer one.
        """
        newest = -1 if self._state is None else self._state.update.number
        if update.number < newest:
            raise StaleVersionError(f"update {update.number} is over: {newest} has begun")
        if update.number == newest:
            return
        if self._watcher is not None:
            self._watcher.cancel()
        self._state = _State(update)
        self._watcher = asyncio.get_running_loop().create_task(self._watch(self._state))
        await self._tell()

    async def post(self, number: int, bucket: Bucket) -> None:
        """A sender has written it."""
        self._of(number).buckets[bucket.number] = bucket
        await self._tell()

    async def finish(self, number: int, rank: int, end: End) -> None:
        """A sender has posted all of its buckets.

        Raises:
            PlanError: senders saw other tensors, and so nobody has got anything.
        """
        state = self._of(number)
        state.ends[rank] = end
        for other, its in state.ends.items():
            if its != end:
                e = PlanError(f"trainers {other} and {rank} do not send the same: {_differences(its, end)}")
                await self._fail(state, e)
                raise e
        await self._tell()

    async def fail(self, number: int, why: str) -> None:
        """Ends the update for everybody who has not got all of it."""
        if self._state is not None and self._state.update.number == number and not self._state.everywhere:
            await self._fail(self._state, SyncAbortedError(why))

    async def check(self, number: int) -> None:
        """Raises why an update has ended, if it has."""
        self._of(number)

    async def buckets(self, number: int, begin: int) -> tuple[list[Bucket], End | None]:
        """The buckets from that one on without a gap, as far as there are some; and the end, once every sender is there. Waits for news."""

        def news(state: _State) -> tuple[list[Bucket], End | None] | None:
            found, at = [], begin
            while (bucket := state.buckets.get(at)) is not None:
                found.append(bucket)
                at += 1
            return (found, state.end) if found or (state.end is not None and at >= state.end.buckets) else None

        return await self._when(number, news) or ([], None)

    async def all_staged(self, number: int, rank: int) -> bool:
        """A receiver has all of it on its node. Waits until every one has: True; False: ask again."""
        self._of(number).staged.add(rank)
        await self._tell()
        return await self._when(number, lambda state: state.everywhere or None) or False

    async def take(self, number: int, rank: int, buckets: int) -> None:
        """A receiver needs the first so many buckets no more."""
        self._of(number).taken[rank] = buckets
        await self._tell()

    async def taken(self, number: int, buckets: int) -> int:
        """Waits until every receiver has taken so many buckets. Returns how many all have; 0: ask again."""

        def least(state: _State) -> int | None:
            now = min(state.taken.get(rank, 0) for rank in range(len(state.update.receivers)))
            return now if now >= buckets else None

        return await self._when(number, least) or 0

    async def applied(self, number: int, rank: int) -> None:
        """A receiver has handed on all of it."""
        self._of(number).finished.add(rank)
        await self._tell()

    # ---- within

    def _of(self, number: int) -> _State:
        state = self._state
        if state is None or state.update.number != number:
            raise StaleVersionError(f"update {number} is over")
        if state.error is not None:
            raise type(state.error)(*state.error.args)  # its own for each: raised again, one would keep the frames of all
        return state

    async def _when(self, number: int, look: Callable[[_State], Any]) -> Any:
        """What `look` finds, once that is something; None, if it is not within some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S), self._changed:
                while (found := look(self._of(number))) is None:
                    await self._changed.wait()
                return found
        return None

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _fail(self, state: _State, e: Exception) -> None:
        if state.error is None:
            state.error = e
            await self._tell()

    async def _watch(self, state: _State) -> None:
        """Notices who dies while an update is under way."""
        while not state.over:
            await asyncio.sleep(_WATCH_S)
            try:
                await self._bury(state)
            except Exception:  # Ray's control store is away for a moment; whoever waits has a deadline
                logger.exception("mooncake_ray: update %d", state.update.number)

    async def _bury(self, state: _State) -> None:
        update = state.update
        dead = await asyncio.to_thread(_dead, {*update.senders, *update.receivers})
        for rank, actor in enumerate(update.receivers):
            if actor in dead and rank not in state.gone | state.finished:
                state.gone.add(rank)
                await self.fail(update.number, f"rollout rank {rank} died before every one had the new weights")
        for rank, actor in enumerate(update.senders):
            if actor in dead:
                await self.fail(update.number, f"trainer rank {rank} died before its weights were everywhere")


def new_board() -> Any:
    """A board of this process's, on its node: soft, Ray would start what needs no resources on any."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Board).options(num_cpus=0, max_concurrency=10_000, scheduling_strategy=here).remote()


def live_board(known: Iterable[Any]) -> Any:
    """One of these that lives, or a new one."""
    for board in {b._actor_id.hex(): b for b in known if b is not None}.values():
        try:
            if ray.get(board.is_there.remote(), timeout=_ANSWER_S):
                return board
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            continue
    return new_board()


def _dead(actors: Collection[str]) -> set[str]:
    known = [actor for actor in actors if actor]
    return {actor for actor, is_dead in zip(known, lives.dead(known), strict=True) if is_dead}


def _differences(a: End, b: End) -> str:
    said = [(name, getattr(a, name), getattr(b, name)) for name in ("version", "buckets", "nbytes", "digest")]
    return "; ".join(f"{name} {x} and {y}" for name, x, y in said if x != y)
