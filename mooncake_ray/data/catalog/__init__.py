"""Which rows there are, where their fields lie, and who has them: the books of a catalog, apart from Ray and from the data."""

from mooncake_ray.data.catalog.ledger import Ledger
from mooncake_ray.data.catalog.records import Lease, LeasedRow, Listed, NoRoom, Published
from mooncake_ray.data.catalog.stock import Publication
from mooncake_ray.data.catalog.where import Where

__all__ = ["Lease", "LeasedRow", "Ledger", "Listed", "NoRoom", "Publication", "Published", "Where"]
