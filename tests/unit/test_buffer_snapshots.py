"""Snapshots of a buffer's books and samples: bit for bit, whole or not there, and what is refused."""

from __future__ import annotations

import contextlib
import json
import shutil

import numpy as np
import pytest
import torch
from mortal_files import Disk, Mortal, Recorder, dies_or_ends
from rollout_parcels import parcel

from mooncake_ray.data import DataProto
from mooncake_ray.errors import ChecksumError, ConfigError, CorruptBlockError, SnapshotError, SnapshotNotFoundError, StaleVersionError
from mooncake_ray.rollout import snapshots as module
from mooncake_ray.rollout.books import Books
from mooncake_ray.rollout.frozen import freeze, thaw
from mooncake_ray.rollout.ledger import Ledger
from mooncake_ray.rollout.records import Want
from mooncake_ray.rollout.settings import BufferSettings
from mooncake_ray.rollout.snapshots import BufferSnapshots


def batch(seed=0, rows=3):
    """Of columns of every kind that a block has, and of two that it has not."""
    random = np.random.default_rng(seed)
    texts = np.empty(rows, object)
    texts[:] = [{"text": f"row {n}", "seed": seed} for n in range(rows)]
    return DataProto.from_dict(
        tensors={
            "tokens": torch.from_numpy(random.integers(0, 99, (rows, 5))),
            "nans": torch.tensor([float("nan"), -0.0, 1.0])[:rows],
            "half": torch.from_numpy(random.random((rows, 2))).bfloat16(),
            "ragged": torch.nested.nested_tensor([torch.arange(n + seed) for n in range(rows)], layout=torch.jagged),
        },
        non_tensors={"texts": texts, "numbers": random.random(rows)},
    )


def bits(column):
    """What it is made of: dtypes, shapes and bytes, or objects."""
    if isinstance(column, np.ndarray):
        return column.dtype.str, column.shape, column.tolist() if column.dtype == object else column.tobytes()
    parts = [column] if isinstance(column, torch.Tensor) else list(column)
    return [(part.dtype, part.shape, part.contiguous().view(torch.uint8).numpy().tobytes()) for part in parts]


def same(a, b):
    pairs = [(a.batch, b.batch), (a.non_tensor_batch, b.non_tensor_batch)]
    return all(x.keys() == y.keys() and all(bits(x[name]) == bits(y[name]) for name in x) for x, y in pairs)


def ledger(seed=0):
    """One group is queued, one has half of its samples, one was learned from."""
    out = Ledger(BufferSettings(group_size=2, replay_bytes=10_000, lease_s=10.0))
    for n in range(2):
        brought = parcel([f"g{n}"] * 2, version=n, tags={"reward": np.array([0.5, seed]), "why": np.array([None, {"a": ["b"]}], object)})
        out.production.put(brought.id, brought)
    draft = out.consumption.take(7, 1, Want(1), "learner", 0.0)
    out.consumption.commit(7, draft.attempt)
    ticket = out.production.reserve("reserve", "worker", ["g9"], 0.0)
    half = parcel(["g9"], version=1, tags={"reward": np.array([1.0]), "why": np.array(["?"], object)})
    out.production.park(half.id, half, ticket)
    return out


def save(store, version, seed):
    books = Books.of(ledger(seed))
    names = list(books.ledger(BufferSettings(group_size=2, replay_bytes=10_000)).stock.holdings)
    return store.save(version, books, [(name, "DataProto", batch(seed + n)) for n, name in enumerate(names)])


def check(store):
    """The newest is whole; returns its version, and its seed, which is in all of it."""
    with store.open() as snapshot:
        (queued,) = snapshot.books.queued
        seed = int(queued.tags["reward"][1])
        assert json.dumps(snapshot.books.to_json()["queued"][0]["tags"]) == json.dumps(
            Books.of(ledger(seed)).to_json()["queued"][0]["tags"]
        )
        assert len(snapshot.parcels) == 3
        for n, name in enumerate(snapshot.parcels):
            assert same(snapshot.batch(name), batch(seed + n))
        return snapshot.version, seed


def test_books_and_samples_come_back(tmp_path):
    store = BufferSnapshots(tmp_path / "new" / "folder")
    with pytest.raises(SnapshotNotFoundError, match="there is none"):
        store.open()
    assert save(store, 3, 5) > 3 * 200
    assert check(store) == (3, 5)
    with store.open(3) as snapshot:
        again = snapshot.books.ledger(BufferSettings(group_size=2, replay_bytes=10_000))
        with pytest.raises(ConfigError, match="groups of 2 samples, and group_size is 4"):
            snapshot.books.ledger(BufferSettings(group_size=4))
        smaller = snapshot.books.ledger(BufferSettings(group_size=2, max_staleness=0))
    found = again.stats()
    assert (found["groups_queued"], found["groups_waiting"], found["groups_in_replay"], found["parcels"]) == (1, 1, 1, 3)
    with pytest.raises(StaleVersionError, match="step 7 is committed"):
        again.consumption.take(7, 1, Want(1), "learner", 0.0)
    assert found["last_step"] == 7 and found["version"] == 1
    ticket, (work,) = again.production.resume("resume", "worker", 1, 0.0)
    assert ticket > 1 and (work.uid, work.reason, len(work.rows)) == ("g9", "partial", 1)
    assert smaller.stats()["parcels"] == 2, "there is no replay in a buffer without"
    with pytest.raises(StaleVersionError, match=r"version 3 .* already"):
        save(store, 3, 6)


def test_who_has_something_has_nothing_in_a_snapshot():
    live = ledger()
    live.production.reserve("more", "worker", ["g10"], 0.0)
    with pytest.raises(ValueError, match="1 groups are being made, and 0 steps"):
        Books.of(live)
    live.consumption.take(8, 1, Want(1), "learner", 0.0)
    live.take_back()
    found = live.stats()
    assert (found["groups_making"], found["groups_queued"], found["groups_waiting"], found["steps_taken"]) == (0, 1, 2, 0)
    assert Books.of(live)


def test_columns_that_no_block_can_hold():
    got = thaw(*freeze(DataProto.from_dict(tensors={"dense": torch.arange(3), "grad": torch.ones(3, requires_grad=True)})))
    assert got.batch["grad"].requires_grad and got.batch["grad"].tolist() == [1, 1, 1] and got.batch["dense"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", [{"a": 1j}, (1, 2), {1: 2}, object()], ids=repr)
def test_tags_that_are_not_kept(value):
    live = Ledger(BufferSettings())
    column = np.empty(1, object)
    column[0] = value
    brought = parcel(["a"], tags={"odd": column})
    live.production.put(brought.id, brought)
    with pytest.raises(SnapshotError, match="tag 'odd' of group 'a' has a"):
        Books.of(live).to_json()


def test_damage_is_found(tmp_path):
    store = BufferSnapshots(tmp_path)
    save(store, 1, 0)
    path = tmp_path / "version-00000001"
    whole = {name: (path / name).read_bytes() for name in ("books.json", "samples.bin")}
    unnoticed = 0
    for n in range(0, len(whole["samples.bin"]), 97):
        (path / "samples.bin").write_bytes(_flipped(whole["samples.bin"], n))
        with contextlib.suppress(CorruptBlockError):
            assert check(store) == (1, 0)  # nothing is told by the bytes between two columns
            unnoticed += 1
    assert unnoticed < n // 97 // 4
    (path / "samples.bin").write_bytes(whole["samples.bin"][:-1])
    with pytest.raises(CorruptBlockError, match="bytes of"):
        store.open()
    (path / "samples.bin").write_bytes(whole["samples.bin"])
    for n in range(0, len(whole["books.json"]), 37):
        (path / "books.json").write_bytes(_flipped(whole["books.json"], n))
        with pytest.raises((ChecksumError, CorruptBlockError), match=r"books\.json"):
            store.open()
    (path / "books.json").unlink()
    with pytest.raises(CorruptBlockError, match=r"books\.json is gone"):
        store.open()


def _flipped(data, n):
    return data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :]


def test_another_format(tmp_path, monkeypatch):
    store = BufferSnapshots(tmp_path)
    monkeypatch.setattr(module, "_FORMAT", 2)
    save(store, 1, 0)
    monkeypatch.undo()
    with pytest.raises(SnapshotError, match="format 2, and this package reads format 1"):
        store.open()


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    store = BufferSnapshots(tmp_path)
    save(store, 1, 0)

    def parcels():
        yield "one", "DataProto", batch()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.save(2, Books.of(ledger()), parcels())
    assert [path.name for path in tmp_path.iterdir()] == ["version-00000001"]
    assert check(store) == (1, 0)


def test_killed_at_every_step(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # forked children compute, and torch's pool of threads does not come along
    seen, n, done = set(), 0, False
    while not done:
        store = BufferSnapshots(tmp_path / str(n), keep=1)
        save(store, 1, 1)
        done = dies_or_ends(lambda: save(BufferSnapshots(tmp_path / str(n), keep=1, files=Mortal(n)), 2, 2))  # noqa: B023
        version, seed = check(store)
        assert version == seed
        seen.add((version, done))
        save(store, version + 1, 9)
        assert [path.name for path in store.directory.iterdir()] == [f"version-{version + 1:08d}"]
        shutil.rmtree(store.directory)
        n += 1
    torch.set_num_threads(before)
    assert seen == {(1, False), (2, False), (2, True)}
    assert n > 15


def test_a_power_cut_at_every_step(tmp_path):
    folder = tmp_path / "store"
    save(BufferSnapshots(folder), 1, 1)
    disk, recorder = Disk(folder), Recorder(folder)
    save(BufferSnapshots(folder, keep=1, files=recorder), 2, 2)
    versions = []
    for n, entry in enumerate([None, *recorder.log]):
        if entry is not None:
            disk.do(*entry)
        for eager in (False, True):
            cut = tmp_path / f"cut-{n}-{eager}"
            disk.after_cut(cut, eager=eager)
            version, seed = check(BufferSnapshots(cut))
            assert version == seed
            versions.append((eager, version))
    for eager in (False, True):
        seen = [version for e, version in versions if e == eager]
        assert seen == sorted(seen) and set(seen) == {1, 2}
