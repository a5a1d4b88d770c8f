"""Tasks: arguments, returns, closures."""

from __future__ import annotations

import numpy as np
import ray
import torch
from oracle_outcome import described

from oracle_cases.flavour import remote
from oracle_cases.helpers import error_of
from oracle_cases.payloads import Episode, LabelledTensor, Pair, Sample, array, floats
from oracle_cases.registry import case
from oracle_cases.remotes import (
    describe,
    describe_nested,
    environment,
    fan_out,
    nothing,
    put_inside,
    recurse,
    rows,
    same,
    scale,
    scale_once,
    stream,
    task_context,
    with_default,
)


@case
def task_argument_by_value():
    return ray.get(describe.remote(floats(), array(), {"x": [floats(2)]}))


@case
def task_argument_by_ref():
    return ray.get(describe.remote(ray.put(floats()), ray.put([array(), floats(1)])))


@case
def task_keyword_arguments():
    return ray.get(describe.remote(floats(), by_value=floats(1), by_ref=ray.put(array()), small=3))


@case
def task_argument_small():
    return ray.get(describe.remote(torch.arange(4), np.arange(3), "x", ray.put(torch.ones(2)), k=[torch.zeros(1)]))


@case
def task_argument_nested_ref_stays_a_ref():
    refs = [ray.put(floats()), scale.remote(floats(1), 2)]
    return ray.get(describe_nested.remote({"items": refs, "tensor": floats(3)}))


@case
def task_argument_twice():
    tensor, ref = floats(), ray.put(floats(1))
    return [ray.get(describe.remote(tensor, tensor, [tensor])), ray.get(describe.remote(ref, ref))]


@case
def task_argument_kinds():
    sources = [Sample(floats(), array()), Pair(floats(1), 2), torch.nn.Parameter(floats(2))]
    sources.append(np.asfortranarray(array(3)))
    return ray.get(describe.remote(*sources, subclass=LabelledTensor.labelled(floats(4), "x"), episode=Episode()))


@case
def task_default_argument():
    return ray.get([with_default.remote(), with_default.remote(bias=4), with_default.remote(floats(1))])


@case
def task_returns_value():
    values = [floats(), {"a": [array(), floats(1)]}, Sample(floats(), array()), array()[:, ::2]]
    return ray.get([same.remote(value) for value in values])


@case
def task_returns_small():
    return ray.get([same.remote(torch.arange(3)), same.remote(None), same.remote("x"), nothing.remote(floats())])


@case
def task_returns_its_argument():
    ref = ray.put(floats())
    returned = same.remote(ref)
    first = ray.get(returned)
    first.zero_()
    return [ray.get(returned), ray.get(ref), returned == ref]


@case
def task_num_returns():
    big = floats(shape=(3, 100_000))
    two, three = rows.options(num_returns=2).remote(big, 2), rows.options(num_returns=3).remote(big, 3)
    return [ray.get(two), ray.get(list(reversed(three))), len(two), ray.get(scale.remote(three[1], 2))]


@case
def task_num_returns_zero():
    return nothing.options(num_returns=0).remote(floats())


@case
def task_num_returns_mismatch():
    refs = rows.options(num_returns=3).remote(floats(shape=(2, 100_000)), 2)
    single = rows.options(num_returns=2).remote(floats(shape=(2, 100_000)), 1)
    return [error_of(ray.get, ref) for ref in (*refs, *single)]


@case
def task_num_returns_dynamic():
    generator = ray.get(stream.options(num_returns="dynamic").remote(3))
    return [type(generator).__qualname__, ray.get(list(generator))]


@case
def task_returns_nested_refs():
    result = ray.get(fan_out.remote(floats()))
    return [result, ray.get(result["refs"])]


@case
def task_returns_a_ref():
    inner = ray.get(put_inside.remote(3))
    return [inner, ray.get(inner), ray.get(describe.remote(inner)), ray.get(scale.remote(inner, 2))]


@case
def task_chain():
    ref = scale.remote(floats(), 2)
    for factor in (3, 5):
        ref = scale.remote(ref, factor)
    return ray.get(ref)


@case
def task_recursion():
    return ray.get(recurse.remote(floats(), 2))


@case
def task_closure_with_tensor():
    captured, numbers = floats(), array()

    @remote
    def use(k):
        return captured * k, numbers, described(captured)

    return ray.get([use.remote(2), use.remote(3)])


@case
def task_closure_with_ref():
    captured = ray.put(floats())
    refs = [captured, scale.remote(floats(1), 2)]

    @remote
    def use(k):
        return ray.get(captured) * k, described(refs), ray.get(refs)

    return ray.get(use.remote(2))


@case
def task_name_and_context():
    named = task_context.options(name="oracle-task").remote(floats())
    return ray.get([named, task_context.remote(floats(1))])


@case
def task_with_own_environment():
    own = {"env_vars": {"ORACLE_VARIABLE": "set"}}
    inside = environment.options(runtime_env=own).remote("ORACLE_VARIABLE", floats())
    return [ray.get(inside), ray.get(environment.remote("ORACLE_VARIABLE", floats()))]


@case
def task_result_of_worker_that_exits():
    ref = scale_once.remote(floats(), 2)
    again = scale_once.remote(ref, 3)
    return ray.get([ref, again])


@case
def task_graph():
    node = scale.bind(scale.bind(floats(), 2), 3)
    return ray.get(node.execute())


@case
def task_of_lambda():
    return ray.get(remote(lambda tensor: tensor[:, ::2] + 1).remote(floats()))


@case
def many_tasks_at_once():
    source = ray.put(floats())
    return ray.get([scale.remote(source if i % 2 else floats(i), i) for i in range(12)])
