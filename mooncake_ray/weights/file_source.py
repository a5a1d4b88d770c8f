"""Files of a directory, on this machine or behind any HTTP server that gives files: what readers of snapshots and of deltas need of either."""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Protocol

from mooncake_ray.errors import ConfigError, CorruptBlockError, SnapshotNotFoundError, SyncTimeoutError, TransportError
from mooncake_ray.transfer.deadline import Pauses

__all__ = ["Directory", "HttpDirectory", "LocalDirectory", "source_of"]

_PIECE = 1 << 20


class Directory(Protocol):
    """Thread-safe."""

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes [begin, end) of a file; by default all.

        Raises:
            SnapshotNotFoundError: there is no such file.
            CorruptBlockError: it ends before `end`.
        """
        ...

    def where(self, name: str) -> str:
        """How to call a file to somebody."""
        ...


class LocalDirectory:
    """A path, which may be on a shared file system."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def where(self, name: str) -> str:
        return str(self.path / name)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        try:
            with open(self.path / name, "rb") as file:
                file.seek(begin)
                data = file.read() if end is None else file.read(end - begin)
        except FileNotFoundError:
            raise SnapshotNotFoundError(f"there is no {self.where(name)}") from None
        return _whole(data, self.where(name), begin, end)


class HttpDirectory:
    """A URL. A server that knows no ranges is read from the beginning of the file to the end of the range."""

    def __init__(self, url: str, *, timeout_s: float = 60.0) -> None:
        """`timeout_s`: for each read. What fails on the way is tried again until then."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"not an HTTP URL: {url!r}")
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s must be positive, got {timeout_s}")
        self.url, self.timeout_s = url.rstrip("/") + "/", timeout_s

    def where(self, name: str) -> str:
        return self.url + name

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """As `Directory.read`.

        Raises:
            SyncTimeoutError: not read in time.
            TransportError: the server refuses.
        """
        until = time.monotonic() + self.timeout_s
        pauses, why = Pauses(), "the server is slow"
        while True:
            try:
                return self._read(name, begin, end, until)
            except urllib.error.HTTPError as e:
                e.close()
                if e.code == 404:
                    raise SnapshotNotFoundError(f"there is no {self.where(name)}") from None
                if e.code == 416:
                    raise CorruptBlockError(f"{self.where(name)} ends before byte {begin}") from None
                if e.code < 500:
                    raise TransportError(
                        f"{self.where(name)}: {e.code} {e.reason}", "GET", 0, urllib.parse.urlsplit(self.url).netloc
                    ) from None
                why = f"{e.code} {e.reason}"
            except (OSError, http.client.HTTPException) as e:
                why = str(e) or type(e).__name__
            pause = pauses.next()
            if time.monotonic() + pause >= until:
                raise SyncTimeoutError(f"{self.where(name)}: not read within {self.timeout_s:g} s: {why}")
            time.sleep(pause)

    def _read(self, name: str, begin: int, end: int | None, until: float) -> bytes:
        if end is not None and end <= begin:
            return b""
        request = urllib.request.Request(self.url + urllib.parse.quote(name), headers={"Accept-Encoding": "identity"})
        if begin or end is not None:
            request.add_header("Range", f"bytes={begin}-{'' if end is None else end - 1}")
        with urllib.request.urlopen(request, timeout=max(0.001, until - time.monotonic())) as response:
            skip = 0 if response.status == 206 else begin
            if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
                raise http.client.HTTPException(f"asked for bytes from {begin} on, got {response.headers.get('Content-Range')}")
            pieces, got = [], 0
            wanted = None if end is None else skip + end - begin
            while wanted is None or got < wanted:
                if time.monotonic() >= until:
                    raise TimeoutError(f"{got} bytes came")
                piece = response.read1(_PIECE if wanted is None else min(_PIECE, wanted - got))
                if not piece:
                    break
                got += len(piece)
                pieces.append(piece)
            length = response.headers.get("Content-Length")
            if length is not None and got < (due := int(length) if wanted is None else min(int(length), wanted)):
                raise http.client.HTTPException(f"{got} bytes came of {due}")
        return _whole(b"".join(pieces)[skip:], self.where(name), begin, end)


def source_of(place: str | os.PathLike[str] | Directory, *, timeout_s: float = 60.0) -> Directory:
    """A path, an HTTP URL, or a directory already."""
    if isinstance(place, str) and place.startswith(("http://", "https://")):
        return HttpDirectory(place, timeout_s=timeout_s)
    return LocalDirectory(place) if isinstance(place, (str, os.PathLike)) else place


def _whole(data: bytes, where: str, begin: int, end: int | None) -> bytes:
    if end is not None and len(data) != end - begin:
        raise CorruptBlockError(f"{where} ends at byte {begin + len(data)}, before {end}")
    return data
