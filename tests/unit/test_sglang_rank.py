"""Either all ranks of an SGLang server take new weights over, or none does, whichever of them fails, and where. Against what stands for the
server; see `tests/engines` for a real one."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sglang_fake import FakeServer

from mooncake_ray.engines.sglang.native import buckets
from mooncake_ray.engines.sglang.rank import Settings
from mooncake_ray.engines.sglang.server import Server
from mooncake_ray.errors import ConfigError, EnginePoisonedError, PlanError, StaleVersionError, SyncTimeoutError, WeightSyncError
from mooncake_ray.testing import Allowed
from mooncake_ray.weights.source import StateDictSource

NAMES = ("a", "b")


@pytest.fixture
def leaks_allowed():
    return Allowed(threads=("Thread-*", "ThreadPool*", "process_request*"), descriptors=("socket:*",))


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((3, 4), value) for name in NAMES}


@pytest.fixture(params=[1, 2])
def world(request) -> int:
    return request.param


class Pair:
    """A fake server, and what its ranks hold."""

    def __init__(self, world: int, **settings) -> None:
        self.held = [tensors(0.0) for _ in range(world)]
        self.shards = [StateDictSource(held) for held in self.held]
        self.loads = 0
        self.fake = FakeServer(self.shards, self.loaded, **settings)
        self.ranks = self.fake.ranks

    def loaded(self) -> None:
        self.loads += 1

    def holds(self, value: float) -> bool:
        return all(torch.equal(held[name], torch.full((3, 4), value)) for held in self.held for name in NAMES)

    def update(self, value: float, version: int, infos=None) -> list[Exception | None]:
        """By all ranks at once, as a group asks for it. What each of them raised."""

        def one(n: int) -> Exception | None:
            rank = self.ranks[n]
            info = infos[n] if infos else {"pieces": [(i, torch.full((3, 4), value)) for i in range(2)]}
            try:
                rank.start_weight_update()
                rank.prepare_weights(info)
                rank.pause()
                rank.update_weights(info)
                rank.finish_weight_update(version)
            except Exception as e:
                rank.abort_weight_update()
                return e
            return None

        with ThreadPoolExecutor(len(self.ranks)) as threads:
            out = list(threads.map(one, range(len(self.ranks))))
        if not any(out):
            for rank in self.ranks:
                rank.resume()
        return out


@pytest.fixture
def pair(world):
    pair = Pair(world)
    yield pair
    pair.fake.close()


def _finished(rank) -> None:
    rank.update_weights(good(1.0))
    rank.finish_weight_update(0)


def _paused_update(rank) -> None:
    rank.pause()
    _finished(rank)


def good(value: float) -> dict:
    return {"pieces": [(i, torch.full((3, 4), value)) for i in range(2)]}


def test_an_update(pair, world):
    assert pair.update(1.0, 0) == [None] * world
    assert pair.holds(1.0) and pair.loads == world
    assert pair.fake.calls == [
        "pause_generation",
        "begin_weight_update",
        "update_weights_from_tensor",
        "end_weight_update",
        "continue_generation",
    ]
    assert pair.fake.version == "0" and pair.fake.flushed == 1 and not pair.fake.paused and not pair.fake.session
    assert [rank.weight_version for rank in pair.ranks] == [0] * world
    assert all(isinstance(e, StaleVersionError) for e in pair.update(2.0, 0)), "a version is newer than the one before"
    assert pair.holds(1.0) and not any(rank.poisoned for rank in pair.ranks), "nothing was written"


def test_what_cannot_be_taken_over_by_one_is_by_none(pair, world):
    pair.update(1.0, 0)
    whole = pair.held[-1].pop("a")  # the parameter is gone
    errors = pair.update(2.0, 1)
    pair.held[-1]["a"] = whole
    assert all(isinstance(e, WeightSyncError) for e in errors) and isinstance(errors[-1], PlanError)
    assert pair.holds(1.0) and pair.fake.version == "0" and not pair.fake.paused and not pair.fake.session
    assert not any(rank.poisoned for rank in pair.ranks)
    assert pair.update(2.0, 1) == [None] * world and pair.holds(2.0)


def test_what_one_has_written_in_part_poisons_all(pair, world):
    pair.update(1.0, 0)

    def breaking():
        yield 0, torch.full((3, 4), 2.0)
        raise RuntimeError("the rest is lost")

    errors = pair.update(2.0, 1, [*([good(2.0)] * (world - 1)), {"pieces": breaking()}])
    assert all(isinstance(e, WeightSyncError) for e in errors) and "the rest is lost" in str(errors[-1])
    assert all(rank.poisoned and rank.weight_version is None for rank in pair.ranks)
    assert pair.fake.paused and not pair.fake.session and pair.fake.version == "0", "it serves nothing"
    with pytest.raises(EnginePoisonedError, match="written anew"):
        pair.ranks[0].resume()
    assert pair.fake.paused
    assert pair.update(3.0, 1) == [None] * world and pair.holds(3.0) and not pair.fake.paused


def test_a_rank_that_does_not_come(world):
    pair = Pair(world, timeout_s=0.2)
    try:
        pair.ranks[0].start_weight_update()
        pair.ranks[0].pause()
        if world == 1:
            _finished(pair.ranks[0])
            assert pair.holds(1.0)
            return
        with pytest.raises(WeightSyncError, match="nothing is written"):
            _finished(pair.ranks[0])
        pair.ranks[0].abort_weight_update()
        assert pair.holds(0.0) and not pair.fake.paused and not pair.fake.session
    finally:
        pair.fake.close()


@pytest.mark.parametrize("route", ["pause_generation", "begin_weight_update", "update_weights_from_tensor"])
def test_a_server_that_refuses_is_left_as_it_was(pair, route):
    pair.fake.refuse[route] = 500
    pair.ranks[0].start_weight_update()
    with pytest.raises(WeightSyncError, match=f"{route}: 500: refused"):
        _paused_update(pair.ranks[0])
    pair.ranks[0].abort_weight_update()
    assert pair.holds(0.0) and not pair.fake.paused and not pair.fake.session and pair.fake.version == "default"
    pair.fake.refuse.clear()
    assert not any(pair.update(1.0, 0)) and pair.holds(1.0)


def test_a_session_that_was_left_open_is_ended(pair, world):
    pair.fake.session = True
    assert pair.update(1.0, 0) == [None] * world


def test_a_cache_that_cannot_be_flushed_is_no_failure(pair, world, caplog):
    pair.fake.running = True
    assert pair.update(1.0, 0) == [None] * world and pair.holds(1.0) and pair.fake.version == "0"
    assert "the cache was not flushed" in caplog.text


def test_pause_modes():
    for mode, said, first in (
        ("keep", "retract", "pause_generation"),
        ("abort", "abort", "pause_generation"),
        ("wait", "retract", "begin_weight_update"),
    ):
        pair = Pair(1)
        try:
            pair.ranks[0].init_weight_transfer_engine({"pause": mode})
            pair.ranks[0].pause()
            assert pair.fake.paused == said and pair.fake.calls[0] == first
        finally:
            pair.fake.close()


def test_what_others_have_written_is_of_no_version(pair, world):
    pair.update(1.0, 4)
    for rank in pair.ranks:
        rank.forget()
    assert [rank.weight_version for rank in pair.ranks] == [None] * world
    assert pair.update(2.0, 5) == [None] * world


def test_no_answer():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = Server.at(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(SyncTimeoutError, match=r"no answer within 0\.1 s"):
            server.call("health", timeout_s=0.1)


def test_settings_are_checked():
    for wrong in ({"pause": "never"}, {"keep": "all"}, {"timeout_s": 0}):
        with pytest.raises(ConfigError):
            Settings(**wrong)


def test_buckets():
    named = [("a", torch.zeros(3, dtype=torch.int8)), ("b", torch.zeros(2)), ("c", torch.zeros(2, dtype=torch.bfloat16))]
    found = list(buckets(named, 11))
    assert [([name for name, _ in bucket], last) for bucket, last in found] == [(["b", "a"], False), (["c"], True)]
    assert [[name for name, _ in bucket] for bucket, _ in buckets(named, 1)] == [["a"], ["b"], ["c"]], "a larger one is alone"
    for wrong, limit in ((named, 0), ([], 5), (named * 2, 5)):
        with pytest.raises(ConfigError):
            list(buckets(wrong, limit))
