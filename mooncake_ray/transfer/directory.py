"""Where other pools are: what an engine must be told, as it does not know Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Directory", "Endpoint"]


@dataclass(frozen=True)
class Endpoint:
    """The peer server of one node's engine."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """The opposite of `str`. Raises ValueError."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"not an endpoint: {text!r} (expected host:port)")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))


class Directory(Protocol):
    """Thread-safe. No call takes longer than some seconds, or raises: what cannot be asked is as it was."""

    def resolve(self, pool_id: bytes) -> Endpoint | None:
        """Who serves that pool; None if nobody does yet (or any more), and it may be worth waiting."""
        ...

    def is_lost(self, pool_id: bytes) -> bool:
        """Whether the pool's node is known to be dead: it will not come back."""
        ...

    def forget(self, pool_id: bytes) -> None:
        """What `resolve` said did not answer: it is to ask anew."""
        ...

    def serves(self, endpoint: Endpoint) -> bool:
        """Whether there is such an engine, and it is not known to be dead."""
        ...

    def others(self) -> list[Endpoint]:
        """All engines of the cluster that are not known to be dead, but this one; as they were some seconds ago at most."""
        ...
