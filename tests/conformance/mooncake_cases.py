"""The suite for Mooncake's engine, and what it is made to do besides. Run where there is no network but a loopback device: the engine
listens on every interface."""

from __future__ import annotations

import sys

import pytest
from transport_suite import TIMEOUT_S, TransportSuite

from mooncake_ray.config import Config
from mooncake_ray.errors import TransportUnavailableError
from mooncake_ray.transport import get_transport


@pytest.fixture
def no_leaks():
    """The engine keeps descriptors and threads for as long as the process lives."""


class TestMooncake(TransportSuite):
    name = "mooncake"
    finds_regions_itself = False

    def test_another_protocol_at_the_peer(self, transport, remote):
        from dataclasses import replace

        peer = remote.peer()
        with pytest.raises(TransportUnavailableError, match="'tcp' here, 'rdma' at"):
            transport.connect(replace(peer, description={**peer.description, "protocol": "rdma"}), TIMEOUT_S)


def test_rdma_without_a_device_is_not_taken_for_tcp():
    config = Config(mooncake_protocol="rdma")
    assert "no RDMA device" in get_transport("mooncake").unavailable(config)
    with pytest.raises(TransportUnavailableError, match="no RDMA device"):
        get_transport("mooncake")(config, "127.0.0.1")


if __name__ == "__main__":
    from bench.mooncake_peer import enter_own_network

    enter_own_network()
    sys.exit(pytest.main([__file__, "-q", "-p", "no:cacheprovider", "-x"]))
