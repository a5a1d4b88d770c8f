"""A save that dies at any step, by a kill or with the machine, leaves the version before, or the new one: whole."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from disk_models import same
from test_snapshots import halves, model, whole

from mooncake_ray.weights.files import Files
from mooncake_ray.weights.snapshot import SnapshotStore

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


def save_in_child(directory, dies_at, version):
    """Returns whether the child came to its end."""
    child = os.fork()
    if not child:
        try:
            SnapshotStore(directory, keep=1, files=Mortal(dies_at)).save(version, halves(model(version)))
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.waitstatus_to_exitcode(status) == 0
    return True


@pytest.fixture
def one_thread():
    """Forked children compute, and torch's pool of threads does not come along."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_killed_at_every_step(tmp_path):
    n, seen = 0, set()
    while True:
        directory = tmp_path / str(n)
        SnapshotStore(directory).save(1, halves(model(1)))
        done = save_in_child(directory, n, 2)
        store = SnapshotStore(directory, keep=1)
        with store.open() as snapshot:
            snapshot.verify()
            version = snapshot.version
        assert same(whole(store), model(version))
        seen.add((version, done))
        # The next writer does not care, and cleans up.
        again = version + 1
        store.save(again, halves(model(again)))
        assert [p.name for p in directory.iterdir()] == [f"version-{again:08d}"]
        assert same(whole(store), model(again))
        shutil.rmtree(directory)
        if done:
            break
        n += 1
    assert seen == {(1, False), (2, False), (2, True)}
    assert n > 30


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


def test_the_first_version_survives_a_power_cut(tmp_path):
    """So does the directory that it made the store in."""
    root = tmp_path / "root"
    root.mkdir()
    disk, recorder = Disk(root), Recorder(root)
    SnapshotStore(root / "runs" / "store", files=recorder).save(1, halves(model(1)))
    for entry in recorder.log:
        disk.do(*entry)
    disk.after_cut(tmp_path / "cut", eager=False)
    assert same(whole(SnapshotStore(tmp_path / "cut" / "runs" / "store")), model(1))


def test_a_power_cut_at_every_step(tmp_path):
    """The worst that a file system may do with what was not synced: before and after each step."""
    directory = tmp_path / "store"
    SnapshotStore(directory).save(1, halves(model(1)))
    disk, recorder = Disk(directory), Recorder(directory)
    SnapshotStore(directory, keep=1, files=recorder).save(2, halves(model(2)))
    assert {entry[0] for entry in recorder.log} == {"make", "create", "write", "sync", "names", "rename", "remove"}
    versions = []
    for n, entry in enumerate([None, *recorder.log]):
        if entry is not None:
            disk.do(*entry)
        for eager in (False, True):
            cut = tmp_path / f"cut-{n}-{eager}"
            disk.after_cut(cut, eager=eager)
            store = SnapshotStore(cut)
            with store.open() as snapshot:
                snapshot.verify()
                version = snapshot.version
            assert same(whole(store), model(version))
            versions.append((eager, version))
            shutil.rmtree(cut)
    for eager in (False, True):
        seen = [version for e, version in versions if e == eager]
        assert seen == sorted(seen) and set(seen) == {1, 2}
