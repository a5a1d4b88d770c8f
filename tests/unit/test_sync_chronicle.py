"""What a group tells of itself: what is under way, who is how far behind, who is gone."""

from __future__ import annotations

import types

import pytest
import torch
from local_group import Group

from mooncake_ray.errors import WeightSyncError
from mooncake_ray.sync.chronicle import Chronicle
from mooncake_ray.sync.messages import Join, Member
from mooncake_ray.sync.report import SyncReport
from mooncake_ray.sync.roster import Roster
from mooncake_ray.weights.source import StateDictSource


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Told:
    """A chronicle, and what it is asked with."""

    def __init__(self) -> None:
        self.clock, self.roster = Clock(), Roster()
        self.chronicle = Chronicle(self.clock)
        self.versions = types.SimpleNamespace(editions={}, current=-1, epoch=0)
        self.heard: dict[str, float] = {}

    def engine(self, name: str, version: int, ranks: int = 1, world: int = 1) -> None:
        for rank in range(ranks):
            member = Member(f"{name}-{rank}", "engine", name, rank, world, f"10.0.0.{rank % 2}", "")
            self.roster.join(Join(member, None, version=version, state="serving" if version >= 0 else "joined"))

    def publish(self, version: int, nbytes: int = 10) -> None:
        done = types.SimpleNamespace(done=lambda: True, cancelled=lambda: False, exception=lambda: None)
        self.versions.editions[version] = types.SimpleNamespace(manifest=types.SimpleNamespace(nbytes=nbytes), contents=done)
        self.chronicle.published(version, nbytes)

    def status(self, moved: int = 0, total: int = 0):
        return self.chronicle.status(self.roster, self.versions, self.heard, moved, total)


def test_how_far_behind_an_engine_is():
    told = Told()
    told.publish(3)
    told.clock.now += 5
    told.publish(7)
    told.clock.now += 1
    told.publish(9)
    told.engine("new", 9)
    told.engine("old", 3, ranks=3, world=3)
    told.engine("none", -1)
    told.chronicle.serves(["new"], 9)
    told.chronicle.serves(["old"], 3)
    told.clock.now += 2
    engines = told.status().engines
    assert (engines["new"].behind, engines["new"].stale_s, engines["new"].since_s) == (0, 0.0, 2.0)
    assert (engines["old"].behind, engines["old"].stale_s) == (2, 3.0), "7 and 9; 7 was published 3 s ago"
    assert (engines["none"].behind, engines["none"].since_s) == (3, None)
    assert engines["old"].hosts == ("10.0.0.0", "10.0.0.1") and engines["old"].ranks == 3


def test_what_is_not_known_after_a_restart_is_not_made_up():
    told = Told()
    told.publish(5)
    told.chronicle = Chronicle(told.clock)  # it knows no more of it than the trainers, who have it
    told.engine("e", 4)
    told.engine("f", 5)
    status = told.status()
    assert (status.engines["e"].behind, status.engines["e"].stale_s, status.engines["e"].since_s) == (1, None, None)
    assert (status.engines["f"].behind, status.engines["f"].stale_s, status.engines["f"].since_s) == (0, 0.0, None)
    assert [(v.version, v.ago_s, v.kept) for v in status.versions] == [(5, None, True)]


def test_a_rank_that_is_silent_is_told_of():
    told = Told()
    told.engine("e", 1, ranks=2, world=2)
    told.heard = {"e-0": told.clock.now, "e-1": told.clock.now - 8}
    assert told.status().engines["e"].silent_s == 8


def test_an_update_from_its_begin_to_its_end():
    told = Told()
    report = SyncReport(4, "")
    with told.chronicle.update("sync", report):
        assert told.status(50, 60).update.phase == "waiting"
        told.chronicle.enter("publishing")
        told.clock.now += 1
        update = told.status(50, 60).update
        assert (update.moved_bytes, update.total_bytes) == (0, 0), "those are of the update before"
        report.mode = "p2p"
        told.chronicle.enter("planning", ["e", "f"])
        told.chronicle.enter("staging")
        told.clock.now += 2
        update = told.status(20, 60).update
        assert (update.phase, update.mode, update.engines) == ("staging", "p2p", ("e", "f"))
        assert (update.moved_bytes, update.total_bytes, update.seconds, update.stage_s) == (20, 60, 3.0, 2.0)
    told.clock.now += 10
    status = told.status(60, 60)
    assert status.update is None
    (outcome,) = status.outcomes
    assert (outcome.report.version, outcome.error, outcome.seconds, outcome.ago_s) == (4, "", 3.0, 10.0)


def test_what_failed_is_told_and_only_the_last_are_kept():
    told = Told()
    for version in range(40):
        with pytest.raises(WeightSyncError), told.chronicle.update("sync", SyncReport(version, "p2p")):
            raise WeightSyncError("no room")
    with told.chronicle.update("publish", SyncReport(40, "")):
        pass
    outcomes = told.status().outcomes
    assert [o.report.version for o in outcomes] == list(range(39, 23, -1)) and outcomes[0].error == "no room", "and no successful publish"


def test_who_is_gone_until_he_is_back():
    told = Told()
    told.chronicle.serves(["e"], 6)
    told.chronicle.left("e", "died")
    told.clock.now += 3
    departed = told.status().departed
    assert (departed["e"].why, departed["e"].ago_s, departed["e"].version) == ("died", 3.0, 6)
    told.chronicle.joined("e")
    assert not told.status().departed
    for n in range(100):
        told.chronicle.left(f"e{n}", "died")
    assert list(told.status().departed) == [f"e{n}" for n in range(84, 100)]


def test_a_group_tells_of_all_that():
    source, phases = StateDictSource({"model.norm.weight": torch.zeros(1000)}), []
    with Group() as group:
        group.trainer(source, 0, 1)
        engine = group.engine(StateDictSource({"model.norm.weight": torch.ones(1000)}), "e")
        stage = engine.do_stage

        def looked_at(command):
            phases.append(group.status().update)
            return stage(command)

        commit = engine.do_commit

        def looked_at_again(command):
            phases.append(group.status().engines["e"])
            return commit(command)

        engine.do_stage, engine.do_commit = looked_at, looked_at_again
        group.sync(mode="p2p")
        group.publish()
        status = group.status()
    assert (phases[0].what, phases[0].version, phases[0].mode, phases[0].phase, phases[0].engines) == ("sync", 0, "p2p", "staging", ("e",))
    assert phases[0].total_bytes == 4000
    assert phases[1].behind == 1 and phases[1].stale_s >= 0, "the version is published, while it is on its way"
    assert status.update is None and [o.report.engines for o in status.outcomes] == [["e"]]
    assert (status.published, status.version, status.trainer_world) == (1, 0, 1)
    assert [(v.version, v.nbytes, v.kept) for v in status.versions] == [(1, 4000, True), (0, 4000, True)]
    e = status.engines["e"]
    assert (e.version, e.behind, e.state, e.ranks, e.world) == (0, 1, "serving", 1, 1) and e.stale_s >= 0 and e.since_s >= e.stale_s
