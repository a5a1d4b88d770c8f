"""Processes that die: clients at any point of a call, brokers under live views. Memory comes back, and nothing that is left is wrong."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from mooncake_ray.errors import BrokerDiedError, ObjectLostError, StoreFullError
from mooncake_ray.store import Store

MIB = 1 << 20


def ramp(n: int = 100_000) -> np.ndarray:
    return np.arange(n)


# ---- clients


def test_a_killed_client_gives_everything_back(scope):
    keeper = scope.store()
    theirs = keeper.put(ramp())
    victim = scope.run(
        """
store = Store(scope, config)
lease = store.create(1 << 20)
mine = [store.put(np.zeros(1 << 17)) for _ in range(3)]
views = [store.get(mine[0]), store.get(key_of(sys.argv[1])), store.view(key_of(sys.argv[1]))]
store.stats()
say("ready")
wait()
""",
        f"{theirs.pool.hex()}:{theirs.id.hex()}",
    )
    assert victim.line() == "ready"
    stats = scope.stats()
    assert (stats["leases"], stats["pins"], stats["claims"], stats["objects"]) == (1, 3, 4, 4)
    victim.kill()
    scope.eventually(lambda: scope.stats()["objects"] == 1, scope.stats)
    stats = scope.stats()
    assert (stats["leases"], stats["pins"], stats["claims"]) == (0, 0, 1)
    assert (stats["reaped_leases"], stats["reaped_pins"]) == (1, 3)
    assert np.array_equal(keeper.get(theirs), ramp())
    keeper.free([theirs])
    scope.eventually(scope.is_empty, scope.stats)


def test_a_client_killed_while_it_waits_for_room_takes_nothing(scope):
    keeper = scope.store()
    most = keeper.publish(keeper.create(24 * MIB))
    victim = scope.run("""
store = Store(scope, config)
say("asking")
store.create(16 << 20, timeout_s=3600)
say("served")
""")
    assert victim.line() == "asking"
    scope.eventually(victim.is_asleep)
    victim.kill()
    keeper.free([keeper.put(np.zeros(4 * MIB, np.uint8), timeout_s=200)])  # nobody stands before it any more
    keeper.free([most])
    scope.eventually(scope.is_empty, scope.stats)
    keeper.free([keeper.publish(keeper.create(32 * MIB, timeout_s=200))])


def test_a_put_waits_until_a_killed_client_is_reaped(scope):
    store = scope.store()
    victim = scope.run("""
store = Store(scope, config)
key = store.publish(store.create(24 << 20))
view = store.view(key)
say("ready")
wait()
""")
    assert victim.line() == "ready"
    with pytest.raises(StoreFullError, match=r"reads 24\.0 MiB"):
        store.create(16 * MIB, timeout_s=0.01)
    os.kill(victim.pid, signal.SIGKILL)
    store.free([store.publish(store.create(16 * MIB, timeout_s=200))])
    victim.kill()


def test_an_interrupt_ends_a_wait_and_leaves_nothing(scope):
    keeper = scope.store()
    rest = keeper.publish(keeper.create(32 * MIB))
    program = scope.run("""
import signal
def once(*_):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, once)
store = Store(scope, config)
say("waiting")
try:
    store.create(1 << 20, timeout_s=3600)
except KeyboardInterrupt:
    say("interrupted")
wait()
store.free([store.put(np.zeros(1 << 17))])
""")
    assert program.line() == "waiting"
    scope.eventually(program.is_asleep)
    # One that comes just before the call sleeps is noticed with the next one.
    scope.eventually(lambda: (os.kill(program.pid, signal.SIGINT), program.has_said_something())[-1])
    assert program.line() == "interrupted"
    keeper.free([rest])
    program.go()
    program.finish()
    scope.eventually(scope.is_empty, scope.stats)


# ---- brokers


def test_views_and_errors_after_the_death_of_the_broker(scope):
    store, other = scope.store(), scope.store()
    key = store.put(ramp())
    array, own = store.get(key), store.view(key, mutable=True)
    lease = store.create(MIB)
    pid = _kill_broker(scope)
    with pytest.raises(BrokerDiedError):
        store.stats()
    for use in (store.get, lambda k: store.free([k]), lambda k: store.wait([k])):  # from here on there is a new broker
        with pytest.raises(ObjectLostError, match="its broker is gone"):
            use(key)
    with pytest.raises(BrokerDiedError):
        store.publish(lease)
    assert np.array_equal(array, ramp())
    own[:4] = b"mine"
    again = store.put(ramp() * 2)
    assert again.pool != key.pool
    assert np.array_equal(store.get(again), ramp() * 2)
    with pytest.raises(BrokerDiedError):
        other.get(again)
    assert np.array_equal(other.get(again), ramp() * 2)
    assert scope.brokers() != [pid]
    assert len(scope.brokers()) == 1
    assert np.array_equal(array, ramp())
    assert bytes(own[:4]) == b"mine"
    lease.abort()
    del array, own, lease
    store.free([again])
    scope.eventually(scope.is_empty, scope.stats)


def test_a_waiting_call_ends_with_the_broker(scope):
    keeper = scope.store()
    keeper.publish(keeper.create(32 * MIB))
    program = scope.run("""
from mooncake_ray.errors import BrokerDiedError
store = Store(scope, config)
say("waiting")
try:
    store.create(1 << 20, timeout_s=3600)
except BrokerDiedError as e:
    say("died")
""")
    assert program.line() == "waiting"
    scope.eventually(program.is_asleep)
    _kill_broker(scope)
    assert program.line() == "died"
    program.finish()


def _kill_broker(scope) -> int:
    (pid,) = scope.brokers()
    os.kill(pid, signal.SIGKILL)
    scope.eventually(lambda: pid not in scope.brokers())
    return pid


def test_processes_that_start_a_broker_at_once_get_one(scope):
    programs = [
        scope.run("""
wait()
store = Store(scope, config)
say(store.client.pool_id.hex())
wait()
""")
        for _ in range(4)
    ]
    for p in programs:
        p.go()
    assert len({p.line() for p in programs}) == 1
    assert len(scope.brokers()) == 1
    for p in programs:
        p.go()
        p.finish()


def test_a_broker_goes_when_the_last_client_has_left_and_leaves_nothing(scope):
    before = set(os.listdir("/dev/shm"))
    stores = [scope.store(), scope.store()]
    view = stores[0].get(stores[0].put(ramp()))
    (pid,) = scope.brokers()
    (children,) = (Path(f"/proc/{pid}/task/{pid}/children").read_text().split(),)
    assert not children
    assert not _is_child(pid)  # it must not die with who started it
    scope.close()
    stores.clear()
    assert scope.brokers() == [pid]  # a view lives
    assert np.array_equal(view, ramp())
    del view
    gc.collect()
    scope.eventually(lambda: not scope.brokers())
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "mooncake" in name or scope.name in name]
    assert scope.name not in Path("/proc/net/unix").read_text()


def _is_child(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid())


def test_a_broker_survives_who_started_it(scope):
    starter = scope.run("""
store = Store(scope, config)
say(text_of(store.put(np.arange(10))))
wait()
""")
    starter.line()
    (pid,) = scope.brokers()
    store = scope.store()
    starter.kill()
    scope.eventually(lambda: scope.stats()["claims"] == 0)
    assert scope.brokers() == [pid]
    store.free([store.put(ramp())])


def test_no_broker_and_none_to_start(scope, tmp_path, monkeypatch):
    monkeypatch.setattr("mooncake_ray._native.pool.__file__", str(tmp_path / "pool.so"))
    with pytest.raises((BrokerDiedError, FileNotFoundError)):
        Store(scope.name, scope.config)
    program = tmp_path / "mooncake-broker"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(BrokerDiedError, match="it exited with status 3"):
        Store(scope.name, scope.config)


# ---- the storm

# One process that has imported everything forks the clients: killing ten of them a second must not mean ten imports a second.
STORM = """
import mmap, random, signal, zlib
from mooncake_ray.errors import ObjectLostError, ObjectNotFoundError, StoreFullError
SLOTS = 64
board = mmap.mmap(-1, SLOTS * 32)                            # keys, 32 bytes each; a kill may tear one, which then names nothing
tally = np.frombuffer(mmap.mmap(-1, 8 * 256), np.int64)      # three counters a client

def make(rng):
    head = np.array([rng.getrandbits(31), rng.choice([8, 100, 3000, 30_000, 120_000, 250_000])])
    body = np.random.default_rng(head[0]).integers(0, 1 << 60, head[1])
    return {"head": head, "body": body, "crc": zlib.crc32(body)}

def check(value):
    seed, n = value["head"]
    assert np.array_equal(value["body"], np.random.default_rng(seed).integers(0, 1 << 60, n)), "content"
    assert zlib.crc32(value["body"]) == value["crc"], "crc"

def client(number, seed):
    rng, store, mine, views = random.Random(seed), Store(scope, config), [], []
    count = tally[3 * (number % 80):]
    while True:
        what, slot = rng.random(), rng.randrange(SLOTS)
        try:
            if what < 0.4:
                key = store.put(make(rng), timeout_s=0.05)
                mine.append(key)
                board[slot * 32:slot * 32 + 32] = key.pool + key.id
                count[0] += 1
            elif what < 0.5:
                lease = store.create(rng.randrange(1 << 20), timeout_s=0.05)
                lease.copy([(0, np.ones(lease.nbytes // 8 + 1).ctypes.data, 0)])
                if rng.random() < 0.5: mine.append(store.publish(lease))
            elif what < 0.9:
                raw = bytes(board[slot * 32:slot * 32 + 32])
                value = store.get(ObjectKey(raw[:16], raw[16:]), timeout_s=1)
                check(value)
                views.append(value)
                for old in views: check(old)
                count[1] += 1
        except (ObjectNotFoundError, ObjectLostError, StoreFullError, TimeoutError):
            pass
        while len(views) > 4: del views[rng.randrange(len(views))]
        while len(mine) > 12: store.free([mine.pop(rng.randrange(len(mine)))])

signal.signal(signal.SIGCHLD, signal.SIG_DFL)
for line in sys.stdin:
    words = line.split()
    if words[0] == "spawn":
        number, seed = map(int, words[1:])
        pid = os.fork()
        if not pid:
            try:
                client(number, seed)
            except BaseException as e:
                os.write(2, f"client {number}: {type(e).__name__}: {e}\\n".encode())
                os._exit(1)
        say(pid)
    elif words[0] == "kill":
        os.kill(int(words[1]), signal.SIGKILL)
        say(os.waitstatus_to_exitcode(os.waitpid(int(words[1]), 0)[1]))
    elif words[0] == "tally":
        say(*tally.reshape(-1)[:240].reshape(80, 3).sum(0)[:2])
"""


@pytest.mark.timeout(240)
def test_a_storm_of_kills(scope):
    clients, kills, pause_s = 6, 100, 0.1  # the pause is the load, not a way to wait for anything
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)  # shown if the test fails
    rng = random.Random(seed)
    keeper = scope.store(put_timeout_s=120.0)
    treasure = keeper.put(ramp(300_000))
    view = keeper.get(treasure)
    program = scope.run(STORM)

    def ask(*words: object) -> list[int]:
        program.process.stdin.write(" ".join(map(str, words)) + "\n")
        program.process.stdin.flush()
        return [int(w) for w in program.line().split()]

    alive = [ask("spawn", n, rng.getrandbits(32))[0] for n in range(clients)]
    for n in range(clients, clients + kills):
        time.sleep(pause_s)
        assert ask("kill", alive.pop(rng.randrange(clients))) == [-signal.SIGKILL], "a client ended by itself; see its complaint"
        alive.append(ask("spawn", n, rng.getrandbits(32))[0])
        if n % 10 == 0:
            assert np.array_equal(keeper.get(treasure), view)
    scope.eventually(lambda: min(ask("tally")) > 100, lambda: ask("tally"))  # they did work
    for pid in alive:
        assert ask("kill", pid) == [-signal.SIGKILL]
    scope.eventually(lambda: (s := scope.stats())["leases"] == 0 and s["pins"] == 1 and s["claims"] == 1, scope.stats)
    stats = scope.stats()
    assert stats["objects"] == 1
    assert stats["orphans_dropped"] == 0
    assert len(scope.brokers()) == 1
    print(stats, ask("tally"))
    assert np.array_equal(view, ramp(300_000))
    del view
    keeper.free([treasure])
    scope.eventually(scope.is_empty, scope.stats)
    keeper.free([keeper.publish(keeper.create(32 * MIB))])  # in one piece
    program.process.stdin.close()
    assert not program.process.stderr.read()
    program.process.wait()
