"""A storm over a Ray job: actors and workers die while they put, get, hold and pass on what is four times what the pool holds.

What the driver put, and what it once saw returned, must never be lost. Other losses must have one of Ray's names for them. In the end the
driver lets go of everything, and the pool must be empty.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.processes import family, name_of
from stress import content, ray_parts
from stress.content import CorruptError
from stress.outcome import Outcome, eventually, note

__all__ = ["Options", "run"]

_PROGRESS_S = 10.0
_HANG_S = 120.0
_PENDING = 12
_WORKERS = ("ray::Player", "ray::echo", "ray::IDLE")  # not Ray's agents, with which a node dies
_NAMES = ("leases", "pins", "claims", "objects", "removed_but_pinned", "used_bytes", "inline_bytes", "disk_bytes", "claims_unanswered")


@dataclass(frozen=True)
class Options:
    """How hard it blows."""

    seconds: float = 60.0
    kills_per_second: float = 0.3  # a new worker takes seconds to start
    seed: int = 0
    pool_bytes: int = 48 << 20
    actors: int = 4


@dataclass
class _Item:
    ref: Any
    seed: int
    sure: bool  # it cannot be lost: it is there, and the driver owns it


class _Storm:
    def __init__(self, options: Options, ray: Any) -> None:
        import mooncake_ray

        self.options, self.rng, self.ray = options, random.Random(options.seed), ray
        self.outcome = Outcome("storm over Ray", options.seed)
        self.counts: Counter[str] = Counter()
        self.items: list[_Item] = []
        self.pending: dict[Any, tuple[Callable[[Any], None], list[_Item]]] = {}  # call → what to do with its answer, and its arguments
        player = ray.remote(ray_parts.Player).options(num_cpus=0, max_restarts=-1)
        self.echo = ray.remote(ray_parts.echo)
        self.actors = [player.remote(self.seed()) for _ in range(options.actors)]
        self.stats: Callable[[], dict[str, Any]] = mooncake_ray.pool_stats
        ray.get([a.take.remote(content.value(7), 7) for a in self.actors])
        self.broker = self.stats()["pid"]
        e = ray.exceptions
        self.allowed = (e.RayActorError, e.OwnerDiedError, e.ObjectLostError, e.WorkerCrashedError)

    def seed(self) -> int:
        return self.rng.getrandbits(62) & ~1

    # ---- while it blows

    def blow(self) -> None:
        actions = {self.put: 3, self.make: 4, self.actor_put: 3, self.stream: 1, self.get: 4, self.take: 4, self.read: 2, self.task: 2}
        while self.size() < 2 * self.options.pool_bytes:
            self.put()
        start = told = due = time.monotonic()
        while (now := time.monotonic()) < start + self.options.seconds and not self.outcome.violations:
            if now - told >= _PROGRESS_S:
                told = now
                note(f"{now - start:5.0f} s: {', '.join(f'{k} {v:,}' for k, v in self.progress().items())}")
            if now >= due:
                due = now + self.rng.expovariate(self.options.kills_per_second)
                self.kill_one()
            self.rng.choices(list(actions), list(actions.values()))[0]()
            self.keep_within_bounds()
        self.outcome.demand(self.stats()["pid"] == self.broker, f"the broker {self.broker} has died")

    def progress(self) -> dict[str, int]:
        stats = self.stats()
        return {
            **self.counts,
            **{name: stats[name] for name in ("puts", "gets", "spill_written_bytes", "spill_read_bytes", "served_from_disk")},
        }

    def actor(self) -> Any:
        return self.rng.choice(self.actors)

    def some(self) -> _Item | None:
        return self.rng.choice(self.items) if self.items else None

    def call(self, ref: Any, done: Callable[[Any], None], *arguments: _Item) -> None:
        self.pending[ref] = done, list(arguments)

    def put(self) -> None:
        seed = self.seed()
        self.items.append(_Item(self.ray.put(content.value(seed)), seed, True))
        self.counts["driver_puts"] += 1

    def make(self) -> None:
        seed = self.seed()
        item = _Item(self.actor().make.remote(seed), seed, False)
        self.items.append(item)

    def stream(self) -> None:
        seeds = [self.seed() for _ in range(3)]
        generator = self.actor().stream.options(num_returns="streaming").remote(seeds)

        def read() -> None:
            for seed, ref in zip(seeds, generator, strict=False):  # it ends early where the actor died
                self.items.append(_Item(ref, seed, False))

        self.guard(read)

    def actor_put(self) -> None:
        seed = self.seed()
        self.call(self.actor().put.remote(seed), lambda refs: self.items.append(_Item(refs[0], seed, False)))

    def get(self) -> None:
        item = self.some()
        if item and self.ray.wait([item.ref], timeout=0)[0]:  # not one whose actor is being restarted
            self.guard(lambda: self.check(item), item)

    def check(self, item: _Item) -> None:
        content.check(self.ray.get(item.ref, timeout=_HANG_S), item.seed)
        self.counts["driver_gets"] += 1
        item.sure = item.sure or self.is_mine(item)

    def is_mine(self, item: _Item) -> bool:
        return self.ray._private.worker.global_worker.core_worker.get_worker_id().binary() in item.ref.owner_address()

    def take(self) -> None:
        if item := self.some():
            ref = self.actor().take.remote(item.ref, item.seed)
            self.call(ref, lambda value: content.check(value, item.seed), item)

    def task(self) -> None:
        if item := self.some():
            ref = self.echo.remote(item.ref, item.seed)
            self.items.append(_Item(ref, item.seed, False))

    def read(self) -> None:
        if self.items:
            several = self.rng.sample(self.items, min(3, len(self.items)))
            self.call(self.actor().read.remote([i.ref for i in several], [i.seed for i in several]), lambda _: None, *several)

    def guard(self, what: Callable[[], None], *items: _Item) -> None:
        """Does something; of what may happen, only the loss of something that died with its owner is in order."""
        try:
            what()
        except self.allowed as e:
            name = type(e.cause if isinstance(e, self.ray.exceptions.RayTaskError) else e).__name__
            self.counts[f"errors:{name}"] += 1
            lost = isinstance(e, self.ray.exceptions.ObjectLostError) and items and all(i.sure for i in items)
            self.outcome.demand(not lost, f"an object of the driver is lost: {e}")
            if len(items) == 1 and not items[0].sure:
                with contextlib.suppress(ValueError):
                    self.items.remove(items[0])
        except (CorruptError, self.ray.exceptions.RayError) as e:
            self.outcome.demand(False, f"{type(e).__name__}: {e}")

    def keep_within_bounds(self) -> None:
        while len(self.pending) > _PENDING:
            done, _ = self.ray.wait(list(self.pending), timeout=_HANG_S)
            self.outcome.demand(done, f"none of {len(self.pending)} calls has ended within {_HANG_S} s")
            if not done:
                return
            self.finish(done[0])
        size = self.size()
        while size > 4 * self.options.pool_bytes:
            item = self.items.pop(self.rng.randrange(len(self.items)))
            size -= content.size_of(item.seed)

    def size(self) -> int:
        """Bytes of what the driver has refs to."""
        return sum(content.size_of(i.seed) for i in self.items)

    def finish(self, ref: Any) -> None:
        done, items = self.pending.pop(ref)
        self.guard(lambda: done(self.ray.get(ref, timeout=_HANG_S)), *items)

    def kill_one(self) -> None:
        how = self.rng.choice(("ray.kill", "exit", "SIGKILL", "SIGKILL"))
        if how == "ray.kill":
            self.ray.kill(self.actor(), no_restart=False)
        elif how == "exit":
            self.actor().die.remote()
        else:
            workers = [pid for pid in family(os.getpid()) if name_of(pid).startswith(_WORKERS)]
            if not workers:
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.rng.choice(workers), signal.SIGKILL)
        self.counts[f"kills:{how}"] += 1

    # ---- when it is over

    def settle(self) -> None:
        """Looks at what must still be there; lets go of everything; then everything must be free."""
        while self.pending:
            self.finish(next(iter(self.pending)))
        while self.items:
            item = self.items.pop()
            self.guard(lambda item=item: self.check(item), item)
        del item
        self.outcome.counts = self.progress()
        while self.actors:
            self.ray.kill(self.actors.pop())
        gc.collect()
        left: dict[str, int] = {}

        def is_empty() -> bool:
            nonlocal left
            stats = self.stats()
            left = {name: stats[name] for name in _NAMES if stats[name]}
            return not left

        if not eventually(is_empty):
            from mooncake_ray.objects import session

            here = session.current()
            rows = json.loads(here.client.inspect())["object_rows"][:5] if here else []
            self.outcome.demand(False, f"left in the pool when the driver had let go of everything: {left}; among them {rows}")


def run(options: Options) -> Outcome:
    """Blows, settles, and tells."""
    import ray

    import mooncake_ray

    with tempfile.TemporaryDirectory(prefix="mooncake-storm-") as spill_dir:
        outcome = Outcome("storm over Ray", options.seed)
        try:
            ray_parts.start_ray(spill_dir, capacity_bytes=options.pool_bytes, prefault_bytes=options.pool_bytes, put_timeout_s=30.0)
            storm = _Storm(options, ray)
            outcome = storm.outcome
            storm.blow()
            storm.settle()
        except KeyboardInterrupt:
            outcome.interrupted = True
        finally:
            outcome.counts.setdefault("fallbacks", mooncake_ray.stats().get("fallbacks", 0))
            ray.shutdown()
            mooncake_ray.uninstall()
        return outcome
