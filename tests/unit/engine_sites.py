"""Nodes without Ray: pools with engines that find each other in a dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mooncake_ray.store import ObjectKey, node
from mooncake_ray.transfer.directory import Endpoint
from mooncake_ray.transfer.door import Door, door_name
from mooncake_ray.transfer.engine import Engine

SECRET = b"s" * 32
DEADLINE_S = 100.0


class Map:
    """A directory that is a dict, shared by the engines of a test."""

    def __init__(self) -> None:
        self.engines: dict[bytes, Endpoint] = {}
        self.dead: set[bytes] = set()

    def of(self, own: list[Endpoint]) -> Map.View:
        return Map.View(self, own)

    class View:
        def __init__(self, all: Map, own: list[Endpoint]) -> None:
            self.all, self.own = all, own

        def resolve(self, pool_id):
            return None if pool_id in self.all.dead else self.all.engines.get(pool_id)

        def is_lost(self, pool_id):
            return pool_id in self.all.dead

        def forget(self, pool_id):
            pass

        def serves(self, endpoint):
            return endpoint in self.others() or endpoint in self.own

        def others(self):
            return [e for p, e in self.all.engines.items() if p not in self.all.dead and e not in self.own]


class Site:
    """A pool, its engine, and a process that uses both."""

    def __init__(self, scope, map: Map, secret: bytes = SECRET) -> None:
        self.store = scope.store()
        name = node.broker_name(scope.name)
        own: list[Endpoint] = []
        client = node.connect(name, scope.config)
        self.engine = Engine(client, name, map.of(own), secret, "127.0.0.1", scope.config)
        own.append(self.engine.endpoint)
        self.pool_id = self.store.client.pool_id
        map.engines[self.pool_id] = self.engine.endpoint
        self.door = Door(door_name(name))
        self.scope = scope

    def put(self, data: bytes) -> bytes:
        lease = self.store.create(len(data))
        memoryview(lease)[:] = data
        return self.store.publish(lease).id

    def free(self, id: bytes) -> None:
        self.store.free([self.key(id)])

    def key(self, id: bytes):
        return ObjectKey(self.pool_id, id)

    def get(self, home: Site, id: bytes, timeout_s: float = DEADLINE_S) -> bytes:
        with self.door.pulled(home.pool_id, id, timeout_s) as here:
            assert here == id
            return bytes(memoryview(self.store.client.get(id)))

    def close(self) -> None:
        self.engine.close()


@contextmanager
def several(scope_with: Callable) -> Iterator[Callable[..., Site]]:
    """Makes sites that know each other; `map` is their directory."""
    made: list[Site] = []
    map = Map()

    def make(secret: bytes = SECRET, **settings) -> Site:
        made.append(Site(scope_with(**settings), map, secret))
        return made[-1]

    make.map = map
    try:
        yield make
    finally:
        for site in made:
            site.close()
