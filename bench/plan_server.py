"""`python -m bench.plan_server KIND PAIR`: holds two layouts of Kimi-K2 and plans between them. See `plan`."""

from __future__ import annotations

import dataclasses
import gc
import re
import resource
import sys
import time
from typing import Any

from bench import serving

__all__ = ["SUBJECTS", "sizes_of"]

SUBJECTS = {"local": ("pool",), "mooncake": ("upstream",)}
"""Which subject each kind of process holds."""


def sizes_of(pair: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """(EP, DP) of the trainer and of the engines, from "k2-32x8-32x2".

    Raises:
        ValueError: it is no such name.
    """
    found = re.fullmatch(r"k2-([1-9]\d*)x([1-9]\d*)-([1-9]\d*)x([1-9]\d*)", pair)
    if not found or 384 % int(found[1]) or 384 % int(found[3]):
        raise ValueError(f"no pair {pair!r}: k2-EPxDP-EPxDP, with EP a divisor of 384")
    ep, dp, to_ep, to_dp = map(int, found.groups())
    return (ep, dp), (to_ep, to_dp)


def _layouts(pair: str, layers: int) -> tuple[Any, Any]:
    from mooncake_ray.weights.described import Parallel, described
    from mooncake_ray.weights.models import config_of

    config = {**config_of("kimi-k2"), "num_hidden_layers": layers}
    (ep, dp), (to_ep, to_dp) = sizes_of(pair)
    source = described(config, Parallel(ep=ep, etp=1, dp=ep * dp), engine=False)
    return source, described(config, Parallel(ep=to_ep, etp=1, dp=to_ep * to_dp), engine=True)


class _Pool:
    def __init__(self, pair: str) -> None:
        from mooncake_ray.weights.plan import divide

        self.source, target = _layouts(pair, 61)
        self.target, self.undivided = divide(target), len(target)
        gc.collect()

    def plan(self) -> dict[str, Any]:
        from mooncake_ray.weights.plan import deliver_plan, publish_plan

        source, target = dataclasses.replace(self.source), dataclasses.replace(self.target)  # without what they have computed already
        began, cpu = time.perf_counter(), time.process_time()
        publication = publish_plan(source)
        delivery = deliver_plan(publication, target)
        assert publication.digest and delivery.digest
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        return {
            "seconds": seconds,
            "cpu": cpu,
            "load": float(publication.load.max() / publication.load.mean()),
            "bytes": int(delivery.op_nbytes.sum()),
            "model": sum(m.nbytes for m in source.metas),
            "source fragments": len(source),
            "target fragments": len(target),
            "undivided": self.undivided,
            "reads": len(delivery.op_box),
            "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        }


class _Upstream:
    def __init__(self, pair: str) -> None:
        self.pair = pair
        self.held: dict[int, tuple[Any, Any]] = {}

    def load(self, layers: int) -> None:
        """Describes the first layers of the model to the other planner."""
        source, target = _layouts(self.pair, layers)
        (ep, dp), (to_ep, to_dp) = sizes_of(self.pair)
        self.held[layers] = _manifest(source, ep, dp), _manifest(target, to_ep, to_dp)

    def plan(self, layers: int) -> dict[str, Any]:
        from mooncake.reshard.weight import plan_placement_transfer

        source, target = self.held[layers]
        began = time.perf_counter()
        plan = plan_placement_transfer(source, target)
        seconds = time.perf_counter() - began
        sent = {participant.rank: 0 for participant in source.topology.participants}
        for op in plan.operations:
            nbytes = op.inner_bytes
            for n in op.outer_loop_counts:
                nbytes *= n
            sent[op.source.rank] += nbytes
        return {"seconds": seconds, "sent": list(sent.values()), "target fragments": len(target.fragments)}

    def forget(self) -> None:
        self.held.clear()


def _manifest(placement: Any, ep: int, dp: int) -> Any:
    """A placement in upstream's words. Ranks are one for each (replica, part of the experts)."""
    from mooncake.reshard.weight import (
        OwnershipAxis,
        ParallelRank,
        ParallelTopology,
        PlacementFragment,
        ReplicatedAxis,
        TensorDescriptor,
        TopologyParticipant,
        WeightPlacementManifest,
    )  # fmt: skip

    ranks = [ParallelRank(dp=i // ep, ep=i % ep) for i in range(len(placement.ranks))]
    topology = ParallelTopology(
        tp_size=1, pp_size=1, ep_size=ep, dp_size=dp,
        participants=tuple(TopologyParticipant(f"rank-{i}", rank) for i, rank in enumerate(ranks)),
    )  # fmt: skip
    tensors = []
    for meta in placement.metas:
        axis = OwnershipAxis if ".experts." in meta.name else ReplicatedAxis
        tensors.append(
            TensorDescriptor(
                tensor_id=meta.name, global_shape=meta.shape, dtype=meta.dtype, itemsize=meta.itemsize, shard_dims=(),
                layout_fingerprint="hf", parallel_axes=(axis("ep"), ReplicatedAxis("dp")),
            )
        )  # fmt: skip
    fragments = []
    columns = (placement.tensor, placement.rank, placement.lo, placement.hi, placement.nbytes)
    for tensor, rank, lo, hi, nbytes in zip(*(c.tolist() for c in columns), strict=True):
        n = len(placement.metas[tensor].shape)
        shape = tuple(b - a for a, b in zip(lo[-n:], hi[-n:], strict=True))
        fragments.append(PlacementFragment(placement.metas[tensor].name, tuple(lo[-n:]), shape, nbytes, ranks[rank]))
    return WeightPlacementManifest.from_fragments(
        resource_id="k2", revision="1", weight_generation=1, placement_set_id="all", topology=topology, tensors=tensors, fragments=fragments
    )


class _Server:
    def __init__(self, kind: str, pair: str) -> None:
        self.held = {"local": _Pool, "mooncake": _Upstream}[kind](pair)

    def load(self, subject: str, layers: int) -> None:
        self.held.load(layers)

    def forget(self, subject: str) -> None:
        self.held.forget()

    def plan(self, subject: str, **options: Any) -> dict[str, Any]:
        return self.held.plan(**options)

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serving.serve(lambda: _Server(*sys.argv[1:]))
