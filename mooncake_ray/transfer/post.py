"""Small records for other engines, delivered in order by a thread an engine, and tried again until they are there or that engine is no more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from mooncake_ray.errors import MooncakeRayError
from mooncake_ray.transfer.deadline import Pauses
from mooncake_ray.transfer.directory import Endpoint
from mooncake_ray.transfer.peers import Peers

__all__ = ["Post"]

logger = logging.getLogger("mooncake_ray")

_LETTER = 1000  # records sent at a time
_SEND_S = 5.0


class Post:
    """Thread-safe. A record may come twice."""

    def __init__(self, peers: Peers, subject: str, pack: Callable[[list[bytes]], bytes]) -> None:
        """`subject`: the name of the exchange that letters are sent by. `pack`: makes a letter of records."""
        self._peers, self._subject, self._pack = peers, subject, pack
        self._lock = threading.Lock()
        self._waiting: dict[Endpoint, list[bytes]] = {}  # to whom a thread is sending
        self._closed = threading.Event()

    def send(self, to: Endpoint, record: bytes) -> None:
        """Returns at once."""
        with self._lock:
            if (waiting := self._waiting.get(to)) is not None:
                waiting.append(record)
                return
            if self._closed.is_set():
                return
            self._waiting[to] = [record]
        threading.Thread(target=self._deliver, args=(to,), name="mooncake_ray.post", daemon=True).start()

    def _deliver(self, to: Endpoint) -> None:
        pauses = Pauses()
        while not self._closed.is_set():
            with self._lock:
                if not (letter := self._waiting[to][:_LETTER]):
                    del self._waiting[to]
                    return
            node = self._peers.of(to)
            try:
                with node.link(_SEND_S) as link:
                    link.exchange(self._subject, self._pack(letter), _SEND_S)
            except MooncakeRayError as e:
                logger.debug("mooncake_ray: %d records for %s wait: %s", len(letter), to, e)
                if not self._peers.directory.serves(to):
                    with self._lock:
                        del self._waiting[to]
                    self._peers.lose(node)
                    return
                self._closed.wait(pauses.next())
                continue
            pauses.reset()
            with self._lock:
                del self._waiting[to][: len(letter)]

    def close(self) -> None:
        """What is not delivered is not."""
        self._closed.set()
