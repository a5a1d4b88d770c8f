"""`receive`: a version that comes as one file of tensors, checked, and stored."""

from __future__ import annotations

import base64
import binascii
import hashlib
import mmap
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from mooncake_ray.errors import CorruptBlockError
from mooncake_ray.serve.contents import FILE_NAME, FILES
from mooncake_ray.serve.problems import Problem, disk_problems
from mooncake_ray.serve.wire import Connection, Request
from mooncake_ray.weights.snapshot import SnapshotStore
from mooncake_ray.weights.source import StateDictSource
from mooncake_ray.weights.tensor_file import Entry, parsed

__all__ = ["receive"]

_LENGTH = 8
_MOST_HEAD_BYTES = 100_000_000  # as the format has it
_PIECE = 1 << 20
_DIGEST = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/=]+):")
_FILE = re.compile(rf"{FILES}/({FILE_NAME})")


def receive(store: SnapshotStore, version: int, request: Request, connection: Connection, most_bytes: int) -> Sequence[Entry]:
    """Reads the body of a request and makes it a version of the store. Returns what tensors it has.

    Metadata of the file that is called `files/NAME` becomes a file that goes with the version; other metadata is kept beside it. A header
    `Content-Digest: sha-256=:…:` is compared with what came.

    Raises:
        Problem: it is too long, cut off, or not what its digest says; or the disk fails.
        StaleVersionError: this version, or a newer one, is there already.
        SnapshotError: another one is being stored.
    """
    if "content-length" not in request.headers:
        raise Problem(411, "length-required", "the body must come with a Content-Length")
    nbytes = int(request.headers["content-length"])
    if nbytes > most_bytes:
        raise Problem(413, "too-large", f"the body has {nbytes} bytes; {most_bytes} are the most")
    with disk_problems():
        store.refuse_stale(version)
    if request.headers.get("expect", "").lower() == "100-continue":
        connection.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    with ExitStack() as stack:
        with disk_problems():
            store.directory.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(tempfile.TemporaryFile(dir=store.directory)).fileno()
            if nbytes:
                os.posix_fallocate(file, 0, nbytes)
        _fill(file, nbytes, connection, request.headers.get("content-digest"))
        try:
            entries, metadata = _checked(file, nbytes)
        except CorruptBlockError as e:
            raise Problem(422, "bad-weights", str(e)) from None
        # Mapped, as it may be more than there is memory. Tensors keep the map, and with it the file, for as long as they live.
        with disk_problems():
            mapped = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    tensors = {entry.key: _tensor(mapped, entry, at) for entry, at in entries}
    files = {m[1]: text for name, text in metadata.items() if (m := _FILE.fullmatch(name))}
    rest = {name: text for name, text in metadata.items() if not _FILE.fullmatch(name)}
    with disk_problems():
        store.save(version, StateDictSource(tensors), extra={"metadata": rest, FILES: files})
    return [entry for entry, _ in entries]


def _fill(file: int, nbytes: int, connection: Connection, digest: str | None) -> None:
    due = _sha256_of(digest) if digest is not None else None
    sha = hashlib.sha256() if due is not None else None
    buffer, at = memoryview(bytearray(_PIECE)), 0
    while at < nbytes:
        n = connection.read_into(buffer[: min(_PIECE, nbytes - at)])
        if not n:
            raise Problem(408, "cut-off", f"{at} bytes came of {nbytes}")
        with disk_problems():
            os.pwrite(file, buffer[:n], at)
        if sha is not None:
            sha.update(buffer[:n])
        at += n
    if sha is not None and sha.digest() != due:
        raise Problem(422, "checksum", f"the {nbytes} bytes that came have the SHA-256 {sha.hexdigest()}, not the one in Content-Digest")


def _sha256_of(digest: str) -> bytes:
    if (found := _DIGEST.search(digest)) is None:
        raise Problem(422, "bad-request", "Content-Digest has no sha-256")
    try:
        return base64.b64decode(found[1], validate=True)
    except binascii.Error:
        raise Problem(422, "bad-request", "Content-Digest is not in base64") from None


def _checked(file: int, nbytes: int) -> tuple[list[tuple[Entry, int]], dict[str, str]]:
    """Entries, where each begins in the file, and metadata. Raises CorruptBlockError."""
    length = int.from_bytes(os.pread(file, _LENGTH, 0), "little")
    if nbytes < _LENGTH or length > min(_MOST_HEAD_BYTES, nbytes - _LENGTH):
        raise CorruptBlockError(f"{nbytes} bytes that begin with {length} as the length of a header are no file of tensors")
    begin = _LENGTH + length
    entries, metadata = parsed(os.pread(file, length, _LENGTH), nbytes - begin)
    if not entries:
        raise CorruptBlockError("there are no tensors in it")
    if empty := [entry.key for entry, _ in entries if not entry.nbytes]:
        raise CorruptBlockError(f"{empty[0]} has no elements: a version cannot keep it")
    return [(entry, begin + at) for entry, at in entries], metadata


def _tensor(mapped: mmap.mmap, entry: Entry, at: int) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    if at % dtype.itemsize:  # which other writers may do
        return torch.frombuffer(bytearray(mapped[at : at + entry.nbytes]), dtype=dtype).view(entry.shape)
    flat = torch.frombuffer(mapped, dtype=torch.uint8, count=entry.nbytes, offset=at)
    return flat.view(dtype).view(entry.shape)
