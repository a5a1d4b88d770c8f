"""How bytes get from one node's pool into another's."""

from __future__ import annotations

from mooncake_ray.transport.base import Connection, Memory, Peer, Transport
from mooncake_ray.transport.registry import choose, get_transport, register_transport, transport_names

__all__ = ["Connection", "Memory", "Peer", "Transport", "choose", "get_transport", "register_transport", "transport_names"]
