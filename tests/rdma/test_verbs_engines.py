"""Objects get from one pool into another by RDMA, through the engines of both."""

from __future__ import annotations

import pytest
from test_transfer import data_of, digest, sites

from mooncake_ray.errors import RegistrationError, TransportUnavailableError
from mooncake_ray.transport import get_transport

__all__ = ["sites"]


@pytest.mark.parametrize("transport", ["verbs", "auto"])
def test_objects_between_pools(sites, transport):
    a, b = sites(transport=transport), sites(transport=transport)
    for nbytes in ((9 << 20) + 5, 1 << 20):
        data = data_of(nbytes)
        assert digest(b.get(a, a.put(data))) == digest(data)
    assert b.engine.report()["peers"] == {str(a.engine.endpoint): "verbs"}
    assert a.engine.server.stats()["bytes_sent"] < 64 << 10, "the bytes went through the peer server"


GROWING = {"arena_bytes": 8 << 20, "prefault_bytes": 1 << 20}


def test_pools_that_grow(sites):
    """By arenas that are there only after the first read."""
    a, b = sites(transport="verbs", **GROWING), sites(transport="verbs", **GROWING)
    for n in range(3):
        data = data_of(6 << 20, n)
        assert digest(b.get(a, a.put(data))) == digest(data)
    assert b.engine.report()["peers"] == {str(a.engine.endpoint): "verbs"}
    assert a.engine.server.stats()["bytes_sent"] < 256 << 10, "the bytes went through the peer server"
    assert len(a.store.client.arenas()) > 1 < len(b.store.client.arenas())


@pytest.mark.parametrize("which", ["reader", "read"])
def test_memory_that_cannot_be_registered_later(sites, monkeypatch, caplog, which):
    """Whoever's arena it is: with `auto`, both go on without RDMA."""
    a, b = (sites(transport="auto", **GROWING) for _ in range(2))
    data = data_of(2 << 20)
    assert digest(b.get(a, a.put(data))) == digest(data)
    assert b.engine.report()["peers"] == {str(a.engine.endpoint): "verbs"}

    refusing = (b if which == "reader" else a).engine
    register = get_transport("verbs").register

    def refuse(transport, memory):
        if transport is refusing.transports.get("verbs"):
            raise RegistrationError("12 bytes are the limit", "ibv_reg_mr")
        register(transport, memory)

    monkeypatch.setattr(get_transport("verbs"), "register", refuse)
    for n in range(3):
        data = data_of(6 << 20, n)
        assert digest(b.get(a, a.put(data))) == digest(data)
    assert b.engine.report()["peers"] == {str(a.engine.endpoint): "tcp"}
    assert refusing.report()["transports"] == ["tcp"]
    assert "does without verbs: 12 bytes are the limit" in caplog.text


def test_a_device_that_cannot_be_opened(sites, monkeypatch, caplog):
    def refuse(*_, **__):
        raise RegistrationError("no memory for a completion queue", "ibv_create_cq")

    monkeypatch.setattr(get_transport("verbs"), "__init__", refuse)
    a, b = (sites(transport="auto") for _ in range(2))
    data = data_of(2 << 20)
    assert digest(b.get(a, a.put(data))) == digest(data)
    assert b.engine.report()["peers"] == {str(a.engine.endpoint): "tcp"}
    assert caplog.text.count("does without verbs: no memory for a completion queue") == 2
    with pytest.raises(TransportUnavailableError, match=r"verbs: here no memory for a completion queue; at the peer"):
        sites(transport="verbs").get(a, a.put(data_of(2 << 20, 1)))
