"""Where Ray pickles a value, the tensors in it go to the pool instead.

Ray serialises every value it stores or passes through `SerializationContext.serialize`, which ends in `pickle.dumps` of its own
`ray._private.serialization` module. These are the two seams: the first tells what the value is for (a put, an argument, a return), the
second pickles it with a pickler that takes tensors out. What is pickled by any other way (deepcopy, closures, plain pickle) never comes here.

All tensors of one value share one pool object. The value's own bytes, some hundred, stay Ray's.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import pickle
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle
from ray._private import worker as ray_worker

from mooncake_ray._native import pool
from mooncake_ray.counters import count, timed
from mooncake_ray.errors import BrokerDiedError, StoreError
from mooncake_ray.objects import async_items, envelopes, session
from mooncake_ray.store.callsite import call_site
from mooncake_ray.store.packing import Call, Here, Packer, scan

__all__ = ["Place", "RoutingPickle", "place_of", "state"]

logger = logging.getLogger("mooncake_ray")

_INLINE_LIMIT = 100 << 10  # bytes: Ray's default max_direct_call_object_size
_PASS_ON_FROM = 16 << 10  # bytes: a smaller view of a pool object is copied, lest it keep the whole object


@dataclass(frozen=True, slots=True)
class Place:
    """What a value is serialised for, and so whose its bytes are."""

    kind: str
    task: bytes = b""  # of a return: TaskID and ordinal


class _State(threading.local):
    place: Place | None = None
    held: list[ray.ObjectRef] | None = None  # a list while `.remote()` runs on this thread: keeps tokens until the task is submitted
    token_of_put: ray.ObjectRef | None = None  # of the put that this thread is in, once it has one
    returning: tuple[bytes, int] | None = None  # the task whose returns this thread is storing, and its attempt
    ordinal: int = 0
    chosen: bool = False  # the code that is running asked for the pool by name
    batch: bool = False  # … for a batch, to be stored typed
    checksums: bool = False  # … and with checksums


state = _State()
everything = False  # installed: this process routes whatever it can
job_wide = False  # every process of the job is installed, so whoever calls a task answers for what it returns
decorated = False  # a decorated coroutine ran here; whose returns an async actor stores cannot be told
_decorated_tasks: OrderedDict[bytes, None] = OrderedDict()
_MOST_DECORATED = 4096


def decorated_task(task: bytes) -> None:
    """Notes that a task's body is decorated, and so its caller answers for what it returns."""
    global decorated
    decorated = True
    _decorated_tasks[task] = None
    if len(_decorated_tasks) > _MOST_DECORATED:
        _decorated_tasks.popitem(last=False)


_PUT = ray_worker.Worker.put_object.__code__
_LOOPS = frozenset({ray_worker.Worker.main_loop.__code__, async_items.RUN, None})


def place_of(frame: Any) -> Place | None:
    """What the Python frame that called `serialize` wants it for; None where the pool cannot follow the value's lifetime.

    The caller of a put is a Python function of Ray's; arguments are serialised under `.remote()`; returns by compiled code that Python's
    stack does not show, below which stands the worker's main loop, an executor, or nothing.
    """
    code = frame.f_code if frame is not None else None
    wanted = everything or state.chosen
    if code is _PUT:
        return _A_PUT if wanted else None
    if state.held is not None:
        return _AN_ARGUMENT if wanted else None
    worker = ray_worker.global_worker
    if code not in _LOOPS or worker.mode != ray_worker.WORKER_MODE:
        return None
    core = worker.core_worker
    if code is async_items.RUN:
        task, ordinal = async_items.item()
    elif core.current_actor_is_asyncio():  # its methods share threads, and Ray does not tell whose return this is
        return _AN_ASYNC_RETURN if everything or decorated else None
    else:
        task, attempt = core.get_current_task_id().binary(), core.get_current_task_attempt_number()
        if state.returning != (task, attempt):
            state.returning, state.ordinal = (task, attempt), 0
        state.ordinal = ordinal = state.ordinal + 1
    if not (everything and job_wide) and task not in _decorated_tasks:
        return None
    return Place("return", task + ordinal.to_bytes(4, "little"))


_A_PUT, _AN_ARGUMENT, _AN_ASYNC_RETURN = Place("put"), Place("argument"), Place("return of an async actor")


class RoutingPickle:
    """Stands for the `pickle` of Ray's serialization module: `dumps` routes, `loads` can read envelopes alone, everything else is Ray's."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.__dict__.update((name, value) for name, value in vars(original).items() if name != "dumps")
        self.loads = envelopes.loads(original.loads)

    def dumps(self, obj: Any, protocol: int | None = None, buffer_callback: Any = None) -> bytes:
        place = state.place
        if place is not None:
            smallest = 1 if state.chosen and place is _A_PUT else scan(obj, session.config().min_bytes)
            if smallest is not None:
                data = _route(obj, smallest, place, protocol, buffer_callback)
                if data is not None:
                    return data
        return self._original.dumps(obj, protocol=protocol, buffer_callback=buffer_callback)


def _route(obj: Any, smallest: int, place: Place, protocol: int | None, buffer_callback: Any) -> bytes | None:
    """The pickle of a value whose tensors are in the pool; None if Ray must take it whole."""
    for retry in (True, False):
        here = session.current()
        if here is None:
            return None
        packer = _RayPacker(here, smallest)
        buffers: list[Any] = []  # handed on only when nothing can fail any more
        with io.BytesIO() as file:
            _RayPickler(file, packer, protocol, buffers.append).dump(obj)
            data = file.getvalue()
        if packer.segments.downloads:
            data, buffers = _loaded_at_once(data, buffers, protocol)
        try:
            if packer.used:
                with timed("put"):
                    _commit(here, packer, place)
        except (StoreError, OSError) as e:
            if retry and isinstance(e, BrokerDiedError):
                continue  # there is another one by now, and nothing of this was kept
            count("fallbacks")
            count(f"fallbacks:{type(e).__name__}")
            _warn_once(type(e), e)
            return None
        if packer.used and place.kind == "return":
            buffers.append(_filler())
        for b in buffers:
            buffer_callback(b)
        return data
    return None


def _loaded_at_once(data: bytes, buffers: list[Any], protocol: int | None) -> tuple[bytes, list[Any]]:
    """A pickle that loads that pickle by `session.load`."""
    outer: list[Any] = []
    return pickle.dumps(Call(session.load, (data, buffers)), protocol=protocol, buffer_callback=outer.append), outer


@functools.cache
def _filler() -> pickle.PickleBuffer:
    """Makes a return value too large for Ray to inline it into the tasks that take it as an argument.

    Ray lets go of a return value once it is inlined, and nothing would say how long its copies live; what it does not inline it counts
    until the last task that uses it has ended. (A put, inlined, takes its token along.)
    """
    limit = int(os.environ.get("RAY_max_direct_call_object_size", _INLINE_LIMIT))  # noqa: SIM112 - Ray's spelling
    return pickle.PickleBuffer(bytes(limit + 1))


def _commit(here: session.Session, packer: _RayPacker, place: Place) -> None:
    """Copies what the packer took, and binds it and what it passes on to the life of the value."""
    segments, foreign = packer.segments, list(packer.foreign)
    lease = None
    if segments.nbytes:
        with timed("room"):
            lease = here.client.create(packer.id, segments.nbytes, here.config.put_timeout_s, _note(place))
    if place.kind == "return":
        claim = (pool.KIND_RETURN, place.task, False)
    else:
        token = here.lifetimes.token(aside=place is _AN_ASYNC_RETURN)
        here.worker.get_serialization_context().add_contained_object_ref(token, allow_out_of_band_serialization=True)
        if state.held is not None:
            state.held.append(token)
        if place is _A_PUT:
            state.token_of_put = token
        claim = (pool.KIND_TOKEN, token.binary(), place is _AN_ASYNC_RETURN)
    if lease is not None:
        segments.fill(here.client, lease)
        lease.seal(*claim, foreign)
    else:
        here.client.claim(foreign, *claim)
    if place.kind != "return":
        here.lifetimes.make_token_ahead()
    count("routed")
    count("bytes_copied", segments.held)
    count("bytes_passed_on", packer.bytes_passed_on)


def _note(place: Place) -> str:
    """Where a value comes from, for people."""
    if place.kind.startswith("return"):
        runs = ray_worker.global_worker.core_worker.get_current_task_name()
        return f"{place.kind}: {runs}"
    return f"{place.kind} at {call_site()}"


_warned: set[type] = set()


def _warn_once(kind: type, e: Exception) -> None:
    if kind not in _warned:
        _warned.add(kind)
        logger.warning("mooncake_ray: Ray's own object store took an object (further ones are only counted): %s", e)


class _RayPacker(Packer):
    """Also passes on, without a copy, what this process has mapped from the pool and not changed."""

    def __init__(self, here: session.Session, smallest: int) -> None:
        super().__init__(smallest, typed=here.config.typed_batches or state.batch, checksums=state.checksums)
        self.client = here.client
        self.id = here.client.new_id()
        self.foreign: dict[bytes, _There] = {}
        self.bytes_passed_on = 0

    @property
    def used(self) -> bool:
        return bool(self.segments.nbytes or self.foreign)

    def reduce(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is Here:
            return session.open_region, (self.client.pool_id, self.id)
        if kind is _There:
            return session.open_region, (self.client.pool_id, obj.id)
        return super().reduce(obj)

    def place(self, address: int, nbytes: int, owner: Any) -> tuple[Any, int]:
        at = self.client.locate(address, nbytes) if nbytes >= _PASS_ON_FROM else None
        if at is None:
            return super().place(address, nbytes, owner)
        id, offset = at
        self.bytes_passed_on += nbytes
        self.segments.owners.append(owner)  # its pin keeps the object until the claim is made
        return self.foreign.setdefault(id, _There(id)), offset


class _There:
    """Stands in a pickle for a pool object that exists already."""

    __slots__ = ("id",)

    def __init__(self, id: bytes) -> None:
        self.id = id


class _RayPickler(cloudpickle.CloudPickler):
    def __init__(self, file: io.BytesIO, packer: _RayPacker, protocol: int | None, buffer_callback: Any) -> None:
        super().__init__(file, protocol=protocol, buffer_callback=buffer_callback)
        self._packer = packer

    def reducer_override(self, obj: Any) -> Any:
        reduced = self._packer.reduce(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


def serialize_with(original: Any) -> Any:
    """`SerializationContext.serialize`, noting what each value is for."""

    def serialize(self: Any, value: Any) -> Any:
        outer, state.place = state.place, place_of(sys._getframe().f_back)
        try:
            return original(self, value)
        finally:
            state.place = outer

    return serialize
