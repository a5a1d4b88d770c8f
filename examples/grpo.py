"""GRPO on a tiny transformer under Ray, with batches and weights in the store of your choice.

    python examples/grpo.py                  # through the shared-memory pool
    python examples/grpo.py --store ray      # the same code on Ray's own object store

The one line that makes the difference is `mooncake_ray.install()` in `main`. Every step

    1. ships the trainer's weights to the rollout workers, as a state_dict behind a ref,
    2. samples a group of responses to every prompt, and scores them in Ray tasks,
    3. gathers the batch in the driver and puts it for the trainer,
    4. trains: old log-probs, group-normalised advantages, clipped loss, KL to the reference.

The policy starts from random weights and learns from the rewards alone (`grpo_model` has the task).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # this demo is small; do not kill workers on a full machine
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import torch
from grpo_model import make_prompts
from grpo_report import History, batch_bytes, compare_stores, format_table, plot, summarize, write_summary
from grpo_workers import MINI_BATCHES, RolloutWorker, Trainer, score
from tqdm import tqdm

import mooncake_ray
from mooncake_ray import DataProto

RAY_START_ATTEMPTS = 3
RAY_STORE_BYTES = 512 << 20
INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the checked settings of a run."""
    parser = argparse.ArgumentParser(
        description="Train a tiny transformer with GRPO under Ray, and compare the object stores on its batches.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--store", choices=("pool", "ray"), default="pool", help="where batches and weights travel")
    parser.add_argument("--steps", type=int, default=80, help="training steps")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per step")
    parser.add_argument("--group-size", type=int, default=16, help="responses per prompt")
    parser.add_argument("--rollout-workers", type=int, default=2, help="Ray actors that sample responses")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, prompts and sampling")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for grpo.png and summary.json")
    parser.add_argument("--no-plot", action="store_true", help="do not draw grpo.png")
    args = parser.parse_args(arguments)
    if min(args.steps, args.prompts, args.rollout_workers) < 1 or args.group_size < 2 or args.seed < 0:
        parser.error("--steps, --prompts and --rollout-workers must be at least 1, --group-size 2, --seed 0")
    if args.prompts % args.rollout_workers:
        parser.error(f"--prompts {args.prompts} cannot be divided evenly among {args.rollout_workers} rollout workers")
    if args.prompts * args.group_size % MINI_BATCHES:
        parser.error(f"--prompts times --group-size must be a multiple of {MINI_BATCHES}, the mini-batches per step")
    return args


def start_ray(rollout_workers: int) -> None:
    """Starts a Ray instance on this machine.

    Ray gives up when it is not ready within 30 s, which happens on a busy machine, so this tries again.
    """
    for attempt in range(1, RAY_START_ATTEMPTS + 1):
        try:
            ray.init(
                address="local",
                num_cpus=max(4, rollout_workers + 2),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=RAY_STORE_BYTES,
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == RAY_START_ATTEMPTS:
                raise
            print(f"Ray did not start (attempt {attempt} of {RAY_START_ATTEMPTS}): {error}\nTrying again.", file=sys.stderr)


def timed_ms(call: Callable[[Any], Any], argument: Any) -> tuple[Any, float]:
    """Returns the call's result, and its time in milliseconds."""
    start = time.perf_counter()
    result = call(argument)
    return result, (time.perf_counter() - start) * 1e3


class Loop:
    """The driver of the training: one trainer, several rollout workers, and what they have done so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.history = History()
        self.generator = torch.Generator().manual_seed(args.seed)
        self.trainer = Trainer.remote(args.seed)
        self.workers = [RolloutWorker.remote(rank, args.seed) for rank in range(args.rollout_workers)]
        self.weight_bytes: int = ray.get(self.trainer.weight_bytes.remote())

    def step(self, version: int) -> None:
        """Runs one training step.

        Args:
            version: Of the weights to sample with; the number of steps done.
        """
        self.send_weights(version)
        batch = self.roll_out(self.make_prompts(version))
        batch_ref, put_ms = timed_ms(ray.put, batch)
        metrics = ray.get(self.trainer.update.remote(batch_ref))
        self.record(batch, metrics, put_ms)

    def send_weights(self, version: int) -> None:
        """Sends the weights from the trainer to the rollout workers; the driver handles no more than the ref."""
        weights_ref = self.trainer.weights.remote()
        loaded = ray.get([worker.load_weights.remote(weights_ref) for worker in self.workers])
        if loaded != [version] * len(self.workers):
            raise RuntimeError(f"the rollout workers loaded the weights {loaded}, expected {version}")

    def make_prompts(self, version: int) -> DataProto:
        """Returns the prompts of a step: `prompts` (rows, P), and `uid` (rows,) to find the groups by."""
        rows = self.args.prompts
        return DataProto.from_dict(
            tensors={"prompts": make_prompts(rows, self.generator)},
            non_tensors={"uid": [f"step {version}, prompt {row}" for row in range(rows)]},
            meta_info={"weight_version": version},
        )

    def roll_out(self, prompts: DataProto) -> DataProto:
        """Samples and scores responses; returns prompts * group_size rows with all columns."""
        workers, size = self.workers, self.args.group_size
        shards = [worker.generate.remote(part, size) for worker, part in zip(workers, prompts.chunk(len(workers)), strict=True)]
        rewards = [score.remote(shard) for shard in shards]
        ray.wait(shards + rewards, num_returns=len(shards + rewards))  # so that the next line's time is the store's alone
        parts, get_ms = timed_ms(ray.get, shards + rewards)
        self.history.get_ms.append(get_ms)
        self.history.bytes_moved += sum(map(batch_bytes, [prompts, *parts]))
        return DataProto.concat(parts[: len(shards)]).union(DataProto.concat(parts[len(shards) :]))

    def record(self, batch: DataProto, metrics: dict[str, float], put_ms: float) -> None:
        """Adds a step to the history."""
        history = self.history
        history.rewards.append(batch.batch["rewards"].mean().item())
        history.solved.append(batch.batch["solved"].mean().item())
        history.tokens += int(batch.batch["response_mask"].sum())
        history.bytes_moved += batch_bytes(batch) + self.weight_bytes
        history.metrics.append(metrics)
        history.put_ms.append(put_ms)
        history.batch = batch

    def run(self) -> History:
        """Runs all steps behind a progress bar."""
        self.send_weights(0)  # also waits until every process is up, so the clock measures steps only
        start = time.perf_counter()
        with tqdm(range(self.args.steps), desc=f"GRPO ({self.args.store})", unit="step", dynamic_ncols=True) as progress:
            for version in progress:
                self.step(version)
                metrics = self.history.metrics[-1]
                progress.set_postfix_str(f"reward {self.history.rewards[-1]:.3f}, entropy {metrics['entropy']:.2f}")
        self.history.seconds = time.perf_counter() - start
        return self.history


def report(args: argparse.Namespace, history: History) -> None:
    """Compares the stores on the last batch, prints the table and writes the files."""
    assert history.batch is not None
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "no_plot")}
    summary = summarize(settings, history, compare_stores(history.batch, args.store))
    args.out.mkdir(parents=True, exist_ok=True)
    write_summary(summary, args.out / "summary.json")
    print(f"\n{format_table(summary)}\n\nwrote {args.out / 'summary.json'}")
    if not args.no_plot:
        plot(summary, args.out / "grpo.png")
        print(f"wrote {args.out / 'grpo.png'}")


def main() -> int:
    """Runs the demo and returns the exit status."""
    args = parse_arguments()
    loop: Loop | None = None
    try:
        if args.store == "pool":
            mooncake_ray.install()
        print("starting Ray and the workers ...", flush=True)
        start_ray(args.rollout_workers)
        if mooncake_ray.installed() != (args.store == "pool"):
            print(
                f"--store {args.store}, but the environment says otherwise: see RAY_RUNTIME_ENV_HOOK, MOONCAKE_RAY_ENABLED", file=sys.stderr
            )
            return 1
        loop = Loop(args)
        report(args, loop.run())
    except KeyboardInterrupt:
        done = len(loop.history.rewards) if loop else 0
        print(f"\ninterrupted after {done} of {args.steps} steps; nothing was written", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave Ray half stopped
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
