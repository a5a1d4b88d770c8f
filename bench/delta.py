"""Patches of weights after a step of Adam: their bytes, and how fast they are made and applied, beside other forms and reading memory."""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench.report import Result, Target, summarize
from bench.updates import Updates
from mooncake_ray.weights.patch import Classing, Part, Patch, Regions, apply, encode

__all__ = ["BASELINES", "Step", "plan", "run", "targets"]

NAME = "delta"
BASELINES = ("memory-read", "dense")
SIZES = {"64MiB": 64 << 20, "1GiB": 1 << 30}
FRACTIONS = {"unchanged": 0.0, "0.5%": 0.005, "2%": 0.02, "5%": 0.05}
_COLUMNS = 4096
_CHUNK = 64 << 20  # bytes; what xor+zstd compresses at a time: about a tensor


@dataclass(frozen=True)
class Step:
    """A weight of so many bytes, and rounds of all cases."""

    nbytes: int
    rounds: int


def plan(sizes: Sequence[str] | None = None, *, quick: bool = False, runs: int | None = None) -> list[Step]:
    """What to run.

    Raises:
        ValueError: there is no such size, or more than one is asked for.
    """
    chosen = list(sizes or ["64MiB" if quick else "1GiB"])
    if len(chosen) != 1 or chosen[0] not in SIZES:
        raise ValueError(f"one size, of {', '.join(SIZES)}; not {' '.join(chosen)}")
    return [Step(SIZES[chosen[0]], runs or (3 if quick else 5))]


def run(steps: Sequence[Step]) -> Iterator[list[Result]]:
    """Runs the steps; yields what each fraction of changed elements found."""
    for step in steps:
        updates = Updates(step.nbytes // 2)
        for name, fraction in FRACTIONS.items():
            yield _measured(name, updates.old, updates.new(fraction) if fraction else updates.old.copy(), step.rounds)


def _measured(name: str, old: np.ndarray, new: np.ndarray, rounds: int) -> list[Result]:
    """All subjects take turns, in an order of their own in each round. `old` and `new`: uint16."""
    rng, held = random.Random(1), old.copy()
    changed = int(np.count_nonzero(old != new))
    subjects = [_Pool(old, new), _Plain(old, new), _Apart(old, new), _XorZstd(old, new), _Coo(old, new), _Dense(old, new)]
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    nbytes = {}
    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as threads:

        def read() -> None:
            words = [a.view(np.uint64) for a in (old, new)]
            pieces = [piece for a in words for piece in np.array_split(a, threads._max_workers)]
            list(threads.map(np.add.reduce, pieces))

        for n in range(-1, rounds):
            for subject in rng.sample([*subjects, None], len(subjects) + 1):
                if subject is None:
                    times = {"encode": _timed(read)[0]}
                else:
                    took, coded = _timed(subject.encode)
                    times = {"encode": took}
                    nbytes[subject.name] = subject.nbytes(coded)
                    if changed:
                        np.copyto(held, old)
                        times["apply"] = _timed(partial(subject.apply, coded, held))[0]
                        if not np.array_equal(held, new):
                            raise RuntimeError(f"{subject.name} at {name} is not what was coded")
                for what, took in times.items():
                    if n >= 0:
                        seconds[what, subject.name if subject else "memory-read"].append(took)
    results = []
    if changed:
        extra = {"changed": changed}
        results += [summarize(NAME, f"bytes-per-changed/{name}", s.name, [nbytes[s.name] / changed], extra, "bytes") for s in subjects]
    for (what, subject), took in seconds.items():
        extra = {"of_dense": round(nbytes[subject] / new.nbytes, 5)} if subject in nbytes else {}
        if what == "apply":
            extra["ns_per_changed"] = round(min(took) / changed * 1e9, 2)
        results.append(summarize(NAME, f"{what}/{name}", subject, [new.nbytes / t for t in took], extra, "bytes/s"))
    return results


def _timed(do: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    made = do()
    return time.perf_counter() - start, made


@dataclass
class _Subject:
    """A form of what changed from `old` to `new`: making it, its size, and bringing a copy of `old` to `new`."""

    old: np.ndarray
    new: np.ndarray

    def __post_init__(self) -> None:
        """Once, not timed."""


class _Pool(_Subject):
    """This package's patches, coded against what was there. The base's digest is known, as it is to a trainer that published the base."""

    name = "pool"
    classing: Classing | None = Classing(np.array([7], np.int32))

    def __post_init__(self) -> None:
        shape = np.array([[len(self.old) // _COLUMNS, _COLUMNS]])
        self.regions = Regions(np.zeros_like(shape), shape, shape, np.array([2], np.int32), np.array([0]))
        self.before = self.regions.digests(self.old.view(np.uint8))

    def encode(self) -> Patch:
        old, new = self.old.view(np.uint8), self.new.view(np.uint8)
        return encode(old, new, self.regions, base_version=1, version=2, before=self.before, classing=self.classing)

    def nbytes(self, patch: Patch) -> int:
        return patch.nbytes

    def apply(self, patch: Patch, held: np.ndarray) -> None:
        apply(patch, self.regions, [Part(0, held.reshape(-1, _COLUMNS), (0, 0))], version=1)


class _Plain(_Pool):
    """For receivers that hold only pieces of rows."""

    name = "pool-plain"
    classing = None


class _Apart(_Pool):
    """With distances by size, too: for links so slow that looking at every element is worth it."""

    name = "pool-apart"
    classing = Classing(np.array([7], np.int32), apart=True)


class _XorZstd(_Subject):
    """The XOR of both, compressed by zstd at level 1."""

    name = "xor-zstd"

    def __post_init__(self) -> None:
        import pyarrow

        self.codec = pyarrow.Codec("zstd", 1)

    def encode(self) -> list[Any]:
        step = _CHUNK // 2
        return [self.codec.compress(self.new[i : i + step] ^ self.old[i : i + step]) for i in range(0, len(self.old), step)]

    def nbytes(self, coded: list[Any]) -> int:
        return sum(c.size for c in coded)

    def apply(self, coded: list[Any], held: np.ndarray) -> None:
        for i, c in zip(range(0, len(held), _CHUNK // 2), coded, strict=True):
            piece = held[i : i + _CHUNK // 2]
            piece ^= np.frombuffer(self.codec.decompress(c, piece.nbytes), np.uint16)


class _Coo(_Subject):
    """Positions as int32, and new values."""

    name = "coo"

    def encode(self) -> tuple[np.ndarray, np.ndarray]:
        where = np.flatnonzero(self.old != self.new).astype(np.int32)
        return where, self.new[where]

    def nbytes(self, coded: tuple[np.ndarray, np.ndarray]) -> int:
        return sum(c.nbytes for c in coded)

    def apply(self, coded: tuple[np.ndarray, np.ndarray], held: np.ndarray) -> None:
        held[coded[0]] = coded[1]


class _Dense(_Subject):
    """All new values."""

    name = "dense"

    def encode(self) -> np.ndarray:
        return self.new.copy()

    def nbytes(self, coded: np.ndarray) -> int:
        return coded.nbytes

    def apply(self, coded: np.ndarray, held: np.ndarray) -> None:
        np.copyto(held, coded)


def targets(results: Sequence[Result]) -> list[Target]:
    """What is asked of the package, and how near it came."""
    found = {(r.case, r.subject): r for r in results}

    def value(case: str) -> float | None:
        result = found.get((case, "pool"))
        return result.value if result else None

    out = [Target("bytes per changed element at 2%", value("bytes-per-changed/2%"), 1.1)]
    fast, read = found.get(("encode/unchanged", "pool")), found.get(("encode/unchanged", "memory-read"))
    ratio = fast.value / read.value if fast and read else None
    out.append(Target("encode unchanged / reading both", ratio, 0.7, True, fast.best / read.best if fast and read else None))
    few, many = found.get(("apply/0.5%", "pool")), found.get(("apply/5%", "pool"))
    ratio = few.extra["ns_per_changed"] / many.extra["ns_per_changed"] if few and many else None
    out.append(Target("apply, time per change at 0.5% / at 5%", ratio, 2.0))
    sizes = [r.extra["of_dense"] for r in results if r.subject.startswith("pool") and "of_dense" in r.extra]
    out.append(Target("bytes / dense", max(sizes, default=None), 1.001))
    for case in ("0.5%", "2%", "5%"):
        ours, theirs = found.get((f"bytes-per-changed/{case}", "pool")), found.get((f"bytes-per-changed/{case}", "xor-zstd"))
        out.append(Target(f"bytes, xor-zstd / pool at {case}", theirs.value / ours.value if ours and theirs else None, 1.5, True))
    return out
