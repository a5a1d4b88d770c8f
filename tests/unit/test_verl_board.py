"""The board of verl's updates, without Ray: who waits for what, and what everybody hears when it ends."""

from __future__ import annotations

import asyncio

import pytest

from mooncake_ray.errors import PlanError, StaleVersionError, SyncAbortedError
from mooncake_ray.integrations.verl_weights import board as boards
from mooncake_ray.integrations.verl_weights.board import Board
from mooncake_ray.integrations.verl_weights.messages import Bucket, End, Update
from mooncake_ray.objects.blobs import Blob

TWO = ("", "")


@pytest.fixture
def watched(monkeypatch):
    """Which actors are dead, as the board sees it; it looks all the time."""
    dead: set[str] = set()
    monkeypatch.setattr(boards, "_WATCH_S", 0)
    monkeypatch.setattr(boards, "_dead", dead.intersection)
    return dead


def bucket(number: int) -> Bucket:
    return Bucket(number, Blob(b"p", b"%d" % number, 64), 0, ())


def run(what, senders=TWO, receivers=TWO) -> None:
    """On a board at whose update 1 these take part."""

    async def opened():
        board = Board()
        await board.open(Update(1, senders, receivers))
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
    async def what(board):
        waiting = asyncio.ensure_future(board.all_staged(1, 0))
        assert not await settled(waiting)
        watched.add(who)
        with pytest.raises(SyncAbortedError, match=says):
            await asyncio.wait_for(waiting, 30)

    run(what, ("s0", "s1"), ("r0", "r1"))


def test_trainers_wait_for_readers(watched):
    async def what(board):
        waiting = asyncio.ensure_future(board.taken(1, 1))
        await board.take(1, 0, 2)
        assert not await settled(waiting)
        await board.take(1, 1, 1)
        assert await waiting == 1

    run(what, ("s0",), ("r0", "r1"))


def test_who_reads_and_dies_is_not_waited_for(watched):
    async def what(board):
        await board.take(1, 0, 1)
        waiting = asyncio.ensure_future(board.taken(1, 1))
        assert not await settled(waiting)
        watched.add("r1")
        with pytest.raises(SyncAbortedError, match="rollout rank 1"):
            await asyncio.wait_for(waiting, 30)

    run(what, ("s0",), ("r0", "r1"))


def test_no_news_for_a_while(watched, monkeypatch):
    async def what(board):
        monkeypatch.setattr(boards, "_POLL_S", 0.01)
        assert await board.buckets(1, 0) == ([], None)
        assert not await board.all_staged(1, 0) and await board.taken(1, 1) == 0

    run(what)


def test_two_that_begin_an_update_at_once(watched):
    """What is told after the one has begun it is not lost when the other does, however long that waits."""

    async def what(board):
        async with board._changed:  # as anybody may have it for a moment
            both = [asyncio.ensure_future(board.open(Update(2, TWO, TWO))) for _ in range(2)]
            await settled(both[1])
            posted = asyncio.ensure_future(board.post(2, bucket(0)))
            await settled(posted)
        await asyncio.gather(*both, posted)
        found, _ = await board.buckets(2, 0)
        assert [b.number for b in found] == [0]

    run(what)


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
        await board.check(2)

    run(what)
