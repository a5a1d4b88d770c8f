"""Actors that do several things at once: threads, coroutines, concurrency groups."""

from __future__ import annotations

import asyncio
import threading

import ray
from oracle_outcome import counting, described, routed

from oracle_cases.flavour import remote
from oracle_cases.helpers import churn, drain, error_of, in_order
from oracle_cases.payloads import DomainError, array, floats
from oracle_cases.registry import case
from oracle_cases.remotes import Gate, scale


@remote(num_cpus=0, concurrency_groups={"io": 2, "compute": 1})
class Grouped:
    """Calls of the group io meet; compute is one at a time."""

    def __init__(self, kept):
        self.kept, self.barrier, self.inside = kept, threading.Barrier(2), 0

    @ray.method(concurrency_group="io")
    def meet(self, tensor):
        self.barrier.wait(timeout=200)
        return ray.get(ray.put(tensor)) + 1

    @ray.method(concurrency_group="compute")
    def compute(self, tensor):
        self.inside += 1
        alone = self.inside == 1
        result = ray.get(scale.remote(tensor, 2))
        self.inside -= 1
        return alone, result

    @ray.method(concurrency_group="io", num_returns=2)
    def two(self, tensor):
        return tensor, {"k": tensor - 1}

    @ray.method(concurrency_group="compute")
    def stream(self, count):
        for i in range(count):
            yield floats(i)

    def wait(self, gate, tensor):
        gate.wait()
        return tensor

    def read(self):
        return self.kept

    def fail(self, tensor):
        raise DomainError("in a group", tensor)

    def routed(self):
        return routed()


@remote(num_cpus=0, concurrency_groups={"io": 2, "other": 1})
class AsyncGrouped:
    def __init__(self, kept):
        self.kept = kept

    @ray.method(concurrency_group="io")
    async def wait(self, gate, tensor):
        await gate.open_soon()
        return tensor + 1

    async def hold(self, gate, tensor):
        await gate.open_soon()
        return tensor - 1

    @ray.method(concurrency_group="io")
    async def open(self, gate, tensor):
        await gate.board.open.remote(gate.name)
        return tensor + 2

    @ray.method(concurrency_group="other")
    async def call(self, tensor):
        put = ray.put(tensor)
        return await scale.remote(put, 2), await put

    @ray.method(concurrency_group="other")
    async def stream(self, count):
        for i in range(count):
            await asyncio.sleep(0)
            yield floats(i)

    async def read(self):
        return self.kept

    def read_sync(self):
        """Ray runs it as a coroutine."""
        return self.kept

    async def in_a_thread(self, tensor):
        return await asyncio.to_thread(lambda: ray.get(ray.put(tensor)) * 2)

    async def in_tasks(self, tensor):
        async def one(i):
            await asyncio.sleep(0)
            return ray.put(tensor + i)

        refs = await asyncio.gather(*(asyncio.create_task(one(i)) for i in range(4)))
        return refs, await asyncio.gather(*refs)

    async def routed(self):
        return routed()


@remote(num_cpus=0)
class Threads:
    """All its calls and streams meet in twos."""

    def __init__(self):
        self.barrier = threading.Barrier(2)

    def stream(self, first, count):
        for i in range(count):
            self.barrier.wait(timeout=200)
            yield floats(first + i)

    @ray.method(num_returns=2)
    def two(self, tensor):
        self.barrier.wait(timeout=200)
        return tensor, described(tensor)

    def fail(self, tensor):
        self.barrier.wait(timeout=200)
        raise DomainError("in a thread", tensor)


@case
def groups_of_an_actor():
    actor = Grouped.remote(floats(9))
    with counting(actor):
        met = [actor.meet.remote(floats(i)) for i in range(4)]
        computed = [actor.compute.remote(floats(i)) for i in range(3)]
        both = actor.two.remote(floats(5))
        return [ray.get(met), ray.get(computed), ray.get(both), ray.get(actor.read.remote()), drain(actor.stream.remote(3))]


@case
def group_chosen_at_the_call():
    actor, gate = Grouped.remote(floats(9)), Gate("group_chosen_at_the_call")
    blocked = actor.wait.options(concurrency_group="compute").remote(gate, floats(1))
    passed = ray.get(actor.read.options(concurrency_group="io").remote())
    errors = [
        error_of(ray.get, actor.fail.remote(floats())),
        error_of(ray.get, actor.fail.options(concurrency_group="io").remote(floats())),
    ]
    gate.open()
    return [passed, errors, ray.get(blocked)]


@case
def groups_of_an_async_actor():
    actor, gate = AsyncGrouped.remote([floats(9), array()]), Gate("groups_of_an_async_actor")
    with counting(actor):
        waiting = actor.wait.remote(gate, floats())
        called = actor.call.remote(floats(1))
        beside = ray.get([called, actor.read.remote(), actor.read_sync.remote()])
        opened = actor.open.remote(gate, floats(2))
        return [beside, ray.get([waiting, opened]), drain(actor.stream.remote(3))]


@case
def async_actor_uses_threads_and_tasks():
    actor = AsyncGrouped.remote(None)
    with counting(actor):
        refs, values = ray.get(actor.in_tasks.remote(floats()))
        return [ray.get(actor.in_a_thread.remote(floats(1))), values, ray.get(refs), len(set(refs))]


@case
def many_calls_of_an_async_actor():
    actor, gate = AsyncGrouped.options(max_concurrency=30).remote(floats(1)), Gate("many_async_calls")
    waiting = [actor.hold.remote(gate, floats(i)) for i in range(12)]
    read = ray.get([actor.read.remote() for _ in range(6)])
    gate.open()
    churn(2)
    return [read, ray.get(waiting)]


@case
def streams_of_a_threaded_actor():
    actor = Threads.options(max_concurrency=2).remote()
    one, other = actor.stream.remote(0, 4), actor.stream.remote(100, 4)
    refs = [ref for pair in zip(one, other, strict=True) for ref in pair]
    return ray.get(refs)


@case
def returns_and_errors_of_a_threaded_actor():
    actor = Threads.options(max_concurrency=2).remote()
    pairs = [actor.two.remote(floats(i)) for i in range(2)]
    failed = [actor.fail.remote(floats(i)) for i in range(2)]
    return [[ray.get(pair) for pair in pairs], [error_of(ray.get, ref) for ref in failed]]


@case
def threaded_actor_completes_out_of_order():
    actor, gate = Grouped.options(max_concurrency=3).remote(None), Gate("threaded_out_of_order")
    blocked, later = actor.wait.remote(gate, floats()), [actor.wait.remote(Gate("opened_before"), floats(i)) for i in range(2)]
    Gate("opened_before").open()
    ready, _ = ray.wait([blocked, *later], num_returns=2)
    gate.open()
    return [blocked in ready, in_order(ray.get(later)), ray.get(blocked)]
