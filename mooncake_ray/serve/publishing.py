"""Publishing: versions that come from outside."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Response
from fastapi.responses import RedirectResponse

from mooncake_ray.errors import MooncakeRayError
from mooncake_ray.serve import schema
from mooncake_ray.serve.access import TheDesk, may_publish, problems
from mooncake_ray.serve.problems import Problem
from mooncake_ray.serve.redirect import redirect

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["publishing"], dependencies=[Depends(may_publish)], responses=problems(401, 403, 409, 422, 500, 503))

_STORE_S = 600.0
Number = Annotated[int, Path(ge=0, le=10**15)]
_BODY: dict[str, Any] = {
    "requestBody": {
        "description": "A file of the safetensors format. Metadata `files/NAME` becomes a file that goes with the version. "
        "With a header `Content-Digest` (RFC 9530) it is compared when it has come.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
_MOVED: dict[int | str, dict[str, Any]] = {
    201: {"model": schema.Stored, "description": "It is stored; from the data port"},
    307: {
        "description": "To the data port, which takes the body",
        "headers": {"Location": {"schema": {"type": "string", "format": "uri"}, "required": True}},
    },
}


@router.post("/versions", status_code=201, responses=problems(404, 504))
async def store(desk: TheDesk, what: schema.FromGroup) -> schema.Newest:
    """Stores the version that the group of engines is at, which is read from the endpoint from then on."""
    if desk.keeper is None:
        raise Problem(404, "no-group", "this endpoint has no group whose versions could be stored")
    try:
        async with asyncio.timeout(_STORE_S):
            return schema.Newest(version=await desk.keeper.store.remote(what.version))
    except TimeoutError:
        raise Problem(504, "timeout", f"not stored within {_STORE_S:g} s; it may still be") from None
    except Exception as e:
        if isinstance(cause := getattr(e, "cause", e), MooncakeRayError):
            raise cause from None
        raise


@router.put(
    "/versions/{version}",
    status_code=307,
    response_model=None,
    response_class=RedirectResponse,
    openapi_extra=_BODY,
    responses=_MOVED | problems(507),
)
def publish(desk: TheDesk, version: Number) -> Response:
    """Stores what follows as a version, which must be newer than all that are there. The body goes to the data port, where the answer sends
    the client; one that says `Expect: 100-continue` sends it once."""
    desk.store.refuse_stale(version)
    return redirect(desk.address("PUT", "versions", version))
