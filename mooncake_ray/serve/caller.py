"""`Caller`: requests to an endpoint, tried again until they are answered or their time is over; and what errors mean."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

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

__all__ = ["Again", "Answer", "Caller", "connect", "error_of", "quoted"]

_MOST_SAID = 64 << 20  # bytes of JSON
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
        return json.loads(self.body)


class Caller:
    """Of one endpoint. Thread-safe."""

    def __init__(self, url: str, token: str | None, *, idle_s: float) -> None:
        """
        Args:
            url: Of the endpoint, without /v1.
            idle_s: How long a server may say nothing.

        Raises:
            ConfigError: it is no URL, or the time is none.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"not an HTTP URL: {url!r}")
        if not idle_s > 0:
            raise ConfigError(f"idle_s must be positive, got {idle_s}")
        self.url, self.idle_s = url.rstrip("/"), idle_s
        self._parts, self._token = urlsplit(self.url), token

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
            if time.monotonic() + pause >= until:
                raise SyncTimeoutError(f"{what}: not done within {max(0.0, until - begin):.3g} s: {why}")
            time.sleep(pause)

    def _once(self, method: str, path: str, body: Any, until: float, idle_s: float, ok: tuple[int, ...]) -> Answer:
        headers = {"Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        left = until - time.monotonic()
        if left <= 0:
            raise Again("its time is over")
        with closing(connect(self._parts, min(left, idle_s))) as connection:
            connection.request(method, f"{self._parts.path}/v1/{path}", data, headers)
            response = connection.getresponse()
            said = response.read(_MOST_SAID + 1)
        if len(said) > _MOST_SAID:
            raise TransportError(f"{self.url}/v1/{path}: more than {_MOST_SAID} bytes of JSON", method)
        if response.status in ok:
            return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, said)
        raise error_of(response.status, response.headers, said, f"{method} {self.url}/v1/{path}")

    def address(self, method: str, path: str, *, until: float) -> str:
        """Where the control plane sends that request to."""
        answer = self.call(method, path, until=until, ok=(307,))
        if not (location := answer.headers.get("location")):
            raise TransportError(f"{method} {self.url}/v1/{path} was sent nowhere", method)
        return location


def connect(parts: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=timeout_s)


def error_of(status: int, headers: Any, said: bytes, what: str) -> Exception:
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
