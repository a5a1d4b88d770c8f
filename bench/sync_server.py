"""`python -m bench.sync_server KIND POOL_BYTES`: trainers on nodes 1 to 4 of a cluster, engines on nodes 5 to 8; a version gets from these to
those. See `sync`.

What a tensor holds is worked out from its name, the version, and where an element is, so everybody can look whether it is right.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
import zlib
from typing import Any

import torch

from bench import serving, sync_model

__all__ = ["CASES", "SUBJECTS"]

SUBJECTS = {"pool": ("broadcast", "nccl", "p2p", "delta", "one")}
CASES = {"k2/tp4": ("tp4", 1), "k2/tp2dp2": ("tp2", 2), "k2/4-replicas": ("tp1", 4)}
"""Layout of an engine, and how many of them."""
_TRAINERS, _FIRST_ENGINE = 4, 5
_CHANGED = 50  # one element in so many, from one version to the next
_S = 200.0


def fill(parts: dict[str, torch.Tensor], boxes: dict[str, Any], version: int) -> None:
    """Makes them what they are at that version. In place."""
    for name, part in parts.items():
        shape, lo = boxes[name]
        index = torch.zeros((), dtype=torch.int64)
        step = 1
        for dim in range(len(shape) - 1, -1, -1):
            at = torch.arange(lo[dim], lo[dim] + part.shape[dim], dtype=torch.int64) * step
            index = index + at.view([-1 if d == dim else 1 for d in range(len(shape))])
            step *= shape[dim]
        seed = zlib.crc32(name.encode()) & 0x7FFF
        changes = (version + (_CHANGED - 1) - index % _CHANGED) // _CHANGED  # how often an element has changed by then
        bits = (index * 2654435761 + seed) >> 7 & 0x3FFF
        part.view(torch.int16).copy_(((bits + changes) & 0x3FFF).to(torch.int16))


def _cpu_s() -> float:
    """Seconds that this machine's CPUs have worked, all together."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _never() -> None:
    """Gives nothing up."""


class _Actor:
    def __init__(self, layout: str, rank: int) -> None:
        torch.set_num_threads(1)
        self.layout, self.rank = layout, rank
        self.parts, self.boxes = sync_model.parts(layout, rank)

    def ready(self) -> bool:
        return True

    def shard(self) -> Any:
        from mooncake_ray.weights.source import StateDictSource

        return StateDictSource(self.parts, self.boxes)


class TrainerRank(_Actor):
    def join(self, group: Any, world: int) -> None:
        self.member = group.trainer(self.shard(), self.rank, world)

    def train(self, version: int) -> None:
        fill(self.parts, self.boxes, version)

    def meet(self) -> Any:
        from mooncake_ray.sync.collective import Host

        self.host = Host(self.member.member.host, uuid.uuid4().hex, _S)
        return self.host.meeting

    def broadcast(self, meeting: Any, receivers: int, tensors: list[tuple[str, int]]) -> None:
        """As today's systems do it: rank 0 gets every tensor whole, and sends it to everybody, one bucket after the other."""
        from mooncake_ray.sync.collective import Ring
        from mooncake_ray.transfer.deadline import Deadline

        deadline, cpu, me = Deadline(_S), torch.device("cpu"), self.member.member.host
        gathers = [
            Ring(meeting, n, int(self.rank == 0), 2, me, cpu, deadline, _never) if self.rank in (0, n) else None
            for n in range(1, _TRAINERS)
        ]
        everybody = Ring(meeting, 0, 0, 1 + receivers, me, cpu, deadline, _never) if self.rank == 0 else None
        for bucket in tensors:
            total = 0
            for owner, (size, ring) in enumerate(zip(bucket, [None, *gathers], strict=True)):
                total += size
                if ring is not None and size and self.rank in (0, owner):
                    ring.start(torch.zeros(size, dtype=torch.uint8)).wait()
            if everybody is not None:
                everybody.start(torch.zeros(total, dtype=torch.uint8)).wait()


class EngineRank(_Actor):
    def join(self, group: Any, name: str, world: int) -> None:
        from mooncake_ray.engines.torch_module import TorchModuleEngine

        self.engine = TorchModuleEngine(torch.nn.Module(), shard=self.shard())
        self.member = group.engine(self.engine, name, self.rank, world)

    def leave(self) -> None:
        self.member.close()

    def has(self, version: int) -> bool:
        want = {name: torch.empty_like(part) for name, part in self.parts.items()}
        fill(want, self.boxes, version)
        return all(torch.equal(want[name].view(torch.int16), part.view(torch.int16)) for name, part in self.parts.items())

    def receive(self, meeting: Any, seat: int, receivers: int, totals: list[int]) -> None:
        """Every byte, whoever needs it."""
        from mooncake_ray.sync.collective import Ring
        from mooncake_ray.transfer.deadline import Deadline

        ring = Ring(meeting, 0, 1 + seat, 1 + receivers, self.member.member.host, torch.device("cpu"), Deadline(_S), _never)
        for total in totals:
            ring.start(torch.empty(total, dtype=torch.uint8)).wait()


class _Driver:
    """Has the group do what it is told, and times it."""

    def __init__(self, pool_bytes: int) -> None:
        serving.join_ray(pool_bytes)
        self._version = 0
        self._group: Any = None
        self._actors: list[Any] = []

    def load(self, subjects: list[str], source: str, case: str) -> None:
        """Makes the ranks of both sides, and brings the engines to a first version."""
        import ray

        from mooncake_ray.sync.group import WeightSyncGroup

        self._end()
        layout, engines = CASES[case]
        ranks = 4 // engines
        self._group = WeightSyncGroup(uuid.uuid4().hex, bucket_bytes=16 << 20)
        trainer, engine = ray.remote(TrainerRank), ray.remote(EngineRank)
        on = [dict(num_cpus=0, resources={f"node{n}": 0.01}) for n in range(1, _FIRST_ENGINE + 4)]
        self._trainers = [trainer.options(**on[n]).remote(source, n) for n in range(_TRAINERS)]
        self._engines = [engine.options(**on[_TRAINERS + n]).remote(layout, n % ranks) for n in range(4)]
        self._actors = [*self._trainers, *self._engines]
        ray.get([t.join.remote(self._group, _TRAINERS) for t in self._trainers], timeout=_S)
        self._names = [f"e{n // ranks}" for n in range(4)]
        self._ranks = ranks
        ray.get([e.join.remote(self._group, name, ranks) for e, name in zip(self._engines, self._names, strict=True)], timeout=_S)
        self._train()
        self._group.sync(mode="p2p", timeout_s=_S)
        self._look(self._engines)

    def _train(self) -> None:
        import ray

        self._version += 1
        ray.get([t.train.remote(self._version) for t in self._trainers], timeout=_S)

    def _look(self, engines: list[Any]) -> None:
        import ray

        if not all(ray.get([e.has.remote(self._version) for e in engines], timeout=_S)):
            raise AssertionError(f"version {self._version}: what came is not what was sent")

    def time(self, subject: str) -> dict[str, float]:
        """Seconds until all engines have what the trainers have now, and what of it was what."""
        import ray

        if subject == "broadcast":
            return {"seconds": self._broadcast()}
        self._train()
        if subject == "one":
            ray.get([e.leave.remote() for e, name in zip(self._engines, self._names, strict=True) if name != "e0"], timeout=_S)
        begin, cpu = time.perf_counter(), _cpu_s()
        report = self._group.sync(mode="p2p" if subject == "one" else subject, timeout_s=_S)
        seconds, cpu = time.perf_counter() - begin, _cpu_s() - cpu
        if report.fallbacks or report.lost:
            raise AssertionError(f"{subject}: {report}")
        engines = [e for e, name in zip(self._engines, self._names, strict=True) if subject != "one" or name == "e0"]
        self._look(engines)
        if subject == "one":
            others = [(e, n) for e, n in zip(self._engines, self._names, strict=True) if n != "e0"]
            ray.get([e.join.remote(self._group, name, self._ranks) for e, name in others], timeout=_S)
            self._group.wait_for(report.version, timeout_s=_S)
        parts = {"publish": report.publish_s, "stage": report.stage_s, "commit": report.commit_s, "pause": report.pause_s}
        return {"seconds": seconds, **parts, "cpu": cpu, "bytes": report.nbytes}

    def _broadcast(self) -> float:
        import ray

        share, bucket = sync_model.nbytes(), 32 << 20
        buckets = [[min(bucket, share - at) // _TRAINERS] * _TRAINERS for at in range(0, share, bucket)]
        totals = [sum(b) for b in buckets]
        begin = time.perf_counter()
        meeting = ray.get(self._trainers[0].meet.remote(), timeout=_S)
        ray.get(
            [t.broadcast.remote(meeting, 4, buckets) for t in self._trainers]
            + [e.receive.remote(meeting, n, 4, totals) for n, e in enumerate(self._engines)],
            timeout=_S,
        )
        return time.perf_counter() - begin

    def _end(self) -> None:
        import ray

        if self._group is not None:
            self._group.shutdown()
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def close(self) -> None:
        import ray

        self._end()
        ray.shutdown()


if __name__ == "__main__":
    serving.serve(lambda: _Driver(int(sys.argv[2])))
