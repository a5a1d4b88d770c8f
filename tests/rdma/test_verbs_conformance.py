"""RDMA does what every transport must."""

from __future__ import annotations

import pytest
from transport_suite import MIB, Target, TransportSuite


class TestVerbs(TransportSuite):
    name = "verbs"
    serves_when_stopped = True
    finds_regions_itself = False

    @pytest.fixture
    def target(self, request):
        """No larger than the test needs: filling and registering memory takes its time in an emulated machine."""
        return Target((40 if "threads" in request.node.name else 18) * MIB)
