"""A buffer goes on from a folder, bit for bit, in another job; whoever saved it died in between."""

from __future__ import annotations

import os
import uuid

import numpy as np
import pytest
import ray
import torch

import mooncake_ray
from mooncake_ray.errors import ConfigError, CorruptBlockError, SnapshotNotFoundError, StaleVersionError
from mooncake_ray.rollout.snapshots import BufferSnapshots

LENGTH = 8192  # of a row: a batch of two is stored in the pool
SIZE = 2  # samples of a group
SETTINGS = {"group_size": SIZE, "replay_bytes": 1 << 30, "max_staleness": 4, "lease_s": 600.0}


def rows(uids):
    return {"tokens": torch.stack([torch.full((LENGTH,), int(uid[1:])) for uid in uids])}


def names(first, last):
    return [f"g{n}" for n in range(first, last) for _ in range(SIZE)]


@pytest.fixture
def make(pool):
    made = []

    def create(name=None, **settings):
        made.append(mooncake_ray.RolloutBuffer.create(name or f"saved-{uuid.uuid4().hex}", **SETTINGS | settings))
        return made[-1]

    yield create
    for one in made:
        one.shutdown()


class Saver:
    """Of a process of its own."""

    def save(self, buffer, folder, version):
        return buffer.save(folder, version)


def read(share):
    return sorted(int(row[-1]) for row in share.ref.get()["tokens"])


def test_it_goes_on(make, pool_ray, tmp_path):
    buffer = make()
    buffer.put(rows(names(0, 6)), uids=names(0, 6), version=3, tokens=[7] * 12, tags={"reward": np.arange(12.0)})
    buffer.commit(buffer.take(0, 3, 2))
    taken = buffer.take(1, 3, 1)  # and not committed
    ticket = buffer.reserve(["g6", "g7"])
    ticket.put(rows(["g6"]), uids=["g6"], version=3, tokens=[7], tags={"reward": np.ones(1)})
    saver = ray.remote(num_cpus=0)(Saver).remote()
    saved = ray.get(saver.save.remote(buffer, tmp_path / "buffer", 3))
    assert (saved.version, saved.last_step, saved.groups_queued, saved.groups_waiting, saved.groups_in_replay) == (3, 0, 4, 2, 2)
    assert saved.parcels == 2 and saved.nbytes == sum(f.stat().st_size for f in (tmp_path / "buffer" / "version-00000003").iterdir())
    buffer.commit(taken)  # it has gone on
    ticket.give_back()
    with pytest.raises(StaleVersionError, match=r"version 3 .* already"):
        buffer.save(tmp_path / "buffer", 3)
    buffer.shutdown()

    again = make(restore=tmp_path / "buffer")
    with pytest.raises(StaleVersionError, match="step 0 is committed"):
        again.take(0, 3, 2)
    share = again.take(1, 3, 1, replay=2)
    assert read(share) == [0, 0, 1, 1, 2, 2] and sorted(share.replayed.tolist()) == [False] * 2 + [True] * 4
    again.commit(share)
    resumed = again.resume(2)
    assert [(work.uid, work.reason, None if work.ref is None else read(work)) for work in resumed.works] == [
        ("g6", "orphaned", [6]),
        ("g7", "orphaned", None),
    ]
    resumed.put(rows(names(6, 8)), uids=names(6, 8), version=3, tokens=[7] * 4, tags={"reward": np.ones(4)})
    ray.kill(again._actor, no_restart=False)  # what was restored is what its vault remembers, too
    assert read(again.take(2, 4, 5, timeout_s=200)) == [3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert again.stats()["tokens_trained"] == 7 * 2 * 5
    assert again.save(tmp_path / "buffer", 4).groups_queued == 5
    assert list(BufferSnapshots(tmp_path / "buffer").versions()) == [3, 4]


def test_what_cannot_be_restored(make, tmp_path):
    with pytest.raises(SnapshotNotFoundError, match="there is none"):
        make(restore=tmp_path)
    buffer = make()
    buffer.put(rows(names(0, 1)), uids=names(0, 1), version=0)
    buffer.save(tmp_path, 0)
    name = f"saved-{uuid.uuid4().hex}"
    with pytest.raises(ConfigError, match="groups of 2 samples, and group_size is 3"):
        make(name, restore=tmp_path, group_size=3)
    with pytest.raises(ConfigError, match="cannot be created"):
        make(buffer.name, restore=tmp_path)
    samples = tmp_path / "version-00000000" / "samples.bin"
    data = bytearray(samples.read_bytes())
    data[len(data) // 2] ^= 1
    samples.write_bytes(data)
    with pytest.raises(CorruptBlockError, match=r"samples\.bin, parcel "):
        make(name, restore=tmp_path)
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        buffer.save(samples, 1)
    assert read(buffer.take(0, 0, 1)) == [0, 0]
    make(name).stats()  # nothing has its name
    assert os.listdir(tmp_path) == ["version-00000000"]
