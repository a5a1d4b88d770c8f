"""Who may do what: bearer tokens, as dependencies of routes; and what all routes' errors look like in the schema."""

from __future__ import annotations

import hmac
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from mooncake_ray.serve import schema
from mooncake_ray.serve.desk import Desk
from mooncake_ray.serve.problems import MEDIA_TYPE, Problem

__all__ = ["TheDesk", "may_publish", "may_read", "problems"]

_BEARER = HTTPBearer(auto_error=False, description="The endpoint's token to read, or to publish")
_TEXT = {
    401: "There is no token, and one is needed",
    403: "The token is not the right one, or nobody may do this",
    404: "It is not there",
    409: "There is this version, or a newer one, already",
    422: "The request is not as it must be",
    500: "What is on the disk is damaged, or cannot be read",
    507: "The disk is full; from the data port",
    504: "It was not done in time",
    503: "Too much is going on: come again after `Retry-After` seconds",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`."""
    body = {"model": schema.Problem, "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
    return {status: {**body, "description": _TEXT[status]} for status in statuses}


async def _desk(request: Request) -> Desk:
    return request.app.state.desk


TheDesk = Annotated[Desk, Depends(_desk)]
_Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]


async def may_read(desk: TheDesk, credentials: _Credentials) -> None:
    """Raises Problem: 401 or 403."""
    if desk.settings.read_token is not None:
        _check(credentials, desk.settings.read_token, desk.settings.publish_token)


async def may_publish(desk: TheDesk, credentials: _Credentials) -> None:
    """Raises Problem: 401 or 403."""
    _check(credentials, desk.settings.publish_token)


def _check(credentials: HTTPAuthorizationCredentials | None, *tokens: str | None) -> None:
    if credentials is None:
        raise Problem(401, "unauthorized", "a bearer token is needed", {"WWW-Authenticate": "Bearer"})
    known = [token.encode() for token in tokens if token is not None]
    if not known:
        raise Problem(403, "forbidden", "this endpoint takes no versions: it has no token to publish")
    given = credentials.credentials.encode()
    if not any([hmac.compare_digest(given, token) for token in known]):  # all of them, whichever it is
        raise Problem(403, "forbidden", "this token does not allow it")
