"""`Weights`: the versions that a loop's learner makes, on their way to the rollout workers' engines, one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable

import ray

from mooncake_ray.errors import WeightSyncError
from mooncake_ray.loops.metrics import Timeline
from mooncake_ray.sync.group import WeightSyncGroup

__all__ = ["Weights"]

logger = logging.getLogger("mooncake_ray")

_GRACE_S = 10.0


class Weights:
    """Of one thread, the learner's. What it publishes is read from the learners meanwhile, so it is only called between their steps."""

    def __init__(self, group: WeightSyncGroup, timeline: Timeline, check: Callable[[], None], timeout_s: float, retries: int) -> None:
        """`check`: raises if the learners are not those any more that have trained what was published."""
        self._group, self._timeline, self._check, self._timeout_s, self._retries = group, timeline, check, timeout_s, retries
        self.version = -1
        """That the learners have now."""
        self.pauses_s: list[float] = []
        self.skipped = self.failures = 0
        self._published = -1
        self._under_way: tuple[ray.ObjectRef, int, float] | None = None
        self._failed = 0  # one after the other

    def begin(self, least: int = 0) -> None:
        """Publishes what the learners have now as a version that no engine has had, and `least` at least, and brings all engines to it."""
        if self._under_way is not None:
            self._end()
        now = self._group.status()
        self.version = max(now.version, now.published, self._published, self.version, least - 1) + 1
        self._send()
        self.wait()

    def are_everywhere(self) -> bool:
        """Whether there is no engine without weights: one that has joined again gets the group's version by itself. Of any thread."""
        try:
            return all(version >= 0 for version in self._group.versions().values())
        except (ray.exceptions.RayError, WeightSyncError) as e:
            logger.warning("mooncake_ray: whether all engines have weights is not known now: %s", e)
            return False

    def trained(self) -> None:
        """The learners have made the next version."""
        self.version += 1

    def send_if_idle(self) -> None:
        """Sends the learners' version, unless engines have it or another one is still on its way to them.

        Raises:
            WeightSyncError: it has failed too often.
        """
        if self._under_way is not None and ray.wait([self._under_way[0]], timeout=0, fetch_local=False)[0]:
            self._end()
        if self._under_way is None and self.version > self._published:
            self._send()

    def wait(self) -> None:
        """Until all engines have the last version that was sent; if that fails, it is sent again."""
        while self._under_way is not None:
            self._end()
            if self.version > self._published:
                self._send()

    def _send(self) -> None:
        self.skipped += max(0, self.version - self._published - 1) if self._published >= 0 else 0
        with self._timeline.span("weights", "publish"):
            try:
                self._group.publish(self.version, timeout_s=self._timeout_s)
            except WeightSyncError:
                self._check()
                raise
            self._check()
        self._published = self.version
        self._under_way = (self._group.async_sync(self.version, timeout_s=self._timeout_s), self.version, self._timeline.now_s)

    def _end(self) -> None:
        ref, version, begin = self._under_way
        try:
            report = ray.get(ref, timeout=self._timeout_s + _GRACE_S)
        except (ray.exceptions.RayError, WeightSyncError) as e:
            self._failed += 1
            self.failures += 1
            if self._failed > self._retries:
                raise
            logger.warning("mooncake_ray: version %d of the weights is not with the engines, and the next one will be sent: %s", version, e)
        else:
            self._failed = 0
            self.pauses_s.append(report.pause_s)
        finally:
            self._under_way = None
            self._timeline.add("weights", f"version {version}", begin)
