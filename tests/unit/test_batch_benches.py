"""The pure parts of the benches of batches: plans, who runs, the fastest peer, targets, what a selection needs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench import batch, driver, partial, partial_server, report, workloads
from bench.fleet import ServerError
from bench.report import Result


def results(bench, values, unit="s", case="putget/S64"):
    return [Result(bench.NAME, case, subject, value, value, 3, unit=unit) for subject, value in values.items()]


def test_plan_of_batches():
    steps = batch.plan()
    assert [(s.workload, s.lists) for s in steps] == [(w, lists) for w in ("S64", "M1G", "L8G") for lists in (False, True)]
    assert {s.workload for s in batch.plan(quick=True)} == {"S64"}
    assert max(s.rounds for s in batch.plan(quick=True)) < min(s.rounds for s in steps)
    assert [(s.workload, s.rounds) for s in batch.plan(["M256", "XS"], runs=2)] == [("XS", 2)] * 2 + [("M256", 2)] * 2


@pytest.mark.parametrize("bench", [batch, partial, driver])
def test_sizes_are_workloads(bench):
    with pytest.raises(ValueError, match=r"'1GiB'.*XS, S64, M256, M1G, L8G"):
        bench.plan(["1GiB"])
    (step, *_) = bench.plan(["XS"], runs=4)
    assert (step.workload, step.rounds) == ("XS", 4)


@pytest.mark.parametrize("bench", [partial, driver])
def test_one_workload_at_a_time(bench):
    with pytest.raises(ValueError, match="one workload"):
        bench.plan(["XS", "S64"])
    quick, full = bench.plan(quick=True)[0], bench.plan()[0]
    assert workloads.padded_bytes(workloads.WORKLOADS[quick.workload]) < workloads.padded_bytes(workloads.WORKLOADS[full.workload])


class Fleet:
    """Answers as told; a subject or kind that is told an error fails with it."""

    def __init__(self, errors):
        self.errors, self.asked = errors, []

    def _say(self, name):
        self.asked.append(name)
        if name in self.errors:
            raise ServerError(self.errors[name])

    def start(self, kinds):
        for kind in kinds:
            self._say(kind)

    def ask(self, subject, **request):
        self._say(subject)
        if request["do"] == "stored":
            return 7
        return {"put": 1.0, "get": 2.0, "putget": 3.0} if request["do"] == "time" else None


def test_who_fails_is_said_and_left_out(capsys):
    fleet = Fleet({"mooncake": "it died:\nno wheel", "pickle5": "it failed:\nno memory"})
    running = batch._Running(fleet)
    found = batch._run_step(running, batch.Step("XS", False, 2), batch.random.Random(1))
    said = capsys.readouterr().err
    assert "mooncake: not run: no wheel" in said and "pickle5: not run: no memory" in said
    assert {r.subject for r in found} == {"ray-verl", "ray-lists", "transferqueue", "pool", "pool-padded", "ideal", "fastest-peer"}
    assert fleet.asked.count("mooncake") == 1 and fleet.asked.count("pickle5") == 1  # not again
    assert {r.case for r in found} == {"stored/XS", "put/XS", "get/XS", "putget/XS"}
    assert all(r.runs == 2 for r in found if r.unit == "s")


def test_cases_of_lists():
    found = batch._run_step(batch._Running(Fleet({})), batch.Step("XS", True, 1), batch.random.Random(1))
    assert {r.case for r in found} == {"putget-lists/XS"}
    assert {r.subject for r in found} == {*batch._LISTS, "fastest-peer"}


def test_fastest_peer():
    (fastest,) = batch._fastest(results(batch, {"ray-verl": 3.0, "mooncake": 2.0, "pool": 0.1}))
    assert (fastest.subject, fastest.value, fastest.extra) == ("fastest-peer", 2.0, {"peer": "mooncake"})
    assert json.loads(next(report.json_lines([fastest])))["peer"] == "mooncake"
    assert batch._fastest(results(batch, {"pool": 0.1})) == []


def test_a_batch_for_which_there_is_no_memory_is_said(monkeypatch, capsys):
    monkeypatch.setattr(batch, "_available", lambda: 1 << 30)
    assert batch._fits(batch.Step("S64", False, 1))
    assert not batch._fits(batch.Step("M1G", False, 1)) and not batch._fits(batch.Step("M1G", True, 1))
    assert capsys.readouterr().err.splitlines() == ["M1G: not run, as it needs 10.9 GiB of memory and 1.00 GiB are available"]
    assert list(batch.run([batch.Step("M1G", False, 1)])) == []


def test_targets_of_batches():
    def judged(stored, putget, in_lists):
        found = results(batch, {"pool": stored, "ideal": 100}, "bytes", "stored/S64")
        found += results(batch, {"pool": putget, "fastest-peer": 10.0})
        found += results(batch, {"pool": in_lists, "fastest-peer": 10.0}, case="putget-lists/S64")
        return {t.name: t.ok for t in batch.targets(found) if "S64" in t.name}

    names = ["pool / ideal, stored/S64", "fastest-peer / pool, putget/S64", "fastest-peer / pool, putget-lists/S64"]
    assert judged(105, 2.0, 1.0) == dict.fromkeys(names, True)
    assert judged(106, 2.1, 1.1) == dict.fromkeys(names, False)
    assert [t.ok for t in batch.targets([])] == [None] * 9


def test_targets_of_parts():
    def judged(nbytes, seconds):
        found = []
        for what in partial.SELECTIONS:
            found += results(partial, {"pool": nbytes, "needed": 100, "whole": 1000}, "bytes", f"bytes/{what}")
            found += results(partial, {"pool": seconds, "whole": 1.0}, case=f"time/{what}")
        return [t.ok for t in partial.targets(found)]

    assert judged(105, 0.14) == [True] * 4  # a tenth of the bytes, in at most 1.5 tenths of the time
    assert judged(106, 0.16) == [False] * 4
    assert [t.ok for t in partial.targets([])] == [None] * 4


def test_targets_of_the_driver():
    def judged(nbytes, seconds):
        found = results(driver, {"verl": 1e9, "pool": nbytes}, "bytes", "driver-bytes")
        found += results(driver, {"verl": 1.0, "pool": seconds}, case="end-to-end")
        return [t.ok for t in driver.targets(found)]

    assert judged(1 << 20, 1.0) == [True, True]
    assert judged((1 << 20) + 1, 1.1) == [False, False]
    assert [t.ok for t in driver.targets([])] == [None, None]


@pytest.fixture(scope="module")
def rollout():
    return workloads.build("XS")


@pytest.fixture(scope="module")
def whole(rollout):
    return workloads.padded(rollout)  # imports verl, which opens files for good


def test_what_a_selection_needs(rollout, whole):
    """Told from the padded batch: int32 where there is a token, float32 where there is a token of a response."""
    needed = partial_server.needed(rollout)
    assert needed.keys() == set(partial.SELECTIONS)
    for what, rows in partial_server.selected(len(whole)).items():
        some = whole[rows]
        assert len(some) == 64 // 8
        assert needed[what] == 4 * int(some.batch["attention_mask"].sum() + some.batch["response_mask"].sum())
    assert np.diff(partial_server.selected(64)["scattered"]).min() > 1  # no two are neighbours
