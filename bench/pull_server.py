"""`python -m bench.pull_server KIND POOL_BYTES LARGEST`: puts on node 0 of a cluster, and has it read elsewhere. See `pull` and `fanout`.

A value is put anew for every read, so that no node has it already. A read is timed by the reader itself.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from bench import payloads, serving

__all__ = ["LATENCY", "SUBJECTS", "Reader", "size_of"]

SUBJECTS = {"plain": ("ray",), "pool": ("tcp",), "mooncake-home": ("mooncake-home",), "mooncake": ("mooncake",)}
"""Which subject each kind of process holds."""
LATENCY = "64KiB"
_ALL_OF_IT = 1 << 14  # one in so many elements is looked at in a timed round
_GIVEN_BACK_S = 60.0


def size_of(payload: str) -> int:
    """Bytes of the payload of that name."""
    return payloads.nbytes(payloads.verl_batch()) if payload == payloads.VERL else _SIZES[payload]


_SIZES = {**payloads.SIZES, "64MiB": 64 << 20}


def _array(size: int) -> np.ndarray:
    """int64 (size / 8,): each element tells where it is."""
    return np.arange(size // 8, dtype=np.int64)


def _is_value(got: Any, payload: str, number: int, every: int) -> bool:
    """Whether that is the payload, as it was put for that read."""
    if payload == payloads.VERL:
        return got.meta_info["number"] == number and payloads.probe(got) != 0
    wanted = range(0, size_of(payload) // 8, every)
    return len(got) == size_of(payload) // 8 and got[0] == -number and np.array_equal(got[::every][1:], np.asarray(wanted)[1:])


class Reader:
    """An actor on another node."""

    def read(self, refs: list[Any], payload: str, number: int, every: int) -> float:
        """Seconds from asking for the value until it is there."""
        import ray

        start = time.perf_counter()
        got = ray.get(refs[0])
        seconds = time.perf_counter() - start
        if not _is_value(got, payload, number, every):
            raise AssertionError(f"read {number} of {payload}: what came is not what was put")
        return seconds


class _Putter:
    """Puts, in a Ray that has the package installed or not."""

    def __init__(self, pool_bytes: int) -> None:
        self._pool, self._number = bool(pool_bytes), 0
        serving.join_ray(pool_bytes)
        self._readers: list[Any] = []

    def load(self, subjects: list[str], payload: str, places: list[int]) -> None:
        """Makes the payload, and a reader on each of the nodes; reads all of it once."""
        import ray

        if not self._readers:
            reader: Any = ray.remote(Reader)
            self._readers = [reader.options(num_cpus=0, resources={f"node{n}": 0.01}).remote() for n in places]
            ray.get([r.__ray_ready__.remote() for r in self._readers])
        self._payload = payload
        self._value = None  # lets go of the last one first
        self._value = payloads.verl_batch() if payload == payloads.VERL else _array(size_of(payload))
        self._read(len(self._readers), 1)

    def time(self, subject: str) -> float:
        """Seconds that one reader needs."""
        return self._read(1, _ALL_OF_IT)[0]

    def fan_out(self, subject: str, readers: int) -> float:
        """Seconds until that many readers have it, who all ask at once."""
        return max(self._read(readers, _ALL_OF_IT))

    def _read(self, readers: int, every: int) -> list[float]:
        import ray

        self._number += 1
        if self._payload == payloads.VERL:
            self._value.meta_info["number"] = self._number
        else:
            self._value[0] = -self._number
        ref = ray.put(self._value)
        seconds = ray.get([r.read.remote([ref], self._payload, self._number, every) for r in self._readers[:readers]], timeout=200)
        del ref
        self._settle()
        return seconds

    def _settle(self) -> None:
        """Returns when the memory is free again, on all nodes."""
        if not self._pool:
            time.sleep(0.2)  # Ray's stores have it back by then, and nothing tells when
            return
        import mooncake_ray

        deadline = time.monotonic() + _GIVEN_BACK_S
        while mooncake_ray.pool_stats()["used_bytes"]:
            if time.monotonic() > deadline:
                raise AssertionError(f"the pool has not had its memory back within {_GIVEN_BACK_S} s: {mooncake_ray.pool_stats()}")
            time.sleep(0.005)
        if mooncake_ray.stats()["fallbacks"]:
            raise AssertionError(f"the pool did not take a value: {mooncake_ray.stats()}")
        time.sleep(0.2)  # as with Ray: the copies of other nodes go

    def close(self) -> None:
        import ray

        ray.shutdown()


class _Mooncake:
    """Mooncake's transfer engine over TCP, at one end: a buffer that others may read from, or that is read into."""

    def __init__(self, size: int) -> None:
        from mooncake.engine import TransferEngine

        self._address = _own_address()
        self._engine = TransferEngine()
        if status := self._engine.initialize(self._address, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError(f"TransferEngine.initialize returned {status}")
        self._buffer = np.ones(size // 8, np.int64)  # populated
        if status := self._engine.register_memory(self._buffer.ctypes.data, size):
            raise RuntimeError(f"TransferEngine.register_memory returned {status}")

    def offer(self, subject: str, payload: str, number: int) -> list[Any]:
        """Fills the buffer; returns where it is."""
        self._buffer[: size_of(payload) // 8] = _array(size_of(payload))
        self._buffer[0] = -number
        return [f"{self._address}:{self._engine.get_rpc_port()}", self._buffer.ctypes.data]

    def pull(self, subject: str, payload: str, number: int, peer: list[Any]) -> float:
        """Reads it. Seconds."""
        size = size_of(payload)
        start = time.perf_counter()
        status = self._engine.transfer_sync_read(peer[0], self._buffer.ctypes.data, peer[1], size)
        seconds = time.perf_counter() - start
        if status:
            raise RuntimeError(f"transfer_sync_read of {payload} returned {status}")
        if not _is_value(self._buffer[: size // 8], payload, number, _ALL_OF_IT):
            raise AssertionError(f"Mooncake's read {number} of {payload}: what came is not what was put")
        return seconds

    def load(self, subjects: list[str], **rest: Any) -> None:
        """Nothing to do before."""

    def close(self) -> None:
        pass


def _own_address() -> str:
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anyone:
        anyone.connect(("198.18.0.254", 1))  # sends nothing
        return str(anyone.getsockname()[0])


if __name__ == "__main__":
    _kind, _pool_bytes, _largest = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    serving.serve(lambda: _Mooncake(_largest) if _kind.startswith("mooncake") else _Putter(_pool_bytes if _kind == "pool" else 0))
