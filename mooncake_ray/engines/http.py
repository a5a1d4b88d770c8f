"""`JSONClient`: an inference server's control routes. Small requests, each with a deadline."""

from __future__ import annotations

import http.client
import json
import select
import threading
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mooncake_ray.errors import ConfigError, SyncTimeoutError, WeightSyncError

__all__ = ["HTTPStatusError", "JSONClient"]

_SHOWN = 500
_KEEP_S = 1.0


class HTTPStatusError(WeightSyncError):
    """A server answered, and not with success.

    Attributes:
        status: The HTTP status.
        body: What it said.
    """

    def __init__(self, what: str, status: int, body: str) -> None:
        super().__init__(f"{what}: {status}: {_reason(body)[:_SHOWN]}")
        self.status, self.body = status, body

    def __reduce__(self) -> Any:
        return _again, (str(self), self.status, self.body)


def _again(text: str, status: int, body: str) -> HTTPStatusError:
    out = HTTPStatusError("", status, body)
    out.args = (text,)
    return out


def _is_closed(connection: http.client.HTTPConnection) -> bool:
    """Whether the server is known to have closed it: nothing else is to be read between an answer and the next request."""
    if connection.sock is None:
        return False
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _reason(body: str) -> str:
    """What servers say in JSON of why they refuse; else all that they say."""
    try:
        said = json.loads(body)
    except ValueError:
        return body
    if isinstance(said, dict):
        said = next((said[name] for name in ("message", "error", "detail") if said.get(name)), body)
    return said if isinstance(said, str) else json.dumps(said)


@dataclass(frozen=True)
class JSONClient:
    """Thread-safe. Requests of a thread that follow each other at once share a connection; none is ever made twice."""

    url: str
    """"http://host:port", maybe with a path before all routes."""
    key: str = field(default="", repr=False)
    """Sent as a bearer token if it is not empty."""
    _kept: threading.local = field(default_factory=threading.local, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            host, _ = self.address
        except ValueError:  # its port is no number
            host = ""
        if self._parts.scheme not in ("http", "https") or not host or self._parts.query:
            raise ConfigError(f"the URL of a server is http://host:port, got {self.url!r}")

    def __reduce__(self) -> Any:
        return JSONClient, (self.url, self.key)

    @property
    def _parts(self) -> urllib.parse.SplitResult:
        return urllib.parse.urlsplit(self.url)

    @property
    def address(self) -> tuple[str, int]:
        """The server's host and port."""
        return self._parts.hostname or "", self._parts.port or (443 if self._parts.scheme == "https" else 80)

    def get(self, path: str, *, timeout_s: float) -> Any:
        """Raises as `post`."""
        return self._ask("GET", path, {}, None, timeout_s)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, query: Mapping[str, Any] | None = None, timeout_s: float) -> Any:
        """The answer, parsed if it is JSON; its text if not; {} if it is empty.

        Raises:
            HTTPStatusError: the server refused.
            SyncTimeoutError: it has not answered within `timeout_s` seconds. What was asked may be done all the same.
            WeightSyncError: it cannot be reached.
        """
        return self._ask("POST", path, query or {}, body, timeout_s)

    def _ask(self, method: str, path: str, query: Mapping[str, Any], body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        target = f"{self._parts.path.rstrip('/')}/{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        what = f"{method} {self._parts.scheme}://{self._parts.netloc}{target}"
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if method == "GET" else json.dumps(body or {}).encode()
        end = time.monotonic() + timeout_s
        connection = self._connection(timeout_s)
        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(max(0.001, end - time.monotonic()))
            connection.request(method, target, data, headers)
            connection.sock.settimeout(max(0.001, end - time.monotonic()))
            answer = connection.getresponse()
            status, text = answer.status, answer.read().decode(errors="replace")
        except TimeoutError:
            connection.close()
            raise SyncTimeoutError(f"{what}: no answer within {timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as e:
            connection.close()
            raise WeightSyncError(f"{what}: {type(e).__name__}: {e}") from None
        if not 200 <= status < 300:
            connection.close()  # a server that fails may close it, too, and not say so
            raise HTTPStatusError(what, status, text)
        self._kept.last = connection, time.monotonic()
        try:
            return json.loads(text) if text else {}
        except ValueError:
            return text

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """This thread's, if it was in use a moment ago: servers close those that are not for some seconds."""
        kept, self._kept.last = getattr(self._kept, "last", None), None
        if kept is not None:
            connection, used = kept
            if time.monotonic() - used < _KEEP_S and not _is_closed(connection):
                return connection
            connection.close()
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(*self.address, timeout=max(timeout_s, 0.001))
