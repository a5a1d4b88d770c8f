"""Objects of other libraries, as they come out of the pool: the real verl, tensordict and transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mooncake_ray

ROWS, WIDTH = 64, 2048


@pytest.fixture(scope="module")
def verl_batch():
    from verl import DataProto

    g = torch.Generator().manual_seed(7)
    lengths = torch.randint(5, WIDTH, (ROWS,), generator=g)
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    tensors = {
        "input_ids": torch.randint(0, 151_936, (ROWS, WIDTH), generator=g) * mask,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "old_log_probs": -torch.rand((ROWS, WIDTH), generator=g),
        "values": torch.randn((ROWS, WIDTH), generator=g).to(torch.bfloat16),
    }
    non_tensors = {"uid": np.array([f"u{i // 8}" for i in range(ROWS)], dtype=object), "turns": np.arange(ROWS)}
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors, meta_info={"step": 3, "eos": [1, 2]})


def same(a, b) -> None:
    assert set(a.batch.keys()) == set(b.batch.keys()) and a.batch.batch_size == b.batch.batch_size
    for key in list(a.batch.keys()):
        assert a.batch[key].dtype == b.batch[key].dtype and torch.equal(a.batch[key], b.batch[key]), key
    assert a.non_tensor_batch.keys() == b.non_tensor_batch.keys()
    for key, column in a.non_tensor_batch.items():
        assert column.dtype == b.non_tensor_batch[key].dtype and (column == b.non_tensor_batch[key]).all(), key
    assert a.meta_info == b.meta_info


def through(ray, value):
    before = mooncake_ray.stats()["routed"]
    got = ray.get(ray.put(value))
    assert mooncake_ray.stats()["routed"] == before + 1
    return got


def test_verl_round_trip(pool, pool_ray, verl_batch):
    got = through(pool_ray, verl_batch)
    assert type(got) is type(verl_batch)
    same(got, verl_batch)
    assert pool.objects == 1
    del got
    pool.settles_at(0)


@pytest.mark.parametrize(
    "operation",
    [
        lambda d, D: d.chunk(4),
        lambda d, D: D.concat(d.chunk(8)),
        lambda d, D: d.select(batch_keys=["input_ids", "values"], non_tensor_batch_keys=["uid"]),
        lambda d, D: d.union(D.from_dict(tensors={"advantages": torch.ones(ROWS, WIDTH)})),
        lambda d, D: d.repeat(2, interleave=True),
        lambda d, D: d.repeat(2, interleave=False),
        lambda d, D: [d[3:9], d[torch.tensor([1, 5, 5])], d[::7]],
        lambda d, D: list(d.make_iterator(16, 1, seed=3)),
        lambda d, D: d.split(10),
        lambda d, D: __import__("verl.protocol", fromlist=["x"]).pad_dataproto_to_divisor(d, 24)[0],
        lambda d, D: d.select_idxs(torch.arange(ROWS) % 3 == 0),
    ],
    ids=["chunk", "concat", "select", "union", "repeat", "tile", "slices", "make_iterator", "split", "padding", "select_idxs"],
)
def test_verl_methods(pool, pool_ray, verl_batch, operation):
    from copy import deepcopy

    from verl import DataProto

    expected = operation(deepcopy(verl_batch), DataProto)
    actual = operation(through(pool_ray, verl_batch), DataProto)
    for a, b in zip(*((x if isinstance(x, list) else [x]) for x in (actual, expected)), strict=True):
        if isinstance(a, DataProto):
            same(a, b)
        else:  # make_iterator yields batches as plain DataProto too; anything else is compared by its own equality
            assert a == b
    del actual, a, b


@pytest.mark.slow
def test_verl_in_place_and_on(pool, pool_ray, verl_batch):
    """What a trainer does: pop, add columns, reorder, send chunks on."""

    @pool_ray.remote
    def total(d):
        return len(d), int(d.batch["input_ids"].sum())

    got = through(pool_ray, verl_batch)
    got.pop(batch_keys=["position_ids"])
    got.batch["advantages"] = torch.zeros(ROWS, WIDTH)
    got.reorder(torch.arange(ROWS - 1, -1, -1))
    assert torch.equal(got.batch["input_ids"], verl_batch.batch["input_ids"].flip(0))
    answers = pool_ray.get([total.remote(c) for c in got.chunk(4)])
    assert sum(n for n, _ in answers) == ROWS and sum(s for _, s in answers) == int(verl_batch.batch["input_ids"].sum())
    same(pool_ray.get(pool_ray.put(verl_batch)), verl_batch)  # the source is untouched
    del got


def test_verl_subclasses(pool, pool_ray, verl_batch):
    from verl import DataProto

    class Plain(DataProto):
        pass

    class OwnWay(DataProto):
        def __getstate__(self):
            return {"own": 1}

        def __setstate__(self, state):
            self.__dict__.update(batch=None, non_tensor_batch={}, meta_info=state)

    plain = Plain(batch=verl_batch.batch, non_tensor_batch=verl_batch.non_tensor_batch, meta_info=verl_batch.meta_info)
    got = through(pool_ray, plain)
    assert type(got).__name__ == "Plain"
    same(got, verl_batch)
    own = OwnWay(batch=verl_batch.batch)
    assert pool_ray.get(pool_ray.put(own)).meta_info == {"own": 1}
    del got


def test_tensordict(pool, pool_ray):
    from tensordict import NonTensorData, TensorDict

    td = TensorDict(
        {
            "a": torch.randn(ROWS, WIDTH),
            "nested": TensorDict({"b": torch.arange(ROWS * WIDTH).view(ROWS, WIDTH)}, [ROWS]),
            "tag": NonTensorData("x", [ROWS]),
        },
        batch_size=[ROWS],
    )
    for value in (td, td[3:40], td.consolidate(), td.lock_()):
        got = through(pool_ray, value)
        assert type(got) is type(value) and got.batch_size == value.batch_size and got["tag"] == "x"
        assert torch.equal(got["a"], value["a"]) and torch.equal(got["nested", "b"], value["nested", "b"])
    del got


def test_jagged(pool, pool_ray):
    rows = [torch.arange(n, dtype=torch.float32) for n in (1000, 30_000, 2)]
    jagged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    got = through(pool_ray, [jagged])[0]
    assert got.layout == torch.jagged and all(torch.equal(a, b) for a, b in zip(got.unbind(), rows, strict=True))
    del got


def test_transformers_state_dict(pool, pool_ray):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
    }
    torch.manual_seed(0)
    source, target = LlamaForCausalLM(LlamaConfig(**sizes)), LlamaForCausalLM(LlamaConfig(**sizes))
    state = through(pool_ray, source.state_dict())
    assert list(state) == list(source.state_dict()) and pool.objects == 1
    target.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True))
    del state
    pool.settles_at(0)
    model = through(pool_ray, source)  # a whole module
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, source(ids).logits)
    model(ids).logits.sum().backward()
    del model


def test_our_data_proto(pool, pool_ray):
    from mooncake_ray import DataProto

    class Mine(DataProto):
        pass

    d = Mine.from_dict(
        tensors={"x": torch.randn(ROWS, WIDTH), "m": torch.rand(ROWS, WIDTH) > 0.5},
        non_tensors={"uid": [str(i) for i in range(ROWS)]},
        meta_info={"v": 1},
    )
    got = through(pool_ray, d)
    assert type(got).__name__ == "Mine" and got.equals(d)
    assert Mine.concat([through(pool_ray, c) for c in d.chunk(4)]).equals(d)
    del got
