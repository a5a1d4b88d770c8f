"""The RDMA ports of this machine, as the kernel lists them, and which of them are used, with what address, and for which of a peer's.

All but `list_ports`, `list_nodes` and `network_bits` is pure.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "Gid",
    "Node",
    "Port",
    "choose_gid",
    "choose_ports",
    "home_node",
    "list_nodes",
    "list_ports",
    "near_rails",
    "pair_rails",
    "split",
]

HUGE_PAGE = 2 << 20  # bytes
_SYSFS = Path("/sys/class/infiniband")
_NODES = Path("/sys/devices/system/node")
_MAPPED = bytes(10) + b"\xff\xff"  # what an IPv4 address begins with when it is written as an IPv6 one
_LINK_LOCAL = b"\xfe\x80"
_SIOCGIFNETMASK = 0x891B


@dataclass(frozen=True)
class Gid:
    """One of a port's addresses."""

    index: int
    kind: str
    """As the kernel names it: `RoCE v2`, `IB/RoCE v1`."""
    raw: bytes
    """16 bytes."""
    interface: str = ""
    """The network interface it belongs to, for RoCE."""


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device."""

    device: str
    number: int
    ethernet: bool
    up: bool
    node: int = -1
    """The NUMA node it is attached to; -1: unknown, or there is but one."""
    gids: tuple[Gid, ...] = ()

    def __str__(self) -> str:
        return f"{self.device}:{self.number}"


@dataclass(frozen=True)
class Node:
    """A NUMA node."""

    number: int
    cpus: frozenset[int]
    distances: Mapping[int, int]
    """To each node, itself included."""


def _text(path: Path | str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(4096).decode().strip()
    except OSError:  # an index that is not in use, or gone meanwhile
        return ""


def list_ports(root: Path = _SYSFS) -> list[Port]:
    """All ports of all devices, up or not, by name."""
    found = []
    for device in sorted(root.glob("*")):
        node = _text(device / "device" / "numa_node")
        for port in sorted(device.glob("ports/*"), key=lambda p: int(p.name)):
            found.append(
                Port(
                    device=device.name,
                    number=int(port.name),
                    ethernet=_text(port / "link_layer") == "Ethernet",
                    up=_text(port / "state").startswith("4"),
                    node=int(node) if node else -1,
                    gids=_gids(port),
                )
            )
    return found


def _gids(port: Path) -> tuple[Gid, ...]:
    found = []
    for name in sorted(os.listdir(port / "gids"), key=int):  # some hundreds, of which few are in use
        text = _text(f"{port}/gids/{name}").replace(":", "")
        if text.strip("0"):
            kind, interface = (_text(port / "gid_attrs" / what / name) for what in ("types", "ndevs"))
            found.append(Gid(int(name), kind, bytes.fromhex(text), interface))
    return tuple(found)


def choose_gid(port: Port) -> Gid | None:
    """The address that a port is reached at: with Ethernet one of RoCE v2, an IPv4 address before a global IPv6 one before a link-local one.
    None if it has no such. With InfiniBand the first, which goes along with the port's LID."""
    if not port.ethernet:
        return min(port.gids, key=lambda g: g.index, default=None)
    routable = [g for g in port.gids if g.kind == "RoCE v2"]
    return min(routable, key=lambda g: (not g.raw.startswith(_MAPPED), g.raw.startswith(_LINK_LOCAL), g.index), default=None)


def choose_ports(ports: Sequence[Port], names: Sequence[str] = ()) -> list[Port]:
    """The ports that this process uses: those that are up and have an address; with `names` (`device`, or `device:port`) only these."""
    return [p for p in ports if p.up and choose_gid(p) is not None and (not names or p.device in names or str(p) in names)]


def list_nodes(root: Path = _NODES) -> list[Node]:
    """All NUMA nodes, by number. Empty where the kernel knows of none."""
    found = {int(path.name[4:]): path for path in root.glob("node[0-9]*")}
    nodes = []
    for number, path in sorted(found.items()):
        distances = map(int, _text(path / "distance").split())  # one a node, in order
        nodes.append(Node(number, _cpus(_text(path / "cpulist")), dict(zip(sorted(found), distances, strict=False))))
    return nodes


def _cpus(text: str) -> frozenset[int]:
    """`0-3,8` as a set."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def home_node(nodes: Sequence[Node], cpus: set[int]) -> int:
    """The NUMA node that a process on these processors runs on; -1 if that may be several, or there is one."""
    mine = [n.number for n in nodes if cpus & n.cpus]
    return mine[0] if len(mine) == 1 and len(nodes) > 1 else -1


def near_rails(rails: Sequence[int], memory: int, nodes: Sequence[Node]) -> list[int]:
    """Which rails, by index, should move the bytes of memory on a NUMA node: the nearest, and those of which it is not known where they are.

    Args:
        rails: The node of each; -1: not known.
        memory: Its node; -1: it is on several, or that is not known: all rails should.
    """
    distances = next((n.distances for n in nodes if n.number == memory), {})
    away = [distances.get(node, -1) for node in rails]
    nearest = min((d for d in away if d >= 0), default=-1)
    return [i for i, d in enumerate(away) if d in (-1, nearest)]


def network_bits(gid: Gid) -> int:
    """How many leading bits of a RoCE address name its network: its interface's netmask. 128 where that cannot be told."""
    if not gid.interface or not gid.raw.startswith(_MAPPED):
        return 64 if gid.interface else 128
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            answer = fcntl.ioctl(s, _SIOCGIFNETMASK, struct.pack("256s", gid.interface.encode()[:15]))
        except OSError:
            return 128
    return 96 + int.from_bytes(answer[20:24], "big").bit_count()


def pair_rails(mine: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Which of this process's rails read from which of the peer's, so that every rail that can have a part has one.

    A rail's partners are in its own network where there are some, else anywhere that may be routed to; among those the least used, the one of
    the same place in the list first. Rails without a partner (another kind of network, another InfiniBand subnet) are left out.

    Args:
        mine, theirs: `ethernet` and `gid` (hexadecimal) of each; of mine also `network_bits`.
    """
    used = [0] * len(theirs)
    pairs = []
    able = [i for i, m in enumerate(mine) if any(_reaches(m, t) for t in theirs)]
    for k in range(max(len(able), len(theirs)) if able else 0):
        i = able[k % len(able)]
        fits = [j for j, t in enumerate(theirs) if _reaches(mine[i], t)]
        j = min(fits, key=lambda j: (not _same_network(mine[i], theirs[j]), used[j], (j - k) % len(theirs)))
        used[j] += 1
        pairs.append((i, j))
    return list(dict.fromkeys(pairs))


def _reaches(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a["ethernet"] == b["ethernet"] and (a["ethernet"] or a["gid"][:16] == b["gid"][:16])


def _same_network(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    shift = 128 - a["network_bits"]
    return int(a["gid"], 16) >> shift == int(b["gid"], 16) >> shift


def split(address: int, nbytes: int, most: int, align: int = HUGE_PAGE) -> list[tuple[int, int]]:
    """Memory in pieces that a device can register: `(address, nbytes)` each, of at most `most` bytes (0: no limit).

    Pieces but the first begin at multiples of `align`, unless `most` is less than that.
    """
    if most <= 0 or nbytes <= most:
        return [(address, nbytes)]
    if most < align:
        align = 1
    pieces, at, end = [], address, address + nbytes
    while at < end:
        stop = min(end, (at + most) // align * align)
        if stop <= at:
            stop = min(end, at + most)
        pieces.append((at, stop - at))
        at = stop
    return pieces


def address_text(gid: str) -> str:
    """A hexadecimal GID as people write it."""
    raw = bytes.fromhex(gid)
    return str(ipaddress.IPv4Address(raw[12:])) if raw.startswith(_MAPPED) else str(ipaddress.IPv6Address(raw))
