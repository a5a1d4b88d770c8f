"""The benches' batches: all forms hold the same rows, and what their content needs is counted a second way, from the padded form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench import workloads
from bench.payloads import nbytes, same, touch
from bench.workloads import WORKLOADS, Workload, build, ideal, lists, padded, padded_bytes

PAD = 151643


@pytest.fixture(scope="module")
def rollout():
    return build("XS")


@pytest.fixture(scope="module")
def batch(rollout):
    return padded(rollout)


def rows_of(rollout):
    """Prompt length, response length, tokens and log-probs of each row, cut out one by one."""
    token = response = 0
    for p, r in zip(rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist(), strict=True):
        yield p, r, rollout.tokens[token : token + p + r], rollout.log_probs[:, response : response + r]
        token, response = token + p + r, response + r


@pytest.mark.parametrize(
    ("name", "rows", "megabytes"), [("XS", 64, 3), ("S64", 512, 61), ("M256", 512, 243), ("M1G", 2048, 973), ("L8G", 4096, 8724)]
)
def test_sizes(name, rows, megabytes):
    w = WORKLOADS[name]
    assert w.rows == rows
    assert round(padded_bytes(w) / 1e6) == megabytes


def test_the_same_every_time(rollout, batch):
    again = build("XS")
    assert same(padded(again), batch)
    assert lists(again) == lists(rollout)


def test_lengths():
    w = WORKLOADS["S64"]
    got = build("S64")
    prompts, responses = got.prompt_lengths.reshape(w.prompts, w.samples), got.response_lengths.reshape(w.prompts, w.samples)
    assert (prompts == prompts[:, :1]).all()  # shared by the group
    assert prompts.min() >= 16 and prompts.max() <= w.prompt_width
    assert responses.min() >= 8 and responses.max() == w.response_width
    assert 0.01 < np.mean(responses == w.response_width) < 0.1
    assert 0.7 * w.median < np.median(responses) < 1.5 * w.median
    logs = np.log(responses[(responses < w.response_width).all(1)])
    assert 0.4 < logs.mean(1).var() / logs.var() < 0.9  # the group's part of the variance, about 0.6


def test_padded_rows(rollout, batch):
    P = rollout.workload.prompt_width
    columns = {name: column.numpy() for name, column in batch.batch.items()}
    assert len(columns) == 14
    assert sum(c.nbytes for c in columns.values()) == padded_bytes(rollout.workload) == nbytes(batch)
    for i, (p, r, tokens, log_probs) in enumerate(rows_of(rollout)):
        row = {name: column[i] for name, column in columns.items()}
        width = rollout.workload.width
        ids = np.full(width, PAD)
        ids[P - p : P + r] = tokens
        mask = np.zeros(width, np.int64)
        mask[P - p : P + r] = 1
        np.testing.assert_array_equal(row["input_ids"], ids)
        np.testing.assert_array_equal(row["prompts"], ids[:P])
        np.testing.assert_array_equal(row["responses"], ids[P:])
        np.testing.assert_array_equal(row["attention_mask"], mask)
        np.testing.assert_array_equal(row["response_mask"], mask[P:])
        np.testing.assert_array_equal(row["position_ids"], [0] * (P - p) + list(range(p + r)) + [p + r - 1] * (width - P - r))
        for name, values in zip(("rollout_log_probs", "old_log_probs", "ref_log_prob"), log_probs, strict=True):
            np.testing.assert_array_equal(row[name], [*values, *[0] * (width - P - r)])
        np.testing.assert_array_equal(row["advantages"], rollout.advantages[i] * mask[P:])
        np.testing.assert_array_equal(row["returns"], row["advantages"])
        for name in ("token_level_scores", "token_level_rewards", "rm_scores"):
            assert np.flatnonzero(row[name]).tolist() == ([r - 1] if rollout.scores[i] else [])
            assert row[name][r - 1] == rollout.scores[i]


def test_padding_keeps_the_sign_that_a_product_with_the_mask_has(batch):
    advantages, mask = batch.batch["advantages"], batch.batch["response_mask"].bool()
    negative = (advantages[:, :1] < 0).expand_as(mask) & ~mask
    assert negative.any() and torch.signbit(advantages[negative]).all()


def test_no_two_columns_or_texts_share_memory(batch):
    starts = [column.data_ptr() for column in batch.batch.values()]
    assert len(set(starts)) == 14
    for name in ("uid", "raw_prompt"):
        column = batch.non_tensor_batch[name]
        assert column[0] == column[1] and column[0] is not column[1]
    prompts = batch.non_tensor_batch["raw_prompt"]
    assert prompts[0][0]["content"] is not prompts[1][0]["content"]


def test_lists_hold_the_same_rows(rollout, batch):
    got = lists(rollout)
    assert {len(column) for column in got.values()} == {rollout.workload.rows}
    for i, (p, r, tokens, log_probs) in enumerate(rows_of(rollout)):
        assert got["tokens"][i] == tokens.tolist()
        assert got["loss_masks"][i] == [1] * r
        assert [got[name][i] for name in ("rollout_log_probs", "log_probs", "ref_log_probs")] == log_probs.tolist()
        assert (got["response_lengths"][i], got["total_lengths"][i]) == (r, p + r)
        assert got["prompt"][i] == batch.non_tensor_batch["raw_prompt"][i]
        assert got["metadata"][i]["trace"] == batch.non_tensor_batch["tool_trace"][i]
        assert got["metadata"][i]["uid"] == batch.non_tensor_batch["uid"][i]
    assert all(type(x) is int for x in got["tokens"][0]) and all(type(x) is float for x in got["log_probs"][0])


def counted(batch):
    """What `ideal` says, from the padded batch: narrow arrays are made, and their bytes counted."""
    columns, others = batch.batch, batch.non_tensor_batch
    attended, responded = columns["attention_mask"].bool(), columns["response_mask"].bool()
    arrays = [columns["input_ids"][attended].numpy().astype(np.int32)]
    arrays += [columns[name][responded].numpy() for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob")]
    arrays += [mask.sum(1).numpy().astype(np.uint16) for mask in (responded, attended)]
    arrays += [columns["advantages"][:, 0].numpy(), columns["rm_scores"].sum(1).numpy()]
    arrays += [np.array([len(calls) for calls in others["tool_trace"]], np.uint8)]
    arrays += [np.array([extra["acc"] for extra in others["extra_fields"]])]
    prompts = [messages[0]["content"] for messages in others["raw_prompt"]]
    traces = [text for calls in others["tool_trace"] for call in calls for text in (call["args"]["code"], call["out"])]
    arrays += [np.array([len(text.encode()) for text in texts], np.uint16) for texts in (prompts, traces)]
    texts = [*others["uid"], *prompts, *traces]
    return sum(a.nbytes for a in arrays) + len("".join(texts).encode())


@pytest.mark.parametrize("name", ["XS", "S64"])
def test_ideal(name):
    rollout = build(name)
    assert ideal(rollout) == counted(padded(rollout))
    assert padded_bytes(rollout.workload) / ideal(rollout) > 10


def test_ideal_needs_what_it_says_of_a_row_more(rollout):
    """One more accuracy bit costs nothing, one more character its UTF-8."""
    texts = rollout.texts
    longer = replace(rollout, texts=replace(texts, prompt=[texts.prompt[0] + "é", *texts.prompt[1:]]))
    assert ideal(longer) == ideal(rollout) + 2


def test_columns_of_many_rows_are_filled_in_parts(monkeypatch, batch, rollout):
    monkeypatch.setattr(workloads, "_ROWS_AT_A_TIME", 7)
    assert same(padded(rollout), batch)


def test_objects_of_one_length_stay_objects():
    got = workloads.objects([[1, 2], [3, 4]])
    assert got.shape == (2,) and got.dtype == object and got[1] == [3, 4]


def test_touch_reads_every_page():
    pages = np.zeros((3, 4096), np.uint8)
    pages[:, 0] = 1, 2, 4
    assert touch({"a": pages, "b": [1], "c": torch.from_numpy(pages)}) == 14


def test_names_are_those_of_the_workloads():
    assert all(isinstance(w, Workload) and w.name == name for name, w in WORKLOADS.items())
