"""The processes of the storm over the store, and the one that forks them.

`python -m stress.clients SETTINGS` has imported everything once, and forks a client for each line that asks for one: killing ten of them a
second does not cost ten imports a second. The clients die with it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch  # noqa: F401 - the clients must not import it

from mooncake_ray.config import Config
from mooncake_ray.errors import BrokerDiedError, GetTimeoutError, ObjectLostError, ObjectNotFoundError, StoreFullError
from mooncake_ray.store import ObjectKey, Store
from stress import content
from stress.content import Board, CorruptError, Slot

__all__ = ["COUNTS", "ROLES", "Expected", "Tally"]

ROLES = ("keeper", "putter", "getter", "holder")
COUNTS = ("puts", "gets", "missing", "full", "timeouts", "lost", "came_back", "broker_deaths")
_PUT_TIMEOUT_S, _GET_TIMEOUT_S = 0.5, 0.5
_VIEWS = 4
_PR_SET_PDEATHSIG = 1


class Tally:
    """What each client counted, in shared memory; who comes after it in its row goes on from there."""

    ROWS = 64
    NBYTES = ROWS * len(COUNTS) * 8

    def __init__(self, fd: int) -> None:
        self._numbers = np.frombuffer(mmap.mmap(fd, self.NBYTES), np.int64).reshape(self.ROWS, len(COUNTS))

    def add(self, row: int, name: str) -> None:
        self._numbers[row, COUNTS.index(name)] += 1

    def sums(self) -> dict[str, int]:
        return dict(zip(COUNTS, self._numbers.sum(0).tolist(), strict=True))


class Expected:
    """The ids of what was on disk when the broker was killed. Written while all clients are stopped."""

    NBYTES = 1 << 20

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, self.NBYTES)

    def write(self, ids: list[bytes]) -> None:
        ids = ids[: self.NBYTES // 16 - 1]
        self._memory[16 : 16 + 16 * len(ids)] = b"".join(ids)
        self._memory[:8] = len(ids).to_bytes(8, "little")

    def read(self) -> set[bytes]:
        n = int.from_bytes(self._memory[:8], "little")
        return {self._memory[16 + 16 * i : 32 + 16 * i] for i in range(n)}


@dataclass
class Settings:
    """What the storm tells its clients."""

    scope: str
    config: Config
    board_fd: int
    tally_fd: int
    expected_fd: int
    keeper_bytes: int  # what a keeper, or a putter, has in the pool at most
    putter_bytes: int
    broker_dies: bool

    @classmethod
    def parse(cls, text: str) -> Settings:
        values = json.loads(text)
        return cls(**{**values, "config": Config(**values["config"])})


class Client:
    """One process: it does what its role does most, at random, for ever."""

    def __init__(self, settings: Settings, row: int, role: str, seed: int) -> None:
        self.settings, self.row, self.role, self.rng = settings, row, role, random.Random(seed)
        self.board, self.tally, self.expected = Board(settings.board_fd), Tally(settings.tally_fd), Expected(settings.expected_fd)
        self.store = Store(settings.scope, settings.config)
        self.mine: dict[ObjectKey, int] = {}  # and their seeds
        self.mine_bytes = 0
        self.views: list[tuple[int, Any]] = []  # seed, and what a get returned
        self.leases: list[tuple[int, Any]] = []

    # Weights of what a role does.
    _DOES = {  # noqa: RUF012 - never changed
        "keeper": {"put": 4, "get": 1, "get_mine": 3},
        "putter": {"put": 8, "get": 1, "lease": 1},
        "getter": {"get": 9, "look_again": 1},
        "holder": {"get": 3, "lease": 3, "finish": 2, "big": 1, "look_again": 1},
    }

    def run(self, over: threading.Event) -> None:
        does = self._DOES[self.role]
        while not over.is_set():
            self._do(self.rng.choices(list(does), list(does.values()))[0])
        self.leave()

    def _do(self, what: str) -> None:
        try:
            getattr(self, what)()
        except ObjectNotFoundError:
            self._count("missing")
        except StoreFullError:
            self._count("full")
        except GetTimeoutError:
            self._count("timeouts")
        except BrokerDiedError:
            if not self.settings.broker_dies:
                raise
            self._after_the_death_of_the_broker()
        except ObjectLostError:
            if not self.settings.broker_dies:
                raise
            self._count("lost")

    def _count(self, name: str) -> None:
        self.tally.add(self.row, name)

    def _own(self, key: ObjectKey, seed: int) -> None:
        self.mine[key] = seed
        self.mine_bytes += content.size_of(seed)
        self.board.write(self.rng.randrange(Board.SLOTS), Slot(key, seed))

    def put(self) -> None:
        most = self.settings.keeper_bytes if self.role == "keeper" else self.settings.putter_bytes
        while self.mine_bytes > most:
            self._free(self.rng.choice(list(self.mine)))
        seed = self.rng.getrandbits(62) & ~1
        self._own(self.store.put(content.value(seed), timeout_s=_PUT_TIMEOUT_S), seed)
        self._count("puts")

    def _free(self, key: ObjectKey) -> None:
        seed = self.mine.pop(key)
        self.mine_bytes -= content.size_of(seed)
        self.store.free([key])

    def get(self) -> None:
        slot = self.board.read(self.rng.randrange(Board.SLOTS))
        if slot is not None:
            self._keep(slot.seed, self._read(slot.key, slot.seed))
        elif self.role == "getter":
            time.sleep(self.rng.random() / 1000)  # there is little yet

    def get_mine(self) -> None:
        if self.mine:
            self._read_mine(self.rng.choice(list(self.mine)))

    def _read_mine(self, key: ObjectKey) -> None:
        try:
            self._read(key, self.mine[key])
        except ObjectNotFoundError as e:
            raise CorruptError(f"this process has not freed it: {e}") from e

    def _read(self, key: ObjectKey, seed: int) -> Any:
        if content.is_raw(seed):
            got = self.store.view(key, timeout_s=_GET_TIMEOUT_S, mutable=self.rng.random() < 0.5)
        else:
            got = self.store.get(key, timeout_s=_GET_TIMEOUT_S)
        _check(got, seed)
        self._count("gets")
        return got

    def _keep(self, seed: int, got: Any) -> None:
        if self.rng.random() < 0.3:
            self.views.append((seed, got))
        while len(self.views) > _VIEWS:
            seed, old = self.views.pop(self.rng.randrange(len(self.views)))
            _check(old, seed)

    def look_again(self) -> None:
        for seed, got in self.views:
            _check(got, seed)

    def lease(self) -> None:
        """An object of which others know the key before it is sealed: they wait for it."""
        seed = self.rng.getrandbits(62) | 1
        lease = self.store.create(content.raw_bytes(seed), timeout_s=_PUT_TIMEOUT_S)
        self.board.write(self.rng.randrange(Board.SLOTS), Slot(ObjectKey(self.store.client.pool_id, lease.id), seed))
        with memoryview(lease) as view:
            content.fill_raw(view, seed)
        self.leases.append((seed, lease))
        if len(self.leases) > 2 or self.role != "holder":
            self.finish()

    def finish(self) -> None:
        """Seals a lease, or gives it back."""
        if self.leases:
            seed, lease = self.leases.pop(self.rng.randrange(len(self.leases)))
            if self.rng.random() < 0.3:
                lease.abort()
                return
            self._own(self.store.publish(lease), seed)
            while self.mine_bytes > self.settings.putter_bytes:
                self._free(self.rng.choice(list(self.mine)))

    def big(self) -> None:
        """Has everybody else's put wait behind one that there may be no room for."""
        self.store.create(int(self.settings.config.capacity_bytes * self.rng.uniform(0.3, 0.9)), timeout_s=0.2).abort()

    # ---- what only a client that is not killed comes to

    def leave(self) -> None:
        """Reads all that it owns, and frees it."""
        for key in list(self.mine):
            self._do_until_read(key)
        for key in list(self.mine):
            self._free(key)
        self.views.clear()
        self.leases.clear()
        self.store.close()

    def _do_until_read(self, key: ObjectKey) -> None:
        try:
            self._read_mine(key)
        except (BrokerDiedError, ObjectLostError):
            if not self.settings.broker_dies:
                raise
            self._after_the_death_of_the_broker()

    def _after_the_death_of_the_broker(self) -> None:
        """What it owns is there if it was on disk. What is not is lost, and says so."""
        self._count("broker_deaths")
        self.leases.clear()
        self.look_again()  # views outlive the broker
        on_disk = self.expected.read()
        for key in list(self.mine):
            try:
                self._read_mine(key)
            except ObjectLostError:
                if key.id in on_disk:
                    raise CorruptError(f"it was on disk when the broker was killed, and is lost: {key}") from None
                self._count("lost")
                self.mine_bytes -= content.size_of(self.mine.pop(key))
            else:
                self._count("came_back")


def _check(got: Any, seed: int) -> None:
    if content.is_raw(seed):
        content.check_raw(got, seed)
    else:
        content.check(got, seed)


def _be_a_client(settings: Settings, row: int, role: str, seed: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    try:
        Client(settings, row, role, seed).run(over)
    except BaseException as e:
        os.write(2, f"{role} {row}: {type(e).__name__}: {e}\n".encode())
        os._exit(1)
    os._exit(0)


def main() -> None:
    """Lines in: `spawn ROW ROLE SEED`, `kill PID`, `end PID`. A line out each: the pid, or the exit status."""
    settings = Settings.parse(sys.argv[1])
    for line in sys.stdin:
        what, *words = line.split()
        if what == "spawn":
            answer = os.fork()
            if not answer:
                _be_a_client(settings, int(words[0]), words[1], int(words[2]))
        else:
            os.kill(int(words[0]), signal.SIGKILL if what == "kill" else signal.SIGTERM)
            answer = os.waitstatus_to_exitcode(os.waitpid(int(words[0]), 0)[1])
        print(answer, flush=True)


if __name__ == "__main__":
    main()
