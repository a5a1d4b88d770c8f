"""What the asynchronous demo shows at its end: modes side by side, over several seeds."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_ray.loops import LoopReport

LAST = 10  # steps, of which the final reward is the mean


@dataclass(frozen=True)
class Run:
    bound: int
    """Of the staleness; 0: the synchronous loop."""
    seed: int
    report: LoopReport
    wall_s: list[float]
    """Since the begin, at the end of each step."""

    @property
    def name(self) -> str:
        return f"async, bound {self.bound}" if self.bound else "sync"

    @property
    def rewards(self) -> list[float]:
        return [step.metrics["reward"] for step in self.report.steps]

    @property
    def final(self) -> float:
        return statistics.mean(self.rewards[-LAST:])

    @property
    def oldest(self) -> int:
        return max(self.report.staleness)


def by_mode(runs: list[Run]) -> dict[str, list[Run]]:
    return {name: [run for run in runs if run.name == name] for name in dict.fromkeys(run.name for run in runs)}


def summarize(settings: dict[str, Any], runs: list[Run]) -> dict[str, Any]:
    """Everything that the table and the plot show, ready for JSON."""
    modes = {}
    for name, those in by_mode(runs).items():
        finals = [run.final for run in those]
        ages: dict[int, int] = {}
        for run in those:
            for age, samples in run.report.staleness.items():
                ages[age] = ages.get(age, 0) + samples
        modes[name] = {
            "bound": those[0].bound,
            "oldest": max(run.oldest for run in those),
            "final_reward": statistics.mean(finals),
            "spread": max(finals) - min(finals),
            "samples_per_s": statistics.mean(run.report.samples_per_s for run in those),
            "utilisation": statistics.mean(run.report.utilisation for run in those),
            "staleness": dict(sorted(ages.items())),
            "pause_ms": 1e3 * statistics.median(pause for run in those for pause in run.report.pauses_s),
            "stalls_s": {why: statistics.mean(run.report.stalls[why] for run in those) for why in those[0].report.stalls},
            "rewards": {run.seed: run.rewards for run in those},
        }
    return settings | {"modes": modes}


def format_table(summary: dict[str, Any]) -> str:
    """The summary for the terminal."""
    head = f"{'':16}{'reward':>9}{'± seeds':>9}{'oldest':>8}{'samples/s':>11}{'learner':>9}{'pause':>10}   samples by age"
    lines = [head]
    for name, mode in summary["modes"].items():
        total = sum(mode["staleness"].values())
        ages = ", ".join(f"{age}: {samples / total:.0%}" for age, samples in mode["staleness"].items())
        lines.append(
            f"{name:16}{mode['final_reward']:9.3f}{mode['spread'] / 2:9.3f}{mode['oldest']:8d}{mode['samples_per_s']:11,.0f}"
            f"{mode['utilisation']:9.0%}{mode['pause_ms']:7.1f} ms   {ages}"
        )
    lines.append(
        f"\nreward: mean of the last {LAST} steps. oldest: the highest age of a sample, in versions. learner: the time in which it learns."
    )
    return "\n".join(lines)


def plot(runs: list[Run], path: Path) -> None:
    """Rewards against samples and against time, the ages of samples, and who worked when in a part of the last run of each mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    modes = by_mode(runs)
    figure, axes = plt.subplots(2, 2, figsize=(13, 8.5), layout="constrained")
    (by_samples, by_time), (ages, line) = axes
    for number, (name, those) in enumerate(modes.items()):
        for run in those:
            style = {"color": f"C{number}", "alpha": 0.8, "label": name if run is those[0] else None}
            samples = [sum(step.samples for step in run.report.steps[: n + 1]) for n in range(len(run.rewards))]
            by_samples.plot(samples, run.rewards, **style)
            by_time.plot(run.wall_s, run.rewards, **style)
        counted = summarize({}, those)["modes"][name]["staleness"]
        total = sum(counted.values())
        offset = (number - (len(modes) - 1) / 2) * 0.8 / len(modes)
        ages.bar(
            [age + offset for age in counted], [n / total for n in counted.values()], width=0.8 / len(modes), color=f"C{number}", label=name
        )
    by_samples.set(title="Reward against samples", xlabel="samples", ylabel="mean reward of a step", ylim=(0, 1))
    by_time.set(title="Reward against time", xlabel="seconds", ylim=(0, 1))
    ages.set(title="How old samples were when they were learned from", xlabel="versions", ylabel="part of all samples")
    for axis in (by_samples, by_time, ages):
        axis.legend()
        axis.grid(alpha=0.3)
    _draw_timeline(line, modes)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_timeline(axis: Any, modes: dict[str, list[Run]]) -> None:
    rows = []
    for name, those in modes.items():
        spans = those[-1].report.timeline
        middle = those[-1].wall_s[len(those[-1].wall_s) // 2]
        begin, end = middle, middle + 6 * those[-1].report.seconds / len(those[-1].rewards)
        for who in sorted({span.who for span in spans}):
            bars = [(max(0.0, span.begin_s - begin), min(span.end_s, end) - max(span.begin_s, begin)) for span in spans if span.who == who]
            rows.append((f"{who} ({name})", [(at, width) for at, width in bars if width > 0], list(modes).index(name)))
    for number, (_, bars, mode) in enumerate(reversed(rows)):
        axis.broken_barh(bars, (number - 0.35, 0.7), color=f"C{mode}", edgecolor="white", linewidth=0.5)
    axis.set_yticks(range(len(rows)), [who for who, *_ in reversed(rows)], fontsize=7)
    axis.set(title="Who works when (six steps)", xlabel="seconds")


def write_summary(summary: dict[str, Any], path: Path) -> None:
    """Writes the summary as JSON."""
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
