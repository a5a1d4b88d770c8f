"""Deltas in verl's own format, applied by verl's own loader: after any steps the model has exactly what the trainers have."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("codetiming", reason="verl's workers need it")
from verl_group import SMALL, Engine, Group, board, leaks_allowed, loses  # noqa: F401 - fixtures

from mooncake_ray.errors import ConfigError, PlanError, SyncAbortedError
from mooncake_ray.integrations.verl_weights.changes import changes_of
from mooncake_ray.integrations.verl_weights.flushes import patch_flushes
from mooncake_ray.integrations.verl_weights.stream import Named

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


_LOADING = threading.Lock()  # verl's loader replaces `Tensor.copy_` meanwhile: it expects a process of its own


class Model:
    """What verl's loader wants of a model: it copies into parameters by name."""

    def __init__(self) -> None:
        self.parameters: dict[str, torch.Tensor] = {}
        self.loads = 0

    def load_weights(self, items) -> None:
        for name, tensor in items:
            self.loads += 1
            self.parameters.setdefault(name, torch.zeros(tensor.shape, dtype=tensor.dtype)).copy_(tensor)


class Deltas(Group):
    """Workers whose flushes go into models."""

    def __init__(self, senders: int, receivers: int, **kwargs) -> None:
        super().__init__(senders, receivers, delta=True, **kwargs)
        self.models = [Model() for _ in range(receivers)]
        self.flushes: list[list[dict]] = [[] for _ in range(receivers)]

    async def receive(self, number: int, step=None) -> None:
        await asyncio.to_thread(self.load, number, step)

    def load(self, number: int, step) -> None:
        from verl.workers.rollout.sglang_rollout.delta_loader import apply_delta

        self.flushes[number], ends = [], []
        for named, is_last in self.receivers[number].receive_weights(global_steps=step):
            self.flushes[number].append(json.loads(dict(named)["__delta_spec__"].numpy().tobytes()))
            with _LOADING:
                apply_delta(self.models[number], named)
            ends.append(is_last)
        assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)

    def sends(self, weights: dict[str, torch.Tensor]) -> str:
        """One update; returns how it went: "dense", "indices", or "" if there was nothing to send."""
        self.passes(*[weights] * len(self.senders))
        for model in self.models:
            assert all(torch.equal(bits(model.parameters[name]), bits(tensor)) for name, tensor in weights.items()), "bit for bit"
        ways = {spec["encoding"] for flushes in self.flushes for spec in flushes}
        assert len(ways) <= 1
        return "".join(ways)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def weights_of(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    made = {f"w{n}": torch.randn(70 + n, 300, generator=draw).bfloat16() for n in range(6)}
    return {**made, "norm": torch.randn(33, generator=draw), "big": torch.randn(40_000, generator=draw), "ids": torch.arange(9)}


def stepped(weights: dict[str, torch.Tensor], seed: int, share: float = 0.02) -> dict[str, torch.Tensor]:
    draw, out = torch.Generator().manual_seed(seed), {}
    for name, tensor in weights.items():
        moved = tensor * 1.01 if tensor.is_floating_point() else tensor
        out[name] = torch.where(torch.rand(tensor.shape, generator=draw) < share, moved, tensor)
    return out


def test_after_the_first_only_what_changed(pool):
    group, weights = Deltas(2, 3), weights_of()
    assert group.sends(weights) == "dense"
    for step in range(3):
        weights = stepped(weights, step)
        assert group.sends(weights) == "indices"
        changed = sum(p["val_end"] - p["val_start"] for spec in group.flushes[0] for p in spec["params"])
        assert 0 < changed < 0.03 * sum(t.numel() for t in weights.values())
    assert group.sends(weights) == "", "nothing changed, and nothing is sent"
    weights = stepped(weights, 9)
    assert group.sends(weights) == "indices"


def test_when_all_is_sent_again(pool):
    group, weights = Deltas(2, 2), weights_of()
    group.sends(weights)
    weights = stepped(weights, 1, share=0.9)
    assert group.sends(weights) == "dense", "most of it changed"
    weights = {**weights, "ids": weights["ids"] + 1}
    assert group.sends(weights) == "dense", "verl's loader overwrites only floating-point numbers"
    weights = {**weights, "norm": torch.full((33,), float("nan"))}
    assert group.sends(weights) == "dense", "… and takes NaN for what did not change"
    weights = {**stepped(weights, 2), "more": torch.zeros(3)}
    assert group.sends(weights) == "dense", "there is another tensor"
    weights = stepped(weights, 3)
    assert group.sends(weights) == "indices"


def test_a_worker_without_the_version_before(pool):
    group, weights = Deltas(1, 2), weights_of()
    group.sends(weights)
    group.receivers[1], group.models[1] = Engine(2 << 20, delta=True, **SMALL), Model()
    weights = stepped(weights, 1)
    assert group.sends(weights) == "dense"
    weights = stepped(weights, 2)
    assert group.sends(weights) == "indices"


def test_an_update_that_failed_between(pool, monkeypatch):
    group, weights = Deltas(2, 2), weights_of()
    group.sends(weights)
    monkeypatch.setattr(group.receivers[1]._receiver, "fetch_patch", loses)
    done = group.update(*[stepped(weights, 1)] * 2)
    assert isinstance(done[3], OSError) and isinstance(done[2], SyncAbortedError) and not group.flushes[0]
    monkeypatch.undo()
    assert group.sends(stepped(weights, 2)) == "indices", "all have still what they had"


def test_a_worker_that_took_a_part(pool, monkeypatch):
    """It has neither the version before nor the new one."""
    group, weights = Deltas(1, 2), weights_of()
    group.sends(weights)

    def half(number: int, step) -> None:
        next(iter(group.receivers[number].receive_weights(global_steps=step)))
        raise OSError("the server is gone")

    monkeypatch.setattr(group, "load", half)
    assert any(isinstance(each, OSError) for each in group.update(stepped(weights, 1)))
    monkeypatch.undo()
    assert group.sends(stepped(weights, 2)) == "dense"


def test_small_flushes(pool):
    group, weights = Deltas(1, 1), weights_of()
    group.receivers[0]._receiver._flush_bytes = 1000
    group.sends(weights)
    assert len(group.flushes[0]) > 4
    assert group.sends(stepped(weights, 1)) == "indices" and len(group.flushes[0]) > 4


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 200), st.sampled_from(["float32", "bfloat16", "float16", "float64"])), max_size=6),
    st.integers(0, 2**32 - 1),
    st.floats(0, 1),
)
def test_changes_are_found_and_put_back(sizes, seed, share):
    """For whole buckets of any floating-point tensors: places and values make the new of the old."""
    draw, tensors, at = np.random.default_rng(seed), [], 0
    for n, (size, dtype) in enumerate(sizes):
        tensors.append(Named(f"t{n}", (size,), dtype, at))
        at = -(-(at + tensors[-1].nbytes) // 64) * 64
    size = max(64, at)
    old = draw.integers(0, 100, at, np.uint8)
    new = np.where(draw.random(at) < share, draw.integers(0, 100, at, np.uint8), old)  # no bits of NaN
    changes = changes_of(tensors, 0, size, old, new)
    data = np.zeros(changes.nbytes, np.uint8)
    changes.write(data)
    made = old.copy()
    for named, _ in patch_flushes([(tensors, changes.counts, data)], 50):
        parts = dict(named)
        for p in json.loads(parts["__delta_spec__"].numpy().tobytes())["params"]:
            into = next(t for t in tensors if t.name == p["name"])
            view = torch.from_numpy(made[into.at : into.at + into.nbytes]).view(getattr(torch, p["dtype"]))
            places = parts["__positions__"][p["pos_start"] : p["pos_end"]].view(torch.int32).long()
            bits_ = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[view.element_size()]
            view.view(bits_)[places] = parts["__values__"][p["val_start"] : p["val_end"]].view(bits_)
    for named in tensors:
        assert np.array_equal(made[named.at : named.at + named.nbytes], new[named.at : named.at + named.nbytes])


def test_what_verls_format_cannot_hold(pool):
    group = Deltas(1, 1)
    done = group.update({"w": torch.zeros(4).to(torch.float8_e4m3fn)})
    assert isinstance(done[0], PlanError) and "'w'" in str(done[0]) and "float8_e4m3fn" in str(done[0])
    assert isinstance(done[1], SyncAbortedError)


def test_settings():
    for wrong in ({"staging": "buckets"}, {"keep": True}):
        with pytest.raises(ConfigError):
            Engine(1 << 20, delta=True, **wrong)
    assert Engine(1 << 20, delta=True).wire_format == "delta_flush" and Engine(1 << 20).wire_format == "named_tensors"
