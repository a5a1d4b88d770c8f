"""What the demo shows at its end: the stores side by side on a real batch, the table, the plot, the JSON file."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray

import mooncake_ray
from mooncake_ray import DataProto

RAY_STORE = "ray (default torch)"
POOL_STORE = "pool"
ROUNDS, WARM_UPS, REPEATS = 3, 2, 7


@dataclass
class History:
    """What happened in the training steps so far."""

    rewards: list[float] = field(default_factory=list)
    solved: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    put_ms: list[float] = field(default_factory=list)
    get_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    bytes_moved: int = 0
    """Of columns and weights handed to the store. An object counts once, however many processes read it."""
    seconds: float = 0.0
    batch: DataProto | None = None
    """The last one, with rewards."""


@dataclass(frozen=True)
class StoreTimes:
    """Medians of moving one batch through a store, in milliseconds."""

    put_ms: float
    get_ms: float
    read_ms: float
    """Reading every byte of the received batch once: a store that shares memory must not win by deferring work to here."""


def batch_bytes(batch: DataProto) -> int:
    """Returns the bytes of all columns (of object columns: of the pointers)."""
    return sum(column.nbytes for column in (*batch.batch.values(), *batch.non_tensor_batch.values()))


def _round_trip(batch: DataProto) -> tuple[float, float, float]:
    start = time.perf_counter()
    ref = ray.put(batch)
    was_put = time.perf_counter()
    received = ray.get(ref)
    was_got = time.perf_counter()
    for column in received.batch.values():
        column.sum()
    return was_put - start, was_got - was_put, time.perf_counter() - was_got


def _round_trips(batch: DataProto) -> list[tuple[float, float, float]]:
    for _ in range(WARM_UPS):
        _round_trip(batch)
    return [_round_trip(batch) for _ in range(REPEATS)]


def _medians(trips: list[tuple[float, float, float]]) -> StoreTimes:
    return StoreTimes(*(statistics.median(seconds) * 1e3 for seconds in zip(*trips, strict=True)))


def compare_stores(batch: DataProto, store: str) -> dict[str, StoreTimes]:
    """Puts and gets a batch with Ray's own store and, in a run with the pool, with the pool too.

    The two take turns, so that whatever else the machine does hits both.
    """
    trips: dict[str, list[tuple[float, float, float]]] = {RAY_STORE: []} if store == "ray" else {POOL_STORE: [], RAY_STORE: []}
    for _ in range(ROUNDS):
        if store == "pool":
            trips[POOL_STORE] += _round_trips(batch)
            mooncake_ray.uninstall()  # from here on, ray.put is Ray's own
        trips[RAY_STORE] += _round_trips(batch)
        if store == "pool":
            mooncake_ray.install()
    return {name: _medians(measured) for name, measured in trips.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def summarize(settings: dict[str, Any], history: History, stores: dict[str, StoreTimes]) -> dict[str, Any]:
    """Returns everything the table shows, and the curves, ready for JSON."""
    assert history.batch is not None
    return settings | {
        "rewards": history.rewards,
        "solved": history.solved,
        "first_reward": _mean(history.rewards[:5]),
        "final_reward": _mean(history.rewards[-10:]),
        "final_solved": _mean(history.solved[-10:]),
        "last_metrics": history.metrics[-1],
        "loop_seconds": history.seconds,
        "tokens": history.tokens,
        "tokens_per_second": history.tokens / history.seconds,
        "bytes_moved": history.bytes_moved,
        "batch_bytes": batch_bytes(history.batch),
        "loop_put_ms": statistics.median(history.put_ms),
        "loop_get_ms": statistics.median(history.get_ms),
        "stores": {name: asdict(times) for name, times in stores.items()},
    }


def format_table(summary: dict[str, Any]) -> str:
    """Returns the summary for the terminal."""
    steps = len(summary["rewards"])
    moved = summary["bytes_moved"]
    batch = f"last batch, {summary['batch_bytes'] / 1e6:.1f} MB"
    lines = [
        f"reward        {summary['first_reward']:.3f} -> {summary['final_reward']:.3f} (mean of the first 5, last 10 steps)",
        f"solved        {summary['final_solved']:.1%} of the responses are exactly right (last 10 steps)",
        f"throughput    {summary['tokens_per_second']:,.0f} response tokens/s, {summary['loop_seconds'] / steps:.2f} s per step",
        f"bytes moved   {moved / 1e6:,.0f} MB into the store, {moved / steps / 1e6:.1f} MB per step",
        f"in the loop   put {summary['loop_put_ms']:.2f} ms, get {summary['loop_get_ms']:.2f} ms (medians, in the driver)",
        "",
        f"{batch:22}{'put':>12}{'get':>12}{'put + get':>12}{'then read':>12}",
    ]
    for name, times in summary["stores"].items():
        cells = (times["put_ms"], times["get_ms"], times["put_ms"] + times["get_ms"], times["read_ms"])
        lines.append(f"{name:22}" + "".join(f"{cell:9.2f} ms" for cell in cells))
    return "\n".join(lines)


def plot(summary: dict[str, Any], path: Path) -> None:
    """Draws the reward curve, and put and get per store."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (curve, bars) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2), layout="constrained")
    steps = range(1, len(summary["rewards"]) + 1)
    curve.plot(steps, summary["rewards"], color="tab:blue", marker=".", label="reward: share of the answer before the first mistake")
    curve.plot(steps, summary["solved"], color="tab:green", linestyle="--", label="solved: share of exact answers")
    curve.set(title=f"GRPO, weights and batches through: {summary['store']}", xlabel="training step", ylabel="mean over the batch")
    curve.set_ylim(0, 1)
    curve.legend(loc="upper left")
    curve.grid(alpha=0.3)

    stores = summary["stores"]
    for offset, key, label in ((-0.2, "put_ms", "ray.put"), (0.2, "get_ms", "ray.get")):
        positions = [index + offset for index in range(len(stores))]
        drawn = bars.bar(positions, [times[key] for times in stores.values()], width=0.38, label=label)
        bars.bar_label(drawn, fmt="%.2f")
    bars.set_xticks(range(len(stores)), list(stores))
    bars.set(
        title=f"One batch of {summary['batch_bytes'] / 1e6:.1f} MB, median of {ROUNDS * REPEATS}", ylabel="milliseconds (less is better)"
    )
    bars.margins(y=0.15)
    bars.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write_summary(summary: dict[str, Any], path: Path) -> None:
    """Writes the summary as JSON."""
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
