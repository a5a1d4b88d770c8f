"""As much of HTTP/1.1 as the data port speaks: the head of a request, read from a socket with a deadline; the head of an answer."""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from mooncake_ray.serve.problems import Problem

__all__ = ["Connection", "Request", "answer_head"]

_MOST_HEAD_BYTES = 32 << 10
_PIECE = 16 << 10
_CONTROL = re.compile(r"[\0\r\n]")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+$")


@dataclass(frozen=True)
class Request:
    """The head of one."""

    method: str
    target: str
    headers: Mapping[str, str]
    """By names in lower case; several of a name are joined."""
    keep_alive: bool


class Connection:
    """A client's. What was read too much is kept for the next reader. Not thread-safe."""

    def __init__(self, sock: socket.socket, idle_s: float) -> None:
        self.sock, self._idle_s, self._rest = sock, idle_s, b""
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def request(self) -> Request | None:
        """The next one; None if the client has gone, or says nothing for too long.

        Raises:
            Problem: 400, 431: it is none; the connection cannot be used any more.
        """
        end = time.monotonic() + self._idle_s
        while (at := self._rest.find(b"\r\n\r\n")) < 0:
            if len(self._rest) > _MOST_HEAD_BYTES:
                raise Problem(431, "bad-request", f"the head of a request has more than {_MOST_HEAD_BYTES} bytes")
            if not (piece := self._some(_PIECE, end)):
                return None
            self._rest += piece
        head, self._rest = self._rest[:at], self._rest[at + 4 :]
        return parsed(head)

    def read_into(self, into: memoryview) -> int:
        """Some bytes of a body; 0: the client has gone, or sends nothing for too long."""
        if self._rest:
            n = min(len(into), len(self._rest))
            into[:n], self._rest = self._rest[:n], self._rest[n:]
            return n
        return self.sock.recv_into(into) if self._ready(time.monotonic() + self._idle_s) else 0

    def drop(self, nbytes: int) -> bool:
        """Reads so many bytes of a body that nobody wants; whether they came, in the time that a client may be idle."""
        spare = memoryview(bytearray(min(nbytes, 1 << 16)))
        end = time.monotonic() + self._idle_s
        while nbytes:
            if time.monotonic() > end or not (n := self.read_into(spare[: min(len(spare), nbytes)])):
                return False
            nbytes -= n
        return True

    def _some(self, nbytes: int, end: float) -> bytes:
        return self.sock.recv(nbytes) if self._ready(end) else b""

    def _ready(self, end: float) -> bool:
        return bool(self._readable.poll(max(0.0, end - time.monotonic()) * 1000))


def parsed(head: bytes) -> Request:
    """Raises Problem, 400."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or _CONTROL.search(first):
        raise Problem(400, "bad-request", "the first line is not that of a request")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.match(name) or _CONTROL.search(line):  # which others would read otherwise
            raise Problem(400, "bad-request", "a header is not one")
        name, value = name.lower(), value.strip()
        if name == "content-length" and headers.get(name, value) != value:
            raise Problem(400, "bad-request", "there are two lengths of the body")
        headers[name] = f"{headers[name]}, {value}" if name in headers and name != "content-length" else value
    says = headers.get("connection", "").lower()
    keep = "close" not in says and (words[2] != "HTTP/1.0" or "keep-alive" in says)
    return Request(words[0], words[1], headers, keep)


def answer_head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
