"""Whether a replica is well."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["health"])


class Health(BaseModel):
    """Of one replica."""

    status: str
    versions: int


@router.get("/health")
def health(request: Request) -> Health:
    """How the replica is that answers."""
    desk = request.app.state.desk
    return Health(status="ok", versions=len(desk.store.versions()))
