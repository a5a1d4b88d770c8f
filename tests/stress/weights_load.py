"""The load of `stress weights`: a driver on node 0, with trainer ranks and engines on the others, which get version after version while their
processes, and the group's coordinator, are killed.

Says what it has done, and is told to stop, as `stress.chaos_load`. After every sync, whatever became of it, each engine that serves must serve
exactly the version it says, on all its ranks.
"""

from __future__ import annotations

import json
import random
import select
import sys
import time
from collections import Counter
from typing import Any

from stress.chaos_load import kind_of

SYNC_S = 30.0
LATE_S = SYNC_S + 30.0
_PAUSED = -2
_READY_S = 120.0
_TOLD_S = 5.0
_MODES = ("auto", "p2p", "nccl", "delta")
_TRAINERS, _RANKS = 2, 2
_SHAPES = {f"model.layers.{n}.w{i}.weight": (64 * _RANKS * _TRAINERS, 96) for n in range(4) for i in range(3)} | {
    "model.norm.weight": (96,)
}


def whole(name: str, seed: int) -> Any:
    """A tensor as it is at that seed: a few of its elements differ from those at the one before."""
    import torch

    n = torch.Size(_SHAPES[name]).numel()
    at = torch.arange(n, dtype=torch.int64)
    return ((at * 7919 + (seed + at % 50) // 50 * 31) & 0x3FFF).to(torch.int16).view(torch.bfloat16).view(_SHAPES[name])


def cut(seed: int, rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    parts, boxes = {}, {}
    for name, shape in _SHAPES.items():
        tensor, lo = whole(name, seed), [0] * len(shape)
        if len(shape) > 1:
            n = shape[0] // world
            tensor, lo[0] = tensor[rank * n : (rank + 1) * n], rank * n
        parts[name], boxes[name] = tensor.clone(), (shape, tuple(lo))
    return parts, boxes


class Trainer:
    def __init__(self, group: Any, rank: int) -> None:
        from mooncake_ray.weights.source import StateDictSource

        self.rank = rank
        self.parts, boxes = cut(0, rank, _TRAINERS)
        self.member = group.trainer(StateDictSource(self.parts, boxes), rank, _TRAINERS, timeout_s=_READY_S)

    def train(self, seed: int) -> None:
        for name, tensor in cut(seed, self.rank, _TRAINERS)[0].items():
            self.parts[name].copy_(tensor)


class Engine:
    def __init__(self, group: Any, name: str, rank: int, world: int) -> None:
        import torch

        from mooncake_ray.engines.torch_module import TorchModuleEngine
        from mooncake_ray.weights.source import StateDictSource

        self.rank, self.world = rank, world
        self.parts, boxes = cut(0, rank, world)
        self.engine = TorchModuleEngine(torch.nn.Module(), shard=StateDictSource(self.parts, boxes))
        self.member = group.engine(self.engine, name, rank, world, timeout_s=_READY_S)

    def serves(self, newest: int) -> tuple[int, str]:
        """The version that it serves (-1: none; -2: it is paused), and "" or what is wrong with that."""
        import torch

        from mooncake_ray.errors import EnginePausedError, EnginePoisonedError

        if self.engine.is_paused:
            return _PAUSED, ""
        try:
            with self.engine.serving() as version:
                if version is None:
                    return -1, ""
                if not 0 < version <= newest:
                    return version, f"serves version {version}, which nobody has published"
                want, _ = cut(version, self.rank, self.world)
                wrong = [n for n, t in want.items() if not torch.equal(t.view(torch.int16), self.parts[n].view(torch.int16))]
                return version, f"says it serves version {version}, and {len(wrong)} tensors are another's: {wrong[:2]}" if wrong else ""
        except (EnginePausedError, EnginePoisonedError):
            return -1, ""


class Load:
    def __init__(self, nodes: int, seed: int) -> None:
        import ray

        import mooncake_ray
        from mooncake_ray.sync.group import WeightSyncGroup

        mooncake_ray.install(capacity_bytes=128 << 20, prefault_bytes=16 << 20, spill_dir="off", pull_timeout_s=10.0)
        ray.init(log_to_driver=False)
        self._ray, self._rng, self._nodes = ray, random.Random(seed), nodes
        self._group = WeightSyncGroup("chaos", liveness_s=6.0)
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self._seed = 0  # and version: they are the same
        self._trainers = [self._trainer(rank) for rank in range(_TRAINERS)]
        self._engines = {"e0": self._engine("e0", 2), "e1": self._engine("e1", 2), "e2": self._engine("e2", 1)}
        ray.get([a.__ray_ready__.remote() for a in self._actors()], timeout=_READY_S)

    def _on(self) -> dict[str, Any]:
        return {"num_cpus": 0, "resources": {f"node{self._rng.randrange(1, self._nodes)}": 0.01}}

    def _trainer(self, rank: int) -> Any:
        return self._ray.remote(Trainer).options(**self._on()).remote(self._group, rank)

    def _engine(self, name: str, world: int) -> list[Any]:
        return [self._ray.remote(Engine).options(**self._on()).remote(self._group, name, rank, world) for rank in range(world)]

    def _actors(self) -> list[Any]:
        return [*self._trainers, *(e for ranks in self._engines.values() for e in ranks)]

    def step(self) -> None:
        """One version, in which somebody may die; then everybody is looked at, and who died is started again."""
        self._heal()
        self._seed += 1
        if not self._try("train", lambda: self._ray.get([t.train.remote(self._seed) for t in self._trainers], timeout=_READY_S)):
            return
        mode = self._rng.choice(_MODES)
        before = time.monotonic()
        ref = self._group.async_sync(self._seed, mode=mode, timeout_s=SYNC_S)
        if self._rng.random() < 0.6:
            time.sleep(self._rng.uniform(0.0, 0.4))
            self._kill()

        def done() -> None:
            report = self._ray.get(ref, timeout=LATE_S)
            self.counts[f"syncs_{report.mode}"] += 1
            self.counts["engines_lost"] += len(report.lost)
            self.counts["fallbacks"] += len(report.fallbacks)

        self._try(f"sync_{mode}", done)
        if (took := time.monotonic() - before) > LATE_S:
            self.violations.append(f"a sync by {mode} took {took:.0f} s, with a deadline of {SYNC_S:.0f}")
        self._look()

    def _look(self) -> None:
        for name, ranks in self._engines.items():
            end = time.monotonic() + _READY_S
            while True:
                said, alive = [], True
                for rank in ranks:
                    try:
                        said.append(self._ray.get(rank.serves.remote(self._seed), timeout=_READY_S))
                    except self._ray.exceptions.RayActorError:
                        said.append((-1, ""))
                        alive = False
                # A rank that has a version waits, paused, for the others; not for ever, unless one of them is dead.
                if not alive or all(version != _PAUSED for version, _ in said):
                    break
                if time.monotonic() > end:
                    self.violations.append(f"{name} stays paused, and all its ranks live: {said}")
                    break
                time.sleep(0.2)
            self.violations += [f"{name}/{r}: {wrong}" for r, (_, wrong) in enumerate(said) if wrong]
            versions = {v for v, _ in said}
            if len(versions - {-1, _PAUSED}) > 1:
                self.violations.append(f"{name} serves a mixture: its ranks have versions {[v for v, _ in said]}")
            self.counts["looks"] += 1

    def _kill(self) -> None:
        kind = self._rng.choice(["trainers", "engines", "engines", "coordinator"])
        if kind == "coordinator":
            self._ray.kill(self._group._handle, no_restart=False)
        else:
            self._ray.kill(self._rng.choice(self._trainers if kind == "trainers" else [e for r in self._engines.values() for e in r]))
        self.counts[f"{kind}_killed"] += 1

    def _heal(self) -> None:
        """Starts again what died: of an engine, all ranks."""
        for rank, trainer in enumerate(self._trainers):
            if not self._lives(trainer):
                self._trainers[rank] = self._trainer(rank)
        for name, ranks in list(self._engines.items()):
            if not all([self._lives(e) for e in ranks]):
                for e in ranks:
                    self._ray.kill(e)
                self._engines[name] = self._engine(name, len(ranks))
        self._try("start", lambda: self._ray.get([a.__ray_ready__.remote() for a in self._actors()], timeout=_READY_S))

    def _lives(self, actor: Any) -> bool:
        try:
            self._ray.get(actor.__ray_ready__.remote(), timeout=_READY_S)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
            return False
        return True

    def _try(self, what: str, do: Any) -> bool:
        try:
            do()
        except Exception as e:
            self._judge(what, e)
            return False
        return True

    def _judge(self, what: str, e: Exception) -> None:
        if kind := kind_of(e):
            self.counts[f"{what.split('_')[0]}_{kind}"] += 1
        else:
            self.violations.append(f"{what}: untyped {type(e).__name__}: {str(e)[-600:]}")

    def end(self) -> None:
        """All is mended: everybody gets a last version."""
        for attempt in range(3):
            self._heal()
            self._seed += 1
            try:
                self._ray.get([t.train.remote(self._seed) for t in self._trainers], timeout=_READY_S)
                self._group.sync(self._seed, mode="p2p", timeout_s=2 * SYNC_S)
                self._group.wait_for(self._seed, timeout_s=2 * SYNC_S)
                break
            except Exception as e:
                if attempt == 2:
                    self.violations.append(f"after all was mended, a sync failed: {type(e).__name__}: {str(e)[-600:]}")
        self._look()
        versions = self._group.versions()
        if len(set(versions.values())) != 1 or len(versions) != len(self._engines):
            self.violations.append(f"after all was mended, engines serve {dict(versions)}")
        self._group.shutdown()


def say(load: Load, **more: Any) -> None:
    print(json.dumps({"counts": load.counts, "violations": load.violations, **more}), flush=True)


def main() -> None:
    load = Load(int(sys.argv[1]), int(sys.argv[2]))
    say(load)
    told = time.monotonic()
    while not select.select([sys.stdin], [], [], 0)[0] and not load.violations:
        load.step()
        if time.monotonic() - told > _TOLD_S:
            told = time.monotonic()
            say(load)
    load.end()
    say(load, over=True)


if __name__ == "__main__":
    main()
