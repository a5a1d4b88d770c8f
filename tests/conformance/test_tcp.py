"""The transport over TCP."""

from __future__ import annotations

import pytest
from transport_suite import TransportSuite

pytest.importorskip("mooncake_ray._native.peer")


class TestTcp(TransportSuite):
    name = "tcp"
