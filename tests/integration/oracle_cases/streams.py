"""Streaming generators."""

from __future__ import annotations

import ray
from oracle_outcome import counting

from oracle_cases.flavour import remote
from oracle_cases.helpers import churn, drain
from oracle_cases.payloads import floats
from oracle_cases.registry import case
from oracle_cases.remotes import async_keeper, keeper, scale, stream


@case
def stream_of_task():
    return [drain(stream.remote(4)), drain(stream.remote(3, shape=(2, 2))), drain(stream.remote(0))]


@case
def stream_of_actor():
    with counting(keeper()):
        return drain(keeper().stream.remote(4))


@case
def stream_of_async_actor():
    with counting(async_keeper()):
        return drain(async_keeper().stream.remote(4))


@case
def stream_raises_midway():
    return [drain(stream.remote(4, fail_at=2)), drain(stream.remote(4, fail_at=0))]


@case
def stream_of_actor_raises_midway():
    return [drain(keeper().stream.remote(4, fail_at=2)), drain(async_keeper().stream.remote(4, fail_at=2))]


@case
def stream_abandoned():
    firsts = []
    for source in (stream, keeper().stream, async_keeper().stream):
        generator = source.remote(8)
        firsts.append(ray.get(next(generator)))
        del generator
    churn(4)
    return [firsts, ray.get(keeper().scale.remote(floats(), 2)), ray.get(async_keeper().call.remote(floats()))]


@case
def stream_items_outlive_the_generator():
    generator = stream.remote(4)
    refs = list(generator)
    del generator
    churn(4)
    return [ray.get(refs), ray.get(scale.remote(refs[1], 2))]


@case
def stream_with_backpressure():
    generator = stream.options(_generator_backpressure_num_objects=1).remote(5)
    return ray.get([scale.remote(ref, 2) for ref in generator])


@case
async def stream_consumed_by_async_for():
    task = [await ref async for ref in stream.remote(3)]
    return [task, [await ref async for ref in async_keeper().stream.remote(3)]]


@case
def stream_waited_for():
    generator = stream.remote(2)
    ready, _ = ray.wait([generator])
    first = ray.get(next(generator))
    return [ready == [generator], first, ray.get(list(generator)), ray.get(generator.completed())]


@case
def stream_made_inside_a_task():
    @remote
    def consume():
        return [ray.get(ref) for ref in stream.remote(3)]

    return ray.get(consume.remote())
