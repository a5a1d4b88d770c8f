"""A delta at an engine's rank: which of its fragments get what of which patch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mooncake_ray.errors import DeltaBaseError
from mooncake_ray.weights.digest import DIGESTS
from mooncake_ray.weights.patch import Part, Patch, Regions, apply, check
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.plan import Delivery, Publication

__all__ = ["Changes", "needed"]


def needed(publication: Publication, delivery: Delivery, boxes: np.ndarray) -> np.ndarray:
    """int64: the published objects that hold some of these boxes (rising numbers), rising."""
    return np.unique(publication.object_of[delivery.op_region[np.isin(delivery.op_box, boxes)]]).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Changes:
    """What brings a rank's fragments from one version to the next. They are not touched before `apply`."""

    placement: Placement
    """The rank's own."""
    box_of: np.ndarray
    """int64: the box that each of its fragments is."""
    publication: Publication
    delivery: Delivery
    patches: Mapping[int, Patch]
    """By number of the object."""

    def _parts(self, targets: Sequence[torch.Tensor], *, twice: bool) -> Iterator[tuple[Patch, Regions, list[int], list[Part]]]:
        """For each patch: what it is of, the boxes that it changes, and these as they lie in the engine.

        Args:
            twice: Also what is there under several names; it must only be changed once.
        """
        p = self.placement
        firsts: dict[tuple[int, bytes, bytes, bytes], int] = {}

        def is_first(i: int) -> bool:
            place = targets[i].data_ptr(), p.lo[i].tobytes(), p.hi[i].tobytes(), p.strides[i].tobytes()
            return firsts.setdefault(place, i) == i

        own = np.argsort(self.box_of, kind="stable")
        boxes = self.box_of[own]
        op = np.flatnonzero(np.isin(self.delivery.op_box, boxes))
        first, last = (np.searchsorted(boxes, self.delivery.op_box[op], side) for side in ("left", "right"))
        rows: dict[int, list[tuple[int, int]]] = {}  # by object: regions, and fragments that hold some of them
        for region, a, b in zip(self.delivery.op_region[op].tolist(), first.tolist(), last.tolist(), strict=True):
            rows.setdefault(int(self.publication.object_of[region]), []).extend((region, i) for i in own[a:b].tolist())
        for number, patch in self.patches.items():
            begin = int(self.publication.regions_of(number)[0])
            mine = [(region - begin, i) for region, i in rows.get(number, ())]
            mine = [(region, i) for region, i in mine if patch.touched[region] and (twice or is_first(i))]
            parts = [Part(region, targets[i], p.lo[i].tolist()) for region, i in mine]
            yield patch, Regions.of(self.publication, number), [int(self.box_of[i]) for _, i in mine], parts

    def digests(self, targets: Sequence[torch.Tensor], version: int, boxes: np.ndarray, before: np.ndarray) -> np.ndarray:
        """uint64: what the content digests of these boxes are going to be. Writes nothing.

        Args:
            version: What the targets hold.
            before: uint64: the digests now.

        Raises:
            DeltaBaseError: the patches are not against that version, or what it holds is something else.
            ChecksumError: one is damaged.
        """
        after = before.copy()
        for patch, regions, of, parts in self._parts(targets, twice=True):
            if patch.base_version != version:
                raise DeltaBaseError(
                    f"a patch to version {patch.version} is against version {patch.base_version}; here is version {version}"
                )
            seen: set[tuple[int, int]] = set()
            for box, part, change in zip(of, parts, check(patch, regions, parts), strict=True):
                if (box, part.region) not in seen:  # a box may lie here twice
                    seen.add((box, part.region))
                    k = np.searchsorted(boxes, box)
                    after[k] = np.uint64((int(after[k]) + change.digest) % DIGESTS)
        return after

    def apply(self, targets: Sequence[torch.Tensor]) -> None:
        """Writes, in place. Raises as `digests`; some of it may be written then."""
        for patch, regions, _, parts in self._parts(targets, twice=False):
            apply(patch, regions, parts)
