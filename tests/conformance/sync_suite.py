"""What every way of syncing weights must do. A test class inherits `SyncModeSuite` and says which mode it is; its module has a fixture `job`:
all engines serve the weights of seed 0, which is version `before`, and trainers hold those of seed 1."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import pytest
import ray

from mooncake_ray.errors import StaleVersionError, SyncAbortedError, SyncTimeoutError

S = 150


class SyncModeSuite:
    """Inherit, set `mode`, and override what differs."""

    mode: ClassVar[str]
    slow: ClassVar[tuple[str, ...]] = ()
    """Tests that are left out of a quick run for this mode: what they are about is the same for all."""

    def __init_subclass__(cls) -> None:
        for name in cls.slow:
            setattr(cls, name, pytest.mark.slow(_copy(getattr(cls, name))))

    def sync(self, job: Any, version: int | None = None) -> Any:
        report = job.group.sync(version, mode=self.mode, timeout_s=S)
        assert report.mode == self.mode and not report.fallbacks
        return report

    def serves(self, job: Any, version: int, seed: int, *engines: str) -> None:
        """Those engines are at a version, and have its weights and no others, bit for bit."""
        engines = engines or ("e0", "e1")
        there = job.group.versions()
        assert {name: there[name] for name in engines} == dict.fromkeys(engines, version) and job.serve(seed, *engines)

    def test_exact_weights(self, job):
        for number in range(1, 4):
            job.train(number)
            report = self.sync(job)
            assert report.version == job.before + number and sorted(report.engines) == ["e0", "e1"] and not report.lost
            self.serves(job, report.version, number)

    def test_version_order(self, job):
        later = job.before + 5
        assert job.group.publish(later, timeout_s=S) == later
        with pytest.raises(StaleVersionError, match=f"version {later - 2} is not newer than {later}"):
            job.group.publish(later - 2, timeout_s=S)
        job.train(2)  # engines get what was published
        assert job.group.sync(mode=self.mode, timeout_s=S).version == later
        self.serves(job, later, 1)
        with pytest.raises(StaleVersionError):
            job.group.sync(later - 1, mode=self.mode, timeout_s=S)
        assert job.group.sync(later, mode=self.mode, timeout_s=S).engines == [], "they have it"

    @pytest.mark.parametrize("step", ["stage", "commit"])
    def test_receiver_death(self, job, step):
        ray.get(job.engines["e1"][1].die_at.remote(step))
        report = self.sync(job)
        assert report.engines == ["e0"] and list(report.lost) == ["e1"]
        self.serves(job, report.version, 1, "e0")
        assert job.group.versions().get("e1", -1) != report.version
        job.heal()
        assert job.group.wait_for(report.version, engines=["e0", "e1"], timeout_s=S) == report.version
        self.serves(job, report.version, 1)

    @pytest.mark.parametrize("after", [False, True])
    def test_sender_death(self, job, after):
        ray.get(job.trainers[1].die_at.remote("publish", after))
        with pytest.raises(SyncAbortedError, match=r"version \d+ was not published .*trainer/1"):
            self.sync(job)
        self.serves(job, job.before, 0)
        job.heal()
        job.train(2)
        report = job.group.sync(mode=self.mode, timeout_s=S)
        assert report.version > job.before
        self.serves(job, report.version, 2)

    def test_mid_update_kill(self, job):
        """A sender is killed while receivers take what it has: they have all of it by then, or nothing has changed."""
        ray.get(job.engines["e0"][0].kill_other_at.remote("stage", job.trainers[1]))
        try:
            version, seed = job.group.sync(mode=self.mode, timeout_s=20).version, 1
        except (SyncAbortedError, SyncTimeoutError):
            version, seed = job.before, 0
        self.serves(job, version, seed)
        job.heal()
        job.train(2)
        report = job.group.sync(mode=self.mode, timeout_s=S)  # who came back has nothing that a delta could start from
        self.serves(job, report.version, 2)

    @pytest.mark.parametrize("step", ["publish", "stage", "commit"])
    def test_coordinator_death(self, job, step):
        """In the middle of a step: what was asked for is done by the next one."""
        victim = job.trainers[0] if step == "publish" else job.engines["e0"][0]
        ray.get(victim.kill_at.remote(step, job.group))
        report = job.group.sync(mode=self.mode, timeout_s=S)
        assert report.version == job.before + 1
        self.serves(job, report.version, 1)
        job.train(2)
        assert job.group.sync(mode=self.mode, timeout_s=S).version == job.before + 2
        self.serves(job, job.before + 2, 2)

    def test_retry(self, job):
        """One rank cannot stage it, so nobody gets it; then it is delivered, as it was published."""
        ray.get(job.engines["e1"][0].fail_at.remote("stage"))
        with pytest.raises(SyncAbortedError, match="stage was to fail"):
            self.sync(job)
        self.serves(job, job.before, 0)
        job.train(2)
        report = self.sync(job)
        assert report.version == job.before + 1
        self.serves(job, report.version, 1)

    def test_half_applied(self, job):
        """An engine of which one rank fails to apply serves nothing until it is restored."""
        ray.get(job.engines["e0"][1].fail_at.remote("commit"))
        report = self.sync(job)
        assert report.engines == ["e1"] and list(report.lost) == ["e0"]
        self.serves(job, report.version, 1, "e1")
        assert job.group.wait_for(report.version, timeout_s=S) == report.version
        self.serves(job, report.version, 1)


def _copy(test: Any) -> Any:
    """So that marks of a subclass are its own."""

    @functools.wraps(test)
    def copy(*args: Any, **kwargs: Any) -> None:
        test(*args, **kwargs)

    return copy
