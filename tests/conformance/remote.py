"""Peers as the suite sees them: in another process, or (loopback) in this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from peer_program import SECRET, Served

from mooncake_ray.errors import PeerLostError, TransportError
from mooncake_ray.transport import Peer

HOST = "127.0.0.1"


class OwnPeer:
    """A peer in this process. Has no process to stop."""

    def __init__(self, name: str) -> None:
        self._served = Served(name, HOST)
        self._facts = self._served.facts()

    @property
    def sizes(self) -> dict[int, int]:
        return {int(i): n for i, n in self._facts["sizes"].items()}

    def peer(self) -> Peer:
        return Peer(HOST, 0, self._facts["description"], redescribe=lambda: self._facts["description"])

    def grow(self) -> int:
        before = set(self.sizes)
        self._served.grow()
        self._facts = self._served.facts()
        (late,) = set(self.sizes) - before
        return late

    def kill(self) -> None:
        self._served.transport.close()

    def close(self) -> None:
        self._served.close()


class OtherPeer:
    """A peer in a process of its own."""

    def __init__(self, name: str, **options: Any) -> None:
        """`options`: of the transport there."""
        program = Path(__file__).with_name("peer_program.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program), name, HOST, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._facts: dict[str, Any] = self._hear()
        self._stopped: list[int] = []

    def _hear(self) -> dict[str, Any]:
        while line := self._process.stdout.readline():
            if line.startswith("{"):  # a library may print what it likes
                return json.loads(line)
        raise AssertionError(f"the peer ended with status {self._process.wait()}:\n{self._process.stderr.read()}")

    @property
    def sizes(self) -> dict[int, int]:
        return {int(i): n for i, n in self._facts["sizes"].items()}

    def peer(self) -> Peer:
        return Peer(
            HOST,
            self._facts["port"],
            self._facts["description"],
            exchange=self._exchange,
            link=self._link,
            redescribe=lambda: self._facts["description"],
        )

    def _exchange(self, blob: bytes) -> bytes:
        try:
            answer = self.ask(f"exchange {blob.hex()}")
        except (OSError, AssertionError) as e:
            raise PeerLostError(f"the peer is gone: {e}", "exchange") from e
        if "error" in answer:
            raise TransportError(answer["error"], "exchange")
        return bytes.fromhex(answer["answer"])

    def ask(self, command: str) -> dict[str, Any]:
        """Has the peer do something; returns what it then says."""
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._hear()

    def _link(self) -> Any:
        from mooncake_ray._native import peer

        return peer.Link.connect(HOST, self._facts["port"], SECRET, b"conformance-test")

    def grow(self) -> int:
        before = set(self.sizes)
        self._facts = self.ask("grow")
        (late,) = set(self.sizes) - before
        return late

    def _pids(self) -> list[int]:
        return [self._process.pid, self._facts["broker_pid"]]

    def stop(self) -> None:
        for pid in self._pids():
            os.kill(pid, signal.SIGSTOP)
            self._stopped.append(pid)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # the signal is not there at once, and till then it serves

    def resume(self) -> None:
        while self._stopped:
            os.kill(self._stopped.pop(), signal.SIGCONT)

    def kill(self) -> None:
        self._stopped.clear()
        for pid in self._pids():
            os.kill(pid, signal.SIGKILL)
        self._process.wait()
        _wait_for_end(self._facts["broker_pid"])

    def close(self) -> None:
        self.resume()
        self._process.communicate(timeout=60) if self._process.poll() is None else self._process.communicate()


def _wait_for_end(pid: int) -> None:
    import select

    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(fd, "rb", buffering=0, closefd=True):
        select.select([fd], [], [], 60)
