"""Requests that the data port answers: the control plane looks whether there is such a thing, and sends the client on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

from mooncake_ray.serve.access import problems

__all__ = ["redirect", "sent_on"]

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_ELSEWHERE: dict[int | str, dict[str, Any]] = {
    200: {"description": "All of it, from the data port", "content": {"*/*": _BINARY}},
    206: {"description": "The range that was asked for, from the data port", "content": {"*/*": _BINARY}},
    307: {
        "description": "To the data port, which knows ranges and preconditions, at an address that is good for a while",
        "headers": {"Location": {"schema": {"type": "string", "format": "uri"}, "required": True}},
    },
}

Handler = Callable[..., Response]


def sent_on(router: APIRouter, path: str, **options: Any) -> Callable[[Handler], Handler]:
    """Decorates what handles GET and HEAD of a path and returns `redirect`. The schema shows the former. `options`: as `APIRouter.get` has."""

    def add(handler: Handler) -> Handler:
        router.head(path, include_in_schema=False)(handler)
        answers = {"status_code": 307, "response_model": None, "response_class": RedirectResponse}
        return router.get(path, **answers, responses=_ELSEWHERE | problems(404), **options)(handler)

    return add


def redirect(address: str, headers: Mapping[str, str] | None = None) -> Response:
    """To an address of the data port, which is another one each time."""
    return RedirectResponse(address, 307, {**(headers or {}), "Cache-Control": "no-store"})
