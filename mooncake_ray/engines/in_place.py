"""`InPlace`: an update of one rank's weights, written where they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mooncake_ray.engines.base import UpdateInfo
from mooncake_ray.engines.packed import PackedPieces
from mooncake_ray.errors import PlanError, WeightSyncError
from mooncake_ray.weights.laid import Laid, copy, in_memory
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.shard import fitting, views

__all__ = ["InPlace"]


class InPlace:
    """Made before the pause: what can be worked out and checked beforehand is. For one thread.

    Attributes:
        written: Whether anything may have been written.
        whole: The fragments whose whole content is new.
    """

    def __init__(self, placement: Placement, buffers: Mapping[str, torch.Tensor]) -> None:
        """Raises PlanError: the buffers do not fit the placement."""
        self._placement, self._buffers = placement, buffers
        self.written = False
        self.whole: set[int] = set()
        self._laid: Laid | None = None
        if in_memory(buffers):
            self._laid = Laid.of(placement, buffers)
            _ = self._laid.distinct
        else:
            fitting(placement, buffers)

    @property
    def addresses(self) -> dict[str, int]:
        """Where its buffers are."""
        return {name: tensor.data_ptr() for name, tensor in self._buffers.items()}

    @property
    def complete(self) -> bool:
        """Whether all is new."""
        return len(self.whole) == len(self._placement)

    @cached_property
    def targets(self) -> list[torch.Tensor]:
        """All fragments, over the engine's memory."""
        return list(views(self._placement, self._buffers))

    def check(self, update_info: UpdateInfo) -> None:
        """What can be said of an update without writing or reading it. Raises as `write`."""
        if len(update_info) != 1 or not update_info.keys() <= {"pieces", "apply"}:
            raise WeightSyncError(f"an update is one of pieces and apply, got {', '.join(update_info) or 'nothing'}")
        pieces = update_info.get("pieces", ())
        if isinstance(pieces, PackedPieces) and self._laid is not None:
            extents = pieces.placement.hi - pieces.placement.lo
            if pieces.placement.metas != self._placement.metas or not np.array_equal(extents, self._laid.extents):
                raise PlanError(f"pieces of {len(extents)} fragments are for another layout than these {len(self._laid)}")

    @torch.no_grad()
    def write(self, update_info: UpdateInfo) -> None:
        """As `EngineAdapter.update_weights` has it.

        Raises:
            PlanError: a piece does not fit its fragment.
            WeightSyncError: it is neither pieces nor something to apply.
            What iterating the pieces, or applying, raises.
        """
        self.check(update_info)
        pieces = update_info.get("pieces", ())
        if isinstance(pieces, PackedPieces) and self._laid is not None:
            self._write_all(self._laid, pieces)
        elif "pieces" in update_info:
            for i, piece in pieces:
                self._write(i, piece)
                self.whole.add(i)
        else:
            whole = update_info["apply"](_Watched(self))
            self.whole.update(range(len(self.targets))[i] for i in whole or ())

    def _write(self, i: int, piece: torch.Tensor) -> None:
        if not 0 <= i < len(self.targets):
            raise PlanError(f"there is no fragment {i} of {len(self.targets)}")
        target = self.targets[i]
        name = self._placement.metas[self._placement.tensor[i]].name
        if piece.dtype != target.dtype or _trimmed(piece.shape) != _trimmed(target.shape):
            raise PlanError(
                f"{name}: a piece of {piece.dtype} {list(piece.shape)} is no content of fragment {i}, {target.dtype} {list(target.shape)}"
            )
        self.written = True
        target.copy_(piece.reshape(target.shape))

    def _write_all(self, target: Laid, pieces: PackedPieces) -> None:
        source = pieces.laid()
        once = target.distinct
        self.written = True
        copy(source.only(once), target.only(once))
        self.whole.update(range(len(target)))


class _Watched(Sequence):
    """Fragments, which notes when somebody gets hold of one."""

    def __init__(self, update: InPlace) -> None:
        self._update = update

    def __len__(self) -> int:
        return len(self._update.targets)

    def __getitem__(self, i: Any) -> Any:
        found = self._update.targets[i]
        self._update.written = True
        return found


def _trimmed(shape: Iterable[int]) -> tuple[int, ...]:
    shape = list(shape)
    while shape and shape[0] == 1:
        del shape[0]
    return tuple(shape)
