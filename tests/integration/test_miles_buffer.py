"""Miles' buffer of finished groups, called as its rollout function calls it. (Miles cannot be installed here: some of its names stand in.)"""

from __future__ import annotations

import asyncio
import sys
import types
from argparse import Namespace
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest

from mooncake_ray.errors import ConfigError, SchemaError

SAMPLES, EXPERTS = 2, (4, 8)


class Status(Enum):
    COMPLETED = "completed"
    ABORTED = "aborted"


@dataclass
class Sample:
    index: int
    prompt: str = ""
    tokens: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: np.ndarray | None = None
    reward: float | None = None
    weight_versions: list[str] = field(default_factory=list)
    status: Status = Status.COMPLETED

    @property
    def oldest_weight_version(self):
        return min(map(int, self.weight_versions), default=None)

    def to_dict(self):
        return {**self.__dict__, "status": self.status.value}

    @staticmethod
    def from_dict(data):
        return Sample(**{**data, "status": Status(data["status"])})


@dataclass
class Input:
    prompt_group: list[Sample]
    group: list[Any]


def group(number, version=None, same_objects=True, **more):
    random = np.random.default_rng(number)
    lengths = random.integers(500, 1500, SAMPLES)
    made = [
        Sample(
            number * SAMPLES + n,
            f"prompt {number}",
            random.integers(0, 150_000, length).tolist(),
            random.random(length).tolist(),
            random.integers(0, 128, (length - 1, *EXPERTS), dtype=np.int32),
            float(n),
            [] if version is None else [str(version + n), str(version)],
            **more,
        )
        for n, length in enumerate(lengths)
    ]
    return Input(made if same_objects else [Sample(s.index, s.prompt) for s in made], made)


def same(a, b):
    arrays = all(np.array_equal(x.rollout_routed_experts, y.rollout_routed_experts) for x, y in zip(a, b, strict=True))
    plain = [[{**s.__dict__, "rollout_routed_experts": None} for s in samples] for samples in (a, b)]
    return arrays and plain[0] == plain[1] and {s.rollout_routed_experts.dtype for s in a} == {np.dtype(np.int32)}


@pytest.fixture
def make(pool, pool_ray, monkeypatch):
    @dataclass
    class Verdict:
        keep: bool
        reason: str | None = None

    class MetricGatherer:
        def __init__(self):
            self.drops = {}

        def on_dynamic_filter_drop(self, reason):
            self.drops[f"drop_{reason}"] = self.drops.get(f"drop_{reason}", 0) + 1

        def collect(self):
            return self.drops

    def module(name, **names):
        found = types.ModuleType(name)
        found.__dict__.update(names)
        monkeypatch.setitem(sys.modules, name, found)

    for name in ("miles", "miles.rollout", "miles.rollout.filter_hub", "miles.utils"):
        module(name)
    module(
        "miles.rollout.filter_hub.base_types",
        MetricGatherer=MetricGatherer,
        call_dynamic_filter=lambda fn, args, group: Verdict(True) if fn is None else fn(group),
    )
    module("miles.utils.misc", load_function=lambda path: path)
    made = []

    def create(*, retry=True, keep=None, **settings):
        from mooncake_ray.integrations.miles_buffer import DataBuffer

        unused = []
        chosen = {
            "async_data_buffer_capacity_factor": 1.5,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": SAMPLES,
            "max_weight_staleness": None,
            "dynamic_sampling_filter_path": None if keep is None else lambda group: Verdict(keep(group), "dull"),
            "async_unused_samples_handler": "retry" if retry else "drop",
        }
        made.append(DataBuffer(Namespace(args=Namespace(**chosen | settings), unused_handler_fn=unused.append)))
        return made[-1], unused

    yield create
    for buffer in made:
        buffer._buffer.shutdown()


def test_groups_come_back_as_they_were(make):
    buffer, unused = make()

    async def job():
        for n in range(2):
            await buffer.put(group(n, version=n, same_objects=n == 0))
        found = buffer.get_metrics()
        narrow = sum(len(s.tokens) * (4 + 8 + 32) for n in range(2) for s in group(n).group)
        assert found["rollout/fully_async/queue_size"] == 2 and found["rollout/fully_async/stored_bytes"] < 1.2 * narrow
        for n in range(2):
            got = await buffer.get(current_version=3)
            assert same(got.group, group(n, version=n).group) and len(got.prompt_group) == SAMPLES
        found = buffer.get_metrics()
        assert (found["rollout/fully_async/avg_staleness"], found["rollout/fully_async/max_staleness"]) == (2.5, 3)
        assert found["rollout/fully_async/stored_bytes"] == 0 == found["rollout/fully_async/queue_size"]

    asyncio.run(job())
    assert unused == []


def test_what_waits(make):
    """A full buffer makes its producer wait, an empty one its consumer; who is cancelled loses nothing."""
    buffer, _ = make()

    async def job():
        putting = asyncio.create_task(_put_all(buffer, 5))
        while buffer.get_metrics()["rollout/fully_async/queue_size"] < 3:
            await asyncio.sleep(0.01)
        assert not putting.done()
        numbers = [(await buffer.get()).group[0].index // SAMPLES for _ in range(5)]
        await putting
        assert numbers == list(range(5))
        getting = asyncio.create_task(buffer.get())
        await asyncio.sleep(0)
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        await buffer.put(group(7))
        assert (await buffer.get()).group[0].index == 7 * SAMPLES

    asyncio.run(job())


async def _put_all(buffer, count):
    for n in range(count):
        await buffer.put(group(n))


@pytest.mark.parametrize("retry", [True, False])
def test_what_is_not_learned_from(make, retry):
    buffer, unused = make(retry=retry, keep=lambda group: group[0].index // SAMPLES != 3, max_weight_staleness=1)

    async def job():
        await buffer.put(group(0, status=Status.ABORTED))
        await buffer.put(group(1, version=4))  # two versions old
        await buffer.put(group(2, version=4, same_objects=False))
        await buffer.put(group(3, version=6))  # the filter refuses it
        await buffer.put(group(4))  # says no version
        assert (await buffer.get(current_version=6)).group[0].index == 4 * SAMPLES
        found = buffer.get_metrics()
        assert found["rollout/fully_async/stale_groups_filtered"] == 2 and found["rollout/fully_async/aborted_groups_filtered"] == 1
        assert found["drop_dull"] == 1 and "rollout/fully_async/avg_staleness" not in found

    asyncio.run(job())
    indices = [samples[0].index // SAMPLES for samples in unused]
    assert indices == ([0, 1, 2] if retry else [0])


def test_what_is_refused(make):
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        make(async_data_buffer_capacity_factor=0.1)
    buffer, _ = make()
    with pytest.raises(SchemaError, match="1 trajectories of the group are of several samples"):
        asyncio.run(buffer.put(Input([], [[Sample(0)], Sample(1)])))
