"""Two ends of RDMA in one process: memory that is served, and memory that is read into."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mooncake_ray.config import Config
from mooncake_ray.transport import Memory, Peer, get_transport

MIB = 1 << 20
TIMEOUT_S = 60.0
SESSION = 7
GUARD = 0xA5


def table(*rows: tuple[int, int, int, int]) -> np.ndarray:
    return np.array(rows, np.uint64).reshape(-1, 4)


def memory(nbytes: int, fill: int | None = None) -> np.ndarray:
    """Pages of their own, with a pattern or with one byte everywhere."""
    out = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    out[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8) if fill is None else fill
    return out


class Pair:
    """`there` serves `source` as region 3; `here` reads into `target`. Each with options of its own."""

    def __init__(self, nbytes: int = 4 * MIB, *, there: dict[str, Any] | None = None, here: dict[str, Any] | None = None) -> None:
        verbs = get_transport("verbs")
        self.source, self.target = memory(nbytes), memory(nbytes, GUARD)
        self.there: Any = verbs(Config(), "", **(there or {}))
        self.here: Any = verbs(Config(), "", **(here or {}))
        self.there.register(Memory(3, self.source.ctypes.data, nbytes))
        self.here.register(Memory(0, self.target.ctypes.data, nbytes))

    def peer(self, change: Callable[[dict[str, Any]], None] | None = None) -> Peer:
        """`change`: lies about what is there."""

        def describe() -> dict[str, Any]:
            description = json.loads(json.dumps(self.there.describe()))
            if change:
                change(description)
            return description

        return Peer("there", 1, describe(), exchange=lambda blob: self.there.accept(SESSION, blob), redescribe=describe)

    def connect(self, change: Callable[[dict[str, Any]], None] | None = None, **kwargs: Any) -> Any:
        return self.here.connect(replace(self.peer(change), **kwargs), TIMEOUT_S)

    def ranges(self, *rows: tuple[int, int, int]) -> np.ndarray:
        """Offset there, offset here, nbytes."""
        return table(*((3, offset, self.target.ctypes.data + at, nbytes) for offset, at, nbytes in rows))

    def read_all(self, connection: Any) -> None:
        self.target[:] = GUARD
        connection.read(self.ranges((0, 0, self.target.nbytes)), TIMEOUT_S)
        np.testing.assert_array_equal(self.target, self.source)

    def close(self) -> None:
        self.here.close()
        self.there.close()
