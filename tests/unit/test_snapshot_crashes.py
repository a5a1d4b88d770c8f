"""A save that dies at any step, by a kill or with the machine, leaves the version before, or the new one: whole."""

from __future__ import annotations

import shutil

import pytest
import torch
from disk_models import same
from mortal_files import Disk, Mortal, Recorder, dies_or_ends
from test_snapshots import halves, model, whole

from mooncake_ray.weights.snapshot import SnapshotStore


def save_in_child(directory, dies_at, version):
    """Returns whether the child came to its end."""
    return dies_or_ends(lambda: SnapshotStore(directory, keep=1, files=Mortal(dies_at)).save(version, halves(model(version))))


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
