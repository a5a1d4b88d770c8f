"""Actors: state, arguments, returns, names; pools and queues of them."""

from __future__ import annotations

import queue

import ray
import ray.util
import torch
from oracle_outcome import counting
from ray.util.queue import Queue

from oracle_cases.flavour import remote
from oracle_cases.helpers import churn, in_order, kind_of
from oracle_cases.payloads import array, floats
from oracle_cases.registry import case
from oracle_cases.remotes import Keeper, Meeting, async_keeper, keeper, scale


@case
def actor_constructor_and_restart():
    """A restarted actor gets its constructor arguments again; Ray asks its user to hold those given by ref, and large values are."""
    options, held = Keeper.options(max_restarts=1, max_task_retries=2), ray.put([floats(1), array()])
    actor = options.remote(["small", torch.arange(3)], extra=held)
    first = ray.get(actor.describe.remote(floats(2)))
    churn(4)
    ray.kill(actor, no_restart=False)
    while not ray.get(actor.context.remote())[1]:
        pass  # the kill has not reached it yet
    second = ray.get(actor.describe.remote(floats(2)))
    ray.kill(actor)
    return [first, second, ray.get(held)]


@case
def actor_state_over_calls():
    actor = keeper()
    ray.get(actor.keep.remote(None))
    with counting(actor):
        sums = ray.get([actor.add.remote(floats(i)) for i in range(4)])
        return [sums, ray.get(actor.read.remote())]


@case
def actor_method_arguments():
    ray.get(keeper().keep.remote(None))
    by_key = {"key": floats(1), "ref": ray.put(floats(2)), "refs": [ray.put(floats(3))]}
    return ray.get(keeper().describe.remote(floats(), ray.put(array()), **by_key))


@case
def actor_method_returns():
    pair = keeper().pair.remote(floats())
    with counting(keeper()):
        triple = keeper().triple.options(num_returns=3).remote(floats(1))
        return [ray.get(pair), ray.get(triple)]


@case
def actor_to_actor():
    with counting(keeper(0), keeper(1)):
        return ray.get(keeper(0).relay.remote(keeper(1), floats()))


@case
def object_through_three_actors():
    ref = ray.put(floats())
    for number in range(3):
        ref = keeper(number).scale.remote(ref, number + 2)
    return ray.get(ref)


@case
def state_moves_between_actors():
    ray.get(keeper(0).keep.remote([floats(), array()]))
    for number in (1, 2):
        ray.get(keeper(number).keep.remote(keeper(number - 1).read.remote()))
    return ray.get(keeper(2).describe.remote())


@case
def actor_puts_and_driver_gets():
    with counting(keeper()):
        ref = ray.get(keeper().put.remote(floats()))
        return [ref, ray.get(ref), ray.get(scale.remote(ref, 2)), ray.get(keeper(1).scale.remote(ref, 3))]


@case
def actor_reads_a_nested_ref():
    with counting(keeper()):
        ray.get(keeper().keep_inner.remote([ray.put([floats(), array()])]))
        return ray.get(keeper().describe.remote(ray.put(floats(1))))


@case
def actor_named():
    first = Keeper.options(name="oracle-named", get_if_exists=True).remote(floats())
    actor = ray.get_actor("oracle-named")
    same_one = Keeper.options(name="oracle-named", get_if_exists=True).remote(floats(1))
    return ray.get([actor.context.remote(), actor.read.remote(), same_one.read.remote(), first.read.remote()])


@case
def actor_handle_and_tensor_in_one_argument():
    @remote
    def use(container):
        return ray.get(container["actor"].scale.remote(container["tensor"], 2))

    return ray.get(use.remote({"actor": keeper(), "tensor": floats()}))


@case
def actor_threaded():
    actor = Meeting.options(max_concurrency=3).remote(3)
    with counting(actor):
        return ray.get([actor.meet.remote(floats(i), 2) for i in range(6)])


@case
def actor_async_concurrent_calls():
    actor = async_keeper()
    with counting(actor):
        return ray.get([actor.exchange.remote(floats(i), 4) for i in range(4)])


@case
def actor_async_awaits_nested_refs():
    refs = [ray.put(floats()), scale.remote(floats(1), 2), ray.put({"k": array()})]
    return ray.get(async_keeper().gather.remote({"refs": refs, "tensor": floats(3)}))


@case
def actor_async_calls_tasks():
    with counting(async_keeper()):
        return ray.get(async_keeper().call.remote(floats()))


@case
def actor_async_keeps_state():
    ray.get(async_keeper().keep.remote([floats(), array()]))
    churn(4)
    return ray.get(async_keeper().read.remote())


@case
def actor_pool():
    pool = ray.util.ActorPool([keeper(0), keeper(1)])
    ordered = list(pool.map(lambda actor, tensor: actor.scale.remote(tensor, 2), [floats(i) for i in range(5)]))
    unordered = pool.map_unordered(lambda actor, tensor: actor.scale.remote(tensor, 3), [floats(i) for i in range(5)])
    return [ordered, in_order(unordered)]


@case
def queue_of_tensors():
    items = Queue(maxsize=4)
    items.put(floats())
    items.put({"k": [array(), floats(1)]})
    items.put_nowait_batch([floats(2), ray.put(floats(3))])
    full = kind_of(items.put_nowait, floats(4))
    got = [items.get(), items.get(), *items.get_nowait_batch(2)]
    sizes = [items.size(), items.empty(), items.full()]
    empty = kind_of(items.get_nowait)
    items.shutdown()
    return [got, ray.get(got[3]), sizes, full, empty, issubclass(ray.util.queue.Empty, queue.Empty)]


@case
def queue_between_task_and_driver():
    items = Queue(maxsize=2)

    @remote
    def produce(target):
        for i in range(5):
            target.put(floats(i))

    producer = produce.remote(items)
    got = [items.get() for _ in range(5)]
    ray.get(producer)
    items.shutdown(force=True)
    return got
