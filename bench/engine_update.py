"""New weights for a real engine on a CPU, a model of about 100 M parameters: seconds until it serves them, and how long of these it is paused.

`pool` and `pool-delta` are a group's `sync` by p2p and by delta. The others are the engine's own ways: a checkpoint on the disk, tensors in a
request, a broadcast (gloo); `best-native` is the shortest of them in that case.
"""

from __future__ import annotations

import importlib
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

import mooncake_ray
from bench.engines.model import STEP_S, Updated, python_of
from bench.fleet import note
from bench.report import Result, Target, compare, summarize

__all__ = ["BASELINES", "Step", "plan", "run", "targets"]

NAME = "engine_update"
BASELINES = ("best-native",)
ENGINES = ("vllm", "sglang")
NATIVE = ("disk", "tensor", "distributed")
_CASES = ("total", "pause")
_ROUNDS = 5
_MOST = {"total": 0.5, "pause": 0.25}


@dataclass(frozen=True)
class Step:
    """One engine."""

    engine: str
    rounds: int


def plan(sizes: Sequence[str] | None = None, *, quick: bool = False, runs: int | None = None) -> list[Step]:
    """What to run; `sizes` are names of engines.

    Raises:
        ValueError: there is no such engine.
    """
    if unknown := [s for s in sizes or () if s not in ENGINES]:
        raise ValueError(f"no engine {unknown[0]!r}; there are {', '.join(ENGINES)}")
    return [Step(engine, runs or (1 if quick else _ROUNDS)) for engine in sizes or ENGINES]


def run(steps: Sequence[Step]) -> Iterator[list[Result]]:
    """Runs the steps; yields what each found."""
    mooncake_ray.install(capacity_bytes=4 << 30, prefault_bytes=1 << 30)
    here = str(Path(__file__).parents[1])
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": here}})
    try:
        address = ray.get_runtime_context().gcs_address
        for step in steps:
            yield _results(step, address)
    finally:
        ray.shutdown()
        mooncake_ray.uninstall()


def _results(step: Step, address: str) -> list[Result]:
    rng = random.Random(1)
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, _ways(step.engine, Path(folder), address) as ways:
        note(f"{step.engine} is up")
        for n in range(-1, step.rounds):
            began = time.monotonic()
            for subject in rng.sample(list(ways), len(ways)):
                total, pause = ways[subject]()
                if n >= 0:
                    took["total", subject].append(total)
                    took["pause", subject].append(pause)
            note(f"{step.engine}: round {n + 1} of {step.rounds}: {time.monotonic() - began:.0f} s")
    out = []
    for case in _CASES:
        name = f"{step.engine}/{case}"
        found = {subject: summarize(NAME, name, subject, took[case, subject]) for subject in ways}
        best = min((found[s] for s in NATIVE), key=lambda r: r.value)
        out += [found["pool"], found["pool-delta"], summarize(NAME, name, "best-native", took[case, best.subject], {"which": best.subject})]
        out += [found[s] for s in NATIVE]
    return out


@contextmanager
def _ways(engine: str, folder: Path, address: str) -> Iterator[dict[str, Callable[[], Updated]]]:
    """By the names of subjects, what brings the engine to weights that it has not had; can be called again and again.

    Args:
        folder: for checkpoints and logs.
        address: of the Ray cluster that this process is connected to, with the pool installed.
    """
    module = importlib.import_module(f"bench.engines.{engine}_ways")
    model = folder / "model"
    trainer = ray.remote(num_cpus=0)(module.Trainer).remote()
    group = mooncake_ray.WeightSyncGroup(f"bench-{engine}")
    ray.get([trainer.save.remote(str(model)), trainer.join.remote(group)])
    server = module.serve(python_of(engine), model, folder / f"{engine}.log")

    def own(name: str, *arguments: str) -> Updated:
        ray.get(trainer.step.remote())
        return ray.get(getattr(trainer, name).remote(*arguments), timeout=STEP_S)

    def ours(mode: str) -> Updated:
        group.sync(timeout_s=STEP_S)  # after one of its own ways, an engine has no version that a delta could change
        ray.get(trainer.step.remote())
        begin = time.perf_counter()
        report = group.sync(mode=mode, timeout_s=STEP_S)
        if report.mode != mode or not report.engines:
            raise RuntimeError(f"not synced by {mode}: {report}")
        return time.perf_counter() - begin, report.pause_s

    try:
        server.ready()
        ray.get(trainer.connect.remote(server.url))
        module.attach(server, group, address)
        yield {
            "pool": lambda: ours("p2p"),
            "pool-delta": lambda: ours("delta"),
            "disk": lambda: own("disk", str(model)),
            "tensor": lambda: own("tensor"),
            "distributed": lambda: own("distributed"),
        }
    finally:
        server.kill()
        group.shutdown()
        ray.kill(trainer)


def targets(results: Sequence[Result]) -> list[Target]:
    """What is asked of the package, and how near it came."""
    found = {(r.case, r.subject): r for r in results}

    def ratio(case: str, subject: str, most: float) -> Target:
        return compare(f"{case}: {subject} / best-native", found.get((case, subject)), found.get((case, "best-native")), most)

    return [ratio(f"{e}/{case}", ours, most) for e in ENGINES for case, most in _MOST.items() for ours in ("pool", "pool-delta")]
