"""Peers over TCP: several streams of the peer's server, which sends straight from its arenas into the memory given here.

The streams are `_native.peer.Link`s, authenticated by whoever opens them (`Peer.link`). A read takes streams that are idle: one of a few
bytes one of them, one of many bytes as many as the cores can serve.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mooncake_ray.errors import TransportError
from mooncake_ray.transport.base import LENGTH, BaseTransport, Connection, Peer, check_table, timed_out
from mooncake_ray.transport.registry import register_transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_ray.config import Config

__all__ = ["STREAMS", "Tcp"]

STREAMS = 4
# Each stream of a read is a thread that copies, and more of them than there are cores for that make one another wait: with two cores, 64 MiB in
# four streams came at 0.5 to 0.7 of the rate of one.
_STREAMS_A_READ = max(1, min(STREAMS, len(os.sched_getaffinity(0)) // 2))
_STREAM_BYTES = 4 << 20  # bytes below which a further stream gets nothing to do: `read_striped` thinks so too


@register_transport
class Tcp(BaseTransport):
    """See `Transport`. Needs no registered memory of its own: the peer's server reads the pool's arenas, and a stream writes anywhere.

    Args:
        streams: How many a connection opens at most, and one read takes. By default reads that come at the same time have four, and each takes
            at most one for every two cores.
    """

    name: ClassVar[str] = "tcp"

    def __init__(self, config: Config, host: str, *, streams: int | None = None) -> None:
        if streams is not None and streams < 1:
            raise ValueError(f"at least one stream, got {streams}")
        super().__init__()
        self._streams = streams or STREAMS
        self._streams_a_read = streams or _STREAMS_A_READ

    @classmethod
    def unavailable(cls, config: Config) -> str:
        return ""

    def describe(self) -> dict[str, Any]:
        return {"streams": self._streams}

    def _connect(self, peer: Peer, timeout_s: float) -> Connection:
        return _Connection(peer, self._streams, self._streams_a_read)


class _Connection:
    """Opens the first stream at once, and further ones when a read has work for them."""

    follows = True

    def __init__(self, peer: Peer, streams: int, streams_a_read: int) -> None:
        self._peer, self._streams, self._streams_a_read = peer, streams, streams_a_read
        self._change = threading.Condition()
        self._idle: list[Any] = [peer.link()]
        self._busy: list[Any] = []
        self._opening = 0
        self.closed = False

    def read(self, ranges: np.ndarray, timeout_s: float, *, reached: Callable[[int], None] | None = None) -> None:
        """See `Connection`, and `read_striped` for `reached`."""
        from mooncake_ray._native.peer import read_striped

        deadline = time.monotonic() + timeout_s
        check_table(ranges)
        total = int(ranges[:, LENGTH].sum())
        if not total:
            self._still_open()
            return
        links = self._take(max(1, min(total // _STREAM_BYTES, self._streams_a_read)), deadline, timeout_s)
        try:
            left = max(0.001, deadline - time.monotonic())
            read_striped(links, ranges, left, reached=reached)
        except TransportError as e:
            if e.errno != errno.EINVAL:
                self.closed = True
            raise
        finally:
            self._give(links)

    def _take(self, most: int, deadline: float, timeout_s: float) -> list[Any]:
        """Streams for one read: at least one, at most `most`."""
        with self._change:
            self._change.wait_for(lambda: self.closed or self._idle or self._open < self._streams, max(0.0, deadline - time.monotonic()))
            self._still_open()
            links, self._idle = self._idle[:most], self._idle[most:]
            more = min(most - len(links), self._streams - self._open - len(links))
            if not links and more <= 0:
                raise timed_out("read", timeout_s, str(self._peer))
            self._busy += links
            self._opening += more
        try:
            for _ in range(more):
                link = self._peer.link()
                with self._change:
                    self._busy.append(link)
                    links.append(link)
            self._still_open()
        except TransportError:
            if not links or self.closed:  # one stream less is slower, and no error
                self._give(links)
                raise
        except BaseException:
            self._give(links)
            raise
        finally:
            with self._change:
                self._opening -= more
                self._change.notify_all()
        return links

    @property
    def _open(self) -> int:
        return len(self._idle) + len(self._busy) + self._opening

    def _give(self, links: list[Any]) -> None:
        with self._change:
            for link in links:
                self._busy.remove(link)
                if self.closed:
                    link.close()
                elif not link.closed:
                    self._idle.append(link)
            self._change.notify_all()

    def _still_open(self) -> None:
        if self.closed:
            raise TransportError("this connection is closed", "read", errno.EBADF, str(self._peer))

    def close(self) -> None:
        with self._change:
            self.closed = True
            for link in (*self._idle, *self._busy):
                link.close()
            self._idle.clear()
            self._change.notify_all()
            self._change.wait_for(lambda: not self._busy and not self._opening)
