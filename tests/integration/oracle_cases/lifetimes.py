"""Values outlive what they came from."""

from __future__ import annotations

import pickle

import ray
import ray.cloudpickle

from oracle_cases.helpers import churn
from oracle_cases.payloads import array, floats
from oracle_cases.registry import case
from oracle_cases.remotes import board, describe, keeper, scale


@case
def value_outlives_ref():
    ref = ray.put([floats(), array(), floats(2)[::2]])
    got = ray.get(ref)
    part = got[1][10:20]
    del ref
    churn()
    return [got, part]


@case
def part_of_value_outlives_the_rest():
    got = ray.get(ray.put({"a": floats(), "b": array()}))
    row, column = got["a"][3], got["b"][:, 3]
    del got
    churn()
    return [row, column]


@case
def kept_argument_outlives_the_call():
    actor = keeper()
    ray.get(actor.keep.remote([floats(), array()]))
    churn()
    return ray.get(actor.describe.remote())


@case
def borrowed_ref_outlives_drivers_ref():
    ref, actor = ray.put(floats()), keeper()
    ray.get(actor.keep.remote([ref]))
    del ref
    churn()
    return ray.get(actor.read_inner.remote())


@case
def inner_ref_outlives_outer_ref():
    outer = ray.put([ray.put(floats()), ray.put(array())])
    refs = ray.get(outer)
    del outer
    churn()
    return ray.get(refs)


@case
def ref_held_only_by_an_object_in_the_store():
    outer = ray.put({"inner": [ray.put(floats())]})
    churn()
    return ray.get(ray.get(outer)["inner"])


@case
def argument_waits_in_the_queue():
    gate, ref = "queued_argument", ray.put(floats(2))
    result = describe.remote(floats(1), ref, board().wait.remote(gate))
    del ref
    churn()
    ray.get(board().open.remote(gate))
    return ray.get(result)


@case
def results_nobody_wants():
    """Refs dropped while their tasks are queued, running or just replying."""
    for i in range(60):
        for j in range(6):
            scale.remote(floats(j), 2)
            ray.put(floats(j))
        ray.get(scale.remote(floats(i), 2))
    return ray.get(scale.remote(floats(), 2))


@case
def ref_is_an_ordinary_object_ref():
    ref, other = ray.put(floats()), ray.put(floats())
    again = pickle.loads(ray.cloudpickle.dumps(ref))
    facts = [isinstance(ref, ray.ObjectRef), len(ref.hex()), ref == again, ref == other, hash(ref) == hash(again)]
    return [type(ref).__qualname__, facts, len({ref, again, other}), ray.get(again)]
