"""Ranges and preconditions, signed addresses, pins with an end, and who may go through a turnstile."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from waiting import eventually

from mooncake_ray.errors import ConfigError, SnapshotNotFoundError
from mooncake_ray.serve.catalog import Entry, listing
from mooncake_ray.serve.leases import Leases
from mooncake_ray.serve.port import listen
from mooncake_ray.serve.problems import Problem
from mooncake_ray.serve.ranges import Answer, answer
from mooncake_ray.serve.settings import Settings
from mooncake_ray.serve.signing import Signer
from mooncake_ray.serve.turnstile import Turnstile
from mooncake_ray.serve.wire import parsed
from mooncake_ray.weights.delta_index import Anchor, Index, PatchFile, Step
from mooncake_ray.weights.files import Files
from mooncake_ray.weights.snapshot import SnapshotStore
from mooncake_ray.weights.source import StateDictSource

TAG = '"abc"'


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, Answer(200, 0, 10)),
        ({"range": "bytes=0-3"}, Answer(206, 0, 4)),
        ({"range": "bytes=3-"}, Answer(206, 3, 10)),
        ({"range": "bytes=-3"}, Answer(206, 7, 10)),
        ({"range": "bytes=-30"}, Answer(206, 0, 10)),
        ({"range": "bytes=9-99"}, Answer(206, 9, 10)),
        ({"range": "bytes=10-"}, Answer(416)),
        ({"range": "bytes=-0"}, Answer(416)),
        ({"range": "bytes=5-3"}, Answer(200, 0, 10)),
        ({"range": "bytes=0-1,3-4"}, Answer(200, 0, 10)),
        ({"range": "rows=0-1"}, Answer(200, 0, 10)),
        ({"range": "bytes=-"}, Answer(200, 0, 10)),
        ({"range": "bytes=" + "9" * 40 + "-"}, Answer(200, 0, 10)),
        ({"range": "bytes=0-3", "if-range": TAG}, Answer(206, 0, 4)),
        ({"range": "bytes=0-3", "if-range": '"other"'}, Answer(200, 0, 10)),
        ({"range": "bytes=0-3", "if-range": f"W/{TAG}"}, Answer(200, 0, 10)),
        ({"range": "bytes=0-3", "if-match": '"other"'}, Answer(412)),
        ({"if-match": f'"x", {TAG}'}, Answer(200, 0, 10)),
        ({"if-none-match": f"W/{TAG}"}, Answer(304)),
        ({"if-none-match": "*"}, Answer(304)),
        ({"if-none-match": '"x"'}, Answer(200, 0, 10)),
    ],
)
def test_ranges(headers, expected):
    assert answer("GET", headers, 10, TAG) == expected


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=20), st.integers(0, 20))
@example("bytes=²-", 5)
@example("bytes=٣-", 5)
def test_no_range_is_answered_with_bytes_that_are_not_there(text, nbytes):
    found = answer("GET", {"range": text}, nbytes, TAG)
    assert 0 <= found.begin <= found.end <= nbytes
    assert found.status in (200, 206, 416)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20), st.integers(0, 10**12))
def test_a_signed_address_is_good_for_what_was_signed(name, expires):
    signer, path = Signer(), f"/versions/3/files/{name}"
    target = signer.sign("GET", path, expires)
    assert signer.check("GET", target, expires - 1) == path
    assert signer.check("HEAD", target, expires - 1) == path
    for method, other, now, kind in [
        ("PUT", target, expires, "not-signed"),
        ("GET", target.replace("/3/", "/4/"), expires, "not-signed"),
        ("GET", target.replace(f"expires={expires}", f"expires={expires + 1}"), expires, "not-signed"),
        ("GET", target[:-1], expires, "not-signed"),
        ("GET", target.partition("?")[0], expires, "not-signed"),
        ("GET", target, expires + 1, "expired"),
    ]:
        with pytest.raises(Problem) as error:
            signer.check(method, other, now)
        assert (error.value.status, error.value.kind) == (403, kind)
    with pytest.raises(Problem):
        Signer().check("GET", target, 0)


def test_a_secret_is_not_short():
    with pytest.raises(ConfigError, match="at least 16 bytes, got 3"):
        Signer(b"abc")


# What a proxy in front may take for two headers.
CONTROLS = [b"GET / HTTP/1.1\r\nX: a\nContent-Length: 5", b"GET / HTTP/1.1\r\nX: a\rb", b"GET / HTTP/1.1\r\nX: \0", b"GET /\n HTTP/1.1"]


@pytest.mark.parametrize(
    "head", [b"", b"GET /", b"GET / HTTP/2", b"GET / HTTP/1.1\r\nno colon", b"GET / HTTP/1.1\r\n: x", b"GET  / HTTP/1.1", *CONTROLS]
)
def test_what_is_no_request(head):
    with pytest.raises(Problem) as error:
        parsed(head)
    assert error.value.status == 400


def test_heads_of_requests():
    found = parsed(b"GET /a?b HTTP/1.1\r\nRange:  bytes=0-1 \r\nX-A: 1\r\nx-a: 2")
    assert (found.method, found.target, found.keep_alive) == ("GET", "/a?b", True)
    assert found.headers == {"range": "bytes=0-1", "x-a": "1, 2"}
    assert not parsed(b"GET / HTTP/1.0").keep_alive
    assert not parsed(b"GET / HTTP/1.1\r\nConnection: Close").keep_alive
    with pytest.raises(Problem):
        parsed(b"PUT / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4")


# ---- pins


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def saved(tmp_path):
    store = SnapshotStore(tmp_path / "store", keep=1, fsync=False)
    store.save(1, StateDictSource({"a": torch.zeros(1)}))
    return store


def save(store, version):
    store.save(version, StateDictSource({"a": torch.zeros(1)}))


def test_a_pinned_version_stays_until_the_pin_is_over(saved):
    clock = Clock()
    leases = Leases(saved, clock=clock)
    lease = leases.take(1, 10.0, "me")
    save(saved, 2)
    assert saved.versions() == [1, 2]
    clock.now += 9
    lease = leases.renew(lease.id, 10.0)
    assert lease.expires == 1019.0
    clock.now += 9
    assert leases.sweep() == [] and leases.of(1) == [lease] == leases.of()
    save(saved, 3)
    assert saved.versions() == [1, 3]
    clock.now += 1
    with pytest.raises(SnapshotNotFoundError, match="it is over"):
        leases.renew(lease.id, 10.0)
    clock.now += 5
    assert leases.sweep() == [lease]
    assert saved.clean() == [1]


def test_a_pin_that_is_ended(saved):
    leases = Leases(saved)
    lease = leases.take(1, 1000.0)
    assert Leases(saved).end(lease.id) == lease  # by another replica
    assert list(saved.pins(1)) == []
    for act in (leases.end, leases.get, lambda id: leases.renew(id, 1.0)):
        for id in (lease.id, "../1", "x" * 32, ""):
            with pytest.raises(SnapshotNotFoundError):
                act(id)


def test_no_pin_is_left_of_what_is_not_there(saved):
    leases = Leases(saved)
    with pytest.raises(SnapshotNotFoundError):
        leases.take(7, 10.0)
    assert leases.of() == []


def test_pins_whose_lease_is_lost_are_ended_and_others_are_left_alone(saved):
    leases = Leases(saved)
    kept = leases.take(1, 1000.0)
    saved.pin(1, "lease-" + "0" * 32)
    saved.pin(1, "mine")
    leases.sweep()
    assert list(saved.pins(1)) == [f"lease-{kept.id}", "mine"]


@pytest.mark.parametrize("left", [b"", b"{}", b'{"id": "' + b"0" * 32], ids=["nothing", "no lease", "half"])
def test_a_lease_that_a_crash_of_the_machine_has_spoilt_is_over(saved, left):
    leases = Leases(saved)
    spoilt, kept = leases.take(1, 1000.0), leases.take(1, 1000.0)
    (saved.directory / "leases" / spoilt.id).write_bytes(left)
    with pytest.raises(SnapshotNotFoundError):
        leases.renew(spoilt.id, 10.0)
    assert leases.of(1) == [kept] and leases.sweep() == []
    assert list(saved.pins(1)) == [kept.pin]


def test_who_renews_a_pin_at_the_same_moment_spoils_nothing(saved, monkeypatch):
    """One begins to write, the other does all of it, the first goes on."""
    leases, other = Leases(saved), Leases(saved)
    lease = leases.take(1, 1000.0)
    write, seen = Files.write, []

    def interrupted(files, file, data):
        if files is leases._files and not seen:
            seen.append(other.renew(lease.id, 2000.123456))
            done = write(files, file, data)
            assert other.get(lease.id) == seen[0]
            return done
        return write(files, file, data)

    monkeypatch.setattr(Files, "write", interrupted)
    assert leases.renew(lease.id, 3000.0) == leases.get(lease.id) and seen


# ---- turnstile


def test_a_turnstile_lets_so_many_through_in_order(no_leaks):
    turnstile = Turnstile(1, 2, 60.0)
    order: list[int] = []
    inside = threading.Event()
    go = threading.Event()

    def first():
        with turnstile.through():
            inside.set()
            go.wait(60)

    def later(n):
        with turnstile.through():
            order.append(n)

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert inside.wait(60)
    for n in range(2):
        threads.append(threading.Thread(target=later, args=(n,)))
        threads[-1].start()
        eventually(lambda n=n: turnstile.waiting > n)
    with pytest.raises(Problem) as error, turnstile.through():
        pass
    assert error.value.status == 503 and error.value.headers == {"Retry-After": "1"} and "2 wait, of 2" in error.value.detail
    go.set()
    for thread in threads:
        thread.join()
    assert order == [0, 1]
    assert (turnstile.inside, turnstile.waiting) == (0, 0)


def test_who_waits_too_long_is_told_so_and_is_in_nobodys_way():
    turnstile = Turnstile(1, 2, 0.01)
    with turnstile.through():
        with pytest.raises(Problem, match=r"none of 1 transfers has ended within 0\.01 s"), turnstile.through():
            pass
        assert turnstile.waiting == 0
    with turnstile.through():
        assert turnstile.inside == 1


# ---- what there is


def test_versions_that_deltas_lead_to():
    def step(base, version):
        return Step(base, version, "p", (PatchFile("r", f"{base}-{version}", 10, 1),))

    index = Index((Anchor(1, "p", 100),), (step(1, 2), step(1, 3), step(2, 3), step(8, 9)))
    assert listing([1, 5], index) == [
        Entry(1, True, ()),
        Entry(2, False, (1,)),
        Entry(3, False, (1, 2)),
        Entry(5, True, ()),
    ]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"keep": 0}, "keep must be at least 1, got 0"),
        ({"max_transfers": 0}, "max_transfers"),
        ({"wait_s": 0}, "wait_s must be positive"),
        ({"idle_s": float("nan")}, "idle_s must be positive"),
        ({"link_s": float("inf")}, "link_s must be positive and finite"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"port": 70000}, "port"),
        ({"files": "/nowhere/at/all"}, "no directory"),
        ({"publish_token": ""}, "publish_token must not be empty"),
    ],
)
def test_settings_that_make_no_sense(settings, why):
    with pytest.raises(ConfigError, match=why):
        Settings("/store", **settings)


def test_tokens_are_not_shown():
    assert "secret" not in repr(Settings("/store", publish_token="secret", read_token="secret"))


@pytest.mark.parametrize("hosts", [["127.0.0.1"], ["192.0.2.1", "127.0.0.1"], ["::1"]])
def test_listening_on_what_is_this_machines(hosts):
    with listen(hosts, 0) as listener:
        assert listener.getsockname()[0] == hosts[-1]
        with pytest.raises(OSError, match=r"[Aa]ddress already in use"):
            listen(hosts[-1:], listener.getsockname()[1])


def test_listening_on_what_is_not():
    with pytest.raises(OSError, match="assign"):
        listen(["192.0.2.1"], 0)
