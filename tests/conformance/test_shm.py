"""The transport within a machine."""

from __future__ import annotations

import pytest
from transport_suite import TIMEOUT_S, TransportSuite, own_peer

from mooncake_ray.config import Config
from mooncake_ray.errors import PeerLostError, TransportError, TransportUnavailableError
from mooncake_ray.transport import Peer, get_transport
from mooncake_ray.transport.shm import machine


class TestShm(TransportSuite):
    name = "shm"
    serves_when_stopped = True

    @pytest.mark.parametrize("other", ["boot", "netns"])
    def test_another_machine(self, transport, remote, other):
        there = {**remote.peer().description, other: "another"}
        with pytest.raises(TransportUnavailableError, match="another machine" if other == "boot" else "another network namespace"):
            transport.connect(Peer("127.0.0.1", 1, there), TIMEOUT_S)

    def test_another_pool_of_the_same_name(self, transport, remote):
        with pytest.raises(PeerLostError, match="now, not 00"):
            transport.connect(Peer("127.0.0.1", 1, {**remote.peer().description, "pool": "00" * 16}), TIMEOUT_S)

    @own_peer
    def test_connecting_to_a_stopped_broker_ends_at_the_deadline(self, transport, remote):
        remote.stop()
        with pytest.raises(TransportError, match=r"within 0\.5 s"):
            transport.connect(remote.peer(), 0.5)


def test_without_a_pool():
    transport = get_transport("shm")(Config(), "127.0.0.1")
    assert "unavailable" in transport.describe()
    with pytest.raises(TransportUnavailableError, match="no pool"):
        transport.connect(Peer("127.0.0.1", 1, transport.describe()), 1)
    transport.close()


def test_a_machine_is_itself():
    assert machine() == machine()
