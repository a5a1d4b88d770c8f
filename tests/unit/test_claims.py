"""Whose it is what a task returned: the process that called it is on another node, and says so, and when it is over."""

from __future__ import annotations

import struct
import time

import pytest
from engine_sites import DEADLINE_S, SECRET, several

from mooncake_ray._native import pool
from mooncake_ray.store import node
from mooncake_ray.transfer.claims import Claims
from mooncake_ray.transfer.directory import Endpoint
from mooncake_ray.transfer.engine import Engine

RETURN, TOKEN = pool.KIND_RETURN, pool.KIND_TOKEN


@pytest.fixture
def sites(scope_with):
    with several(scope_with) as make:
        yield make


class Process:
    """One that answers for claims, as it is told."""

    def __init__(self, site) -> None:
        self.client = node.connect(node.broker_name(site.scope.name), site.scope.config)
        self.client.listen()

    def question(self):
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            if (event := self.client.next_event(0.1)) is not None:
                return event
        raise TimeoutError("it was asked nothing")

    def returns(self, key: bytes, kind: int = RETURN) -> bytes:
        """As a task does that was called from elsewhere."""
        id = self.client.new_id()
        self.client.put_inline(id, b"x", kind, key, kind == TOKEN)
        return id

    def has(self, id: bytes) -> bool:
        return self.client.wait([id], 1, 0.0) == [True]

    def close(self) -> None:
        self.client.close()


@pytest.fixture
def process():
    made = []

    def make(site) -> Process:
        made.append(Process(site))
        return made[-1]

    yield make
    for p in made:
        p.close()


def until(what, text: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not what():
        if time.monotonic() > end:
            raise AssertionError(f"not within {DEADLINE_S:g} s: {text}")
        time.sleep(0.005)


def key(n: int) -> bytes:
    return n.to_bytes(28, "little")


@pytest.mark.parametrize("ends", ["unclaims", "dies"])
def test_the_owner_is_on_another_node(sites, process, ends):
    home, there = sites(), sites()
    worker, owner = process(home), process(there)
    id = worker.returns(key(1))
    assert worker.question() == (RETURN, key(1))
    worker.client.disown(RETURN, key(1), False)
    assert owner.question() == (RETURN, key(1))
    assert worker.has(id)
    owner.client.adopt(RETURN, key(1))
    until(lambda: home.engine.claims.count() == 1, "the engine answers for it")
    worker.close()
    reader = process(home)
    assert reader.has(id), "it outlives the process that made it"
    if ends == "dies":
        owner.close()
    else:
        owner.client.unclaim(RETURN, key(1))
    until(lambda: not reader.has(id), "it goes with its owner")
    assert home.engine.claims.count() == 0


def test_the_owner_had_let_go_of_it_before(sites, process):
    home, there = sites(), sites()
    worker, owner = process(home), process(there)
    id = worker.returns(key(1))
    worker.client.disown(*worker.question(), False)
    owner.client.disown(*owner.question(), True)
    until(lambda: not worker.has(id), "it is gone")


def test_where_one_return_went_the_next_is_asked_for_first(sites, process):
    home, there, elsewhere = sites(), sites(), sites()
    worker, owner, other = process(home), process(there), process(elsewhere)
    for n in range(3):
        worker.returns(key(n))
        worker.client.disown(*worker.question(), False) if n == 0 else None  # then the engine is asked before it
        owner.client.adopt(*owner.question())
        until(lambda n=n: home.engine.claims.count() == n + 1, "it is adopted")
    assert other.question() == (RETURN, key(0))
    assert other.client.next_event(0.0) is None
    for n in range(3):
        owner.client.unclaim(RETURN, key(n))
    until(lambda: home.engine.claims.count() == 0, "all are over")


def test_nobody_answers_and_then_there_is_another_node(sites, process):
    home, there = sites(), sites()
    worker, bystander = process(home), process(there)
    id = worker.returns(key(1))
    worker.client.disown(*worker.question(), False)
    bystander.client.disown(*bystander.question(), False)
    until(lambda: home.store.stats()["orphans"] == 1, "nobody's")
    late = sites()
    owner = process(late)
    owner.client.adopt(*owner.question())
    until(lambda: home.store.stats()["orphans"] == 0, "it has an owner")
    owner.client.unclaim(RETURN, key(1))
    until(lambda: not worker.has(id), "it is gone")


def test_an_engine_that_comes_back_is_asked_again(sites, process):
    home, there = sites(), sites()
    worker, owner = process(home), process(there)
    id = worker.returns(key(1))
    worker.client.disown(*worker.question(), False)
    owner.client.adopt(*owner.question())
    until(lambda: home.engine.claims.count() == 1, "it is adopted")
    there.engine.close()
    name = node.broker_name(there.scope.name)
    again = Engine(node.connect(name, there.scope.config), name, sites.map.of(own := []), SECRET, "127.0.0.1", there.scope.config)
    own.append(again.endpoint)
    sites.map.engines[there.pool_id] = again.endpoint
    try:
        until(lambda: again.claims.inquiries() == 1, "it is asked")
        assert worker.has(id)
        owner.client.unclaim(RETURN, key(1))
        until(lambda: not worker.has(id), "it is gone")
    finally:
        again.close()


def test_what_a_dead_node_answered_for_is_gone(sites, process):
    home, there = sites(), sites()
    worker, owner = process(home), process(there)
    id = worker.returns(key(1))
    worker.client.disown(*worker.question(), False)
    owner.client.adopt(*owner.question())
    until(lambda: home.engine.claims.count() == 1, "it is adopted")
    there.engine.close()
    sites.map.dead.add(there.pool_id)
    until(lambda: not worker.has(id), "it is gone")


def test_what_an_actor_returned_lives_for_whoever_refers_to_it(sites, process):
    home, one, two = sites(), sites(), sites()
    actor, first, second, reader = process(home), process(one), process(two), process(home)
    id = actor.returns(key(1), TOKEN)
    actor.close()
    reader.client.disown(*reader.question(), False)
    assert {first.question(), second.question()} == {(TOKEN, key(1))}
    first.client.adopt(TOKEN, key(1))
    second.client.disown(TOKEN, key(1), False)
    until(lambda: home.engine.claims.count() == 1, "it is adopted")
    first.client.unclaim(TOKEN, key(1))  # it gave the ref to the second before
    second.client.adopt(*second.question())
    assert reader.has(id)
    second.client.unclaim(TOKEN, key(1))
    first.client.disown(*first.question(), False)
    reader.client.disown(*reader.question(), False)  # another on the engine's own node might
    until(lambda: not reader.has(id), "nobody refers to it")


def test_letters_that_make_no_sense(sites):
    site = sites()
    claims: Claims = site.engine.claims
    for letter in (b"", b"\x05abc", b"\x0b127.0.0.1:1" + b"\xff" * 36, b"\x0b127.0.0.1:1" + b"\0" * 35):
        with pytest.raises((ValueError, struct.error)):
            claims.receive(letter)


def test_endpoints_have_a_text():
    assert Endpoint.parse(str(Endpoint("::1", 5))) == Endpoint("::1", 5)
