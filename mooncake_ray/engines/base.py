"""`EngineAdapter`: what whoever brings new weights asks of an inference engine.

The four calls of an update have the names that vLLM gave them. In order:

    engine.init_weight_transfer_engine({})        # once
    engine.start_weight_update()
    engine.prepare_weights({"pieces": ...})       # what can be done beside what is served
    engine.pause("keep")                          # after all is staged: only writing needs the pause
    engine.update_weights({"pieces": ...})        # as often as wanted, if nothing was prepared
    engine.finish_weight_update(8)                # from here on it is version 8
    engine.resume()

`abort_weight_update` ends an update that was not finished. If nothing was written, the engine serves on what it had; else it is poisoned: it
refuses to serve until an update has written all of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypedDict, runtime_checkable

import torch

from mooncake_ray.weights.shard import Shard

__all__ = ["EngineAdapter", "PauseMode", "UpdateInfo"]

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests: `abort` ends those that run, and refuses new ones; `wait` lets those that run end, and refuses new ones; `keep`
freezes those that run between two tokens, and new ones wait with them."""


class UpdateInfo(TypedDict, total=False):
    """What `update_weights` takes: one of these. Fragments are numbered as the rows of `Placement.of(rank, engine.shard().fragments())`."""

    pieces: Iterable[tuple[int, torch.Tensor]]
    """(fragment, its whole new content): of the fragment's shape (leading ones do not matter) and dtype. Read one after the other, and not
    kept, so they may be made as they are asked for, and their memory used again for the next."""
    apply: Callable[[Sequence[torch.Tensor]], Iterable[int] | None]
    """Gets all fragments as tensors over the engine's own memory, and changes those it wants: patches, say. Looking at one by its number counts
    as writing to it. Returns the numbers of those that it has written whole, whatever was there before; None for none."""


@runtime_checkable
class EngineAdapter(Protocol):
    """One rank of an engine. Calls that concern an update come from one thread at a time; requests may come from any others meanwhile."""

    name: ClassVar[str]

    def shard(self) -> Shard:
        """Where the engine's weights lie. The same fragments for as long as the engine lives."""
        ...

    @property
    def weight_version(self) -> int | None:
        """Of the weights that are served: what the last `finish_weight_update` said. None before the first, and while poisoned."""
        ...

    @property
    def poisoned(self) -> str:
        """Why the engine refuses to serve; "" if it does not."""
        ...

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Makes ready for updates. Again with other settings is allowed between updates."""
        ...

    def pause(self, mode: PauseMode = "keep", *, timeout_s: float = 60.0) -> None:
        """Returns when no request computes. A second pause without `resume` between changes nothing, but for `mode`.

        Raises:
            SyncTimeoutError: requests go on computing; how many. The engine is not paused then.
        """
        ...

    def resume(self) -> None:
        """Goes on with what waits. Nothing happens if the engine is not paused.

        Raises:
            WeightSyncError: an update has begun to write, and is neither finished nor aborted.
        """
        ...

    def start_weight_update(self) -> None:
        """Raises WeightSyncError if an update is open already."""
        ...

    def prepare_weights(self, update_info: UpdateInfo) -> None:
        """Does what it can beside what is served, so that the pause is short: nothing, for engines that write in place. What `update_weights`
        gets next is the same; pieces must be such that they can be read twice.

        Raises:
            WeightSyncError: no update is open.
        """
        ...

    def update_weights(self, update_info: UpdateInfo) -> None:
        """Writes. An error before the first write leaves everything as it was, and the update open; one after it ends the update, and poisons.

        Raises:
            WeightSyncError: no update is open, or the engine is not paused.
            PlanError: a piece does not fit its fragment.
        """
        ...

    def finish_weight_update(self, weight_version: int) -> None:
        """Makes derived what is derived from weights, and then the version visible. An engine that knows that all of its ranks have it may
        resume by itself; `is_paused`, if it has that, says so.

        Raises:
            WeightSyncError: no update is open; or the engine was poisoned and not all was written. The update stays open.
            StaleVersionError: the version is not newer than the last one (for a poisoned engine: older). The update stays open.
        """
        ...

    def abort_weight_update(self) -> None:
        """Ends an update without a new version; nothing happens if none is open."""
        ...
