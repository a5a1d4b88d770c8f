"""`WeightClient`: reads versions of a model from an endpoint, and publishes them. Needs nothing of Ray or Serve."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mooncake_ray.errors import ChecksumError, ConfigError, MooncakeRayError, SnapshotNotFoundError, SyncTimeoutError, TransportError
from mooncake_ray.serve.body import FileBody, TensorsBody
from mooncake_ray.serve.caller import Caller, body_of, parsed, quoted
from mooncake_ray.serve.contents import FILE_NAME, FILES, MODEL
from mooncake_ray.serve.download import Download
from mooncake_ray.serve.log_directory import LogDirectory
from mooncake_ray.serve.ranged import RangeReader
from mooncake_ray.weights.digest import content_digest
from mooncake_ray.weights.manifest import few

__all__ = ["Downloaded", "Pin", "WeightClient"]

_PIN_S = 120.0
_MOST_HOLDER = 200  # characters, as the endpoint has it
_LONGEST_POLL_S = 30.0
_TRIES = 3  # a damaged range is fetched again


@dataclass(frozen=True)
class Downloaded:
    """What `WeightClient.download` did."""

    version: int
    files: tuple[Path, ...]
    nbytes: int
    """Of all files."""
    resumed_bytes: int
    """That an earlier try had left."""
    broken: int
    """How often connections broke, and it went on."""


class Pin:
    """Keeps a version, and is renewed in the background until the `with` block ends; after that, or when this process dies, the version may
    go."""

    def __init__(self, caller: Caller, said: Mapping[str, Any], ttl_s: float, timeout_s: float) -> None:
        self._caller, self._ttl_s, self._timeout_s = caller, min(ttl_s, said["ttl_s"]), timeout_s
        self.id, self.version = str(said["id"]), int(said["version"])
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="mooncake_ray.pin", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        caller = self._caller.ended_by(self._end)
        while not self._end.wait(self._ttl_s / 3):
            with contextlib.suppress(MooncakeRayError):  # the next one may do; if it is over, reading says so
                until = time.monotonic() + self._ttl_s / 3
                caller.call("PUT", quoted("pins", self.id), body={"ttl_s": self._ttl_s}, until=until)

    def release(self) -> None:
        """The version may go. Does nothing the second time."""
        if self._end.is_set():
            return
        self._end.set()
        self._thread.join()
        with contextlib.suppress(SnapshotNotFoundError, SyncTimeoutError):  # it ends by itself
            until = time.monotonic() + self._timeout_s
            self._caller.call("DELETE", quoted("pins", self.id), until=until, ok=(204,))

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class WeightClient:
    """Of one endpoint. Thread-safe.

        client = WeightClient("http://head:8000")
        version = client.wait(after=11)
        client.download(version, "model")           # what `transformers` loads
        client.tensors(version, ["lm_head.weight"])

    What fails on the way (a connection that breaks, a replica that is killed and started again, an endpoint that is busy) is tried again until
    the time is over; what was read is compared with digests before anybody gets it.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 60.0, idle_s: float = 30.0, connections: int = 4) -> None:
        """
        Args:
            url: Of the endpoint, without /v1.
            token: What it asks for to read, or to publish.
            timeout_s: Of each call that has no other.
            idle_s: How long a server may say nothing before the connection is given up.
            connections: That a download uses at a time.

        Raises:
            ConfigError: it is no URL, or a number is out of range.
        """
        if connections < 1 or not timeout_s > 0:
            raise ConfigError(f"connections and timeout_s must be positive, got {connections} and {timeout_s}")
        self._caller = Caller(url, token, idle_s=idle_s)
        self.timeout_s, self.connections = timeout_s, connections

    def _get(self, path: str, until: float | None = None) -> Any:
        return self._caller.call("GET", path, until=self._until(None) if until is None else until).json()

    def _until(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    # ---- what there is

    def versions(self) -> list[int]:
        """Those that are there whole, rising."""
        return [v["version"] for v in self._get("versions")["versions"] if v["whole"]]

    def describe(self, version: int | str = "latest") -> dict[str, Any]:
        """A version's size, files and `extra`. Raises SnapshotNotFoundError."""
        return self._get(quoted("versions", version))

    def manifest(self, version: int | str = "latest") -> dict[str, Any]:
        """A version's tensors, and where they are in `model.safetensors`. Raises SnapshotNotFoundError."""
        return self._manifest(version)

    def _manifest(self, version: int | str, until: float | None = None) -> dict[str, Any]:
        return self._get(quoted("versions", version, "manifest"), until)

    def health(self) -> dict[str, Any]:
        """Of a replica, whichever answers."""
        return self._get("health")

    def wait(self, after: int = -1, *, whole: bool = True, timeout_s: float | None = None) -> int:
        """Waits for a version that is newer than `after`; returns the newest one.

        Args:
            whole: One that can be read as it is; else also one that only deltas lead to.

        Raises:
            SyncTimeoutError: there was none in time.
        """
        until = self._until(timeout_s)
        while (left := until - time.monotonic()) > 0:
            ask = min(left, _LONGEST_POLL_S)
            answer = self._caller.call(
                "GET",
                f"next?after={after}&timeout_s={ask:.3f}&what={'whole' if whole else 'any'}",
                until=until + 1,
                idle_s=ask + self._caller.idle_s,
                ok=(200, 204),
            )
            if answer.status == 200:
                return int(answer.json()["version"])
        raise SyncTimeoutError(
            f"{self._caller.url}: no version newer than {after} within {self.timeout_s if timeout_s is None else timeout_s:g} s"
        )

    def pin(self, version: int | str, ttl_s: float = _PIN_S, *, holder: str = "") -> Pin:
        """Keeps a version. Raises SnapshotNotFoundError: it is not there."""
        return self._pin(version, ttl_s, holder, self._until(None))

    def _pin(self, version: int | str, ttl_s: float, holder: str, until: float) -> Pin:
        path = quoted("versions", version, "pins")
        answer = self._caller.call("POST", path, body={"ttl_s": ttl_s, "holder": holder}, until=until, ok=(201,))
        return Pin(self._caller, answer.json(), ttl_s, self.timeout_s)

    # ---- reading

    def download(
        self,
        version: int | str,
        folder: str | os.PathLike[str],
        *,
        on_progress: Callable[[int, int], None] | None = None,
        verify: bool = True,
        timeout_s: float = 3600.0,
    ) -> Downloaded:
        """Makes a folder that `transformers` loads: `model.safetensors`, and the files that go with the version.

        A folder in which an earlier try was interrupted is gone on with. The version stays meanwhile.

        Args:
            folder: Made if it is not there. Files in it of the same names are replaced, once the new ones are whole.
            on_progress: Called by any of several threads with the bytes that are there and those of all.
            verify: Compare tensors' content digests.

        Raises:
            SnapshotNotFoundError: it is not there.
            ChecksumError: what came is not what was published, again and again.
            SyncTimeoutError: not done in time. What came stays for the next try.
            TransportError: it has files of names that would be somewhere else.
            OSError: the disk is full, or fails.
        """
        until, target = self._until(timeout_s), Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        with self._pin(version, _PIN_S, f"download to {target.name}"[:_MOST_HOLDER], until) as pin:
            about = self._get(quoted("versions", pin.version), until)
            if strange := [f["name"] for f in about["files"] if not re.fullmatch(FILE_NAME, f["name"])]:
                raise TransportError(
                    f"version {pin.version} of {self._caller.url} has a file {strange[0]!r}, which is no name of one", "GET"
                )
            total = sum(f["nbytes"] for f in about["files"])
            progress = _Progress(on_progress, total)
            resumed = broken = 0
            for file in about["files"]:
                download = Download(target / file["name"], file["nbytes"], file["etag"])
                with contextlib.closing(download):
                    progress.add(download.resumed_bytes)
                    resumed += download.resumed_bytes
                    path = quoted("versions", pin.version, "files", file["name"])
                    broken += self._fetch(download, path, progress, verify and file["name"] == MODEL, pin.version, until)
                    download.finish()
            return Downloaded(pin.version, tuple(target / f["name"] for f in about["files"]), total, resumed, broken)

    def _fetch(self, download: Download, path: str, progress: _Progress, verify: bool, version: int, until: float) -> int:
        broken = 0
        for left in reversed(range(_TRIES)):
            broken += download.fetch(self._caller, path, self.connections, progress.add, until=until)
            wrong = _wrong(download, self._manifest(version, until)) if verify else []
            if not wrong:
                return broken
            if not left:
                break
            download.again((t["begin"], t["end"]) for t in wrong)
        raise ChecksumError(
            f"version {version} of {self._caller.url}: what came is not what was published, in {few([t['name'] for t in wrong])}"
        )

    def tensors(self, version: int | str, names: Iterable[str] | None = None, *, timeout_s: float | None = None) -> dict[str, torch.Tensor]:
        """Tensors, whole, by name; by default all of them.

        Raises:
            SnapshotNotFoundError: the version, or a tensor, is not there.
            ChecksumError: what came is not what was published.
        """
        until = self._until(timeout_s)
        manifest = self._manifest(version, until)
        known = {t["name"]: t for t in manifest["tensors"]}
        wanted = list(known) if names is None else list(names)
        if lacking := [name for name in wanted if name not in known]:
            raise SnapshotNotFoundError(f"version {manifest['version']} has none of these tensors: {few(lacking)}")
        out: dict[str, torch.Tensor] = {}
        path = quoted("versions", manifest["version"], "files", MODEL)
        with contextlib.closing(RangeReader(self._caller, path, manifest["etag"])) as reader:
            for name in sorted(wanted, key=lambda n: known[n]["begin"]):
                out[name] = _read(reader, known[name], until)
        return {name: out[name] for name in wanted}

    def deltas(self, *, timeout_s: float | None = None) -> LogDirectory:
        """What a `DeltaReader` takes for its place: `DeltaReader(client.deltas(), shard)`. `timeout_s`: for each read."""
        return LogDirectory(self._caller, self.timeout_s if timeout_s is None else timeout_s)

    # ---- publishing

    def publish(
        self,
        version: int,
        what: str | os.PathLike[str] | Mapping[str, torch.Tensor],
        *,
        files: Mapping[str, str] | None = None,
        timeout_s: float = 3600.0,
    ) -> dict[str, Any]:
        """Stores a version, which must be newer than all that are there.

        Args:
            what: A file of the safetensors format; or whole tensors by name, which must not change meanwhile.
            files: With tensors: small files that go with the version, their text by name.

        Raises:
            StaleVersionError: this version, or a newer one, is there already (maybe from an earlier try whose answer was lost).
            PeerRefusedError: this client may not publish.
            SnapshotError: the file cannot be read, or becomes shorter meanwhile.
            SyncTimeoutError: not done in time.
        """
        if isinstance(what, Mapping):
            body = TensorsBody(what, {f"{FILES}/{name}": text for name, text in (files or {}).items()})
        elif files:
            raise ConfigError("files go with tensors; a file has them in its metadata")
        else:
            body = FileBody(what)
        headers = body.headers  # its time does not count
        until = self._until(timeout_s)
        path = quoted("versions", version)

        def once() -> dict[str, Any]:
            with self._caller.payload("PUT", path, headers, body.pieces(), ok=201, until=until) as response:
                return parsed(body_of(response, until))

        return self._caller.patiently(once, until, f"publishing version {version}")

    def store(self, version: int | None = None, *, timeout_s: float = 600.0) -> int:
        """Has the endpoint store the version that its group is at; returns which one.

        Raises:
            SnapshotNotFoundError: the group is at another one than `version`, or the endpoint has no group.
            StaleVersionError: it is stored already, or a newer one is.
        """
        answer = self._caller.call("POST", "versions", body={"version": version}, until=self._until(timeout_s), idle_s=timeout_s, ok=(201,))
        return int(answer.json()["version"])


class _Progress:
    """Adds up."""

    def __init__(self, tell: Callable[[int, int], None] | None, total: int) -> None:
        self._tell, self._total, self._there, self._lock = tell, total, 0, threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._there += nbytes
            there = min(self._there, self._total)
        if self._tell is not None:
            self._tell(there, self._total)


def _wrong(download: Download, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tensors of a file that are not what was published."""
    with mmap.mmap(download.file, 0, access=mmap.ACCESS_COPY) as mapped:
        # The tensor is gone before the map is closed.
        return [t for t in manifest["tensors"] if _digest_of(_tensor(t, memoryview(mapped)[t["begin"] : t["end"]])) != t["digest"]]


def _read(reader: RangeReader, about: Mapping[str, Any], until: float) -> torch.Tensor:
    begin = about["begin"]
    data = memoryview(bytearray(about["end"] - begin))

    def sink(at: int, piece: memoryview) -> None:
        data[at - begin : at - begin + len(piece)] = piece

    reader.read(begin, about["end"], sink, until=until)
    tensor = _tensor(about, data)
    if _digest_of(tensor) != about["digest"]:
        raise ChecksumError(f"{about['name']}: what came is not what was published")
    return tensor


def _tensor(about: Mapping[str, Any], data: memoryview) -> torch.Tensor:
    dtype, shape = getattr(torch, about["dtype"]), tuple(about["shape"])
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


def _digest_of(tensor: torch.Tensor) -> str:
    return f"{content_digest(tensor, (0,) * tensor.dim(), tensor.shape):016x}"
