"""Binds pool objects to the lifetimes Ray already counts.

Ray has two kinds of owner, so there are two kinds of claim:

* What a process puts, or passes by value, it owns. A *token* (a tiny real Ray object of this process) is counted by Ray as contained in
  the value; when the last reference to the value anywhere is gone Ray drops the token, and the claim ends.
* What a task returns, its caller owns, and it must survive the process that made it. The claim is named after the return value; the broker
  asks the processes on the node whose it is, and the one that called the task ends it when the return value goes out of scope there.

Nothing here waits for time to pass: a claim ends when Ray says that an object is out of scope, or when its owner's process is gone. Ray
says so by a callback, registered on a ref that this process holds; where there is no such ref (an item of a stream, a task whose returns
were not expected to be routed) its reference table is looked at instead. An ObjectRef is never made from an id alone: if the object is out
of scope by then, Ray would count it without an owner, and aborts when its task ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private import state as ray_state

from mooncake_ray._native import pool
from mooncake_ray.counters import count
from mooncake_ray.errors import BrokerDiedError
from mooncake_ray.store import devices

__all__ = ["Lifetimes"]

logger = logging.getLogger("mooncake_ray")

_TASK_BYTES, _ID_BYTES = 24, 28  # of a TaskID; of an ObjectID, which is a TaskID and a little-endian index
_SUBMISSIONS = 1 << 14  # remembered before those that nobody refers to any more are forgotten
_LOOK_EVERY_S = 0.02  # between looks at Ray's reference table, or 10 times what a look takes if that is longer
_ACTORS_EVERY_S = 1.0  # between looks at the states of restartable actors, a call to Ray's control store each
_TOKENS_AHEAD = 2
_MINT_AFTER_S = 0.002
_MINT_TIMEOUT_S = 60.0

Claim = tuple[int, bytes]  # kind and key


@dataclass(frozen=True, slots=True)
class _Submission:
    """What this process knows of a task it called."""

    function: str | None
    registered: bool = False  # Ray tells when its returns go out of scope
    generator: Callable[[], Any] | None = None  # a weak reference, for a streaming generator
    dynamic: bool = False  # num_returns="dynamic": items behind one ref, under ids that only Ray knows


@dataclass
class Lifetimes:
    """Claims of one process in one Ray session. Thread-safe."""

    client: pool.Client
    worker: Any  # ray's global worker
    reconnect: Callable[[], object]  # to the next broker, when this one died
    _submissions: dict[bytes, _Submission] = field(default_factory=dict)  # by TaskID
    _remembered: int = _SUBMISSIONS
    _routing_functions: set[str] = field(default_factory=set)  # whose returns were routed before
    _returns: dict[bytes, bool] = field(default_factory=dict)  # registered returns in scope → whether this process answers for a claim
    _under_way: set[object] = field(default_factory=set)  # submissions
    _early: dict[bytes, frozenset[object]] = field(default_factory=dict)  # claims on returns of tasks that one of these may have called
    _streamed: dict[bytes, _Submission] = field(default_factory=dict)  # claims on items that a reader may not have reached
    _watched: dict[Claim, bytes] = field(default_factory=dict)  # claim → how the rows of Ray's table begin whose absence ends it
    _restartable: dict[str, list[ray.ObjectRef]] = field(default_factory=dict)  # actor → what it was created with
    _next_look: float = 0.0
    _next_actors: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _listening: bool = False
    _thread: threading.Thread | None = None
    _minter: ThreadPoolExecutor | None = None
    _ahead: deque[Future[ray.ObjectRef]] = field(default_factory=deque)

    def renew(self, client: pool.Client) -> None:
        """Goes on with another broker. It asks about what the dead one had spilled for this process."""
        with self._lock:
            self.client, self._thread = client, None
        if self._listening:
            self.listen()

    # ---- what this process owns

    def token(self, *, aside: bool = False) -> ray.ObjectRef:
        """A token: a Ray object owned by this process. When it is out of scope, so is what was claimed in its name.

        Args:
            aside: Not made on this thread: the fibers of an async actor share one without a task, on which Ray would name two puts alike.
        """
        with self._lock:
            ahead = self._ahead.popleft() if self._ahead else None
        if aside:
            self.make_token_ahead()
            return (ahead or self._threads().submit(self._mint)).result(_MINT_TIMEOUT_S)
        usable = ahead is not None and ahead.done() and ahead.exception() is None
        return ahead.result() if usable else self._mint()

    def make_token_ahead(self) -> None:
        """Has a token made on another thread, soon, for the next one who wants one.

        Not for the worker of plain tasks: Ray does not end an idle worker that owns objects.
        """
        if len(self._ahead) < _TOKENS_AHEAD and not self._runs_plain_tasks():
            self.listen()  # that thread ends this one with the session
            made = self._threads().submit(self._mint_soon)
            with self._lock:
                self._ahead.append(made)

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._minter is None:
                self._minter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mooncake_ray.tokens")
            return self._minter

    def _runs_plain_tasks(self) -> bool:
        return self.worker.mode == ray.WORKER_MODE and self.worker.core_worker.get_actor_id().is_nil()

    def _mint_soon(self) -> ray.ObjectRef:
        time.sleep(_MINT_AFTER_S)  # lets the put that asked for it have the interpreter to itself
        if not self.worker.connected:
            raise RuntimeError("Ray was shut down")  # a put would start it anew
        return self._mint()

    def _mint(self) -> ray.ObjectRef:
        token = ray.put(b"")  # bytes, and nothing else: a pickle inside a pickle would make Ray forget the refs of the outer one
        if not self._register(token, self._token_gone):
            self.listen()
            with self._lock:
                self._watched[pool.KIND_TOKEN, token.binary()] = _row(token.binary())
        return token

    def end_with(self, put: ray.ObjectRef, token: ray.ObjectRef) -> None:
        """Ends the claims of a put's token with the put itself.

        Ray forgets to let go of what a put contains where the put ends as the lineage of a task's return: a ref that the caller dropped before
        it dropped what a retriable task made of it.
        """
        key = token.binary()
        if not self._register(put, lambda _: self._token_gone(key)):
            with self._lock:
                self._watched[pool.KIND_TOKEN, key] = _row(put.binary())

    def _register(self, ref: ray.ObjectRef, gone: Callable[[bytes], None]) -> bool:
        """Has Ray call `gone` (on a thread of its own) when a ref that this process holds and owns is out of scope. False before Ray 2.56."""
        register = getattr(self.worker.core_worker, "add_object_out_of_scope_callback", None)
        return register is not None and register(ref, gone)

    def _token_gone(self, id: bytes) -> None:
        self.client.unclaim(pool.KIND_TOKEN, id)

    # ---- what this process called for

    @contextlib.contextmanager
    def submitting(self) -> Iterator[None]:
        """Around a submission and its `submitted`: a task may have returned before `.remote()` has."""
        mark = object()
        self._under_way.add(mark)
        try:
            yield
        finally:
            self._under_way.discard(mark)

    def submitted(self, result: Any, function: str | None, dynamic: bool) -> None:
        """Notes what `.remote()` returned."""
        if isinstance(result, ray.ObjectRefGenerator):
            self._remember(result._generator_ref, _Submission(function, generator=weakref.ref(result)))
            return
        refs = result if isinstance(result, list) else [result]
        if not refs or not isinstance(refs[0], ray.ObjectRef):
            return
        registered = False
        if function in self._routing_functions and not dynamic:
            with self._lock:
                self._returns.update((ref.binary(), False) for ref in refs)
            registered = all([self._register(ref, self._return_gone) for ref in refs])
            if not registered:
                for ref in refs:
                    self._returns.pop(ref.binary(), None)
        self._remember(refs[0], _Submission(function, registered=registered, dynamic=dynamic))

    def _remember(self, ref: ray.ObjectRef, what: _Submission) -> None:
        self._submissions[ref.binary()[:_TASK_BYTES]] = what
        if len(self._submissions) > self._remembered:
            self._forget()

    def _forget(self) -> None:
        """Drops the submissions that nothing in this process refers to."""
        noted = list(self._submissions)  # before the look: what is noted later is not judged by it
        live = {bytes.fromhex(row.decode())[:_TASK_BYTES] for row in self._table()}
        for task in noted:
            if task not in live:
                self._submissions.pop(task, None)
        self._remembered = max(_SUBMISSIONS, 2 * len(self._submissions))

    def _return_gone(self, id: bytes) -> None:
        with self._lock:
            answered_for = self._returns.pop(id, False)
        if answered_for:
            self.client.unclaim(pool.KIND_RETURN, id)

    def keep_for_restarts(self, actor_hex: str, refs: list[ray.ObjectRef]) -> None:
        """Holds what an actor was created with until it cannot restart any more."""
        if refs:
            with self._lock:
                self._restartable[actor_hex] = refs

    # ---- answering the broker

    def listen(self) -> None:
        """Starts the thread that answers the broker's questions. Idempotent."""
        self._listening = True
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self.client.listen()
                thread = threading.Thread(target=self._run, name="mooncake_ray.lifetimes", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        client = self.client
        try:
            while self.worker.connected:
                event = client.next_event(_LOOK_EVERY_S if self._early or self._streamed or self._watched else _ACTORS_EVERY_S)
                if not self.worker.connected:
                    break
                try:
                    if event is not None:
                        self._answer(*event)
                    self._look()
                except (ray.exceptions.RayError, RuntimeError, OSError):  # this thread's end would end every claim of the process
                    logger.exception("mooncake_ray: looking at Ray's references failed; trying again")
        except BrokerDiedError:
            if self.worker.connected:
                self.reconnect()
        finally:
            devices.forget(client)
            client.close()
            with self._lock:
                if self._minter is not None and self.client is client:  # no other broker's
                    self._minter.shutdown(wait=False)

    def _answer(self, kind: int, key: bytes, *, last: bool = False) -> None:
        if kind == pool.KIND_TOKEN:  # the owner of a token died, and this process may still refer to what contains it
            self._adopt_if(_row(key) in self._table(), kind, key, _row(key), mine=False)
            return
        task = key[:_TASK_BYTES]
        under_way = frozenset(self._under_way)  # before the look at what was noted
        what = self._submissions.get(task)
        if what is None:
            if under_way and not last:
                self._early[key] = under_way
            else:
                self.client.disown(kind, key, False)
            return
        if what.function is not None:
            self._routing_functions.add(what.function)
        if what.registered:
            with self._lock:
                if in_scope := key in self._returns:
                    self._returns[key] = True
            if in_scope:
                self._adopt_if(True, kind, key, None, mine=True)
            else:  # out of scope before, and made again where Ray reconstructs what was made of it
                self._adopt_if(_row(key) in self._table(), kind, key, _row(key), mine=True)
        elif what.generator is not None:
            self._streamed[key] = what
        elif what.dynamic:  # as long as the task's ref or any of its items lives
            self._adopt_if(True, kind, key, _row(task), mine=True)
        else:
            self._adopt_if(_row(key) in self._table(), kind, key, _row(key), mine=True)

    def _adopt_if(self, in_scope: bool, kind: int, key: bytes, watch: bytes | None, *, mine: bool) -> None:
        if not in_scope:
            self.client.disown(kind, key, mine)
            return
        count("adopted")
        if watch is not None:
            with self._lock:
                self._watched[kind, key] = watch
        self.client.adopt(kind, key)

    # ---- looking at Ray's books

    def _table(self) -> dict[bytes, Any]:
        """Ray's references of this process, by the hex of the object's id."""
        return self.worker.core_worker.get_all_reference_counts()

    def _look(self) -> None:
        for key, submissions in list(self._early.items()):
            if not submissions & self._under_way:
                del self._early[key]
                self._answer(pool.KIND_RETURN, key, last=True)
        now = time.monotonic()
        if self._restartable and now >= self._next_actors:
            self._next_actors = now + _ACTORS_EVERY_S
            self._look_at_actors()
        if not (self._streamed or self._watched) or now < self._next_look:
            return
        passed = [key for key, what in self._streamed.items() if not _still_coming(self.worker.core_worker, what, _item(key))]
        table = self._table()
        for key in passed:
            del self._streamed[key]
            self._adopt_if(_row(_item(key)) in table, pool.KIND_RETURN, key, _row(_item(key)), mine=True)
        with self._lock:
            gone = [claim for claim, row in self._watched.items() if not _among(row, table)]
            for claim in gone:
                del self._watched[claim]
        for claim in gone:
            self.client.unclaim(*claim)
        self._next_look = now + max(_LOOK_EVERY_S, 10 * (time.monotonic() - now))

    def _look_at_actors(self) -> None:
        for actor in list(self._restartable):
            if ray_state.actors(actor).get("State") == "DEAD":
                with self._lock:
                    del self._restartable[actor]


def _row(id: bytes) -> bytes:
    """How Ray's reference table names an object, or begins the names of a task's objects."""
    return id.hex().encode()


def _among(row: bytes, table: Iterable[bytes]) -> bool:
    return row in table or (len(row) < 2 * _ID_BYTES and any(name.startswith(row) for name in table))


def _index(object_id: bytes) -> int:
    return int.from_bytes(object_id[_TASK_BYTES:], "little")


def _item(key: bytes) -> bytes:
    """The ObjectID of the item of a stream that a claim names: items are numbered from one behind their ordinal."""
    return key[:_TASK_BYTES] + (_index(key) + 1).to_bytes(_ID_BYTES - _TASK_BYTES, "little")


def _still_coming(core_worker: Any, what: _Submission, item: bytes) -> bool:
    """Whether the reader of a stream is not past an item. Until it is, the stream holds the item, which may not have arrived."""
    generator = what.generator() if what.generator else None
    return generator is not None and _index(_next_id(core_worker, generator._generator_ref)) <= _index(item)


def _next_id(core_worker: Any, generator_ref: ray.ObjectRef) -> bytes:
    peek = getattr(core_worker, "peek_next_object_id_binary", None)
    return peek(generator_ref) if peek else core_worker.peek_object_ref_stream(generator_ref)[0].binary()
