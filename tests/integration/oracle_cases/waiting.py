"""ray.wait, ray.get, await and futures."""

from __future__ import annotations

import asyncio
import concurrent.futures

import ray
import ray.util

from oracle_cases.helpers import error_of, in_order, kind_of, round_trip
from oracle_cases.payloads import DomainError, array, floats
from oracle_cases.registry import case
from oracle_cases.remotes import board, fail_with, same, scale


@case
def wait_num_returns():
    gate = "wait_num_returns"
    blocked = same.remote(floats(9), board().wait.remote(gate))
    ready_refs = [ray.put(floats(i)) for i in range(3)]
    refs = [blocked, *ready_refs]
    ready, pending = ray.wait(refs, num_returns=3)
    facts = [ready == ready_refs, pending == [blocked], [len(x) for x in ray.wait(refs, num_returns=1)]]
    ray.get(board().open.remote(gate))
    ready, pending = ray.wait(refs, num_returns=4)
    return [facts, ready == refs, pending, ray.get(ready)]


@case
def wait_timeout_zero():
    gate = "wait_timeout_zero"
    blocked, put = same.remote(floats(9), board().wait.remote(gate)), ray.put(floats())
    ray.wait([put])
    ready, pending = ray.wait([blocked, put], num_returns=2, timeout=0)
    none_ready = ray.wait([blocked], timeout=0)
    ray.get(board().open.remote(gate))
    return [ready == [put], pending == [blocked], none_ready == ([], [blocked]), ray.get(blocked)]


@case
def wait_fetch_local():
    refs = [scale.remote(floats(i), 2) for i in range(2)]
    ready, pending = ray.wait(refs, num_returns=2, fetch_local=False)
    return [ready == refs, pending, ray.get(ready)]


@case
def wait_arguments_refused():
    ref = ray.put(floats())
    calls = [([ref, ref],), (ref,), ([1],), ([ref], 0)]
    return [kind_of(ray.wait, refs, **({"num_returns": n[0]} if n else {})) for refs, *n in calls]


@case
def wait_for_failed_task():
    failed = fail_with.remote(DomainError("waited for", floats()))
    ready, _ = ray.wait([failed])
    return [ready == [failed], error_of(ray.get, failed)]


@case
async def await_refs():
    return [await ray.put(floats()), await scale.remote(floats(1), 2), await same.remote({"k": [array()]})]


@case
async def gather_refs():
    refs = [ray.put(floats()), scale.remote(floats(1), 2), *(ray.put(array(i)) for i in range(4))]
    first = await refs[0]
    first.zero_()
    return await asyncio.gather(*refs)


@case
async def await_with_timeout_and_failure():
    gate = "await_with_timeout"
    blocked = same.remote(floats(), board().wait.remote(gate))
    timeout = await _async_error(asyncio.wait_for(asyncio.wrap_future(blocked.future()), 0.01))
    failure = await _async_error(_awaited(fail_with.remote(DomainError("awaited", floats()))))
    await board().open.remote(gate)
    done, pending = await asyncio.wait([asyncio.ensure_future(_awaited(ref)) for ref in (blocked, ray.put(floats(1)))])
    return [type(timeout).__qualname__, failure, in_order(task.result() for task in done), len(pending)]


async def _awaited(ref):
    return await ref


async def _async_error(awaitable):
    try:
        return {"no error, but": await awaitable}
    except Exception as error:
        return error.with_traceback(None)


@case
def future_of_ref():
    futures = [ray.put(floats()).future(), scale.remote(floats(1), 2).future()]
    concurrent.futures.wait(futures)
    failed = fail_with.remote(DomainError("in a future", floats())).future()
    return [[future.result() for future in futures], failed.exception(), type(futures[0]).__qualname__]


@case
def get_of_lists():
    refs = [ray.put(floats(i)) for i in range(5)]
    return [ray.get(refs), ray.get([]), ray.get(refs[0], timeout=30), ray.get(refs[::-1][:2], timeout=30)]


@case
def as_completed_and_map_unordered():
    completed = ray.util.as_completed([scale.remote(floats(i), 2) for i in range(4)])
    mapped = ray.util.map_unordered(same, [floats(i) for i in range(4)])
    return [in_order(completed), in_order(mapped)]


@case
def threads_of_the_driver():
    shared = ray.put(floats())

    def work(i):
        mine = ray.get(shared)
        mine.add_(i)
        return [round_trip(mine), ray.get(scale.remote(mine, 2))]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return [list(pool.map(work, range(8))), ray.get(shared)]
