"""A storm over the store: clients of all kinds are killed at random points, while what they put is four times what the pool holds.

In the end nothing may be left of them, and nothing that was read may have been wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mooncake_ray.config import Config
from mooncake_ray.errors import BrokerDiedError
from mooncake_ray.store import node
from stress.clients import Expected, Settings, Tally
from stress.content import Board
from stress.outcome import Outcome, eventually, note

__all__ = ["Options", "run"]

_ROOT = Path(__file__).resolve().parents[1]
_PAGE = 4096
_PROGRESS_S = 10.0
_ANSWER_S = 120.0  # a keeper reads all that it has before it ends
_BROKER_LIVES_S = 4.0  # at least, with broker kills
_MORE_DESCRIPTORS = 8  # a broker that has spilled keeps a lock, a journal, a file twice and an eventfd


@dataclass(frozen=True)
class Options:
    """How hard it blows."""

    seconds: float = 60.0
    kills_per_second: float = 10.0
    seed: int = 0
    broker_kills: bool = False
    pool_bytes: int = 48 << 20
    keepers: int = 2  # never killed; each owns as much as the pool holds, and the putters as much again together
    putters: int = 3
    getters: int = 3
    holders: int = 2


class _Nursery:
    """The process that forks the clients."""

    def __init__(self, settings: Settings, fds: tuple[int, ...]) -> None:
        self.complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        text = json.dumps({**asdict(settings), "config": asdict(settings.config)})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stress.clients", text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            cwd=_ROOT,
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C is for the storm, which then ends its clients
        )

    def ask(self, *words: object) -> int:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], _ANSWER_S)[0]:
            raise TimeoutError(f"no answer to {words} within {_ANSWER_S} s: {self.said()}")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that forks the clients has ended: {self.said()}")
        return int(line)

    def said(self) -> str:
        self.complaints.seek(0)
        return self.complaints.read().decode(errors="replace").strip()

    def end(self) -> None:
        """Its clients end with it."""
        self._process.kill()
        self._process.wait()
        self.complaints.close()


class _Storm:
    def __init__(self, options: Options, spill_dir: str) -> None:
        self.options, self.rng = options, random.Random(options.seed)
        self.outcome = Outcome("storm over the store", options.seed)
        self.scope = f"storm-{secrets.token_hex(6)}"
        self.config = Config(capacity_bytes=options.pool_bytes, prefault_bytes=options.pool_bytes, spill_dir=spill_dir, linger_s=0.5)
        self.directory = Path(node.spill_directory(node.broker_name(self.scope), self.config))
        self.observer = node.connect(node.broker_name(self.scope), self.config)
        self.broker = self.stats()["pid"]
        self.broker_kills = 0
        self.descriptors = _descriptors(self.broker)
        fds = tuple(os.memfd_create("storm") for _ in range(3))
        for fd, size in zip(fds, (Board.NBYTES, Tally.NBYTES, Expected.NBYTES), strict=True):
            os.ftruncate(fd, size)
        self.tally, self.expected = Tally(fds[1]), Expected(fds[2])
        settings = Settings(
            self.scope,
            self.config,
            *fds,
            keeper_bytes=options.pool_bytes,
            putter_bytes=2 * options.pool_bytes // options.putters,
            broker_dies=options.broker_kills,
        )
        self.nursery = _Nursery(settings, fds)
        self.alive: dict[int, tuple[int, str]] = {}  # pid → row and role
        self.kills = 0
        self.before = {"spill_written_bytes": 0, "spill_read_bytes": 0, "served_from_disk": 0}  # of brokers that were killed

    def stats(self) -> dict[str, Any]:
        if not self.observer.usable:
            self.observer = node.connect(node.broker_name(self.scope), self.config, before=self.observer)
        return json.loads(self.observer.stats())

    # ---- while it blows

    def blow(self) -> None:
        for role in ("keeper", "putter", "getter", "holder"):
            for _ in range(getattr(self.options, f"{role}s")):
                self.spawn(len(self.alive), role)
        start = time.monotonic()
        end, told, broker_since, due = start + self.options.seconds, start, start, start
        # However slow the machine, no storm that is to kill brokers ends before it has killed one.
        while (now := time.monotonic()) < end or (self.options.broker_kills and not self.broker_kills):
            if now - told >= _PROGRESS_S:
                told = now
                note(f"{now - start:5.0f} s: {', '.join(f'{k} {v:,}' for k, v in self.progress().items())}")
            due += self.rng.expovariate(self.options.kills_per_second)
            time.sleep(max(0.0, (min(due, end) if now < end else due) - now))  # the load, not a way to wait
            self.kill_one()
            if self.options.broker_kills and time.monotonic() - broker_since > _BROKER_LIVES_S * self.rng.uniform(1, 2):
                self.kill_broker()
                broker_since = time.monotonic()
            elif not self.options.broker_kills and not Path(f"/proc/{self.broker}").exists():
                self.outcome.demand(False, f"the broker {self.broker} has died")
                return

    def spawn(self, row: int, role: str) -> None:
        self.alive[self.nursery.ask("spawn", row, role, self.rng.getrandbits(32))] = row, role

    def kill_one(self) -> None:
        pid = self.rng.choice([pid for pid, (_, role) in self.alive.items() if role != "keeper"])
        row, role = self.alive[pid]
        self.end_client(pid, "kill", -signal.SIGKILL)
        self.kills += 1
        self.spawn(row, role)

    def end_client(self, pid: int, how: str, wanted: int) -> None:
        row, role = self.alive.pop(pid)
        status = self.nursery.ask(how, pid)
        self.outcome.demand(status == wanted, f"{role} {row} ended with status {status}: {self.nursery.said()}")

    def progress(self) -> dict[str, int]:
        stats = self.stats()
        return {
            "kills": self.kills,
            **self.tally.sums(),
            **{name: n + stats[name] for name, n in self.before.items()},
            **({"broker_kills": self.broker_kills} if self.options.broker_kills else {}),
        }

    # ---- the broker

    def kill_broker(self) -> None:
        """With all clients stopped, so that what is on disk is known; then they go on, and find a new one."""
        self.note_what_brokers_did()
        for pid in self.alive:
            os.kill(pid, signal.SIGSTOP)
        eventually(lambda: all(_state(pid) in "TZ" for pid in self.alive))
        on_disk: list[bytes] = []

        def is_quiet() -> bool:
            nonlocal on_disk
            rows = json.loads(self.observer.inspect())
            before, on_disk = on_disk, sorted(bytes.fromhex(o["id"]) for o in rows["object_rows"] if o["state"] == "spilled" or o["clean"])
            return not rows["writing_bytes"] and on_disk == before

        self.outcome.demand(eventually(is_quiet), "the broker went on writing although all clients were stopped")
        self.expected.write(on_disk)
        os.kill(self.broker, signal.SIGKILL)
        eventually(lambda: _state(self.broker) in "ZX")
        for pid in self.alive:
            os.kill(pid, signal.SIGCONT)
        self.broker_kills += 1
        with contextlib.suppress(BrokerDiedError):
            self.stats()
        self.broker = self.stats()["pid"]

    def note_what_brokers_did(self) -> None:
        stats = self.stats()
        self.before = {name: n + stats[name] for name, n in self.before.items()}

    # ---- when it is over

    def settle(self) -> None:
        """Ends the clients; those that are not killed read all they own first. Then everything must be free."""
        for pid, (_, role) in list(self.alive.items()):
            self.end_client(pid, *(("end", 0) if role == "keeper" else ("kill", -signal.SIGKILL)))
        self.outcome.counts = self.progress()
        names = ("leases", "pins", "claims", "objects", "removed_but_pinned", "used_bytes", "inline_bytes", "clean_bytes", "writing_bytes")
        names += ("disk_bytes", "spilled_objects", "spilled_bytes", "orphans", "claims_unanswered")
        names += ("waiting_creates", "waiting_gets", "waiting_waits")
        left: dict[str, int] = {}

        def is_empty() -> bool:
            nonlocal left
            stats = self.stats()
            left = {name: stats[name] for name in names if stats[name]}
            if stats["free_pages"] * _PAGE != stats["populated_bytes"]:
                left["pages_lost"] = stats["populated_bytes"] // _PAGE - stats["free_pages"]
            if len(stats["sessions"]) > 1:
                left["sessions"] = len(stats["sessions"])
            return not left

        demand = self.outcome.demand
        demand(eventually(is_empty), f"left in the pool when everybody had gone: {left}")
        stats = self.stats()
        demand(stats["pid"] == self.broker, f"the broker was {self.broker}, and is {stats['pid']}")
        demand(stats["orphans_dropped"] == 0, f"{stats['orphans_dropped']} objects were dropped")
        demand(not stats["spill_error"], f"the disk: {stats['spill_error']}")
        largest = sum(a["largest_free_bytes"] for a in stats["arenas"])
        pieces = f"free pages are not in one piece: the largest has {largest} of {stats['populated_bytes']} bytes"
        demand(largest == stats["populated_bytes"], pieces)
        data = self.directory / "data"
        demand(
            eventually(lambda: not data.exists() or not data.stat().st_blocks),
            f"{data.stat().st_blocks * 512 if data.exists() else 0} bytes of the spill file are still taken",
        )
        more = _descriptors(self.broker) - self.descriptors
        demand(more <= _MORE_DESCRIPTORS, f"the broker has {more} descriptors more than in the beginning")
        self.observer.close()
        demand(eventually(lambda: _state(self.broker) in "ZX"), "the broker did not end when its last client had left")
        demand(eventually(lambda: not self.directory.exists()), f"{self.directory} is still there")
        demand(not (said := self.nursery.said()), f"a client said: {said}")

    def give_up(self) -> None:
        """Ends what it started."""
        self.nursery.end()
        self.observer.close()


def run(options: Options) -> Outcome:
    """Blows, settles, and tells."""
    with tempfile.TemporaryDirectory(prefix="mooncake-storm-") as spill_dir:
        storm = _Storm(options, spill_dir)
        try:
            storm.blow()
            storm.settle()
        except KeyboardInterrupt:
            storm.outcome.interrupted = True
            storm.outcome.counts = storm.progress()
        except (RuntimeError, TimeoutError, BrokerDiedError) as e:
            storm.outcome.demand(False, f"{type(e).__name__}: {e}")
        finally:
            storm.give_up()
        return storm.outcome


def _state(pid: int) -> str:
    """R, S, D, T (stopped), Z (ended); X if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
