"""`build_app`: the endpoint as an ASGI application. Serve runs it in each replica; anything else that runs ASGI applications can, too."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from mooncake_ray.errors import MooncakeRayError
from mooncake_ray.serve import health, hub, overview, page, pins, publishing, versions, watching
from mooncake_ray.serve.lookout import Lookout
from mooncake_ray.serve.problems import MEDIA_TYPE, Problem, of_error

if TYPE_CHECKING:
    from mooncake_ray.serve.desk import Desk

__all__ = ["build_app"]

logger = logging.getLogger("mooncake_ray")

ROUTERS = (health.router, versions.router, pins.router, watching.router, publishing.router, hub.router, overview.router, page.router)
"""What the application is made of. A further part of it is a module with a router; its handlers find the desk as `request.app.state.desk`."""


def build_app(desk: Desk) -> FastAPI:
    """The application over a desk. Its schema is at /openapi.json, and for people at /docs."""
    app = FastAPI(title="mooncake_ray weights", version="1", docs_url="/docs", redoc_url=None, generate_unique_id_function=lambda r: r.name)
    app.state.desk = desk
    app.state.watch = watching.Watch(lambda: app.state.desk)
    app.state.lookout = Lookout(lambda: app.state.desk)
    for router in ROUTERS:
        app.include_router(router)
    made = app.openapi
    app.openapi = lambda: _as_set(made(), desk)  # type: ignore[method-assign]
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(MooncakeRayError, _error)
    app.add_exception_handler(OSError, _error)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    return app


def _as_set(schema: dict[str, Any], desk: Desk) -> dict[str, Any]:
    """The schema, which asks for a token only where this endpoint does."""
    if desk.settings.read_token is None:
        for path in schema["paths"].values():
            for operation in path.values():
                if "publishing" not in operation.get("tags", ()):
                    operation.pop("security", None)
    return schema


def _answer(problem: Problem) -> Response:
    return Response(problem.body(), problem.status, problem.headers, MEDIA_TYPE)


def _problem(request: Request, error: Problem) -> Response:
    return _answer(error)


def _error(request: Request, error: Exception) -> Response:
    problem = of_error(error)
    if problem.status == 500:
        logger.error("mooncake_ray: %s %s: %s", request.method, request.url.path, error)
    return _answer(problem)


def _http(request: Request, error: HTTPException) -> Response:
    if error.status_code == 400:  # a body that is not even text
        return _answer(Problem(422, "bad-request", str(error.detail)))
    if error.status_code == 405:
        methods = _methods(request)
        detail = f"{request.method} is not for this resource, which has {', '.join(methods)}"
        return _answer(Problem(405, "method-not-allowed", detail, {"Allow": ", ".join(methods)}))
    return _answer(Problem(error.status_code, "not-found" if error.status_code == 404 else "http", str(error.detail), error.headers))


def _methods(request: Request) -> list[str]:
    """Of all routes to a path: each route knows of its own only."""
    routes = [route for router in ROUTERS for route in router.routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in routes for method in route.methods})


def _invalid(request: Request, error: RequestValidationError) -> Response:
    errors = [{"where": ".".join(map(str, e["loc"])), "what": e["msg"]} for e in error.errors()]
    return _answer(Problem(422, "bad-request", "; ".join(f"{e['where']}: {e['what']}" for e in errors), errors=errors))
