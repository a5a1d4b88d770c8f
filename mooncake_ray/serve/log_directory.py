"""`LogDirectory`: the deltas of an endpoint, for a `DeltaReader`; with the endpoint's token, where it asks for one."""

from __future__ import annotations

import time
from urllib.parse import quote

from mooncake_ray.errors import CorruptBlockError, SnapshotError
from mooncake_ray.serve.caller import Caller, body_of

__all__ = ["LogDirectory"]


class LogDirectory:
    """A `Directory`. Thread-safe."""

    def __init__(self, caller: Caller, timeout_s: float) -> None:
        """`timeout_s`: for each read. What fails on the way is tried again until then."""
        self._caller, self._timeout_s = caller, timeout_s

    def where(self, name: str) -> str:
        return f"{self._caller.url}/v1/log/{name}"

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """As `Directory.read`; also raises SyncTimeoutError, and PeerRefusedError: this client may not read it."""
        if end is not None and end <= begin:
            return b""
        until = time.monotonic() + self._timeout_s
        try:
            return self._caller.patiently(lambda: self._once(name, begin, end, until), until, self.where(name))
        except SnapshotError as e:
            if type(e) is not SnapshotError:
                raise
            raise CorruptBlockError(f"{self.where(name)} ends before byte {begin}: {e}") from None

    def _once(self, name: str, begin: int, end: int | None, until: float) -> bytes:
        headers = {"Range": f"bytes={begin}-{'' if end is None else end - 1}"} if begin or end is not None else {}
        with self._caller.payload("GET", f"log/{quote(name)}", headers, ok=206 if headers else 200, until=until) as response:
            data = body_of(response, until)
        if end is not None and len(data) != end - begin:
            raise CorruptBlockError(f"{self.where(name)} ends at byte {begin + len(data)}, before {end}")
        return data
