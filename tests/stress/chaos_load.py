"""The load of `stress.chaos`: a driver on node 0 with an actor on every node, who put, and get what others put, whole and in parts.

Says on stdout what it has done, a line of JSON every few seconds and a last one with `"over": true`. Reads stdin: when that is closed, it
stops, and sees whether everything still works and is given back.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import select
import sys
import time
from collections import Counter
from typing import Any

from stress import content
from stress.content import CorruptError
from stress.outcome import eventually

__all__ = ["GET_S", "Actor"]

PULL_S = 10.0
GET_S = 15.0  # Ray's part: until the value's descriptor is there
LATE_S = GET_S + PULL_S + 15.0  # a get that takes longer has not kept to its deadline; so much to spare on a busy machine
_ANSWER_S = LATE_S + 20.0
_TOLD_S = 5.0
_PENDING, _ITEMS = 8, 24
_ROWS, _WIDTH = 512, 256
_LEFT = ("leases", "pins", "claims", "objects", "removed_but_pinned", "used_bytes", "inline_bytes")
_LEFT_IN_ENGINE = ("pins", "offers", "replicas_here", "claims_elsewhere")
_CONNECTIONS_PER_PEER = 8


def batch(seed: int) -> dict[str, Any]:
    """A batch whose element (row, column) is known from the seed."""
    import torch

    tokens = torch.arange(_ROWS * _WIDTH, dtype=torch.int64).reshape(_ROWS, _WIDTH) + seed % 1_000_003
    return {"tokens": tokens, "scores": tokens.double() * 0.5, "more": tokens.float() * 0}


def check_part(got: Any, seed: int, rows: slice) -> None:
    """Raises CorruptError unless this is the `scores` of those rows."""
    scores = got["scores"] if isinstance(got, dict) else got.batch["scores"]
    wanted = batch(seed)["scores"][rows]
    if scores.shape != wanted.shape or not bool((scores == wanted).all()):
        raise CorruptError(f"batch of {seed:#x}, rows {rows}: not what was put")


def kind_of(e: Exception) -> str:
    """The name of an error that may be: Ray's or the package's, typed. "" of any other."""
    import ray

    from mooncake_ray.errors import MooncakeRayError

    if isinstance(e, ray.exceptions.RayTaskError) and isinstance(e.cause, Exception) and e.cause is not e:
        return kind_of(e.cause)
    if isinstance(e, ray.exceptions.RaySystemError):  # what the rebuilding of a value raised is inside
        inner = getattr(e, "client_exc", None)
        return type(inner).__name__ if isinstance(inner, (MooncakeRayError, ray.exceptions.RayError)) else ""
    return type(e).__name__ if isinstance(e, (MooncakeRayError, ray.exceptions.RayError)) else ""


class Actor:
    """Puts and gets on its node. A get answers "ok", the name of a typed error, or "!" and what is wrong."""

    def put(self, seed: int) -> list[Any]:
        """A ref that this actor owns."""
        import ray

        return [ray.put(content.value(seed))]

    def put_batch(self, seed: int) -> list[Any]:
        import mooncake_ray

        return [mooncake_ray.put_batch(batch(seed))]

    def make(self, seed: int) -> Any:
        return content.value(seed)

    def get(self, refs: list[Any], seed: int) -> str:
        import ray

        return self._judged(lambda: content.check(ray.get(refs[0], timeout=GET_S), seed))

    def part(self, refs: list[Any], seed: int, start: int, stop: int) -> str:
        """Some rows of a field of a batch."""
        import mooncake_ray

        rows = slice(start, stop)
        return self._judged(lambda: check_part(mooncake_ray.get(refs[0], fields=["scores"], rows=rows, timeout=GET_S), seed, rows))

    def _judged(self, get: Any) -> str:
        start = time.monotonic()
        try:
            get()
            answer = "ok"
        except CorruptError as e:
            answer = f"!CorruptError: {e}"
        except Exception as e:
            answer = kind_of(e) or f"!untyped {type(e).__name__}: {str(e)[-600:]}"
        if (took := time.monotonic() - start) > LATE_S:
            answer = f"!{took:.0f} s, until {answer}"
        return answer

    def left(self) -> dict[str, Any]:
        """What there still is in the pool of this node, and who claims some of it.

        But for replicas, which the pool drops when it needs the room: what is left of a pool that was lost stays as long as it costs nothing.
        (Of pools that live, the engine says whether there are any.)
        """
        import mooncake_ray
        from mooncake_ray.objects import session

        gc.collect()
        stats = mooncake_ray.pool_stats()
        left: dict[str, Any] = {name: stats[name] for name in _LEFT if stats[name]}
        if left and (here := session.current()):
            stats = json.loads(here.client.inspect())
            rows = [row for row in stats["object_rows"] if {c["kind"] for c in row["claims"]} != {"replica"}]
            if not rows and not any(stats[name] for name in ("leases", "pins", "removed_but_pinned")):
                return {}
            left["rows"] = [[row["state"], row["size"], round(row["age_s"]), [c["kind"] for c in row["claims"]]] for row in rows[:8]]
        return left


class _Load:
    def __init__(self, nodes: int, seed: int) -> None:
        import ray

        self.ray, self.rng, self.nodes = ray, random.Random(seed), nodes
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        actor: Any = ray.remote(Actor)
        self.actors = [
            actor.options(num_cpus=0, max_restarts=-1, max_task_retries=0, resources={f"node{n}": 0.01}).remote() for n in range(nodes)
        ]
        self.items: list[tuple[Any, int, bool]] = []  # ref, seed, whether it is a batch
        self.pending: dict[Any, tuple[str, Any, float]] = {}  # answer → what was asked, of which item, when

    def seed(self) -> int:
        return self.rng.getrandbits(60) & ~1 | 2  # of values with tensors

    def step(self) -> None:
        actor, seed = self.rng.choice(self.actors), self.seed()
        what = self.rng.choices(("driver", "put", "batch", "make", "get"), (2, 2, 2, 1, 8))[0]
        if what == "driver":
            self.keep(self.ray.put(content.value(seed)), seed, False)
            self.counts["puts"] += 1
        elif what == "make":
            self.keep(actor.make.remote(seed), seed, False)
            self.counts["puts"] += 1
        elif what in ("put", "batch"):
            ref = (actor.put if what == "put" else actor.put_batch).remote(seed)
            self.pending[ref] = what, (seed, what == "batch"), time.monotonic()
        elif self.items:
            item = self.rng.choice(self.items)
            self.pending[self.ask(actor, item)] = "get", item, time.monotonic()
        while len(self.pending) > _PENDING:
            self.collect()

    def ask(self, actor: Any, item: tuple[Any, int, bool]) -> Any:
        ref, seed, is_batch = item
        if not is_batch:
            return actor.get.remote([ref], seed)
        start = self.rng.randrange(_ROWS - 1)
        return actor.part.remote([ref], seed, start, self.rng.randrange(start + 1, _ROWS))

    def keep(self, ref: Any, seed: int, is_batch: bool) -> None:
        self.items.append((ref, seed, is_batch))
        while len(self.items) > _ITEMS:
            self.items.pop(self.rng.randrange(len(self.items)))

    def collect(self) -> None:
        """Takes one answer."""
        done, _ = self.ray.wait(list(self.pending), timeout=_ANSWER_S)
        if not done:
            self.violations.append(f"none of {len(self.pending)} calls has ended within {_ANSWER_S:g} s")
            self.pending.clear()
            return
        what, item, asked = self.pending.pop(done[0])
        try:
            answer = self.ray.get(done[0], timeout=_ANSWER_S)
        except Exception as e:
            name = kind_of(e)
            self.counts[f"calls:{name or type(e).__name__}"] += 1
            if not name:
                self.violations.append(f"{what}: {type(e).__name__}: {str(e)[-600:]}")
            return
        if what != "get":
            self.counts["puts"] += 1
            self.keep(answer[0], *item)
        elif answer.startswith("!"):
            self.violations.append(f"get, {time.monotonic() - asked:.0f} s after it was asked for: {answer[1:]}")
        else:
            self.counts["gets" if answer == "ok" else f"gets:{answer}"] += 1
            if answer not in ("ok", "GetTimeoutError"):
                with contextlib.suppress(ValueError):  # it will not come back
                    self.items.remove(item)

    # ---- when it is over

    def settle(self) -> None:
        while self.pending:
            self.collect()
        self.items.clear()
        self.all_get_from_all()
        self.all_is_given_back()

    def all_get_from_all(self) -> None:
        """Every node gets what every other puts."""
        for home in range(self.nodes):
            for reader in range(self.nodes):
                said: list[str] = []

                def works(home: int = home, reader: int = reader, said: list[str] = said) -> bool:
                    seed = self.seed()
                    try:
                        refs = self.ray.get(self.actors[home].put.remote(seed), timeout=_ANSWER_S)
                        said.append(self.ray.get(self.actors[reader].get.remote(refs, seed), timeout=_ANSWER_S))
                    except self.ray.exceptions.RayError as e:
                        said.append(f"{type(e).__name__}: {str(e)[-300:]}")
                    return said[-1] == "ok"

                if not eventually(works, 120.0):
                    self.violations.append(f"when all was mended, node {reader} could not get from node {home}: {said[-1]}")

    def all_is_given_back(self) -> None:
        from mooncake_ray.objects import nodes

        gc.collect()
        left: list[Any] = []

        def nothing() -> bool:
            left[:] = []
            for n, actor in enumerate(self.actors):
                try:
                    if found := self.ray.get(actor.left.remote(), timeout=_ANSWER_S):
                        left.append({"node": n, **found})
                except self.ray.exceptions.RayError as e:
                    left.append({"node": n, "error": str(e)[-300:]})
            for report in nodes.reports():
                found = {name: report[name] for name in _LEFT_IN_ENGINE if report.get(name)}
                if report.get("connections", 0) > _CONNECTIONS_PER_PEER * (self.nodes - 1):
                    found["connections"] = report["connections"]
                if found:
                    left.append({"engine": report["endpoint"], **found})
            return not left

        if not eventually(nothing, 90.0):
            self.violations.append(f"left when all had been let go of: {left}")


def main(nodes: int, seed: int) -> None:
    import ray

    import mooncake_ray

    mooncake_ray.install(capacity_bytes=96 << 20, prefault_bytes=16 << 20, pull_timeout_s=PULL_S, linger_s=2.0)
    ray.init(log_to_driver=False)

    def say(**more: Any) -> None:
        print(json.dumps({"counts": load.counts, "violations": load.violations, **more}), flush=True)

    load = _Load(nodes, seed)
    ray.get([a.left.remote() for a in load.actors])
    say()
    told = time.monotonic()
    while not select.select([sys.stdin], [], [], 0)[0]:
        load.step()
        if time.monotonic() - told > _TOLD_S:
            told = time.monotonic()
            say()
    load.settle()
    say(over=True)
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
