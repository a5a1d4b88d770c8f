"""Batches of many producers' rows: nothing is lost or given twice, whoever dies."""

from __future__ import annotations

import gc
import os
import signal
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import until
from ray._private import state as ray_state

import mooncake_ray
from mooncake_ray.data import DataProto
from mooncake_ray.errors import ConfigError, GetTimeoutError, LeaseLostError, SchemaError, StoreError, StoreFullError
from mooncake_ray.objects.catalog_actor import TAKERS

LENGTH = 8192  # of a row: a batch of four is passed on, not copied
LONG_S = 600.0  # a lease whose deadline no test comes to


def tokens(keys):
    """Rows that tell which they are."""
    return {"tokens": torch.stack([torch.full((LENGTH,), number_of(key)) for key in keys])}


def rewards(keys):
    return {"reward": torch.tensor([float(number_of(key)) for key in keys])}


def number_of(key):
    return int(key.split("-")[-1])


def names(count, start=0):
    return [f"row-{n}" for n in range(start, start + count)]


def assert_right(taken):
    """The rows are those that their keys say."""
    for name, column in taken.ref.get(form="as-put").items():
        assert [int(row.reshape(-1)[-1]) for row in column] == [number_of(key) for key in taken.keys], name


class Worker:
    """Publishes, takes, and dies."""

    def __init__(self):
        self.taken = []

    def publish(self, catalog, keys, **options):
        return catalog.publish(keys, tokens(keys), **options)

    def publish_many(self, catalog, keys, partition, size):
        for at in range(0, len(keys), size):
            some = keys[at : at + size]
            catalog.publish(some, tokens(some), partition=partition, operation_id=f"{partition}-{at}")

    def score(self, catalog, partition):
        """Adds rewards to rows as they come, until none do."""
        while True:
            with catalog.take(4, ["tokens"], partition=partition, minimum=1, group="score") as taken:
                if not taken:
                    return
                for name in set(taken.partitions):
                    keys = [key for key, its in zip(taken.keys, taken.partitions, strict=True) if its == name]
                    catalog.publish(keys, rewards(keys), partition=name, create=False)

    def consume(self, catalog, partition, fields):
        """Takes rows until there are none any more; its keys, and how often."""
        seen = []
        while True:
            with catalog.take(5, fields, partition=partition, minimum=2) as taken:
                if not taken:
                    return seen
                assert_right(taken)
            seen += taken.keys  # once they are acknowledged

    def hold(self, catalog, count, **options):
        self.taken.append(catalog.take(count, **options))
        return self.taken[-1].keys

    def ack(self, taken):
        return taken.catalog.ack(taken)

    def drop(self):
        self.taken.clear()
        gc.collect()

    def stats(self):
        return mooncake_ray.stats()

    def pid(self):
        return os.getpid()


@pytest.fixture(scope="module")
def ray(pool_ray):
    return pool_ray


@pytest.fixture(scope="module")
def start(ray):
    """Starts workers."""
    actor = ray.remote(num_cpus=0)(Worker)

    def make(count):
        made = [actor.remote() for _ in range(count)]
        ray.get([one.pid.remote() for one in made])
        return made

    return make


@pytest.fixture(scope="module")
def helper(start):
    """A worker that stays alive, and holds nothing after a test."""
    return start(1)[0]


@pytest.fixture(scope="module")
def shared(ray):
    """A catalog without limits; each test has its own partition."""
    catalog = mooncake_ray.Catalog.create(f"shared-{uuid.uuid4().hex}", groups=("train", "score"), lease_s=LONG_S)
    yield catalog
    catalog.shutdown()


@pytest.fixture
def partition(pool, shared):
    """A partition of the shared catalog, removed after the test, which must leave nothing in the pool."""
    name = uuid.uuid4().hex
    yield name
    shared.drop_partition(name)


@pytest.fixture
def create(pool):
    made = []

    def make(**settings):
        made.append(mooncake_ray.Catalog.create(f"test-{uuid.uuid4().hex}", **settings))
        return made[-1]

    yield make
    while made:
        made.pop().shutdown()


def kill(actor):
    """Also one that is busy."""
    pid = ray_state.actors(actor._actor_id.hex())["Pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


# ---- rows and fields


def test_fields_of_rows_come_from_several_producers(shared, partition, pool, helper, ray):
    keys = names(6)
    ray.get(helper.publish.remote(shared, keys[:4], partition=partition, tags={"version": 3}))
    shared.publish(keys[4:], tokens(keys[4:]), partition=partition, tags=[{"version": 4}, {"version": 5}])
    with pytest.raises(GetTimeoutError, match="had fewer than 1 rows for 'train' within 0 s"):
        shared.take(1, ["tokens", "reward"], partition=partition, timeout_s=0)
    shared.publish([keys[5], keys[1]], rewards([keys[5], keys[1]]), partition=partition)
    shared.publish([keys[0]], rewards([keys[0]]), partition=partition)
    with shared.take(8, ["reward", "tokens"], partition=partition, minimum=1) as taken:
        assert taken.keys == [keys[0], keys[1], keys[5]] and len(taken) == 3
        assert taken.tags == [{"version": 3}, {"version": 3}, {"version": 5}] and taken.partitions == [partition] * 3
        assert set(taken.ref.fields) == {"tokens", "reward"}
        assert_right(taken)
    assert [row.states["train"] for row in shared.list(partition)] == ["acknowledged"] * 2 + ["free"] * 3 + ["acknowledged"]


def test_conditions_on_tags(shared, partition):
    keys = names(5)
    shared.publish(keys, rewards(keys), partition=partition, tags=[{"version": n, "status": "ok" if n else "bad"} for n in range(5)])
    with shared.take(5, partition=partition, minimum=1, where={"version": {"<": 3}, "status": "ok"}) as taken:
        assert taken.keys == keys[1:3]
    shared.publish(keys[:1], None, partition=partition, tags={"status": "ok"})
    with shared.take(5, partition=partition, minimum=1, where={"version": {"<": 3}, "status": "ok"}) as taken:
        assert taken.keys == keys[:1]


@pytest.mark.parametrize("kind", ["mooncake_ray", "dict"])
def test_a_batch_comes_back_as_what_it_was(shared, partition, kind):
    columns = {"ids": torch.arange(12).view(3, 4), "text": np.array(["a", None, {"b": [1]}], object)}
    batch = DataProto.from_columns(columns) if kind == "mooncake_ray" else columns
    shared.publish(names(3), batch, partition=partition)
    with shared.take(2, partition=partition) as taken:
        got = taken.ref.get()
        assert type(got) is type(batch)
        columns_got = got if kind == "dict" else {**got.batch, **got.non_tensor_batch}
        assert torch.equal(columns_got["ids"], columns["ids"][:2]) and columns_got["text"].tolist() == ["a", None]


def test_parts_of_a_stored_batch(shared, partition):
    keys = names(8)
    stored = mooncake_ray.put_batch(tokens(keys) | rewards(keys))
    shared.publish(keys[1::2], stored[1::2], partition=partition)
    shared.publish(keys[:2:2], stored[[0]].select(["tokens"]).append(stored[[0]].select(["reward"])), partition=partition)
    del stored
    with shared.take(5, ["tokens", "reward"], partition=partition) as taken:
        assert taken.keys == [*keys[1::2], keys[0]]
        assert_right(taken)


def padded(lengths, width):
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return {"ids": torch.where(mask, torch.arange(1, width + 1)[None], 0), "mask": mask.long()}


def test_rows_of_different_widths(shared, partition):
    shared.publish(names(2), padded([3, 7], 9), partition=partition)
    shared.publish(names(2, 2), padded([5, 11], 40), partition=partition)
    with pytest.raises(SchemaError, match=r"'ids' is a tensor of int64 with rows \[\*, 2\] .*, and a tensor of int64 with rows \[\*\]"):
        shared.publish(names(2, 4), {"ids": torch.zeros(2, 9, 2, dtype=torch.int64)}, partition=partition)
    with shared.take(4, ["ids"], partition=partition) as taken:
        got = taken.ref.get(form="ragged").batch["ids"]
        assert [row.tolist() for row in got] == [list(range(1, n + 1)) for n in (3, 7, 5, 11)]
        with pytest.raises(SchemaError, match="rows of shape"):
            taken.ref.get()


def test_a_ref_that_names_one_stored_batch_twice(shared, partition):
    """As after pickling its parts one by one."""
    stored = mooncake_ray.put_batch(tokens(names(4)) | rewards(names(4)))
    one, two = (pickled(stored.select([name])) for name in ("tokens", "reward"))
    shared.publish(names(3), one[1:].append(two[1:])[[0, 1, 2]], partition=partition)
    del stored, one, two
    taken = shared.take(3, partition=partition)
    assert taken.ref.get()["reward"].tolist() == [1.0, 2.0, 3.0]
    shared.ack(taken)


def pickled(ref):
    import ray

    return ray.get(ray.put([ref]))[0]


def test_nothing_is_copied(shared, partition, pool, ray):
    keys = names(64)
    before = mooncake_ray.pool_stats()["used_bytes"]
    stored = mooncake_ray.put_batch({"noise": torch.randn(64, LENGTH)})
    alone = mooncake_ray.pool_stats()["used_bytes"] - before
    shared.publish(keys, stored, partition=partition)
    taken = shared.take(32, partition=partition)
    assert alone > 2 << 20 and mooncake_ray.pool_stats()["used_bytes"] - before < alone + (64 << 10)
    assert 0.9 * alone < shared.stats()["bytes"] <= alone
    shared.ack(taken)


# ---- the deaths of producers


def test_rows_outlive_their_producer(shared, partition, pool, start, ray):
    (producer,) = start(1)
    keys = names(4)
    assert ray.get(producer.publish.remote(shared, keys, partition=partition)).new == 4
    kill(producer)
    until(lambda: pool.claims == 1, "the dead producer's claims to end")
    assert pool.objects == 1
    with shared.take(4, partition=partition) as taken:
        assert_right(taken)


@pytest.mark.slow
def test_a_producer_that_dies_while_it_waits_leaves_nothing(create, pool, start, ray):
    catalog = create(capacity_rows=4)
    (producer,) = start(1)
    catalog.publish(names(4), rewards(names(4)))
    until(lambda: pool.claims == 1, "the first batch to be the catalog's alone")
    waiting = producer.publish.remote(catalog, names(4, 10))
    until(lambda: pool.claims >= 3, "the catalog to have the producer's batch too")
    kill(producer)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(waiting)
    until(lambda: pool.objects == 1, "the catalog to give up waiting for room")
    with catalog.take(4) as taken:
        assert taken.keys == names(4)
    del taken
    pool.settles_at(0)
    assert catalog.list() == []


def test_the_retry_of_a_dead_producers_publication(shared, partition, pool, start, ray):
    first, second = start(2)
    keys = names(40)
    first.publish_many.remote(shared, keys, partition, 2)
    until(lambda: len(shared.list(partition)) >= 8, "some rows")
    kill(first)
    ray.get(second.publish_many.remote(shared, keys, partition, 2))
    assert [row.key for row in shared.list(partition)] == keys
    with shared.take(40, partition=partition) as taken:
        assert_right(taken)


def test_one_operation_done_twice_at_once(shared, partition):
    keys = names(4)
    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(shared.publish, keys, tokens(keys), partition=partition, operation_id=partition) for _ in range(12)]
        assert {(a.result().new, a.result().known) for a in answers} == {(4, 0)}
    with shared.take(4, partition=partition) as taken:
        assert_right(taken)
    with pytest.raises(SchemaError, match="was done before with other keys"):
        shared.publish(names(3), rewards(names(3)), partition=partition, operation_id=partition)


# ---- the deaths of consumers


@pytest.mark.slow
def test_what_a_dead_actor_had_is_soon_free(shared, partition, start, ray):
    (consumer,) = start(1)
    keys = names(6)
    shared.publish(keys, tokens(keys), partition=partition)
    assert ray.get(consumer.hold.remote(shared, 4, partition=partition)) == keys[:4]
    kill(consumer)
    with shared.take(6, partition=partition, timeout_s=200) as taken:  # the deadline is much later
        assert taken.keys == keys
        assert_right(taken)


@pytest.mark.slow
def test_a_restarted_actor_is_another_consumer(shared, partition, ray):
    consumer = ray.remote(num_cpus=0, max_restarts=1)(Worker).remote()
    shared.publish(names(2), rewards(names(2)), partition=partition)
    ray.get(consumer.hold.remote(shared, 2, partition=partition))
    kill(consumer)
    assert shared.take(2, partition=partition, timeout_s=200).keys == names(2)


@pytest.mark.slow
def test_a_lease_lasts_while_somebody_has_it(create, helper, ray):
    """One of two processes drops what it took; when that is free again, the other's is still its own."""
    catalog = create(lease_s=2.0)
    catalog.publish(names(4), tokens(names(4)))
    kept = catalog.take(2)
    ray.get(helper.hold.remote(catalog, 2))
    ray.get(helper.drop.remote())
    again = catalog.take(2, timeout_s=200)
    assert again.keys == names(4)[2:] and catalog.stats()["leases_lost"] == 1
    catalog.release(again)
    assert catalog.take(2).keys == names(4)[2:]
    assert catalog.ack(kept) == 2 == catalog.ack(kept)
    assert catalog.stats()["leases_lost"] == 1


@pytest.mark.slow
def test_what_was_taken_goes_to_another_process(create, helper, ray):
    catalog = create()
    catalog.publish(names(4), tokens(names(4)))
    taken = catalog.take(4)
    assert ray.get(helper.ack.remote(taken)) == 4
    assert catalog.stats()["rows"] == 0
    assert_right(taken)  # it is readable as long as there is a ref


def test_a_block_that_raises_gives_rows_back(shared, partition):
    shared.publish(names(3), rewards(names(3)), partition=partition)
    with pytest.raises(ZeroDivisionError), shared.take(2, partition=partition):
        _ = 1 / 0
    with shared.take(3, partition=partition, timeout_s=0) as taken:
        assert taken.keys == names(3)


def test_a_consumer_is_told_that_it_was_too_late(shared, partition):
    shared.publish(names(2), rewards(names(2)), partition=partition)
    with pytest.raises(LeaseLostError, match=r"lease .* of 2 rows has ended"), shared.take(2, partition=partition) as taken:
        shared._call("release", taken.lease)
    assert shared.release(taken) == 0


# ---- bounds


def test_new_rows_wait_for_room(create, pool):
    catalog = create(capacity_rows=4)
    catalog.publish(names(3), tokens(names(3)))
    with pytest.raises(StoreFullError, match=r"had no room within 0.1 s: 3 of 4 rows are used, and 2 more wanted"):
        catalog.publish(names(2, 3), tokens(names(2, 3)), timeout_s=0.1)
    with pytest.raises(StoreFullError, match="5 rows in one publication never fit"):
        catalog.publish(names(5, 3), tokens(names(5, 3)))
    assert catalog.publish(names(3), rewards(names(3)), timeout_s=0).known == 3  # these do not wait
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(catalog.publish, names(2, 3), tokens(names(2, 3)))
        catalog.ack(catalog.take(1))
        assert waiting.result(60).new == 2
    assert catalog.stats()["rows"] == 4


def test_bytes_are_bounded_too(create):
    row = {"noise": torch.randn(1, 1 << 16)}  # 256 KiB
    catalog = create(capacity_bytes=600 << 10)
    for key in names(2):
        catalog.publish([key], row)
    with pytest.raises(StoreFullError, match=r"of 614400 bytes are used, and 26\d+ more wanted"):
        catalog.publish(names(1, 2), row, timeout_s=0)
    catalog.ack(catalog.take(1))
    catalog.publish(names(1, 2), row, timeout_s=0)


def test_those_who_wait_do_not_keep_others_out(create, ray):
    """More takers than the actor has threads for them."""
    catalog = create()
    wanted = {"fields": None, "partitions": None, "at_least": 1, "at_most": 1}
    from mooncake_ray.data.catalog import Where

    waiting = [catalog._actor.take.remote("train", "nobody", Where(), 60.0, wanted) for _ in range(TAKERS + 8)]
    keys = names(TAKERS + 8)
    assert catalog.publish(keys, rewards(keys), timeout_s=30).new == len(keys)
    leases = [answer[0] for answer in ray.get(waiting, timeout=200) if answer is not None]
    got = [row.key for lease in leases for row in lease.rows]
    assert len(got) >= TAKERS and len(set(got)) == len(got)


# ---- the end


def test_a_closed_partition_ends_those_who_wait(shared, partition):
    shared.publish(names(3), rewards(names(3)), partition=partition)
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(shared.take, 5, partition=partition) for _ in range(3)]
        shared.close_partition(partition)
        first = next(iter(done for done in as_they_end(waiting) if len(done)))
        assert first.keys == names(3)
        shared.ack(first)
        assert sorted(len(w.result(60)) for w in waiting) == [0, 0, 3]
    with pytest.raises(StoreError, match="is closed, and row 'row-9' would be new"):
        shared.publish(names(1, 9), rewards(names(1, 9)), partition=partition)
    assert not shared.take(1, partition=partition)


def as_they_end(futures):
    from concurrent.futures import as_completed

    return (future.result() for future in as_completed(futures, timeout=200))


def test_the_end_of_a_catalog(create, ray):
    catalog = create()
    catalog.publish(names(2), tokens(names(2)))
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(catalog.take, 5)
        until(lambda: catalog.stats()["rows"] == 2)
        catalog.shutdown()
        for call in (waiting.result, lambda: catalog.publish(names(1, 5), rewards(names(1, 5))), lambda: catalog.take(1)):
            with pytest.raises(StoreError, match="is gone, and all that it had"):
                call()
    catalog.shutdown()


def test_names(create):
    catalog = create(groups=("a", "b"), lease_s=7)
    again = mooncake_ray.Catalog.connect(catalog.name)
    assert again.groups == ("a", "b") and again.lease_s == 7 and "groups=['a', 'b']" in repr(again)
    with pytest.raises(ConfigError, match=f"a catalog '{catalog.name}' cannot be created"):
        mooncake_ray.Catalog.create(catalog.name)
    with pytest.raises(ConfigError, match="there is no catalog 'nowhere'"):
        mooncake_ray.Catalog.connect("nowhere")


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (SchemaError, "there are 2 keys and 3 rows", lambda c, p: c.publish(names(2), rewards(names(3)), partition=p)),
        (SchemaError, "key 'row-1' is there twice", lambda c, p: c.publish(["row-1"] * 2, rewards(names(2)), partition=p)),
        (SchemaError, "has no row 'row-7'", lambda c, p: c.publish(names(1, 7), rewards(names(1)), partition=p, create=False)),
        (SchemaError, "has field 'reward' already", lambda c, p: c.publish(names(1), rewards(names(1)), partition=p)),
        (
            SchemaError,
            r"field 'reward' is a tensor of int64 with rows \[\] in what is published, and a tensor of float32 with rows \[\] in the catalog",
            lambda c, p: c.publish(names(1, 5), {"reward": torch.ones(1, dtype=torch.int64)}, partition=p),
        ),
        (SchemaError, "is no batch", lambda c, p: c.publish(names(1, 5), 3, partition=p)),
        (ValueError, "there is no group 'evil'", lambda c, p: c.take(1, group="evil")),
        (ValueError, "at_least must be positive", lambda c, p: c.take(1, minimum=2)),
        (ValueError, "fields must be None or name at least one", lambda c, p: c.take(1, [])),
        (ValueError, "operator '=>'", lambda c, p: c.take(1, where={"version": {"=>": 1}})),
        (ValueError, "timeout_s must not be negative", lambda c, p: c.take(1, timeout_s=-1)),
        (ValueError, "capacity_rows must be positive", lambda c, p: mooncake_ray.Catalog.create("x", capacity_rows=0)),
    ],
)
def test_what_is_refused(shared, partition, error, message, call):
    shared.publish(names(2), rewards(names(2)), partition=partition)
    with pytest.raises(error, match=message):
        call(shared, partition)
    assert [row.key for row in shared.list(partition)] == names(2)


# ---- all together


@pytest.mark.slow  # fourteen processes to start
def test_every_row_once(create, pool, start, ray):
    """Eight producers, two who score, four who train, and room for few rows."""
    catalog = create(capacity_rows=24, groups=("train", "score"))
    workers = start(14)
    producers, scorers, trainers = workers[:8], workers[8:10], workers[10:]
    parts = [names(20, 100 * n) for n in range(8)]
    publishing = [w.publish_many.remote(catalog, keys, f"p{n}", 2) for n, (w, keys) in enumerate(zip(producers, parts, strict=True))]
    partitions = [f"p{n}" for n in range(8)]
    scoring = [w.score.remote(catalog, partitions) for w in scorers]
    training = [w.consume.remote(catalog, partitions, ["tokens", "reward"]) for w in trainers]
    ray.get(publishing)
    for name in partitions:
        catalog.close_partition(name)
    seen = Counter(key for keys in ray.get(training) for key in keys)
    ray.get(scoring)
    assert seen == Counter(key for keys in parts for key in keys)
    assert catalog.stats()["rows"] == 0 and catalog.stats()["leases_lost"] == 0
    pool.settles_at(0)


def test_every_row_once_while_workers_die(create, pool, start, helper, ray):
    """A producer and a trainer are killed in the middle. Rows that were acknowledged are not given again; every row is acknowledged once."""
    catalog = create(lease_s=LONG_S)
    workers = start(5)
    parts = [names(30, 100 * n) for n in range(2)]
    publishing = [w.publish_many.remote(catalog, keys, f"p{n}", 2) for n, (w, keys) in enumerate(zip(workers, parts, strict=False))]
    training = [w.consume.remote(catalog, ["p0", "p1"], ["tokens"]) for w in workers[2:]]
    until(lambda: catalog.stats()["rows_acknowledged"] >= 6, "some rows to be through")
    kill(workers[0])
    kill(workers[2])
    ray.wait(publishing[:1])
    ray.get([helper.publish_many.remote(catalog, parts[0], "p0", 2), publishing[1]])
    for name in ("p0", "p1"):
        catalog.close_partition(name)
    seen = [key for keys in ray.get(training[1:]) for key in keys]
    stats = catalog.stats()
    assert len(set(seen)) == len(seen) and stats["rows_published"] == stats["rows_acknowledged"] == stats["rows_finished"] == 60
    assert stats["rows"] == 0
    del publishing, training
    pool.settles_at(0)
