"""Two engines around two pools, talking by 127.0.0.1: objects and parts of objects get from one pool into the other."""

from __future__ import annotations

import hashlib
import threading
import time

import numpy as np
import pytest
from engine_sites import DEADLINE_S, SECRET, several

from mooncake_ray._native import pool
from mooncake_ray.counters import snapshot
from mooncake_ray.errors import (
    GetTimeoutError,
    ObjectLostError,
    ObjectNotFoundError,
    PeerRefusedError,
    StoreError,
    TransportError,
    TransportUnavailableError,
)
from mooncake_ray.store import node
from mooncake_ray.transfer.door import Part
from mooncake_ray.transfer.engine import Engine

CAPACITY = 32 << 20


@pytest.fixture
def sites(scope_with):
    with several(scope_with) as make:
        yield make


def data_of(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def digest(data: bytes) -> str:
    return hashlib.blake2b(data).hexdigest()


@pytest.mark.parametrize("nbytes", [1, 100, 8 << 10, (64 << 10) + 1, 1 << 20, (9 << 20) + 5])
def test_an_object_is_what_it_was(sites, nbytes):
    a, b = sites(), sites()
    data = data_of(nbytes)
    id = a.put(data)
    assert digest(b.get(a, id)) == digest(data)
    read = b.engine.report()["replicas"]  # what was sent is counted afterwards
    assert read > 0
    assert digest(b.get(a, id)) == digest(data), "it is here now"
    assert b.engine.report()["replicas"] == read, "and is not received again"


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_pools_that_grow(sites, transport):
    """By arenas that are there only after the first read."""
    a, b = (sites(transport=transport, arena_bytes=8 << 20, prefault_bytes=1 << 20) for _ in range(2))
    for n in range(4):
        id = a.put(data_of(6 << 20, n))
        assert digest(b.get(a, id)) == digest(data_of(6 << 20, n))
        assert b.engine.report()["peers"] == {str(a.engine.endpoint): transport}
    assert len(a.store.client.arenas()) > 1 < len(b.store.client.arenas())


def test_parts_of_an_object(sites):
    a, b = sites(), sites()
    data = data_of(1 << 20)
    id = a.put(data)
    runs = np.array([[0, 10], [5000, 0], [4096, 4096], [(1 << 20) - 1, 1], [7, 3]], np.uint64)
    with b.door.gathered([Part.packed(a.pool_id, id, runs)], int(runs[:, 1].sum()), DEADLINE_S) as here:
        got = bytes(memoryview(b.store.client.get(here)))
    assert got == b"".join(data[o : o + n] for o, n in runs.tolist())
    sent = a.engine.server.stats()["bytes_sent"]
    assert sent < 64 << 10, "only what was asked for"


def test_what_is_prefetched_is_here_later(sites):
    a, b = sites(), sites()
    ids = [a.put(data_of(1 << 20, seed)) for seed in range(6)]
    b.door.prefetch(a.pool_id, b"?" * 16, DEADLINE_S)  # there is none
    for id in ids:
        b.door.prefetch(a.pool_id, id, DEADLINE_S)
    b.scope.eventually(lambda: b.store.stats()["objects"] == 6)
    a.engine.close()
    assert [bytes(memoryview(b.store.client.get(id))) for id in ids] == [data_of(1 << 20, seed) for seed in range(6)]


def test_an_engine_that_is_gone_is_not_asked_to_prefetch(sites):
    a, b = sites(), sites()
    b.door.prefetch(a.pool_id, b"?" * 16, DEADLINE_S)
    b.engine.close()

    def refused() -> bool:
        try:
            b.door.prefetch(a.pool_id, b"?" * 16, DEADLINE_S)
        except ConnectionError:
            return True
        return False

    b.scope.eventually(refused)  # the end of the connection is seen with some delay
    assert refused(), "and nobody is there to connect to"


def test_an_engine_says_what_it_does(sites):
    a, b = sites(), sites()
    empty = b.door.report(DEADLINE_S)
    assert empty["endpoint"] == str(b.engine.endpoint) and empty["peers"] == {} and "tcp" in empty["transports"]
    id = a.put(data_of(1 << 20))
    b.get(a, id)
    a.scope.eventually(lambda: a.door.report(DEADLINE_S)["bytes_sent"] >= 1 << 20)  # what was sent is counted afterwards
    home, reader = a.door.report(DEADLINE_S), b.door.report(DEADLINE_S)
    assert reader["peers"] == {str(a.engine.endpoint): "tcp"} and home["peers"] == {}
    assert home["sessions"] == 1 and home["replicas_elsewhere"] == 1 and home["pins"] == 0
    assert reader["replicas"] - empty["replicas"] == 1 and reader["remote_bytes_read"] - empty["remote_bytes_read"] == 1 << 20
    b.engine.close()
    with pytest.raises(ConnectionError):
        b.door.report(DEADLINE_S)


def test_thousands_of_runs(sites):
    a, b = sites(), sites()
    data = data_of(4 << 20)
    id = a.put(data)
    starts = np.random.default_rng(1).permutation(20000) * 200
    runs = np.stack((starts, np.full(20000, 150)), axis=1).astype(np.uint64)
    with b.door.gathered([Part.packed(a.pool_id, id, runs)], int(runs[:, 1].sum()), DEADLINE_S) as here:
        got = bytes(memoryview(b.store.client.get(here)))
    assert digest(got) == digest(b"".join(data[s : s + 150] for s in starts.tolist()))


def test_a_run_beyond_the_object(sites):
    a, b = sites(), sites()
    id = a.put(data_of(1000))
    beyond = Part.packed(a.pool_id, id, np.array([[990, 11]], np.uint64))
    with pytest.raises(TransportError, match="which has 1000 bytes"), b.door.gathered([beyond], 11, 5.0):
        pass
    with pytest.raises(StoreError, match="reaches beyond the 10 bytes"), b.door.gathered([beyond], 10, 5.0):
        pass


def test_parts_of_objects_of_several_pools(sites):
    """What is gathered is whole, whichever pools it came from, and stays as long as somebody wants it."""
    here, *others = (sites() for _ in range(3))
    objects = [(site, site.put(data_of(300_000, n)), data_of(300_000, n)) for n, site in enumerate([here, *others, here, others[0]])]
    small = others[1].put(b"small")  # travels in the answer itself
    rng = np.random.default_rng(3)
    want = bytearray(1_000_000)
    parts = [Part(others[1].pool_id, small, np.array([[1, 999_990, 4]], np.uint64))]
    want[999_990:999_994] = b"mall"
    starts = rng.permutation(900)[:500] * 1000
    for n, (site, id, data) in enumerate(objects):
        to = starts[n::5]
        from_ = rng.integers(0, 290_000, len(to))
        nbytes = rng.integers(0, 1000, len(to))
        parts.append(Part(site.pool_id, id, np.stack((from_, to, nbytes), axis=1).astype(np.uint64)))
        for f, t, k in zip(from_.tolist(), to.tolist(), nbytes.tolist(), strict=True):
            want[t : t + k] = data[f : f + k]
    with here.door.gathered(parts, len(want), DEADLINE_S) as id:
        pin = here.store.client.get(id)
    assert digest(bytes(pin)) == digest(bytes(want))
    del pin
    here.scope.eventually(lambda: here.store.stats()["objects"] == 2)
    here.scope.eventually(lambda: here.engine.server.stats()["pins"] == 0)


def test_what_is_gathered_can_be_claimed(sites):
    a, b = sites(), sites()
    id = a.put(data_of(1000))
    with b.door.gathered([Part.packed(a.pool_id, id, np.array([[0, 1000]], np.uint64))], 1000, DEADLINE_S) as own:
        b.store.client.claim([own], pool.KIND_SELF, b"k" * 16)
    b.scope.eventually(lambda: a.engine.server.stats()["pins"] == 0)
    assert bytes(b.store.client.get(own)) == data_of(1000)
    b.store.client.unclaim(pool.KIND_SELF, b"k" * 16)
    b.scope.eventually(lambda: b.store.stats()["objects"] == 0)


def test_many_want_the_same(sites):
    a, b = sites(), sites()
    data = data_of(6 << 20)
    id = a.put(data)
    got: list[str] = []
    threads = [threading.Thread(target=lambda: got.append(digest(b.get(a, id)))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [digest(data)] * 8
    assert a.engine.server.stats()["bytes_sent"] < 7 << 20, "it was sent once"


def test_what_is_not_there(sites):
    a, b = sites(), sites()
    id = a.put(b"x" * 100)
    a.free(id)
    with pytest.raises(ObjectNotFoundError):
        b.get(a, id)


def test_a_pool_that_nobody_serves(sites):
    a, b = sites(), sites()
    id = a.put(b"x" * 100)
    del sites.map.engines[a.pool_id]
    with pytest.raises(GetTimeoutError, match="nobody serves that pool"):
        b.get(a, id, 0.3)
    sites.map.dead.add(a.pool_id)
    with pytest.raises(ObjectLostError):
        b.get(a, id)


def test_a_freed_object_leaves_no_replica(sites):
    a, b = sites(), sites()
    ids = [a.put(data_of(n)) for n in (100, 100 << 10, 5 << 20)]
    for id in ids:
        b.get(a, id)
    assert b.store.stats()["objects"] == 3
    for id in ids:
        a.free(id)
    b.scope.eventually(lambda: b.store.stats()["objects"] == 0, b.store.stats)
    b.scope.eventually(lambda: a.store.stats()["pins"] == 0, a.store.stats)


def test_replicas_go_when_the_room_is_needed(sites):
    a, b = sites(), sites()
    ids = [a.put(data_of(9 << 20, n)) for n in range(3)]
    for id in ids:
        b.get(a, id)
    kept = b.put(data_of(20 << 20))
    assert len(b.store.view(b.key(kept))) == 20 << 20
    assert digest(b.get(a, ids[0])) == digest(data_of(9 << 20, 0)), "and come again"


def test_a_replica_serves_when_its_home_is_dead(sites):
    a, b, c = sites(), sites(), sites()
    data = data_of(1 << 20)
    id = a.put(data)
    b.get(a, id)
    a.engine.close()
    sites.map.dead.add(a.pool_id)
    assert digest(c.get(a, id)) == digest(data)


def test_another_secret(sites):
    a, b = sites(), sites(secret=b"t" * 32)
    id = a.put(b"x" * 100)
    with pytest.raises(PeerRefusedError):
        b.get(a, id)


class Held:
    """A server that says nothing of its progress for a while."""

    def __init__(self, server) -> None:
        self.server, self.begun, self.go = server, threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self.server, name)

    def progress(self, id, nbytes):
        self.begun.set()
        assert self.go.wait(DEADLINE_S)
        self.server.progress(id, nbytes)


def test_a_chain_of_nodes(sites):
    a, *readers = (sites() for _ in range(4))
    data = data_of(16 << 20)
    id = a.put(data)
    got: list[str] = []
    held = readers[0].engine.puller._server = Held(readers[0].engine.server)
    threads = [threading.Thread(target=lambda r=r: got.append(digest(r.get(a, id)))) for r in readers]
    threads[0].start()
    assert held.begun.wait(DEADLINE_S)
    for t in threads[1:]:
        t.start()
    end = time.monotonic() + DEADLINE_S
    while not all(r.engine.server.stats()["offers"] for r in readers):
        assert time.monotonic() < end
        time.sleep(0.005)
    held.go.set()  # all three are at it
    for t in threads:
        t.join()
    assert got == [digest(data)] * 3
    assert a.engine.server.stats()["bytes_sent"] < 1.5 * len(data), "one had it from here, and the others from each other"


def test_an_engine_that_comes_back(sites):
    a, b = sites(), sites()
    data = data_of(2 << 20)
    first, second = a.put(data), a.put(data)
    b.get(a, first)
    a.engine.close()
    got: list[str] = []
    waiting = threading.Thread(target=lambda: got.append(digest(b.get(a, second))))
    waiting.start()
    name = node.broker_name(a.scope.name)
    engine = Engine(node.connect(name, a.scope.config), name, sites.map.of([]), SECRET, "127.0.0.1", a.scope.config)
    sites.map.engines[a.pool_id] = engine.endpoint
    waiting.join()
    engine.close()
    assert got == [digest(data)]


def test_a_spilled_object(sites, tmp_path):
    a, b = sites(spill_dir=str(tmp_path)), sites()
    ids = [a.put(data_of(8 << 20, n)) for n in range(8)]
    for n, id in enumerate(ids):
        assert digest(b.get(a, id)) == digest(data_of(8 << 20, n))
    assert a.store.stats()["spilled_objects" if "spilled_objects" in a.store.stats() else "disk_bytes"] > 0


def test_settings_name_the_transport(sites):
    """And where one cannot be used, whoever reads is told why, for either end; nothing else is used in its place."""
    a, b, c = sites(), sites(transport="verbs"), sites()
    id, small = a.put(data_of(1 << 20)), a.put(b"x")
    with pytest.raises(TransportUnavailableError, match=r"verbs: here .*; at the peer it is not offered"):
        b.get(a, id)
    assert b.get(a, small) == b"x"  # by the streams on which it asks
    other = b.put(data_of(1 << 20, 1))
    assert c.get(b, other) == data_of(1 << 20, 1)  # which did not ask for verbs
    with pytest.raises(TransportUnavailableError, match=r"verbs: here .*; at the peer (?!it is not offered)"):
        sites(transport="verbs").get(b, other)
    assert c.scope.config.transport == "auto"


def test_a_transport_that_there_is_not(sites):
    a, b = sites(), sites(transport="carrier-pigeon")
    with pytest.raises(TransportUnavailableError, match="there is no transport 'carrier-pigeon'"):
        b.get(a, a.put(data_of(1 << 20)))


def test_replicas_of_a_pool_with_another_engine_go_with_their_objects(sites):
    a, b = sites(), sites()
    id = a.put(data_of(1 << 20))
    b.get(a, id)
    a.engine.close()
    name = node.broker_name(a.scope.name)
    engine = Engine(node.connect(name, a.scope.config), name, sites.map.of([]), SECRET, "127.0.0.1", a.scope.config)
    sites.map.engines[a.pool_id] = engine.endpoint
    a.free(id)
    end = time.monotonic() + DEADLINE_S
    while b.store.stats()["objects"]:
        assert time.monotonic() < end, b.engine.report()
        time.sleep(0.01)
    assert b.engine.report()["replicas_here"] == 0
    engine.close()


def test_a_copy_of_a_copy_is_told_by_that_one(sites):
    a, b, c = sites(), sites(), sites()
    id = a.put(data_of(1 << 20))
    b.get(a, id)
    a.engine.close()
    sites.map.dead.add(a.pool_id)
    c.get(a, id)
    assert c.engine.report()["replicas_here"] == 0
    b.store.client.remove([id])
    end = time.monotonic() + DEADLINE_S
    while c.store.stats()["objects"]:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_small_replicas_go_when_the_room_is_needed(sites):
    a, b = sites(capacity_bytes=64 << 20), sites(capacity_bytes=1 << 20, prefault_bytes=1 << 20, spill_dir="off")
    ids = [a.put(bytes([n % 256]) * 5000) for n in range(600)]  # more than the reader's pool holds, and than its broker keeps by itself
    for n, id in enumerate(ids):
        assert b.get(a, id) == bytes([n % 256]) * 5000


def test_readers_who_come_at_once_share_a_connection(sites):
    a, b = sites(), sites()
    ids = [a.put(data_of(200_000, n)) for n in range(12)]
    got: dict[int, str] = {}
    retried = snapshot().get("remote_retries", 0)
    threads = [threading.Thread(target=lambda n=n: got.update({n: digest(b.get(a, ids[n]))})) for n in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == {n: digest(data_of(200_000, n)) for n in range(12)}
    assert snapshot().get("remote_retries", 0) == retried
