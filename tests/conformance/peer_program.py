"""A peer in a process of its own: a pool whose arenas are full of a known pattern, and a transport that serves them.

Says one line of JSON at the start and after each command it reads from stdin: what the peer is. Commands: `grow` (one more arena),
`exchange HEX` (adds the transport's answer), `ended` (the session of those exchanges).
"""

from __future__ import annotations

import ctypes
import json
import secrets
import sys
from typing import Any

import numpy as np

from mooncake_ray.errors import TransportError

MIB = 1 << 20
ARENA = 20 * MIB
CAPACITY = 80 * MIB
SECRET = b"conformance-secret-of-32-bytes!!"


_PERIOD = 1_048_573  # a prime, so that whatever is misplaced by a round number of bytes shows
_TILE = np.random.default_rng(1).integers(0, 256, _PERIOD, np.uint8)


def pattern(region: int, nbytes: int, start: int = 0) -> np.ndarray:
    """What is at these offsets of a region."""
    first = (start + region * 7919) % _PERIOD
    return np.tile(_TILE, -(-(first + nbytes) // _PERIOD))[first : first + nbytes]


class Served:
    """A pool, and one transport that serves it."""

    def __init__(self, name: str, host: str, **options: Any) -> None:
        from mooncake_ray.config import Config
        from mooncake_ray.store import node
        from mooncake_ray.transport import get_transport

        self.config = Config(
            capacity_bytes=CAPACITY, prefault_bytes=0, arena_bytes=ARENA, spill_dir="off", linger_s=0.2, huge_pages="never", numa="off"
        )
        self.broker = node.broker_name(f"conformance-{secrets.token_hex(8)}")
        self.client = node.connect(self.broker, self.config)
        own = {"broker": self.broker, "pool_id": self.client.pool_id} if name == "shm" else {}
        self.transport = get_transport(name)(self.config, host, **own, **options)
        self.host, self.port, self.server = host, 0, None
        if name == "tcp":
            from mooncake_ray._native import peer

            self.server = peer.Server(self.client, host, 0, SECRET)
            self.port = self.server.port
        self.sizes: dict[int, int] = {}
        self.leases: list[Any] = []
        self.grow(2)

    def grow(self, more: int = 1) -> None:
        """Takes memory until there are more arenas, fills them with the pattern, and serves them."""
        from mooncake_ray.transport import Memory

        want = len(self.sizes) + more
        while len(arenas := self.client.arenas()) < want:
            self.leases.append(self.client.create(self.client.new_id(), 8 * MIB, 10))
        for index, rw, _, nbytes, fd in arenas:
            if index not in self.sizes and len(self.sizes) < want:
                full = pattern(index, nbytes)
                ctypes.memmove(rw, full.ctypes.data, nbytes)
                self.transport.register(Memory(index, rw, nbytes, fd))
                self.sizes[index] = nbytes
        if self.server is not None:
            self.server.describe(b"")  # peers may read arenas that came since

    def facts(self) -> dict[str, Any]:
        stats = json.loads(self.client.stats())
        return {
            "host": self.host,
            "port": self.port,
            "description": self.transport.describe(),
            "sizes": {str(i): n for i, n in self.sizes.items()},
            "broker_pid": stats["pid"],
        }

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        self.transport.close()
        self.leases.clear()
        self.client.close()


def main() -> None:
    served = Served(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))
    print(json.dumps(served.facts()), flush=True)
    for line in sys.stdin:
        command, *rest = line.split()
        more = {}
        if command == "grow":
            served.grow()
        elif command == "ended":
            served.transport.ended(1)
        elif command == "exchange":
            try:
                more["answer"] = served.transport.accept(1, bytes.fromhex(rest[0])).hex()
            except TransportError as e:
                more["error"] = str(e)
        print(json.dumps({**served.facts(), **more}), flush=True)
    served.close()


if __name__ == "__main__":
    main()
