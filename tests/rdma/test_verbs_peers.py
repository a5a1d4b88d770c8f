"""A peer of another make, several rails, and what may be asked of both."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pairs import GUARD, MIB, SESSION, TIMEOUT_S, Pair, memory, table

from mooncake_ray.config import Config
from mooncake_ray.transport import Memory, get_transport, rails

SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture
def pair():
    pair = Pair(MIB)
    yield pair
    pair.close()


def test_an_independent_peer_reads_and_may_do_nothing_else(pair):
    """pyverbs reads what is served; what it writes is refused, and so is what it reads beyond the end."""
    program = Path(__file__).with_name("pyverbs_peer.py")
    with subprocess.Popen(
        [SYSTEM_PYTHON, "-I", str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as peer:
        try:
            blob = peer.stdout.readline()
            assert blob, peer.stderr.read()
            answer = json.loads(pair.there.accept(SESSION, blob.encode()))
            description = pair.there.describe()
            raw = description["rails"][0]["gid"]
            gid = ":".join(raw[i : i + 4] for i in range(0, 32, 4))
            peer.stdin.write(json.dumps({"answer": answer, "region": description["regions"][0], "gid": gid}) + "\n")
            peer.stdin.flush()
            result = peer.stdout.readline()
            assert result, peer.stderr.read()
            got = json.loads(result)
        finally:
            peer.kill()
    assert got["read"] == "ok"
    assert got["digest"] == hashlib.sha256(pair.source).hexdigest()
    assert got["write"] == "remote invalid request error"
    assert got["beyond"] == "remote access error"
    np.testing.assert_array_equal(pair.source, np.random.default_rng(MIB).integers(0, 256, MIB, np.uint8))
    pair.read_all(pair.connect())


@pytest.fixture
def second_device():
    """One more RDMA device, on a network of its own."""
    commands = [
        "ip link add roce9 mtu 9000 type dummy",
        "ip address add 198.18.9.1/24 dev roce9",
        "ip link set roce9 up",
        "rdma link add rxe9 type rxe netdev roce9",
    ]
    for command in commands:
        subprocess.run(command.split(), check=True)
    yield "rxe9"
    subprocess.run(["rdma", "link", "delete", "rxe9"], check=True)
    subprocess.run(["ip", "link", "delete", "roce9"], check=True)


@pytest.fixture
def two_rails(second_device):
    """A pair that uses both devices; and gone before the device is."""
    pair = Pair(8 * MIB)
    yield pair
    pair.close()


def test_bytes_go_over_all_rails(two_rails):
    connection = two_rails.connect()
    two_rails.read_all(connection)
    by_rail = connection.bytes_by_rail()
    assert set(by_rail) == {"rxe0>rxe0", "rxe9>rxe9"}
    assert sum(by_rail.values()) == 8 * MIB
    assert min(by_rail.values()) >= MIB, "one rail did nearly all"
    two_rails.target[:] = GUARD
    connection.read(two_rails.ranges(*((i * 5003, i * 3001, 2999) for i in range(1000))), TIMEOUT_S)
    for i in range(1000):
        np.testing.assert_array_equal(two_rails.target[i * 3001 : i * 3001 + 2999], two_rails.source[i * 5003 : i * 5003 + 2999])
        assert (two_rails.target[i * 3001 + 2999 : (i + 1) * 3001] == GUARD).all()


def test_bytes_go_over_the_rails_that_are_near_to_them(second_device, monkeypatch):
    """Both ends' memory is on the node of the second device; later comes some that is on the first one's at the peer."""
    monkeypatch.setattr(rails, "near_rails", lambda *_: [1])
    pair = Pair(4 * MIB)
    try:
        connection = pair.connect()
        pair.read_all(connection)
        assert connection.bytes_by_rail() == {"rxe0>rxe0": 0, "rxe9>rxe9": 4 * MIB}
        monkeypatch.setattr(rails, "near_rails", lambda *_: [0])
        late = memory(MIB)
        pair.there.register(Memory(4, late.ctypes.data, MIB))
        at = pair.target.ctypes.data
        pair.target[:] = GUARD
        connection.read(table((4, 0, at, MIB), (3, 5, at + MIB, MIB), (4, 77, at + 2 * MIB, 1000)), TIMEOUT_S)
        assert connection.bytes_by_rail() == {"rxe0>rxe0": MIB + 1000, "rxe9>rxe9": 5 * MIB}
        np.testing.assert_array_equal(pair.target[:MIB], late)
        np.testing.assert_array_equal(pair.target[MIB : 2 * MIB], pair.source[5 : MIB + 5])
        np.testing.assert_array_equal(pair.target[2 * MIB : 2 * MIB + 1000], late[77:1077])
        assert (pair.target[2 * MIB + 1000 :] == GUARD).all()
        monkeypatch.setattr(rails, "near_rails", lambda *_: [0, 1])
        anywhere = memory(MIB, 7)
        pair.there.register(Memory(5, anywhere.ctypes.data, MIB))
        connection.read(table((5, 0, at, MIB)), TIMEOUT_S)
        assert connection.bytes_by_rail() == {"rxe0>rxe0": MIB + 1000, "rxe9>rxe9": 6 * MIB}, "this end's memory has a node, too"
        assert (pair.target[:MIB] == 7).all()
    finally:
        pair.close()


def test_one_rail_reads_from_a_peer_with_two(two_rails):
    one = get_transport("verbs")(Config(rdma_devices="rxe9"))
    target = memory(two_rails.source.nbytes, GUARD)
    one.register(Memory(0, target.ctypes.data, target.nbytes))
    connection = one.connect(two_rails.peer(), TIMEOUT_S)
    connection.read(table((3, 0, target.ctypes.data, target.nbytes)), TIMEOUT_S)
    by_rail = connection.bytes_by_rail()
    one.close()
    assert by_rail == {"rxe9>rxe9": target.nbytes}
    np.testing.assert_array_equal(target, two_rails.source)


def test_neither_torch_nor_ray_is_needed():
    code = "import sys; from mooncake_ray.transport import verbs; print([m for m in ('torch', 'ray') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
