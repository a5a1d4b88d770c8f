"""`Reach`: what of a publication each box that anybody wants is made of, with the proof that it is all there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.boxes import Ragged, distinct, meetings
from mooncake_ray.weights.demand import widened
from mooncake_ray.weights.publication import Publication

__all__ = ["Ops", "Reach", "few", "tensors"]


@dataclass(frozen=True, eq=False)
class Ops:
    """`p` intersections of boxes with regions."""

    region: np.ndarray
    """int64 (p)."""
    lo: np.ndarray
    """int64 (p, d)."""
    hi: np.ndarray
    """int64 (p, d)."""
    nbytes: np.ndarray
    """int64 (p)."""

    def take(self, rows: np.ndarray) -> Ops:
        return Ops(self.region[rows], self.lo[rows], self.hi[rows], self.nbytes[rows])


class Reach:
    """A table of different boxes, which grows by the boxes of classes of ranks that were not asked for before. Not thread-safe."""

    def __init__(self, publication: Publication) -> None:
        d = publication.lo.shape[1]
        self.publication = publication
        self.tensor = np.zeros(0, np.int64)
        self.lo = self.hi = np.zeros((0, d), np.int64)
        self.nbytes = np.zeros(0, np.int64)
        self.ready = np.zeros(0, np.int64)  # the bucket that a box is complete with
        self.op_start = np.zeros(1, np.int64)
        self.ops = Ops(np.zeros(0, np.int64), self.lo, self.hi, self.nbytes)
        self._known: dict[bytes, np.ndarray] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._known

    def boxes(self, digest: bytes) -> np.ndarray:
        """int64: the box that each row of a class is."""
        return self._known[digest]

    def add(self, digests: list[bytes], start: np.ndarray, tensor: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> None:
        """Classes that are not there: the rows of class i are start[i] to start[i + 1].

        Raises:
            PlanError: no region has some of a box. The table is as it was.
        """
        d = max(self.lo.shape[1], lo.shape[1])
        lo, hi, old_lo, old_hi = widened(lo, d, 0), widened(hi, d, 1), widened(self.lo, d, 0), widened(self.hi, d, 1)
        before = len(self.tensor)
        first, row = distinct([np.append(self.tensor, tensor), *np.append(old_lo, lo, axis=0).T, *np.append(old_hi, hi, axis=0).T])
        fresh = np.flatnonzero(first >= before)
        number = np.where(first < before, first, 0)
        number[fresh] = before + np.arange(len(fresh))
        rows = first[fresh] - before
        tensor, lo, hi = tensor[rows], lo[rows], hi[rows]
        box, ops = self._meet(tensor, lo, hi)
        item = self.publication.itemsize[tensor] if len(tensor) else np.zeros(0, np.int64)
        nbytes = np.prod(hi - lo, axis=1) * item
        self._prove(tensor, lo, hi, nbytes, np.bincount(box, ops.nbytes, minlength=len(tensor)))
        ready = np.zeros(len(tensor), np.int64)
        np.maximum.at(ready, box, self.publication.bucket[ops.region])
        ends = np.cumsum(np.bincount(box, minlength=len(tensor)))
        self.op_start = np.append(self.op_start, self.op_start[-1] + ends)
        old = self.ops
        self.ops = Ops(
            np.append(old.region, ops.region),
            np.append(widened(old.lo, d, 0), ops.lo, axis=0),
            np.append(widened(old.hi, d, 1), ops.hi, axis=0),
            np.append(old.nbytes, ops.nbytes),
        )
        self.tensor, self.nbytes, self.ready = (
            np.append(a, b) for a, b in ((self.tensor, tensor), (self.nbytes, nbytes), (self.ready, ready))
        )
        self.lo, self.hi = np.append(old_lo, lo, axis=0), np.append(old_hi, hi, axis=0)
        for digest, a, b in zip(digests, start, start[1:], strict=False):
            self._known[digest] = number[row[before + a : before + b]]

    def ops_of(self, boxes: np.ndarray) -> tuple[np.ndarray, Ops]:
        """(start, ops): int64 (boxes + 1); and the ops of the boxes, one box after the other, by rising region."""
        of = Ragged(self.op_start, np.arange(len(self.ops.region))).take(boxes)
        return of.start, self.ops.take(of.values)

    def _meet(self, tensor: np.ndarray, lo: np.ndarray, hi: np.ndarray) -> tuple[np.ndarray, Ops]:
        """(box, ops), by box, then by region."""
        of, d = self.publication, lo.shape[1]
        region_lo, region_hi = widened(of.lo, d, 0), widened(of.hi, d, 1)
        found = [np.stack(pairs) for pairs in meetings((tensor, lo, hi), (of.tensor, region_lo, region_hi), of.busiest)]
        box, region = np.concatenate(found, axis=1) if found else np.zeros((2, 0), np.int64)
        order = np.lexsort((region, box))
        box, region = box[order], region[order]
        op_lo, op_hi = np.maximum(lo[box], region_lo[region]), np.minimum(hi[box], region_hi[region])
        item = of.itemsize[of.tensor[region]] if len(region) else np.zeros(0, np.int64)
        return box, Ops(region, op_lo, op_hi, np.prod(op_hi - op_lo, axis=1) * item)

    def _prove(self, tensor: np.ndarray, lo: np.ndarray, hi: np.ndarray, nbytes: np.ndarray, covered: np.ndarray) -> None:
        """Regions have nothing in common, so a box is covered exactly once if what it has in common with them adds up to it."""
        bad = np.flatnonzero(covered != nbytes)
        if not len(bad):
            return
        names = list(dict.fromkeys(self.publication.metas[t].name for t in tensor[bad].tolist()))
        i = bad[0]
        name = self.publication.metas[tensor[i]].name
        raise PlanError(
            f"the source lacks some of what the target wants of {tensors(len(names))}: {few(names)}; "
            f"of [{lo[i].tolist()}, {hi[i].tolist()}) of {name} it has {int(covered[i])} of {int(nbytes[i])} bytes"
        )


def tensors(n: int) -> str:
    return "1 tensor" if n == 1 else f"{n} tensors"


def few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
