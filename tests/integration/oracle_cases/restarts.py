"""Actors that restart, tasks that are tried again.

Constructors are given small values only: large ones Ray keeps as objects of its own, and may have dropped when an actor restarts. (With the
pool they are kept: see test_lifetime.)
"""

from __future__ import annotations

import os
import signal

import ray
import torch
from oracle_outcome import described

from oracle_cases.flavour import remote
from oracle_cases.helpers import churn, drain, error_of, kind_of
from oracle_cases.payloads import DomainError, array, floats
from oracle_cases.registry import case
from oracle_cases.remotes import Gate, same, scale


def die():
    """As the machine's out-of-memory killer would have it."""
    os.kill(os.getpid(), signal.SIGKILL)


@remote(num_cpus=0)
class Fragile:
    """Keeps a value, and dies when told to."""

    def __init__(self, value=None, *, extra=None):
        self.value, self.extra = value, extra

    def keep(self, value):
        self.value = value

    def read(self):
        return self.value

    def describe(self, *args):
        return described([self.value, self.extra, args, ray.get_runtime_context().was_current_actor_reconstructed])

    def die(self):
        die()

    def die_at(self, last, gate, *args):
        """Dies in each attempt up to the `last`."""
        count = gate.next()
        if count <= last:
            die()
        return count, described(args), [arg + 1 for arg in args]

    @ray.method(num_returns=2)
    def two_after_death(self, gate, tensor):
        if gate.next() == 1:
            die()
        return tensor + 1, {"minus": tensor - 1}

    def stream(self, count, gate=None):
        yield from dying_stream(count, gate)

    @ray.method(max_task_retries=3, retry_exceptions=[ConnectionError])
    def flaky(self, gate, tensor):
        count = gate.next()
        if count < 3:
            raise ConnectionError(f"attempt {count}")
        return count, tensor + count

    @ray.method(max_task_retries=3, retry_exceptions=[ConnectionError])
    def flaky_otherwise(self, gate, tensor):
        gate.next()
        raise DomainError("not to be tried again", tensor)


@remote(num_cpus=0)
class AsyncFragile:
    def __init__(self, value=None):
        self.value = value

    async def describe(self, *args):
        return described([self.value, args])

    async def die_at_first(self, gate, tensor):
        if await gate.next_soon() == 1:
            die()
        return tensor + 1, self.value

    async def stream(self, count, gate):
        first = await gate.next_soon() == 1
        for i in range(count):
            if first and i == 2:
                await gate.open_soon()
                die()
            yield floats(i)


def dying_stream(count, gate):
    """At the first attempt dies before the third item, once the reader has had an item."""
    first = gate is not None and gate.next() == 1
    for i in range(count):
        if first and i == 2:
            gate.wait()
            die()
        yield floats(i)


@remote(max_retries=3)
def stream_after_death(count, gate):
    yield from dying_stream(count, gate)


@remote(max_retries=3)
def die_at(last, gate, *args, **kwargs):
    count = gate.next()
    if count <= last:
        die()
    return count, described([args, kwargs]), args[0] * 2


@remote(max_retries=3, num_returns=2)
def two_after_death(gate, tensor):
    if gate.next() == 1:
        die()
    return tensor + 1, {"minus": tensor - 1}


@remote(max_retries=3, num_returns="dynamic")
def dynamic_after_death(count, gate):
    first = gate.next() == 1
    for i in range(count):
        if first and i == 2:
            die()
        yield floats(i)


@remote(max_retries=5)
def raise_at(last, gate, error, tensor):
    count = gate.next()
    if count <= last:
        raise error
    return count, tensor + count


@remote(max_retries=3)
def call_what_dies(gate, tensor):
    """The inner task is tried again; its caller is a worker."""
    return ray.get(die_at.remote(1, gate, tensor + 1))


def until_answered(call, *args):
    """What an actor answers once it is back; a call meanwhile fails."""
    while True:
        try:
            return ray.get(call.remote(*args))
        except ray.exceptions.ActorUnavailableError:
            pass


# Actors ----------------------------------------------------------------------------------------


@case
def actor_restarts_with_its_arguments():
    held = ray.put(floats(1))
    actor = Fragile.options(max_restarts=-1).remote(["small", torch.arange(3)], extra=held)
    seen = [ray.get(actor.describe.remote(floats(2)))]
    for _ in range(2):
        ray.get(actor.keep.remote(floats(9)))
        error = error_of(ray.get, actor.die.remote())
        seen.append([isinstance(error, ray.exceptions.RayActorError), until_answered(actor.describe, floats(2))])
        churn(2)
    ray.kill(actor)
    return [seen, ray.get(held)]


@case
def actor_without_restarts_dies():
    actor = Fragile.remote(floats())
    kept = actor.read.remote()
    ray.wait([kept])
    return [kind_of(ray.get, actor.die.remote()), kind_of(ray.get, actor.describe.remote(floats(1))), ray.get(kept)]


@case
def actor_out_of_restarts():
    actor = Fragile.options(max_restarts=1).remote("small")
    kind_of(ray.get, actor.die.remote())
    until_answered(actor.describe, floats(1))
    kind_of(ray.get, actor.die.remote())
    while not isinstance(error_of(ray.get, actor.read.remote()), ray.exceptions.ActorDiedError):
        pass
    return kind_of(ray.get, actor.describe.remote(floats()))


@case
def actor_call_tried_again_after_death():
    gate = Gate("actor_call_again")
    actor = Fragile.options(max_restarts=-1, max_task_retries=-1).remote("small")
    ref = ray.put(floats(1))
    result = actor.die_at.remote(2, gate, floats(), ref)
    del ref
    churn(2)
    return [ray.get(result), ray.get(actor.describe.remote(result))]


@case
def actor_calls_tried_no_further():
    gate = Gate("actor_calls_no_further")
    actor = Fragile.options(max_restarts=-1, max_task_retries=2).remote()
    error = error_of(ray.get, actor.die_at.remote(9, gate, floats()))
    return [isinstance(error, ray.exceptions.RayActorError), gate.next()]


@case
def actor_calls_in_its_queue_when_it_dies():
    gate = Gate("actor_queue_at_death")
    actor = Fragile.options(max_restarts=-1, max_task_retries=-1).remote("small")
    results = [actor.die_at.remote(1, gate, floats()), *(actor.describe.remote(floats(i), ray.put(array(i))) for i in range(4))]
    churn(2)
    return [ray.get(results)]


@case
def actor_num_returns_after_death():
    gate = Gate("actor_two_after_death")
    actor = Fragile.options(max_restarts=1, max_task_retries=1).remote()
    two = actor.two_after_death.remote(gate, floats())
    return [ray.get(two)]


@case
def actor_stream_after_death():
    gate = Gate("actor_stream_after_death")
    actor = Fragile.options(max_restarts=1, max_task_retries=1).remote()
    items = actor.stream.remote(5, gate)
    first = ray.get(next(items))
    gate.open()
    return [first, drain(items)]


@case
def actor_method_tried_again_after_an_error():
    gates = [Gate("actor_flaky"), Gate("actor_flaky_otherwise")]
    actor = Fragile.remote()
    good, bad = actor.flaky.remote(gates[0], floats()), actor.flaky_otherwise.remote(gates[1], floats(1))
    return [ray.get(good), error_of(ray.get, bad), [gate.next() for gate in gates]]


@case
def actor_error_not_tried_again_unless_asked():
    gate = Gate("actor_error_not_again")
    actor = Fragile.options(max_task_retries=5).remote()
    call = actor.flaky.options(max_task_retries=0).remote(gate, floats())
    return [error_of(ray.get, call), gate.next()]


@case
def async_actor_restarts():
    gate = Gate("async_actor_restarts")
    actor = AsyncFragile.options(max_restarts=1, max_task_retries=1).remote("small")
    calls = [actor.die_at_first.remote(gate, ray.put(floats())), *(actor.describe.remote(floats(i)) for i in range(3))]
    return [ray.get(calls)]


@case
def async_actor_stream_after_death():
    gate = Gate("async_stream_after_death")
    actor = AsyncFragile.options(max_restarts=1, max_task_retries=1).remote()
    items = actor.stream.remote(5, gate)
    first = ray.get(next(items))
    gate.open()
    return [first, drain(items)]


@case
def named_actor_found_after_restart():
    actor = Fragile.options(name="fragile-named", max_restarts=1).remote("small")
    kind_of(ray.get, actor.die.remote())
    found = ray.get_actor("fragile-named")
    return [until_answered(found.describe, floats(1)), ray.kill(found)]


# Tasks -----------------------------------------------------------------------------------------


@case
def task_tried_again_after_death():
    gate = Gate("task_again")
    refs = [ray.put(floats(1)), scale.remote(floats(2), 2)]
    result = die_at.remote(2, gate, floats(), refs[0], nested=[refs[1]], array=array())
    del refs
    churn(2)
    return [ray.get(result), ray.get(same.remote(result))]


@case
def task_tries_are_counted():
    gate = Gate("task_tries")
    result = die_at.options(max_retries=2).remote(9, gate, floats())
    return [kind_of(ray.get, result), gate.next()]


@case
def task_num_returns_after_death():
    gate = Gate("task_two_after_death")
    first, second = two_after_death.remote(gate, floats())
    return [ray.get(second), ray.get(scale.remote(first, 2))]


@case
def task_stream_after_death():
    gate = Gate("task_stream_after_death")
    items = stream_after_death.remote(5, gate)
    first = ray.get(next(items))
    gate.open()
    return [first, drain(items)]


@case
def task_stream_read_ahead_of_death():
    """The refs of the first attempt's items are held while the second attempt makes them again."""
    gate = Gate("task_stream_ahead_of_death")
    items = stream_after_death.remote(4, gate)
    early = [next(items), next(items)]
    gate.open()
    late = list(items)
    churn(2)
    return [ray.get(early), ray.get(late)]


@case
def task_dynamic_returns_after_death():
    gate = Gate("task_dynamic_after_death")
    items = list(ray.get(dynamic_after_death.remote(4, gate)))
    churn(2)
    return [ray.get(items)]


@case
def task_tried_again_after_any_error():
    gate = Gate("task_any_error")
    result = raise_at.options(retry_exceptions=True).remote(2, gate, ConnectionError("again"), floats(1))
    return ray.get(result)


@case
def task_not_tried_again_after_an_error():
    gates = [Gate("task_error_default"), Gate("task_error_other")]
    error = DomainError("once", floats())
    results = [
        raise_at.remote(2, gates[0], error, floats(1)),
        raise_at.options(retry_exceptions=[ConnectionError]).remote(2, gates[1], error, floats(1)),
    ]
    return [[error_of(ray.get, r) for r in results], [gate.next() for gate in gates]]


@case
def task_error_after_the_last_try():
    gate = Gate("task_last_try")
    result = raise_at.options(retry_exceptions=[DomainError], max_retries=2).remote(9, gate, DomainError("still", floats()), floats(1))
    return [error_of(ray.get, result), gate.next()]


@case
def nested_task_tried_again_after_death():
    gate = Gate("nested_task_again")
    return [ray.get(call_what_dies.remote(gate, floats()))]
