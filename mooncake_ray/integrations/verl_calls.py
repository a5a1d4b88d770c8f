"""How a rank of verl's talks to the board of its update, and waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import ray
import torch

from mooncake_ray.errors import MooncakeRayError, SyncAbortedError, SyncTimeoutError
from mooncake_ray.integrations.verl_board import Update, new_board
from mooncake_ray.transfer.deadline import Deadline

__all__ = ["Topology", "answer", "each_of", "live_board"]

_ANSWER_S = 30.0
_CALL_S = 30.0  # of one call to the board: longer than it takes to say that there is no news


@dataclass(frozen=True, slots=True)
class Topology:
    """What `build_topology` tells every rank."""

    update: Update
    board: Any


async def answer(ref: Any, deadline: Deadline, who: str) -> Any:
    """What the board answers.

    Raises:
        SyncTimeoutError: it has not in time.
        SyncAbortedError: it is gone.
        MooncakeRayError: as the board raises it.
    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(ref.future()), min(deadline.left(who), _CALL_S))
    except TimeoutError:
        raise SyncTimeoutError(f"{who} has not got on within {deadline.timeout_s:g} s") from None
    except ray.exceptions.RayTaskError as e:
        raise (e.cause if isinstance(e.cause, MooncakeRayError) else e) from None
    except ray.exceptions.RayActorError as e:
        raise SyncAbortedError(f"{who}: the actor through which ranks hear of each other is gone: {e}") from None


def live_board(known: Iterable[Any]) -> Any:
    """One of these that lives, or a new one."""
    for board in {b._actor_id.hex(): b for b in known if b is not None}.values():
        try:
            if ray.get(board.is_there.remote(), timeout=_ANSWER_S):
                return board
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            continue
    return new_board()


async def each_of(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Of an iterator of either kind; on this thread."""
    if hasattr(weights, "__aiter__"):
        async for item in weights:
            yield item
        return
    for item in weights:
        yield item
