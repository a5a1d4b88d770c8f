"""Trains a small model on four ranks (tensor parallel), saves snapshots, and goes on in another layout: two ranks, pipeline parallel.

    python examples/weights_snapshot.py

Ranks are plain objects here, and each writes its own part of a snapshot: once, whoever else has the same. Nobody gathers the model, and whoever
restarts reads what it wants, wherever its layout cuts. At the end it is exported as what transformers loads.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from mooncake_ray.weights.hf_export import export_hf
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.plan import publish_plan
from mooncake_ray.weights.snapshot import SnapshotStore
from mooncake_ray.weights.source import StateDictSource

LAYERS, WIDTH = 4, 64
SHAPES = {f"model.layers.{n}.{name}.weight": (WIDTH, WIDTH) for n in range(LAYERS) for name in ("up_proj", "down_proj")}
SHAPES["model.norm.weight"] = (WIDTH,)


def tensor_parallel(ranks: int) -> dict[str, StateDictSource]:
    """`up_proj` cut by rows, `down_proj` by columns, the norm on every rank."""
    out = {}
    for rank in range(ranks):
        tensors, boxes, part = {}, {}, WIDTH // ranks
        for name, shape in SHAPES.items():
            if len(shape) == 1:
                tensors[name] = torch.zeros(shape)
            elif "up_proj" in name:
                tensors[name], boxes[name] = torch.zeros(part, WIDTH), (shape, (rank * part, 0))
            else:
                tensors[name], boxes[name] = torch.zeros(WIDTH, part), (shape, (0, rank * part))
        out[f"tp{rank}"] = StateDictSource(tensors, boxes)
    return out


def pipeline_parallel(ranks: int) -> dict[str, StateDictSource]:
    """Each rank has some of the layers, the last one the norm too."""
    out = {}
    for rank in range(ranks):
        first, last = rank * LAYERS // ranks, (rank + 1) * LAYERS // ranks
        mine = [n for n in SHAPES if any(f"layers.{layer}." in n for layer in range(first, last)) or ("norm" in n and last == LAYERS)]
        out[f"pp{rank}"] = StateDictSource({name: torch.zeros(SHAPES[name]) for name in mine})
    return out


def train(shards: dict[str, StateDictSource], step: int) -> None:
    """Stands for an optimizer: every element gets a value of its own, the same on all ranks that have it."""
    for shard in shards.values():
        buffers = shard.buffers()
        for f in shard.fragments():
            rng = torch.Generator().manual_seed(step)
            whole = torch.randn(f.meta.shape, generator=rng)
            buffers[f.buffer].copy_(whole[tuple(slice(a, b) for a, b in zip(f.lo, f.hi, strict=True))])


def save(store: SnapshotStore, version: int, shards: dict[str, StateDictSource]) -> None:
    """As ranks in several processes do it: one begins and commits, each of them writes."""
    plan = publish_plan(Placement.join([Placement.of(rank, shard.fragments()) for rank, shard in shards.items()]))
    with store.begin(version, plan) as draft:  # may be pickled, and sent to the ranks
        written = {rank: draft.save(shard, rank=rank) for rank, shard in shards.items()}
        store.commit(draft, extra={"step": version})
    print(f"version {version}: " + ", ".join(f"{rank} wrote {n} bytes" for rank, n in written.items()))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = SnapshotStore(Path(folder) / "snapshots", keep=2)
        trainers = tensor_parallel(4)
        for step in (1, 2, 3):
            train(trainers, step)
            save(store, step, trainers)
        print(f"kept: {list(store.versions())}")

        restarted = pipeline_parallel(2)
        with store.open() as snapshot:
            for rank, shard in restarted.items():
                loaded = snapshot.load_into(shard, rank=rank)
                print(f"{rank} has read {loaded.nbytes} bytes of version {loaded.version}, at step {snapshot.manifest.extra['step']}")
            files = export_hf(snapshot, Path(folder) / "hf")
            print(f"exported: {[file.name for file in files]}")

        expected = pipeline_parallel(2)
        train(expected, 3)
        same = all(torch.equal(t, expected[rank].mapping[name]) for rank, s in restarted.items() for name, t in s.mapping.items())
        print(f"as if trained in this layout: {same}")


if __name__ == "__main__":
    main()
