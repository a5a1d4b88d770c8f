"""More than fits: objects go to the disk and come back; who waits waits in order; a full disk loses nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import until

from mooncake_ray.errors import GetTimeoutError, ObjectNotFoundError, StoreFullError
from mooncake_ray.store import node

MIB = 1 << 20


def filled(seed: int, nbytes: int = MIB) -> np.ndarray:
    """An array nobody can mistake for another one."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def put_until_full(store, keys: list, timeout_s: float = 0.5) -> None:
    """Raises when no more fits."""
    for i in range(100):
        keys.append(store.put(filled(i), timeout_s=timeout_s))


def lease_until_full(store, leases: list) -> None:
    while True:
        leases.append(store.create(MIB // 4, timeout_s=0.1))


@pytest.fixture
def spilling(tmp_path, scope_with) -> Iterator:
    """A pool of 32 MiB that spills to a directory of the test's."""
    scope = scope_with(spill_dir=str(tmp_path))
    yield scope
    for store in scope.stores:
        store.close()
    scope.stores.clear()
    gc.collect()
    scope.eventually(scope.is_empty, scope.stats)
    assert scope.stats()["disk_bytes"] == 0
    scope.close()
    until(lambda: not scope.brokers(), "the end of the broker")
    until(lambda: list(tmp_path.iterdir()) == [], "an empty disk")


def test_four_times_what_fits(spilling):
    store = spilling.store()
    keys = [store.put(filled(i)) for i in range(128)]
    stats = store.stats()
    assert stats["used_bytes"] <= stats["capacity_bytes"] == 32 * MIB
    assert stats["spilled_bytes"] >= 96 * MIB
    for i in np.random.default_rng(0).permutation(128):
        assert np.array_equal(store.get(keys[i]), filled(i))
    store.free(keys)
    with pytest.raises(ObjectNotFoundError):
        store.get(keys[0])


def test_views_stay_what_they_are_while_everything_else_moves(spilling):
    store = spilling.store()
    held = [store.get(store.put(filled(i))) for i in range(20)]
    for i in range(100):
        store.free([store.put(filled(1000 + i, 2 * MIB))])
    more = [store.put(filled(2000 + i)) for i in range(100)]
    for i, view in enumerate(held):
        assert np.array_equal(view, filled(i))
    for i, key in enumerate(more):
        assert np.array_equal(store.get(key), filled(2000 + i))


def test_a_get_never_waits_for_room(spilling):
    store = spilling.store()
    keys = [store.put(filled(i)) for i in range(64)]
    pinned = [store.view(k) for k in keys[32:60]]
    leases: list = []
    with pytest.raises(StoreFullError):
        lease_until_full(store, leases)
    before = store.stats()["served_from_disk"]
    views = [store.view(k) for k in keys[:8]]  # more than what is left
    for i, view in enumerate(views):
        assert np.array_equal(np.frombuffer(view, np.uint8)[-MIB:], filled(i))
    assert store.stats()["served_from_disk"] > before
    assert len(pinned) == 28
    assert leases


def test_what_came_from_the_disk_can_be_written_by_its_reader_alone(spilling):
    store = spilling.store()
    keys = [store.put({"x": filled(i)}) for i in range(64)]
    mine, other = store.view(keys[0], mutable=True), store.view(keys[0])
    before = bytes(other)
    mine[:] = bytes(len(mine))
    assert bytes(other) == before
    assert np.array_equal(store.get(keys[0])["x"], filled(0))


def test_what_is_pinned_is_not_spilled_and_the_error_says_who_pins(spilling):
    store = spilling.store()
    views = [store.get(store.put(filled(i))) for i in range(31)]
    with pytest.raises(StoreFullError, match=r"reads 31\.\d MiB"):
        store.create(4 * MIB, timeout_s=0.2)
    assert store.stats()["spilled_objects"] == 0
    del views[:8]
    store.free([store.publish(store.create(4 * MIB, timeout_s=200))])


def test_puts_of_many_processes_all_arrive(spilling):
    keeper = spilling.store()
    programs = [
        spilling.run(
            """
store = Store(scope, config)
seed = int(sys.argv[1])
keys = [store.put(np.random.default_rng(seed + i).integers(0, 256, 1 << 20, dtype=np.uint8), timeout_s=200) for i in range(24)]
say(" ".join(map(text_of, keys)))
wait()
""",
            1000 * n,
        )
        for n in range(3)
    ]
    from mooncake_ray.store import ObjectKey

    for n, program in enumerate(programs):
        for i, text in enumerate(program.line().split()):
            key = ObjectKey(*map(bytes.fromhex, text.split(":")))
            assert np.array_equal(keeper.get(key), np.random.default_rng(1000 * n + i).integers(0, 256, MIB, dtype=np.uint8))
    for program in programs:
        program.go()
        program.finish()


def test_freeing_what_is_on_its_way(spilling):
    store = spilling.store()
    for round in range(20):
        keys = [store.put(filled(i, 2 * MIB)) for i in range(24)]
        store.free(keys[::2])
        for i in (1, 11, 23):
            assert np.array_equal(store.get(keys[i]), filled(i, 2 * MIB)), round
        store.free(keys[1::2])


def test_threads_put_get_and_free_at_once(spilling):
    store = spilling.store()
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            kept = []
            for i in range(60):
                kept.append((1000 * n + i, store.put(filled(1000 * n + i, (1 + i % 3) * MIB // 2), timeout_s=200)))
                seed, key = kept[(7 * i) % len(kept)]
                assert np.array_equal(store.get(key), filled(seed, (1 + seed % 1000 % 3) * MIB // 2))
                if len(kept) > 20:
                    store.free([kept.pop(0)[1]])
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_a_limit_on_the_disk(tmp_path, scope_with):
    scope = scope_with(spill_dir=str(tmp_path), spill_bytes=16 * MIB)
    store = scope.store()
    keys = []
    with pytest.raises(StoreFullError, match="limit of 16777216 bytes"):
        put_until_full(store, keys)
    assert len(keys) >= 40
    for i, key in enumerate(keys):
        assert np.array_equal(store.get(key), filled(i))
    scope.close()


def test_a_full_disk_loses_nothing_and_says_so(tmp_path, scope_with):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(small)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system of its own cannot be mounted: {mounted.stderr.decode().strip()}")
    try:
        scope = scope_with(spill_dir=str(small))
        store = scope.store()
        keys = []
        with pytest.raises(StoreFullError, match=r"disk is all but full|No space left"):
            put_until_full(store, keys)
        assert len(keys) >= 40
        assert "small" in store.stats()["spill_error"]
        for i, key in enumerate(keys):
            assert np.array_equal(store.get(key), filled(i))
        store.free(keys[:30])
        keys += [store.put(filled(1000 + i), timeout_s=200) for i in range(20)]  # the disk is tried again
        for i, key in enumerate(keys[-20:]):
            assert np.array_equal(store.get(key), filled(1000 + i))
        scope.close()
        until(lambda: not scope.brokers(), "the end of the broker")
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_directory_that_cannot_be_used(tmp_path, scope_with):
    (tmp_path / f"mooncake_ray-{os.geteuid()}").write_text("in the way")
    scope = scope_with(spill_dir=str(tmp_path))
    store = scope.store()
    keys = []
    with pytest.raises(StoreFullError, match=r"nothing can be spilled: .*mooncake_ray-"):
        put_until_full(store, keys)
    for i, key in enumerate(keys):
        assert np.array_equal(store.get(key), filled(i))
    scope.close()


def test_a_job_has_its_quota(scope_with, tmp_path):
    scope = scope_with(spill_dir="off", quota_bytes=8 * MIB)
    store = scope.store()
    greedy = node.connect(node.broker_name(scope.name), scope.config, group="greedy")
    modest = node.connect(node.broker_name(scope.name), scope.config, group="modest")
    leases = [greedy.create(greedy.new_id(), MIB, 0) for _ in range(8)]
    with pytest.raises(StoreFullError, match=r"group greedy has 8\.0 MiB of its quota of 8\.0 MiB"):
        greedy.create(greedy.new_id(), MIB, 0.1)
    with pytest.raises(StoreFullError, match="larger than the pool"):
        modest.create(modest.new_id(), 9 * MIB, 60)
    leases += [modest.create(modest.new_id(), MIB, 0) for _ in range(8)]
    assert {g["name"]: g["resident_bytes"] for g in store.stats()["groups"]}["greedy"] == 8 * MIB
    for lease in leases:
        lease.abort()
    greedy.close()
    modest.close()
    scope.close()


def test_a_job_over_its_quota_spills_its_own(scope_with, tmp_path):
    scope = scope_with(spill_dir=str(tmp_path), quota_bytes=8 * MIB)
    scope.store()
    greedy = node.connect(node.broker_name(scope.name), scope.config, group="greedy")
    modest = node.connect(node.broker_name(scope.name), scope.config, group="modest")

    def put(client, seed: int) -> bytes:
        lease = client.create(client.new_id(), MIB, 60)
        memoryview(lease)[:] = filled(seed).tobytes()
        lease.seal(3, lease.id)
        return lease.id

    theirs = [put(modest, i) for i in range(4)]
    ours = [put(greedy, 100 + i) for i in range(40)]
    stats = scope.stats()
    sizes = {g["name"]: g["resident_bytes"] for g in stats["groups"]}
    assert sizes["modest"] == 4 * MIB
    assert sizes["greedy"] <= 8 * MIB
    for i, id in enumerate(ours):
        assert bytes(greedy.get(id, 60)) == filled(100 + i).tobytes()
    for i, id in enumerate(theirs):
        assert bytes(modest.get(id, 60)) == filled(i).tobytes()
    greedy.close()
    modest.close()
    scope.close()


def test_the_pool_grows_by_further_arenas(scope_with):
    scope = scope_with(arena_bytes=8 * MIB, prefault_bytes=MIB)
    early = scope.store()
    keys = [early.put(filled(i, 3 * MIB)) for i in range(4)]
    late = scope.store()
    large = late.put(filled(99, 7 * MIB))
    assert len(early.stats()["arenas"]) >= 3
    for i, key in enumerate(keys):
        assert np.array_equal(late.get(key), filled(i, 3 * MIB))
    assert np.array_equal(early.get(large), filled(99, 7 * MIB))
    with pytest.raises(StoreFullError):
        early.create(30 * MIB, timeout_s=0.1)
    early.grow(96 * MIB)
    assert late.stats()["capacity_bytes"] == 96 * MIB
    more = early.put(filled(7, 40 * MIB), timeout_s=200)  # larger than any arena there was
    assert np.array_equal(late.get(more), filled(7, 40 * MIB))
    with pytest.raises(StoreFullError, match="may grow to"):
        early.grow(1 << 50)
    early.free([*keys, more])
    late.free([large])
    scope.close()


@pytest.fixture
def huge_pages() -> Iterator[None]:
    setting = Path("/proc/sys/vm/nr_hugepages")
    before = setting.read_text()
    try:
        setting.write_text("20")
    except OSError as e:
        pytest.skip(f"huge pages cannot be reserved: {e}")
    if int(setting.read_text()) < 20:
        setting.write_text(before)
        pytest.skip("the machine has no 20 huge pages to spare")
    yield
    setting.write_text(before)


def test_reserved_huge_pages(huge_pages, scope_with):
    scope = scope_with(huge_pages="hugetlb")
    store, other = scope.store(), scope.store()
    assert store.stats()["arenas"][0]["huge_pages"] == "hugetlb"
    key = store.put(filled(1, 3 * MIB))
    assert np.array_equal(other.get(key), filled(1, 3 * MIB))
    mine, theirs = store.view(key, mutable=True), other.view(key)
    mine[:] = bytes(len(mine))
    assert np.array_equal(np.frombuffer(theirs, np.uint8)[-3 * MIB :], filled(1, 3 * MIB))
    del mine, theirs
    store.free([key])
    scope.eventually(scope.is_empty, scope.stats)
    scope.close()
    until(lambda: not scope.brokers(), "the end of the broker")


def test_no_huge_pages_where_they_were_asked_for(scope_with):
    from mooncake_ray.errors import BrokerDiedError

    if "HugePages_Free:        0" not in Path("/proc/meminfo").read_text():
        pytest.skip("there are reserved huge pages")
    with pytest.raises(BrokerDiedError, match="16 reserved huge pages"):
        scope_with(huge_pages="hugetlb").store()


def test_a_get_that_cannot_be_had_in_time(spilling):
    store = spilling.store()
    lease = store.create(MIB)
    with pytest.raises(GetTimeoutError):
        store.client.get(lease.id, 0.05)
    lease.abort()
