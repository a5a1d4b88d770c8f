"""`Producers`: a loop's rollout workers, which are kept at work as long as there is room for what they make."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray

from mooncake_ray.errors import ConfigError, LeaseLostError, MooncakeRayError, ObjectLostError, StoreError, StoreFullError
from mooncake_ray.loops.metrics import Timeline
from mooncake_ray.loops.settings import LoopSettings
from mooncake_ray.loops.tasks import Rolled, RolloutTask
from mooncake_ray.rollout.buffer import RolloutBuffer
from mooncake_ray.rollout.lent import Ticket

__all__ = ["Producers"]

logger = logging.getLogger("mooncake_ray")

_LOOK_S = 0.25  # between looks whether it shall end
_JOIN_S = 30.0
_PORTERS = 4

Actor = ray.actor.ActorHandle
Lost = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.WorkerCrashedError, ObjectLostError)
"""Nobody's fault: what was made is made again."""


@dataclass(frozen=True)
class _Call:
    worker: int
    ticket: Ticket
    uids: tuple[str, ...]
    """Those of the ticket's groups that this call makes."""
    begin_s: float
    deadline: float


class Producers:
    """One thread gives workers something to do, and others bring what they have made into the buffer. They see refs only."""

    def __init__(
        self,
        buffer: RolloutBuffer,
        workers: Sequence[Actor],
        rewards: Sequence[Actor],
        prompts: Callable[[int], Any],
        settings: LoopSettings,
        timeline: Timeline,
        can_sample: Callable[[], bool],
        *,
        group_size: int,
        first: int = 0,
        limited: bool,
    ) -> None:
        """
        Args:
            prompts: What the n-th group is made from. Called in one thread, in order, and again for a group that is begun again.
            can_sample: Whether all workers' engines have weights. Those that Ray has started again wait for it.
            first: The number of the first group.
            limited: They make only as many groups as `ask_for` has said, all together.
        """
        if not workers:
            raise ConfigError("a loop needs at least one rollout worker")
        self._buffer, self._settings, self._timeline = buffer, settings, timeline
        self._workers, self._rewards, self._prompts, self._can_sample = list(workers), list(rewards), prompts, can_sample
        self._group_size = group_size
        self._next, self._asked = first, first if limited else None
        self._changed = threading.Condition()
        self._calls: dict[ray.ObjectRef, _Call] = {}
        self._revivals: dict[int, list[ray.ObjectRef]] = {}  # workers that died: when these are there, they and their rewards are again
        self._gone: set[int] = set()
        self._failures: Counter[str] = Counter()
        self._error: BaseException | None = None
        self._ending = False
        self._threads: list[threading.Thread] = []
        self._porters = ThreadPoolExecutor(_PORTERS, "mooncake_ray.loop.bring")
        self._arriving = 0  # calls that have ended, and what they have made is on its way into the buffer
        self.failures = 0

    @property
    def next(self) -> int:
        """The number of the next group that is begun."""
        return self._next

    @property
    def is_idle(self) -> bool:
        """Whether all that they were asked for is made."""
        with self._changed:
            nothing_comes = not (self._calls or self._arriving or self._revivals)
            return nothing_comes and self._asked is not None and self._next >= self._asked

    def start(self) -> None:
        for target in (self._give, self._bring):
            thread = threading.Thread(target=self._guarded, args=(target,), name=f"mooncake_ray.loop.{target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def ask_for(self, groups: int) -> None:
        """So many groups more."""
        with self._changed:
            self._asked = (self._next if self._asked is None else self._asked) + groups
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what has ended them."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Gives back what is not done. Calls that run are left to themselves: what they make is nobody's. Idempotent."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._porters.shutdown()
        calls, self._calls = self._calls, {}
        for ref, call in calls.items():
            ray.cancel(ref, recursive=False)
            self._give_back(call.ticket, call.uids)

    # ---- giving

    def _give(self) -> None:
        most = self._settings.groups_per_call
        while (free := self._free()) is not None:
            if (ticket := self._ticket(len(free) * most)) is None:
                continue
            for worker, begin in zip(free, range(0, len(ticket.uids), most), strict=False):
                try:
                    self._call(worker, ticket, slice(begin, begin + most))
                except BaseException:  # of the user's `prompts`
                    self._give_back(ticket, ticket.uids[begin:])
                    raise

    def _free(self) -> list[int] | None:
        """Waits for workers that can get calls; each once for each call, those that have least to do first. None: it shall end."""
        with self._changed:
            while not self._ending:
                busy = Counter(call.worker for call in self._calls.values())
                alive = [worker for worker in range(len(self._workers)) if worker not in self._gone and worker not in self._revivals]
                calls = [(n, worker) for worker in alive for n in range(busy[worker], self._settings.calls_per_worker)]
                if calls:
                    return [worker for _, worker in sorted(calls)]
                self._changed.wait(_LOOK_S)
        return None

    def _ticket(self, most: int) -> Ticket | None:
        """For groups that somebody has begun, or else for new ones, at most so many. None: not now."""
        with self._changed:
            left = most if self._asked is None else min(most, self._asked - self._next)
        if left <= 0:
            if (ticket := self._buffer.resume(most)) is None:
                with self._changed:
                    self._changed.wait(_LOOK_S)
            return ticket
        few = min(left, self._settings.groups_per_call)
        begin = time.monotonic()
        for count, patience_s in ((left, 0.0), (few, _LOOK_S)):
            try:
                ticket = self._buffer.work([self._uid(self._next + n) for n in range(count)], timeout_s=patience_s)
            except StoreFullError:
                continue
            if not ticket.works:
                with self._changed:
                    self._next += count
            return ticket
        self._timeline.stalled("room", time.monotonic() - begin)
        return None

    def _uid(self, number: int) -> str:
        return f"{self._buffer.name}-{number}"

    def _call(self, worker: int, ticket: Ticket, part: slice) -> None:
        uids = ticket.uids[part]
        numbers = [int(uid.rpartition("-")[2]) for uid in uids]
        begun = tuple(work.ref for work in ticket.works[part]) or (None,) * len(uids)
        task = RolloutTask(uids, tuple(self._prompts(n) for n in numbers), begun, self._group_size)
        rollout, *reward = self._of(worker)
        ref = rollout.generate.remote(task)
        for actor in reward:
            ref = actor.score.remote(ref)
        call = _Call(worker, ticket, uids, self._timeline.now_s, time.monotonic() + self._settings.generate_timeout_s)
        with self._changed:
            self._calls[ref] = call
            self._changed.notify_all()

    def _of(self, worker: int) -> list[Actor]:
        """The worker, and the reward that its samples go to."""
        return [self._workers[worker], *([self._rewards[worker % len(self._rewards)]] if self._rewards else [])]

    # ---- bringing

    def _bring(self) -> None:
        while not self._ending:
            with self._changed:
                refs = list(self._calls)
                if not refs:
                    self._changed.wait(_LOOK_S)
            for ref in ray.wait(refs, num_returns=1, timeout=_LOOK_S)[0] if refs else ():
                self._made(ref)
            self._end_late_calls()
            self._look_after_the_dead()

    def _made(self, ref: ray.ObjectRef) -> None:
        """The worker may get something else; what it has made is brought into the buffer meanwhile."""
        call = self._calls[ref]
        rolled, alive = None, True
        try:
            rolled = ray.get(ref, timeout=_JOIN_S)
        except Lost as e:
            logger.warning("mooncake_ray: %s of rollout worker %d are made again: %s", list(call.uids), call.worker, e)
            alive = False
        except (ray.exceptions.RayError, MooncakeRayError) as e:
            self._failed(call, e)
        self._timeline.add(f"rollout {call.worker}", "generate", call.begin_s)
        with self._changed:
            del self._calls[ref]
            self._arriving += 1
            if not alive:
                self.failures += 1
                self._revivals.setdefault(call.worker, self._ready(call.worker))
            self._changed.notify_all()
        self._porters.submit(self._guarded, lambda: self._arrived(call, rolled))

    def _arrived(self, call: _Call, rolled: Rolled | None) -> None:
        """None: nothing has."""
        try:
            if rolled is None or not self._put(call, rolled):
                self._give_back(call.ticket, call.uids)
        finally:
            with self._changed:
                self._arriving -= 1
                self._changed.notify_all()

    def _put(self, call: _Call, rolled: Rolled) -> bool:
        """Whether all groups of the call are in the buffer."""
        try:
            return self._brought(call.ticket, rolled) == len(call.uids)
        except Lost as e:
            logger.warning("mooncake_ray: what rollout worker %d has made was lost: %s", call.worker, e)
        except LeaseLostError as e:  # others have them
            logger.warning("mooncake_ray: what rollout worker %d has made is not used: %s", call.worker, e)
        except StoreError:
            if not self._ending:
                raise
        except (ray.exceptions.RayError, MooncakeRayError) as e:
            self._failed(call, e)
        return False

    def _brought(self, ticket: Ticket, rolled: Rolled) -> int:
        """How many groups of the ticket have ended."""
        if not isinstance(rolled, Rolled):
            raise ConfigError(f"a rollout worker, or reward, answered with a {type(rolled).__name__}; expected a Rolled")
        if rolled.unfinished:
            part = rolled.take(rolled.rows_of(rolled.unfinished))
            ticket.park(part.batch, uids=list(part.uids), version=part.version)
            rolled, parked = rolled.take(rolled.rows_of(frozenset(rolled.uids) - rolled.unfinished)), len(rolled.unfinished)
        else:
            parked = 0
        if not len(rolled.uids):
            return parked
        brought = ticket.put(
            rolled.batch, uids=list(rolled.uids), version=rolled.version, tokens=rolled.tokens, priority=rolled.priority, tags=rolled.tags
        )
        return parked + brought.whole + brought.filtered

    def _failed(self, call: _Call, error: Exception) -> None:
        with self._changed:
            self.failures += 1
            self._failures.update(call.uids)
            often = max(self._failures[uid] for uid in call.uids)
        if often > self._settings.retries:
            raise error
        logger.warning("mooncake_ray: %s are made again, as rollout worker %d has failed: %s", list(call.uids), call.worker, error)

    def _look_after_the_dead(self) -> None:
        """Those that Ray has started again get something to do; those that it will not are gone."""
        for worker, refs in list(self._revivals.items()):
            if len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) < len(refs):
                continue
            try:
                ray.get(refs, timeout=_JOIN_S)
            except ray.exceptions.ActorUnavailableError:  # it is being started again
                self._revivals[worker] = self._ready(worker)
                continue
            except ray.exceptions.RayActorError as e:
                logger.warning("mooncake_ray: rollout worker %d, or its reward, is gone for good: %s", worker, e)
                self._gone.add(worker)
                if len(self._gone) == len(self._workers):
                    raise
            if worker not in self._gone and not self._can_sample():
                continue
            with self._changed:
                del self._revivals[worker]
                self._changed.notify_all()

    def _ready(self, worker: int) -> list[ray.ObjectRef]:
        return [actor.__ray_ready__.remote() for actor in self._of(worker)]

    def _end_late_calls(self) -> None:
        """Workers that do not answer are killed; Ray starts again those that may be."""
        now = time.monotonic()
        for call in list(self._calls.values()):
            if call.deadline < now:
                logger.warning(
                    "mooncake_ray: rollout worker %d has not answered within %g s, and is killed",
                    call.worker,
                    self._settings.generate_timeout_s,
                )
                ray.kill(self._workers[call.worker], no_restart=False)

    def _give_back(self, ticket: Ticket, uids: Sequence[str]) -> None:
        try:
            ticket.give_back(uids)
        except MooncakeRayError as e:
            logger.warning("mooncake_ray: %r could not be given back: %s", ticket, e)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:  # told by `check`, in the learner's thread
            with self._changed:
                self._error = self._error or e
                self._ending = True
                self._changed.notify_all()
