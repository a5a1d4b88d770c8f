"""Which transport two processes use, and tables of ranges."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_ray.config import Config
from mooncake_ray.errors import ConfigError, PeerLostError, TransportError, TransportUnavailableError
from mooncake_ray.transport import Memory, Peer, choose, get_transport, register_transport, registry, transport_names
from mooncake_ray.transport.base import Regions, checked_ranges, pieces

NAMES = ("verbs", "tcp", "shm", "mooncake", "loopback")
MAX = 2**64 - 1


def fake(name: str, why: str) -> type:
    return type(f"Fake_{name}", (), {"name": name, "unavailable": classmethod(lambda cls, config: why)})


@pytest.fixture
def transports(monkeypatch):
    """Makes all names known, each usable here or not."""

    def use(here: dict[str, str]) -> None:
        monkeypatch.setattr(registry, "_registered", {name: fake(name, why) for name, why in here.items()})
        monkeypatch.setattr(registry, "_OWN", {})

    return use


@settings(deadline=None)
@given(
    here=st.fixed_dictionaries({name: st.sampled_from(["", "no device here"]) for name in NAMES}),
    there=st.dictionaries(
        st.sampled_from(NAMES), st.sampled_from([{}, {"rails": 1}, {"unavailable": "no device there"}, {"unavailable": ""}])
    ),
    wanted=st.sampled_from(["auto", *NAMES]),
)
def test_choose(here, there, wanted):
    with pytest.MonkeyPatch.context() as m:
        m.setattr(registry, "_registered", {name: fake(name, why) for name, why in here.items()})
        m.setattr(registry, "_OWN", {})
        both = [n for n in NAMES if not here[n] and n in there and not there[n].get("unavailable")]
        allowed = ["verbs", "tcp"] if wanted == "auto" else [wanted]
        expected = [n for n in allowed if n in both]
        if expected:
            assert choose(wanted, Config(), there) == expected[0]
            return
        with pytest.raises(TransportUnavailableError) as refused:
            choose(wanted, Config(), there)
        for name in allowed:  # both ends' reasons
            assert name in str(refused.value)
            assert (here[name] or "it can be used") in str(refused.value)
            assert (there[name].get("unavailable") or "it can be used" if name in there else "it is not offered") in str(refused.value)


def test_names(transports):
    transports({"tcp": ""})
    with pytest.raises(ConfigError, match="no transport 'carrier-pigeon'; there are tcp"):
        choose("carrier-pigeon", Config(), {"carrier-pigeon": {}})
    with pytest.raises(ConfigError):
        get_transport("auto")
    another = fake("another", "")
    assert register_transport(another) is another
    assert register_transport(another) is another
    assert get_transport("another") is another
    assert transport_names() == ["another", "tcp"]
    with pytest.raises(ValueError, match="there already"):
        register_transport(fake("another", ""))
    for bad in ("", "auto", None):
        with pytest.raises(ValueError, match="name of its own"):
            register_transport(fake(bad, ""))


def test_auto_takes_tcp_where_the_build_has_no_verbs(transports):
    transports({"tcp": ""})
    assert choose("auto", Config(), {"verbs": {}, "tcp": {}}) == "tcp"


def test_every_name_of_the_package():
    for name in set(transport_names()) - {"verbs"}:
        assert get_transport(name).name == name


rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 1 << 40), st.integers(0, 60)), max_size=12)
wild = st.integers(0, MAX) | st.integers(0, 70)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), wild, wild, wild), max_size=12), st.dictionaries(st.integers(0, 4), st.integers(1, 64)))
def test_ranges_are_inside_their_regions(given_rows, sizes):
    ranges = np.array(given_rows, np.uint64).reshape(-1, 4)
    good = all(region in sizes and offset + n <= sizes[region] for region, offset, _, n in given_rows)
    if good:
        assert checked_ranges(ranges, sizes).tolist() == [list(r) for r in given_rows if r[3]]
        return
    with pytest.raises(TransportError) as refused:
        checked_ranges(ranges, sizes)
    assert refused.value.errno == errno.EINVAL


@settings(deadline=None)
@given(rows, st.integers(1, 70))
def test_pieces_are_the_same_bytes(given_rows, most):
    ranges = np.array([r for r in given_rows if r[3]], np.uint64).reshape(-1, 4)
    out = pieces(ranges, most)
    assert all(0 < n <= most for n in out[:, 3].tolist())

    def single(table):
        return [(region, offset + i, local + i) for region, offset, local, n in table.tolist() for i in range(n)]

    assert single(out) == single(ranges)


def test_what_was_found_out_to_be_unusable():
    there = {"tcp": {}, "loopback": {}}
    assert choose("loopback", Config(), there, {"tcp": "no sockets"}) == "loopback"
    with pytest.raises(TransportUnavailableError, match="here no memory; at the peer it can be used"):
        choose("loopback", Config(), there, {"loopback": "no memory"})
    with pytest.raises(TransportUnavailableError, match="tcp: here no sockets"):
        choose("auto", Config(), there, {"tcp": "no sockets", "verbs": "no memory"})
    assert choose("auto", Config(), {**there, "verbs": {}}, {"verbs": "no memory"}) == "tcp"


def test_regions_that_come_later():
    asked = []

    def again():
        asked.append(1)
        return {"regions": {"0": 5, "1": 6}}

    known = Regions(Peer("h", 1, {"regions": {"0": 5}}, redescribe=again), lambda d: {int(k): v for k, v in d["regions"].items()})
    assert known.of(np.array([[0, 0, 0, 0]], np.uint64)) == {0: 5} and not asked
    assert known.of(np.array([[1, 0, 0, 0]], np.uint64)) == {0: 5, 1: 6}
    assert known.of(np.array([[1, 0, 0, 0]], np.uint64)) == {0: 5, 1: 6} and len(asked) == 1
    with pytest.raises(PeerLostError, match="not understood"):
        Regions(Peer("h", 1, {}), lambda d: d["regions"])


@pytest.mark.parametrize("bad", [(-1, 4096, 1), (0, 0, 1), (0, 4096, 0)])
def test_what_is_no_memory(bad):
    with pytest.raises(ValueError, match="not a piece of memory"):
        Memory(*bad)


def test_a_peer_says_its_address():
    assert str(Peer("::1", 5, {})) == "[::1]:5" and str(Peer("10.0.0.1", 5, {})) == "10.0.0.1:5"
    for ask in (Peer("h", 1, {}).link, lambda: Peer("h", 1, {}).exchange(b"")):
        with pytest.raises(TransportError) as refused:
            ask()
        assert refused.value.errno == errno.EOPNOTSUPP
