"""Remote functions and actors that many cases share."""

from __future__ import annotations

import asyncio
import collections
import functools
import os
import threading

import ray
from oracle_outcome import described, routed

from oracle_cases.flavour import remote
from oracle_cases.payloads import DomainError, floats


@remote
def describe(*args, **kwargs):
    return described({"args": args, "kwargs": kwargs})


@remote
def describe_nested(container):
    """What a task sees of refs inside a container, and behind them."""
    inner = container["items"][0]
    return described([container, ray.get(inner), ray.get(container["items"])])


@remote
def scale(tensor, factor, *after):
    return tensor * factor


@remote
def same(value, *after):
    return value


@remote
def rows(tensor, count):
    return tuple(tensor[i] for i in range(count))


@remote
def nothing(tensor):
    return None


@remote
def overwrite_argument(tensor):
    tensor.fill_(-1)
    return tensor[-1]


@remote
def stream(count, fail_at=None, shape=(256, 384)):
    for i in range(count):
        if i == fail_at:
            raise DomainError(f"item {i}", floats(i))
        yield floats(i, shape)


@remote
def fail_with(error):
    raise error


@remote
def fail_chained(tensor):
    try:
        raise DomainError("inner", tensor)
    except DomainError as error:
        raise LookupError("outer") from error


@remote
def put_inside(seed):
    return ray.put(floats(seed))


@remote
def fan_out(tensor):
    """Puts, calls nested tasks by value and by ref, and returns refs."""
    put = ray.put(tensor + 1)
    calls = [scale.remote(tensor, 2), scale.remote(put, 3)]
    return {"refs": [put, *calls], "got": ray.get(calls[1])}


@remote
def recurse(tensor, depth):
    if depth == 0:
        return tensor
    return ray.get(recurse.remote(tensor + 1, depth - 1)) * 2


@remote(max_retries=1)
def crash_at_first(board, gate, tensor):
    if ray.get(board.next.remote(gate)) == 1:
        os._exit(1)
    return described(tensor)


@remote(max_retries=5, retry_exceptions=[ConnectionError])
def flaky(board, gate, tensor):
    attempt = ray.get(board.next.remote(gate))
    if attempt < 3:
        raise ConnectionError(f"attempt {attempt}")
    return attempt, tensor + attempt


@remote(max_retries=0)
def crash(tensor):
    os._exit(1)


@remote(max_calls=1)
def scale_once(tensor, factor):
    """Its worker exits after the call."""
    return tensor * factor


@remote
def environment(name, tensor):
    return os.environ.get(name), described(tensor)


@remote
def run_until_cancelled(board, gate, tensor):
    ray.get(board.open.remote(gate))
    never = board.wait.remote(gate + "-never")
    while True:
        ray.wait([never], timeout=0.05)


@remote
def task_context(tensor):
    context = ray.get_runtime_context()
    return context.get_task_name(), context.get_actor_id(), described(tensor)


DEFAULT_TENSOR = floats(77)


@remote
def with_default(tensor=DEFAULT_TENSOR, *, bias=3):
    return tensor + bias


@remote(num_cpus=0)
class Board:
    """Named gates and counters: how cases order events without waiting for time to pass."""

    def __init__(self):
        self.gates = collections.defaultdict(asyncio.Event)
        self.counts = collections.Counter()

    async def wait(self, gate):
        await self.gates[gate].wait()
        return gate

    async def open(self, gate):
        self.gates[gate].set()

    async def next(self, counter):
        self.counts[counter] += 1
        return self.counts[counter]


class Gate:
    """A gate and a counter of the shared board, for workers that are given it."""

    def __init__(self, name):
        self.board, self.name = board(), name

    def next(self):
        return ray.get(self.next_soon())

    def wait(self):
        return ray.get(self.open_soon())

    def open(self):
        return ray.get(self.board.open.remote(self.name))

    def next_soon(self):
        """A ref, for coroutines to await."""
        return self.board.next.remote(self.name)

    def open_soon(self):
        """A ref that is ready once the gate is open."""
        return self.board.wait.remote(self.name)


class KeeperMethods:
    """Keeps one value and offers the ways to use it."""

    def __init__(self, value=None, *, extra=None):
        self.value, self.extra = value, extra

    def routed(self):
        return routed()

    def keep(self, value):
        self.value = value

    def keep_inner(self, refs):
        self.value = ray.get(refs[0])

    def read(self):
        return self.value

    def read_inner(self):
        return ray.get(self.value[0])

    def describe(self, *args, **kwargs):
        return described([self.value, self.extra, args, kwargs])

    def scale(self, tensor, factor):
        return tensor * factor

    def add(self, tensor):
        self.value = tensor if self.value is None else self.value + tensor
        return self.value[0]

    def overwrite(self, fill):
        self.value.fill_(fill)

    @ray.method(num_returns=2)
    def pair(self, tensor):
        return tensor + 1, {"minus": tensor - 1}

    def triple(self, tensor):
        return tensor, 2, [tensor]

    def put(self, tensor):
        return ray.put(tensor)

    def relay(self, other, tensor):
        return ray.get(other.scale.remote(tensor, 3)) + 1

    def fail(self, message, tensor):
        raise DomainError(message, tensor)

    def stream(self, count, fail_at=None):
        for i in range(count):
            if i == fail_at:
                raise DomainError(f"item {i}", floats(i))
            yield floats(i)

    def context(self):
        context = ray.get_runtime_context()
        return context.get_actor_name(), context.was_current_actor_reconstructed, len(context.get_actor_id())


@remote(num_cpus=0)
class Keeper(KeeperMethods):
    pass


@remote(num_cpus=0)
class Meeting:
    """A threaded actor whose calls return only once all of them are inside."""

    def __init__(self, parties):
        self.barrier = threading.Barrier(parties)

    def meet(self, tensor, factor):
        self.barrier.wait(timeout=200)
        inner = ray.put(tensor)
        return ray.get(inner) * factor

    def routed(self):
        return routed()


@remote(num_cpus=0)
class AsyncKeeper:
    def __init__(self):
        self.value = None
        self.arrived = asyncio.Event()
        self.waiting = 0

    async def routed(self):
        return routed()

    async def exchange(self, tensor, parties):
        """Returns only once `parties` calls are inside at the same time."""
        self.waiting += 1
        if self.waiting == parties:
            self.arrived.set()
        await self.arrived.wait()
        return tensor * parties

    async def gather(self, container):
        first, *rest = container["refs"]
        values = [await first, *await asyncio.gather(*rest)]
        return described([container, values]), values

    async def call(self, tensor):
        put = ray.put(tensor)
        return await scale.remote(put, 2), await scale.remote(tensor, 3)

    async def keep(self, value):
        self.value = value

    async def read(self):
        return self.value

    async def stream(self, count, fail_at=None):
        for i in range(count):
            await asyncio.sleep(0)
            if i == fail_at:
                raise DomainError(f"item {i}", floats(i))
            yield floats(i)

    async def fail(self, message, tensor):
        raise DomainError(message, tensor)

    async def hang(self, board, gate, tensor):
        await board.open.remote(gate)
        await asyncio.Event().wait()


class BrokenActor:
    def __init__(self, tensor):
        raise DomainError("no actor", tensor)

    def call(self):
        return None


@functools.cache
def keeper(number=0):
    return Keeper.remote()


@functools.cache
def async_keeper():
    return AsyncKeeper.remote()


@functools.cache
def board():
    return Board.remote()


def warm_up():
    """Starts the shared actors and some workers side by side."""
    actors = [keeper(0), keeper(1), keeper(2), async_keeper()]
    ray.get([*(actor.read.remote() for actor in actors), board().next.remote("warm_up"), *map(same.remote, range(4))])
