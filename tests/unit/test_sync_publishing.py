"""A version that is still written while engines stage it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from local_group import Group

from mooncake_ray.errors import StoreFullError, SyncAbortedError
from mooncake_ray.sync import trainer
from mooncake_ray.weights.laid import Sources
from mooncake_ray.weights.source import StateDictSource

S = 100.0
NAMES = ("model.norm.weight", "model.embed_tokens.weight")


def source(value: float) -> StateDictSource:
    return StateDictSource({name: torch.full((1000,), value) for name in NAMES})


def holds(group: Group, value: float) -> bool:
    (engine,) = group.engines["e"]
    return all(torch.equal(t, torch.full((1000,), value)) for t in engine.shard().buffers().values())


@pytest.fixture
def group():
    with Group(bucket_bytes=4000) as group:
        yield group


@pytest.mark.parametrize("mode", ["p2p", "auto"])
def test_engines_begin_with_what_is_written(group, monkeypatch, mode):
    """The last object is written only when the first one is at the engine, so one does not wait for the other."""
    group.trainer(source(1.0), 0, 1)
    group.engine(source(0.0), "e")
    there = threading.Event()
    wrote: list[int] = []

    def pack(self: Sources, which: np.ndarray, *where: object) -> None:
        if wrote:
            assert there.wait(S), "nothing is staged before everything is written"
        wrote.append(len(which))
        original(self, which, *where)

    def arrived(note: str, data: np.ndarray) -> None:
        if note == "unit":
            there.set()

    original = Sources.pack
    monkeypatch.setattr(Sources, "pack", pack)
    group.memory.spoil = arrived
    report = group.sync(mode=mode)
    assert len(wrote) == 2 and report.mode == "p2p" and report.engines == ["e"] and holds(group, 1.0)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("mode", ["p2p", "nccl", "delta", "auto"])
def test_what_could_not_be_written_is_no_version(group, monkeypatch, mode, at):
    """Neither for engines, that stage it already, nor for trainers; and the next one is."""
    weights = source(1.0)
    member = group.trainer(weights, 0, 1)
    group.engine(source(0.0), "e")
    assert group.sync(mode="p2p").version == 0 and holds(group, 1.0)
    for tensor in weights.buffers().values():
        tensor.fill_(2.0)
    wrote: list[int] = []

    def pack(self: Sources, which: np.ndarray, *where: object) -> None:
        wrote.append(len(which))
        if len(wrote) == at + 1:
            raise StoreFullError("the disk of the pool is full")
        original(self, which, *where)

    original = Sources.pack
    monkeypatch.setattr(Sources, "pack", pack)
    with pytest.raises(SyncAbortedError, match=r"version 1 was not published.*the disk of the pool is full"):
        group.sync(mode=mode)
    assert holds(group, 1.0) and group.versions() == {"e": 0} and group.status().published == 0
    assert sorted(member._kept) == [0]
    assert group.sync(mode=mode).engines == ["e"] and holds(group, 2.0)


def test_room_that_cannot_be_made_is_given_back(group, monkeypatch):
    group.trainer(source(1.0), 0, 2)
    group.trainer(source(1.0), 1, 2)
    group.engine(source(0.0), "e")
    reserve, asked = group.memory.Reserved, []

    def full(nbytes: int, **what: object) -> object:
        asked.append(nbytes)
        if len(asked) == 2:
            raise StoreFullError("no room")
        return reserve(nbytes, **what)

    monkeypatch.setattr(trainer.blobs, "Reserved", full)
    with pytest.raises(SyncAbortedError, match="no room"):
        group.sync(mode="p2p")
    end = time.monotonic() + S
    while group.memory.unwritten:  # the other rank is told, and not waited for
        assert time.monotonic() < end
        time.sleep(0.01)
    assert group.sync(mode="p2p").engines == ["e"] and holds(group, 1.0)
