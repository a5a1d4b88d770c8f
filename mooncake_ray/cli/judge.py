"""Whether what was found is good enough, and what to do where it is not. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mooncake_ray.cli.host_facts import Host
from mooncake_ray.cli.software_facts import Software
from mooncake_ray.cli.spill_facts import Leftover, Spill
from mooncake_ray.cli.text import count, size

__all__ = ["Finding", "host", "leftovers", "software", "spill"]

OK, WARNING, ERROR = "ok", "warning", "error"
_FILES_PER_CLIENT = 3  # descriptors a broker holds for each process: requests, events, pidfd
_MANY_FILES = 65536
_CLIENTS = 512  # processes on one node that there should be room for
_MAPS = 65530  # the kernel's default
_SHM_SHARE = 0.3  # of the memory: what Ray asks /dev/shm for by default
_SPILL_SHARE = 1.0  # of the pool: free space on disk worth having
_RAY_FROM, _RAY_TO, _TORCH_FROM = (2, 50), (2, 60), (2, 5)
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_ON_NETWORK = frozenset({"nfs", "nfs4", "cifs", "ceph", "lustre", "fuse.sshfs", "9p"})


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's."""

    check: str
    level: str
    found: str
    advice: str = ""


def _finding(check: str, good: bool, found: str, advice: str, level: str = WARNING) -> Finding:
    return Finding(check, OK, found) if good else Finding(check, level, found, advice)


def host(h: Host, pool_bytes: int, rdma: bool) -> list[Finding]:
    """The kernel, the memory and the limits. `pool_bytes`: the capacity that a pool would have here (0: not known)."""
    return [*_kernel(h), *_memory(h, pool_bytes), *_limits(h, rdma), *_pages(h)]


def _kernel(h: Host) -> Iterable[Finding]:
    yield _finding(
        "populate",
        not h.populate_error,
        f"MADV_POPULATE_WRITE {'works' if not h.populate_error else f'does not work: {h.populate_error}'} (Linux {h.kernel})",
        "use Linux 5.14 or newer; older ones populate memory more slowly",
    )
    yield _finding(
        "pidfd",
        not h.pidfd_error,
        f"pidfd_open {'works' if not h.pidfd_error else f'does not work: {h.pidfd_error}'}",
        "use Linux 5.3 or newer, and allow pidfd_open in the container's seccomp profile; without it a forked child can hide a death",
    )
    yield _finding(
        "memfd",
        not h.seals_error,
        f"sealed memfd {'works' if not h.seals_error else f'does not work: {h.seals_error}'}",
        "allow memfd_create and F_ADD_SEALS in the container's seccomp profile; there is no pool without them",
        ERROR,
    )


def _memory(h: Host, pool_bytes: int) -> Iterable[Finding]:
    limit = min(h.memory_bytes, h.cgroup_limit_bytes or h.memory_bytes)
    bound = f"cgroup limit {size(h.cgroup_limit_bytes)} by {h.cgroup_path}" if h.cgroup_limit_bytes is not None else "no cgroup limit"
    found = f"{size(h.memory_bytes)}, {size(h.available_bytes)} available, {bound}; a pool would have {size(pool_bytes)}"
    if pool_bytes > limit:
        yield Finding(
            "memory", ERROR, found, f"set MOONCAKE_RAY_CAPACITY_BYTES to less than {size(limit)}: the kernel would kill processes"
        )
    elif pool_bytes > limit // 2:
        yield Finding("memory", WARNING, found, "more than half of the memory; give Ray a smaller object_store_memory in return")
    else:
        yield _finding(
            "memory", pool_bytes <= h.available_bytes, found, "end what uses the memory, or set MOONCAKE_RAY_CAPACITY_BYTES lower"
        )
    yield _finding(
        "overcommit",
        h.overcommit != 2,
        f"vm.overcommit_memory {h.overcommit}",
        "with 2 the kernel may refuse memory that is free: set it to 0, or raise vm.overcommit_ratio",
    )
    yield _finding(
        "/dev/shm",
        h.shm_bytes >= _SHM_SHARE * h.memory_bytes,
        f"{size(h.shm_bytes)}, {size(h.shm_free_bytes)} free (the pool does not use it; Ray's own store does)",
        f"give Ray an object_store_memory below {size(h.shm_free_bytes)}, or the container a larger --shm-size; else Ray's store uses a disk",
    )


def _limits(h: Host, rdma: bool) -> Iterable[Finding]:
    clients = h.open_files // _FILES_PER_CLIENT
    yield _finding(
        "open files",
        h.open_files < 0 or clients >= _CLIENTS,
        "no limit" if h.open_files < 0 else f"limit {h.open_files}: a pool takes about {count(clients, 'process', 'processes')}",
        f"ulimit -n {max(h.open_files_hard, _MANY_FILES) if h.open_files_hard <= h.open_files else h.open_files_hard}, before Ray starts",
    )
    locked = "no limit" if h.locked_bytes < 0 else f"limit {size(h.locked_bytes)}"
    yield _finding(
        "locked memory", h.locked_bytes < 0 or not rdma, locked, "ulimit -l unlimited: RDMA devices lock the memory that they are given"
    )
    yield _finding(
        "memory maps",
        h.max_map_count >= _MAPS,
        f"vm.max_map_count {h.max_map_count}: about so many objects mapped writable at once, a process",
        f"sysctl vm.max_map_count={_MAPS} or more",
    )


def _pages(h: Host) -> Iterable[Finding]:
    huge = f"{h.huge_pages_free} of {h.huge_pages_total} free, of {size(h.huge_page_bytes)}" if h.huge_pages_total else "none reserved"
    thp = f"shmem THP {h.shmem_thp or 'not there'}"
    yield Finding("huge pages", OK, f"{huge}; {thp}" + ("" if h.huge_pages_total else " (pages of 4 KiB work)"))
    yield Finding("NUMA", OK, count(max(1, h.numa_nodes), "node"))


def spill(s: Spill | None, pool_bytes: int) -> list[Finding]:
    """The directory that a pool which is full would write to. None: it would not."""
    if s is None:
        return [Finding("spill directory", OK, "off: a put waits for room")]
    where = s.directory if s.probed == s.directory else f"{s.directory} (not there yet; {s.probed} is)"
    if s.write_error:
        return [
            Finding("spill directory", ERROR, f"{where}: {s.write_error}", "make it writable, or choose another: MOONCAKE_RAY_SPILL_DIR")
        ]
    found = f"{where}: {s.file_system}, {size(s.free_bytes)} free"
    if s.file_system in _IN_MEMORY:
        out = Finding("spill directory", WARNING, found, "this is memory, not a disk: choose another with MOONCAKE_RAY_SPILL_DIR")
    elif s.file_system in _ON_NETWORK:
        out = Finding("spill directory", WARNING, found, "a file system on the network: choose a local one with MOONCAKE_RAY_SPILL_DIR")
    else:
        enough = s.free_bytes >= _SPILL_SHARE * pool_bytes
        out = _finding(
            "spill directory",
            enough,
            found,
            f"less than the pool's {size(pool_bytes)}: make room, or choose another: MOONCAKE_RAY_SPILL_DIR",
        )
    return [
        out,
        _finding(
            "spill O_DIRECT",
            not s.direct_error,
            s.direct_error or "works",
            "spilled bytes go through the page cache too, which counts as this cgroup's memory; use ext4 or xfs",
        ),
        _finding(
            "spill holes",
            not s.punch_error,
            s.punch_error or "work",
            "disk space of what is read back or freed is not returned before the pool ends; use ext4 or xfs",
        ),
    ]


def leftovers(found: list[Leftover]) -> list[Finding]:
    """Spill directories of brokers that died."""
    return [Finding("leftover", WARNING, f"{x.path}: {size(x.bytes)}, and no process has it open", f"rm -r {x.path}") for x in found] or [
        Finding("leftovers", OK, "none")
    ]


def software(s: Software) -> list[Finding]:
    """Packages, compiled parts, settings, RDMA."""
    return [*_packages(s), *_compiled(s), *_settings(s), *_rdma(s)]


def _packages(s: Software) -> Iterable[Finding]:
    ray, torch = _numbers(s.ray), _numbers(s.torch)
    if not s.ray:
        yield Finding("ray", WARNING, "not installed: only Store works", "pip install 'ray>=2.50,<2.61'")
    elif ray < _RAY_FROM:
        yield Finding("ray", ERROR, f"{s.ray} is too old", "pip install 'ray>=2.50,<2.61'")
    else:
        newest = ".".join(map(str, _RAY_TO))
        yield _finding(
            "ray", ray <= _RAY_TO, s.ray, f"newer than the newest tested, {newest}: run your tests, or pip install 'ray=={newest}.*'"
        )
        missing = f"Ray exports no metrics without {', '.join(s.not_for_metrics)}"
        yield _finding("metrics", not s.not_for_metrics, missing if s.not_for_metrics else "can be exported", "pip install 'ray[default]'")
    if not s.torch:
        yield Finding("torch", WARNING, "not installed: only NumPy arrays are routed", "pip install 'torch>=2.5'")
    else:
        yield _finding("torch", torch >= _TORCH_FROM, s.torch, "pip install 'torch>=2.5'", ERROR)


def _numbers(version: str) -> tuple[int, ...]:
    """`"2.60.0"` → `(2, 60)`."""
    return tuple(int(p) if p.isdigit() else 0 for p in version.split(".")[:2])


def _compiled(s: Software) -> Iterable[Finding]:
    again = "install mooncake_ray again (pip install .)"
    yield _finding("extension", not s.extension_error, s.extension_error or f"loads (mooncake_ray {s.version})", again, ERROR)
    if s.extension_error:
        return
    yield _finding(
        "broker", not s.broker_error, s.broker_error or "mooncake-broker starts, and speaks the extension's protocol", again, ERROR
    )


def _settings(s: Software) -> Iterable[Finding]:
    yield _finding("settings", not s.config_error, s.config_error or "MOONCAKE_RAY_* are valid", "correct or unset it", ERROR)


def _rdma(s: Software) -> Iterable[Finding]:
    if not s.ports:
        yield Finding("RDMA", OK, "no devices")
        return
    yield _finding("libibverbs", not s.verbs_error, s.verbs_error or "loads", "apt install libibverbs1 ibverbs-providers")
    for p in s.ports:
        found = f"{p.device} port {p.port}: {p.state}, {count(p.gids, 'GID')}"
        yield _finding(
            "RDMA", p.state == "ACTIVE" and p.gids > 0, found, "bring the link up (rdma link; ip link set … up) and give it an address"
        )
