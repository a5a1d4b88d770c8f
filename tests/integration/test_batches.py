"""Batches through real Ray: what comes back, what is read, who moves bytes, and what is left."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest
import torch

import mooncake_ray
from mooncake_ray.data import DataProto
from mooncake_ray.data.lazy import Pending
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.errors import CorruptBlockError, SchemaError

ROWS, PROMPT, RESPONSE = 32, 64, 512


def rollout(seed: int = 0, rows: int = ROWS) -> DataProto:
    """A padded batch as verl has it, and what goes with it."""
    rng = np.random.default_rng(seed)
    prompts, responses = rng.integers(1, PROMPT, rows), rng.integers(1, RESPONSE, rows)
    mask = np.zeros((rows, PROMPT + RESPONSE), np.int64)
    for row in range(rows):
        mask[row, PROMPT - prompts[row] : PROMPT + responses[row]] = 1
    ids = np.where(mask == 1, rng.integers(0, 151_936, mask.shape), 151_643)
    answer = mask[:, PROMPT:]
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": np.clip(np.cumsum(mask, 1) - 1, 0, None),
        "responses": ids[:, PROMPT:].copy(),
        "response_mask": answer.copy(),
        "old_log_probs": (-rng.exponential(0.5, answer.shape) * answer).astype(np.float32),
        "advantages": rng.normal(size=(rows, 1)).astype(np.float32) * answer.astype(np.float32),
    }
    arrays = {"uid": [f"{seed}-{row // 8}" for row in range(rows)], "extra": [{"acc": float(row % 2), "n": row} for row in range(rows)]}
    return DataProto.from_dict({n: torch.from_numpy(t) for n, t in tensors.items()}, arrays, {"step": 7})


def pending(batch: DataProto) -> set[str]:
    return {name for part in (batch.batch, batch.non_tensor_batch) for name, column in part.peeks().items() if isinstance(column, Pending)}


@pytest.fixture(scope="module")
def kit(pool_ray):
    import ray
    import verl  # noqa: F401 - what it imports keeps files open

    @ray.remote
    class Worker:
        def put(self, seed):
            return mooncake_ray.put_batch(rollout(seed))

        def make(self, seed):
            return rollout(seed)

        def append(self, ref, name):
            got = mooncake_ray.get(ref, fields=["responses"])
            return mooncake_ray.put_batch({name: got.batch["responses"].float() * 0.5})

        def sums(self, ref, fields=None):
            got = mooncake_ray.get(ref, fields=fields)
            return len(got), {name: column.double().sum().item() for name, column in got.batch.items()}

        def total(self, batch):
            return batch.batch["input_ids"].sum().item()

        def stats(self):
            return mooncake_ray.stats()

    class Kit:
        a, b = Worker.remote(), Worker.remote()

    Kit.ray = ray
    yield Kit
    for actor in (Kit.a, Kit.b):
        ray.kill(actor)


def test_a_batch_goes_to_a_task_and_comes_back(pool, kit):
    batch = rollout()
    assert kit.ray.get(kit.a.total.remote(batch)) == batch.batch["input_ids"].sum().item()
    got = kit.ray.get(kit.a.make.remote(0))
    assert pending(got) == {*batch.batch, *batch.non_tensor_batch}, "nothing is loaded before it is touched"
    assert len(got) == ROWS and got.batch["responses"].shape == (ROWS, RESPONSE)
    assert "responses" not in pending(got) and "input_ids" in pending(got)
    assert got.equals(batch)
    assert got.batch["responses"] is got.select(["responses"]).batch["responses"], "loaded once"
    for copied in (copy.deepcopy(kit.ray.get(kit.a.make.remote(0))), pickle.loads(pickle.dumps(kit.ray.get(kit.a.make.remote(0))))):
        assert copied.equals(batch) and not pending(copied), "a plain pickle has the data"


def test_rows_of_a_fetched_batch_are_passed_on_without_loading_them(pool, kit):
    batch = rollout()
    got = kit.ray.get(kit.a.make.remote(0))
    before = mooncake_ray.stats()
    chunks = got.select(["input_ids"], []).chunk(4)
    order = DataProto.concat([chunks[2], chunks[0], got.select(["input_ids"], [])[[3, 1, 3]]])
    assert pending(order) == {"input_ids"}
    sent = [kit.b.total.remote(part) for part in [*chunks, order]]
    rows = [*range(0, 8), *range(8, 16), *range(16, 24), *range(24, 32)], [*range(16, 24), *range(8), 3, 1, 3]
    ids = batch.batch["input_ids"]
    assert kit.ray.get(sent) == [*(ids[8 * i : 8 * i + 8].sum().item() for i in range(4)), ids[rows[1]].sum().item()]
    after = mooncake_ray.stats()
    assert after["bytes_copied"] == before["bytes_copied"] and after["batch_bytes_read"] == before["batch_bytes_read"]
    got.batch["input_ids"][0, 0] = -5  # loaded now, and changed
    assert kit.ray.get(kit.b.total.remote(got)) == got.batch["input_ids"].sum().item()


def test_refs_select_and_join_without_data(pool, kit):
    refs = kit.ray.get([kit.a.put.remote(1), kit.b.put.remote(2)])
    whole = DataProto.concat([rollout(1), rollout(2)])
    before = mooncake_ray.stats()
    ref = mooncake_ray.concat_batches(refs)
    mask = np.arange(2 * ROWS) % 3 == 0
    chosen = {
        "mask": (ref[mask], np.flatnonzero(mask)),
        "slice": (ref[5:50][::2], np.arange(5, 50, 2)),
        "list": (ref[[3, -1, 3]], [3, 63, 3]),
    }
    chunks, balanced = ref.chunk(8), ref.chunk(8, balance="tokens")
    lengths = whole.batch["attention_mask"].sum(1).numpy()
    assert np.array_equal(ref.lengths(), lengths)
    totals = np.array([part.lengths().sum() for part in balanced])
    assert totals.sum() == lengths.sum() and totals.max() - totals.min() < lengths.max() and all(len(part) == 8 for part in balanced)
    assert mooncake_ray.stats()["batch_bytes_read"] == before["batch_bytes_read"]
    for part, rows in chosen.values():
        assert mooncake_ray.get(part).equals(whole.select_idxs(np.asarray(rows)))
    assert DataProto.concat([mooncake_ray.get(part) for part in chunks]).equals(whole)
    assert mooncake_ray.get(mooncake_ray.concat_batches(chunks)).equals(whole)
    again = mooncake_ray.get(mooncake_ray.concat_batches(balanced))
    assert again.equals(whole.select_idxs(np.concatenate(ref.partition(8))))
    assert kit.ray.get(kit.a.sums.remote(ref[ROWS:], ["responses"])) == (ROWS, {"responses": whole.batch["responses"][ROWS:].sum().item()})
    del refs, ref, chosen, chunks, balanced, again, part


def test_rows_in_any_order_and_of_any_width(pool, kit):
    narrow = rollout(2)
    narrow = DataProto({name: column[:, : PROMPT + 100] for name, column in narrow.batch.items() if column.shape[1] == PROMPT + RESPONSE})
    refs = [mooncake_ray.put_batch(rollout(1).select(list(narrow.batch), [])), mooncake_ray.put_batch(narrow)]
    both = mooncake_ray.concat_batches(refs)
    order = np.random.default_rng(0).permutation(2 * ROWS)
    ids = mooncake_ray.get(both[order], form="ragged").batch["input_ids"]
    for at, row in enumerate(order):
        source = rollout(1) if row < ROWS else narrow
        mask = source.batch["attention_mask"][row % ROWS].bool()
        assert ids[at].equal(source.batch["input_ids"][row % ROWS][mask])
    with pytest.raises(SchemaError, match=r"'input_ids'.* of batch 1 has rows of shape"):
        mooncake_ray.get(both)
    same = mooncake_ray.concat_batches([refs[0], mooncake_ray.put_batch(rollout(2).select(list(narrow.batch), []))])
    got = mooncake_ray.get(same[order], lazy=True)[np.arange(2 * ROWS)[::-1].copy()]
    expected = DataProto.concat([rollout(1), rollout(2)]).select(list(narrow.batch), []).select_idxs(order[::-1].copy())
    assert got.equals(expected)
    del refs, both, same, got


def test_columns_arrive_from_other_workers(pool, kit):
    ref = kit.ray.get(kit.a.put.remote(3))
    more = ref.append(kit.ray.get(kit.b.append.remote(ref, "ref_log_prob"))).append({"reward": torch.arange(ROWS), "note": ["x"] * ROWS})
    batch = rollout(3)
    got = mooncake_ray.get(more[4:20])
    assert got.batch["ref_log_prob"].equal(batch.batch["responses"][4:20].float() * 0.5)
    assert got.batch["reward"].tolist() == list(range(4, 20)) and list(got.non_tensor_batch["note"]) == ["x"] * 16
    assert mooncake_ray.get(mooncake_ray.concat_batches([more[:2], more[5:6]])).batch["reward"].tolist() == [0, 1, 5]
    assert len(ref.fields) == len(more.fields) - 3, "the first ref is as it was"
    with pytest.raises(SchemaError, match="'reward' is in the batch already"):
        more.append({"reward": torch.zeros(ROWS)})
    with pytest.raises(SchemaError, match="'reward' is int64 in the batch, and float32"):
        more.append({"reward": torch.zeros(ROWS)}, overwrite=True)
    replaced = more.append({"reward": torch.zeros(ROWS, dtype=torch.int64)}, overwrite=True)
    assert mooncake_ray.get(replaced, fields="reward").batch["reward"].sum() == 0
    with pytest.raises(SchemaError, match=f"{ROWS + 1} rows to a batch of {ROWS} rows"):
        ref.append({"z": torch.zeros(ROWS + 1)})
    del ref, more, replaced, got


def test_only_what_is_asked_for_is_read(pool, kit):
    ref = mooncake_ray.put_batch(rollout(4))
    lengths = rollout(4).batch["response_mask"].sum(1).numpy()
    for rows in (slice(8, 12), [31, 2, 17]):
        before = mooncake_ray.stats()["batch_bytes_read"]
        got = mooncake_ray.get(ref, fields=["responses", "old_log_probs"], rows=rows)
        read = mooncake_ray.stats()["batch_bytes_read"] - before
        assert read == 8 * lengths[rows].sum(), "4 bytes a token, 4 a log-prob"
        assert got.equals(rollout(4).select(["responses", "old_log_probs"], [])[rows])
    del ref


def test_forms(pool, kit):
    batch = rollout(5)
    ref = mooncake_ray.put_batch(batch)
    ragged = mooncake_ray.get(ref, form="ragged")
    mask = batch.batch["response_mask"].bool()
    assert isinstance(ragged.batch["responses"], Ragged) and all(
        ragged.batch["responses"][row].equal(batch.batch["responses"][row][mask[row]]) for row in range(ROWS)
    )
    lazily = mooncake_ray.get(ref, form="ragged", lazy=True)
    assert pending(lazily) == set(ref.fields) and lazily.batch["advantages"].equals(ragged.batch["advantages"])
    again = mooncake_ray.put_batch(ragged)
    assert again.nbytes < ref.nbytes * 1.05 and mooncake_ray.get(again).equals(ragged)
    padded = mooncake_ray.get(again, form="padded").batch["responses"]
    width = int(mask.sum(1).max())
    assert padded.shape == (ROWS, width) and padded.equal(torch.where(mask, batch.batch["responses"], 0)[:, :width])
    columns = {"tokens": [[1, 2, 3], [], [2**53 + 1]], "mask": torch.ones(3, 4), "name": np.array(["a", "b", "c"]), "tag": ["x", None, 3]}
    got = mooncake_ray.get(mooncake_ray.put_batch(columns))
    assert got["tokens"] == columns["tokens"] and got["tag"] == columns["tag"] and got["mask"].equal(columns["mask"])
    assert isinstance(got["tokens"], list) and got["name"].dtype == columns["name"].dtype
    lists = {
        "ids": [[1, 70_000], [], [3]],
        "lp": [[0.5], None, [-0.25, 0.0]],
        "on": [[True], [False, True], []],
        "big": [[2**40], [1], [2]],
    }
    typed = mooncake_ray.get(mooncake_ray.put_batch(lists), form="ragged")
    dtypes = {"ids": torch.int32, "lp": torch.float32, "on": torch.bool, "big": torch.int64}
    assert {name: column.dtype for name, column in typed.batch.items()} == dtypes and not typed.non_tensor_batch
    assert {name: column.to_lists() for name, column in typed.batch.items()} == lists
    wide = {"ids": [[-5], [2**40]], "lp": [[0.1], [1.0]], "on": [[], [True]], "big": [[0], [0]]}
    both = mooncake_ray.concat_batches([mooncake_ray.put_batch(lists), mooncake_ray.put_batch(wide)])
    joined = mooncake_ray.get(both[[4, 0, 3, 1, 2]], form="ragged")
    assert [joined.batch[name].dtype for name in lists] == [torch.int64, torch.float64, torch.bool, torch.int64]
    assert {n: c.to_lists() for n, c in joined.batch.items()} == {
        n: [([*lists[n], *wide[n]])[row] for row in (4, 0, 3, 1, 2)] for n in lists
    }
    with pytest.raises(SchemaError, match=r"'on'.* is torch"):
        mooncake_ray.get(mooncake_ray.concat_batches([both.select(["on"]), mooncake_ray.put_batch({"on": [[7]]})]), form="ragged")
    some = mooncake_ray.get(mooncake_ray.put_batch(lists), form="ragged", rows=[2, 1])
    assert {name: column.to_lists() for name, column in some.batch.items()} == {name: [rows[2], rows[1]] for name, rows in lists.items()}
    del ref, ragged, lazily, again, both


def test_verl_keeps_its_class(pool, kit):
    import verl

    batch = rollout(6).to_verl()
    got = kit.ray.get(kit.ray.put(batch))
    assert type(got) is verl.DataProto and got.batch.batch_size == batch.batch.batch_size and got.meta_info == batch.meta_info
    assert DataProto.from_verl(got).equals(DataProto.from_verl(batch))
    ref = mooncake_ray.put_batch(batch)
    assert type(mooncake_ray.get(ref[:4])) is verl.DataProto
    assert ref.nbytes * 8 < sum(t.nbytes for t in batch.batch.values()), "stored without its padding"
    part = mooncake_ray.get(kit.ray.put(batch), fields=["responses"], rows=[1, 2])
    assert part.batch["responses"].equal(batch.batch["responses"][[1, 2]])
    jagged = torch.nested.nested_tensor([torch.arange(3), torch.arange(50_000)], layout=torch.jagged)
    ragged = verl.DataProto.from_single_dict({"t": jagged})
    back = kit.ray.get(kit.ray.put(ragged)).batch["t"]
    assert back.is_nested and back._max_seqlen == 50_000 and back.values().equal(jagged.values())
    del ref, got


def test_refs_of_rays_objects_in_a_batch_stay_counted(pool, kit):
    inner = kit.ray.put({"t": torch.ones(1 << 18)})
    batch = rollout(7)
    batch.non_tensor_batch["refs"] = np.array([inner] * ROWS, dtype=object)
    batch.meta_info["ref"] = inner
    ref = kit.ray.put(batch)
    del inner, batch
    gc.collect()
    got = kit.ray.get(ref)
    assert float(kit.ray.get(got.meta_info["ref"])["t"].sum()) == float(kit.ray.get(got.non_tensor_batch["refs"][3])["t"].sum()) == 1 << 18
    del got, ref


def test_what_cannot_be_in_a_block_goes_beside_it(pool, kit):
    odd = {
        "sparse_free": torch.ones(ROWS, 2000),
        "grad": torch.ones(ROWS, 2000, requires_grad=True),
    }
    arrays = {"table": np.array([[object, 1]] * ROWS, dtype=object), "order": np.asfortranarray(np.arange(ROWS * 3).reshape(ROWS, 3))}
    batch = DataProto(odd, arrays)
    ref = mooncake_ray.put_batch(batch)
    got = mooncake_ray.get(ref)
    assert got.batch["grad"].requires_grad and got.non_tensor_batch["order"].flags.f_contiguous and got.equals(batch)
    part = mooncake_ray.get(ref, rows=[5, 1])
    assert part.batch["grad"].shape == (2, 2000) and part.non_tensor_batch["order"].tolist() == [[15, 16, 17], [3, 4, 5]]
    del ref, got, part


def test_checksums(pool, kit):
    ref = mooncake_ray.put_batch(rollout(8), checksums=True)
    assert mooncake_ray.get(ref, verify=True).equals(rollout(8))
    with pytest.raises(CorruptBlockError, match="without checksums"):
        mooncake_ray.get(mooncake_ray.put_batch(rollout(8)), verify=True)
    del ref


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda ref: mooncake_ray.get(ref, fields=["nope"]), SchemaError, "no field 'nope'; the fields are"),
        (lambda ref: mooncake_ray.get(ref, rows=[ROWS]), IndexError, f"row {ROWS} is out of range for {ROWS} rows"),
        (lambda ref: mooncake_ray.get(ref, rows=[True]), IndexError, f"mask has 1 entries, expected {ROWS}"),
        (lambda ref: mooncake_ray.get(ref, form="dense"), ValueError, "form must be"),
        (lambda ref: ref.chunk(5), ValueError, f"{ROWS} rows cannot be divided into 5"),
        (lambda ref: ref.lengths("extra"), SchemaError, "field 'extra' has row lengths"),
        (lambda ref: mooncake_ray.concat_batches([ref, ref.select(["uid"])]), SchemaError, "batch 1 differs from batch 0: missing fields"),
        (lambda ref: mooncake_ray.concat_batches([]), ValueError, "no refs"),
        (lambda ref: mooncake_ray.put_batch(7), SchemaError, "a int is no batch"),
        (lambda ref: mooncake_ray.put_batch({"a": torch.ones(2), "b": torch.ones(3)}), SchemaError, "'b'.* has 3 rows, expected 2"),
        (
            lambda ref: mooncake_ray.batch_ref(mooncake_ray.put({"a": torch.ones(1 << 17)})),
            SchemaError,
            "the object is a dict, expected a batch",
        ),
    ],
)
def test_bad_requests(pool, kit, ask, error, message):
    ref = mooncake_ray.put_batch(rollout(9))
    with pytest.raises(error, match=message):
        ask(ref)
    del ref
