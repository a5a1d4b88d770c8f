"""Pins: who reads a version for longer says so, and it stays."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response

from mooncake_ray.serve import leases, schema
from mooncake_ray.serve.access import TheDesk, may_read, problems

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["pins"], dependencies=[Depends(may_read)], responses=problems(401, 403, 404, 422, 500, 503))

PinId = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]


def _lease(lease: leases.Lease) -> schema.Lease:
    left = max(0.0, lease.expires - time.time())
    return schema.Lease(id=lease.id, version=lease.version, holder=lease.holder, expires=lease.expires, ttl_s=left)


_LINKS = {
    201: {
        "links": {name: {"operationId": name, "parameters": {"id": "$response.body#/id"}} for name in ("read_pin", "renew_pin", "end_pin")}
    }
}


@router.post("/versions/{version}/pins", status_code=201, responses=_LINKS)
def pin(desk: TheDesk, version: schema.VersionPath, wish: schema.Pin) -> schema.Lease:
    """Keeps a version until the pin is over or deleted."""
    ttl_s = min(wish.ttl_s, desk.settings.max_lease_s)
    return _lease(desk.at(version, lambda number: desk.leases.take(number, ttl_s, wish.holder)))


@router.get("/versions/{version}/pins")
def pins_of_version(desk: TheDesk, version: schema.VersionPath) -> schema.Leases:
    """What keeps a version."""
    with desk.volume(version) as volume:
        found = desk.leases.of(volume.version)
        others = sorted({*desk.store.pins(volume.version)} - {e.pin for e in found})
        return schema.Leases(version=volume.version, leases=[_lease(e) for e in found], others=others)


@router.get("/pins/{id}")
def read_pin(desk: TheDesk, id: PinId) -> schema.Lease:
    """A pin."""
    return _lease(desk.leases.get(id))


@router.put("/pins/{id}")
def renew_pin(desk: TheDesk, id: PinId, wish: schema.Renewal) -> schema.Lease:
    """Has a pin last so long from now on."""
    return _lease(desk.leases.renew(id, min(wish.ttl_s, desk.settings.max_lease_s)))


@router.delete("/pins/{id}", status_code=204)
def end_pin(desk: TheDesk, id: PinId) -> Response:
    """Ends a pin."""
    desk.leases.end(id)
    return Response(status_code=204)
