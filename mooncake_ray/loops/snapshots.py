"""`LoopSnapshots`: what a loop goes on from, each version whole and immutable.

    version-00000040/                            after so many steps
        loop.json
        learners/                                whatever the learner ranks write there
        buffer/                                  see `BufferSnapshots`

See `Versions` for what else may be there.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from mooncake_ray.errors import CorruptBlockError, SnapshotError
from mooncake_ray.weights.files import Lock
from mooncake_ray.weights.versions import OpenVersion, Versions, begun, named, unfinished_name

__all__ = ["LoopSnapshot", "LoopSnapshots", "LoopState"]

_STATE, _LEARNERS, _BUFFER = "loop.json", "learners", "buffer"
_FORMAT = 1


@dataclass(frozen=True)
class LoopState:
    """Where a loop is, between two steps."""

    step: int
    """The next one."""
    version: int
    """Of the weights that the learners have."""
    group: int
    """The number of the next group that is begun."""


class LoopSnapshots(Versions):
    """Versions in a directory that the driver, the buffer and all learner ranks see: on one node any, on several a shared one."""

    def save(self, step: int, version: int, learners: Callable[[Path], None], buffer: Callable[[Path], int]) -> None:
        """Writes a version, and deletes what is not to be kept. `learners` and `buffer` write into the directories that they are given; the
        latter returns the number of the next group.

        Raises:
            StaleVersionError: one of this step, or of a later one, is there already.
            OSError: the disk is full, or fails.
        """
        self.refuse_stale(step)
        self._files.make_directories(self.directory)
        path = self.directory.absolute() / unfinished_name(step, uuid.uuid4().hex)
        lock = begun(self._files, path)
        try:
            self._files.make_directory(path / _LEARNERS)
            learners(path / _LEARNERS)
            self._files.sync_tree(path / _LEARNERS)
            state = LoopState(step, version, buffer(path / _BUFFER))
            self._files.put(path / _STATE, [json.dumps({"format": _FORMAT, **asdict(state)}).encode()])
            self._files.sync_directory(path)
            named(self._files, path, step)
        except BaseException:
            self._files.remove_tree(path)
            raise
        finally:
            lock.close()
        self.clean_up()

    def open(self, step: int | None = None) -> LoopSnapshot:
        """Opens the version of that step, by default the newest. It stays until it is closed, whatever is saved meanwhile.

        Raises:
            SnapshotNotFoundError: it is not there.
            SnapshotError: it is of another format.
            CorruptBlockError: what it says of the loop is damaged.
        """
        return self.opened(step, LoopSnapshot)


class LoopSnapshot(OpenVersion):
    """One version, immutable. For one thread.

    Attributes:
        state: See `LoopState`.
        learners: The directory that the learner ranks have written into.
        buffer: For `RolloutBuffer.create(…, restore=…)`.
    """

    def __init__(self, path: Path, lock: Lock, step: int) -> None:
        """Of a directory that is locked. See `LoopSnapshots.open`."""
        self.path = path = path.absolute()
        self._lock = lock
        self.learners, self.buffer = path / _LEARNERS, path / _BUFFER
        try:
            found = json.loads((path / _STATE).read_bytes())
            format = found.pop("format")
            if format != _FORMAT:
                raise SnapshotError(f"{path / _STATE} is of format {format}, and this package reads format {_FORMAT}")
            self.state = LoopState(**found)
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise CorruptBlockError(f"{path / _STATE} is damaged: {e!r}") from e
        if self.state.step != step:
            raise CorruptBlockError(f"{path / _STATE} is of step {self.state.step}")
