"""`Seat`: a rank's part in an update: how it talks to the board, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Iterator
from typing import Any, Literal, TypeVar

import ray

from mooncake_ray.errors import MooncakeRayError, SyncAbortedError, SyncTimeoutError
from mooncake_ray.integrations.verl_weights.messages import Topology
from mooncake_ray.transfer.deadline import Deadline

__all__ = ["Seat"]

T = TypeVar("T")
_CALL_S = 30.0  # of one call to the board: longer than it takes to say that there is no news


class Seat:
    """From its making on there are `timeout_s` seconds. Coroutines may run in any event loop."""

    def __init__(self, topology: Topology, role: Literal["trainer", "rollout"], rank: int, timeout_s: float) -> None:
        self.update, self.rank = topology.update, rank
        self._board, self._rank_name = topology.board, f"{role} rank {rank}"
        self._deadline = Deadline(timeout_s)

    def __str__(self) -> str:
        return f"update {self.update.number}: {self._rank_name}"

    def left(self) -> float:
        """Seconds. Raises SyncTimeoutError if there are none."""
        left = self._deadline.at - time.monotonic()
        if left <= 0:
            raise self._late(self._deadline.timeout_s)
        return left

    async def within(self, what: Awaitable[T], most_s: float = math.inf) -> T:
        """Its result. Raises SyncTimeoutError: there is none in time, nor within `most_s` seconds."""
        left = self.left()
        try:
            async with asyncio.timeout(min(left, most_s)) as limit:
                return await what
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._late(self._deadline.timeout_s if left <= most_s else most_s) from None

    def _late(self, seconds: float) -> SyncTimeoutError:
        return SyncTimeoutError(f"{self} has not got on within {seconds:g} s")

    async def join(self) -> None:
        """Takes part. The first one ends the update before. Raises as `ask`."""
        await self.answer(self._board.open.remote(self.update))

    def tell(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the board's for this update, and does not wait. Returns what `answer` takes."""
        return getattr(self._board, method).remote(self.update.number, *arguments)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the board's for this update.

        Raises:
            SyncTimeoutError: it has not answered in time.
            SyncAbortedError: it is gone.
            MooncakeRayError: as the board raises it.
        """
        return await self.answer(self.tell(method, *arguments))

    async def answer(self, ref: Any) -> Any:
        """What the board answers. Raises as `ask`."""
        try:
            return await self.within(asyncio.wrap_future(ref.future()), _CALL_S)
        except ray.exceptions.RayTaskError as e:
            raise (e.cause if isinstance(e.cause, MooncakeRayError) else e) from None
        except ray.exceptions.RayActorError as e:
            raise SyncAbortedError(f"{self}: the actor through which ranks hear of each other is gone: {e}") from None

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tells the others if this rank does not get on."""
        try:
            yield
        except BaseException as e:
            why = "took only a part of its weights" if isinstance(e, GeneratorExit) else f"did not get on: {type(e).__name__}: {e}"
            self.tell("fail", f"{self._rank_name} {why}")
            raise
