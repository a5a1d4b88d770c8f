"""A pickle whose segments are in a region that the test gives."""

from __future__ import annotations

import pickle

from mooncake_ray.store.packing import Here


class RegionPickler(pickle.Pickler):
    """Pickles with a packer; what it takes out is found again through what `region()` returns then."""

    def __init__(self, file, packer, region):
        super().__init__(file, protocol=5)
        self.packer, self.region = packer, region

    def reducer_override(self, obj):
        return (self.region, ()) if type(obj) is Here else self.packer.reduce(obj)
