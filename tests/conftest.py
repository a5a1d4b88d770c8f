"""A pool of its own for each test, which must be empty again when the test is over."""

from __future__ import annotations

import gc
import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import DEADLINE_S, eventually

pytest_plugins = ["mooncake_ray.testing"]

# A test run in the background ignores Ctrl-C, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

CAPACITY = 32 << 20


def pytest_collection_finish(session: pytest.Session) -> None:
    """What the imports made needs no looking at in the collections of every test: they are most of its time otherwise."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`MOONCAKE_EXAMPLES`: how many times as many random examples each test tries as it does by itself."""
    times = float(os.environ.get("MOONCAKE_EXAMPLES", "1"))
    if times == 1:
        return
    from hypothesis import settings

    for test in {item.function for item in items if hasattr(item, "function")}:
        own = getattr(test, "_hypothesis_internal_use_settings", None)
        if own is not None:
            test._hypothesis_internal_use_settings = settings(own, max_examples=max(1, int(own.max_examples * times)))


class Scope:
    """A pool that nobody else uses, seen by a client that holds nothing in it. It spills only if it is told where."""

    eventually = staticmethod(eventually)

    def __init__(self, **settings: Any) -> None:
        from mooncake_ray.config import Config

        self.name = f"test-{secrets.token_hex(8)}"
        plain = {"capacity_bytes": CAPACITY, "prefault_bytes": CAPACITY, "linger_s": 0.2, "put_timeout_s": 20.0, "spill_dir": "off"}
        self.config = Config(**{**plain, **settings})
        self.stores: list[Any] = []
        self._observer: Any = None

    def store(self, **settings: Any) -> Any:
        from dataclasses import replace

        from mooncake_ray.store import Store

        store = Store(self.name, replace(self.config, **settings))
        self.stores.append(store)
        eventually(lambda: self.stats()["populated_bytes"] >= self.config.prefault_bytes)
        return store

    def stats(self) -> dict[str, Any]:
        from mooncake_ray.errors import BrokerDiedError
        from mooncake_ray.store import node

        if self._observer is None or not self._observer.usable:
            self._observer = node.connect(node.broker_name(self.name), self.config)
        try:
            return json.loads(self._observer.stats())
        except BrokerDiedError:
            self._observer = node.connect(node.broker_name(self.name), self.config)
            return json.loads(self._observer.stats())

    def is_empty(self) -> bool:
        gc.collect()
        stats = self.stats()
        in_use = {name: stats[name] for name in ("leases", "pins", "claims", "objects", "removed_but_pinned", "used_bytes", "inline_bytes")}
        return not any(in_use.values()) and stats["free_pages"] * 4096 == stats["populated_bytes"]

    def brokers(self) -> list[int]:
        """The pids of the brokers of this pool."""
        name = f"/{self.name}\0".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            except OSError:
                continue
            if b"mooncake-broker" in line.split(b"\0", 1)[0] and name in line:
                found.append(int(entry.name))
        return found

    def run(self, code: str, *args: object) -> Script:
        """Another process, which finds `store` in its globals, and `args` in sys.argv[1:]."""
        setup = (
            "import gc, os, sys, time\nimport numpy as np\n"
            "from mooncake_ray.config import Config\nfrom mooncake_ray.store import ObjectKey, Store\n"
            f"scope, config = {self.name!r}, {self.config!r}\n"
            "def say(*words): print(*words, flush=True)\n"
            "def wait(): sys.stdin.readline() or os._exit(1)\n"
            "def key_of(text): return ObjectKey(*map(bytes.fromhex, text.split(':')))\n"
            "def text_of(key): return key.pool.hex() + ':' + key.id.hex()\n"
        )
        return Script(setup + code, args)

    def close(self) -> None:
        while self.stores:
            self.stores.pop().close()
        if self._observer is not None:
            self._observer.close()
            self._observer = None


class Script:
    """A Python program on two pipes."""

    def __init__(self, code: str, args: tuple[object, ...]) -> None:
        command = [sys.executable, "-c", code, *map(str, args)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.pid = self.process.pid

    def line(self) -> str:
        """What it says next."""
        line = self.process.stdout.readline()
        assert line, f"the program ended with status {self.process.wait()}:\n{self.process.stderr.read()}"
        return line.rstrip("\n")

    def go(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def has_said_something(self) -> bool:
        """Whether `line` would return at once. For programs that say one line at a time."""
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def is_asleep(self) -> bool:
        """Whether its main thread waits for something."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"

    def finish(self) -> str:
        """Waits for its successful end. Returns the rest of what it said."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, f"status {self.process.returncode}:\n{out}\n{err}"
        return out

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(autouse=True)
def _nothing_is_left(no_leaks: None) -> None:
    """Every test cleans up after itself."""


@pytest.fixture
def scope() -> Iterator[Scope]:
    scope = Scope()
    yield scope
    scope.close()


@pytest.fixture
def scope_with() -> Iterator[Callable[..., Scope]]:
    """Makes pools with settings of their own."""
    scopes: list[Scope] = []

    def make(**settings: Any) -> Scope:
        scopes.append(Scope(**settings))
        return scopes[-1]

    yield make
    for scope in scopes:
        scope.close()


@pytest.fixture
def store(scope: Scope) -> Iterator[Any]:
    """A store. Once it is closed and its views are gone, nothing of it is left in the pool."""
    store = scope.store()
    yield store
    store.close()
    del store
    scope.stores.clear()
    eventually(scope.is_empty, scope.stats)
