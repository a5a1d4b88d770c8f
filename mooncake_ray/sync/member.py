"""What every member of a group does, in threads of its own process: hears the coordinator, carries out, answers; joins again when it must."""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray._private import worker as ray_worker

from mooncake_ray.errors import MooncakeRayError, SyncAbortedError, SyncTimeoutError, WeightSyncError
from mooncake_ray.sync.messages import Command, GivenUpError, Join, Member, Report
from mooncake_ray.transfer.deadline import Deadline, Pauses

__all__ = ["MEMBER_CALL_S", "Agent", "this_member"]

logger = logging.getLogger("mooncake_ray")

MEMBER_CALL_S = 30.0  # of one call to the coordinator; a poll is shorter


def this_member(role: Any, unit: str, rank: int, world: int) -> Member:
    """A member that is this process."""
    context = ray.get_runtime_context()
    return Member(uuid.uuid4().hex, role, unit, rank, world, ray_worker.global_worker.node_ip_address, context.get_actor_id() or "")


class Agent:
    """Thread-safe. Subclasses say what they can do: a method `do_X` for each command X, in one thread, and `hear` for what they are told
    meanwhile."""

    def __init__(self, find: Callable[[], Any], member: Member) -> None:
        """`find`: the coordinator's handle, as it is now."""
        self._find, self.member = find, member
        self._coordinator = find()
        self._closed = threading.Event()
        self._work: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._epoch = -1
        self._aborted = -1  # epochs up to there
        self.joined = threading.Event()
        self.failed: WeightSyncError | None = None
        self._threads = [
            threading.Thread(target=target, name=f"mooncake_ray.{name}", daemon=True)
            for name, target in (("sync", self._listen), ("sync-work", self._carry_out))
        ]

    def start(self, timeout_s: float) -> None:
        """Joins. Raises SyncTimeoutError, or why the coordinator will not have it."""
        for thread in self._threads:
            thread.start()
        if not self.joined.wait(timeout_s):
            self.close()
            raise SyncTimeoutError(f"{self.member} has not joined its group within {timeout_s:g} s")
        if self.failed is not None:
            raise self.failed

    @property
    def closed(self) -> bool:
        """Whether it has left the group, or the group has ended."""
        return self._closed.is_set()

    def close(self) -> None:
        """Leaves the group. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._work.put(None)
        try:
            self._coordinator.leave.remote(self.member.id)
        except Exception as e:  # Ray is going, too
            logger.debug("mooncake_ray: %s could not say that it leaves: %s", self.member, e)
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(10)

    def describe(self) -> Join:
        """What it is and has, now."""
        raise NotImplementedError

    def hear(self, command: Command) -> None:
        """Something that needs no answer, while a command may be under way."""

    def let_go(self, epoch: int) -> None:
        """What there is of that update, or earlier ones, is of no use any more."""

    def call(self, method: str, *arguments: Any, timeout_s: float = MEMBER_CALL_S) -> Any:
        """Asks the coordinator, whichever there is, until it answers.

        Raises:
            SyncTimeoutError: it has not, in time.
        """
        deadline, pauses = Deadline(timeout_s), Pauses()
        while True:
            try:
                return ray.get(getattr(self._coordinator, method).remote(*arguments), timeout=max(0.001, deadline.at - time.monotonic()))
            except ray.exceptions.GetTimeoutError:
                raise SyncTimeoutError(f"{self.member}: the coordinator has not answered {method!r} within {timeout_s:g} s") from None
            except ray.exceptions.RayTaskError as e:
                raise e.as_instanceof_cause() if e.cause is None else e.cause from None
            except (ray.exceptions.RayActorError, ValueError) as e:  # it died, and comes again; or there is none of that name yet
                if deadline.over or self._closed.is_set():
                    raise SyncTimeoutError(f"{self.member}: no coordinator for {method!r} within {timeout_s:g} s: {e}") from None
                self._closed.wait(pauses.next())
                self._look()

    def tell(self, method: str, *arguments: Any) -> None:
        """Tells the coordinator, if there is one, and does not wait."""
        getattr(self._coordinator, method).remote(*arguments)

    def _look(self) -> None:
        try:
            self._coordinator = self._find()
        except ValueError as e:
            logger.debug("mooncake_ray: no coordinator: %s", e)

    def check(self, epoch: int) -> None:
        """Raises GivenUpError if that update was given up."""
        if epoch <= self._aborted or self._closed.is_set():
            raise GivenUpError(f"epoch {epoch} was given up")

    # ---- threads

    def _listen(self) -> None:
        pauses = Pauses()
        known = False
        while not self._closed.is_set():
            try:
                if not known:
                    self.call("join", self.describe())
                    known = True
                    self.joined.set()
                commands = self.call("poll", self.member.id)
                pauses.reset()
                if commands is None:
                    known = False
                    continue
            except Exception as e:  # Ray raises several kinds while it, or the coordinator, comes and goes
                if not self.joined.is_set() and isinstance(e, WeightSyncError) and not isinstance(e, SyncTimeoutError):
                    self.failed = e
                    self.joined.set()
                    return
                if self._closed.is_set() or not ray.is_initialized():
                    return
                logger.warning("mooncake_ray: %s cannot hear its coordinator: %r", self.member, e)
                known = False
                self._closed.wait(pauses.next())
                continue
            for command in commands:
                over = command.epoch - (command.what != "abort")  # who asks for something new has given up what was before
                if over > self._aborted:
                    self._aborted = over
                    self.hear(command)
                if command.what == "end":
                    self.close()
                elif command.what == "unit":
                    self.hear(command)
                else:
                    self._work.put(command)

    def _carry_out(self) -> None:
        while (command := self._work.get()) is not None:
            if command.what == "abort":
                self.let_go(command.epoch)
                continue
            value: Any = None
            error: WeightSyncError | None = None
            try:
                if command.number >= 0:  # what needs no answer is tidying up: that is never given up
                    if command.epoch < self._epoch:
                        raise GivenUpError(f"epoch {command.epoch} is over; this member is at {self._epoch}")
                    self._epoch = command.epoch
                    self.check(command.epoch)
                value = getattr(self, f"do_{command.what}")(command)
            except WeightSyncError as e:
                error = e
            except (MooncakeRayError, TimeoutError) as e:
                error = _plain(e)
            except Exception as e:  # of a model's or an engine's own code
                logger.exception("mooncake_ray: %s failed at %s", self.member, command.what)
                error = WeightSyncError(f"{command.what}: {type(e).__name__}: {e}")
            if command.number < 0:
                continue
            if isinstance(error, GivenUpError):
                logger.info("mooncake_ray: %s: %s", self.member, error)
            try:
                self.call("answer", Report(self.member.id, command.number, value, error))
            except WeightSyncError as e:
                logger.warning("mooncake_ray: %s: nobody heard that it is done: %s", self.member, e)
            del value, error  # what an error's frames hold, others may wait for


def _plain(e: BaseException) -> WeightSyncError:
    """An error of the data plane, as one of the weight plane that says which it was."""
    kind = SyncTimeoutError if isinstance(e, TimeoutError) else SyncAbortedError
    return kind(f"{type(e).__name__}: {e}")
