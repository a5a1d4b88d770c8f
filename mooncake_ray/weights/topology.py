"""`Topology`: which rank is on which host, how many network devices hosts have, and what a byte costs between two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """Ranks that `hosts` does not name are each a host of its own, of no rack."""

    hosts: Mapping[str, str] = field(default_factory=dict)
    """Of ranks."""
    racks: Mapping[str, str] = field(default_factory=dict)
    """Of hosts."""
    nics: int | Mapping[str, int] = 0
    """Network devices of each host, which its ranks share in turns; 0: one for each rank."""
    same_host: float = 0.125
    """What a byte costs between ranks of one host,"""
    same_rack: float = 1.0
    """between hosts of one rack,"""
    other: float = 2.0
    """and between any others. Only their ratios matter."""

    def __post_init__(self) -> None:
        if not 0 < self.same_host <= self.same_rack <= self.other:
            raise ValueError(f"costs must be positive and rise: {self.same_host}, {self.same_rack}, {self.other}")

    def host(self, rank: str) -> str:
        return self.hosts.get(rank, f"host of {rank}")

    def hosts_of(self, ranks: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
        """int32 (ranks): for each rank the number of its host, and the hosts' names, sorted."""
        names = [self.host(r) for r in ranks]
        hosts = tuple(sorted(set(names)))
        at = {h: i for i, h in enumerate(hosts)}
        return np.array([at[h] for h in names], np.int32), hosts

    def nics_of(self, ranks: Sequence[str]) -> tuple[np.ndarray, int]:
        """int32 (ranks): for each rank the number of its network device among those of all these ranks; and how many there are."""
        out: dict[tuple[str, int], int] = {}
        seen: dict[str, int] = {}
        numbers = []
        for rank in ranks:
            host = self.host(rank)
            turn = seen[host] = seen.get(host, -1) + 1
            nics = self.nics if isinstance(self.nics, int) else self.nics.get(host, 0)
            numbers.append(out.setdefault((host, turn % nics if nics else turn), len(out)))
        return np.array(numbers, np.int32), len(out)

    def distances(self, here: Sequence[str], there: Sequence[str]) -> np.ndarray:
        """float64 (here, there): the cost of a byte between two hosts."""
        a, b = np.array(here, object)[:, None], np.array(there, object)[None, :]
        rack_a, rack_b = (np.array([self.racks.get(h, "") for h in hosts], object) for hosts in (here, there))
        near = (rack_a[:, None] == rack_b[None, :]) & (rack_a[:, None] != "")
        return np.where(a == b, self.same_host, np.where(near, self.same_rack, self.other)).astype(np.float64)
