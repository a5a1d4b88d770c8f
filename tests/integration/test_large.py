"""Lengths and offsets beyond 32 bits."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import until

from mooncake_ray import Config, Store
from mooncake_ray.config import machine_bytes

pytestmark = pytest.mark.slow
GIB = 1 << 30


@pytest.mark.skipif(machine_bytes() < 16 * GIB, reason="takes 5 GiB of memory for the pool")
def test_object_beyond_4_gib():
    n = 4 * GIB + (1 << 20)
    source = np.zeros(n, dtype=np.uint8)  # pages that are only read cost nothing
    for at in (0, GIB, 4 * GIB - 1, 4 * GIB, n - 1):
        source[at] = 1 + at % 250
    with Store("beyond-4-gib", Config(capacity_bytes=5 * GIB, prefault_bytes=0, put_timeout_s=120, linger_s=0)) as store:
        key = store.put({"first": source[: GIB // 4], "all": source})
        got = store.get(key)["all"]
        assert got.nbytes == n
        for at in (0, GIB, 4 * GIB - 1, 4 * GIB, n - 1):
            assert got[at] == 1 + at % 250, at
        assert int(np.count_nonzero(got[4 * GIB - 4096 :])) == 3
        assert store.stats()["used_bytes"] > 4 * GIB
        del got
        store.free([key])
        until(lambda: store.stats()["used_bytes"] == 0)  # it may be on its way to the disk
