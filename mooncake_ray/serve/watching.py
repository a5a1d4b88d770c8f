"""Being told of new versions: by a request that waits, or by a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from mooncake_ray.errors import MooncakeRayError
from mooncake_ray.serve import schema
from mooncake_ray.serve.access import TheDesk, may_read, problems
from mooncake_ray.serve.desk import Desk

__all__ = ["Watch", "router"]

router = APIRouter(prefix="/v1", tags=["watching"], dependencies=[Depends(may_read)], responses=problems(401, 403, 422, 500, 503))

What = Literal["any", "whole"]
_ID = re.compile(r"[0-9]{1,15}$", re.ASCII)
_LOOK_EVERY_S = 0.1
_EVENT = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9]+$"},
        "event": {"const": "version"},
        "data": {"type": "string", "contentMediaType": "application/json", "contentSchema": {"$ref": "#/components/schemas/Newest"}},
    },
    "required": ["id", "event", "data"],
}
_SILENCE_S = 10.0  # after which a stream says that it is there


class Watch:
    """Looks for new versions while anybody waits for one: once for all who do. For coroutines of one loop."""

    def __init__(self, desk: Callable[[], Desk]) -> None:
        """`desk`: the one that the replica has now."""
        self._desk, self._waiting = desk, 0
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._newest: dict[What, int] = {"any": -1, "whole": -1}

    async def newer(self, than: int, what: What, timeout_s: float) -> int | None:
        """The newest version, once there is one that is newer than that; None if there is none in time."""
        self._newest = await self._look()
        if self._newest[what] > than:
            return self._newest[what]
        self._waiting += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._newest[what] > than)
                return self._newest[what]
        except TimeoutError:
            return None
        finally:
            self._waiting -= 1

    async def _look(self) -> dict[What, int]:
        entries = await asyncio.to_thread(self._desk().listing)
        return {
            "any": max((e.version for e in entries), default=-1),
            "whole": max((e.version for e in entries if e.whole), default=-1),
        }

    async def _run(self) -> None:
        while self._waiting:
            # A disk that is not there, or an index that is not whole, for a moment; who asks next is told if it is for longer.
            with contextlib.suppress(OSError, MooncakeRayError):
                newest = await self._look()
                async with self._changed:
                    self._newest = newest
                    self._changed.notify_all()
            await asyncio.sleep(_LOOK_EVERY_S)


async def _watch(request: Request) -> Watch:
    return request.app.state.watch


TheWatch = Annotated[Watch, Depends(_watch)]
Which = Annotated[What, Query(description="`whole`: that can be read as it is; `any`: also one that only deltas lead to")]
After = Annotated[int, Query(ge=-1, le=10**15, description="A version that is known already; -1: none")]


@router.get("/next", responses={204: {"description": "There was none in time"}})
async def next_version(
    desk: TheDesk,
    watch: TheWatch,
    after: After = -1,
    what: Which = "whole",
    timeout_s: Annotated[float, Query(ge=0, le=60, allow_inf_nan=False)] = 30.0,
) -> schema.Newest:
    """Waits until there is a version that is newer than one that is known."""
    found = await watch.newer(after, what, min(timeout_s, desk.settings.max_poll_s))
    return schema.Newest(version=found) if found is not None else Response(status_code=204)


@router.get("/events", response_class=StreamingResponse, responses={200: {"content": {"text/event-stream": {"schema": _EVENT}}}})
async def events(
    desk: TheDesk,
    watch: TheWatch,
    after: After = -1,
    what: Which = "whole",
    limit: Annotated[int | None, Query(ge=1, le=10**6, description="End after so many events")] = None,
    timeout_s: Annotated[float, Query(gt=0, le=3600, allow_inf_nan=False, description="End after so long")] = 600.0,
    last_event_id: Annotated[str | None, Header(description="Of the last event that came; what is no version is none")] = None,
) -> StreamingResponse:
    """A stream of events of type `version`, whose id is the version's number. Browsers that lose it come again by themselves, and miss
    nothing."""
    known = max(after, int(last_event_id) if _ID.match(last_event_id or "") else -1)
    return StreamingResponse(
        _stream(watch, known, what, limit, min(timeout_s, desk.settings.max_stream_s)),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store"},
    )


async def _stream(watch: Watch, known: int, what: What, limit: int | None, timeout_s: float) -> AsyncIterator[str]:
    end = asyncio.get_running_loop().time() + timeout_s
    yield "retry: 1000\n\n"
    sent = 0
    while (left := end - asyncio.get_running_loop().time()) > 0:
        found = await watch.newer(known, what, min(left, _SILENCE_S))
        if found is None:
            yield ": still here\n\n"
            continue
        known, sent = found, sent + 1
        yield f'id: {found}\nevent: version\ndata: {{"version": {found}}}\n\n'
        if limit is not None and sent >= limit:
            return
