"""Files whose process dies at any step, and disks that lose power: what tests of crashes write with."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from mooncake_ray.weights.files import Files

__all__ = ["Disk", "Mortal", "Recorder", "dies_or_ends"]

STEPS = ("make_directory", "create", "write", "sync", "sync_directory", "rename", "remove", "remove_directory")


class Mortal(Files):
    """Kills its process before its n-th step, or in the middle of it if that is a write."""

    def __init__(self, dies_at):
        super().__init__(fsync=False)  # a step all the same
        self.left = dies_at

    def step(self):
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, file, data):
        if self.left == 0:
            super().write(file, data[: len(data) // 2])
        self.step()
        return super().write(file, data)


def _stepping(name):
    def method(self, *args):
        self.step()
        return getattr(Files, name)(self, *args)

    return method


for _name in set(STEPS) - {"write"}:
    setattr(Mortal, _name, _stepping(_name))


def dies_or_ends(work):
    """Does it in a forked child. Returns whether that came to its end."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.waitstatus_to_exitcode(status) == 0
    return True


class Recorder(Files):
    """Notes what is done to a directory, so that what a power cut would have left of it can be told."""

    def __init__(self, root):
        super().__init__()
        self.root, self.log, self.open = Path(root), [], {}

    def make_directory(self, path):
        super().make_directory(path)
        self.log.append(("make", path))

    def create(self, path):
        file = super().create(path)
        self.open[file] = path
        self.log.append(("create", path))
        return file

    def write(self, file, data):
        n = super().write(file, data)
        self.log.append(("write", self.open[file], bytes(data[:n])))
        return n

    def sync(self, file):
        super().sync(file)
        self.log.append(("sync", self.open[file]))

    def sync_directory(self, path):
        super().sync_directory(path)
        self.log.append(("names", path))

    def rename(self, old, new):
        super().rename(old, new)
        self.log.append(("rename", old, new))

    def remove(self, path):
        super().remove(path)
        self.log.append(("remove", path))

    def remove_directory(self, path):
        super().remove_directory(path)
        self.log.append(("remove", path))


class Disk:
    """A model of a file system after a power cut. Directories and files are nodes; a directory has the names it has now, and those on the disk.

    What was not synced may be there or not: `lazy` has nothing of it, `eager` all changes of names and no content.
    """

    class File:
        def __init__(self, now=b"", disk=None):
            self.now, self.disk = now, disk

    class Directory:
        def __init__(self):
            self.now, self.disk = {}, {}

    def __init__(self, root):
        self.root_path, self.root = Path(root), self._load(Path(root))

    def _load(self, path):
        if path.is_file():
            return self.File(path.read_bytes(), path.read_bytes())
        node = self.Directory()
        node.now = {p.name: self._load(p) for p in path.iterdir()}
        node.disk = dict(node.now)
        return node

    def _at(self, path):
        node = self.root
        for name in path.relative_to(self.root_path).parts:
            node = node.now[name]
        return node

    def do(self, what, path, *more):
        parent = self._at(path.parent) if path != self.root_path else None
        if what == "make":
            parent.now[path.name] = self.Directory()
        elif what == "create":
            parent.now[path.name] = self.File()
        elif what == "write":
            self._at(path).now += more[0]
        elif what == "sync":
            self._at(path).disk = self._at(path).now
        elif what == "names":
            self._at(path).disk = dict(self._at(path).now)
        elif what == "rename":
            self._at(more[0].parent).now[more[0].name] = parent.now.pop(path.name)
        elif what == "remove":
            parent.now.pop(path.name, None)

    def after_cut(self, to, *, eager):
        self._write(self.root, to, eager)

    def _write(self, node, to, eager):
        if isinstance(node, self.File):
            to.write_bytes(node.disk or b"")
            return
        to.mkdir()
        for name, inner in (node.now if eager else node.disk).items():
            self._write(inner, to / name, eager)
