"""`VersionSpans` against lists of each token's version; with batches, in blocks too; bad input."""

from __future__ import annotations

import itertools
import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.data import DataProto, Ragged, kernels
from mooncake_ray.data.block import block
from mooncake_ray.data.lazy import Columns, Handle, Pending, Stored
from mooncake_ray.errors import SchemaError, StaleVersionError
from mooncake_ray.rollout import spans as module
from mooncake_ray.rollout.spans import NO_VERSION, VERSION_IDS, VERSION_LENGTHS, VersionSpans, attach, spans_of

BIG = 2**40
versions = st.one_of(st.integers(0, 3), st.sampled_from([2**31 - 1, 2**31, BIG]))
samples = st.lists(st.lists(versions, max_size=6), max_size=5)
thorough = settings(max_examples=150, deadline=None)


def groups(sample):
    """[(version, tokens)] of the shortest runs there are."""
    return [(version, len(list(run))) for version, run in itertools.groupby(sample)]


def model(spans):
    """Each token's version, read off the fields one by one."""
    out = []
    for a, b in itertools.pairwise(spans.offsets.tolist()):
        out.append([v for v, n in zip(spans.versions[a:b].tolist(), spans.lengths[a:b].tolist(), strict=True) for _ in range(n)])
    return out


def is_merged(spans):
    return all(
        len(spans.versions[a:b]) == len(groups(sample))
        for (a, b), sample in zip(itertools.pairwise(spans.offsets), model(spans), strict=True)
    )


def made_of(samples, cut=lambda run: [run]):
    """Built run by run; `cut` divides a run into several of its version."""
    runs = [[piece for run in groups(sample) for piece in cut(run)] for sample in samples]
    flat = [run for sample in runs for run in sample]
    offsets = np.cumsum([0, *map(len, runs)])
    return VersionSpans(np.array([v for v, _ in flat], np.int64), np.array([n for _, n in flat], np.int64), offsets)


@st.composite
def any_spans(draw, samples=samples):
    """Also such as have neighbouring runs of one version."""

    def cut(run):
        version, n = run
        first = draw(st.integers(1, n))
        return [(version, first), (version, n - first)] if first < n else [run]

    return made_of(draw(samples), cut)


# Made of


@given(st.integers(0, BIG), st.lists(st.integers(0, 5), max_size=6))
@thorough
def test_constant(version, lengths):
    for given_lengths in (lengths, np.array(lengths, np.int32), torch.tensor(lengths, dtype=torch.int64)):
        spans = VersionSpans.constant(version, given_lengths)
        assert model(spans) == [[version] * n for n in lengths]
        assert is_merged(spans)


@given(samples, st.sampled_from(["tuple", "list", "mapping", "digits", "numpy"]), st.booleans())
@thorough
def test_of_what_engines_say(samples, form, empty_spans):
    said = []
    for sample in samples:
        row, at = [], 0
        for version, n in groups(sample):
            row += [(version + 1, at, at)] * empty_spans + [(version, at, at + 1), (version, at + 1, at + n)]
            at += n
        said.append(row)
    make = {
        "tuple": tuple,
        "list": list,
        "mapping": lambda span: {"start": span[1], "end": span[2], "version": span[0], "other": 0},
        "digits": lambda span: {"version": str(span[0]), "start": span[1], "end": span[2]},
        "numpy": lambda span: tuple(map(np.int64, span)),
    }[form]
    spans = VersionSpans.of([[make(span) for span in row] for row in said])
    assert model(spans) == samples
    assert is_merged(spans)


@given(samples)
@thorough
def test_of_tokens(samples):
    column = Ragged.from_lists([[7], *samples, [8, 9]], torch.int64)[1:-1]  # its offsets do not begin at 0
    spans = VersionSpans.from_tokens(column)
    assert model(spans) == samples
    assert is_merged(spans)


def test_of_tokens_of_every_form():
    column = torch.tensor([[1, 1, 2], [2, 2, 2]])
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.uint64):
        assert model(VersionSpans.from_tokens(column.to(dtype))) == [[1, 1, 2], [2, 2, 2]]
        assert model(VersionSpans.from_tokens(Ragged.from_padded(column.to(dtype), lengths=[1, 0]))) == [[1], []]
    assert model(VersionSpans.from_tokens(Ragged.from_lists([[1], [4, 4]]).to_jagged())) == [[1], [4, 4]]
    assert model(VersionSpans.from_tokens(torch.empty(2, 0, dtype=torch.int64))) == [[], []]


# What is asked of them


@given(any_spans())
@thorough
def test_facts(spans):
    expected = model(spans)
    assert len(spans) == len(expected)
    assert spans.lengths_of_samples().tolist() == [len(sample) for sample in expected]
    assert spans.oldest().tolist() == [min(sample, default=NO_VERSION) for sample in expected]
    assert spans.newest().tolist() == [max(sample, default=NO_VERSION) for sample in expected]
    tokens = spans.tokens()
    assert tokens.to_lists() == expected
    assert tokens.dtype == (torch.int64 if any(v > 2**31 - 1 for sample in expected for v in sample) else torch.int32)
    assert pickle.loads(pickle.dumps(spans)).tokens().equals(tokens)


@given(any_spans(), st.integers(0, 3))
@thorough
def test_staleness_is_counted_at_the_token(spans, more):
    expected = model(spans)
    current = max((v for sample in expected for v in sample), default=0) + more
    ages = spans.ages(current)
    assert ages.to_lists() == [[current - v for v in sample] for sample in expected]
    assert ages.dtype == (torch.int64 if any(current - v > 2**31 - 1 for sample in expected for v in sample) else torch.int32)
    assert spans.staleness(current).tolist() == [max((current - v for v in sample), default=0) for sample in expected]


@given(any_spans(), st.data())
@thorough
def test_select(spans, data):
    expected, n = model(spans), len(spans)
    rows = data.draw(st.lists(st.integers(-n, n - 1), max_size=8)) if n else []
    mask = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    a, b = data.draw(st.integers(-n - 1, n + 1)), data.draw(st.integers(-n - 1, n + 1))
    assert model(spans.select(rows)) == [expected[row] for row in rows]
    assert model(spans.select(torch.tensor(rows, dtype=torch.int64))) == [expected[row] for row in rows]
    assert model(spans.select(np.array(mask, bool))) == [sample for sample, kept in zip(expected, mask, strict=True) if kept]
    assert model(spans.select(slice(a, b))) == expected[a:b]
    assert model(spans.select(slice(None, None, 2))) == expected[::2]


@given(st.lists(any_spans(), min_size=1, max_size=3))
@thorough
def test_concat(parts):
    assert model(VersionSpans.concat(parts)) == [sample for part in parts for sample in model(part)]


@given(any_spans(), st.data())
@thorough
def test_truncate(spans, data):
    expected, n = model(spans), len(spans)
    limits = data.draw(st.lists(st.integers(0, 8), min_size=n, max_size=n))
    one = data.draw(st.integers(0, 8))
    assert model(spans.truncate(limits)) == [sample[:limit] for sample, limit in zip(expected, limits, strict=True)]
    assert model(spans.truncate(torch.tensor(limits, dtype=torch.int32))) == model(spans.truncate(limits))
    assert model(spans.truncate(one)) == [sample[:one] for sample in expected]


@given(any_spans(), st.data())
@thorough
def test_append(spans, data):
    before = model(spans)
    least = [max(sample, default=0) for sample in before]
    after = [data.draw(st.lists(st.integers(low, low + 2), max_size=4)) for low in least]
    both = spans.append(made_of(after))
    assert model(both) == [a + b for a, b in zip(before, after, strict=True)]
    assert is_merged(both)


def test_a_sample_does_not_go_back():
    spans = VersionSpans.of([[(5, 0, 2)], [], [(3, 0, 1), (7, 1, 2), (6, 2, 3)]])
    assert model(spans.append(VersionSpans.of([[], [(0, 0, 1)], [(7, 0, 1)]]))) == [[5, 5], [0], [3, 7, 6, 7]]
    with pytest.raises(StaleVersionError, match=r"^sample 2 goes on with version 6, expected at least its newest, 7$"):
        spans.append(VersionSpans.of([[(5, 0, 1)], [], [(9, 0, 1), (6, 1, 2)]]))
    with pytest.raises(SchemaError, match="cannot append 2 samples to 3"):
        spans.append(VersionSpans.constant(9, [1, 1]))
    for ask in (spans.ages, spans.staleness):
        with pytest.raises(StaleVersionError, match=r"^sample 2 has tokens of version 7, newer than the current one, 6$"):
            ask(6)


def test_the_dtype_follows_the_versions_that_are_there():
    part = VersionSpans.constant(2**31 - 1, [3, 0]).append(VersionSpans.constant(2**31, [0, 2]))
    assert part.select([0]).tokens().dtype == torch.int32
    assert part.tokens().dtype == torch.int64
    assert part.tokens().to_lists() == [[2**31 - 1] * 3, [2**31] * 2]


def lines_run(work) -> int:
    """Lines of Python that run in the module."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename != module.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def use(samples: int) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 20, samples)
    spans = VersionSpans.constant(3, lengths).append(VersionSpans.constant(4, lengths[::-1]))
    spans = VersionSpans.concat([spans, spans]).select(rng.permutation(2 * samples)).truncate(25)
    spans = VersionSpans.from_tokens(spans.tokens())
    spans = spans_of(attach(DataProto({"x": spans.tokens()}), spans, "x"), "x")
    for ask in (spans.oldest, spans.newest, spans.lengths_of_samples, lambda: spans.ages(5), lambda: spans.staleness(5)):
        ask()


def test_no_line_runs_once_a_sample():
    assert lines_run(lambda: use(10)) == lines_run(lambda: use(1000)) > 50


# In batches


def batch(samples):
    return DataProto(
        {
            "responses": Ragged.from_lists([list(range(len(sample))) for sample in samples], torch.int64),
            "score": torch.arange(len(samples)),
        },
        {"uid": np.array([f"u{n}" for n in range(len(samples))], object)},
        {"step": 1},
    )


def in_block(data):
    """The batch as it comes out of the store: encoded, all of its columns pending."""
    encoded = block.encode(len(data), dict(data.batch), dict(data.non_tensor_batch))
    assert not encoded.left
    memory = kernels.empty(encoded.nbytes)
    for offset, address, nbytes in encoded.copies():
        kernels.gather(address, np.zeros(1, np.int64), np.array([nbytes]), memory.ctypes.data + offset)
    encoded.write(memory)
    handle = Handle(memory)
    parts = ({name: Stored(handle, name) for name in columns} for columns in (data.batch, data.non_tensor_batch))
    return DataProto(*map(Columns, parts), data.meta_info)


@given(st.lists(st.lists(versions, max_size=6), min_size=1, max_size=6), st.booleans(), st.data())
@thorough
def test_they_stay_with_their_rows(samples, stored, data):
    n = len(samples)
    whole = attach(batch(samples), made_of(samples), "responses")
    assert whole.schema()[2:4] == attach(batch([[]]), made_of([[]])).schema()[2:4], "all batches can be joined"
    whole = in_block(whole) if stored else whole

    def check(part, expected):
        assert model(spans_of(part, "responses")) == expected

    check(whole, samples)
    whole = in_block(whole) if stored else whole  # pending again
    rows = data.draw(st.lists(st.integers(0, n - 1), max_size=8))
    check(whole.select_idxs(rows), [samples[row] for row in rows])
    chunks = whole.chunk(data.draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0])))
    check(
        DataProto.concat(chunks[::-1]),
        [sample for at in range(len(chunks))[::-1] for sample in samples[at * len(chunks[0]) :][: len(chunks[0])]],
    )
    check(chunks[-1], samples[-len(chunks[-1]) :])
    check(DataProto.concat([chunks[0], whole.select_idxs(rows)]), samples[: len(chunks[0])] + [samples[row] for row in rows])
    check(whole.repeat(2), [sample for sample in samples for _ in range(2)])
    check(whole.union(whole), samples)
    order = data.draw(st.permutations(range(n)))
    whole.reorder(order)
    check(whole, [samples[row] for row in order])
    check(pickle.loads(pickle.dumps(whole)), [samples[row] for row in order])


def test_what_is_not_asked_for_stays_in_the_store():
    samples = [[1, 1, 2], [4]]
    data = in_block(attach(batch(samples), made_of(samples)))
    assert model(spans_of(data)) == samples
    assert {name for name, column in data.batch.peeks().items() if not isinstance(column, Pending)} == {VERSION_IDS, VERSION_LENGTHS}
    again = attach(data, spans_of(data).append(VersionSpans.constant(5, [0, 1])))
    assert isinstance(again.batch.peek("responses"), Pending)
    assert model(spans_of(again)) == [[1, 1, 2], [4, 5]]
    assert model(spans_of(data)) == samples, "the other batch has its own"


def test_a_padded_response_is_at_least_as_wide():
    data = DataProto({"responses": torch.zeros(2, 3, dtype=torch.int64), "score": torch.zeros(2)})
    assert model(spans_of(attach(data, VersionSpans.constant(1, [3, 0]), "responses"), "responses")) == [[1] * 3, []]
    with pytest.raises(SchemaError, match="sample 1 has versions of 4 tokens, expected at most 3 as in 'responses'"):
        attach(data, VersionSpans.constant(1, [3, 4]), "responses")
    with pytest.raises(SchemaError, match="'score' has one number a row"):
        attach(data, VersionSpans.constant(1, [3, 3]), "score")


def test_batches_that_have_no_such_columns():
    samples = [[1, 1], [2]]
    data = attach(batch(samples), made_of(samples))

    def with_column(name, column):
        return DataProto({**data.batch, name: column})

    for bad, text in (
        (batch(samples), r"no columns \['version_ids', 'version_lengths'\]; it has \['responses', 'score'\]"),
        (data.select([VERSION_IDS]), r"no columns \['version_lengths'\]"),
        (with_column(VERSION_IDS, torch.ones(2, 1, dtype=torch.int64)), r"batch\['version_ids'\] is a Tensor, expected a ragged column"),
        (
            with_column(VERSION_IDS, Ragged.from_lists([[0.5], [1.0]])),
            r"batch\['version_ids'\] is float32\[\*\], expected a ragged column of int",
        ),
        (with_column(VERSION_IDS, Ragged.from_lists([[1], None])), "has 1 null rows"),
        (with_column(VERSION_IDS, Ragged.from_lists([[1], [2, 3]])), "row 1 has 2 versions and 1 lengths of them"),
        (with_column(VERSION_LENGTHS, Ragged.from_lists([[2], [0]])), r"lengths\[1\] is 0, expected at least 1"),
        ({VERSION_IDS: 1}, "the batch is a dict, expected a mooncake_ray.DataProto"),
    ):
        with pytest.raises(SchemaError, match=text):
            spans_of(bad)
    for response in ([[1, 2], []], [[1, 2], [3, 4]]):
        with pytest.raises(SchemaError, match=f"sample 1 has versions of 1 tokens, expected {len(response[1])} as in 'responses'"):
            spans_of(with_column("responses", Ragged.from_lists(response, torch.int64)), "responses")
    with pytest.raises(SchemaError, match="no column 'tokens'"):
        spans_of(data, "tokens")
    for response in (None, "responses"):
        with pytest.raises(SchemaError, match=r"has 3 rows, expected 2|of 3 samples, expected 2"):
            attach(batch(samples), made_of([[1], [2], [3]]), response)


# Bad input


@pytest.mark.parametrize(
    ("spans", "text"),
    [
        ([[(1, 0, 2)], [(1, 1, 2)]], r"sample 1, span 0 is \[1, 2\), expected it to begin at 0"),
        ([[(1, 0, 2), (2, 3, 4)]], r"sample 0, span 1 is \[3, 4\), expected it to begin at 2"),
        ([[], [(1, 0, 2), (2, 1, 4)]], r"sample 1, span 1 is \[1, 4\), expected it to begin at 2"),
        ([[(1, 0, 2), (2, 2, 1)]], r"sample 0, span 1 is \[2, 1\), expected it to begin at 2 and not to end before"),
        ([[("default", 0, 2)]], "the version of sample 0, span 0 is 'default', expected an integer from 0"),
        ([[("9" * 5000, 0, 2)]], "the version of sample 0, span 0 is '999"),
        ([[("-1", 0, 2)]], "the version of sample 0, span 0 is '-1'"),
        ([[(None, 0, 2)]], "the version of sample 0, span 0 is None"),
        ([[(True, 0, 2)]], "the version of sample 0, span 0 is True"),
        ([[(2**63, 0, 2)]], "the version of sample 0, span 0 is 9223372036854775808"),
        ([[(1, 0, 2), (1, 2, 3.0)]], "the end of sample 0, span 1 is 3.0"),
        ([[(1, "0", 2)]], "the start of sample 0, span 0 is '0'"),
        ([[(1, 2)]], r"sample 0, span 0 is \(1, 2\), expected \(version, start, end\)"),
        ([[{"version": 1, "end": 3}]], r"sample 0, span 0 has no \['start'\]; it has \['version', 'end'\]"),
        ([[(1, 0, 1)], None], "sample 1 is a NoneType, expected a list of spans"),
        (["123"], "sample 0 is a str, expected a list of spans"),
    ],
)
def test_spans_that_are_none(spans, text):
    with pytest.raises(SchemaError, match=text):
        VersionSpans.of(spans)


I64 = np.int64


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (([1], np.ones(1, I64), np.array([0, 1])), "versions is a list, expected an int64 array"),
        ((np.ones(1, np.int32), np.ones(1, I64), np.array([0, 1])), r"versions is int32\[1\]"),
        ((np.ones(1, I64), np.ones((1, 1), I64), np.array([0, 1])), r"lengths is int64\[1, 1\]"),
        ((np.ones(2, I64), np.ones(1, I64), np.array([0, 2])), "1 lengths for 2 versions"),
        ((np.ones(1, I64), np.ones(1, I64), np.array([1, 1])), "offsets do not rise from 0 to the 1 runs"),
        ((np.ones(1, I64), np.ones(1, I64), np.array([0, 2])), "offsets do not rise"),
        ((np.ones(1, I64), np.ones(1, I64), np.array([0, 2, 1])), "offsets do not rise"),
        ((np.ones(0, I64), np.ones(0, I64), np.array([], I64)), "offsets do not rise"),
        ((np.array([1, -1]), np.ones(2, I64), np.array([0, 2])), r"versions\[1\] is -1, expected at least 0"),
        ((np.ones(2, I64), np.array([1, 0]), np.array([0, 2])), r"lengths\[1\] is 0, expected at least 1"),
    ],
)
def test_fields_that_are_none(fields, text):
    with pytest.raises(SchemaError, match=text):
        VersionSpans(*fields)


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (lambda s: VersionSpans.constant(-1, [1]), "version is -1, expected an integer from 0"),
        (lambda s: VersionSpans.constant("1", [1]), "version is '1'"),
        (lambda s: VersionSpans.constant(1, [1, -2]), r"lengths\[1\] is -2, expected at least 0"),
        (lambda s: VersionSpans.constant(1, [1.5]), r"lengths is float64\[1\], expected integers"),
        (lambda s: VersionSpans.constant(1, [[1]]), r"lengths is int64\[1, 1\]"),
        (lambda s: VersionSpans.from_tokens(Ragged.from_lists([[1], None])), "the column of versions has 1 null rows"),
        (lambda s: VersionSpans.from_tokens(Ragged.from_lists([[1, -1]])), r"versions\[1\] is -1, expected at least 0"),
        (lambda s: VersionSpans.from_tokens(torch.tensor([1, 2])), "the column of versions is a Tensor"),
        (lambda s: VersionSpans.from_tokens(Ragged.from_lists([[[1]]])), r"is int64\[\*, \*\]"),
        (lambda s: VersionSpans.from_tokens(torch.tensor([[2**63]], dtype=torch.uint64)), "not exact as int64"),
        (lambda s: s.truncate([1]), "there are 1 lengths for 2 samples"),
        (lambda s: s.truncate(-1), r"lengths\[0\] is -1"),
        (lambda s: s.ages(None), "the current version is None"),
        (lambda s: s.staleness(1.0), "the current version is 1.0"),
    ],
)
def test_arguments_that_are_wrong(work, text):
    with pytest.raises(SchemaError, match=text):
        work(VersionSpans.constant(1, [1, 2]))


def test_there_are_no_such_samples():
    spans = VersionSpans.constant(1, [1, 2])
    for rows in ([2], [True], [[0]], [0.5]):
        with pytest.raises(IndexError):
            spans.select(rows)
    with pytest.raises(ValueError, match="empty list"):
        VersionSpans.concat([])
