"""SGLang's own ways to new weights, for where a group cannot be: tensors in a request, a broadcast, or a checkpoint.

Each is one session, paused: what must come last, the version and the flush, comes with the last bucket.
"""

from __future__ import annotations

import datetime
import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mooncake_ray.engines.base import PauseMode
from mooncake_ray.engines.sglang.server import Keep, Server, packed
from mooncake_ray.errors import ConfigError, SyncTimeoutError, WeightSyncError

__all__ = ["Named", "Way", "buckets", "from_disk", "from_distributed", "from_tensor"]

logger = logging.getLogger("mooncake_ray")

Named = Iterable[tuple[str, torch.Tensor]]

_GROUP = "mooncake_ray"


@dataclass(frozen=True)
class Way:
    """How an update is made."""

    version: int
    pause: PauseMode = "keep"
    keep: Keep = "retract"
    flush: bool = True
    bucket_bytes: int = 256 << 20
    """So much is in a request, or broadcast, at once; a larger tensor is one by itself."""
    timeout_s: float = 300.0
    """Of each request."""


class _Session:
    """An update by requests. What is written of a new version without all of it is not served: the server stays paused then."""

    def __init__(self, server: Server, way: Way) -> None:
        self._server, self._way = server, way
        self.paused_s = 0.0
        self.written = False

    @contextmanager
    def open(self, *, session: bool = True) -> Iterator[None]:
        server, way = self._server, self._way
        opened = False
        if way.pause == "wait":
            server.begin(timeout_s=way.timeout_s)  # waits until nothing runs
            opened = True
        begin = time.monotonic()
        server.pause("abort" if way.pause == "abort" else way.keep, timeout_s=way.timeout_s)
        whole = False
        try:
            if session != opened:
                (server.begin if session else server.end)(timeout_s=way.timeout_s)
            opened = session
            yield
            whole = True
        finally:
            if opened:
                server.end(timeout_s=way.timeout_s)
            if whole or not self.written:
                server.resume(timeout_s=way.timeout_s)
            else:
                logger.error("mooncake_ray: %s has parts of version %d, and stays paused until all are there", server.url, way.version)
            self.paused_s = time.monotonic() - begin

    def send(self, route: str, body: dict[str, Any], *, last: bool) -> None:
        flush = self._way.flush and last and self._way.keep != "in_place"
        body |= {"flush_cache": flush, "weight_version": str(self._way.version) if last else None}
        self._server.call(route, body, timeout_s=self._way.timeout_s)
        self.written = True
        if last and self._way.flush and not flush:
            try:
                self._server.flush(wait_s=0.0, timeout_s=self._way.timeout_s)
            except WeightSyncError as e:  # the weights are there
                logger.warning("mooncake_ray: the cache keeps what older weights made until it is flushed: %s", e)


def buckets(named: Named, limit: int) -> Iterator[tuple[list[tuple[str, torch.Tensor]], bool]]:
    """Tensors that go together, and whether they are the last; of each bucket those of larger elements first, so that all are aligned in it.

    Raises:
        ConfigError: there are none, one is there twice, or the limit is not positive.
    """
    if limit < 1:
        raise ConfigError(f"bucket_bytes must be positive, got {limit}")
    seen: set[str] = set()
    bucket: list[tuple[str, torch.Tensor]] = []
    nbytes = 0
    for name, tensor in named:
        if name in seen:
            raise ConfigError(f"{name} is there twice")
        seen.add(name)
        if bucket and nbytes + tensor.nbytes > limit:
            yield _aligned(bucket), False
            bucket, nbytes = [], 0
        bucket.append((name, tensor.detach()))
        nbytes += tensor.nbytes
    if not bucket:
        raise ConfigError("there are no tensors")
    yield _aligned(bucket), True


def from_tensor(server: Server, ranks: int, named: Named, way: Way) -> float:
    """Sends all of each tensor to every rank, in requests. Returns for how many seconds it was paused."""
    session = _Session(server, way)
    with session.open():
        for bucket, last in buckets(named, way.bucket_bytes):
            text = packed([(name, _alone(tensor)) for name, tensor in bucket])
            body = {"serialized_named_tensors": [text] * ranks, "selector": "target"}
            session.send("update_weights_from_tensor", body, last=last)
    return session.paused_s


def from_disk(server: Server, path: str, way: Way) -> float:
    """Has the server read a checkpoint at a path of its own. Returns for how many seconds it was paused. Names that it does not know it leaves
    out, and keeps what it finds none for."""
    session = _Session(server, way)
    with session.open(session=False):
        session.send("update_weights_from_disk", {"model_path": path}, last=True)
    return session.paused_s


def from_distributed(server: Server, ranks: int, named: Sequence[tuple[str, torch.Tensor]], way: Way, host: str) -> float:
    """Broadcasts to all ranks: NCCL from a GPU, Gloo from memory. Returns for how many seconds it was paused.

    Args:
        host: of this process, as the server's host reaches it.

    Raises:
        SyncTimeoutError: not all came, or took what was sent, in time.
    """
    backend = "nccl" if named and named[0][1].is_cuda else "gloo"
    if backend == "nccl":
        raise ConfigError("broadcasts from a GPU are not made this way: use a group's mode nccl")
    port = _free_port(host)
    meeting = {
        "master_address": host,
        "master_port": port,
        "rank_offset": 1,
        "world_size": 1 + ranks,
        "group_name": _GROUP,
        "backend": backend,
    }
    with _beside(lambda: server.call("init_weights_update_group", meeting, timeout_s=way.timeout_s)):
        group = _gloo(host, port, 1 + ranks, way.timeout_s)
    session = _Session(server, way)
    try:
        with session.open():
            for bucket, last in buckets(named, way.bucket_bytes):
                names = [name for name, _ in bucket]
                body = {
                    "names": names,
                    "dtypes": [str(t.dtype).removeprefix("torch.") for _, t in bucket],
                    "shapes": [list(t.shape) for _, t in bucket],
                    "group_name": _GROUP,
                    "load_format": "flattened_bucket",
                    "selector": "target",
                }
                flat = torch.cat([t.contiguous().view(-1).view(torch.uint8) for _, t in bucket])
                with _beside(lambda body=body, last=last: session.send("update_weights_from_distributed", body, last=last)) as failed:
                    _broadcast(group, flat, way.timeout_s, failed)
    finally:
        server.call("destroy_weights_update_group", {"group_name": _GROUP}, timeout_s=way.timeout_s)
    return session.paused_s


def _aligned(bucket: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return sorted(bucket, key=lambda entry: -entry[1].element_size())


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, in memory of its own: a pickle has all of a storage."""
    tensor = tensor.cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@contextmanager
def _beside(call: Any) -> Iterator[threading.Event]:
    """Has a call, which waits for what is done meanwhile. The event: it has failed. Raises what it raised, rather than what came of it."""
    failed = threading.Event()
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as e:
            errors.append(e)
            failed.set()

    thread = threading.Thread(target=run, name="mooncake_ray.sglang", daemon=True)
    thread.start()
    try:
        yield failed
    except Exception:
        if failed.is_set():
            raise errors[0] from None
        raise
    thread.join()
    if errors:
        raise errors[0]


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]


def _gloo(host: str, port: int, size: int, timeout_s: float) -> Any:
    """Rank 0 of the group that SGLang makes: the names of its stores are those that torch gives to the stores of a group of this name."""
    dist = torch.distributed
    timeout = datetime.timedelta(seconds=timeout_s)
    store: Any = dist.TCPStore(host, port, size, is_master=True, timeout=timeout, wait_for_workers=False)
    for name in (_GROUP, f"{_GROUP}/", "cpu/"):
        store = dist.PrefixStore(name, store)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, 0, size, options)


def _broadcast(group: Any, data: torch.Tensor, timeout_s: float, failed: threading.Event) -> None:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    work = group.broadcast([data], options)
    done = threading.Event()

    def wait() -> None:
        try:
            work.wait()
        finally:
            done.set()

    threading.Thread(target=wait, name="mooncake_ray.broadcast", daemon=True).start()
    end = time.monotonic() + timeout_s
    while not done.wait(0.02):
        if failed.is_set():
            raise WeightSyncError("the server has given up the broadcast")
        if time.monotonic() > end:
            raise SyncTimeoutError(f"{data.nbytes} bytes were not broadcast within {timeout_s:g} s")
