"""The peer server and its links, and a peer in Python that was written from the protocol's description."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import threading

import numpy as np
import pytest

from mooncake_ray._native import peer, pool
from mooncake_ray.config import Config
from mooncake_ray.errors import PeerLostError, PeerRefusedError, TransportError
from mooncake_ray.store import node

SECRET = b"a secret that only the test knows"
MIB = 1 << 20


@pytest.fixture
def client():
    config = Config(
        capacity_bytes=64 * MIB, prefault_bytes=0, arena_bytes=32 * MIB, spill_dir="off", linger_s=0.2, huge_pages="never", numa="off"
    )
    c = node.connect(node.broker_name(f"peer-{secrets.token_hex(8)}"), config)
    yield c
    c.close()


@pytest.fixture
def server(client):
    s = peer.Server(client, "127.0.0.1", 0, SECRET)
    yield s
    s.close()


def put(client, data: bytes) -> bytes:
    oid = client.new_id()
    lease = client.create(oid, len(data), 10)
    memoryview(lease)[:] = data
    lease.seal(pool.KIND_SELF, oid)
    assert client.wait([oid], 1, 10) == [True]
    return oid


def link(server, session=b"s" * 16, **more):
    return peer.Link.connect("127.0.0.1", server.port, SECRET, session, **more)


def table(*rows) -> np.ndarray:
    return np.array(rows, np.uint64).reshape(-1, 4)


@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize("nbytes", [1, 4097, 65537, 300_001, 9 * MIB + 3])
def test_pin_read_unpin(client, nbytes, zero_copy):
    server = peer.Server(client, "127.0.0.1", 0, SECRET, zero_copy=zero_copy)
    data = np.random.default_rng(nbytes).bytes(nbytes)
    oid = put(client, data)
    one, two = link(server), link(server)
    assert one.pool_id == client.pool_id
    ((status, region, offset, n, available, inline, source),) = one.pin([oid], 10, inline=False)
    assert (status, n, available, inline, source) == ("ok", nbytes, nbytes, None, "")
    into = np.full(nbytes + 2, 7, np.uint8)
    two.read(table((region, offset, into.ctypes.data + 1, nbytes)), 10)
    assert into[1:-1].tobytes() == data and into[0] == into[-1] == 7
    into[:] = 7
    half = nbytes // 2
    rows = table((region, offset + half, into.ctypes.data + 1 + half, nbytes - half), (region, offset, into.ctypes.data + 1, half))
    peer.read_striped([one, two], rows, 10)
    assert into[1:-1].tobytes() == data and into[0] == into[-1] == 7
    assert server.stats()["pins"] == 1
    assert two.unpin([oid], 10)
    assert server.stats()["pins"] == 0
    assert zero_copy or not server.stats()["bytes_lent"]
    assert not two.unpin([oid], 10)
    server.close()


def test_a_read_says_how_far_it_has_come(client, server):
    data = secrets.token_bytes(12 * MIB)
    links = [link(server), link(server)]
    ((_, region, offset, n, *_),) = links[0].pin([put(client, data)], 10)
    into = np.zeros(n, np.uint8)
    rows = table((region, offset, into.ctypes.data, n))
    said = []

    def reached(nbytes: int) -> None:
        said.append(nbytes)
        assert into[:nbytes].tobytes() == data[:nbytes]

    peer.read_striped(links, rows, 10, reached=reached, step=MIB)
    assert into.tobytes() == data and said == sorted(said) and all(b - a >= MIB for a, b in zip([0, *said], said, strict=False))

    class Enough(Exception):
        pass

    def no_more(nbytes: int) -> None:
        raise Enough

    with pytest.raises(Enough):  # noqa: PT012
        while True:  # all may have come before it could be told
            peer.read_striped(links, rows, 10, reached=no_more, step=1)
    assert not any(k.closed for k in links)
    links[0].read(rows, 10)


def test_small_objects_come_inline(client, server):
    data = [b"w", b"x" * 100, b"y" * 65536]
    ids = [put(client, d) for d in data]
    answers = link(server).pin([*ids, secrets.token_bytes(16)], 10)
    assert [a[0] for a in answers] == ["inline"] * 3 + ["missing"]
    assert [a[5] for a in answers[:3]] == data
    assert server.stats()["pins"] == 0


def test_what_is_in_no_arena_is_read_through_links(client, server):
    oid = client.new_id()
    client.put_inline(oid, b"tiny" * 9, pool.KIND_SELF, oid)
    one = link(server)
    ((status, region, offset, n, *_),) = one.pin([oid], 10, inline=False)
    assert status == "ok" and region >= peer.COPIES
    into = np.zeros(n, np.uint8)
    one.read(table((region, offset, into.ctypes.data, n)), 10)
    assert into.tobytes() == b"tiny" * 9
    assert one.unpin([oid], 10)
    with pytest.raises(TransportError) as e:
        one.read(table((region, offset, into.ctypes.data, n)), 10)
    assert e.value.op == "read" and e.value.errno == 22 and not one.closed
    assert one.describe(10) == b""


def test_out_of_range(client, server):
    into = np.full(100, 7, np.uint8)
    for region, offset in ((0, 32 * MIB - 50), (9, 0), (0, 2**64 - 10), (2**33, 0)):
        with pytest.raises(TransportError, match="has no bytes"):
            link(server).read(table((region, offset, into.ctypes.data, 100)), 10)
    assert (into == 7).all()


def test_a_session_ends_with_its_last_connection(client, server):
    oid = put(client, b"z" * 100_000)
    one, two = link(server), link(server)
    one.pin([oid], 10)
    one.close()
    assert two.describe(10) == b"" and server.stats()["pins"] == 1
    two.close()
    assert server.next_request(10)[1:] == ("", b"")
    assert server.stats()["pins"] == server.stats()["sessions"] == 0
    with pytest.raises(PeerLostError):
        two.describe(1)


def test_relay(client, server):
    oid = client.new_id()
    lease = client.create(oid, 2 * MIB, 10)
    server.offer(oid, lease)
    one, two = link(server), link(server, b"t" * 16)
    ((status, region, offset, n, available, *_),) = one.pin([oid], 10)
    two.pin([oid], 10)
    assert (status, region, offset, n, available) == ("ok", lease.arena, lease.offset, 2 * MIB, 0)
    assert one.wait(oid, 0, 0.01) == 0
    got = []
    waiting = threading.Thread(target=lambda: got.append(one.wait(oid, 0, 30)))
    waiting.start()
    server.progress(oid, MIB)
    waiting.join()
    assert got == [MIB]
    lease.seal(pool.KIND_REPLICA, oid)
    server.progress(oid, 2 * MIB)
    server.retract(oid)
    assert one.wait(oid, MIB, 10) == 2 * MIB
    assert one.unpin([oid], 10) and two.unpin([oid], 10)
    again = client.new_id()
    lease = client.create(again, MIB, 10)
    server.offer(again, lease)
    one.pin([again], 10)
    server.retract(again)  # never sealed
    lease.abort()
    assert not one.unpin([again], 10)


def test_sources_form_a_chain(client, server):
    oid = put(client, bytes(2 * MIB))
    names = [f"10.0.0.{i}:1" for i in range(4)]
    links = [link(server, bytes([i]) * 16, me=n) for i, n in enumerate(names)]
    assert [k.pin([oid], 10)[0][6] for k in links] == ["", *names[:3]]
    assert links[3].pin([oid], 10, bad_source=names[2])[0][6] in ("", *names[:2])


def test_gone_is_told(client, server):
    oid = put(client, b"k" * 100)
    events, one = link(server, events=True), link(server)
    one.pin([oid], 10)
    one.unpin([oid], 10, kept=True)
    assert server.stats()["replicas"] == 1
    assert events.next_event(0.01) is None
    server.gone(oid)
    assert events.next_event(30) == oid
    assert server.stats()["replicas"] == 0


def test_what_is_kept_from_the_pin_on_takes_one_message(client, server):
    small, large = put(client, b"k" * 100), put(client, b"l" * 100_000)
    client.listen()
    events, one = link(server, events=True), link(server)
    assert [a[0] for a in one.pin([small, large, secrets.token_bytes(16)], 10, keep=True)] == ["inline", "ok", "missing"]
    assert server.stats()["replicas"] == 1 and server.stats()["requests"] == 1
    assert one.unpin([large], 10) and server.stats()["replicas"] == 1
    client.remove([small])
    kind, key = client.next_event(30)  # the broker was asked to tell
    assert (kind, key[:16]) == (pool.KIND_GONE, small)
    server.gone(small)
    assert events.next_event(30) == small
    assert server.stats()["replicas"] == 0


def test_describe_and_exchange(server):
    server.describe(b"d" * 65536)
    one = link(server)
    assert one.describe(10) == b"d" * 65536

    def serve():
        session, transport, blob = server.next_request(30)
        server.answer(session, transport.encode() + blob[::-1])

    t = threading.Thread(target=serve)
    t.start()
    assert one.exchange("verbs", b"abc", 30) == b"verbscba"
    t.join()
    with pytest.raises(ValueError, match="65536"):
        server.describe(b"d" * 65537)


def test_broker_death_confirms_nothing(client, server):
    import json
    import os
    import signal

    oid = put(client, b"z" * 100_000)
    one = link(server)
    one.pin([oid], 10)
    pid = json.loads(client.stats())["pid"]
    fd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    import select

    assert select.select([fd], [], [], 30)[0]
    os.close(fd)
    assert not one.unpin([oid], 10)
    with pytest.raises(PeerLostError, match="pool is gone"):
        one.pin([oid], 10)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_not_on_all_addresses(client, host):
    with pytest.raises(ValueError, match=r"host|address"):
        peer.Server(client, host, 0, SECRET)


# ---- the other end in Python


def read(s: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        more = s.recv(n - len(data))
        if not more:
            raise EOFError(len(data))
        data += more
    return data


def mac(role: bytes, *parts: bytes, version=1, secret=SECRET) -> bytes:
    return hmac.new(secret, b"".join((b"mooncake_ray peer", struct.pack("<I", version), role, *parts)), hashlib.sha256).digest()


def prove(server, *, secret=SECRET, version=1, role=b"C", events=0) -> tuple[socket.socket, bytes]:
    s = socket.create_connection(("127.0.0.1", server.port), 30)
    challenge = read(s, 48)
    assert challenge[:16] == b"MCRPEER\n" + struct.pack("<II", 1, 0)
    nonce, session = secrets.token_bytes(32), secrets.token_bytes(16)
    proof = nonce + session + struct.pack("<II", version, events) + bytes(64)
    s.sendall(proof + mac(role, challenge[16:], proof, version=version, secret=secret))
    welcome = read(s, 56)
    if not struct.unpack_from("<I", welcome)[0]:
        assert hmac.compare_digest(welcome[24:], mac(b"S", challenge[16:], nonce, session, welcome[:24]))
    return s, welcome


def test_handshake_of_a_python_puller(client, server):
    server.describe(b"hello")
    s, welcome = prove(server)
    assert welcome[8:24] == client.pool_id
    s.sendall(struct.pack("<IHHQ", 0, 5, 0, 0))
    assert read(s, 21) == struct.pack("<IHHQ", 5, 5, 0, 0) + b"hello"


@pytest.mark.parametrize("wrong", [{"secret": b"other"}, {"version": 2}, {"role": b"S"}, {"events": 2}])
def test_handshake_refused(server, wrong):
    s, welcome = prove(server, **wrong)
    assert welcome == struct.pack("<I", 1) + bytes(52)
    assert s.recv(1) == b""
    assert server.stats()["refused"] == 1 and server.stats()["sessions"] == 0


def test_wrong_secret(server):
    with pytest.raises(PeerRefusedError) as e:
        peer.Link.connect("127.0.0.1", server.port, SECRET + b"!", b"s" * 16)
    assert e.value.peer == f"127.0.0.1:{server.port}" and e.value.op == "connect"


def test_a_server_without_the_secret_is_refused():
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        s, _ = listening.accept()
        s.sendall(b"MCRPEER\n" + struct.pack("<II", 1, 0) + bytes(32))
        read(s, 152)
        s.sendall(bytes(24) + secrets.token_bytes(32))

    t = threading.Thread(target=serve)
    t.start()
    with pytest.raises(PeerRefusedError, match="does not know the secret"):
        peer.Link.connect("127.0.0.1", listening.getsockname()[1], SECRET, b"s" * 16)
    t.join()


def test_a_silent_peer_costs_the_deadline():
    listening = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(TransportError) as e:
        peer.Link.connect("127.0.0.1", listening.getsockname()[1], SECRET, b"s" * 16, timeout_s=0.05)
    assert e.value.errno == 110 and not isinstance(e.value, PeerLostError)
    listening.close()
    with pytest.raises(PeerLostError):
        peer.Link.connect("127.0.0.1", listening.getsockname()[1] if listening.fileno() >= 0 else 1, SECRET, b"s" * 16)


@pytest.mark.parametrize(
    "frame", [struct.pack("<IHHQ", 2**18 + 1, 1, 0, 0), struct.pack("<IHHQ", 0, 7, 0, 0), struct.pack("<IHHQ", 0, 1, 0, 0)]
)
def test_nonsense_ends_the_connection(server, frame):
    s, _ = prove(server)
    s.sendall(frame)
    assert s.recv(1) == b""


def test_a_slow_receiver_holds_up_nobody(client, server):
    data = secrets.token_bytes(8 * MIB)
    oid = put(client, data)
    slow, _ = prove(server)
    one = link(server)
    ((_, region, offset, n, *_),) = one.pin([oid], 10)
    for _ in range(50):
        slow.sendall(struct.pack("<IHHQ", 24, 4, 0, 0) + struct.pack("<QQQ", region, offset, n))
    into = np.zeros(n, np.uint8)
    links = [link(server) for _ in range(3)]
    for k in links:  # on every loop
        k.read(table((region, offset, into.ctypes.data, n)), 30)
        assert into.tobytes() == data
    assert read(slow, 16) == struct.pack("<IHHQ", 0, 4, 0, n)
    assert read(slow, n) == data
