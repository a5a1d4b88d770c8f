"""A broker is killed, and the next one has what the first had spilled: nothing else, nothing wrong, nothing for ever."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import pids, run_script, until

from mooncake_ray.errors import BrokerDiedError, ObjectLostError, ObjectNotFoundError
from mooncake_ray.store import ObjectKey, Store

MIB = 1 << 20
COUNT = 64


def filled(seed: int, nbytes: int = MIB) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture
def disk(tmp_path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def spilling(disk, scope_with) -> Iterator:
    scope = scope_with(spill_dir=str(disk))
    yield scope
    for store in scope.stores:
        store.close()
    scope.stores.clear()
    gc.collect()
    scope.close()
    until(lambda: not scope.brokers(), "the end of the broker")
    until(lambda: not disk.exists() or list(disk.iterdir()) == [], "an empty disk")


def kill_broker(scope) -> int:
    (pid,) = scope.brokers()
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid not in scope.brokers(), "the death of the broker")
    return pid


def settled(store: Store) -> dict:
    """The state once nothing is on its way to the disk."""
    until(lambda: store.stats()["writing_bytes"] == 0, "the end of the writing")
    return store.stats()


def meet_the_next_broker(store: Store) -> None:
    with pytest.raises(BrokerDiedError):
        store.stats()
    store.stats()


def sort_out(store: Store, keys: list[ObjectKey]) -> tuple[list[int], list[int]]:
    """Which of the objects come back, as they were, and which are lost."""
    back, lost = [], []
    for i, key in enumerate(keys):
        try:
            assert np.array_equal(store.get(key), filled(i)), i
            back.append(i)
        except ObjectLostError:
            lost.append(i)
    return back, lost


def test_what_was_spilled_comes_back_and_the_rest_is_lost(spilling):
    store = spilling.store()
    keys = [store.put(filled(i)) for i in range(COUNT)]
    stats = settled(store)
    on_disk = stats["disk_bytes"] // (MIB + 4096)
    view = store.get(keys[-1])
    lease = store.create(MIB)
    kill_broker(spilling)
    meet_the_next_broker(store)
    assert store.stats()["generation"] == 1
    assert store.stats()["objects"] == on_disk
    back, lost = sort_out(store, keys)
    assert len(back) == on_disk >= 32
    assert lost and min(lost) > max(back[:10])
    assert np.array_equal(view, filled(COUNT - 1))
    with pytest.raises(BrokerDiedError):
        store.publish(lease)
    again = [store.put(filled(i)) for i in range(COUNT)]
    assert not {k.id for k in again} & {k.id for k in keys}
    assert all(np.array_equal(store.get(k), filled(i)) for i, k in enumerate(again))
    store.free(again)
    with pytest.raises(ObjectNotFoundError):
        store.get(again[0])  # freed here and now: not lost
    store.free([keys[i] for i in back])
    lease.abort()
    spilling.eventually(spilling.is_empty, spilling.stats)
    assert store.stats()["disk_bytes"] == 0


def test_again_and_again(spilling):
    store = spilling.store()
    keys = [store.put(filled(i)) for i in range(COUNT)]
    settled(store)
    kept = None
    for generation in (1, 2, 3):
        kill_broker(spilling)
        meet_the_next_broker(store)
        assert store.stats()["generation"] == generation
        back, _ = sort_out(store, keys)
        assert kept is None or back == kept
        kept = back
    store.free([keys[i] for i in kept])
    spilling.eventually(spilling.is_empty, spilling.stats)


def test_what_was_not_noted_takes_no_room_on_the_disk(spilling, disk):
    """The dead broker was writing to the spill file, or had yet to give back what was freed."""
    store = spilling.store()
    keys = [store.put(filled(i)) for i in range(COUNT)]
    settled(store)
    store.free(keys[8:16])
    (data,) = disk.rglob("data")
    with open(data, "r+b", buffering=0) as file:

        def freed() -> int:
            return os.lseek(file.fileno(), 0, os.SEEK_HOLE)

        until(lambda: freed() < data.stat().st_size, "a hole")
        kill_broker(spilling)
        for at in (freed(), data.stat().st_size):
            os.pwrite(file.fileno(), bytes([1]) * (MIB // 2), at)
        meet_the_next_broker(store)
        back, _ = sort_out(store, keys[:8])
        assert back == list(range(8))
        store.free(keys)
        until(lambda: not data.stat().st_blocks, "an empty file")


def test_an_owner_that_does_nothing_keeps_its_objects(spilling):
    reader = spilling.store()
    owner = spilling.run(
        """
store = Store(scope, config)
keys = [store.put(np.random.default_rng(i).integers(0, 256, 1 << 20, dtype=np.uint8)) for i in range(64)]
while store.stats()["writing_bytes"]:
    pass
say(" ".join(map(text_of, keys)))
wait()
try:
    store.stats()
except Exception as e:
    say(type(e).__name__)
store.free(keys[:8])
say("freed", store.stats()["generation"])
wait()
"""
    )
    keys = [ObjectKey(*map(bytes.fromhex, text.split(":"))) for text in owner.line().split()]
    reader.stats()
    kill_broker(spilling)
    meet_the_next_broker(reader)
    back, _ = sort_out(reader, keys)
    assert len(back) >= 32
    owner.go()
    assert owner.line() == "BrokerDiedError"
    assert owner.line() == "freed 1"
    until(lambda: reader.stats()["objects"] == len(back) - len([i for i in back if i < 8]), "what the owner freed to go")
    owner.kill()
    until(lambda: reader.stats()["objects"] == 0, "what a dead process owned to go")
    assert reader.stats()["disk_bytes"] == 0


def test_a_broker_that_ends_meanwhile_leaves_what_absent_owners_have(spilling, disk):
    owner = spilling.run(
        """
store = Store(scope, config)
keys = [store.put(np.random.default_rng(i).integers(0, 256, 1 << 20, dtype=np.uint8)) for i in range(64)]
while store.stats()["writing_bytes"]:
    pass
say("ready")
wait()
try:
    store.stats()
except Exception as e:
    say(type(e).__name__)
back = 0
for i, key in enumerate(keys):
    try:
        assert np.array_equal(store.get(key), np.random.default_rng(i).integers(0, 256, 1 << 20, dtype=np.uint8))
        back += 1
    except Exception:
        pass
say(back, store.stats()["generation"])
store.close()
"""
    )
    assert owner.line() == "ready"
    kill_broker(spilling)
    visitor = Store(spilling.name, spilling.config)
    assert visitor.stats()["generation"] == 1
    visitor.close()
    until(lambda: not spilling.brokers(), "the end of a broker that nobody uses")
    assert list(disk.glob("*/*/data"))
    owner.go()
    assert owner.line() == "BrokerDiedError"
    back, generation = map(int, owner.line().split())
    assert back >= 32 and generation == 2
    owner.finish()


def test_an_owner_that_died_with_the_broker_owns_nothing(spilling):
    reader = spilling.store()
    reader.put(filled(1000))
    owner = spilling.run(
        """
store = Store(scope, config)
keys = [store.put(np.random.default_rng(i).integers(0, 256, 1 << 20, dtype=np.uint8)) for i in range(64)]
say(text_of(keys[0]))
wait()
"""
    )
    key = ObjectKey(*map(bytes.fromhex, owner.line().split(":")))
    mine = [reader.put(filled(i)) for i in range(COUNT)]
    settled(reader)
    kill_broker(spilling)
    owner.kill()
    meet_the_next_broker(reader)
    with pytest.raises(ObjectLostError, match="was lost when its broker died"):
        reader.get(key)
    back, _ = sort_out(reader, mine)
    assert len(back) >= 32
    assert reader.stats()["objects"] <= len(back) + 1


def test_nobody_is_left_but_the_janitor(spilling, disk):
    owner = spilling.run("""
store = Store(scope, config)
keys = [store.put(np.zeros(1 << 17)) for i in range(64)]
say("ready")
wait()
""")
    assert owner.line() == "ready"
    until(lambda: list(disk.glob("*/*/data")), "a spill file")
    kill_broker(spilling)
    assert list(disk.glob("*/*/data"))
    owner.kill()
    until(lambda: list(disk.iterdir()) == [], "the janitor's work")


def test_what_nobody_cleaned_up_the_next_broker_does(spilling, disk, scope_with):
    owner = spilling.run("""
store = Store(scope, config)
keys = [store.put(np.zeros(1 << 17)) for i in range(64)]
say("ready")
wait()
""")
    assert owner.line() == "ready"
    until(lambda: list(disk.glob("*/*/data")), "a spill file")
    for pid in pids("mooncake-janitor", str(disk)):
        os.kill(pid, signal.SIGKILL)
    kill_broker(spilling)
    owner.kill()
    (left,) = disk.glob("*/*")
    other = scope_with(spill_dir=str(disk))
    store = other.store()
    keys = [store.put(filled(i)) for i in range(COUNT)]
    until(lambda: not left.exists(), "the next janitor's work")
    store.free(keys)
    other.close()


def test_puts_while_brokers_die(spilling):
    """Every call ends in success or a typed error, and whatever can be got is what was put."""
    store = spilling.store()
    kept: dict[int, ObjectKey] = {}
    for seed in range(240):
        if seed % 40 == 20:
            kill_broker(spilling)
        try:
            kept[seed] = store.put(filled(seed))
        except BrokerDiedError:
            continue
        try:
            assert np.array_equal(store.get(kept[seed]), filled(seed))
        except (BrokerDiedError, ObjectLostError):
            del kept[seed]
    got = 0
    for seed, key in kept.items():
        try:
            assert np.array_equal(store.get(key), filled(seed))
            got += 1
        except ObjectLostError:
            pass
    assert got >= 32


def test_a_job_goes_on(tmp_path):
    """Returns, puts and an actor's puts: what was spilled is there after the broker's death, follows Ray's counts, and the job goes on."""
    run_script(
        """
import gc, os, signal
import ray, torch, mooncake_ray
from conftest import ray_init, until
N = 1 << 17  # int64: 1 MiB
def settles(**expected):
    def there():
        gc.collect()
        stats = mooncake_ray.pool_stats()
        return all(stats[name] == n for name, n in expected.items())
    until(there, f"{expected}: {mooncake_ray.pool_stats()}")

mooncake_ray.install(capacity_bytes=16 << 20, prefault_bytes=16 << 20, spill_dir=DIR)
ray_init()

@ray.remote
def made(i):
    return torch.full((N,), i)

@ray.remote
class Keeper:
    def __init__(self):
        self.refs = [ray.put(torch.full((N,), 1000 + i)) for i in range(12)]
    def refs_of_mine(self):
        return self.refs
    def drop(self):
        self.refs = []
    def pid(self):
        return os.getpid()

def back(refs, base):
    count = 0
    for i, ref in enumerate(refs):
        try:
            assert bool((ray.get(ref) == base + i).all()), (base, i)
            count += 1
        except ray.exceptions.ObjectLostError as e:
            assert "was lost when its broker died" in str(e), e
    return count

keeper = Keeper.remote()
theirs = ray.get(keeper.refs_of_mine.remote())
returns = [made.remote(i) for i in range(12)]
ray.wait(returns, num_returns=12)
mine = [ray.put(torch.full((N,), 100 + i)) for i in range(24)]
until(lambda: mooncake_ray.pool_stats()["writing_bytes"] == 0)
before = mooncake_ray.pool_stats()
os.kill(before["pid"], signal.SIGKILL)
def renewed():
    try:
        return mooncake_ray.pool_stats()["pid"] != before["pid"]
    except mooncake_ray.BrokerDiedError:
        return False
until(renewed)
stats = mooncake_ray.pool_stats()
assert stats["generation"] == 1, stats
survivors = stats["objects"]
assert survivors >= 24, stats
counts = back(returns, 0), back(mine, 100), back(theirs, 1000)
assert sum(counts) == survivors, (counts, stats)
assert counts[0] == 12 and counts[2] == 12, counts  # the oldest went to the disk first
assert bool((ray.get(made.remote(7)) == 7).all())
del returns
settles(objects=counts[1] + counts[2])
ray.get(keeper.drop.remote())
assert back(theirs, 1000) == 12  # borrowed here
del theirs
settles(objects=counts[1])
mine = None
settles(objects=0, claims=0, disk_bytes=0)
assert mooncake_ray.stats()["fallbacks"] == 0
ray.shutdown()
until(lambda: os.listdir(DIR) == [], "an empty disk")
""".replace("DIR", repr(str(tmp_path)))
    )


@pytest.mark.slow
def test_an_actor_that_dies_with_the_broker(tmp_path):
    run_script(
        """
import os, signal
import ray, torch, mooncake_ray
from conftest import ray_init, until
N = 1 << 17
mooncake_ray.install(capacity_bytes=16 << 20, prefault_bytes=16 << 20, spill_dir=DIR)
ray_init()

@ray.remote
class Keeper:
    def __init__(self):
        self.refs = [ray.put(torch.full((N,), i)) for i in range(32)]
    def both(self):
        return self.refs, os.getpid()

keeper = Keeper.remote()
refs, pid = ray.get(keeper.both.remote())
until(lambda: mooncake_ray.pool_stats()["writing_bytes"] == 0)
os.kill(mooncake_ray.pool_stats()["pid"], signal.SIGKILL)
os.kill(pid, signal.SIGKILL)
def empty():
    try:
        return mooncake_ray.pool_stats()["objects"] == 0
    except mooncake_ray.BrokerDiedError:
        return False
until(empty)
for ref in refs:
    try:
        ray.get(ref)
    except (ray.exceptions.OwnerDiedError, ray.exceptions.ObjectLostError):
        continue
    raise AssertionError("got what a dead process owned")
until(lambda: mooncake_ray.pool_stats()["disk_bytes"] == 0)
ray.shutdown()
until(lambda: os.listdir(DIR) == [], "an empty disk")
""".replace("DIR", repr(str(tmp_path)))
    )
