"""Pauses between the steps of requests, one state after the other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mooncake_ray.engines.gate import Gate
from mooncake_ray.errors import EnginePausedError, SyncTimeoutError

TIMEOUT_S = 150.0
AT_ONCE = 0.001


def test_a_pause_between_two_steps():
    gate = Gate()
    with gate.request():
        gate.pause("keep", TIMEOUT_S)
        gate.resume()
        for mode in ("wait", "abort"):  # the request has not ended, although it does not compute
            with pytest.raises(SyncTimeoutError, match="1 requests are running, 0 of them computing"):
                gate.pause(mode, AT_ONCE)
            assert not gate.is_paused
    gate.pause("wait", TIMEOUT_S)
    assert gate.is_paused


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_within_a_step(mode):
    gate = Gate()
    with gate.request() as begun, gate.step(begun):
        with pytest.raises(SyncTimeoutError, match="1 of them computing"):
            gate.pause(mode, AT_ONCE)
        assert not gate.is_paused


def test_wait_lets_steps_follow():
    gate = Gate()
    with ThreadPoolExecutor(1) as pool:
        with gate.request() as begun:
            paused = pool.submit(gate.pause, "wait", TIMEOUT_S)
            while not gate.is_paused:
                assert not paused.done()
            for _ in range(3):
                with gate.step(begun):
                    pass
            assert not paused.done()
        paused.result(TIMEOUT_S)


def test_abort_refuses_the_next_step_of_those_that_run_and_no_others():
    gate = Gate()
    with gate.request() as begun:
        with pytest.raises(SyncTimeoutError):
            gate.pause("abort", AT_ONCE)
        with pytest.raises(EnginePausedError, match="was ended"), gate.step(begun):
            pass
    with gate.request() as begun, gate.step(begun):
        pass


def test_keep_then_abort_ends_what_is_frozen():
    gate = Gate()
    gate.pause("keep", TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:

        def ask():
            with gate.request():
                pass

        asked = pool.submit(ask)
        gate.pause("abort", TIMEOUT_S)
        with pytest.raises(EnginePausedError, match="mode abort"):
            asked.result(TIMEOUT_S)
    gate.resume()


def test_patience_ends():
    gate = Gate(patience_s=AT_ONCE)
    with gate.request() as begun:
        gate.pause("keep", TIMEOUT_S)
        with pytest.raises(SyncTimeoutError, match="stays paused"), gate.step(begun):
            pass
        with pytest.raises(SyncTimeoutError, match="stays paused"), gate.request():
            pass
        gate.resume()
        with gate.step(begun):
            pass


def test_nothing_computes_during_a_pause():
    """Steps of many threads, and pauses of every kind: what is written during pauses is never seen half."""
    gate, stop = Gate(), threading.Event()
    value = [0, 0]

    def ask() -> int:
        made = 0
        while not stop.is_set():
            try:
                with gate.request() as begun:
                    for _ in range(3):
                        with gate.step(begun):
                            assert value[0] == value[1]
                            made += 1
            except EnginePausedError:
                continue
        return made

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(ask) for _ in range(4)]
        try:
            for i in range(60):
                gate.pause(("keep", "wait", "abort")[i % 3], TIMEOUT_S)
                value[0] += 1
                value[1] += 1
                gate.resume()
        finally:
            stop.set()
        assert all(f.result(TIMEOUT_S) >= 0 for f in futures)
