"""`Answers`: what processes say to one that can ask them, and gets no answer that way. A line of JSON each, over TCP."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_ray import errors
from mooncake_ray.errors import ConfigError, MooncakeRayError, SyncTimeoutError, WeightSyncError

__all__ = ["Address", "Answers", "near"]

_LONGEST = 1 << 16
_SLOW_S = 5.0  # whoever connects and says nothing


@dataclass(frozen=True)
class Address:
    """Where answers are wanted. Plain values, for a message."""

    host: str
    port: int
    token: str

    def say(self, rank: int, what: str, *, error: BaseException | None = None, timeout_s: float = 10.0) -> None:
        """Raises OSError: nobody listens any more."""
        said = {"token": self.token, "rank": rank, "what": what}
        if error is not None:
            said |= {"error": type(error).__name__, "why": str(error)[:4096]}
        with socket.create_connection((self.host, self.port), timeout_s) as connection:
            connection.sendall(json.dumps(said).encode() + b"\n")


class Answers:
    """Listens for as long as it is open. One thread at a time."""

    def __init__(self, towards: tuple[str, int]) -> None:
        """`towards`: host and port of something near those who answer: they are told the address that this host has on the way there."""
        host = near(towards)
        self._listener = socket.create_server((host, 0))
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16))

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.close()

    def wait(self, what: str, ranks: int, *, timeout_s: float) -> None:
        """Until each rank has said it.

        Raises:
            The first error that one has said.
            SyncTimeoutError: some have not, in time; which.
        """
        end, there = time.monotonic() + timeout_s, set()
        while len(there) < ranks:
            self._listener.settimeout(max(0.001, end - time.monotonic()))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                missing = sorted(set(range(ranks)) - there)
                raise SyncTimeoutError(
                    f"ranks {missing} of {ranks} have not said {what!r} within {timeout_s:g} s; their logs may say why"
                ) from None
            said = _line(connection)
            if said.get("token") != self.address.token:
                continue
            if "error" in said:
                raise _error(said)
            if said["what"] == what:
                there.add(said["rank"])


def near(towards: tuple[str, int]) -> str:
    """The address that this host has on the way to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(towards)
        return probe.getsockname()[0]


def _line(connection: socket.socket) -> Mapping[str, Any]:
    connection.settimeout(_SLOW_S)
    data = b""
    with connection, contextlib.suppress(OSError):
        while len(data) < _LONGEST and not data.endswith(b"\n"):
            if not (more := connection.recv(_LONGEST)):
                break
            data += more
    try:
        said = json.loads(data)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _error(said: Mapping[str, Any]) -> MooncakeRayError:
    """Of the class it was, if it is one of this package's."""
    kind = getattr(errors, str(said["error"]), None)
    text = f"rank {said.get('rank')}: {said.get('why', '')}"
    if isinstance(kind, type) and issubclass(kind, (WeightSyncError, ConfigError)):
        return kind(text)
    return WeightSyncError(f"{said['error']}: {text}")
