"""`Desk`: what a replica has open, for whatever answers requests."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from mooncake_ray.errors import MooncakeRayError, SnapshotNotFoundError
from mooncake_ray.serve.catalog import Entry, listing
from mooncake_ray.serve.contents import Volume, on_disk
from mooncake_ray.serve.leases import Leases
from mooncake_ray.serve.port import Port, listen
from mooncake_ray.serve.problems import Problem
from mooncake_ray.serve.settings import Settings
from mooncake_ray.serve.shelf import Shelf
from mooncake_ray.serve.signing import Signer
from mooncake_ray.serve.spans import Content
from mooncake_ray.serve.turnstile import Turnstile
from mooncake_ray.serve.upload import receive
from mooncake_ray.serve.wire import Connection, Request
from mooncake_ray.weights.delta_index import INDEX, Index
from mooncake_ray.weights.delta_log import DELTAS
from mooncake_ray.weights.file_source import LocalDirectory

__all__ = ["Desk"]

T = TypeVar("T")

logger = logging.getLogger("mooncake_ray")

_SWEEP_S = 1.0
_END_S = 5.0  # for what the disk is doing
_LOGGED = re.compile(rf"(?:{re.escape(INDEX)}|{DELTAS}/[\w.-]+\.patch|version-(\d{{8,19}})/(?:manifest\.json|[\w.-]+\.safetensors))")


class Desk:
    """One of a replica. Thread-safe. Ends with `close`."""

    def __init__(self, settings: Settings, *, host: str = "127.0.0.1", name: str = "", keeper: Any = None) -> None:
        """
        Args:
            host: The node's address.
            name: Of the replica, for people.
            keeper: Handle of what stores versions of a group.

        Raises:
            OSError: the data port is taken, or cannot be listened on.
        """
        self.settings, self.host, self.name, self.keeper = settings, settings.host or host, name, keeper
        self.store = settings.snapshots()
        self.leases = Leases(self.store)
        self.shelf = Shelf(self.store, Path(settings.files) if settings.files else None, settings.linger_s)
        self._signer = Signer()
        turnstile = Turnstile(settings.max_transfers, settings.max_waiting, settings.wait_s)
        listener = listen([settings.listen] if settings.listen else [self.host, host], settings.port)
        self.port = Port(self._find, self._receive, self._signer, turnstile, listener, idle_s=settings.idle_s)
        self._end = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="mooncake_ray.serve-desk", daemon=True)
        self._sweeper.start()

    def close(self) -> None:
        """Cuts transfers off."""
        self._end.set()
        self._sweeper.join(_END_S)
        self.port.close()
        self.shelf.sweep(all_of_them=True)

    # ---- what there is

    def listing(self) -> Sequence[Entry]:
        """All versions, rising."""
        return listing(self.store.versions(), self.index())

    def index(self) -> Index:
        """Of deltas; an empty one where there are none."""
        return Index.of(LocalDirectory(self.store.directory))

    def at(self, version: str | int, act: Callable[[int], T]) -> T:
        """Does it to the number of a version, or of the one that is `latest`: to the next of those if one is deleted meanwhile.

        Raises:
            SnapshotNotFoundError: it is not there.
        """
        while True:
            number = self.shelf.latest() if version == "latest" else int(version)
            try:
                return act(number)
            except SnapshotNotFoundError:
                if version != "latest" or self.shelf.latest() == number:
                    raise

    @contextmanager
    def volume(self, version: str | int) -> Iterator[Volume]:
        """A whole version, which stays within the `with` block. Raises as `Shelf.take`."""
        with ExitStack() as stack:
            yield self.at(version, lambda number: stack.enter_context(self.shelf.take(number)))

    # ---- addresses of the data port

    def address(self, method: str, *path: object) -> str:
        """Where a method may be used on a path for a while."""
        signed = self._signer.sign(method, _joined(path), int(time.time() + self.settings.link_s))
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port.number}{signed}"

    def address_of(self, *path: object) -> str:
        """Where the content at a path can be had for a while. Raises SnapshotNotFoundError: there is none."""
        with self._find(_joined(path)):
            return self.address("GET", *path)

    @contextmanager
    def _find(self, path: str) -> Iterator[Content]:
        """The content at a path of the data port."""
        kind, _, rest = path.lstrip("/").partition("/")
        if kind == "log":
            if (logged := _LOGGED.fullmatch(rest)) is None or not (self.store.directory / rest).is_file():
                raise SnapshotNotFoundError(f"there is no file {rest!r} among the deltas")
            with self.shelf.take(int(logged[1])) if logged[1] is not None else nullcontext():
                yield on_disk(self.store.directory / rest)
            return
        version, _, rest = rest.partition("/")
        what, _, name = rest.partition("/")
        if kind != "versions" or not version.isdigit() or what not in ("files", "tensors"):
            raise SnapshotNotFoundError(f"there is nothing at {path}")
        with self.shelf.take(int(version)) as volume:
            yield volume.file(name) if what == "files" else volume.tensor(name)

    def _receive(self, path: str, request: Request, connection: Connection) -> tuple[int, bytes]:
        kind, _, version = path.lstrip("/").partition("/")
        if kind != "versions" or not version.isdigit():
            raise Problem(404, "not-found", f"nothing can be stored at {path}")
        entries = receive(self.store, int(version), request, connection, self.settings.max_upload_bytes)
        return 201, json.dumps({"version": int(version), "nbytes": sum(e.nbytes for e in entries), "tensors": len(entries)}).encode()

    # ---- in the background

    def _sweep(self) -> None:
        while not self._end.wait(_SWEEP_S):
            try:
                self.leases.sweep()
                self.shelf.sweep()
                if self.settings.keep is not None:
                    self.store.clean()
            except (OSError, MooncakeRayError) as e:  # the disk may be well again later
                logger.warning("mooncake_ray: looking after %s: %s", self.store.directory, e)


def _joined(path: Sequence[object]) -> str:
    return "/" + "/".join(map(str, path))
