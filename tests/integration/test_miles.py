"""Miles' object store interface, read as Miles' trainers read it. (Miles itself cannot be installed here.)"""

from __future__ import annotations

import enum
import types
from abc import ABC, abstractmethod
from argparse import Namespace
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import mooncake_ray
from mooncake_ray.integrations import miles


@dataclass(frozen=True)
class ValueSpec:
    codec: str
    dtype: str | None = None


RAGGED = ValueSpec("typed_ragged")
SPEC = {
    **dict.fromkeys(["tokens", "loss_masks", "rollout_log_probs", "rollout_routed_experts"], RAGGED),
    **{name: ValueSpec("ndarray", "int64") for name in ("partition", "response_lengths", "truncated", "sample_indices")},
    "rewards": ValueSpec("ndarray", "float32"),
    "multimodal_train_inputs": ValueSpec("ragged_tensor_dict"),
    "prompt": ValueSpec("msgpack_ragged"),
    "metadata": ValueSpec("msgpack_ragged"),
    "raw_reward": ValueSpec("auto"),
    "total_lengths": ValueSpec("auto"),
    "micro_batch_indices": ValueSpec("auto"),
}
EXPERTS = (4, 2)  # layers, experts a token


def shard(rows: int = 5, seed: int = 0) -> dict:
    """A shard as the rollout manager packs it: Python lists, and arrays of routed experts."""
    draw = np.random.default_rng(seed)
    prompts, responses = draw.integers(3, 9, rows).tolist(), draw.integers(0, 9, rows).tolist()
    both = [p + r for p, r in zip(prompts, responses, strict=True)]
    return {
        "partition": range(0, 2 * rows, 2),
        "tokens": [draw.integers(0, 150_000, n).tolist() for n in both],
        "multimodal_train_inputs": [
            {"pixel_values": torch.from_numpy(draw.random((3, 4))), "grid": torch.tensor([1, 2])} if i % 2 else None for i in range(rows)
        ],
        "response_lengths": responses,
        "rewards": [0.1 * i for i in range(rows)],
        "truncated": [i % 2 for i in range(rows)],
        "loss_masks": [[1] * n for n in responses],
        "sample_indices": list(range(rows)),
        "rollout_log_probs": [[float(x) for x in -draw.random(n, dtype=np.float32)] for n in responses],
        "rollout_routed_experts": [draw.integers(0, 128, (n - 1, *EXPERTS), dtype=np.int32) for n in both],
        "prompt": [[{"role": "user", "content": f"{i}"}] for i in range(rows)],
        "metadata": [{"turn": i} if i else {} for i in range(rows)],
        "raw_reward": [1, 0.5, None, {"rule": 2}],
        "total_lengths": list(range(2 * rows)),
        "micro_batch_indices": [[0, 1], [2], []],
        "n_adapters": 3,
        "adapter_slots": [0] * rows,
    }


def sliced(log_prob, cut: int):
    """What a trainer does with log-probs that several ranks share: the two ends of a row, in one."""
    first, second = log_prob[:cut], log_prob[-cut:]
    return first + second if isinstance(log_prob, list) else torch.cat([first, second])


def consumed(value: dict) -> dict:
    """A trainer's copy of a shard: the same steps, on the CPU."""
    data = dict(value)
    partition, lengths = data.pop("partition"), data["total_lengths"]
    data["total_lengths"] = [lengths[i] for i in partition]
    data["tokens"] = [torch.tensor(t, dtype=torch.long) for t in data["tokens"]]
    data["loss_masks"] = [torch.tensor(t, dtype=torch.int) for t in data["loss_masks"]]
    data["multimodal_train_inputs"] = [
        None if row is None else {name: tensor.to("cpu") for name, tensor in row.items()} for row in data["multimodal_train_inputs"]
    ]
    data["rollout_log_probs"] = [torch.as_tensor(sliced(row, len(row)), dtype=torch.float32) for row in data["rollout_log_probs"]]
    data["rollout_routed_experts"] = [torch.from_numpy(r) for r in data["rollout_routed_experts"]]
    for name, column in data.items():
        assert isinstance(column, list | tuple | torch.Tensor | int), f"the trainer's log takes no {type(column).__name__} ({name})"
    return data


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list):
        return type(b) is list and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@pytest.fixture
def store(pool):
    store = miles.MooncakeRayObjectStore(Namespace(), contribute_segment=False)
    boxes = []
    put = store.put
    store.put = lambda *args, **kwargs: boxes.append(put(*args, **kwargs)) or boxes[-1]
    yield store
    boxes.clear()


def test_a_trainer_gets_what_it_gets_from_plain_lists(store):
    with store.get(store.put(value=shard(), value_spec=SPEC)) as value:
        assert list(value) == list(shard())
        got, expected = consumed(value), consumed(shard())
    assert same(got, expected)


def test_what_is_read_by_row_number_and_by_slice(store):
    put = shard()
    value = store.get(store.put(put, SPEC)).value
    for name, column in value.items():
        if name in SPEC and SPEC[name].codec != "auto":
            assert type(column) is list and len(column) == 5 and len(column[1:3]) == 2, name
    assert [len(row) for row in value["tokens"]] == [len(row) for row in put["tokens"]]


def test_rows_are_typed_and_writable_and_private(store):
    put = shard()
    box = store.put(put, SPEC)
    first, second = store.get(box).value, store.get(box).value
    assert first["tokens"][0].dtype == np.int64
    assert first["rollout_log_probs"][0].dtype == torch.float32
    assert first["rollout_routed_experts"][0].dtype == np.int32
    for name in ("tokens", "rollout_routed_experts"):
        first[name][1][:] = -1
        assert second[name][1].tolist() == np.asarray(put[name][1]).tolist()
        assert first[name][0].tolist() == np.asarray(put[name][0]).tolist()
        assert store.get(box).value[name][1].tolist() == np.asarray(put[name][1]).tolist()


@pytest.mark.parametrize(
    ("rows", "declared", "dtype"),
    [
        ([[1, 2], [3]], "int32", "int32"),
        ([[1, 2], [2**31]], "int32", "int64"),  # not exact in what was declared
        ([[0.5], []], "float32", "float32"),
        ([[0.1], []], "float32", "float64"),
        ([[0.5], [0.25]], "bfloat16", "bfloat16"),
        ([[True, False], []], None, "bool"),
    ],
)
def test_a_declared_dtype_wins_where_it_is_exact(store, rows, declared, dtype):
    value = store.get(store.put({"x": rows}, {"x": ValueSpec("typed_ragged", declared)})).value
    assert str(value["x"][0].dtype).removeprefix("torch.") == dtype
    assert [row.tolist() for row in value["x"]] == rows


@pytest.mark.parametrize("rows", [[[1, 0.5], [2]], [[2**70], []], [[None], [1]], [[[1], [2, 3]], []], [["text"]], [None, [1]]])
def test_rows_that_no_dtype_holds_exactly_stay_what_they_are(store, rows):
    value = store.get(store.put({"x": rows}, {"x": RAGGED})).value
    assert same(value["x"], rows)


def test_rows_of_tensors_stay_tensors(store):
    rows = [torch.arange(3, dtype=torch.int32), torch.arange(0, dtype=torch.int32), torch.arange(1, dtype=torch.int32)]
    assert same(store.get(store.put({"x": rows}, {"x": RAGGED})).value["x"], rows)


def test_arrays_that_come_back_read_only_are_copied():
    """As from Ray's own store, which takes what the pool has no room for."""
    shared = np.frombuffer(b"1234", np.uint8)
    (mine,) = map(miles._writable, [shared])
    mine[:] = 0
    assert shared.tolist() == [49, 50, 51, 52]
    assert miles._writable(mine) is mine


def test_scalars_stay_python_numbers(store):
    put = shard()
    value = store.get(store.put(put, SPEC)).value
    for name in ("rewards", "truncated", "response_lengths"):
        assert same(value[name], put[name])


def test_a_value_without_rows_or_that_is_no_dict(store):
    for value in ({"n": 1, "list": [1, 2]}, [1, "x"], None):
        assert same(store.get(store.put(value)).value, value)


def test_fields_of_different_lengths_are_refused(store):
    with pytest.raises(mooncake_ray.SchemaError, match=r"'tokens': 2, 'rewards': 1"):
        store.put({"tokens": [[1], [2]], "rewards": [1.0]}, SPEC)


def test_remove_frees_and_leaves_views(store, pool):
    put = shard(200)
    box = store.put(put, SPEC)
    value = store.get(box).value
    store.remove(box)
    assert value["tokens"][3].tolist() == put["tokens"][3]
    with pytest.raises(mooncake_ray.ObjectLostError):
        store.get(box).value["tokens"][0].sum()
    del value
    pool.settles_at(0)


def test_what_nobody_refers_to_any_more_is_freed(store, pool):
    plain = miles.MooncakeRayObjectStore()
    plain.put(shard(200), SPEC)
    pool.settles_at(0)


def test_boxes_travel_between_a_manager_and_its_trainers(pool_ray, pool):
    @pool_ray.remote
    class Manager:
        def __init__(self):
            self.store = miles.MooncakeRayObjectStore(contribute_segment=False)

        def generate(self):
            return {"data_ref": [self.store.put(value=shard(5, seed), value_spec=SPEC) for seed in range(2)]}

    @pool_ray.remote
    class Trainer:
        def __init__(self, rank):
            self.rank, self.store = rank, miles.MooncakeRayObjectStore()

        def train(self, refs):
            with self.store.get(refs[self.rank]) as value:
                return sum(int(t.sum()) for t in consumed(value)["tokens"])

    manager = Manager.remote()
    pack = pool_ray.get(manager.generate.remote())
    trainers = [Trainer.remote(rank) for rank in range(2)]
    sums = pool_ray.get([t.train.remote(pack["data_ref"]) for t in trainers])
    assert sums == [sum(sum(row) for row in shard(5, seed)["tokens"]) for seed in range(2)]
    for box in pack["data_ref"]:
        miles.MooncakeRayObjectStore().remove(box)
    pool.settles_at(0)
    for actor in (manager, *trainers):
        pool_ray.kill(actor)


def framework():
    """A module with the parts of Miles' that `register` touches."""
    module = types.ModuleType("object_store")

    class BaseObjectStore(ABC):
        @abstractmethod
        def put(self, value, value_spec=None): ...

    class Plain(BaseObjectStore):
        def put(self, value, value_spec=None): ...

    module.BaseObjectStore, module.Plain = BaseObjectStore, Plain
    module.ObjectStoreBackend = enum.Enum("ObjectStoreBackend", {"RAY": "ray", "MOONCAKE": "mooncake"})
    module._create_instance = lambda args, *, contribute_segment: (
        Plain() if module.ObjectStoreBackend(args.object_store_backend) is module.ObjectStoreBackend.RAY else None
    )
    return module


def test_register_adds_a_backend_and_keeps_the_others():
    module = framework()
    for _ in range(2):
        miles.register(module)
    assert [backend.value for backend in module.ObjectStoreBackend] == ["ray", "mooncake", "mooncake_ray"]
    ours = module._create_instance(Namespace(object_store_backend="mooncake_ray"), contribute_segment=True)
    assert type(ours) is miles.MooncakeRayObjectStore and isinstance(ours, module.BaseObjectStore)
    assert type(module._create_instance(Namespace(object_store_backend="ray"), contribute_segment=True)) is module.Plain
