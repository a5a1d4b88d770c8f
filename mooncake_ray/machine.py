"""What the machine has: memory this process may use, NUMA nodes."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cgroup_limits", "machine_bytes", "numa_nodes"]

_CGROUPS = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node/has_memory")


def cgroup_limits(mounted: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> dict[Path, int]:
    """The memory limits in bytes of this process's cgroups (version 1 or 2) and of those above them, by the file that says so."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return {}
    limits = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = mounted, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mounted / "memory", "memory.limit_in_bytes"
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts), -1, -1):  # in a container, the path may be the host's, and only the root be there
            file = root.joinpath(*parts[:depth], name)
            try:
                text = file.read_text().strip()
            except OSError:
                continue
            if text.isdigit():
                limits[file] = int(text)
    return limits


def machine_bytes() -> int:
    """Memory this process may use, in bytes: the machine's, or the limit of one of its cgroups where that is lower."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *cgroup_limits().values()])


def numa_nodes(path: Path = _NODES) -> list[int]:
    """The NUMA nodes that have memory; empty where the kernel does not say."""
    try:
        text = path.read_text().strip()
    except OSError:
        return []
    nodes = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        nodes.extend(range(int(first), int(last or first) + 1))
    return nodes
