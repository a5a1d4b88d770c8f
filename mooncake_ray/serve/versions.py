"""What versions there are."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["versions"])


class Versions(BaseModel):
    """All that are there."""

    versions: list[int]
    latest: int | None


@router.get("/versions")
def versions(request: Request) -> Versions:
    """The versions that are there, rising."""
    found = request.app.state.desk.store.versions()
    return Versions(versions=list(found), latest=max(found, default=None))
