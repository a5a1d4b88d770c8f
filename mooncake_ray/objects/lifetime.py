"""Binds pool objects to the lifetimes Ray already counts.

Ray has two kinds of owner, so there are two kinds of claim:

* What a process puts, or passes by value, it owns. A *token* (a tiny real Ray object of this process) is counted by Ray as contained in
  the value; when the last reference to the value anywhere is gone Ray drops the token, and the claim ends.
* What a task returns, its caller owns, and it must survive the process that made it. The claim is named after the return value; the broker
  asks the processes on the node whose it is, and its owner asks Ray to be told when the return value goes out of scope.

Nothing here waits for time to pass: a claim ends when Ray says that an object is out of scope, or when its owner's process is gone.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private import state as ray_state

from mooncake_ray._native import pool
from mooncake_ray.errors import BrokerDiedError
from mooncake_ray.objects.counters import count

__all__ = ["Lifetimes"]

logger = logging.getLogger("mooncake_ray")

_TASK_BYTES, _ID_BYTES = 24, 28  # of a TaskID; of an ObjectID, which is a TaskID and a little-endian index
_RECENT = 1 << 14  # submissions remembered: only so that a return value dropped before its task ended is known as ours
_ACTORS_EVERY_S = 1.0  # between looks at the states of restartable actors, a call to Ray's control store each
_TOKENS_AHEAD = 4
_MINT_TIMEOUT_S = 60.0
_LOOK_AGAIN_S = 0.02  # between looks at Ray's books for what Ray has no callback for


@dataclass(frozen=True, slots=True)
class _Submission:
    """What this process knows of a task it submitted."""

    generator: Callable[[], Any] | None = None  # a weak reference, for a streaming generator
    dynamic: bool = False  # num_returns="dynamic": items behind one ref, under ids that only Ray knows


@dataclass
class Lifetimes:
    """Claims of one process in one Ray session. Thread-safe."""

    client: pool.Client
    worker: Any  # ray's global worker
    _recent: OrderedDict[bytes, _Submission] = field(default_factory=OrderedDict)
    _undecided: dict[bytes, _Submission] = field(default_factory=dict)  # returns that may not have reached this process yet
    _watched: dict[tuple[int, bytes], bytes] = field(default_factory=dict)  # claim → how ids start whose leaving Ray's table ends it
    _restartable: dict[str, list[ray.ObjectRef]] = field(default_factory=dict)  # actor → what it was created with
    _actors_seen: float = 0.0  # when their states were last looked up
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _stock: ThreadPoolExecutor | None = None
    _ahead: deque[Future[ray.ObjectRef]] = field(default_factory=deque)

    # ---- what this process owns

    def mint(self) -> ray.ObjectRef:
        """A token: a Ray object owned by this process. When it is out of scope, so is what was claimed in its name."""
        token = ray.put(b"")  # bytes, and nothing else: a pickle inside a pickle would make Ray forget the refs of the outer one
        self._when_gone(token, pool.KIND_TOKEN, token.binary())
        return token

    def mint_aside(self) -> ray.ObjectRef:
        """A token made on another thread: the fibers of an async actor share a thread without a task, on which Ray would name two puts alike."""
        if self._stock is None:
            self._stock = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mooncake_ray.tokens")
            self._ahead = deque(self._stock.submit(self.mint) for _ in range(_TOKENS_AHEAD))
        self._ahead.append(self._stock.submit(self.mint))
        return self._ahead.popleft().result(_MINT_TIMEOUT_S)

    def _when_gone(self, ref: ray.ObjectRef, kind: int, key: bytes) -> bool:
        """Ends the claim when Ray drops `ref`. False if this process does not own it, or it is gone already."""
        register = getattr(self.worker.core_worker, "add_object_out_of_scope_callback", None)
        if register is None:  # before Ray 2.56: look at the reference table instead
            return self._watch(ref, kind, key)
        client = self.client
        try:
            return bool(register(ref, lambda _id: client.unclaim(kind, key)))
        except ValueError:
            return False

    def _watch(self, ref: ray.ObjectRef, kind: int, key: bytes) -> bool:
        if kind == pool.KIND_RETURN and not self._owns(ref):
            return False
        with self._lock:
            self._watched[kind, key] = _row(ref.binary())
        return True

    def _owns(self, ref: ray.ObjectRef) -> bool:
        try:
            owner = self.worker.core_worker.get_owner_address(ref)
        except Exception:  # noqa: BLE001 - Ray raises a bare Exception for an object it does not know
            return False
        return self.worker.core_worker.get_worker_id().binary() in owner

    # ---- what this process called for

    def submitted(self, result: Any, dynamic: bool) -> None:
        """Notes what `.remote()` returned."""
        if isinstance(result, ray.ObjectRef):
            task, what = result.binary()[:_TASK_BYTES], _DYNAMIC if dynamic else _PLAIN
        elif isinstance(result, ray.ObjectRefGenerator):
            task, what = result._generator_ref.binary()[:_TASK_BYTES], _Submission(generator=weakref.ref(result))
        elif isinstance(result, list) and result and isinstance(result[0], ray.ObjectRef):
            task, what = result[0].binary()[:_TASK_BYTES], _PLAIN
        else:
            return
        with self._lock:
            self._recent[task] = what
            if len(self._recent) > _RECENT:
                self._recent.popitem(last=False)

    def keep_for_restarts(self, actor_hex: str, refs: list[ray.ObjectRef]) -> None:
        """Holds what an actor was created with until it cannot restart any more."""
        if refs:
            with self._lock:
                self._restartable[actor_hex] = refs

    # ---- answering the broker

    def listen(self) -> None:
        """Starts the thread that answers the broker's questions. Idempotent."""
        with self._lock:
            if self._thread is not None:
                return
            self.client.listen()
            self._thread = threading.Thread(target=self._run, name="mooncake_ray.lifetimes", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while self.worker.connected:
                event = self.client.next_event(_LOOK_AGAIN_S if self._undecided or self._watched else 1.0)
                if not self.worker.connected:
                    break
                if event is not None:
                    self._answer(*event)
                self._look_again()
        except BrokerDiedError:
            pass  # the session is over; whoever calls next is told
        finally:
            self.client.close()

    def _answer(self, kind: int, key: bytes) -> None:
        if kind == pool.KIND_TOKEN:  # the owner of a token died, and this process may still refer to what contains it
            if _row(key) in self.worker.core_worker.get_all_reference_counts():
                with self._lock:
                    self._watched[kind, key] = _row(key)
                self.client.adopt(kind, key)
            else:
                self.client.disown(kind, key, False)
            return
        task = key[:_TASK_BYTES]
        with self._lock:
            what = self._recent.get(task)
        if what is not None and what.dynamic:  # as long as the task's ref or any of its items lives
            with self._lock:
                self._watched[kind, key] = _row(task)
            self.client.adopt(kind, key)
        elif what is not None and what.generator is not None:
            self._undecided[key] = what
        else:
            self._decide(key, _nth(key, 0), mine=what is not None)

    def _decide(self, key: bytes, object_id: bytes, mine: bool) -> None:
        ref = ray.ObjectRef(object_id)  # holds the object in scope meanwhile, if it is
        if self._when_gone(ref, pool.KIND_RETURN, key):
            count("adopted")
            self.client.adopt(pool.KIND_RETURN, key)
        else:
            self.client.disown(pool.KIND_RETURN, key, mine)

    def _look_again(self) -> None:
        for key, what in list(self._undecided.items()):
            if not _still_coming(self.worker.core_worker, what, _nth(key, 1)):
                del self._undecided[key]
                self._decide(key, _nth(key, 1), mine=True)
        self._look_at_actors()
        if not self._watched:
            return
        held = self.worker.core_worker.get_all_reference_counts()
        with self._lock:
            gone = [c for c, row in self._watched.items() if row not in held and not (len(row) < 2 * _ID_BYTES and any(h.startswith(row) for h in held))]
            for claim in gone:
                del self._watched[claim]
        for claim in gone:
            self.client.unclaim(*claim)

    def _look_at_actors(self) -> None:
        now = time.monotonic()
        if not self._restartable or now - self._actors_seen < _ACTORS_EVERY_S:
            return
        self._actors_seen = now
        for actor in list(self._restartable):
            if ray_state.actors(actor).get("State") == "DEAD":
                with self._lock:
                    del self._restartable[actor]


_PLAIN, _DYNAMIC = _Submission(), _Submission(dynamic=True)


def _index(object_id: bytes) -> int:
    return int.from_bytes(object_id[_TASK_BYTES:], "little")


def _nth(key: bytes, shift: int) -> bytes:
    """The ObjectID of the return value that a claim key names. The items of a stream stand one behind their ordinal."""
    return key[:_TASK_BYTES] + (_index(key) + shift).to_bytes(_ID_BYTES - _TASK_BYTES, "little")


def _row(id: bytes) -> bytes:
    """How Ray's reference table names an object."""
    return id.hex().encode()


def _still_coming(core_worker: Any, what: _Submission, item: bytes) -> bool:
    """Whether the reader of a stream is not past an item. Until it is, the stream holds the item, which may not be an object of this
    process yet; touching its id then would spoil Ray's record of its owner."""
    generator = what.generator() if what.generator else None
    return generator is not None and _index(_next_id(core_worker, generator._generator_ref)) <= _index(item)


def _next_id(core_worker: Any, generator_ref: ray.ObjectRef) -> bytes:
    peek = getattr(core_worker, "peek_next_object_id_binary", None)
    return peek(generator_ref) if peek else core_worker.peek_object_ref_stream(generator_ref)[0].binary()
