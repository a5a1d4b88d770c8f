"""The subjects' processes as the bench sees them: started, told what to do, ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.serving import ENVIRONMENTS

__all__ = ["Fleet", "Popen", "ServerError", "note"]

Popen = Callable[..., "subprocess.Popen[bytes]"]
_ROOT = Path(__file__).resolve().parents[1]
_START_TRIES = 3
_START_S = 120.0
_ANSWER_S = 300.0
_STOP_S = 15.0


class ServerError(RuntimeError):
    """A subject's process did not start, died, or could not do what it was told."""


def note(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


class _Process:
    def __init__(self, kind: str, command: Sequence[str], popen: Popen = subprocess.Popen) -> None:
        self.kind = kind
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MOONCAKE_RAY"))}
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        self._process = popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=_ROOT,
            env={**kept, **ENVIRONMENTS[kind], "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the bench, which then ends its processes
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, **request: Any) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ServerError(f"the {self.kind} process died:\n{self.log()}") from None

    def receive(self, timeout_s: float = _ANSWER_S) -> Any:
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise ServerError(f"the {self.kind} process has not answered within {timeout_s} s:\n{self.log()}")
        line = self._process.stdout.readline()
        if not line:
            raise ServerError(f"the {self.kind} process died:\n{self.log()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ServerError(f"the {self.kind} process failed:\n{answer['error']}")
        return answer.get("result")

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]

    def let_go(self) -> None:
        """Tells the process to end."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def stop(self) -> None:
        """Lets the process end by itself, which takes its Ray down; or else makes it."""
        self.let_go()
        for kill in (None, signal.SIGTERM, signal.SIGKILL):
            if kill is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, kill)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
                break
        self._log.close()


class Fleet:
    """All processes of a run. A context manager: leaving it ends them."""

    def __init__(
        self, module: str, subjects: Mapping[str, Sequence[str]], *arguments: object, places: Mapping[str, Popen] | None = None
    ) -> None:
        """
        Args:
            module: What the processes run (see `serving.serve`), with their kind as the first argument.
            subjects: Those that each kind of process holds.
            arguments: Further ones of every process.
            places: What starts the processes of a kind, where it is not this machine that they run on.
        """
        self._places = places or {}
        self._command, self._held, self._arguments = module, subjects, [str(a) for a in arguments]
        self._processes: dict[str, _Process] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        processes = list(self._processes.values())
        for process in processes:
            process.let_go()
        for process in processes:
            process.stop()

    def start(self, kinds: Sequence[str]) -> None:
        """One after the other: Ray has only so long to start."""
        for kind in kinds:
            began = time.monotonic()
            for attempt in range(1, _START_TRIES + 1):
                process = self._processes[kind] = _Process(
                    kind, [self._command, kind, *self._arguments], self._places.get(kind, subprocess.Popen)
                )
                try:
                    process.receive(_START_S)
                    break
                except ServerError as e:
                    process.stop()
                    if attempt == _START_TRIES:
                        del self._processes[kind]
                        raise
                    note(f"{kind}: start {attempt} of {_START_TRIES} failed: {str(e).strip().splitlines()[-1]}")
            note(f"{kind}: ready after {time.monotonic() - began:.0f} s")

    def all(self, subjects: Sequence[str], **request: Any) -> None:
        """Has every process do something with those of the subjects that it holds, all at the same time."""
        told = []
        for kind, process in self._processes.items():
            if here := [name for name in subjects if name in self._held[kind]]:
                process.send(subjects=here, **request)
                told.append(process)
        for process in told:
            process.receive()

    def ask(self, subject: str, **request: Any) -> Any:
        """Has the process of one subject do something, while every other process waits."""
        process = self._of(subject)
        process.send(subject=subject, **request)
        return process.receive()

    def pid(self, subject: str) -> int:
        """The process that holds a subject; what it started are its children."""
        return self._of(subject).pid

    def _of(self, subject: str) -> _Process:
        return next(p for kind, p in self._processes.items() if subject in self._held[kind])
