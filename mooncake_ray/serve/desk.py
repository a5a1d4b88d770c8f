"""`Desk`: what a replica has open, for whatever answers requests."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mooncake_ray.errors import SnapshotNotFoundError
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
from mooncake_ray.weights.snapshot import SnapshotStore

__all__ = ["Desk"]

logger = logging.getLogger("mooncake_ray")

_SWEEP_S = 1.0
_ALL = 1 << 62
_LOGGED = re.compile(rf"(?:{re.escape(INDEX)}|{DELTAS}/[\w.-]+\.patch|version-(\d{{8,19}})/(?:manifest\.json|[\w.-]+\.safetensors))$")


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
        self.store = SnapshotStore(settings.store, keep=settings.keep or _ALL)
        self.leases = Leases(self.store)
        self.shelf = Shelf(self.store, Path(settings.files) if settings.files else None, settings.linger_s)
        self.watch: Any = None
        """Of the coroutines that answer."""
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
        self._sweeper.join()
        self.port.close()
        self.shelf.sweep(all_of_them=True)

    # ---- what there is

    def listing(self) -> Sequence[Entry]:
        """All versions, rising."""
        return listing(self.store.versions(), self.index())

    def index(self) -> Index:
        """Of deltas; an empty one where there are none."""
        return Index.of(LocalDirectory(self.store.directory))

    def number(self, version: str | int) -> int:
        """Raises SnapshotNotFoundError: the latest one is asked for, and there is none."""
        return self.shelf.latest() if version == "latest" else int(version)

    @contextmanager
    def volume(self, version: str | int) -> Iterator[Volume]:
        """A whole version, which stays within the `with` block. Raises as `Shelf.take`."""
        with self.shelf.take(self.number(version)) as volume:
            yield volume

    # ---- addresses of the data port

    def address(self, method: str, *path: str) -> str:
        """Where a method may be used on a path for a while."""
        signed = self._signer.sign(method, "/" + "/".join(path), int(time.time() + self.settings.link_s))
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port.number}{signed}"

    def check_logged(self, path: str) -> None:
        """Raises SnapshotNotFoundError: that is no file of a log of deltas."""
        if not _LOGGED.match(path) or not (self.store.directory / path).is_file():
            raise SnapshotNotFoundError(f"there is no file {path!r} among the deltas")

    @contextmanager
    def _find(self, path: str) -> Iterator[Content]:
        """The content at a path of the data port."""
        kind, _, rest = path.lstrip("/").partition("/")
        if kind == "log":
            self.check_logged(rest)
            version = _LOGGED.match(rest)[1]
            if version is None:
                yield on_disk(self.store.directory / rest)
            else:
                with self.shelf.take(int(version)):
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
        manifest = receive(self.store, int(version), request, connection, self.settings.max_upload_bytes)
        nbytes = sum(m.nbytes for m in manifest.metas)
        return 201, json.dumps({"version": manifest.version, "nbytes": nbytes, "tensors": len(manifest.metas)}).encode()

    # ---- in the background

    def _sweep(self) -> None:
        while not self._end.wait(_SWEEP_S):
            try:
                self.leases.sweep()
                self.shelf.sweep()
                if self.settings.keep is not None:
                    self.store.clean()
            except OSError as e:  # the disk may be well again later
                logger.warning("mooncake_ray: looking after %s: %s", self.store.directory, e)
