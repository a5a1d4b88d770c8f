"""The transport within a process."""

from __future__ import annotations

import pytest
from remote import OwnPeer
from transport_suite import TransportSuite

from mooncake_ray.config import Config
from mooncake_ray.errors import TransportUnavailableError
from mooncake_ray.transport import Peer, get_transport


class TestLoopback(TransportSuite):
    name = "loopback"
    out_of_process = False

    def make_peer(self):
        return OwnPeer(self.name)


def test_another_process():
    transport = get_transport("loopback")(Config(), "127.0.0.1")
    with pytest.raises(TransportUnavailableError, match="another process"):
        transport.connect(Peer("127.0.0.1", 1, {"pid": 1, "token": "x"}), 1)
    transport.close()
