"""What the machine has: memory this process may use, NUMA nodes, addresses."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

__all__ = ["address_in", "cgroup_limits", "machine_bytes", "numa_nodes"]

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


def address_in(network: str) -> str:
    """The address of this machine in a network such as `10.1.0.0/16`, from which the kernel would send to others there.

    Raises:
        ValueError: that is no network, or this machine has no address in it.
    """
    there = ipaddress.ip_network(network, strict=False)
    with socket.socket(socket.AF_INET6 if there.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect((str(there[min(1, there.num_addresses - 1)]), 9))  # sends nothing
            found = s.getsockname()[0]
        except OSError as e:
            raise ValueError(f"this machine has no address in the network {network}: {e}") from None
    if ipaddress.ip_address(found) not in there:
        raise ValueError(f"this machine has no address in the network {network}: it would send there from {found}")
    return found


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
