"""`JSONClient`: an inference server's control routes. Small requests, on a connection of its own each, with a deadline."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_ray.errors import ConfigError, SyncTimeoutError, WeightSyncError

__all__ = ["HTTPStatusError", "JSONClient"]

_SHOWN = 500


class HTTPStatusError(WeightSyncError):
    """A server answered, and not with success.

    Attributes:
        status: The HTTP status.
        body: What it said.
    """

    def __init__(self, what: str, status: int, body: str) -> None:
        super().__init__(f"{what}: {status}: {body[:_SHOWN]}")
        self.status, self.body = status, body

    def __reduce__(self) -> Any:
        return _again, (str(self), self.status, self.body)


def _again(text: str, status: int, body: str) -> HTTPStatusError:
    out = HTTPStatusError("", status, body)
    out.args = (text,)
    return out


@dataclass(frozen=True)
class JSONClient:
    """Thread-safe."""

    url: str
    """"http://host:port"."""
    key: str = ""
    """Sent as a bearer token if it is not empty."""

    def __post_init__(self) -> None:
        parsed = urllib.parse.urlparse(self.url)
        if parsed.scheme not in ("http", "https") or not parsed.netloc:
            raise ConfigError(f"the URL of a server is http://host:port, got {self.url!r}")

    def get(self, path: str, *, timeout_s: float) -> Any:
        """Raises as `post`."""
        return self._ask("GET", path, {}, None, timeout_s)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, query: Mapping[str, Any] | None = None, timeout_s: float) -> Any:
        """The answer, parsed if it is JSON; its text if not.

        Raises:
            HTTPStatusError: the server refused.
            SyncTimeoutError: it has not answered within `timeout_s` seconds.
            WeightSyncError: it cannot be reached.
        """
        return self._ask("POST", path, query or {}, body, timeout_s)

    def _ask(self, method: str, path: str, query: Mapping[str, Any], body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        url = f"{self.url.rstrip('/')}/{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        what = f"{method} {url}"
        try:
            with urllib.request.urlopen(request, timeout=max(timeout_s, 0.001)) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as e:
            raise HTTPStatusError(what, e.code, e.read().decode(errors="replace")) from None
        except TimeoutError:
            raise SyncTimeoutError(f"{what}: no answer within {timeout_s:g} s") from None
        except OSError as e:  # urllib's own error is one
            if isinstance(getattr(e, "reason", None), TimeoutError):
                raise SyncTimeoutError(f"{what}: no answer within {timeout_s:g} s") from None
            raise WeightSyncError(f"{what}: {e}") from None
        try:
            return json.loads(text) if text else {}
        except ValueError:
            return text
