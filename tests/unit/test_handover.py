"""Work that goes from one thread to another."""

from __future__ import annotations

import threading

import pytest

from mooncake_ray.engines.handover import Handover
from mooncake_ray.errors import SyncTimeoutError, WeightSyncError

LONG, SHORT = 30.0, 0.05


def elsewhere(what):
    """Runs it in another thread; gives what it returned, or raised, when asked."""
    out = []

    def run() -> None:
        try:
            out.append((what(), None))
        except Exception as e:
            out.append((None, e))

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(LONG)
        value, error = out[0]
        if error is not None:
            raise error
        return value

    return result


def test_work_is_done_by_the_thread_that_takes_it():
    handover = Handover()
    taken = elsewhere(lambda: (handover.take(LONG), threading.get_ident()))
    done_by = handover.give(threading.get_ident, LONG)
    assert taken() == (done_by, done_by) and done_by != threading.get_ident()


def test_an_error_is_everybodys():
    handover = Handover()

    def fail():
        raise KeyError("lost")

    taken = elsewhere(lambda: handover.take(LONG))
    with pytest.raises(KeyError, match="lost"):
        handover.give(fail, LONG)
    with pytest.raises(KeyError, match="lost"):
        taken()


def test_nobody_gives_and_nobody_takes():
    handover = Handover()
    with pytest.raises(SyncTimeoutError, match=r"no new weights to take over within 0\.05 s"):
        handover.take(SHORT)
    done = []
    with pytest.raises(SyncTimeoutError, match=r"has not begun to take new weights within 0\.05 s"):
        handover.give(lambda: done.append(1), SHORT)
    with pytest.raises(SyncTimeoutError):  # what was not begun in time is not done later
        handover.take(SHORT)
    assert not done


def test_work_that_has_begun_is_not_undone_by_a_deadline():
    handover = Handover()
    begun, go = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go.wait(LONG)
        return "done"

    taken = elsewhere(lambda: handover.take(LONG))
    done = handover.leave(slow)
    assert begun.wait(LONG)
    handover.withdraw()
    assert not done.cancelled()
    go.set()
    assert taken() == "done" and done.result(LONG) == "done"


def test_one_at_a_time_until_it_is_withdrawn():
    handover = Handover()
    first = handover.leave(lambda: "first")
    with pytest.raises(WeightSyncError, match="has not taken the new weights before these"):
        handover.leave(lambda: "second")
    handover.withdraw()
    assert first.cancelled()
    second = handover.leave(lambda: "second")
    assert handover.take(LONG) == "second" == second.result(0)
