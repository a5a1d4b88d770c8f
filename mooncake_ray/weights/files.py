"""`Files`: the steps by which something gets onto a disk so that it is there whole, or not at all, whatever happens in between.

And locks that end with the process that holds them (`flock`): they tell what is in use from what a dead process has left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Files", "Lock"]

_AT_MOST = 1 << 30  # bytes that are given to one write


class Files:
    """Each method is one step, after which the process may die. Nothing is buffered. Errors are the system's own, OSError.

    Thread-safe.
    """

    def __init__(self, fsync: bool = True) -> None:
        """`fsync`: what is written also outlives the machine; without, only the process."""
        self.fsync = fsync

    def make_directory(self, path: Path) -> None:
        """Raises FileExistsError."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """A new empty file, open for writing; an older one of that name is emptied. Returns its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, file: int, data: memoryview) -> int:
        """Appends some of the bytes, returns how many."""
        return os.write(file, data[:_AT_MOST])

    def sync(self, file: int) -> None:
        """A file's content is on the disk."""
        if self.fsync:
            os.fsync(file)

    def sync_directory(self, path: Path) -> None:
        """A directory's names are on the disk."""
        if self.fsync:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def rename(self, old: Path, new: Path) -> None:
        """`new` is `old` from now on, at once for everybody."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_directory(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            path.rmdir()

    # ---- of several steps

    def append(self, file: int, data: memoryview) -> None:
        """Writes all the bytes."""
        while len(data):
            data = data[self.write(file, data) :]

    def put(self, path: Path, parts: Iterable[bytes]) -> None:
        """A file of that name with that content: it is there whole, or what was there before is. Its directory must be synced."""
        unfinished = path.with_name(path.name + ".unfinished")
        file = self.create(unfinished)
        try:
            for part in parts:
                self.append(file, memoryview(part))
            self.sync(file)
        finally:
            os.close(file)
        self.rename(unfinished, path)

    def make_directories(self, path: Path) -> None:
        """A directory, and those that it is in, if they are not there; for good."""
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for new in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process has just made it
                self.make_directory(new)
            self.sync_directory(new.parent)

    def sync_tree(self, path: Path) -> None:
        """A directory's files and names are on the disk, whoever of this host has written them."""
        for inner in path.iterdir():
            if inner.is_dir():
                self.sync_tree(inner)
            else:
                file = os.open(inner, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    self.sync(file)
                finally:
                    os.close(file)
        self.sync_directory(path)

    def remove_tree(self, path: Path) -> None:
        """A directory and the files in it. Others may be removing it, too."""
        with contextlib.suppress(FileNotFoundError):
            for inner in sorted(path.iterdir()):
                if inner.is_dir() and not inner.is_symlink():
                    self.remove_tree(inner)
                else:
                    self.remove(inner)
        self.remove_directory(path)


class Lock:
    """A lock on a directory: shared by those who use it, or of the one who takes it away. Ends with `close`, or with the process.

    Where a network file system does not carry locks between hosts, those of other hosts are not seen.
    """

    NAME = "in-use"

    def __init__(self, file: int) -> None:
        self._file = file

    @classmethod
    def take(cls, directory: Path, *, alone: bool = False) -> Lock | None:
        """At once or not at all: None if others are in the way, or the directory is gone."""
        try:
            try:
                file = os.open(directory / cls.NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as e:
                if e.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                file = os.open(directory / cls.NAME, os.O_RDONLY | os.O_CLOEXEC)  # another user's, or mounted for reading
        except (FileNotFoundError, NotADirectoryError):
            return None
        lock = cls(file)
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            if lock.holds(directory):
                return lock
        except BlockingIOError:
            pass
        except BaseException:
            lock.close()
            raise
        lock.close()  # another holds it, or has taken the directory away in between
        return None

    def holds(self, directory: Path) -> bool:
        """Whether it is a lock on what is there now: whoever knows nothing of locks may have put another in its place."""
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(directory / self.NAME))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()
