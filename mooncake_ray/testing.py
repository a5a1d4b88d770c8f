"""A leak detector for tests: a test that leaves something behind fails, and is told what.

    # conftest.py
    pytest_plugins = ["mooncake_ray.testing"]

    def test_mine(no_leaks): ...

Looked at is the difference over one test: leases and pins of this process, bytes in pools, file descriptors, files in /dev/shm and among
what brokers spill, maps of a pool's memory, Python threads, child processes, and brokers. What is shared by several tests must be there
before the first of them (a fixture of a wider scope is), or be allowed by overriding the fixture `leaks_allowed`.

Pools and brokers are those that this process and its children started after the first test that asks for `no_leaks`; a broker is known by a
variable in its environment.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import threading
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from mooncake_ray._native import pool
from mooncake_ray.cli import pools
from mooncake_ray.config import Config

__all__ = ["Allowed", "Usage", "find", "leaks_allowed", "measure", "no_leaks"]

_MARK = "PYTEST_NO_LEAKS"
_DEADLINE_S = 10.0  # a broker may linger, a session may still be closing; then what is left was forgotten
_POLL_S = 0.01
_COLLECT_EVERY_S = 1.0
_ARENA = "/memfd:mooncake_ray"
_FAILED = pytest.StashKey[bool]()


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """What may stay: shell patterns for the names of threads, the targets of descriptors, the access of maps of a pool (`rw-s`, …), and
    command lines."""

    threads: tuple[str, ...] = ()
    descriptors: tuple[str, ...] = ()
    maps: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    pool_bytes: int = 0
    """That may stay in each pool."""
    deadline_s: float = _DEADLINE_S
    """How long things may take to go."""


@dataclass(frozen=True)
class Usage:
    """What there is at one moment, and in the second of two also how to call it."""

    handles: int = 0
    """Leases and pins of this process."""
    pools: dict[str, int] = field(default_factory=dict)
    """Bytes in use by the name of the pool."""
    descriptors: dict[tuple[int, str], str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    maps: dict[str, str] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    processes: dict[int, str] = field(default_factory=dict)


def measure(before: Usage | None = None) -> Usage:
    """Looks at this process and what it started. With `before`, processes that were there then are not looked at again."""
    os.environ.setdefault(_MARK, f"{os.getpid()}-{secrets.token_hex(8)}")
    return Usage(
        handles=pool.live_handles(),
        pools=_pools(),
        descriptors=_descriptors(),
        files=_files(before),
        maps=_maps(),
        threads={t.ident or 0: t.name for t in threading.enumerate()},
        processes=_processes(before),
    )


def find(before: Usage, allowed: Allowed) -> list[str]:
    """What was left behind since `before`, a line each. Collects garbage and waits before it says that anything was."""
    end = time.monotonic() + allowed.deadline_s
    left, collect_at = _differences(before, measure(before), allowed), 0.0
    while left and (now := time.monotonic()) < end:
        if now >= collect_at:
            gc.collect()
            collect_at = now + _COLLECT_EVERY_S
        else:
            time.sleep(_POLL_S)
        left = _differences(before, measure(before), allowed)
    return left


@pytest.fixture
def leaks_allowed() -> Allowed:
    """What a test may leave behind. Override it where tests share something that comes to be during the first of them."""
    return Allowed()


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest, leaks_allowed: Allowed) -> Iterator[None]:
    """Fails a test that leaves something behind."""
    before = measure()
    yield
    if request.node.stash.get(_FAILED, False) or request.node.funcargs is None:  # interrupted
        return  # its frames, which its report keeps, keep what they refer to
    request.node.funcargs.clear()  # pytest keeps what fixtures gave, although they are done
    if left := find(before, leaks_allowed):
        pytest.fail("this test left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


# ---- comparing


def _differences(before: Usage, after: Usage, allowed: Allowed) -> list[str]:
    out = []
    if (more := after.handles - before.handles) > 0:
        out.append(f"{more} leases or pins of this process")
    for name, used in after.pools.items():
        if (more := used - before.pools.get(name, 0)) > allowed.pool_bytes:
            out.append(f"{more} bytes in pool {name}")
    new = [text for key, text in after.descriptors.items() if key not in before.descriptors]
    out += [text for text in new if not _matches(text.partition(" -> ")[2], allowed.descriptors)]
    out += [text for path, text in after.files.items() if path not in before.files]
    new = [text for addresses, text in after.maps.items() if addresses not in before.maps]
    out += [text for text in new if not _matches(text.split()[2], allowed.maps)]
    new = [name for ident, name in after.threads.items() if ident not in before.threads]
    out += [f"thread {name!r}" for name in new if not _matches(name, allowed.threads)]
    new = [text for pid, text in after.processes.items() if pid not in before.processes]
    return out + [text for text in new if not _matches(text.partition(": ")[2], allowed.processes)]


def _matches(text: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)


# ---- looking


def _pools() -> dict[str, int]:
    """The bytes in use, in memory and on disk, of each pool that this process or its children started."""
    used = {}
    listed = pools.listed()
    ours = _brokers() if listed else {}
    for p in listed:
        reading = pools.read(p, "no_leaks") if p.name in ours else None
        if reading is None or (snapshot := reading.snapshot) is None:
            continue
        used[p.name] = snapshot.used_bytes + snapshot.inline_bytes + snapshot.disk_bytes
    return used


def _brokers() -> dict[str, int]:
    """The pids of the brokers that were started under this process, by the pool's name."""
    found = {}
    for pid in _pids():
        words = _read(pid, "cmdline").split(b"\0")
        if words[0].endswith(b"mooncake-broker") and b"--name" in words and _is_marked(pid):
            found[os.fsdecode(words[words.index(b"--name") + 1])] = pid
    return found


def _descriptors() -> dict[tuple[int, str], str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of this list itself
            target = os.readlink(f"/proc/self/fd/{name}")
            found[int(name), target] = f"file descriptor {name} -> {target}"
    return found


def _files(before: Usage | None) -> dict[str, str]:
    """In /dev/shm and where brokers spill. New ones that are used by a process of before, or by one that is not ours, were not left behind."""
    root = Config.from_env().spill_root
    spilled: tuple[Path, ...] = ()
    with contextlib.suppress(FileNotFoundError):  # whoever was the last one there removed it meanwhile
        spilled = (*root.glob("*"), *root.glob("*/*")) if root else ()
    paths = [str(p) for p in (*Path("/dev/shm").glob("*"), *spilled)]
    new = [p for p in paths if before is not None and p not in before.files]
    theirs = _used_by_others(before) if new and before else set()
    return {p: f"file {p} ({_bytes_of(p)} bytes)" for p in paths if p not in theirs}


def _used_by_others(before: Usage) -> set[str]:
    found: set[str] = set()
    for pid in _pids():
        if pid == os.getpid() or (pid not in before.processes and _is_ours(pid)):
            continue
        for line in _read(pid, "maps").decode(errors="replace").splitlines():
            found.add(line.partition("/")[1] + line.partition("/")[2])
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found | {str(Path(p).parent) for p in found}


def _bytes_of(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:
        return 0


def _maps() -> dict[str, str]:
    found = {}
    for line in _read(os.getpid(), "maps").decode(errors="replace").splitlines():
        if _ARENA in line:
            addresses, access, *_ = line.split(None, 2)
            found[addresses] = f"map {addresses} {access} of a pool's memory"
    return found


def _processes(before: Usage | None) -> dict[int, str]:
    """Children, and whatever else was started under this process and is alive."""
    known = before.processes if before is not None else {}
    found = {}
    for pid in _pids():
        if pid == os.getpid():
            continue
        if pid in known:
            found[pid] = known[pid]
        elif before is None:
            found[pid] = ""
        elif _is_ours(pid) and not _cleans_up_after(pid, known):
            found[pid] = _described(pid)
    return found


def _described(pid: int) -> str:
    words = _read(pid, "cmdline").rstrip(b"\0").split(b"\0")
    line = os.fsdecode(b" ".join(words)) or "(a zombie, which nobody waited for)"
    return f"{'broker' if words[0].endswith(b'mooncake-broker') else 'process'} {pid}: {line}"


def _cleans_up_after(pid: int, brokers: Container[int]) -> bool:
    """Whether this is what waits for the end of one of these brokers, to remove what it spilled."""
    words = _read(pid, "cmdline").split(b"\0")
    return words[1:2] == [b"--clean-up-after"] and words[2].isdigit() and int(words[2]) in brokers


def _is_ours(pid: int) -> bool:
    stat = _read(pid, "stat").rpartition(b")")[2].split()  # state, parent, …
    return (len(stat) > 1 and int(stat[1]) == os.getpid()) or _is_marked(pid)


def _is_marked(pid: int) -> bool:
    return f"{_MARK}={os.environ.get(_MARK)}".encode() in _read(pid, "environ").split(b"\0")


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # gone meanwhile, or another user's
        return b""
