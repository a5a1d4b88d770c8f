"""`EngineProcess`: an inference server, with its processes in a group of their own, and what they say in a file."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

from mooncake_ray.engines.http import JSONClient
from mooncake_ray.errors import WeightSyncError

__all__ = ["EngineProcess", "free_port", "omp_binding"]

_START_S = 600.0
_STOP_S = 30.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def omp_binding(name: str, ranks: int) -> dict[str, str]:
    """Gives each of several ranks a core, as far as there are any."""
    return {name: "|".join(str(n % (os.cpu_count() or 1)) for n in range(ranks))} if ranks > 1 else {}


class EngineProcess:
    """Starts at once. Subclasses know what to start."""

    name: ClassVar[str]
    up: ClassVar[str]
    """The route that answers once it serves."""
    shared: ClassVar[tuple[str, ...]]
    """How names of files begin that its processes share memory by, which nobody tidies up when they are killed."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], port: int, log: Path) -> None:
        self.log, self.port = log, port
        self.url = f"http://127.0.0.1:{port}"
        self.client = JSONClient(self.url)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def ready(self) -> Self:
        """Waits until it serves. Raises RuntimeError with what it has said last; it is killed then."""
        end = time.monotonic() + _START_S
        while not self.answers(self.up, timeout_s=5.0):
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"{self.name} did not start:\n{self.said()}")
            time.sleep(0.2)
        return self

    def answers(self, route: str, *, timeout_s: float = 20.0) -> bool:
        try:
            self.client.get(route, timeout_s=timeout_s)
        except WeightSyncError:
            return False
        return self.process.poll() is None

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def pids(self, word: str = "") -> Iterator[int]:
        """Of its processes that have a word in their command, as the engine titles them: "scheduler", say."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                session = (entry / "stat").read_text().rpartition(")")[2].split()[3]
                if int(session) == self.process.pid and word in (entry / "cmdline").read_text():
                    yield int(entry.name)

    def signal(self, number: int, word: str = "") -> None:
        for pid in list(self.pids(word)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """All at once; and away with what they shared."""
        paths = {path for pid in self.pids() for path in self._mapped(pid)}
        self.signal(signal.SIGKILL)
        self.process.wait(_STOP_S)
        for path in paths:
            path.unlink(missing_ok=True)

    def stop(self) -> None:
        """As an operator would; killed if that takes long."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_S)
        self.kill()

    def _mapped(self, pid: int) -> Iterator[Path]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = Path(line.split()[-1])
                if path.parent == Path("/dev/shm") and path.name.startswith(self.shared):
                    yield path
