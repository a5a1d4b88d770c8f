"""Dicts to columns and back, natively: which keys are the same, what is refused, and that no reference is lost or kept."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mooncake_ray._native.dicts import columns, dicts

keys = st.one_of(st.text(max_size=3), st.integers(-2, 2), st.booleans(), st.none(), st.binary(max_size=1), st.sampled_from([0.5, (1, "a")]))


@given(
    st.lists(keys, max_size=5, unique_by=lambda key: (type(key), key)).filter(lambda some: len(set(some)) == len(some)), st.integers(1, 6)
)
def test_there_and_back(names, rows):
    values = [{name: object() for name in names} for _ in range(rows)]
    found, parts = columns(values)
    assert found == names and list(map(type, found)) == list(map(type, names))
    assert parts == [[value[name] for value in values] for name in names]
    again = dicts(found, parts, rows)
    assert again == values and [list(a) for a in again] == [list(a) for a in values]
    assert all(a is not b for a, b in zip(again, values, strict=True))


@pytest.mark.parametrize(
    "values",
    [
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
        [{"a": 1}, {"a": 1, "b": 2}],
        [{"a": 1, "b": 2}, {"a": 1}],
        [{1: "a"}, {True: "a"}],
        [{0: "a"}, {0.0: "a"}],
        [{0.0: "a"}, {-0.0: "a"}],
        [{"a": 1}, {type("Text", (str,), {})("a"): 1}],
        [{float("nan"): 1}, {float("nan"): 1}],
        [{(1, 2): 1}, {(1, 2.0): 1}],
    ],
)
def test_keys_that_are_not_the_same(values):
    assert columns(values) is None


def test_equal_keys_need_not_be_one_object():
    names = ["".join(["a", "b" * n]) for n in range(3)]
    again = ["".join(["a", "b" * n]) for n in range(3)]
    assert columns([dict.fromkeys(names, 1), dict.fromkeys(again, 2)]) == (names, [[1, 2]] * 3)
    assert columns([{10**30: 1}, {10**20 * 10**10: 2}]) == ([10**30], [[1, 2]])


def test_what_is_refused():
    with pytest.raises(TypeError, match="row 1"):
        columns([{"a": 1}, None])
    with pytest.raises(TypeError):
        columns([type("Mine", (dict,), {})()])
    with pytest.raises(ValueError, match="different keys"):
        dicts(["a", "a"], [[1], [2]], 1)
    with pytest.raises(ValueError, match="columns"):
        dicts(["a"], [], 1)
    with pytest.raises(ValueError, match="3 values"):
        dicts(["a"], [[1, 2]], 3)
    with pytest.raises(TypeError):
        dicts([[]], [[1]], 1)


def test_references():
    key, value = "k" * 50, object()
    before = sys.getrefcount(key), sys.getrefcount(value)
    for _ in range(100):
        found, parts = columns([{key: value}, {key: value}])
        dicts(found, parts, 2)
        columns([{key: value}, {}])
    del found, parts
    assert (sys.getrefcount(key), sys.getrefcount(value)) == before
