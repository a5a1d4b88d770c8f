"""`Taken`: rows that a process has from a catalog."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mooncake_ray.data.catalog import Lease
from mooncake_ray.errors import StoreError
from mooncake_ray.objects.batch_ref import BatchRef
from mooncake_ray.objects.renewals import Kept, keep

if TYPE_CHECKING:
    from mooncake_ray.objects.catalog import Catalog

__all__ = ["Taken"]

logger = logging.getLogger("mooncake_ray")


class Taken(Kept):
    """Rows from a catalog. `with` it: acknowledged at the end, released if the block raises.

    It may be sent to another process: the lease is renewed wherever it is.
    """

    def __init__(self, catalog: Catalog, lease: Lease, ref: BatchRef | None) -> None:
        super().__init__(catalog, over=not lease.id)
        self.catalog, self.ref, self._lease = catalog, ref, lease

    ref: BatchRef | None
    """The rows in the order of `keys`. None if there are none."""

    @property
    def lease(self) -> int:
        """0 if there are no rows."""
        return self._lease.id

    @property
    def keys(self) -> list[str]:
        return [row.key for row in self._lease.rows]

    @property
    def partitions(self) -> list[str]:
        """Of each row."""
        return [row.partition for row in self._lease.rows]

    @property
    def tags(self) -> list[dict[str, Any]]:
        """Of each row, as they were when it was taken."""
        return [dict(row.tags) for row in self._lease.rows]

    def __len__(self) -> int:
        """Rows. 0: no more come."""
        return len(self._lease.rows)

    def __repr__(self) -> str:
        return f"Taken({len(self)} rows, lease={self.lease}, ref={self.ref})"

    def __reduce__(self) -> Any:
        return _received, (self.catalog, self._lease, self.ref, self.over)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.over:
            return
        if kind is None:
            self.catalog.ack(self)
            return
        try:
            self.catalog.release(self)
        except StoreError as e:  # what the block raised is what counts
            logger.warning("mooncake_ray: %r could not be released: %s", self, e)


def _received(catalog: Catalog, lease: Lease, ref: BatchRef | None, over: bool) -> Taken:
    taken = Taken(catalog, lease, ref)
    taken.over = over
    taken.renew_at = 0.0  # it was on its way for a while
    keep(taken)
    return taken
