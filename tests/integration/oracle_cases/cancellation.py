"""ray.cancel: of what is queued, of what runs, by force, recursively; and what happens to the rest."""

from __future__ import annotations

import asyncio

import ray
from oracle_outcome import described

from oracle_cases.flavour import remote
from oracle_cases.helpers import churn, kind_of
from oracle_cases.payloads import array, floats
from oracle_cases.registry import case
from oracle_cases.remotes import Gate, keeper, same, scale


@remote(max_retries=3)
def hang(gate, *args):
    """Interrupted between two short waits: Python heeds no interrupt within one of Ray's."""
    gate.open()
    never = gate.board.wait.remote("never")
    while True:
        ray.wait([never], timeout=0.05)


@remote
def hang_on_a_child(keeper, gate, child_gate, tensor):
    """Starts a child, hands its ref out, and waits for it."""
    child = hang.remote(child_gate, tensor)
    ray.get(keeper.keep.remote([child]))
    gate.open()
    while True:
        ray.wait([child], timeout=0.05)


@remote
def stream_and_hang(gate, count):
    for i in range(count):
        yield floats(i)
    gate.open()
    never = gate.board.wait.remote("never")
    while True:
        ray.wait([never], timeout=0.05)


@remote(num_cpus=0)
class Busy:
    """A threaded or plain actor whose calls wait at gates."""

    def __init__(self):
        self.seen = []

    def wait(self, arrived, leave, tensor):
        arrived.open()
        leave.wait()
        return tensor + 1

    def until_cancelled(self, arrived, tensor):
        arrived.open()
        never = arrived.board.wait.remote("never")
        while not ray.get_runtime_context().is_canceled():
            ray.wait([never], timeout=0.05)
        return tensor + 1

    def note(self, tensor):
        self.seen.append(tensor)
        return tensor * 2

    def read(self):
        return described(self.seen)


@remote(num_cpus=0)
class AsyncBusy:
    def __init__(self):
        self.seen = []

    async def wait(self, arrived, leave, tensor):
        await arrived.board.open.remote(arrived.name)
        await leave.open_soon()
        return tensor + 1

    async def hang(self, arrived, tensor):
        await arrived.board.open.remote(arrived.name)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.seen.append(tensor)
            raise

    async def hang_on_a_child(self, keeper, arrived, child_gate, tensor):
        child = hang.remote(child_gate, tensor)
        await keeper.keep.remote([child])
        await arrived.board.open.remote(arrived.name)
        return await child

    async def stream_and_hang(self, arrived, count):
        for i in range(count):
            yield floats(i)
        await arrived.board.open.remote(arrived.name)
        await asyncio.Event().wait()

    async def note(self, tensor):
        self.seen.append(tensor)
        return tensor * 2

    async def read(self):
        return described(self.seen)


# Tasks -----------------------------------------------------------------------------------------


@case
def cancel_of_task_without_resources():
    blocked = scale.options(resources={"nowhere": 1}).remote(floats(), 2)
    dependent = scale.remote(blocked, 3)
    ray.cancel(blocked)
    return [kind_of(ray.get, blocked), kind_of(ray.get, dependent)]


@case
def cancel_of_task_that_waits_for_its_arguments():
    gate = Gate("cancel_waits_for_arguments")
    source = ray.put(floats())
    blocked = same.remote(source, gate.open_soon())
    ray.cancel(blocked)
    gone = kind_of(ray.get, blocked)
    gate.open()
    return [gone, ray.get(source), ray.get(same.remote(source, gate.open_soon()))]


@case
def cancel_of_running_task_with_arguments():
    gate = Gate("cancel_running_arguments")
    source = ray.put(floats(1))
    running = hang.remote(gate, floats(), source)
    gate.wait()
    ray.cancel(running)
    return [kind_of(ray.get, running), churn(2), ray.get(source), ray.get(scale.remote(source, 2))]


@case
def cancel_by_force():
    gate = Gate("cancel_by_force")
    source = ray.put(floats(1))
    running = hang.remote(gate, floats(), source)
    gate.wait()
    ray.cancel(running, force=True)
    return [kind_of(ray.get, running), churn(2), ray.get(source), ray.get(scale.remote(source, 2))]


@case
def cancel_of_children():
    gate, child_gate = Gate("cancel_children"), Gate("cancel_children_child")
    parent = hang_on_a_child.remote(keeper(2), gate, child_gate, floats())
    gate.wait()
    child_gate.wait()
    (child,) = ray.get(keeper(2).read.remote())
    ray.cancel(parent, recursive=True)
    return [kind_of(ray.get, parent), kind_of(ray.get, child), ray.get(keeper(2).keep.remote(None))]


@case
def cancel_of_parent_alone():
    gate, child_gate = Gate("cancel_parent_alone"), Gate("cancel_parent_alone_child")
    parent = hang_on_a_child.remote(keeper(2), gate, child_gate, floats())
    gate.wait()
    child_gate.wait()
    (child,) = ray.get(keeper(2).read.remote())
    ray.cancel(parent, recursive=False)
    ended = kind_of(ray.get, parent)
    still_there = ray.wait([child], timeout=0)[0] == []
    ray.cancel(child)
    return [ended, still_there, kind_of(ray.get, child), ray.get(keeper(2).keep.remote(None))]


@case
def cancel_of_finished_task():
    done = scale.remote(floats(), 2)
    ray.wait([done])
    ray.cancel(done)
    ray.cancel(done, force=True)
    return [ray.get(done), ray.get(scale.remote(done, 3))]


@case
def cancel_of_task_stream():
    gate = Gate("cancel_task_stream")
    items = stream_and_hang.remote(gate, 3)
    gate.wait()
    first = next(items)
    ray.cancel(items)
    return [ray.get(first), [kind_of(ray.get, ref) for ref in items]]


@case
def cancel_of_what_is_no_task():
    return [kind_of(ray.cancel, ray.put(floats())), kind_of(ray.cancel, "text"), kind_of(ray.cancel, [ray.put(1)])]


# Actors ----------------------------------------------------------------------------------------


@case
def cancel_of_queued_actor_call():
    arrived, leave = Gate("cancel_queued_arrived"), Gate("cancel_queued_leave")
    actor = Busy.remote()
    running = actor.wait.remote(arrived, leave, floats())
    arrived.wait()
    queued, last = actor.note.remote(floats(1)), actor.note.remote(floats(2))
    ray.cancel(queued)
    leave.open()
    return [ray.get(running), kind_of(ray.get, queued), ray.get(last), ray.get(actor.read.remote())]


@case
def cancel_of_running_actor_call():
    arrived = Gate("cancel_actor_call")
    actor = Busy.remote()
    running = actor.until_cancelled.remote(arrived, floats())
    arrived.wait()
    ray.cancel(running)
    return [kind_of(ray.get, running), ray.get(actor.note.remote(array()))]


@case
def cancel_of_running_call_of_threaded_actor():
    arrived = Gate("cancel_threaded_call")
    actor = Busy.options(max_concurrency=2).remote()
    running = actor.until_cancelled.remote(arrived, floats())
    arrived.wait()
    beside = ray.get(actor.note.remote(floats(1)))
    ray.cancel(running)
    return [beside, kind_of(ray.get, running), ray.get(actor.note.remote(floats(2)))]


@case
def cancel_of_actor_call_by_force_is_refused():
    arrived, leave = Gate("cancel_force_arrived"), Gate("cancel_force_leave")
    actor = Busy.remote()
    running = actor.wait.remote(arrived, leave, floats())
    arrived.wait()
    refused = kind_of(ray.cancel, running, force=True)
    leave.open()
    return [refused, ray.get(running)]


@case
def cancel_of_async_call_lets_it_clean_up():
    arrived = Gate("cancel_async_clean")
    actor = AsyncBusy.remote()
    running = actor.hang.remote(arrived, floats())
    arrived.wait()
    ray.cancel(running)
    return [kind_of(ray.get, running), ray.get(actor.note.remote(floats(1))), ray.get(actor.read.remote())]


@case
def cancel_of_queued_async_call():
    arrived, leave = Gate("cancel_async_queued_arrived"), Gate("cancel_async_queued_leave")
    actor = AsyncBusy.options(max_concurrency=1).remote()
    running = actor.wait.remote(arrived, leave, floats())
    arrived.wait()
    queued, last = actor.note.remote(floats(1)), actor.note.remote(floats(2))
    ray.cancel(queued)
    leave.open()
    return [ray.get(running), kind_of(ray.get, queued), ray.get(last), ray.get(actor.read.remote())]


@case
def cancel_of_async_call_and_its_child():
    arrived, child_gate = Gate("cancel_async_child_arrived"), Gate("cancel_async_child")
    actor = AsyncBusy.remote()
    running = actor.hang_on_a_child.remote(keeper(2), arrived, child_gate, floats())
    arrived.wait()
    child_gate.wait()
    (child,) = ray.get(keeper(2).read.remote())
    ray.cancel(running, recursive=True)
    ended = [kind_of(ray.get, running), kind_of(ray.get, child), ray.get(keeper(2).keep.remote(None))]
    return [ended, ray.get(actor.note.remote(floats(1)))]


@case
def cancel_of_async_stream():
    arrived = Gate("cancel_async_stream")
    actor = AsyncBusy.remote()
    items = actor.stream_and_hang.remote(arrived, 3)
    arrived.wait()
    first = next(items)
    ray.cancel(items)
    return [ray.get(first), [kind_of(ray.get, ref) for ref in items], ray.get(actor.note.remote(floats(1)))]
