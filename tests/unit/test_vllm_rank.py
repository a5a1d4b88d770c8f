"""A vLLM worker's part in an update, without vLLM: what is written when, what becomes visible, and what is left of an update that fails."""

from __future__ import annotations

import threading

import pytest
import torch

from mooncake_ray.engines.vllm.control import control
from mooncake_ray.engines.vllm.rank import VLLMRank
from mooncake_ray.errors import ConfigError, StaleVersionError, SyncTimeoutError, WeightSyncError
from mooncake_ray.weights.source import StateDictSource


class Model:
    """What computes: gets its weights from the copy."""

    def __init__(self) -> None:
        self.copy = {"a": torch.zeros(4), "b": torch.zeros(2, 3)}
        self.served = {name: t.clone() for name, t in self.copy.items()}
        self.ready: dict[str, torch.Tensor] | None = None
        self.fails = False

    def prepare(self) -> None:
        self.ready = {name: t.clone() for name, t in self.copy.items()}

    def apply(self) -> None:
        if self.fails:
            raise RuntimeError("out of memory")
        self.served, self.ready = self.ready, None

    def forget(self) -> None:
        self.ready = None


class Engine:
    """What pauses, and has the workers of one engine take over: as vLLM does, whose workers raise nothing."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.ranks: list[VLLMRank] = []
        self.takes = True

    def pause(self, mode, timeout_s):
        self.calls.append(f"pause {mode}")

    def resume(self, timeout_s):
        self.calls.append("resume")

    def update(self, update_info, timeout_s):
        self.calls.append("update")
        for rank in self.ranks if self.takes else ():
            threading.Thread(target=lambda r=rank: _quietly(r.handover.take)).run()

    def forget_prefixes(self, timeout_s):
        self.calls.append("forget")

    def start(self, timeout_s):
        self.calls.append("start")

    def finish(self, version, timeout_s):
        self.calls.append(version)


def _quietly(take):
    try:
        take(5.0)
    except RuntimeError:
        return


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture(params=[False, True], ids=["of several", "alone"])
def rank(model, engine, request):
    rank = VLLMRank(StateDictSource(model.copy), model, engine, alone=request.param, keep_prefixes=False, timeout_s=5.0)
    engine.ranks.append(rank)
    return rank


def pieces(value: float):
    return {"pieces": [(0, torch.full((4,), value)), (1, torch.full((2, 3), value))]}


def update(rank, new, version: int) -> None:
    rank.start_weight_update()
    try:
        rank.prepare_weights(new)
        rank.pause()
        rank.update_weights(new)
        rank.finish_weight_update(version)
    except BaseException:
        rank.abort_weight_update()
        raise
    rank.resume()


def test_a_version_is_visible_after_all_else(rank, model, engine):
    update(rank, pieces(1.0), 7)
    assert engine.calls == ["start", "pause keep", "update", "forget", 7, "resume"]
    assert rank.weight_version == 7 and not rank.poisoned
    assert all(t.eq(1.0).all() for t in model.served.values())


def test_nothing_served_changes_before_the_pause(rank, model):
    update(rank, pieces(1.0), 1)
    rank.start_weight_update()
    rank.prepare_weights(pieces(2.0))
    assert all(t.eq(1.0).all() for t in model.served.values())
    rank.abort_weight_update()
    assert all(t.eq(1.0).all() for t in model.served.values()) and model.ready is None
    assert rank.weight_version is None and not rank.poisoned  # its copy is of no version now: the next update must be whole
    update(rank, pieces(3.0), 2)
    assert rank.weight_version == 2


def test_changes_need_something_to_change(rank):
    def apply(targets):
        targets[0].add_(1)
        return ()

    with pytest.raises(WeightSyncError, match="only 0 of 2 fragments are new, and there is no version that they change"):
        update(rank, {"apply": apply}, 1)
    update(rank, pieces(1.0), 1)
    update(rank, {"apply": apply}, 2)
    assert rank.weight_version == 2 and rank.shard().buffers()["a"].eq(2.0).all()


def test_a_failure_while_taking_over_poisons_until_all_is_new(rank, model, engine):
    update(rank, pieces(1.0), 1)
    model.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        update(rank, pieces(2.0), 2)
    assert rank.poisoned and rank.weight_version is None and engine.calls[-2:] == ["update", None]  # it stays paused
    model.fails = False
    update(rank, pieces(2.0), 2)
    assert not rank.poisoned and rank.weight_version == 2


def test_an_engine_that_leaves_this_worker_out(rank, engine):
    engine.takes = False
    with pytest.raises(WeightSyncError, match="without this worker"):
        update(rank, pieces(1.0), 1)
    assert not rank.poisoned


def test_a_worker_that_does_not_lead_waits_for_its_own_thread(model):
    rank = VLLMRank(StateDictSource(model.copy), model, None, alone=False, keep_prefixes=False, timeout_s=0.05)
    with pytest.raises(SyncTimeoutError, match="has not begun to take new weights"):
        update(rank, pieces(1.0), 1)
    taking = threading.Thread(target=lambda: rank.handover.take(30.0))
    taking.start()
    update(rank, pieces(1.0), 1)
    taking.join()
    assert rank.weight_version == 1


def test_the_order_of_calls(rank):
    with pytest.raises(WeightSyncError, match="start_weight_update comes first"):
        rank.prepare_weights(pieces(1.0))
    rank.start_weight_update()
    with pytest.raises(WeightSyncError, match="open already"):
        rank.start_weight_update()
    with pytest.raises(WeightSyncError, match="were not taken over"):
        rank.finish_weight_update(1)
    rank.abort_weight_update()
    update(rank, pieces(1.0), 5)
    with pytest.raises(StaleVersionError, match="version 4 comes after version 5"):
        update(rank, pieces(1.0), 4)


@pytest.mark.parametrize("where", [{"url": "localhost:80"}, {"host": "x"}, {"url": "http://x", "actor": "y"}])
def test_control_by_plain_values(where):
    assert control({}) is None
    with pytest.raises(ConfigError):
        control(where)
