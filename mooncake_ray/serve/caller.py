"""`Caller`: requests to an endpoint and its data ports, tried again until they are answered or their time is over; and what errors mean."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from mooncake_ray.errors import (
    ConfigError,
    MooncakeRayError,
    PeerRefusedError,
    SnapshotError,
    SnapshotNotFoundError,
    StaleVersionError,
    SyncTimeoutError,
    TransportError,
)
from mooncake_ray.transfer.deadline import Pauses

__all__ = ["Again", "Answer", "Caller", "asked", "body_of", "connect", "parsed", "quoted"]

_MOST_SAID = 64 << 20  # bytes of JSON
_PIECE = 1 << 20
_LONGEST_PAUSE_S = 5.0


class Again(Exception):
    """It failed in a way that may be over soon."""

    def __init__(self, why: str, after_s: float | None = None) -> None:
        super().__init__(why)
        self.after_s = after_s


@dataclass(frozen=True)
class Answer:
    """One of the control plane's."""

    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes

    def json(self) -> Any:
        return parsed(self.body)


class Caller:
    """Of one endpoint. Thread-safe."""

    def __init__(self, url: str, token: str | None, *, idle_s: float, ended: threading.Event | None = None) -> None:
        """
        Args:
            url: Of the endpoint, without /v1.
            idle_s: How long a server may say nothing.
            ended: Once it is set, nothing is tried again.

        Raises:
            ConfigError: it is no URL, or the time is none.
        """
        if not _is_http(url):
            raise ConfigError(f"not an HTTP URL: {url!r}")
        if not idle_s > 0:
            raise ConfigError(f"idle_s must be positive, got {idle_s}")
        self.url, self.idle_s = url.rstrip("/"), idle_s
        self._parts, self._token, self._ended = urlsplit(self.url), token, ended or threading.Event()

    def ended_by(self, ended: threading.Event) -> Caller:
        """The same, which tries nothing again once that is set."""
        return Caller(self.url, self._token, idle_s=self.idle_s, ended=ended)

    def call(
        self, method: str, path: str, *, body: Any = None, until: float, idle_s: float | None = None, ok: tuple[int, ...] = (200,)
    ) -> Answer:
        """One request to the control plane.

        Args:
            path: After /v1/, quoted.
            body: To be sent as JSON.
            until: When to give up, on the monotonic clock.
            idle_s: Instead of the endpoint's own.

        Raises:
            SyncTimeoutError: it was not answered in time.
            SnapshotNotFoundError, StaleVersionError, PeerRefusedError, TransportError: what the endpoint says.
        """
        return self.patiently(
            lambda: self._once(method, path, body, until, idle_s or self.idle_s, ok), until, f"{method} {self.url}/v1/{path}"
        )

    def patiently(self, act: Callable[[], Any], until: float, what: str) -> Any:
        """Does it until it is done: again and again while it raises Again or OSError."""
        pauses, begin = Pauses(), time.monotonic()
        while True:
            try:
                return act()
            except MooncakeRayError:
                raise
            except (Again, OSError, http.client.HTTPException) as e:
                why = str(e) or type(e).__name__
                # Not all at the same moment, where many were told the same.
                pause = min(getattr(e, "after_s", None) or pauses.next(), _LONGEST_PAUSE_S) * random.uniform(1.0, 1.5)
            if time.monotonic() + pause >= until or self._ended.wait(pause):
                raise SyncTimeoutError(f"{what}: not done within {max(0.0, until - begin):.3g} s: {why}")

    def _once(self, method: str, path: str, body: Any, until: float, idle_s: float, ok: tuple[int, ...]) -> Answer:
        headers = {"Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        with closing(connect(self._parts, min(_left(until), idle_s))) as connection:
            connection.request(method, f"{self._parts.path}/v1/{path}", data, headers)
            response = connection.getresponse()
            said = body_of(response, until, _MOST_SAID)
        if response.status in ok:
            return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, said)
        raise _error_of(response.status, response.headers, said, f"{method} {self.url}/v1/{path}")

    def address(self, method: str, path: str, *, until: float) -> str:
        """Where the control plane sends that request to."""
        where = f"{self.url}/v1/{path}"
        location = urljoin(where, self.call(method, path, until=until, ok=(307,)).headers.get("location", "nowhere:"))
        if not _is_http(location):
            raise TransportError(f"{method} {where} was sent to {location!r}", method)
        return location

    def patience(self, until: float) -> float:
        """Seconds that the socket of a connection waits. Raises Again: there are none left."""
        return min(self.idle_s, _left(until))

    @contextmanager
    def payload(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Iterable[bytes | memoryview] | None = None,
        *,
        ok: int,
        until: float,
    ) -> Iterator[http.client.HTTPResponse]:
        """What a data port answers to which the control plane sends a request. Once; to be done `patiently`. Raises as `asked`."""
        parts = urlsplit(self.address(method, path, until=until))
        with closing(connect(parts, self.patience(until))) as connection:
            yield asked(connection, parts, method, headers, body, ok=ok, until=until)


def connect(parts: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=timeout_s)


def asked(
    connection: http.client.HTTPConnection,
    parts: SplitResult,
    method: str,
    headers: Mapping[str, str],
    body: Iterable[bytes | memoryview] | None = None,
    *,
    ok: int,
    until: float,
) -> http.client.HTTPResponse:
    """What a data port answers at an address of its own, if that is with the status `ok`.

    Raises:
        Again: it may do better soon, maybe at another address.
        OSError, HTTPException: the connection breaks.
        MooncakeRayError: what else it says.
    """
    what = f"{method} {parts.netloc}{parts.path}"
    if connection.sock is None:
        connection.connect()
    with suppress(BrokenPipeError, ConnectionResetError):  # the server says why
        connection.request(method, f"{parts.path}?{parts.query}", body, dict(headers))
    response = connection.getresponse()
    if response.status == ok:
        return response
    said = body_of(response, until, _MOST_SAID)
    if response.status == 403:  # this address is over, or of another replica that had this port before
        raise Again(f"{what}: the address is not good any more")
    raise _error_of(response.status, response.headers, said, what)


def body_of(response: http.client.HTTPResponse, until: float, most: int | None = None) -> bytes:
    """All of it.

    Raises:
        Again: it ended too early, or the time is over.
        TransportError: it has more than `most` bytes.
    """
    due, pieces, got = response.length, [], 0
    while piece := response.read(_PIECE):
        pieces.append(piece)
        got += len(piece)
        if most is not None and got > most:
            raise TransportError(f"an answer of more than {most} bytes")
        if got != due:
            _left(until)
    if due is not None and got < due:
        raise Again(f"{got} bytes came of {due}")
    return b"".join(pieces)


def parsed(said: bytes) -> Any:
    """JSON that an endpoint says. Raises TransportError: it is none."""
    try:
        return json.loads(said)
    except ValueError as e:
        raise TransportError(f"an answer that is no JSON: {e}") from None


def _left(until: float) -> float:
    """Seconds. Raises Again: there are none."""
    if (left := until - time.monotonic()) <= 0:
        raise Again("its time is over")
    return left


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False


def _error_of(status: int, headers: Any, said: bytes, what: str) -> Exception:
    """The error that an answer is: Again, if the same request may do better soon."""
    try:
        problem = json.loads(said)
        why = str(problem["detail"])
    except (ValueError, TypeError, KeyError):
        problem, why = {}, said[:200].decode(errors="replace")
    text = f"{what}: {status}: {why}"
    if status in (408, 425, 429) or (status >= 500 and status != 507 and not str(problem.get("type", "")).endswith(":damaged")):
        after = str(headers.get("Retry-After", ""))
        return Again(text, float(after) if after.isascii() and after.isdigit() else None)
    if status == 404:
        return SnapshotNotFoundError(text)
    if status == 409:
        return StaleVersionError(text)
    if status in (401, 403):
        return PeerRefusedError(text, what.partition(" ")[0])
    return SnapshotError(text) if status in (412, 416) else TransportError(text, what.partition(" ")[0])


def quoted(*parts: object) -> str:
    """Parts of a path, each quoted."""
    return "/".join(quote(str(p), safe="") for p in parts)
