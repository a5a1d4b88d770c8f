"""The status page: three files that come with the package, and headers that let a browser run nothing else."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

__all__ = ["CONTENT_SECURITY_POLICY", "router"]

router = APIRouter(include_in_schema=False)

STATIC = Path(__file__).parent / "static"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}


@router.api_route("/", methods=["GET", "HEAD"])
def root(request: Request) -> Response:
    """The page is at one address, so that what it names relative to that is right whatever prefix the endpoint has."""
    return Response(status_code=307, headers={"Location": f"{request.scope.get('root_path', '').rstrip('/')}/status"})


@router.api_route("/status", methods=["GET", "HEAD"])
def status(request: Request) -> Response:
    return _file(request, "index.html")


@router.api_route("/static/{name}", methods=["GET", "HEAD"])
def static(request: Request, name: str) -> Response:
    return _file(request, name)


@cache
def _content(name: str) -> tuple[bytes, str]:
    content = (STATIC / name).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def _file(request: Request, name: str) -> Response:
    if name not in _TYPES:
        raise HTTPException(404, f"there is no file {name}")
    content, tag = _content(name)
    headers = {
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "ETag": tag,
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=f"{_TYPES[name]}; charset=utf-8")
