"""What a loop exports, with Ray's metrics replaced by ones that remember."""

from __future__ import annotations

import pytest

from mooncake_ray.loops import StepReport, exported


class Metric:
    made: dict = {}  # noqa: RUF012 - emptied for each test

    def __init__(self, name, text, *more):
        self.values, self.tags = [], more[-1]
        Metric.made[name.removeprefix("mooncake_ray_loop_")] = self

    def set_default_tags(self, tags):
        assert tags == {"Loop": "policy"} and "Loop" in self.tags
        return self

    def inc(self, n=1.0, tags=None):
        assert set(tags or {}) == set(self.tags) - {"Loop"} and n > 0
        self.values.append((n, *(tags or {}).values()))

    def observe(self, value):
        self.values.append(value)

    set = observe


@pytest.fixture
def made(monkeypatch):
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(exported, kind, Metric)
    Metric.made = {}
    return Metric.made


def test_steps_and_what_is_new_since_the_last_one(made):
    loop = exported.Exported("policy")
    loop.step(StepReport(3, 7, 6, {0: 2, 1: 4}, 5, 0.25, {}, {}))
    loop.totals({"samples": 1.5, "room": 0.0}, [0.1, 0.2], 2, 0)
    loop.totals({"samples": 2.0, "weights": 0.5, "room": 0.0}, [0.1, 0.2, 0.3], 2, 1)
    found = {name: metric.values for name, metric in made.items()}
    assert found == {
        "steps": [(1.0,)],
        "samples": [(2, "0"), (4, "1")],
        "stalled_seconds": [(1.5, "samples"), (0.5, "samples"), (0.5, "weights")],
        "failures": [(2.0,)],
        "skipped_versions": [(1.0,)],
        "version": [8],
        "queued_groups": [5],
        "update_seconds": [0.25],
        "pause_seconds": [0.1, 0.2, 0.3],
    }
