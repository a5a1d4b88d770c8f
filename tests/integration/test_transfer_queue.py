"""TransferQueue's own interface over the pool: what it returns, what it reads, and what it frees."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

tq = pytest.importorskip("transfer_queue")
import ray  # noqa: E402
from conftest import run_script, until  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from tensordict import NonTensorStack, TensorDict  # noqa: E402

import mooncake_ray  # noqa: E402
from mooncake_ray.integrations import transfer_queue as backend  # noqa: E402
from mooncake_ray.testing import Allowed  # noqa: E402

# TransferQueue's client and controller are there for the module; so are Ray's workers.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def leaks_allowed() -> Allowed:
    threads = ("ray_*", "mooncake_ray.*", "AsyncIO*", "Thread-*", "TQ_*", "*notify_data_status_loop", "ThreadPoolExecutor-*", "asyncio_*")
    descriptors = ("socket:*", "anon_inode:*", "pipe:*", "/memfd:mooncake_ray*")
    return Allowed(threads=threads, descriptors=descriptors, maps=("r?-s",), processes=("ray::*",))


@pytest.fixture(scope="module")
def queue(pool_ray):
    tq.init(OmegaConf.create({"backend": {"storage_backend": "MooncakeRay"}}))
    yield tq
    tq.close()


@pytest.fixture
def partition(queue, pool, request):
    """A partition for the test, and the demand that nothing of it is left in the pool once it is cleared."""
    name = request.node.name
    yield name
    if left := queue.kv_list(name).get(name):
        queue.kv_clear(list(left), name)


def jagged(*lengths: int, dtype=torch.int64, start: int = 0):
    rows, at = [], start
    for n in lengths:
        rows.append(torch.arange(at, at + n, dtype=dtype))
        at += n
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch(rows: int, seed: int = 0) -> TensorDict:
    made = torch.Generator().manual_seed(seed)
    return TensorDict(
        {
            "prompts": torch.randint(0, 1000, (rows, 4), generator=made),
            "responses": jagged(*range(1, rows + 1), start=seed),
            "reward": torch.rand(rows, generator=made),
            "scores": torch.rand(rows, 3, generator=made).to(torch.bfloat16),
            "uid": NonTensorStack(*(f"u{seed}-{i}" for i in range(rows))),
            "extra": NonTensorStack(*({"turn": i, "none": None} for i in range(rows))),
        },
        batch_size=[rows],
    )


def same(column, expected) -> bool:
    if isinstance(expected, torch.Tensor) and expected.is_nested:
        both = zip(column.unbind(), expected.unbind(), strict=True)
        return column.is_nested and column.layout is torch.jagged and all(same(a, b) for a, b in both)
    if isinstance(expected, torch.Tensor):
        return not column.is_nested and column.dtype == expected.dtype and column.shape == expected.shape and torch.equal(column, expected)
    return list(column) == list(expected)


def keys(n: int, prefix: str = "k") -> list[str]:
    return [f"{prefix}{i}" for i in range(n)]


def test_a_batch_comes_back_as_it_was_put(queue, partition):
    put = batch(5)
    queue.kv_batch_put(keys(5), partition, put, tags=[{"n": i} for i in range(5)])
    got = queue.kv_batch_get(keys(5), partition)
    assert got.batch_size == put.batch_size
    assert set(got.keys()) == set(put.keys())
    for name in put.keys():  # noqa: SIM118
        assert same(got[name], put[name]), name
    assert queue.kv_list(partition)[partition] == {f"k{i}": {"n": i} for i in range(5)}


def test_a_put_is_one_object_in_the_pool(queue, partition, pool):
    queue.kv_batch_put(keys(5), partition, batch(5))
    assert pool.objects == 1
    queue.kv_batch_put(keys(5), partition, TensorDict({"values": jagged(1, 2, 3, 4, 5)}, batch_size=[5]))
    assert pool.objects == 2


def test_rows_in_any_order_and_some_fields(queue, partition):
    put = batch(6)
    queue.kv_batch_put(keys(6), partition, put)
    got = queue.kv_batch_get(["k4", "k0", "k5"], partition, select_fields=["responses", "uid", "prompts"])
    assert set(got.keys()) == {"responses", "uid", "prompts"}
    rows = [4, 0, 5]
    assert same(got["prompts"], put["prompts"][rows])
    assert [r.tolist() for r in got["responses"].unbind()] == [put["responses"].unbind()[i].tolist() for i in rows]
    assert list(got["uid"]) == [f"u0-{i}" for i in rows]


def test_rows_of_several_puts_become_one_batch(queue, partition):
    first, second = batch(3, seed=1), batch(2, seed=2)
    queue.kv_batch_put(keys(3, "a"), partition, first)
    queue.kv_batch_put(keys(2, "b"), partition, second)
    got = queue.kv_batch_get(["b1", "a0", "a2", "b0"], partition)
    assert same(got["prompts"], torch.stack([second["prompts"][1], first["prompts"][0], first["prompts"][2], second["prompts"][0]]))
    assert got["scores"].dtype == torch.bfloat16 and got["scores"].shape == (4, 3)
    assert list(got["uid"]) == ["u2-1", "u1-0", "u1-2", "u2-0"]
    assert got["reward"].shape == (4,)


def test_fields_put_later_are_read_together_with_the_earlier(queue, partition):
    put = batch(4)
    queue.kv_batch_put(keys(4), partition, put)
    more = TensorDict({"old_log_probs": jagged(1, 2, 3, 4, dtype=torch.float32)}, batch_size=[4])
    queue.kv_batch_put(keys(4), partition, more)
    got = queue.kv_batch_get(["k2", "k3"], partition, select_fields=["old_log_probs", "reward"])
    assert [len(r) for r in got["old_log_probs"].unbind()] == [3, 4]
    assert same(got["reward"], put["reward"][2:])


def test_a_field_put_again_is_replaced_and_its_old_block_freed(queue, partition, pool):
    queue.kv_batch_put(keys(3), partition, TensorDict({"v": torch.zeros(3, 300)}, batch_size=[3]))
    queue.kv_batch_put(["k1"], partition, TensorDict({"v": torch.ones(1, 300)}, batch_size=[1]))
    got = queue.kv_batch_get(keys(3), partition)["v"]
    assert [row[0].item() for row in got.unbind()] == [0, 1, 0]
    pool.settles_at(2)
    queue.kv_batch_put(keys(3), partition, TensorDict({"v": torch.full((3, 300), 2.0)}, batch_size=[3]))
    assert same(queue.kv_batch_get(keys(3), partition)["v"], torch.full((3, 300), 2.0))
    pool.settles_at(1)


def test_clearing_frees_a_block_with_its_last_row(queue, partition, pool):
    queue.kv_batch_put(keys(3), partition, batch(3))
    queue.kv_clear(["k0", "k2"], partition)
    pool.settles_at(1)
    assert list(queue.kv_batch_get("k1", partition)["uid"]) == ["u0-1"]
    queue.kv_clear("k1", partition)
    pool.settles_at(0)
    with pytest.raises(ValueError, match="not found"):
        queue.kv_batch_get("k1", partition)


def test_what_was_read_outlives_a_clear(queue, partition, pool):
    put = batch(3)
    queue.kv_batch_put(keys(3), partition, put)
    got = queue.kv_batch_get(keys(3), partition)
    queue.kv_clear(keys(3), partition)
    assert same(got["prompts"], put["prompts"]) and same(got["responses"], put["responses"])
    got["prompts"].fill_(7)  # private


def test_rows_put_one_at_a_time_are_jagged_whatever_their_lengths(queue, partition):
    for i, n in enumerate((2, 2)):
        queue.kv_put(f"k{i}", partition, {"ids": torch.full((n,), i), "name": f"row {i}", "reward": torch.tensor(0.5)}, tag={"n": n})
    got = queue.kv_batch_get(["k1", "k0"], partition)
    assert got["ids"].layout is torch.jagged
    assert [r.tolist() for r in got["ids"].unbind()] == [[1, 1], [0, 0]]
    assert got["ids"].to_padded_tensor(9).shape == (2, 2)  # knows its greatest length
    assert list(got["name"]) == ["row 1", "row 0"]
    assert same(got["reward"], torch.tensor([0.5, 0.5]))


def test_dense_puts_of_different_widths_become_jagged(queue, partition):
    queue.kv_batch_put(keys(2, "a"), partition, TensorDict({"ids": torch.zeros(2, 3, dtype=torch.int32)}, batch_size=[2]))
    queue.kv_batch_put(keys(2, "b"), partition, TensorDict({"ids": torch.ones(2, 5, dtype=torch.int32)}, batch_size=[2]))
    got = queue.kv_batch_get(["a0", "b1"], partition)["ids"]
    assert got.layout is torch.jagged and got.dtype == torch.int32
    assert [len(r) for r in got.unbind()] == [3, 5]


def test_a_ragged_dimension_that_is_not_the_first_stays(queue, partition):
    ids = torch.nested.as_nested_tensor([torch.ones(3, 2), torch.ones(3, 4)], layout=torch.jagged)
    queue.kv_batch_put(keys(2), partition, TensorDict({"position_ids": ids}, batch_size=[2]))
    got = queue.kv_batch_get(["k1", "k0"], partition)["position_ids"]
    assert got._ragged_idx == ids._ragged_idx
    assert [tuple(r.shape) for r in got.unbind()] == [(3, 4), (3, 2)]


def test_rows_that_differ_in_two_dimensions_stay_nested(queue, partition):
    rows = [torch.ones(1, 2), torch.zeros(2, 1), torch.ones(3, 3)]
    images = torch.nested.as_nested_tensor(rows[:2], layout=torch.strided)
    queue.kv_batch_put(keys(2, "a"), partition, TensorDict({"image": images}, batch_size=[2]))
    queue.kv_batch_put(["b0"], partition, TensorDict({"image": rows[2][None]}, batch_size=[1]))
    got = queue.kv_batch_get(["b0", "a1", "a0"], partition)["image"]
    assert got.is_nested and got.layout is torch.strided
    assert all(torch.equal(a, b) for a, b in zip(got.unbind(), rows[::-1], strict=True))


def test_the_option_to_have_all_rows_jagged(queue, partition, monkeypatch):
    monkeypatch.setattr(queue.get_client().storage_manager, "_jagged", True)
    put = TensorDict({"ids": torch.arange(6).view(2, 3), "n": torch.arange(2), "x": torch.arange(12).view(2, 3, 2)}, batch_size=[2])
    queue.kv_batch_put(keys(2), partition, put)
    got = queue.kv_batch_get(["k1", "k0"], partition)
    assert got["ids"].layout is torch.jagged and [r.tolist() for r in got["ids"].unbind()] == [[3, 4, 5], [0, 1, 2]]
    assert got["x"].layout is torch.jagged and [tuple(r.shape) for r in got["x"].unbind()] == [(3, 2), (3, 2)]
    assert same(got["n"], torch.tensor([1, 0]))


def test_a_put_from_another_node_keeps_its_owner(queue, partition, pool, monkeypatch):
    monkeypatch.setattr(queue.get_client().storage_manager, "_near", False)
    queue.kv_batch_put(keys(3), partition, batch(3))
    assert same(queue.kv_batch_get(keys(3), partition)["prompts"], batch(3)["prompts"])
    queue.kv_clear(keys(3), partition)
    pool.settles_at(0)


def test_rows_that_are_not_tensors(queue, partition):
    values = [None, 2**70, -0.0, "text", b"bytes", {"image": torch.ones(2, 2), "at": (1, 2)}, [], float("inf")]
    n = len(values)
    queue.kv_batch_put(keys(n), partition, TensorDict({"any": NonTensorStack(*values)}, batch_size=[n]))
    got = list(queue.kv_batch_get(keys(n), partition)["any"])
    assert torch.equal(got[5].pop("image"), torch.ones(2, 2)) and got[5] == {"at": (1, 2)}
    assert [*got[:5], *got[6:]] == [*values[:5], *values[6:]]
    assert str(got[2]) == "-0.0"


def test_an_array_of_objects_is_a_value_a_row(queue, partition):
    rows = np.empty(2, dtype=object)
    rows[:] = [[1, 2], {"a": 3}]
    queue.kv_batch_put(keys(2), partition, TensorDict({"o": rows}, batch_size=[2]))
    assert list(queue.kv_batch_get(["k1", "k0"], partition)["o"]) == [{"a": 3}, [1, 2]]


def test_meta_of_ready_rows_and_their_data(queue, partition):
    client = queue.get_client()
    put = batch(4)
    client.put(put, partition_id=partition)
    meta = client.get_meta(data_fields=["responses", "reward"], batch_size=4, partition_id=partition, task_name="train")
    assert meta.size == 4
    got = client.get_data(meta)
    assert same(got["reward"], put["reward"])
    sub = client.get_data(meta[1:3])
    assert [len(r) for r in sub["responses"].unbind()] == [2, 3]
    client.clear_samples(meta)


def test_a_data_parser_changes_values_and_nothing_else(queue, partition):
    def parse(fields):
        fields["url"] = [torch.full((len(u),), 1.0) for u in fields["url"]]
        fields["x"] = fields["x"] + 1
        return fields

    put = TensorDict({"url": NonTensorStack("a", "bb"), "x": torch.zeros(2, 2)}, batch_size=[2])
    queue.kv_batch_put(keys(2), partition, put, data_parser=parse)
    got = queue.kv_batch_get(keys(2), partition)
    assert [len(r) for r in got["url"].unbind()] == [1, 2]
    assert same(got["x"], torch.ones(2, 2))

    with pytest.raises(mooncake_ray.SchemaError, match="changed the fields"):
        queue.kv_batch_put(keys(2), partition, put, data_parser=lambda fields: {"x": fields["x"]})


def test_the_event_loop_is_free_while_data_is_read(queue, partition, monkeypatch):
    """A reader that is held up does not hold up what else runs on the client's loop."""
    queue.kv_batch_put(keys(2), partition, batch(2))
    manager = queue.get_client().storage_manager
    entered, may_go = threading.Event(), threading.Event()
    real = mooncake_ray.get

    def held_up(*args, **kwargs):
        entered.set()
        assert may_go.wait(60)
        return real(*args, **kwargs)

    monkeypatch.setattr(mooncake_ray, "get", held_up)
    loop = queue.get_client()._loop
    reading = asyncio.run_coroutine_threadsafe(tq.async_kv_batch_get(keys(2), partition), loop)
    assert entered.wait(60)
    assert partition in queue.kv_list(partition)  # served by that same loop
    assert not reading.done()
    may_go.set()
    assert reading.result(60).batch_size == (2,)
    assert manager is queue.get_client().storage_manager


@ray.remote
class Worker:
    def __init__(self):
        import transfer_queue

        transfer_queue.init()
        self.tq = transfer_queue

    def pid(self):
        return os.getpid()

    def put(self, names, partition):
        self.tq.kv_batch_put(names, partition, batch(len(names)))

    def double(self, names, partition):
        got = self.tq.kv_batch_get(names, partition, select_fields=["prompts"])
        out = TensorDict({"doubled": got["prompts"] * 2}, batch_size=got.batch_size)
        self.tq.kv_batch_put(names, partition, out)


@pytest.fixture
def worker(queue, pool_ray):
    worker = Worker.remote()
    yield worker
    pool_ray.kill(worker)


def test_other_processes_need_no_import(queue, partition, pool_ray, pool, worker):
    put = batch(3)
    queue.kv_batch_put(keys(3), partition, put)
    pool_ray.get(worker.double.remote(keys(3), partition))
    assert same(queue.kv_batch_get(keys(3), partition)["doubled"], put["prompts"] * 2)
    queue.kv_clear(keys(3), partition)
    pool.settles_at(0)


def test_what_a_process_put_outlives_it(queue, partition, pool_ray, pool, worker):
    pool_ray.get(worker.put.remote(keys(3), partition))
    (pid,) = pool_ray.get([worker.pid.remote()])
    pool_ray.kill(worker)
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])
    got = queue.kv_batch_get(keys(3), partition)
    assert same(got["prompts"], batch(3)["prompts"]) and list(got["uid"]) == list(batch(3)["uid"])
    del got
    queue.kv_clear(keys(3), partition)
    pool.settles_at(0)


def test_the_configuration_registers_the_backend_where_nothing_is_installed():
    blob = pickle.dumps({"backend": backend._Backend()})
    run_script(
        f"""
import pickle
from transfer_queue.storage import StorageManagerFactory
assert "MooncakeRay" not in StorageManagerFactory._registry
pickle.loads({blob!r})
assert "MooncakeRay" in StorageManagerFactory._registry
"""
    )


def test_an_option_that_there_is_not_is_refused():
    with pytest.raises(mooncake_ray.ConfigError, match=r"rows is 'dense', expected one of as-put, jagged"):
        backend.start(OmegaConf.create({"backend": {"MooncakeRay": {"rows": "dense"}}}, flags={"allow_objects": True}))


def test_a_field_that_is_not_there_is_named(queue, partition):
    client = queue.get_client()
    queue.kv_batch_put(keys(2), partition, batch(2))
    meta = client._run_coroutine(client.async_kv_retrieve_meta(keys=keys(2), partition_id=partition, create=False))
    queue.kv_clear(keys(2), partition)
    with pytest.raises(tq.StorageKeyNotFoundError, match="never put, or was cleared"):
        client.get_data(meta)
    gc.collect()


def test_a_checkpoint_is_read_back(queue, partition, pool, tmp_path):
    put, more = batch(4), TensorDict({"values": jagged(4, 3, 2, 1)}, batch_size=[4])
    queue.kv_batch_put(keys(4), partition, put, tags=[{"n": i} for i in range(4)])
    queue.kv_batch_put(keys(4), partition, more)
    queue.kv_clear("k3", partition)
    queue.save_checkpoint(tmp_path / "saved")
    queue.kv_batch_put(keys(3), partition, TensorDict({"values": jagged(1, 1, 1)}, batch_size=[3]))
    queue.load_checkpoint(tmp_path / "saved")
    pool.settles_at(2)
    got = queue.kv_batch_get(keys(3), partition)
    assert same(got["prompts"], put["prompts"][:3]) and list(got["extra"]) == list(put["extra"])[:3]
    assert [len(r) for r in got["values"].unbind()] == [4, 3, 2]
    assert queue.kv_list(partition)[partition] == {f"k{i}": {"n": i} for i in range(3)}
