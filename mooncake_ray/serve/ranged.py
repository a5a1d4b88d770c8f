"""`RangeReader`: any range of one file of an endpoint, whatever happens to replicas and connections on the way."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

from mooncake_ray.errors import MooncakeRayError
from mooncake_ray.serve.caller import Again, Caller, asked, connect

__all__ = ["RangeReader"]

_PIECE = 1 << 20

Sink = Callable[[int, memoryview], None]


class RangeReader:
    """Keeps a connection to a data port, and asks the endpoint for another one when it breaks. Not thread-safe; ends with `close`."""

    def __init__(self, caller: Caller, path: str, etag: str) -> None:
        """
        Args:
            path: After /v1/, quoted.
            etag: Of the content that is meant: other content is an error.
        """
        self._caller, self._path, self._etag = caller, path, etag
        self._connection: http.client.HTTPConnection | None = None
        self._parts: SplitResult | None = None
        self._buffer = memoryview(bytearray(_PIECE))
        self.broken = 0
        """How often it was begun anew."""

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def read(self, begin: int, end: int, sink: Sink, *, until: float) -> None:
        """Gives bytes [begin, end) to the sink, in order, each once: where they begin, and memory that is good during the call.

        Raises:
            SyncTimeoutError: not all came in time.
            SnapshotNotFoundError: it is not there any more.
            SnapshotError: it is other content.
            PeerRefusedError: this reader may not read it.
            What the sink raises.
        """
        at = begin

        def on() -> Exception | None:
            """Returns what the sink has raised: that is no matter of the connection."""
            nonlocal at
            while at < end:
                was = at
                try:
                    for piece in self._pieces(at, end, until):
                        try:
                            sink(at, piece)
                        except Exception as e:
                            self.close()  # with what is left of the answer
                            return e
                        at += len(piece)
                except MooncakeRayError:
                    raise
                except (Again, OSError, http.client.HTTPException):
                    self.broken += 1
                    self._forget()
                    if at == was:  # else there is progress: at once again
                        raise
            return None

        if begin < end:
            error = self._caller.patiently(on, until, f"bytes {begin} to {end} of {self._caller.url}/v1/{self._path}")
            if error is not None:
                raise error

    def _pieces(self, begin: int, end: int, until: float) -> Iterator[memoryview]:
        patience = self._caller.patience(until)
        if self._parts is None:
            self._parts = urlsplit(self._caller.address("GET", self._path, until=until))
        if self._connection is None:
            self._connection = connect(self._parts, patience)
        headers = {"Range": f"bytes={begin}-{end - 1}", "If-Match": self._etag, "Accept-Encoding": "identity"}
        what = f"GET {self._parts.netloc}{self._parts.path}"
        response = asked(self._connection, self._parts, "GET", headers, ok=206, until=until)
        if not (response.headers.get("Content-Range") or "").startswith(f"bytes {begin}-{end - 1}/"):
            raise Again(f"{what}: asked for bytes {begin} to {end}, got {response.headers.get('Content-Range')}")
        at = begin
        while at < end:
            n = response.readinto(self._buffer[: min(_PIECE, end - at)])
            if not n:
                raise Again(f"{what}: the connection ended at byte {at} of {end}")
            yield self._buffer[:n]
            at += n
            if time.monotonic() >= until:
                raise Again("its time is over")
        response.read()  # so that the connection can be used again

    def _forget(self) -> None:
        """The next try begins with the endpoint, as that replica may be gone."""
        with suppress(OSError):
            self.close()
        self._parts = None
