"""Snapshots of loops: whole or not there, whoever dies, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest
from mortal_files import Disk, Mortal, Recorder, dies_or_ends

from mooncake_ray.errors import ConfigError, CorruptBlockError, SnapshotError, SnapshotNotFoundError, StaleVersionError
from mooncake_ray.loops import LoopSettings, LoopSnapshots, LoopState


def save(store, step):
    def learners(folder):
        (folder / "ranks").mkdir()
        (folder / "ranks" / "0.pt").write_text(f"weights {step}")

    def buffer(folder):
        folder.mkdir()
        (folder / "samples").write_text(f"samples {step}")
        return 3 * step

    store.save(step, 2 * step, learners, buffer)


def check(store):
    """The newest is whole; returns its step."""
    with store.open() as last:
        step = last.state.step
        assert last.state == LoopState(step, 2 * step, 3 * step)
        assert (last.learners / "ranks" / "0.pt").read_text() == f"weights {step}"
        assert (last.buffer / "samples").read_text() == f"samples {step}"
    return step


def test_it_comes_back(tmp_path):
    store = LoopSnapshots(tmp_path / "run")
    with pytest.raises(SnapshotNotFoundError, match="there is none"):
        store.open()
    for step in (0, 10, 20):
        save(store, step)
        assert check(store) == step
    assert list(store.versions()) == [10, 20]
    with pytest.raises(StaleVersionError, match="version 20"):
        save(store, 20)
    with store.open(10) as older:
        save(store, 30)
        assert (older.buffer / "samples").exists(), "it stays while it is open"


def test_what_cannot_be_saved_leaves_nothing(tmp_path):
    store = LoopSnapshots(tmp_path)

    def full(folder):
        (folder / "half").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.save(1, 1, full, lambda folder: 1)
    assert list(tmp_path.iterdir()) == []


def test_damage(tmp_path):
    store = LoopSnapshots(tmp_path)
    save(store, 1)
    state = tmp_path / "version-00000001" / "loop.json"
    whole = json.loads(state.read_text())
    for text in ("", "[]", "{}", json.dumps({**whole, "more": 1}), json.dumps({"format": 1})):
        state.write_text(text)
        with pytest.raises(CorruptBlockError, match=r"loop\.json is damaged"):
            store.open()
    state.write_text(json.dumps({**whole, "format": 2}))
    with pytest.raises(SnapshotError, match="format 2, and this package reads format 1"):
        store.open()
    state.unlink()
    with pytest.raises(CorruptBlockError, match=r"loop\.json is damaged"):
        store.open()


def test_killed_at_every_step(tmp_path):
    seen, n, done = set(), 0, False
    while not done:
        store = LoopSnapshots(tmp_path / str(n), keep=1)
        save(store, 1)
        done = dies_or_ends(lambda: save(LoopSnapshots(tmp_path / str(n), keep=1, files=Mortal(n)), 2))  # noqa: B023
        step = check(store)
        seen.add((step, done))
        save(store, step + 1)
        assert [path.name for path in store.directory.iterdir()] == [f"version-{step + 1:08d}"]
        shutil.rmtree(store.directory)
        n += 1
    assert seen == {(1, False), (2, False), (2, True)}


class Told(Recorder):
    """Of what others have written, it learns when it is synced."""

    def sync_tree(self, path):
        for inner in sorted(path.rglob("*")):
            if inner.is_dir():
                self.log.append(("make", inner))
            else:
                self.log += [("create", inner), ("write", inner, inner.read_bytes()), ("sync", inner)]
        self.log += [("names", folder) for folder in (*[p for p in path.rglob("*") if p.is_dir()], path)]


def test_a_power_cut_at_every_step(tmp_path):
    folder = tmp_path / "run"
    save(LoopSnapshots(folder), 1)
    disk, recorder = Disk(folder), Told(folder)
    store = LoopSnapshots(folder, keep=1, files=recorder)
    store.save(2, 4, lambda path: _write(path / "ranks" / "0.pt", "weights 2"), lambda path: _saved(recorder, path))
    steps = []
    for n, entry in enumerate([None, *recorder.log]):
        if entry is not None:
            disk.do(*entry)
        for eager in (False, True):
            cut = tmp_path / f"cut-{n}-{eager}"
            disk.after_cut(cut, eager=eager)
            steps.append((eager, check(LoopSnapshots(cut))))
    for eager in (False, True):
        seen = [step for e, step in steps if e == eager]
        assert seen == sorted(seen) and set(seen) == {1, 2}


def _write(path, text):
    path.parent.mkdir(parents=True)
    path.write_text(text)


def _saved(files, folder):
    """As a buffer is."""
    files.make_directory(folder)
    files.put(folder / "samples", [b"samples 2"])
    files.sync_directory(folder)
    return 6


@pytest.mark.parametrize(("name", "value"), [("snapshot_every", 0), ("snapshot_every", True), ("snapshot_timeout_s", 0.0)])
def test_settings(name, value):
    with pytest.raises(ConfigError, match=name):
        LoopSettings(4, **{name: value})
