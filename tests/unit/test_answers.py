"""What processes say that cannot answer otherwise."""

from __future__ import annotations

import dataclasses
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from mooncake_ray.engines.answers import Address, Answers
from mooncake_ray.errors import ConfigError, PlanError, SyncTimeoutError, WeightSyncError
from mooncake_ray.testing import Allowed


@pytest.fixture
def leaks_allowed():
    return Allowed(threads=("ThreadPool*",))


@pytest.fixture
def answers():
    with Answers(("127.0.0.1", 9)) as answers:
        yield answers


def test_all_ranks_have_said_it(answers):
    with ThreadPoolExecutor(3) as threads:
        for rank in (0, 1, 1, 2):  # twice is once
            threads.submit(answers.address.say, rank, "ready")
        answers.wait("ready", 3, timeout_s=10)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (PlanError("b: is missing"), PlanError, "rank 1: b: is missing"),
        (ConfigError("no cluster"), ConfigError, "rank 1: no cluster"),
        (KeyError("what"), WeightSyncError, "KeyError: rank 1: 'what'"),
    ],
)
def test_errors_are_what_they_were(answers, error, kind, text):
    answers.address.say(0, "ready")
    answers.address.say(1, "failed", error=error)
    with pytest.raises(kind, match=f"^{text}$"):
        answers.wait("ready", 2, timeout_s=10)


def test_who_is_missing_is_named(answers):
    answers.address.say(1, "ready")
    answers.address.say(2, "joined")  # something else
    with pytest.raises(SyncTimeoutError, match=r"ranks \[0, 2\] of 3 have not said 'ready'"):
        answers.wait("ready", 3, timeout_s=0.2)


def test_strangers_are_not_listened_to(answers):
    dataclasses.replace(answers.address, token="guessed").say(0, "ready")
    for text in (b"", b"[1]\n", b"\xff\xfe\n", b'{"token": 5}\n'):
        with socket.create_connection((answers.address.host, answers.address.port)) as connection:
            connection.sendall(text)
    with pytest.raises(SyncTimeoutError, match=r"ranks \[0\] of 1"):
        answers.wait("ready", 1, timeout_s=0.2)


def test_nobody_listens():
    with Answers(("127.0.0.1", 9)) as answers:
        address = answers.address
    with pytest.raises(OSError, match="refused"):
        Address(address.host, address.port, address.token).say(0, "ready")
