"""The checkpoint engine for verl, both ends in this process: what is given, when, and what happens if something does not come along."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import ray
import torch

pytest.importorskip("codetiming", reason="verl's workers need it")
from verl_actors import model, same
from verl_group import BUCKET, SMALL, Engine, Group, board, errors, leaks_allowed, loses  # noqa: F401 - fixtures

from mooncake_ray.errors import ChecksumError, ConfigError, PlanError, StaleVersionError, StoreFullError, SyncAbortedError, SyncTimeoutError
from mooncake_ray.integrations.verl_weights import board as boards
from mooncake_ray.integrations.verl_weights import seat as seats
from mooncake_ray.objects import blobs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
NEW_BOARD = boards.new_board  # which the fixture replaces


@pytest.mark.parametrize("staging", ["version", "buckets"])
@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (2, 3), (3, 1)])
def test_bit_for_bit(pool, senders, receivers, staging):
    group = Group(senders, receivers, staging=staging, window=1)
    assert all(group.succeeds(seed) for seed in (1, 2, 3))


def test_what_verls_own_engine_gives(pool):
    """The only one of verl's that runs without accelerators: it hands the tensors over in the process."""
    from verl.checkpoint_engine import CheckpointEngineRegistry

    naive = CheckpointEngineRegistry.new("naive", bucket_size=1 << 20)
    naive.send_weights(iter(model(5).items()), global_steps=5)
    group = Group(2, 1)
    assert group.succeeds(5) and same(group.got[0], dict(naive.receive_weights(global_steps=5)))


def test_each_byte_is_written_once(pool):
    group = Group(3, 2)
    done = group.passes(*[model(1)] * 3)
    sent = [each["checkpoint_engine/payload_mbytes"] * (1 << 20) for each in done[:3]]
    total = sum(tensor.nbytes for tensor in model(1).values())
    assert total <= sum(sent) < total + 64 * len(model(1)) and max(sent) - min(sent) <= 2 * BUCKET


def test_buckets_are_few_at_a_time(pool):
    """Trainers wait for who reads: the pool never has more than the window, and what is just read."""
    group, most = Group(2, 2, staging="buckets", window=1), 0
    big = {f"t{n}": torch.full((1 << 14,), float(n)) for n in range(40)}  # each one bucket

    def watched():
        nonlocal most
        for item in big.items():
            most = max(most, pool.objects)
            yield item

    group.passes(watched(), big)
    assert all(same(got, big) for got in group.got)
    assert 2 <= most <= 8, most


def test_dtype_of_rollouts(pool):
    group = Group(2, 1, rollout_dtype="bfloat16")
    group.passes(model(1), model(1))
    expected = {n: t.bfloat16() if t.is_floating_point() else t for n, t in model(1).items()}
    assert same(group.got[0], expected)


def test_trainers_that_disagree(pool):
    group = Group(2, 2)
    done = group.update(model(1), {**model(1), "more": torch.zeros(3)})
    assert all(isinstance(each, PlanError) for each in done[2:]) and any("trainers" in str(each) for each in done[:2]), done
    assert group.got == [{}, {}]
    assert group.succeeds(2)


def failing(seed: int, after: int):
    for number, item in enumerate(model(seed).items()):
        if number == after:
            raise RuntimeError("out of memory")
        yield item


@pytest.mark.parametrize("staging", ["version", "buckets"])
def test_a_trainer_that_fails(pool, staging):
    group = Group(2, 2, staging=staging)
    done = group.update(model(1), failing(1, 7))
    assert isinstance(done[1], RuntimeError)
    for each in done[2:]:
        assert isinstance(each, SyncAbortedError) and "trainer rank 1" in str(each) and "out of memory" in str(each)
    if staging == "version":
        assert group.got == [{}, {}]
    assert group.succeeds(2)


def test_a_trainer_without_room_goes_through_its_weights(pool, monkeypatch):
    """To make tensors whole takes all ranks: those that can write would wait for it otherwise."""
    group, given = Group(1, 1), []

    def watched():
        for name, tensor in model(1).items():
            given.append(name)
            yield name, tensor

    def full(*_, **__):
        raise StoreFullError("no room")

    monkeypatch.setattr(blobs, "write", full)
    done = group.update(watched())
    assert isinstance(done[0], StoreFullError) and isinstance(done[1], SyncAbortedError) and "no room" in str(done[1])
    assert given == list(model(1))
    monkeypatch.undo()
    assert group.succeeds(2)


def test_a_trainer_that_is_too_late(pool):
    def slow():
        yield "a", torch.zeros(BUCKET)
        time.sleep(0.6)
        yield "b", torch.zeros(BUCKET)

    done = Group(1, 1, timeout_s=0.5).update(slow())
    assert all(isinstance(each, SyncTimeoutError | SyncAbortedError) for each in done) and isinstance(done[0], SyncTimeoutError), done


def test_bytes_that_do_not_come(pool, monkeypatch):
    """A worker that waits for them gives up in time."""
    group, go, came = Group(1, 1, timeout_s=1.0), threading.Event(), []

    def waits(bucket):
        came.append(go.wait(20))
        return fetch(bucket)

    fetch = group.receivers[0]._receiver.fetch
    monkeypatch.setattr(group.receivers[0]._receiver, "fetch", waits)
    group.connect()

    async def until_one_gives_up():
        done = await group.everybody(model(1))
        assert not came, "it waited for the bytes"
        go.set()
        return done

    done = asyncio.run(until_one_gives_up())
    assert isinstance(done[1], SyncTimeoutError) and "1 s" in str(done[1]) and group.got == [{}]


def test_a_board_that_does_not_answer(pool, monkeypatch):
    """It says how long that was, which is not the time that the update has."""
    monkeypatch.setattr(seats, "_CALL_S", 0.25)
    group = Group(1, 1)
    group.connect()
    with pytest.raises(SyncTimeoutError, match=r"rollout rank 0 has not got on within 0\.25 s"):
        asyncio.run(group.receive(0))


def test_a_rollout_that_fails_before_it_has_all(pool, monkeypatch):
    group = Group(2, 3)
    monkeypatch.setattr(group.receivers[1]._receiver, "fetch", loses)
    done = group.update(model(1), model(1))
    assert isinstance(done[3], OSError)
    for each in (done[2], done[4]):
        assert isinstance(each, SyncAbortedError) and "rollout rank 1" in str(each)
    assert group.got == [{}, {}, {}]
    monkeypatch.undo()
    assert group.succeeds(2)


def test_what_was_there_of_an_update_that_failed_is_given_back(pool, monkeypatch):
    """Though errors keep the frames that had it."""
    group, before = Group(1, 2), pool.pins
    monkeypatch.setattr(group.receivers[1]._receiver, "fetch", loses)
    done = group.update(model(1))
    assert isinstance(done[1], SyncAbortedError) and isinstance(done[2], OSError)
    assert pool.pins == before


def test_nothing_is_handed_on_before_all_have_it(pool, monkeypatch):
    group = Group(1, 2)

    async def never(seat):
        raise SyncAbortedError("not all have it")

    for receiver in group.receivers:
        monkeypatch.setattr(receiver._receiver, "_until_all_have", never)
    done = group.update(model(1))
    assert all(isinstance(each, SyncAbortedError) for each in done[1:]) and group.got == [{}, {}]


def test_bytes_that_are_wrong(pool, monkeypatch):
    group, view = Group(1, 2), blobs.view

    def damaged(blob, **kwargs):
        data = view(blob, **kwargs)
        data[5] ^= 1
        return data

    monkeypatch.setattr(blobs, "view", damaged)
    done = group.update(model(1))
    assert any(isinstance(each, ChecksumError) and "embed.weight" in str(each) for each in done[1:])
    assert all(isinstance(each, ChecksumError | SyncAbortedError) for each in done[1:]) and group.got == [{}, {}]
    monkeypatch.undo()
    assert group.succeeds(2)


def test_another_version_than_asked_for(pool):
    group = Group(1, 1)
    done = group.update(model(1), step=4, expected=5)
    assert isinstance(done[1], StaleVersionError) and "version 5" in str(done[1]) and group.got == [{}]


def test_trainers_that_do_not_come(pool):
    group = Group(1, 1, timeout_s=0.5)
    group.connect()
    with pytest.raises(SyncTimeoutError, match=r"0\.5 s"):
        asyncio.run(group.receive(0))
    assert group.got == [{}]


def test_an_update_that_a_newer_one_ends(pool):
    """A rank that still waits in an update nobody finishes hears that there is a newer one."""
    group = Group(1, 1)
    group.connect()
    left_behind = group.receivers[0]

    async def has_begun() -> bool:
        try:
            await group.topology.board.check.remote(group.topology.update.number)
        except StaleVersionError:
            return False
        return True

    async def both():
        waiting = asyncio.ensure_future(anext(left_behind.receive_weights()))
        while not await has_begun():
            pass
        group.receivers[0] = Engine(2 << 20, **SMALL)
        group.connect()
        assert not errors(await group.everybody(model(3)))
        return (await asyncio.gather(waiting, return_exceptions=True))[0]

    assert isinstance(asyncio.run(both()), StaleVersionError) and same(group.got[0], model(3))


def test_a_board_that_died(pool, monkeypatch):
    monkeypatch.setattr(boards, "new_board", NEW_BOARD)
    group = Group(1, 1)
    assert group.succeeds(1)
    ray.kill(group.topology.board)
    assert group.succeeds(2)
    group.connect()
    ray.kill(group.topology.board)
    with pytest.raises(SyncAbortedError, match="gone"):
        asyncio.run(group.receive(0))


def test_the_last_version_again(pool):
    group = Group(2, 1, keep=True)

    async def again():
        return {name: tensor async for name, tensor in group.receivers[0].get_weights()}

    with pytest.raises(ConfigError, match="keep"):
        asyncio.run(again())
    for seed in (1, 2):
        assert group.succeeds(seed)
        assert same(asyncio.run(again()), model(seed)) and same(asyncio.run(again()), model(seed))
    assert isinstance(group.update(model(3), failing(3, 0))[2], SyncAbortedError)
    assert same(asyncio.run(again()), model(2)), "what an update that failed has left as it was"
    assert pool.objects > 0


def test_settings():
    for wrong in (
        {"staging": "later"},
        {"timeout_s": 0},
        {"window": 0},
        {"keep": True, "staging": "buckets"},
        {"chunk_megabytes": 0},
        {"rollout_dtype": "bf16"},
        {"rollout_dtype": "nn"},
    ):
        with pytest.raises(ConfigError):
            Engine(1 << 20, **wrong)
    with pytest.raises(ConfigError, match="init_process_group"):
        asyncio.run(Engine(1 << 20).send_weights(iter(())))
    with pytest.raises(PlanError):
        Engine.build_topology(0, 1, [{}])


def test_a_bucket_that_is_told_before_the_pool_knows(pool):
    """Who hears of a blob may be faster than the broker: it waits for the seal."""
    room = blobs.Reserved(8, timeout_s=10)

    async def both():
        seen = asyncio.ensure_future(asyncio.to_thread(blobs.view, room.blob))
        done, _ = await asyncio.wait([seen], timeout=0.2)
        assert not done
        room.write(lambda out: out.fill(7))
        return (await seen).tolist()

    assert asyncio.run(both()) == [7] * 8
    blobs.drop([room.blob])
