"""Objects get from one pool into another by RDMA, through the engines of both."""

from __future__ import annotations

import pytest
from test_transfer import data_of, digest, sites

__all__ = ["sites"]


@pytest.mark.parametrize("transport", ["verbs", "auto"])
def test_objects_between_pools(sites, transport):
    a, b = sites(transport=transport), sites(transport=transport)
    for nbytes in ((9 << 20) + 5, 1 << 20):
        data = data_of(nbytes)
        assert digest(b.get(a, a.put(data))) == digest(data)
    assert b.engine.report()["peers"] == {str(a.engine.endpoint): "verbs"}
    assert a.engine.server.stats()["bytes_sent"] < 64 << 10, "the bytes went through the peer server"
