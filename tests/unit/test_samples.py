"""Dataclasses to columns and back."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray import SchemaError
from mooncake_ray.integrations.samples import batch_to_samples, samples_to_batch


class Status(enum.Enum):
    PENDING = "pending"
    DONE = "done"


@dataclass
class Info:
    turns: int = 0


@dataclass
class Plain:
    tokens: list[int] = field(default_factory=list)
    reward: float | dict | None = None
    status: Status = Status.PENDING
    info: Info = field(default_factory=Info)


@dataclass(frozen=True)
class Frozen:
    index: int
    text: str = ""


@dataclass
class Own(Plain):
    def to_dict(self):
        return {**self.__dict__, "status": self.status.value, "info": self.info.turns}

    @staticmethod
    def from_dict(data):
        data = {**data, "status": Status(data["status"]), "info": Info(data["info"])}
        extra = {name: data.pop(name) for name in list(data) if name not in Own.__dataclass_fields__}
        made = Own(**data)
        vars(made).update(extra)
        return made


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(), max_size=3),
        st.none() | st.floats(allow_nan=False) | st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
        st.sampled_from(Status),
        st.builds(Info, st.integers(0, 3)),
        st.dictionaries(st.sampled_from(["extra", "more"]), st.integers(), max_size=2),
    ),
    max_size=4,
)


@pytest.mark.parametrize("cls", [Plain, Own])
@settings(deadline=None)
@given(rows=ROWS)
def test_samples_come_back_as_they_were(cls, rows):
    samples = []
    for *values, extra in rows:
        samples.append(cls(*values))
        vars(samples[-1]).update(extra)
    back = batch_to_samples(samples_to_batch(samples), cls)
    assert [(type(s), vars(s)) for s in back] == [(type(s), vars(s)) for s in samples]


def test_a_class_that_says_how_is_asked():
    batch = samples_to_batch([Own([1], 0.5, Status.DONE, Info(2))])
    assert batch == {"tokens": [[1]], "reward": [0.5], "status": ["done"], "info": [2]}


def test_frozen_classes():
    samples = [Frozen(1, "a"), Frozen(2)]
    assert batch_to_samples(samples_to_batch(samples), Frozen) == samples


def test_fields_that_are_missing_get_their_defaults_if_they_have_any():
    assert batch_to_samples({"index": [1]}, Frozen) == [Frozen(1)]
    with pytest.raises(SchemaError, match=r"row 0 makes no Frozen: .*index"):
        batch_to_samples({"text": ["a"]}, Frozen)


def test_what_is_no_sample_is_named():
    with pytest.raises(SchemaError, match="sample 1 is a dict"):
        samples_to_batch([Frozen(1), {"index": 2}])
    with pytest.raises(SchemaError, match=r"'index': 1, 'text': 2"):
        batch_to_samples({"index": [1], "text": ["a", "b"]}, Frozen)
