"""What a coordinator asks of members, and how it waits for the answers: in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mooncake_ray.errors import SyncTimeoutError, WeightSyncError
from mooncake_ray.sync.messages import Command, Member, Report

__all__ = ["Mailbox", "MemberLostError"]


class MemberLostError(WeightSyncError):
    """A member ended, or was replaced, before it answered."""


class _Box:
    def __init__(self) -> None:
        self.commands: deque[Command] = deque()
        self.come = asyncio.Event()
        self.waiting: dict[int, asyncio.Future[Any]] = {}


class Mailbox:
    """Not thread-safe: for coroutines of one loop."""

    def __init__(self) -> None:
        self._boxes: dict[str, _Box] = {}
        self._numbers = itertools.count()

    def open(self, id: str) -> None:
        self._boxes[id] = _Box()

    def close(self, id: str, why: str) -> None:
        """Whoever waits for its answers is told so."""
        box = self._boxes.pop(id, None)
        if box is not None:
            box.come.set()
            for waiting in box.waiting.values():
                if not waiting.done():
                    waiting.set_exception(MemberLostError(why))

    async def take(self, id: str, wait_s: float) -> list[Command] | None:
        """The commands for a member, as soon as there are some, or when it is over; None for one that is not known."""
        box = self._boxes.get(id)
        if box is None:
            return None
        if not box.commands:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(box.come.wait(), wait_s)
        if self._boxes.get(id) is not box:
            return None
        box.come.clear()
        out = list(box.commands)
        box.commands.clear()
        return out

    def tell(self, member: Member, epoch: int, what: str, **arguments: Any) -> None:
        """A command without an answer. Nothing happens where the member is gone."""
        self._put(member, Command(-1, epoch, what, 0.0, arguments))

    def tell_all(self, members: Iterable[Member], epoch: int, what: str, **arguments: Any) -> None:
        for member in members:
            self.tell(member, epoch, what, **arguments)

    def _put(self, member: Member, command: Command) -> None:
        if (box := self._boxes.get(member.id)) is not None:
            box.commands.append(command)
            box.come.set()

    async def ask(
        self,
        members: Iterable[Member],
        epoch: int,
        what: str,
        timeout_s: float,
        arguments: Callable[[Member], Mapping[str, Any]] = lambda _: {},
        on_error: Callable[[], None] | None = None,
        together: bool = False,
    ) -> tuple[dict[Member, Any], dict[Member, WeightSyncError]]:
        """Has all of them do something. Returns what those answered who did, and the errors of the others, of whatever kind.

        Args:
            on_error: Called once when one could not (and not if it is gone): to have the others give up, say, who are waited for.
            together: They need all of them: `on_error` is called if one is gone, too.
        """
        futures: dict[Member, asyncio.Future[Any]] = {}
        values: dict[Member, Any] = {}
        errors: dict[Member, WeightSyncError] = {}
        numbers: dict[Member, int] = {}
        for member in members:
            box = self._boxes.get(member.id)
            if box is None:
                errors[member] = MemberLostError(f"{member} is gone")
                continue
            numbers[member] = next(self._numbers)
            futures[member] = box.waiting[numbers[member]] = asyncio.get_running_loop().create_future()
            self._put(member, Command(numbers[member], epoch, what, timeout_s, arguments(member)))

        def spoils(error: BaseException | None) -> bool:
            return error is not None and (together or not isinstance(error, MemberLostError))

        if on_error is not None and any(map(spoils, errors.values())):
            on_error()
            on_error = None
        loop = asyncio.get_running_loop()
        end, waiting = loop.time() + timeout_s, set(futures.values())
        while waiting and (left := end - loop.time()) > 0:
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
            if on_error is not None and any(spoils(f.exception()) for f in done):
                on_error()
                on_error = None
        for member, future in futures.items():
            if (box := self._boxes.get(member.id)) is not None:
                box.waiting.pop(numbers[member], None)
            if not future.done():
                errors[member] = SyncTimeoutError(f"{what} at {member}: not done within {timeout_s:g} s")
            elif (error := future.exception()) is not None:
                errors[member] = error if isinstance(error, WeightSyncError) else WeightSyncError(f"{type(error).__name__}: {error}")
            else:
                values[member] = future.result()
        return values, errors

    def answered(self, report: Report) -> None:
        box = self._boxes.get(report.member)
        future = box.waiting.get(report.number) if box is not None else None
        if future is not None and not future.done():
            if report.error is not None:
                future.set_exception(report.error)
            else:
                future.set_result(report.value)
