"""RDMA does what every transport must."""

from __future__ import annotations

from transport_suite import TransportSuite


class TestVerbs(TransportSuite):
    name = "verbs"
    serves_when_stopped = True
