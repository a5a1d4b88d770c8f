"""Which RDMA ports are used, at what address, for which of a peer's; and what a build without RDMA says."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_ray.transport.rails import (
    Gid,
    Node,
    Port,
    address_text,
    choose_gid,
    choose_ports,
    home_node,
    list_nodes,
    list_ports,
    near_rails,
    pair_rails,
    split,
)

IPV4 = bytes.fromhex("00000000000000000000ffffc6120001")
GLOBAL = bytes.fromhex("20010db8000000000000000000000001")
LOCAL = bytes.fromhex("fe80000000000000604cf3fffe58d16a")
V1, V2 = "IB/RoCE v1", "RoCE v2"


def roce(*gids: tuple[int, str, bytes]) -> Port:
    return Port("mlx5_0", 1, True, True, gids=tuple(Gid(*g) for g in gids))


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        ([(0, V1, LOCAL), (1, V2, LOCAL), (2, V1, IPV4), (3, V2, IPV4)], 3),
        ([(0, V1, LOCAL), (1, V2, LOCAL), (4, V2, GLOBAL)], 4),
        ([(1, V2, GLOBAL), (5, V2, IPV4), (6, V2, IPV4)], 5),
        ([(0, V1, LOCAL), (1, V2, LOCAL)], 1),
        ([(0, V1, LOCAL), (2, V1, IPV4)], None),
        ([], None),
    ],
)
def test_an_address_of_roce(gids, index):
    gid = choose_gid(roce(*gids))
    assert (gid and gid.index) == index


def test_an_address_of_infiniband():
    port = Port("mlx5_0", 1, False, True, gids=(Gid(1, V1, GLOBAL), Gid(0, V1, LOCAL)))
    assert choose_gid(port).index == 0


@pytest.fixture
def sysfs(tmp_path):
    """A machine as the kernel describes it: two devices, one of them with two ports."""

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    for device, node, ports in (("mlx5_1", "1", ("1",)), ("mlx5_0", "0", ("1", "2"))):
        write(f"{device}/device/numa_node", node)
        for port in ports:
            at = f"{device}/ports/{port}"
            write(f"{at}/state", "1: DOWN" if port == "2" else "4: ACTIVE")
            write(f"{at}/link_layer", "Ethernet")
            write(f"{at}/gids/0", "fe80:0000:0000:0000:604c:f3ff:fe58:d16a")
            write(f"{at}/gids/1", "0000:0000:0000:0000:0000:ffff:c612:0001")
            write(f"{at}/gids/2", "0000:0000:0000:0000:0000:0000:0000:0000")
            write(f"{at}/gid_attrs/types/0", V1)
            write(f"{at}/gid_attrs/types/1", V2)
            write(f"{at}/gid_attrs/ndevs/1", "eth7")
    return tmp_path


def test_ports_as_the_kernel_lists_them(sysfs):
    ports = list_ports(sysfs)
    assert [str(p) for p in ports] == ["mlx5_0:1", "mlx5_0:2", "mlx5_1:1"]
    assert [p.up for p in ports] == [True, False, True]
    assert [p.node for p in ports] == [0, 0, 1]
    assert ports[0].gids == (Gid(0, V1, LOCAL), Gid(1, V2, IPV4, "eth7"))
    assert list_ports(sysfs / "nothing") == []


def test_ports_that_are_used(sysfs):
    def used(*args):
        return [str(p) for p in choose_ports(list_ports(sysfs), *args)]

    assert used() == ["mlx5_0:1", "mlx5_1:1"]
    assert used(["mlx5_1"]) == ["mlx5_1:1"]
    assert used(["mlx5_0:2", "mlx5_0:1"]) == ["mlx5_0:1"]
    assert used(["mlx5"]) == []


def test_numa_nodes_as_the_kernel_lists_them(tmp_path):
    for node, cpus, distance in ((0, "0-3,8", "10 21"), (2, "4-7", "21 10")):  # node 1 is off
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(cpus)
        (tmp_path / f"node{node}/distance").write_text(distance)
    nodes = list_nodes(tmp_path)
    assert nodes == [Node(0, frozenset({0, 1, 2, 3, 8}), {0: 10, 2: 21}), Node(2, frozenset(range(4, 8)), {0: 21, 2: 10})]
    assert list_nodes(tmp_path / "nothing") == []
    assert home_node(nodes, {4, 6}) == 2
    assert home_node(nodes, {8}) == 0
    assert home_node(nodes, {3, 4}) == -1
    assert home_node(nodes[:1], {0}) == -1, "where there is one node, none is nearer"


def two_sockets(*rows: tuple[int, ...]) -> list[Node]:
    return [Node(i, frozenset({i}), dict(enumerate(row))) for i, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("rails", "memory", "near"),
    [
        ([0, 0, 1, 1], 0, [0, 1]),
        ([0, 0, 1, 1], 1, [2, 3]),
        ([0, 0, 1, 1], -1, [0, 1, 2, 3]),
        ([0, 0], 1, [0, 1]),  # the other socket's are the nearest there are
        ([-1, 0, 1], 1, [0, 2]),
        ([-1, -1], 0, [0, 1]),
        ([0, 7], 0, [0, 1]),  # not a node that there is: not known
        ([0, 1], 9, [0, 1]),
        ([], 0, []),
    ],
)
def test_rails_near_to_memory(rails, memory, near):
    assert near_rails(rails, memory, two_sockets((10, 21), (21, 10))) == near


def test_rails_near_to_memory_of_a_node_that_has_none():
    nodes = two_sockets((10, 12, 21), (12, 10, 21), (21, 21, 10))
    assert near_rails([1, 2], 0, nodes) == [0]
    assert near_rails([0, 1], 2, nodes) == [0, 1]


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
def test_the_node_of_memory():
    verbs = pytest.importorskip("mooncake_ray._native.verbs")
    libc, page = ctypes.CDLL(None, use_errno=True), mmap.mmap(-1, mmap.PAGESIZE)
    at, nodes = ctypes.addressof(ctypes.c_char.from_buffer(page)), ctypes.c_ulong(1)
    assert verbs.memory_node(at) == -1
    mbind = {"x86_64": 237, "aarch64": 235}[platform.machine()]
    if libc.syscall(mbind, ctypes.c_ulong(at), ctypes.c_ulong(mmap.PAGESIZE), 1, ctypes.byref(nodes), ctypes.c_ulong(64), 0):
        pytest.skip(f"mbind: {os.strerror(ctypes.get_errno())}")
    assert verbs.memory_node(at) == 0
    assert verbs.memory_node(1 << 60) == -1


def rail(address: str, bits: int = 120, ethernet: bool = True) -> dict:
    raw = "00000000000000000000ffff" + bytes(map(int, address.split("."))).hex() if ethernet else address
    return {"gid": raw, "ethernet": ethernet, "network_bits": bits}


def test_rails_of_one_network_meet():
    mine = [rail("10.0.1.1"), rail("10.0.2.1"), rail("10.0.3.1")]
    theirs = [rail("10.0.3.2"), rail("10.0.1.2"), rail("10.0.2.2")]
    assert pair_rails(mine, theirs) == [(0, 1), (1, 2), (2, 0)]


def test_rails_in_one_network_share():
    hosts = [[rail(f"10.0.0.{host * 4 + i}") for i in range(4)] for host in range(2)]
    assert pair_rails(*hosts) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert pair_rails(hosts[0][:1], hosts[1]) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert pair_rails(hosts[0], hosts[1][:1]) == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_rails_that_cannot_meet():
    one, other = "fe80000000000001" + "0" * 16, "fe80000000000002" + "0" * 16
    assert pair_rails([rail("10.0.0.1")], [rail(one, ethernet=False)]) == []
    assert pair_rails([rail(one, ethernet=False)], [rail(other, ethernet=False)]) == []
    assert pair_rails([rail(one, ethernet=False), rail("10.0.0.1")], [rail(other, ethernet=False), rail("10.0.0.2")]) == [(1, 1)]
    assert pair_rails([], [rail("10.0.0.1")]) == pair_rails([rail("10.0.0.1")], []) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_all_rails_have_their_part(mine, theirs):
    here = [rail(f"10.0.{net}.{i + 1}") for i, net in enumerate(mine)]
    there = [rail(f"10.0.{net}.{i + 101}") for i, net in enumerate(theirs)]
    pairs = pair_rails(here, there)
    assert len(set(pairs)) == len(pairs)
    assert {i for i, _ in pairs} == set(range(len(mine)))
    for i, j in pairs:
        assert mine[i] == theirs[j] or mine[i] not in theirs, "a way through a router, though there is a direct one"
    if len(set(mine + theirs)) == 1:
        assert {j for _, j in pairs} == set(range(len(theirs)))
        assert max(Counter(j for _, j in pairs).values()) <= -(-len(pairs) // len(theirs))


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 24), st.integers(0, 1 << 22), st.sampled_from([4096, 2 << 20]))
def test_pieces_of_memory(address, nbytes, most, align):
    if most:
        nbytes = min(nbytes, most * 100)
    pieces = split(address, nbytes, most, align)
    assert pieces[0][0] == address
    assert sum(n for _, n in pieces) == nbytes
    for (at, n), (after, _) in pairwise(pieces):
        assert at + n == after
        assert after % align == 0 or most < align or n == most
    assert all(n > 0 and (n <= most or not most) for _, n in pieces)
    if most >= 2 * align:
        assert all(at % align == 0 for at, _ in pieces[1:])


def test_addresses_as_text():
    assert address_text(IPV4.hex()) == "198.18.0.1"
    assert address_text(GLOBAL.hex()) == "2001:db8::1"


WHY = (
    "from mooncake_ray.config import Config; from mooncake_ray.transport import get_transport; "
    "print(get_transport('verbs').unavailable(Config()))"
)


def run(code: str, **env: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_library_is_not_needed_to_import():
    code = "from mooncake_ray.transport import verbs; print(verbs._native is not None, 'ibverbs' in open('/proc/self/maps').read())"
    assert run(code) == "True False"


def test_a_machine_without_the_library(tmp_path: Path):
    (tmp_path / "libibverbs.so.1").touch()  # found before the real one, and not loadable
    out = run(WHY, LD_LIBRARY_PATH=str(tmp_path))
    assert out.startswith("RDMA is not available: ") and "libibverbs.so.1" in out


def test_a_build_without_the_headers():
    assert "headers of libibverbs" in run(f"import sys; sys.modules['mooncake_ray._native.verbs'] = None; {WHY}")
