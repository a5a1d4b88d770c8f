"""Tensor columns in a block: bit for bit, small, and read in part."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.data import kernels
from mooncake_ray.data.block import block
from mooncake_ray.data.block.read import Runs, run
from mooncake_ray.data.lazy import Handle
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.errors import CorruptBlockError

INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


def stored(batch, arrays=None, checksums=False):
    rows = next((len(c) for c in [*batch.values(), *(arrays or {}).values()]), 0)
    encoded = block.encode(rows, batch, arrays or {}, checksums=checksums)
    assert not encoded.left
    memory = kernels.empty(encoded.nbytes)
    memory[:] = 0xAA
    for offset, address, nbytes in encoded.copies():
        kernels.gather(address, np.zeros(1, np.int64), np.array([nbytes]), memory.ctypes.data + offset)
    encoded.write(memory)
    return Handle(memory)


def loaded(handle, name, rows=None, form="as-put"):
    runs = Runs.span(0, handle.index.rows) if rows is None else Runs.of(np.asarray(rows))
    return run(block.column(handle.index, name, runs, form), handle.fetch)


def bits(tensor):
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def padded_batch(prompts, responses, width_p, width_r, seed=0):
    """A verl batch by hand: prompts to the right of their half, responses to the left of theirs."""
    rng = np.random.default_rng(seed)
    rows, width = len(prompts), width_p + width_r
    ids = np.full((rows, width), 151643, np.int64)
    mask = np.zeros((rows, width), np.int64)
    floats = {name: np.zeros((rows, width_r), np.float32) for name in ("old", "ref")}
    scores = np.zeros((rows, width_r), np.float32)
    for row, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, width_p - p : width_p + r] = rng.integers(0, 151936, p + r)
        mask[row, width_p - p : width_p + r] = 1
        for column in floats.values():
            column[row, :r] = -rng.exponential(0.5, r)
        if r:
            scores[row, r - 1] = rng.integers(0, 2)
    response_mask = mask[:, width_p:].copy()
    advantages = rng.normal(size=(rows, 1)).astype(np.float32) * response_mask.astype(np.float32)
    columns = {
        "prompts": ids[:, :width_p].copy(),
        "responses": ids[:, width_p:].copy(),
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": np.clip(np.cumsum(mask, 1) - 1, 0, None),
        "response_mask": response_mask,
        **floats,
        "advantages": advantages,
        "returns": advantages.copy(),
        "rewards": scores,
    }
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def test_a_padded_batch_is_stored_without_its_padding_and_without_what_follows():
    rng = np.random.default_rng(1)
    prompts, responses = rng.integers(1, 40, 64), rng.integers(1, 200, 64)
    batch = padded_batch(prompts, responses, 40, 200)
    handle = stored(batch)
    for name, column in batch.items():
        assert same(loaded(handle, name), column), name
    nodes = {name: field.node for name, field in handle.index.fields.items()}
    assert nodes["prompts"]["kind"] == nodes["responses"]["kind"] == nodes["returns"]["kind"] == "part"
    assert nodes["position_ids"]["fill"] == "positions" and nodes["attention_mask"]["fill"] == nodes["response_mask"]["fill"] == "ones"
    assert nodes["advantages"]["fill"] == "row" and nodes["rewards"]["fill"] in ("last", "row")
    tokens, answer = int(prompts.sum() + responses.sum()), int(responses.sum())
    ideal = 4 * tokens + 2 * 4 * answer + 2 * 4 * 64 + 3 * 64
    assert handle.nbytes < ideal + 4000, (handle.nbytes, ideal)
    ragged = loaded(handle, "responses", form="ragged")
    assert isinstance(ragged, Ragged) and ragged.lengths().tolist() == responses.tolist()
    for row in range(64):
        assert torch.equal(ragged[row], batch["responses"][row, : responses[row]])
    for name in ("advantages", "rewards", "response_mask", "position_ids", "prompts", "input_ids"):
        ragged = loaded(handle, name, [5, 3, 4, 60], form="ragged")
        mask = batch["attention_mask"] if batch[name].shape[1] == 240 else batch["response_mask"]
        mask = batch["attention_mask"][:, :40] if name == "prompts" else mask
        for at, row in enumerate([5, 3, 4, 60]):
            assert same(ragged[at], batch[name][row][mask[row].bool()]), name


def test_padding_that_no_mask_tells_is_not_stored_but_gives_no_row_lengths():
    batch = padded_batch([3, 2, 5, 4], [50, 10, 3, 9], 40, 200)
    alone = {"values": batch["old"], "ids": batch["input_ids"], "again": batch["input_ids"][:, 40:].clone()}
    handle = stored(alone)
    assert handle.nbytes < 2000
    for name, column in alone.items():
        assert same(loaded(handle, name), column) and same(loaded(handle, name, form="ragged"), column)
        assert not handle.index.has_lengths(name) and handle.index.lengths(name) is None


@pytest.mark.parametrize("rows", [[], [0], [63], [5, 6, 7], [9, 3, 3, 40, 41]])
def test_only_the_rows_asked_for_are_read(rows):
    rng = np.random.default_rng(2)
    prompts, responses = rng.integers(1, 40, 64), rng.integers(1, 200, 64)
    batch = padded_batch(prompts, responses, 40, 200)
    handle = stored(batch)
    for name, column in batch.items():
        reads = []

        def fetch(wanted, reads=reads):
            reads.append(sum(read.nbytes for read in wanted))
            return handle.fetch(wanted)

        got = run(block.column(handle.index, name, Runs.of(np.array(rows, np.int64))), fetch)
        assert same(got, column[rows]), name
        assert len(reads) <= 1, "one request a column"
        if name in ("prompts", "responses", "input_ids"):
            counts = {"prompts": prompts, "responses": responses, "input_ids": prompts + responses}[name]
            assert sum(reads) == 4 * counts[rows].sum()


@st.composite
def tensors(draw):
    rows, width = draw(st.integers(0, 6)), draw(st.integers(0, 9))
    tail = draw(st.sampled_from([(), (), (2,), (0,)]))
    lengths = draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    left = draw(st.booleans())
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)

    def grid(dtype, kind):
        item = dtype.itemsize
        raw = rng.integers(0, 256, (rows, width, *tail, item), dtype=np.uint8)
        if kind == "small" and dtype in INTS:
            raw[..., 1:] = 0
        if kind == "bits":
            raw[:] = 0
            raw[..., 0] = rng.integers(0, 2, raw.shape[:-1])
        if kind == "same":
            raw[:] = raw.reshape(-1, item)[:1] if raw.size else 0
        out = (
            torch.from_numpy(raw.reshape(-1)).view(dtype).reshape(rows, width, *tail)
            if raw.size
            else torch.empty((rows, width, *tail), dtype=dtype)
        )
        if kind in ("padded", "row", "last"):
            for row, n in enumerate(lengths):
                inside = slice(width - n, width) if left else slice(0, n)
                value = out[row, inside].clone()
                if raw.size:
                    bits(out[row])[:] = 0
                    out[row] = torch.zeros_like(out[row])
                if kind == "row" and n:
                    value[:] = value[0].clone()
                if kind == "last" and n:
                    value[:-1] = torch.zeros_like(value[:-1])
                out[row, inside] = value
        return out

    columns = {}
    if draw(st.booleans()) and width:
        mask = np.zeros((rows, width), np.int64)
        for row, n in enumerate(lengths):
            mask[row, slice(width - n, width) if left else slice(0, n)] = 1
        columns["mask"] = torch.from_numpy(mask).to(draw(st.sampled_from([torch.int64, torch.bool, torch.uint8])))
        columns["positions"] = torch.from_numpy(np.clip(np.cumsum(mask, 1) - 1, 0, None))
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["random", "small", "bits", "same", "padded", "row", "last"]))
        dtype = torch.bool if kind == "bits" and draw(st.booleans()) else draw(st.sampled_from(INTS + FLOATS))
        columns[f"c{number}"] = grid(dtype, kind)
    names = list(columns)
    source = columns[draw(st.sampled_from(names))]
    columns["copy"] = source.clone()
    if source.ndim > 1 and source.shape[1] > 1:
        columns["left"], columns["right"] = source[:, : source.shape[1] // 2], source[:, source.shape[1] // 2 :].clone()
    columns["scalars"] = torch.from_numpy(rng.integers(-5, 300, rows))
    order = draw(st.permutations(list(columns)))
    return {name: columns[name] for name in order}


@settings(max_examples=300, deadline=None)
@given(tensors(), st.data())
def test_any_columns_come_back_bit_for_bit(batch, data):
    handle = stored(batch, checksums=True)
    handle.verify()
    rows = data.draw(st.lists(st.integers(0, handle.index.rows - 1), max_size=8)) if handle.index.rows else []
    for name, column in batch.items():
        assert same(loaded(handle, name), column), (name, handle.index.fields[name].node)
        if column.numel() or not rows:
            assert same(loaded(handle, name, np.array(rows, np.int64)), column[rows]), (name, handle.index.fields[name].node)


def test_damage_is_told():
    handle = stored(padded_batch([3, 2], [5, 1], 4, 6), checksums=True)
    whole = handle._memory.copy()
    for at in (len(whole) // 2, len(whole) - 40):
        broken = whole.copy()
        broken[at] ^= 0xFF
        with pytest.raises(CorruptBlockError):
            Handle(broken).verify()
    with pytest.raises(CorruptBlockError, match=r"truncated|header"):
        Handle(whole[:-8])
    with pytest.raises(CorruptBlockError, match="no batch"):
        Handle(np.zeros(100, np.uint8))


@st.composite
def ragged_columns(draw):
    rows = draw(st.integers(0, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    long = np.array(draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows)), np.int64)
    short = rng.integers(0, long + 1) if rows else long
    tail = draw(st.sampled_from([(), (3,)]))

    def column(lengths, dtype, kind):
        total = int(lengths.sum())
        raw = rng.integers(0, 256, (total, *tail, dtype.itemsize), dtype=np.uint8)
        if kind == "small":
            raw[..., 1:] = 0
        values = (
            torch.from_numpy(raw.reshape(-1)).view(dtype).reshape(total, *tail) if raw.size else torch.empty((total, *tail), dtype=dtype)
        )
        offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))))
        if kind == "ones":
            values = torch.ones((total, *tail), dtype=dtype) if not dtype.is_complex else values
        valid = torch.from_numpy(lengths > 0) if kind == "nulls" else None
        return Ragged(values, offsets, valid)

    columns = {}
    for number in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["random", "small", "ones", "nulls"]))
        dtype = draw(st.sampled_from([torch.int64, torch.uint16, torch.float32, torch.bfloat16, torch.float8_e4m3fn]))
        columns[f"c{number}"] = column(draw(st.sampled_from([long, short])), dtype, kind)
    whole = column(long, torch.int64, "random")
    columns["whole"] = whole
    starts = whole.offsets[:-1]
    for side, first in (("left", starts), ("right", whole.offsets[1:] - torch.from_numpy(short))):
        pieces = [whole.values[int(f) : int(f) + int(n)] for f, n in zip(first, short, strict=True)]
        columns[side] = Ragged(torch.cat(pieces) if pieces else whole.values[:0], torch.from_numpy(np.concatenate(([0], np.cumsum(short)))))
    columns["cut"] = Ragged.concat([whole[1:], whole[:1]])[:rows] if rows else whole
    if rows:
        inner = column(np.array(rng.integers(0, 4, int(long.sum()) or 1), np.int64)[: int(long.sum())], torch.int32, "small")
        if tail and draw(st.booleans()):
            inner = Ragged(inner.values, inner.offsets, inner.valid, 1)
        columns["nested"] = Ragged(inner, torch.from_numpy(np.concatenate(([0], np.cumsum(long)))))
    return {name: columns[name] for name in draw(st.permutations(list(columns)))}


@settings(max_examples=200, deadline=None)
@given(ragged_columns(), st.data())
def test_any_ragged_columns_come_back_bit_for_bit(batch, data):
    handle = stored(batch)
    rows = data.draw(st.lists(st.integers(0, handle.index.rows - 1), max_size=8)) if handle.index.rows else []
    for name, column in batch.items():
        assert loaded(handle, name).equals(column), (name, handle.index.fields[name].node)
        got = loaded(handle, name, np.array(rows, np.int64))
        assert got.equals(column.select_idxs(np.array(rows, np.int64))), (name, handle.index.fields[name].node)
    held = [name for name in ("left", "right", "whole") if handle.index.fields[name].node.get("fill") == "values"]
    assert len(held) <= 1 or not batch["left"].nbytes, "parts are not stored again"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_block_is_an_error_or_a_value_but_never_read_outside(data):
    batch = padded_batch([3, 2, 0], [5, 1, 6], 4, 6)
    batch["ragged"] = Ragged.from_tensors([torch.arange(3), torch.arange(2), torch.arange(0)])
    arrays = {"objects": np.array([{"a": [1, 2]}, None, "x"], dtype=object)}
    whole = stored(batch, arrays)._memory.copy()
    head = len(stored(batch, arrays).index.head)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, head - 1) if data.draw(st.booleans()) else st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    try:
        handle = Handle(whole)
        names = list(handle.index.fields)
    except CorruptBlockError:
        return
    for name in names:
        try:
            loaded(handle, name)
            loaded(handle, name, form="ragged")
        except (CorruptBlockError, MemoryError):
            pass


def test_errors_name_the_field():
    handle = stored(padded_batch([3, 2], [5, 1], 4, 6), checksums=True)
    whole = handle._memory.copy()
    number, _ = handle.index.fields["old"].buffers
    whole[handle.index.span_of(number)[0]] ^= 1
    with pytest.raises(CorruptBlockError, match="field 'old' of the stored batch is damaged"):
        Handle(whole).verify()
    index = bytes(whole[48 : 48 + handle.index.layout.index_bytes])
    broken = index.replace(b'["old","tensor",{"kind":"padded","dtype":"float32"', b'["old","tensor",{"kind":"padded","dtype":"float64"')
    assert broken != index
    whole[48 : 48 + len(index)] = np.frombuffer(broken, np.uint8)
    with pytest.raises(CorruptBlockError, match="field 'old'"):
        loaded(Handle(whole), "old")
