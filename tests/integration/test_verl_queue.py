"""verl's bridge to TransferQueue over the pool: workers are called with keys, and their batches are read and written for them."""

from __future__ import annotations

import pytest
import ray
import torch

pytest.importorskip("codetiming", reason="verl's workers need it")
from tensordict import TensorDict
from test_transfer_queue import batch, leaks_allowed, partition, queue, same  # noqa: F401 - fixtures

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@ray.remote(num_cpus=0)
class Worker:
    """A worker whose method is bridged, as verl's `register` does it."""

    def call(self, meta):
        from verl.utils.transferqueue_utils import tqbridge

        @tqbridge()
        def values(data: TensorDict) -> TensorDict:
            doubled = torch.nested.as_nested_tensor([row * 2 for row in data["responses"].unbind()], layout=torch.jagged)
            return TensorDict({"doubled": doubled, "sum": data["prompts"].sum(1)}, batch_size=[len(data)])

        return values(meta)


def test_a_bridged_worker(queue, pool, partition):  # noqa: F811
    data = batch(6)
    meta = queue.kv_batch_put([f"k{n}" for n in range(6)], partition, data, tags=[{"n": n} for n in range(6)])
    worker = Worker.remote()
    out = ray.get(worker.call.remote(meta), timeout=120)
    assert out.keys == meta.keys and out.tags == meta.tags and {"doubled", "sum"} <= set(out.fields)
    got = queue.kv_batch_get([f"k{n}" for n in (4, 1)], partition, select_fields=["doubled", "sum", "uid"])
    rows = data["responses"].unbind()
    assert all(torch.equal(a, 2 * rows[n]) for a, n in zip(got["doubled"].unbind(), (4, 1), strict=True))
    assert torch.equal(got["sum"], data["prompts"].sum(1)[[4, 1]]) and list(got["uid"]) == ["u0-4", "u0-1"]
    ray.kill(worker)
