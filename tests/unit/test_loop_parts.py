"""What a loop's actors answer, and what a loop says of itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mooncake_ray.errors import ConfigError, SchemaError
from mooncake_ray.loops import LoopReport, LoopSettings, Rolled, StepReport
from mooncake_ray.loops.metrics import Timeline
from mooncake_ray.rollout.spans import VersionSpans


class Stored:
    """Stands in for a stored batch: rows by their numbers."""

    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, rows):
        return Stored(self.rows[row] for row in rows)


@pytest.fixture(autouse=True)
def stored(monkeypatch):
    monkeypatch.setattr("mooncake_ray.loops.tasks.put_batch", lambda batch: batch)


@pytest.mark.parametrize(
    "version", [7, [7, 8, 9, 10], np.array([7, 8, 9, 10]), VersionSpans.of([[(7, 0, 2)], [(8, 0, 1)], [(9, 0, 3)], [(10, 0, 1)]])], ids=type
)
def test_rows_of_what_was_made(version):
    rolled = Rolled(
        Stored(range(4)), ["a", "b", "a", "b"], version, tokens=[1, 2, 3, 4], tags={"reward": torch.arange(4)}, priority=[4, 3, 2, 1]
    )
    rows = rolled.rows_of(frozenset({"b"}))
    assert rows.tolist() == [1, 3]
    part = rolled.take(rows)
    assert part.batch.rows == [1, 3] and part.uids == ["b", "b"] and list(part.tokens) == [2, 4] and list(part.priority) == [3, 1]
    assert part.tags["reward"].tolist() == [1, 3]
    if isinstance(version, VersionSpans):
        assert part.version.oldest().tolist() == [8, 10]
    else:
        assert np.broadcast_to(part.version, 2).tolist() == ([7, 7] if isinstance(version, int) else [8, 10])


def test_what_makes_no_sense():
    with pytest.raises(SchemaError, match="3 uids and 2 rows"):
        Rolled(Stored(range(2)), ["a"] * 3, 0)
    with pytest.raises(SchemaError, match=r"unfinished that have no rows: \['b'\]"):
        Rolled(Stored(range(2)), ["a"] * 2, 0, unfinished=frozenset({"b"}))
    for wrong in ({"groups_per_step": 0}, {"groups_per_step": 1, "retries": -1}, {"groups_per_step": 1.5}, {"groups_per_step": True}):
        with pytest.raises(ConfigError, match="must be an integer"):
            LoopSettings(**wrong)
    with pytest.raises(ConfigError, match="sync_timeout_s must be positive"):
        LoopSettings(1, sync_timeout_s=0)


def test_a_report_adds_up():
    steps = [StepReport(n, n, 8, {0: 6, n: 2} if n else {0: 8}, 3, 0.5, {"samples": 0.1}, {"reward": 0.5}) for n in range(3)]
    report = LoopReport(steps, seconds=3.0)
    assert (report.samples, report.samples_per_s, report.utilisation) == (24, 8.0, 0.5)
    assert report.staleness == {0: 20, 1: 2, 2: 2}
    empty = LoopReport()
    assert (empty.samples, empty.samples_per_s, empty.utilisation, empty.staleness) == (0, 0.0, 0.0, {})


def test_a_timeline():
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.span("learner", "step 0"):
        raise KeyError
    assert timeline.add("weights", "version 1", 0.0) >= 0
    assert [(span.who, span.what) for span in timeline.spans] == [("learner", "step 0"), ("weights", "version 1")]
    assert all(0 <= span.begin_s <= span.end_s for span in timeline.spans)
    timeline.stalled("room", 1.0)
    timeline.stalled("room", 0.5)
    assert timeline.stalls == {"room": 1.5}
