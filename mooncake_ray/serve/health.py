"""Whether a replica is well."""

from __future__ import annotations

from fastapi import APIRouter

from mooncake_ray.serve import schema
from mooncake_ray.serve.access import TheDesk

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["health"])


@router.get("/health")
def health(desk: TheDesk) -> schema.Health:
    """How the replica is that answers. Needs no token."""
    turnstile = desk.port.turnstile
    transfers = schema.Transfers(
        active=turnstile.inside,
        waiting=turnstile.waiting,
        limit=turnstile.limit,
        refused=desk.port.refused,
        sent_bytes=desk.port.sent_bytes,
    )
    return schema.Health(status="ok", replica=desk.name, node=desk.host, latest=desk.store.latest(), transfers=transfers)
