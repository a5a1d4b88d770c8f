"""GRPO on a tiny transformer, synchronously and asynchronously: the same job, the same seeds, one switch.

    python examples/grpo_async.py                          # both modes, with two bounds of staleness, three seeds each
    python examples/grpo_async.py --bounds 2 --seeds 1     # only the asynchronous one; 0 is the synchronous one

Rollout workers sample with their engines, a reward scores, a learner learns, and a `WeightSyncGroup` brings its weights to the engines.
Between them is a `RolloutBuffer`. `SyncLoop` and `AsyncLoop` differ in who waits for whom; the actors are the same.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # this demo is small; do not kill workers on a full machine
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from grpo import INTERRUPTED, start_ray
from grpo_async_report import Run, format_table, plot, summarize, write_summary
from grpo_async_workers import Learner, Reward, Rollout, prompt
from tqdm import tqdm

import mooncake_ray
from mooncake_ray.loops import AsyncLoop, LoopSettings, StepReport, SyncLoop


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the checked settings."""
    parser = argparse.ArgumentParser(
        description="Train a tiny transformer with GRPO, synchronously and asynchronously, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--bounds", type=int, nargs="+", default=[0, 1, 4], help="how many versions old samples may be; 0: the synchronous loop"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, with the seeds 0, 1, ...")
    parser.add_argument("--steps", type=int, default=60, help="training steps of a run")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step")
    parser.add_argument("--group-size", type=int, default=16, help="responses per prompt")
    parser.add_argument("--rollout-workers", type=int, default=2, help="Ray actors that sample responses")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for grpo_async.png and grpo_async.json")
    parser.add_argument("--no-plot", action="store_true", help="do not draw grpo_async.png")
    args = parser.parse_args(arguments)
    if min(args.steps, args.prompts, args.rollout_workers, args.seeds) < 1 or args.group_size < 2 or min(args.bounds) < 0:
        parser.error("--steps, --prompts, --rollout-workers and --seeds must be at least 1, --group-size 2, --bounds 0")
    if len(set(args.bounds)) < len(args.bounds):
        parser.error("--bounds has one of them twice")
    return args


def train(args: argparse.Namespace, bound: int, seed: int) -> Run:
    """One run, with actors of its own."""
    name = f"grpo-{bound}-{seed}"
    buffer = mooncake_ray.RolloutBuffer.create(
        name, group_size=args.group_size, max_staleness=bound, capacity_groups=args.prompts * (bound + 1), stale="return"
    )
    group = mooncake_ray.WeightSyncGroup(name)
    rollouts = [Rollout.remote(group, rank, seed) for rank in range(args.rollout_workers)]
    learner, reward = Learner.remote(group, seed), Reward.remote()
    settings = LoopSettings(groups_per_step=args.prompts, groups_per_call=max(1, args.prompts // (2 * args.rollout_workers)))
    kind = AsyncLoop if bound else SyncLoop
    try:
        ray.get([actor.__ray_ready__.remote() for actor in (*rollouts, learner, reward)])
        wall: list[float] = []
        with tqdm(
            total=args.steps, desc=f"{'async' if bound else 'sync'}, bound {bound}, seed {seed}", unit="step", dynamic_ncols=True
        ) as bar:

            def on_step(step: StepReport) -> None:
                wall.append(time.monotonic() - begin)
                bar.set_postfix_str(f"reward {step.metrics['reward']:.3f}, ages {dict(step.staleness)}", refresh=False)
                bar.update()

            with kind(
                buffer, group, rollouts, [learner], functools.partial(prompt, seed), settings, rewards=[reward], on_step=on_step
            ) as loop:
                begin = time.monotonic()
                report = loop.run(args.steps)
        return Run(bound, seed, report, wall)
    finally:
        group.shutdown()
        buffer.shutdown()
        for actor in (*rollouts, learner, reward):
            ray.kill(actor)


def main() -> int:
    """Runs the demo and returns the exit status."""
    args = parse_arguments()
    runs: list[Run] = []
    try:
        mooncake_ray.install()
        print("starting Ray and the workers ...", flush=True)
        start_ray(args.rollout_workers)
        logging.getLogger("mooncake_ray").setLevel(logging.ERROR)
        for seed in range(args.seeds):
            runs += [train(args, bound, seed) for bound in args.bounds]
        summary = summarize({name: value for name, value in vars(args).items() if name not in ("out", "no_plot")}, runs)
        args.out.mkdir(parents=True, exist_ok=True)
        write_summary(summary, args.out / "grpo_async.json")
        print(f"\n{format_table(summary)}\n\nwrote {args.out / 'grpo_async.json'}")
        if not args.no_plot:
            plot(runs, args.out / "grpo_async.png")
            print(f"wrote {args.out / 'grpo_async.png'}")
    except KeyboardInterrupt:
        print(f"\ninterrupted after {len(runs)} of {args.seeds * len(args.bounds)} runs; nothing was written", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave Ray half stopped
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
