"""A steady load for a long time: memory, descriptors and threads of every process must stay where they are.

The load is that of a small GRPO job with a pool a quarter of its data: rollout actors return batches, a replay buffer of refs keeps some of
them (on disk mostly), a trainer reads a mix and returns weights, which the rollout actors get by value. Once a second every process of the
session is looked at. At the end a line is fitted through the second half of each series: what would grow by more than its limit in an hour
has a leak. The first half is left out: allocators and caches fill in it. Ray's own servers are told of, and not judged.
"""

from __future__ import annotations

import collections
import os
import random
import time
from dataclasses import dataclass, field

from bench.processes import Usage, family, name_of, usage
from stress.outcome import Outcome, eventually, note

__all__ = ["LIMITS", "Options", "Series", "run", "slope"]

MIB = 1 << 20
LIMITS = {  # growth in an hour that may be noise: allocators hold on to a few MiB, a log rotates, a connection is cached
    "own": 64 * MIB,
    "descriptors": 20,
    "threads": 10,
}
_SHORTEST = 30  # samples of a process without which nothing is said of it
_MEMORY_FROM_S = 600.0  # in a shorter run, what a process takes to settle looks like growth
_RAYS = ("gcs_server", "raylet", "dashboard", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "log_monitor", "monitor")  # told, not judged
_NOTE_EVERY_S = 30.0


@dataclass(frozen=True)
class Options:
    seconds: float
    seed: int
    capacity_bytes: int = 256 * MIB
    batch_bytes: int = 8 * MIB
    kept: int = 96  # batches in the replay buffer


@dataclass
class Series:
    """What one process used, once a second."""

    name: str
    at: list[float] = field(default_factory=list)
    used: list[Usage] = field(default_factory=list)

    def grows(self) -> dict[str, float]:
        """By how much in an hour, by the second half: bytes, descriptors, threads."""
        half = len(self.at) // 2
        return {what: 3600 * slope(self.at[half:], [getattr(u, what) for u in self.used[half:]]) for what in LIMITS}


def slope(x: list[float], y: list[float]) -> float:
    """Of the line with the least squares through the points; 0 for fewer than two."""
    n = len(x)
    if n < 2:
        return 0.0
    mx, my = sum(x) / n, sum(y) / n
    spread = sum((a - mx) ** 2 for a in x)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


def run(options: Options) -> Outcome:
    """Needs a machine of its own for steady figures; judges growth only."""
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")  # Ray remembers 100,000 tasks, here and there
    import ray

    import mooncake_ray

    outcome = Outcome("soak", options.seed)
    mooncake_ray.install(capacity_bytes=options.capacity_bytes, prefault_bytes=options.capacity_bytes)
    ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False, object_store_memory=300 * MIB)
    series: dict[int, Series] = {}
    try:
        _load(options, outcome, series)
    except KeyboardInterrupt:
        outcome.interrupted = True
    stats = {}
    left = eventually(lambda: stats.update(mooncake_ray.pool_stats()) or stats["objects"] == 0)
    outcome.demand(left, f"{stats.get('objects')} objects stay in the pool when nothing refers to them")
    for what in ("leases", "claims", "disk_bytes"):
        outcome.demand(eventually(lambda: mooncake_ray.pool_stats()[what] == 0), f"{what} are left")  # noqa: B023 - called at once
    outcome.counts |= {name: stats[name] for name in ("puts", "gets", "bytes_put", "spill_written_bytes", "spill_read_bytes")}
    outcome.counts |= {"fallbacks": mooncake_ray.stats()["fallbacks"]}
    ray.shutdown()
    mooncake_ray.uninstall()
    _judge(series, outcome)
    return outcome


def _load(options: Options, outcome: Outcome, series: dict[int, Series]) -> None:
    import ray
    import torch

    words = options.batch_bytes // 8

    @ray.remote
    class Rollout:
        def __init__(self) -> None:
            self.weights = None

        def generate(self, seed: int, weights: object) -> dict[str, torch.Tensor]:
            self.weights = weights
            return {"seed": torch.full((1 << 15,), seed), "tokens": torch.full((words - (1 << 15),), seed)}

    @ray.remote
    class Trainer:
        def step(self, seeds: list[int], *batches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            for seed, batch in zip(seeds, batches, strict=True):
                if not all(bool((t == seed).all()) for t in batch.values()):
                    raise ValueError(f"the batch {seed} is not what was put")
                batch["tokens"].add_(1)  # private
            return {"w": torch.zeros(1 << 18)}

    rng = random.Random(options.seed)
    rollouts, trainer = [Rollout.remote() for _ in range(3)], Trainer.remote()
    replay: collections.deque[tuple[int, ray.ObjectRef]] = collections.deque(maxlen=options.kept)
    weights = ray.put({"w": torch.zeros(1 << 18)})
    steps, start = 0, time.monotonic()
    sampled = said = start
    while (now := time.monotonic()) - start < options.seconds:
        fresh = [(3 * steps + i, actor.generate.remote(3 * steps + i, weights)) for i, actor in enumerate(rollouts)]
        ready, _ = ray.wait([ref for _, ref in fresh], num_returns=len(fresh), timeout=300)
        outcome.demand(len(ready) == len(fresh), "a rollout did not come within 300 s")
        replay.extend(fresh)
        chosen = fresh + rng.sample(list(replay), min(3, len(replay)))
        try:
            weights = trainer.step.remote([seed for seed, _ in chosen], *[ref for _, ref in chosen])
            ray.wait([weights], timeout=300)
            ray.get(weights, timeout=300)
        except ray.exceptions.RayError as e:
            outcome.demand(False, f"step {steps}: {e}")
            return
        steps += 1
        if now - sampled >= 1:
            sampled = now
            _look(series, now - start)
        if now - said >= _NOTE_EVERY_S:
            said = now
            note(f"{now - start:6.0f} s  {steps} steps")
    outcome.counts["steps"] = steps


def _look(series: dict[int, Series], at: float) -> None:
    for pid in family(os.getpid()):
        if (used := usage(pid)) is not None:
            one = series.setdefault(pid, Series(name_of(pid)))
            one.at.append(at)
            one.used.append(used)


def _judge(series: dict[int, Series], outcome: Outcome) -> None:
    note(f"{'process':<28} {'seconds':>8} {'MiB own':>9} {'fds':>6} {'threads':>8}   growth in an hour: MiB, fds, threads")
    for pid, one in series.items():
        if len(one.at) < _SHORTEST:
            continue
        last, growth = one.used[-1], one.grows()
        note(
            f"{one.name[:20]:<20} {pid:>7} {one.at[-1] - one.at[0]:>8.0f} {last.own / MIB:>9.1f} {last.descriptors:>6} {last.threads:>8}"
            f"   {growth['own'] / MIB:+.1f}, {growth['descriptors']:+.1f}, {growth['threads']:+.1f}"
        )
        if one.name.startswith(_RAYS):
            continue
        for what, limit in LIMITS.items():
            if what == "own" and one.at[-1] - one.at[0] < _MEMORY_FROM_S:
                continue
            outcome.demand(
                growth[what] <= limit, f"{one.name} ({pid}): {what} grow by {growth[what]:,.0f} in an hour; the limit is {limit:,}"
            )
    outcome.counts["processes"] = len(series)
