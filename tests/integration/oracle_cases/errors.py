"""Errors, retries, cancellation."""

from __future__ import annotations

import threading

import ray
from oracle_outcome import described

from oracle_cases.flavour import remote
from oracle_cases.helpers import churn, error_of, gone, kind_of, kind_once_lost, round_trip
from oracle_cases.payloads import BrokenState, DomainError, ErrorWithoutReduce, Unpicklable, array, floats
from oracle_cases.registry import case
from oracle_cases.remotes import (
    BrokenActor,
    Keeper,
    async_keeper,
    board,
    crash,
    crash_at_first,
    fail_chained,
    fail_with,
    flaky,
    keeper,
    run_until_cancelled,
    same,
    scale,
)


@case
def error_with_tensor_argument():
    sources = [DomainError("bad", floats()), ValueError("v", floats(1))]
    errors = [error_of(ray.get, fail_with.remote(source)) for source in sources]
    return [errors, [isinstance(error, (DomainError, ValueError)) for error in errors]]


@case
def error_with_tensor_attribute():
    error = RuntimeError("plain")
    error.tensor, error.table = floats(), {"k": [array()]}
    raised = error_of(ray.get, fail_with.remote(error))
    return [raised, raised.cause.tensor, raised.cause.table]


@case
def error_that_cannot_be_rebuilt():
    return kind_of(ray.get, fail_with.remote(ErrorWithoutReduce("odd", floats())))


@case
def error_chained():
    return error_of(ray.get, fail_chained.remote(floats()))


@case
def error_of_actor_methods():
    calls = [keeper().fail.remote("sync", floats()), async_keeper().fail.remote("async", floats(1))]
    return [error_of(ray.get, call) for call in calls]


@case
def error_got_twice():
    failed = fail_with.remote(DomainError("twice", floats()))
    return [error_of(ray.get, failed), error_of(ray.get, failed), error_of(ray.get, [ray.put(floats()), failed])]


@case
def error_of_a_dependency():
    failed = fail_with.remote(DomainError("upstream", floats()))
    task = scale.remote(failed, 2)
    dependents = [task, keeper().scale.remote(failed, floats()), same.remote(task)]
    return [error_of(ray.get, dependent) for dependent in dependents]


@case
def error_returned_as_value():
    return [ray.get(same.remote(DomainError("a value", floats()))), round_trip([ValueError("v", array())])]


@case
def error_inside_nested_task():
    @remote
    def outer(tensor):
        return ray.get(fail_with.remote(DomainError("nested", tensor)))

    return error_of(ray.get, outer.remote(floats()))


@case
def error_caught_inside_task():
    @remote
    def outer(tensor):
        return described(error_of(ray.get, fail_with.remote(DomainError("caught", tensor))))

    return ray.get(outer.remote(floats()))


@case
def retry_after_application_error():
    return ray.get(flaky.remote(board(), "flaky", floats()))


@case
def retry_after_worker_death():
    return ray.get(crash_at_first.remote(board(), "crash_at_first", floats()))


@case
def worker_death_without_retry():
    return [kind_of(ray.get, crash.remote(floats())), ray.get(scale.remote(floats(), 2))]


@case
def get_timeout():
    gate = "get_timeout"
    blocked = same.remote(floats(), board().wait.remote(gate))
    kinds = [kind_of(ray.get, blocked, timeout=0.01), kind_of(ray.get, [ray.put(floats()), blocked], timeout=0)]
    ray.get(board().open.remote(gate))
    return [kinds, ray.get(blocked, timeout=200)]


@case
def cancel_of_queued_task():
    blocked = same.remote(floats(), board().wait.remote("cancel_queued"))
    ray.cancel(blocked)
    return [kind_of(ray.get, blocked), kind_of(ray.get, same.remote(blocked))]


@case
def cancel_of_running_task():
    running = run_until_cancelled.remote(board(), "cancel_running", floats())
    ray.get(board().wait.remote("cancel_running"))
    ray.cancel(running)
    return [kind_of(ray.get, running), ray.get(scale.remote(floats(), 2))]


@case
def cancel_of_async_actor_call():
    running = async_keeper().hang.remote(board(), "cancel_async", floats())
    ray.get(board().wait.remote("cancel_async"))
    ray.cancel(running)
    return [kind_of(ray.get, running), ray.get(async_keeper().call.remote(floats()))]


@case
def get_of_what_is_no_ref():
    ref = ray.put(floats())
    return [kind_of(ray.get, value) for value in ("text", 3, floats(), (ref,), {"k": ref}, [ref, 1], None)]


@case
def put_of_a_ref():
    return [kind_of(ray.put, ray.put(floats())), round_trip([ray.put(floats())])]


@case
def argument_cannot_be_pickled():
    held = {"tensor": floats(), "lock": threading.Lock()}
    kinds = [kind_of(ray.put, held), kind_of(same.remote, held)]
    refused = error_of(ray.put, [floats(), Unpicklable(), array()])
    return [kinds, type(refused).__qualname__, str(refused)[:60], round_trip(floats()), ray.get(same.remote(floats(1)))]


@case
def result_cannot_be_pickled():
    @remote
    def give():
        return [floats(), Unpicklable()]

    return [kind_of(ray.get, give.remote()), ray.get(scale.remote(floats(), 2))]


@case
def value_cannot_be_unpickled():
    ref = ray.put([floats(), BrokenState(array())])
    return [kind_of(ray.get, ref), kind_of(ray.get, ref), kind_of(ray.get, same.remote(ref))]


@case
def wrong_arguments():
    return [kind_of(scale.remote, floats()), kind_of(scale.remote, floats(), 2, other=1), kind_of(scale, floats())]


@case
def actor_constructor_fails():
    actor = remote(num_cpus=0)(BrokenActor).remote(floats())
    return kind_of(ray.get, actor.call.remote())


@case
def actor_killed_after_returning():
    """What an actor returned outlives it."""
    actor = Keeper.remote()
    refs = [actor.scale.remote(floats(i), 2) for i in range(3)]
    ray.wait(refs, num_returns=3)
    ray.kill(actor)
    ended = gone(actor)
    churn(4)
    after = ray.get([refs[0], scale.remote(refs[1], 3), keeper().scale.remote(refs[2], 4)])
    return [ended, after, kind_of(ray.get, actor.scale.remote(floats(), 2))]


@case
def actor_killed_after_putting():
    """What an actor put does not outlive it."""
    actor = Keeper.remote()
    outer = actor.put.remote(floats())
    ray.wait([outer])
    ray.kill(actor)
    ended = gone(actor)
    inner = ray.get(outer)
    return [ended, kind_once_lost(inner), kind_of(ray.get, inner), kind_of(ray.get, scale.remote(inner, 2))]
