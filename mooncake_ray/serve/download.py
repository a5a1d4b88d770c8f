"""`Download`: one file, in parallel ranges, that goes on where it was when it, or the server, was killed."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

from mooncake_ray.errors import SyncAbortedError
from mooncake_ray.serve.caller import Caller
from mooncake_ray.serve.ranged import RangeReader

__all__ = ["CHUNK_BYTES", "Download"]

CHUNK_BYTES = 16 << 20


class Download:
    """Into `NAME.part`, with a journal `NAME.part.done` of which chunks are there. `finish` gives the file its name."""

    def __init__(self, path: Path, nbytes: int, etag: str, chunk_bytes: int = CHUNK_BYTES) -> None:
        """What another download of the same content has left is used; what one of other content has left is not.

        Raises:
            OSError: there is no room for it.
        """
        self.path, self.nbytes, self.etag, self._chunk = path, nbytes, etag, chunk_bytes
        self._part, self._journal = path.with_name(path.name + ".part"), path.with_name(path.name + ".part.done")
        self._lock = threading.Lock()
        self._head = json.dumps({"etag": etag, "nbytes": nbytes, "chunk": chunk_bytes})
        self._done = self._known()
        self.resumed_bytes = sum(self._size(n) for n in self._done)
        """That were there already."""
        if not self._done:
            self._journal.write_text(self._head + "\n")
        self._file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if self._done else os.O_TRUNC), 0o644)
        try:
            if nbytes:
                os.posix_fallocate(self._file, 0, nbytes)
            self._log = open(self._journal, "a")  # noqa: SIM115 - closed by close
        except BaseException:
            os.close(self._file)
            raise

    def fetch(self, caller: Caller, path: str, connections: int, on_bytes: Callable[[int], None], *, until: float) -> int:
        """Gets what is missing. Returns how often connections broke. Raises as `RangeReader.read`, and OSError of the disk.

        Args:
            path: After /v1/, quoted.
            on_bytes: Called by any of several threads with how many bytes more are there.
        """
        missing = sorted(set(range(-(-self.nbytes // self._chunk))) - self._done)
        left, ended = iter(missing), threading.Event()
        caller = caller.ended_by(ended)

        def sink(at: int, data: memoryview) -> None:
            if ended.is_set():
                raise SyncAbortedError(f"{self.path}: another connection's error has ended the download")
            os.pwrite(self._file, data, at)
            on_bytes(len(data))

        def work() -> int:
            with closing(RangeReader(caller, path, self.etag)) as reader:
                while (number := self._next(left)) is not None:
                    begin = number * self._chunk
                    reader.read(begin, begin + self._size(number), sink, until=until)
                    self._mark(number)
                return reader.broken

        with ThreadPoolExecutor(connections, "mooncake_ray.download") as pool:
            tasks = [pool.submit(work) for _ in missing[:connections]]
            try:
                done = wait(tasks, return_when=FIRST_EXCEPTION).done
            finally:
                ended.set()  # what the others would still do is of no use, nor after Ctrl-C
        return sum(task.result() for task in done)

    def again(self, stretches: Iterable[tuple[int, int]]) -> None:
        """These bytes are wrong: chunks that have any of them are to be fetched anew."""
        for begin, end in stretches:
            self._done -= set(range(begin // self._chunk, -(-end // self._chunk)))
        self._log.close()
        self._journal.write_text("\n".join([self._head, *map(str, sorted(self._done)), ""]))
        self._log = open(self._journal, "a")  # noqa: SIM115

    @property
    def file(self) -> int:
        """Descriptor of what there is so far."""
        return self._file

    def finish(self) -> None:
        """All is there, and right: it gets its name."""
        os.fsync(self._file)
        self._part.rename(self.path)
        self._journal.unlink(missing_ok=True)

    def close(self) -> None:
        self._log.close()
        os.close(self._file)

    def _size(self, number: int) -> int:
        return min(self._chunk, self.nbytes - number * self._chunk)

    def _next(self, left: Iterator[int]) -> int | None:
        with self._lock:
            return next(left, None)

    def _mark(self, number: int) -> None:
        with self._lock:
            self._done.add(number)
            self._log.write(f"{number}\n")
            self._log.flush()

    def _known(self) -> set[int]:
        with contextlib.suppress(OSError, ValueError):
            head, *lines = self._journal.read_text().splitlines(keepends=True)
            if head.rstrip("\n") == self._head and self._part.stat().st_size == self.nbytes:
                chunks = range(-(-self.nbytes // self._chunk))
                # The last line may have been cut off.
                return {int(line) for line in lines if line.endswith("\n") and int(line) in chunks}
        return set()
