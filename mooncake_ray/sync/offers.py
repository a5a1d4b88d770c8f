"""Versions that trainer ranks publish by themselves: each asks, and it begins when all have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from mooncake_ray.transfer.deadline import Deadline

__all__ = ["Offers"]


@dataclass
class _Offer:
    ranks: set[int] = field(default_factory=set)
    """That wait for it."""
    publishing: asyncio.Task[Any] | None = None
    """Once all do."""


class Offers:
    """For coroutines of one loop."""

    def __init__(self, wait: Callable[[Deadline, str], Awaitable[None]]) -> None:
        """`wait`: until something changed; raises SyncTimeoutError, which says what was waited for."""
        self._wait = wait
        self._offers: dict[int, _Offer] = {}

    def __contains__(self, version: int) -> bool:
        return version in self._offers

    async def join(self, version: int, rank: int, world: int, deadline: Deadline, publish: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Waits for the other ranks, and until one `publish` for all of them is done; raises what that does."""
        offer = self._offers.setdefault(version, _Offer())
        offer.ranks.add(rank)
        try:
            while offer.publishing is None:
                if missing := set(range(world)) - offer.ranks:
                    await self._wait(deadline, f"version {version}: trainer ranks {sorted(missing)[:5]} have not published")
                elif offer.publishing is None:
                    offer.publishing = asyncio.get_running_loop().create_task(publish())
            await asyncio.shield(offer.publishing)
        finally:
            offer.ranks.discard(rank)
            if not offer.ranks:
                self._offers.pop(version, None)
