"""Errors of the endpoint as RFC 9457 problem details: `application/problem+json`."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from mooncake_ray.errors import (
    ConfigError,
    CorruptBlockError,
    MooncakeRayError,
    PlanError,
    SnapshotError,
    SnapshotNotFoundError,
    StaleVersionError,
    SyncTimeoutError,
)

__all__ = ["MEDIA_TYPE", "Problem", "disk_problems", "of_error"]

MEDIA_TYPE = "application/problem+json"


class Problem(Exception):
    """An answer that is an error. Raised by whatever handles a request.

    Attributes:
        status: Of HTTP.
        kind: Which one, for programs: the last part of its `type`.
        headers: That go with it.
    """

    def __init__(self, status: int, kind: str, detail: str, headers: Mapping[str, str] | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.status, self.kind, self.detail, self.headers, self.extra = status, kind, detail, dict(headers or {}), extra

    def body(self) -> bytes:
        """JSON, UTF-8."""
        found = {
            "type": f"urn:mooncake-ray:problem:{self.kind}",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            **self.extra,
        }
        return json.dumps(found).encode()


_STATUS: tuple[tuple[type[Exception], int, str], ...] = (
    (SnapshotNotFoundError, 404, "not-found"),
    (FileNotFoundError, 404, "not-found"),
    (StaleVersionError, 409, "stale-version"),
    (PlanError, 422, "bad-weights"),
    (CorruptBlockError, 500, "damaged"),
    (ConfigError, 422, "bad-request"),
    (SyncTimeoutError, 504, "timeout"),
    (SnapshotError, 503, "busy"),
)


def of_error(error: Exception) -> Problem:
    """What a client is told of an error of this package, or of the disk."""
    for kind, status, name in _STATUS:
        if isinstance(error, kind):
            return Problem(status, name, str(error), {"Retry-After": "1"} if status == 503 else None)
    if isinstance(error, OSError) and not isinstance(error, MooncakeRayError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return Problem(507 if full else 500, "disk", f"{error.strerror or error}: {error.filename or 'the store'}")
    return Problem(500, "internal", str(error) if isinstance(error, MooncakeRayError) else type(error).__name__)


@contextmanager
def disk_problems() -> Iterator[None]:
    """Around what touches the disk only: its errors are no matter of the connection, and the client is told. Raises Problem."""
    try:
        yield
    except MooncakeRayError:
        raise
    except OSError as e:
        raise of_error(e) from e
