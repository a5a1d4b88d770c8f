"""What changed between the versions that a trainer rank has published: a patch from each to the next, and joined ones on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from mooncake_ray.errors import DeltaBaseError
from mooncake_ray.weights.patch import Patch, Regions, encode, merge

__all__ = ["History"]

_MOST = 16  # versions
_MOST_BYTES = 0.5  # of what is published: more of them cost more than all of it


class History:
    """Of one layout. Used by one thread at a time."""

    def __init__(self, plan: str, regions: Mapping[int, Regions], nbytes: int) -> None:
        """
        Args:
            plan: Digest of the publication.
            regions: Of each object that this rank owns, by its number.
            nbytes: Of all of them.
        """
        self.plan, self.regions, self._nbytes = plan, regions, nbytes
        self._steps: dict[int, dict[int, Patch]] = {}  # by the version that they lead to; dicts keep the order

    def add(
        self, base: int, version: int, epoch: int, old: Callable[[int], np.ndarray], new: Callable[[int], np.ndarray], before: np.ndarray
    ) -> np.ndarray:
        """Makes the patches from one version to the next.

        Args:
            old, new: The bytes of an object at either version, by its number.
            before: uint64: content digests of all regions at the old one, object by object.

        Returns the digests at the new one.
        """
        digests, at = before.copy(), 0
        step: dict[int, Patch] = {}
        for number, regions in self.regions.items():
            here = digests[at : at + len(regions)]
            step[number] = encode(
                old(number), new(number), regions, base_version=base, version=version, epoch=epoch,
                object=bytes.fromhex(self.plan), before=here.copy(),
            )  # fmt: skip
            here[step[number].table["region"]] = step[number].table["after"]
            at += len(regions)
        if base not in self._steps and self._steps:
            self._steps.clear()  # they lead nowhere
        self._steps[version] = step
        while len(self._steps) > _MOST or (len(self._steps) > 1 and self.nbytes > _MOST_BYTES * self._nbytes):
            del self._steps[next(iter(self._steps))]
        return digests

    @property
    def nbytes(self) -> int:
        return sum(patch.nbytes for step in self._steps.values() for patch in step.values())

    def withdraw(self, version: int) -> None:
        """That version was never published."""
        self._steps.pop(version, None)

    def patches(self, base: int, version: int) -> dict[int, Patch]:
        """From one version to another, for each object.

        Raises:
            DeltaBaseError: some of the steps between them are not there (any more).
        """
        chain = [step for to, step in self._steps.items() if base < to <= version]
        ends = (
            (next(iter(chain[0].values())).base_version, next(iter(chain[-1].values())).version) if chain and chain[0] else (base, version)
        )
        if not chain or ends != (base, version):
            raise DeltaBaseError(f"there are no patches from version {base} to {version}, only to {sorted(self._steps)}")
        if len(chain) == 1:
            return chain[0]
        return {number: merge([step[number] for step in chain], regions) for number, regions in self.regions.items()}
