"""The checkpoint engine for verl, both ends in this process: what is given, when, and what happens if something does not come along."""

from __future__ import annotations

import asyncio

import pytest
import ray
import torch

pytest.importorskip("codetiming", reason="verl's workers need it")
from verl_actors import model, same

from mooncake_ray.errors import ChecksumError, ConfigError, PlanError, StaleVersionError, SyncAbortedError, SyncTimeoutError
from mooncake_ray.integrations import verl_calls
from mooncake_ray.integrations.verl_board import new_board
from mooncake_ray.integrations.verl_checkpoint import MooncakeRayCheckpointEngine as Engine
from mooncake_ray.objects import blobs
from mooncake_ray.testing import Allowed

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
SMALL = {"chunk_megabytes": 1 / 16, "timeout_s": 60}


@pytest.fixture
def leaks_allowed() -> Allowed:
    return Allowed(threads=("*",), descriptors=("*",), maps=("r?-s",), processes=("ray::*",))


@pytest.fixture(autouse=True, scope="module")
def board(pool_ray):
    """One board for all tests, as one job of verl's has: to start one is most of a test's time."""
    one = new_board()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(verl_calls, "new_board", lambda: one)
        yield


class Group:
    """Engines as verl's manager drives them."""

    updates = 0  # of all groups

    def __init__(self, senders: int, receivers: int, **kwargs) -> None:
        kwargs = SMALL | kwargs
        self.senders = [Engine(2 << 20, is_master=rank == 0, **kwargs) for rank in range(senders)]
        self.receivers = [Engine(2 << 20, **kwargs) for _ in range(receivers)]
        self.senders[0]._number = Group.updates
        self.got: list[dict[str, torch.Tensor]] = [{} for _ in range(receivers)]

    def connect(self) -> None:
        metadata = [engine.prepare() for engine in (*self.senders, *self.receivers)]
        for engines, kwargs in zip(
            (self.senders, self.receivers), Engine.build_topology(len(self.senders), len(self.receivers), metadata), strict=True
        ):
            for i, engine in enumerate(engines):
                engine.init_process_group(**{name: values[i] for name, values in kwargs.items()})
        Group.updates = self.senders[0]._number

    async def receive(self, number: int, step: int | None) -> None:
        got: dict[str, torch.Tensor] = {}
        self.got[number] = got
        async for name, tensor in self.receivers[number].receive_weights(global_steps=step):
            got[name] = tensor.clone()
            tensor.zero_() if tensor.numel() else None  # nobody else sees that

    def update(self, *weights, step: int | None = None, expected: int | None = None):
        """One update. Returns what each rank returned or raised."""
        self.connect()

        async def everybody():
            sends = [
                e.send_weights(iter(w.items()) if isinstance(w, dict) else w, step) for e, w in zip(self.senders, weights, strict=True)
            ]
            gets = [self.receive(n, step if expected is None else expected) for n in range(len(self.receivers))]
            return await asyncio.gather(*sends, *gets, return_exceptions=True)

        done = asyncio.run(everybody())
        if not any(isinstance(each, BaseException) for each in done):
            for engine in (*self.senders, *self.receivers):
                engine.finalize()
        return done

    def succeeds(self, seed: int) -> bool:
        done = self.update(*[model(seed)] * len(self.senders), step=seed)
        failed = [each for each in done if isinstance(each, BaseException)]
        assert not failed, failed
        return all(same(got, model(seed)) for got in self.got)


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
    done = group.update(*[model(1)] * 3)
    sent = [each["checkpoint_engine/payload_mbytes"] * (1 << 20) for each in done[:3]]
    total = sum(tensor.nbytes for tensor in model(1).values())
    assert total <= sum(sent) < total + 64 * len(model(1)) and max(sent) - min(sent) <= 2 * (1 << 16)


def test_buckets_are_few_at_a_time(pool):
    """Trainers wait for who reads: the pool never has more than the window, and what is just read."""
    group, most = Group(2, 2, staging="buckets", window=1), 0
    big = {f"t{n}": torch.full((1 << 14,), float(n)) for n in range(40)}  # each one bucket

    def watched():
        nonlocal most
        for item in big.items():
            most = max(most, pool.objects)
            yield item

    done = group.update(watched(), big)
    assert not [each for each in done if isinstance(each, BaseException)] and all(same(got, big) for got in group.got)
    assert 2 <= most <= 8, most


def test_dtype_of_rollouts(pool):
    group = Group(2, 1, rollout_dtype="bfloat16")
    group.update(model(1), model(1))
    expected = {n: t.bfloat16() if t.is_floating_point() else t for n, t in model(1).items()}
    assert same(group.got[0], expected)


def test_trainers_that_disagree(pool):
    group = Group(2, 2)
    done = group.update(model(1), {**model(1), "more": torch.zeros(3)})
    assert all(isinstance(each, PlanError) for each in done[2:]) and any("trainers" in str(each) for each in done[:2]), done
    assert group.got == [{}, {}]
    assert group.succeeds(2)


@pytest.mark.parametrize("staging", ["version", "buckets"])
def test_a_trainer_that_fails(pool, staging):
    group = Group(2, 2, staging=staging)

    def failing():
        for number, item in enumerate(model(1).items()):
            if number == 7:
                raise RuntimeError("out of memory")
            yield item

    done = group.update(model(1), failing())
    assert isinstance(done[1], RuntimeError)
    for each in done[2:]:
        assert isinstance(each, SyncAbortedError) and "trainer rank 1" in str(each) and "out of memory" in str(each)
    if staging == "version":
        assert group.got == [{}, {}]
    assert group.succeeds(2)


def test_a_rollout_that_fails_before_it_has_all(pool, monkeypatch):
    group = Group(2, 3)

    def lost(bucket):
        raise OSError("no memory")

    monkeypatch.setattr(group.receivers[1]._receiver, "fetch", lost)
    done = group.update(model(1), model(1))
    assert isinstance(done[3], OSError)
    for each in (done[2], done[4]):
        assert isinstance(each, SyncAbortedError) and "rollout rank 1" in str(each)
    assert group.got == [{}, {}, {}]
    monkeypatch.undo()
    assert group.succeeds(2)


def test_nothing_is_handed_on_before_all_have_it(pool, monkeypatch):
    group = Group(1, 2)

    async def never(deadline):
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
        asyncio.run(group.receive(0, None))
    assert group.got == [{}]


def test_an_update_that_a_newer_one_ends(pool):
    """A rank that still waits in an update nobody finishes hears that there is a newer one."""
    group = Group(1, 1)
    group.connect()
    left_behind = group.receivers[0]

    async def both():
        waiting = asyncio.ensure_future(anext(left_behind.receive_weights()))
        while not await left_behind._topology.board.is_open.remote(left_behind._number):
            pass
        group.receivers[0] = Engine(2 << 20, **SMALL)
        group.connect()
        await asyncio.gather(group.senders[0].send_weights(iter(model(3).items())), group.receive(0, None))
        return (await asyncio.gather(waiting, return_exceptions=True))[0]

    assert isinstance(asyncio.run(both()), StaleVersionError) and same(group.got[0], model(3))


def test_a_board_that_died(pool, monkeypatch):
    monkeypatch.setattr(verl_calls, "new_board", new_board)
    group = Group(1, 1)
    assert group.succeeds(1)
    ray.kill(group.senders[0]._topology.board)
    assert group.succeeds(2)
    group.connect()
    ray.kill(group.senders[0]._topology.board)
    with pytest.raises(SyncAbortedError, match="gone"):
        asyncio.run(group.receive(0, None))


def test_the_last_version_again(pool):
    group = Group(2, 1, keep=True)

    async def again():
        return {name: tensor async for name, tensor in group.receivers[0].get_weights()}

    with pytest.raises(ConfigError, match="keep"):
        asyncio.run(again())
    for seed in (1, 2):
        assert group.succeeds(seed)
        assert same(asyncio.run(again()), model(seed)) and same(asyncio.run(again()), model(seed))
    assert pool.objects > 0


def test_settings():
    for wrong in ({"staging": "later"}, {"timeout_s": 0}, {"window": 0}, {"keep": True, "staging": "buckets"}, {"chunk_megabytes": 0}):
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
