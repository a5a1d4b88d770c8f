"""What the kernel and the machine offer: probed by doing, read from /proc and /sys. Judged elsewhere."""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mooncake_ray.machine import cgroup_limits, numa_nodes

__all__ = ["Host", "collect", "parse_meminfo"]

_MADV_POPULATE_WRITE = 23
_F_ADD_SEALS, _F_SEAL_SHRINK = 1033, 2
_PAGE = mmap.PAGESIZE
_NO_LIMIT = 1 << 62  # bytes: from here on, "none" in version 1's words


@dataclass(frozen=True, kw_only=True)
class Host:
    """Sizes in bytes; limits as the soft limit, -1 for none. A probe that failed says why, one that succeeded is empty."""

    kernel: str
    populate_error: str
    pidfd_error: str
    seals_error: str
    memory_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None
    cgroup_path: str
    open_files: int
    open_files_hard: int
    locked_bytes: int
    max_map_count: int
    overcommit: int
    huge_pages_total: int
    huge_pages_free: int
    huge_page_bytes: int
    shmem_thp: str
    numa_nodes: int
    shm_bytes: int
    shm_free_bytes: int


def collect() -> Host:
    """Looks at this machine."""
    info = parse_meminfo(_text("/proc/meminfo"))
    limit, path = min(((n, str(file)) for file, n in cgroup_limits().items() if n < _NO_LIMIT), default=(None, ""))
    files, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        shm = os.statvfs("/dev/shm")
        shm_bytes, shm_free = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    except OSError:
        shm_bytes = shm_free = 0
    return Host(
        kernel=platform.release(),
        populate_error=_error_of(_populate),
        pidfd_error=_error_of(_pidfd),
        seals_error=_error_of(_seals),
        memory_bytes=info.get("MemTotal", 0),
        available_bytes=info.get("MemAvailable", 0),
        cgroup_limit_bytes=limit,
        cgroup_path=path,
        open_files=files,
        open_files_hard=files_hard,
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        max_map_count=int(_text("/proc/sys/vm/max_map_count") or 0),
        overcommit=int(_text("/proc/sys/vm/overcommit_memory") or 0),
        huge_pages_total=info.get("HugePages_Total", 0),
        huge_pages_free=info.get("HugePages_Free", 0),
        huge_page_bytes=info.get("Hugepagesize", 0),
        shmem_thp=_chosen(_text("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        numa_nodes=max(1, len(numa_nodes())),
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free,
    )


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo: sizes in bytes, and counts as they are."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words:
            found[name] = int(words[0]) << (10 if words[1:] == ["kB"] else 0)
    return found


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _chosen(text: str) -> str:
    """`"always [never]"` → `"never"`."""
    return text.partition("[")[2].partition("]")[0]


def _error_of(probe: Callable[[], None]) -> str:
    try:
        probe()
    except OSError as e:
        return e.strerror or str(e)
    except AttributeError as e:  # this Python or C library lacks the call
        return str(e)
    return ""


def _populate() -> None:
    with mmap.mmap(-1, _PAGE) as m:
        m.madvise(_MADV_POPULATE_WRITE)


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _seals() -> None:
    fd = os.memfd_create("mooncake_ray_doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _PAGE)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)
        try:
            os.ftruncate(fd, 0)
        except PermissionError:
            return
        raise OSError("a sealed memfd could be shrunk")
    finally:
        os.close(fd)
