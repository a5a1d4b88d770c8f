"""An engine's process that joins groups, and leaves them when they, or their cluster, are gone. Without Ray: of it only what is asked here."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
from waiting import eventually

from mooncake_ray.engines import membership
from mooncake_ray.engines.membership import Membership
from mooncake_ray.errors import SyncTimeoutError


class Ray:
    """Connected or not; its control store listens, or does not."""

    def __init__(self) -> None:
        self.connected = False
        self.store = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.store.getsockname()[1]}"

    def is_initialized(self) -> bool:
        return self.connected

    def shutdown(self) -> None:
        self.connected = False

    def get_runtime_context(self):
        return SimpleNamespace(gcs_address=self.address)


class Joining:
    def __init__(self, ray: Ray, error: Exception | None = None) -> None:
        self.ray, self.error = ray, error
        self.joined: list[SimpleNamespace] = []

    def join(self, rank, world, adapter):
        self.ray.connected = True
        if self.error is not None:
            raise self.error
        member = SimpleNamespace(closed=False, member="e/0")
        member.close = lambda: setattr(member, "closed", True)
        self.joined.append(member)
        return member


@pytest.fixture
def ray(monkeypatch):
    ray = Ray()
    monkeypatch.setattr(membership, "ray", ray)
    monkeypatch.setattr(membership, "_LOOK_S", 0.01)
    monkeypatch.setattr(membership, "_GONE_S", 0.05)
    yield ray
    ray.store.close()


@pytest.fixture
def left():
    return []


@pytest.fixture
def process(ray, left):
    process = Membership(lambda: left.append(1))
    yield process
    process.leave()


def test_it_leaves_where_it_was_before_it_joins(ray, process):
    first, second = Joining(ray), Joining(ray)
    process.join(first, 0, 1, None)
    assert process.join(second, 0, 1, None) is process.member
    assert first.joined[0].closed and not second.joined[0].closed and ray.connected


def test_it_leaves_a_group_that_has_ended(ray, process, left):
    process.join(Joining(ray), 0, 1, None)
    left.clear()
    process.member.close()
    eventually(lambda: process.member is None and not ray.connected and left)


def test_it_leaves_a_cluster_that_is_gone(ray, process, left):
    member = process.join(Joining(ray), 0, 1, None)
    left.clear()
    ray.store.close()
    eventually(lambda: process.member is None and member.closed and not ray.connected and left)


def test_who_cannot_join_is_in_no_group(ray, process, left):
    with pytest.raises(SyncTimeoutError, match="no group"):
        process.join(Joining(ray, SyncTimeoutError("no group")), 0, 1, None)
    assert process.member is None and not ray.connected and left


def test_a_process_that_ray_has_started_stays_connected(ray, process):
    ray.connected = True
    process.join(Joining(ray), 0, 1, None)
    process.leave()
    assert ray.connected and process.member is None
