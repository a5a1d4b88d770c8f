"""The board of verl's updates, without Ray: who waits for what, and what everybody hears when it ends."""

from __future__ import annotations

import asyncio

import pytest

from mooncake_ray.errors import PlanError, StaleVersionError, SyncAbortedError
from mooncake_ray.integrations import verl_board
from mooncake_ray.integrations.verl_board import Board, Bucket, End, Update
from mooncake_ray.objects.blobs import Blob

TWO = ("", "")


@pytest.fixture
def watched(monkeypatch):
    """Which actors are dead, as the board sees it; it looks all the time."""
    dead: set[str] = set()
    monkeypatch.setattr(verl_board, "_WATCH_S", 0)
    monkeypatch.setattr(verl_board, "_dead", lambda actors: [actor in dead for actor in actors])
    return dead


def bucket(number: int) -> Bucket:
    return Bucket(number, Blob(b"p", b"%d" % number, 64), 0, ())


def run(what) -> None:
    async def opened():
        board = Board()
        await board.open(Update(1, TWO, TWO))
        await what(board)
        board._watcher.cancel()

    asyncio.run(opened())


async def settled(task) -> bool:
    """Whether it is done once nothing else is to be done."""
    for _ in range(20):
        await asyncio.sleep(0)
    return task.done()


def test_nobody_goes_on_before_all_have_it(watched):
    async def what(board):
        first = asyncio.ensure_future(board.all_staged(1, 0))
        assert not await settled(first)
        assert await board.all_staged(1, 1) and await first
        await board.fail(1, "too late: all have it")
        assert await board.all_staged(1, 0)

    run(what)


def test_buckets_come_in_their_order(watched):
    async def what(board):
        waiting = asyncio.ensure_future(board.buckets(1, 0))
        await board.post(1, bucket(1))
        assert not await settled(waiting)
        await board.post(1, bucket(0))
        found, end = await waiting
        assert [b.number for b in found] == [0, 1] and end is None
        after = asyncio.ensure_future(board.buckets(1, 2))
        await board.finish(1, 0, End(7, "d", 2, 128))
        assert not await settled(after)
        await board.finish(1, 1, End(7, "d", 2, 128))
        assert await after == ([], End(7, "d", 2, 128))

    run(what)


def test_senders_that_differ(watched):
    async def what(board):
        await board.finish(1, 0, End(7, "d", 2, 128))
        with pytest.raises(PlanError, match="buckets 2 and 3"):
            await board.finish(1, 1, End(7, "d", 3, 128))
        with pytest.raises(PlanError, match="trainers 0 and 1"):
            await board.buckets(1, 0)

    run(what)


@pytest.mark.parametrize(("who", "says"), [("r1", "rollout rank 1"), ("s0", "trainer rank 0")])
def test_who_dies_before_all_have_it(watched, who, says):
    async def what():
        board = Board()
        await board.open(Update(1, ("s0", "s1"), ("r0", "r1")))
        waiting = asyncio.ensure_future(board.all_staged(1, 0))
        assert not await settled(waiting)
        watched.add(who)
        with pytest.raises(SyncAbortedError, match=says):
            await asyncio.wait_for(waiting, 30)
        board._watcher.cancel()

    asyncio.run(what())


def test_trainers_wait_for_readers_that_live(watched):
    async def what():
        board = Board()
        await board.open(Update(1, ("s0",), ("r0", "r1")))
        waiting = asyncio.ensure_future(board.taken(1, 0))
        await board.take(1, 0, 2)
        assert not await settled(waiting)
        await board.take(1, 1, 1)
        assert await waiting == 1
        board._watcher.cancel()

    asyncio.run(what())


def test_a_newer_update_ends_an_older(watched):
    async def what(board):
        waiting = asyncio.ensure_future(board.buckets(1, 0))
        assert not await settled(waiting)
        await board.open(Update(2, TWO, TWO))
        with pytest.raises(StaleVersionError):
            await waiting
        for call in (board.post(1, bucket(0)), board.all_staged(1, 0), board.check(1), board.open(Update(1, TWO, TWO))):
            with pytest.raises(StaleVersionError):
                await call
        await board.fail(1, "of no interest any more")
        assert await board.is_open(2) and not await board.is_open(1)

    run(what)
