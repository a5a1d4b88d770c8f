"""Runs the GRPO example as a user would, once per store, and once until it has learned something."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mooncake_ray

REPOSITORY = Path(__file__).resolve().parents[2]
RAY_COLUMN = "ray (default torch)"


def clean_environment() -> dict[str, str]:
    """Returns an environment where nothing but the example itself installs the pool."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MOONCAKE_RAY_", "RAY_RUNTIME_ENV_HOOK"))}
    packages = str(Path(mooncake_ray.__file__).parents[1])  # so that the example imports what the tests import
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
    return environment


def start_example(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the example to its end."""
    command = [sys.executable, str(REPOSITORY / "examples" / "grpo.py"), "--out", str(out), *arguments]
    return subprocess.run(command, cwd=out, env=clean_environment(), capture_output=True, text=True, timeout=240, check=False)


def run_example(out: Path, *arguments: str) -> dict[str, Any]:
    """Runs the example and returns its summary."""
    done = start_example(out, *arguments)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads((out / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Any], Path]]:
    """Returns a function from a store to the summary and the folder of a run of a few steps with it."""

    @functools.cache
    def run(store: str) -> tuple[dict[str, Any], Path]:
        out = tmp_path_factory.mktemp(store)
        return run_example(out, "--store", store, "--steps", "3", "--prompts", "16", "--group-size", "8", "--seed", "5"), out

    return run


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("store", "columns"), [pytest.param("ray", {RAY_COLUMN}, marks=pytest.mark.slow), ("pool", {"pool", RAY_COLUMN})], ids=["ray", "pool"]
)
def test_few_steps(short_run, store: str, columns: set[str]) -> None:
    summary, out = short_run(store)

    assert summary["store"] == store
    assert len(summary["rewards"]) == 3
    assert all(math.isfinite(reward) and 0 <= reward <= 1 for reward in summary["rewards"])
    assert all(math.isfinite(value) for value in summary["last_metrics"].values())
    assert summary["bytes_moved"] > 3 * summary["batch_bytes"] > 0
    assert summary["tokens_per_second"] > 0
    assert set(summary["stores"]) == columns
    for times in summary["stores"].values():
        assert all(math.isfinite(milliseconds) and milliseconds > 0 for milliseconds in times.values())
    assert (out / "grpo.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.slow
def test_both_stores_train_alike(short_run) -> None:
    """The seed fixes everything, so what the store carries decides whether the runs agree."""
    (ray_summary, _), (pool_summary, _) = short_run("ray"), short_run("pool")

    assert pool_summary["rewards"] == pytest.approx(ray_summary["rewards"], abs=2e-3)
    for name in ("entropy", "reference_kl", "gradient_norm"):
        assert pool_summary["last_metrics"][name] == pytest.approx(ray_summary["last_metrics"][name], rel=1e-2), name


@pytest.mark.slow
def test_reward_rises(tmp_path: Path) -> None:
    summary = run_example(tmp_path, "--store", "pool", "--steps", "30", "--seed", "0", "--no-plot")

    rewards = summary["rewards"]
    before, after = mean(rewards[:5]), mean(rewards[-5:])
    assert before < 0.05, rewards
    assert after > 0.1, rewards
    assert after > 5 * before, rewards
    assert not (tmp_path / "grpo.png").exists()


def test_rejects_settings_that_cannot_work(tmp_path: Path) -> None:
    done = start_example(tmp_path, "--prompts", "3", "--rollout-workers", "2")

    assert done.returncode == 2
    assert "--prompts 3 cannot be divided evenly among 2 rollout workers" in done.stderr
    assert not list(tmp_path.iterdir())


def test_stops_on_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-u", str(REPOSITORY / "examples" / "grpo.py"), "--store", "ray", "--out", str(tmp_path)]
    process = subprocess.Popen(command, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("starting Ray")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)

    assert process.returncode == 130
    assert "interrupted after 0 of" in errors
    assert not list(tmp_path.iterdir())
