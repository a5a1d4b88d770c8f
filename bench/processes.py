"""What a program and all that it started use: memory, descriptors, threads. From /proc.

Memory that several processes share must be counted once. So the memory of a family of processes is taken as

* the private memory of each: its anonymous pages (`RssAnon`), among them what it has changed in a private mapping of the pool, plus
* each shared-memory file behind them once, at what it occupies (`st_blocks`): the arenas of the pool, memfds that its broker holds, and the
  file of Ray's object store, which the raylet holds.

Pages of programs and libraries are left out: they are the page cache's, and the same for all who are compared.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PeakMemory", "Usage", "family", "memory", "name_of", "shared_bytes", "usage"]

_PROC = Path("/proc")
_EVERY_S = 0.02
_BROKER = "mooncake-broker"
_HOLDERS = (_BROKER, "raylet")  # of shared memory; the others only map what these have
_SHARED = ("/memfd:", "/dev/shm/")
_BLOCK = 512  # bytes; the unit of st_blocks


@dataclass(frozen=True)
class Usage:
    """One process at one moment."""

    pss: int  # bytes: a page that n processes map counts an n-th
    own: int  # bytes: of these, what is not shared memory
    descriptors: int
    threads: int


def family(pid: int) -> list[int]:
    """The process, its descendants, and the brokers that end with one of them, which are nobody's children."""
    children, brokers = defaultdict(list), {}
    for entry in os.scandir(_PROC):
        if not entry.name.isdigit():
            continue
        other = int(entry.name)
        with contextlib.suppress(OSError):  # it has ended
            children[int(_stat(other)[1])].append(other)
            words = _words(other)
            if words[0].endswith(_BROKER) and "--watch-pid" in words:
                brokers[int(words[words.index("--watch-pid") + 1])] = other
    found = [pid]
    for member in found:
        found += children[member]
    return found + [brokers[member] for member in found if member in brokers]


def name_of(pid: int) -> str:
    """What people call a process: a Ray worker by its actor, a Python program by its module or script. "" if it has ended."""
    try:
        words = _words(pid)
    except OSError:
        return ""
    if not words[0] or words[0].startswith("ray::"):
        return words[0]
    program = Path(words[0]).name
    if program.startswith("python"):
        for option, value in itertools.pairwise(words):
            if option == "-m" or value.endswith(".py"):
                return Path(value).name
    return program


def usage(pid: int) -> Usage | None:
    """None if the process has ended."""
    try:
        sizes = _kilobytes((_PROC / str(pid) / "smaps_rollup").read_text())
        descriptors = len(os.listdir(_PROC / str(pid) / "fd"))
        threads = int(_stat(pid)[17])
    except OSError:
        return None
    return Usage(sizes["Pss"], sizes["Pss"] - sizes["Pss_Shmem"], descriptors, threads)


def memory(pids: list[int]) -> int:
    """Bytes of a family of processes, as the module says."""
    return sum(map(_private_bytes, pids)) + shared_bytes(pids)


def shared_bytes(pids: list[int]) -> int:
    """Bytes of the shared-memory files behind a family of processes, each once."""
    files: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            if not _words(pid)[0].endswith(_HOLDERS):
                continue
            for entry in os.scandir(_PROC / str(pid) / "fd"):
                if os.readlink(entry.path).startswith(_SHARED):
                    file = os.stat(entry.path)
                    files[file.st_dev, file.st_ino] = file.st_blocks * _BLOCK
    return sum(files.values())


class PeakMemory:
    """Looks at the memory of a program and all that it started, many times a second, while its block runs."""

    def __init__(self, pid: int) -> None:
        self._pids = family(pid)  # those that begin later are missed: start all that is needed before
        self.at_first = self.peak = memory(self._pids)  # bytes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.peak = max(self.peak, memory(self._pids))


def _private_bytes(pid: int) -> int:
    try:
        return _kilobytes((_PROC / str(pid) / "status").read_text()).get("RssAnon", 0)
    except OSError:
        return 0


def _kilobytes(text: str) -> dict[str, int]:
    """The lines `name: number kB`, in bytes."""
    words = (line.split() for line in text.splitlines())
    return {w[0].rstrip(":"): int(w[1]) << 10 for w in words if len(w) == 3 and w[2] == "kB"}


def _words(pid: int) -> list[str]:
    return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may have spaces: state, parent, …"""
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
