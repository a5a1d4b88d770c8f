"""What the endpoint tells at a glance, put together from plain data; and how it looks at what does not answer."""

from __future__ import annotations

import dataclasses
import threading
import types
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi")
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_sample import STATS

from mooncake_ray.serve import lookout, page
from mooncake_ray.serve.fill import NodePool, of_nodes
from mooncake_ray.serve.lookout import Lookout, Part
from mooncake_ray.serve.overview import StoredVersion, assemble
from mooncake_ray.serve.overview_model import Pin
from mooncake_ray.snapshot import Snapshot
from mooncake_ray.sync.report import Departed, EngineStatus, GroupStatus, Outcome, SyncReport, Update, VersionStatus

SNAPSHOT = Snapshot.of(STATS)


def group(**what) -> GroupStatus:
    empty = {"version": -1, "published": -1, "epoch": 0, "trainers": 0, "engines": {}, "moved_bytes": 0, "total_bytes": 0}
    return GroupStatus(**(empty | what))


def told(status=None, store=(), nodes=(), shortfalls=()):
    return assemble(1000.0, "r", "policy", status, store, nodes, shortfalls)


def test_a_group_in_which_nothing_has_happened():
    seen = told(group()).group
    assert (seen.version, seen.published, seen.behind, seen.stale_s, seen.receivers, seen.transfers) == (None, None, 0, 0.0, [], [])


def test_states_of_receivers():
    engines = {
        "fine": EngineStatus(5, "serving", 2, 2, since_s=3.0, stale_s=0.0),
        "partly": EngineStatus(-1, "serving", 1, 2, behind=2, stale_s=9.0),
        "spoilt": EngineStatus(-1, "poisoned", 1, 2, behind=2, stale_s=9.0),
    }
    seen = told(group(engines=engines, departed={"lost": Departed("died", 4.0, 3), "no more": Departed("", 4.0, 3)})).group
    assert {r.name: (r.state, r.version, r.behind) for r in seen.receivers} == {
        "fine": ("serving", 5, 0),
        "partly": ("incomplete", None, 2),
        "spoilt": ("poisoned", None, 2),
        "lost": ("gone", 3, None),
        "no more": ("left", 3, None),
    }
    assert (seen.behind, seen.stale_s) == (2, 9.0) and seen.receivers[-2].why == "died"


def test_staleness_that_is_not_known_is_not_called_none():
    assert told(group(engines={"e": EngineStatus(1, "serving", 1, 1, behind=1, stale_s=None)})).group.stale_s is None


def test_a_transfer_and_its_rate():
    update = Update("sync", 7, "p2p", "staging", ("f", "e"), 300, 900, 5.0, 2.0)
    (transfer,) = told(group(update=update)).group.transfers
    assert (transfer.bytes_per_s, transfer.receivers, transfer.moved_bytes, transfer.total_bytes) == (150.0, ["e", "f"], 300, 900)
    (transfer,) = told(group(update=dataclasses.replace(update, phase="publishing", stage_s=0.0))).group.transfers
    assert transfer.bytes_per_s is None


def test_outcomes():
    report = SyncReport(4, "delta", engines=["b", "a"], lost={"c": "died"}, nbytes=10, pause_s=0.5)
    (seen,) = told(group(outcomes=(Outcome("sync", report, "", 2.0, 9.0),))).group.outcomes
    assert (seen.receivers, seen.lost, seen.seconds, seen.ago_s, seen.pause_s) == (["a", "b"], {"c": "died"}, 2.0, 9.0, 0.5)


def test_versions_of_pool_store_and_receivers_are_one_list():
    engines = {"old": EngineStatus(2, "serving", 1, 1), "new": EngineStatus(9, "serving", 1, 1), "none": EngineStatus(-1, "joined", 1, 1)}
    published = (VersionStatus(9, 90, 1.0, True), VersionStatus(8, 80, 5.0, False))
    pin = Pin(name="best", left_s=None)
    store = [StoredVersion(8, True, 88, 3.0, (pin,), 2), StoredVersion(3, False)]
    seen = told(group(engines=engines, versions=published), store).versions
    assert [(v.version, v.nbytes, v.age_s, v.places, v.receivers, v.readers) for v in seen] == [
        (9, 90, 1.0, ["pool"], ["new"], 0),
        (8, 88, 5.0, ["store"], [], 2),
        (3, None, None, ["deltas"], [], 0),
        (2, None, None, [], ["old"], 0),
    ]
    assert seen[1].pins == [pin]


@settings(deadline=None)
@given(st.sets(st.integers(0, 50)), st.sets(st.integers(0, 50)), st.lists(st.integers(-1, 50), max_size=9))
def test_every_version_is_there_once_and_every_receiver_at_its_own(published, stored, served):
    engines = {f"e{n}": EngineStatus(v, "serving", 1, 1) for n, v in enumerate(served)}
    seen = told(
        group(engines=engines, versions=tuple(VersionStatus(v, 1, 0.0, True) for v in published)),
        [StoredVersion(v, True, 1, 0.0) for v in stored],
    ).versions
    assert [v.version for v in seen] == sorted(published | stored | {v for v in served if v >= 0}, reverse=True)
    assert {name: v.version for v in seen for name in v.receivers} == {name: e.version for name, e in engines.items() if e.version >= 0}


# ---- pools of nodes


def service(host: str, **what):
    return {"job": "1", "node": f"n-{host}", "host": host, **what}


def pool(**what):
    return STATS | what


def test_each_node_is_told_of_once():
    alive = [("a", "n1"), ("b", "n2"), ("b", "n3"), ("c", "n4"), ("d", "n5")]
    services = [
        service("b", error="did not answer within 5 s"),
        service("b", report={"pool": pool(used_bytes=40)}),
        service("c", report={"pool": None}),
        service("gone", report={"pool": pool()}),
    ]
    found = {n.host: n for n in of_nodes(alive, services, "a", SNAPSHOT)}
    assert sorted(found) == ["a", "b", "c", "d"]
    assert found["a"].pool is SNAPSHOT and found["b"].pool.used_bytes == 40 and not found["b"].error, "one of its services does answer"
    assert found["c"].error == "its pool does not answer" and found["d"].error == "no pool is known here"


def test_a_node_as_it_is_told():
    (a, b) = told(nodes=[NodePool("b", "2", None, "no pool is known here"), NodePool("a", "1", SNAPSHOT)]).nodes
    assert (a.host, a.capacity_bytes, a.used_bytes, a.pinned_bytes, a.waiting) == (
        "a", SNAPSHOT.capacity_bytes, SNAPSHOT.used_bytes, SNAPSHOT.pinned_bytes, SNAPSHOT.waiting,
    )  # fmt: skip
    assert a.processes == len({s.pid for s in SNAPSHOT.sessions}) and (b.error, b.capacity_bytes) == ("no pool is known here", 0)


# ---- looking


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def at_once():
    """An executor that is."""
    return types.SimpleNamespace(submit=lambda look: _done(look))


def _done(look):
    future = Future()
    try:
        future.set_result(look())
    except Exception as e:
        future.set_exception(e)
    return future


def test_what_was_seen_last_stays_and_its_age_is_told():
    clock, answers = Clock(), iter([1, ValueError("away"), ValueError("away"), 2])

    def look():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    part = Part("group", look, None, clock)
    shortfalls = []
    for _ in range(4):
        part.begin(at_once())
        clock.now += 1
        shortfalls.append((part.settle(), part.value))
    assert [(s and (s.why, s.age_s), v) for s, v in shortfalls] == [(None, 1), (("away", 2.0), 1), (("away", 3.0), 1), (None, 2)]


def test_what_does_not_answer_is_not_waited_for_nor_asked_again():
    clock, asked, go = Clock(), [], threading.Event()

    def look():
        asked.append(1)
        go.wait(30)
        return "there"

    with ThreadPoolExecutor(1) as executor:
        part = Part("nodes", look, "nothing", clock)
        for _ in range(3):
            (future,) = part.begin(executor)
            clock.now += 4
            shortfall = part.settle()
        assert (shortfall.why, shortfall.age_s, part.value, asked) == ("no answer for 12 s", None, "nothing", [1])
        go.set()
        future.result(30)
        assert part.settle() is None and part.value == "there"


def desk(group: str | None = None):
    empty = types.SimpleNamespace(of=list), types.SimpleNamespace(readers=dict)
    return types.SimpleNamespace(
        settings=types.SimpleNamespace(group=group, read_token=None, publish_token=None), name="r",
        leases=empty[0], shelf=empty[1], listing=list, store=None,
    )  # fmt: skip


def test_all_who_look_at_once_see_the_same(monkeypatch):
    looks, go = [], threading.Event()

    def pools(timeout_s):
        looks.append(1)
        go.wait(30)
        return []

    monkeypatch.setattr(lookout, "node_pools", pools)
    monkeypatch.setattr(lookout, "_WAIT_S", 30.0)
    clock = Clock()
    watch = Lookout(desk, clock)
    futures = [watch.look() for _ in range(50)]
    go.set()
    assert len({id(f.result(30)) for f in futures}) == 1 and len(looks) == 1
    clock.now += 0.4
    assert watch.look().result(30) is futures[0].result()
    clock.now += 0.2
    assert watch.look().result(30) is not futures[0].result() and len(looks) == 1, "nodes are not asked as often"
    clock.now += 2.0
    watch.look().result(30)
    assert len(looks) == 2
    watch.close()


def test_a_group_that_there_is_none_of_is_a_shortfall(monkeypatch):
    monkeypatch.setattr(lookout, "node_pools", lambda timeout_s: [])
    monkeypatch.setattr(lookout.WeightSyncGroup, "find", lambda name: (_ for _ in ()).throw(ValueError(f"no group {name}")))
    watch = Lookout(lambda: desk("policy"))
    seen = watch.look().result(30)
    assert seen.group is None and [(s.what, s.why, s.age_s) for s in seen.shortfalls] == [("group", "no group policy", None)]
    watch.close()


def test_a_group_is_found_anew_once_it_has_failed(monkeypatch):
    found = []

    class Found:
        def __init__(self) -> None:
            self.answers = iter([group(version=len(found)), group(version=len(found))])

        def status(self, timeout_s):
            if (answer := next(self.answers, None)) is None:
                raise RuntimeError("the actor died")
            return answer

    def find(name):
        found.append(Found())
        return found[-1]

    monkeypatch.setattr(lookout, "node_pools", lambda timeout_s: [])
    monkeypatch.setattr(lookout.WeightSyncGroup, "find", find)
    clock = Clock()
    watch, seen = Lookout(lambda: desk("policy"), clock), []
    for _ in range(5):
        told = watch.look().result(30)
        seen.append((told.group.version, [s.why for s in told.shortfalls]))
        clock.now += 3.0
    assert seen == [(0, []), (0, []), (0, ["the actor died"]), (1, []), (1, [])], "what was seen before stays meanwhile"
    watch.close()


# ---- the page


@pytest.fixture
def client():
    app = FastAPI()
    app.include_router(page.router)
    return TestClient(app)


@pytest.mark.parametrize(
    ("path", "kind"), [("/status", "text/html"), ("/static/page.css", "text/css"), ("/static/page.js", "text/javascript")]
)
def test_files_of_the_page(client, path, kind):
    answer = client.get(path)
    assert answer.status_code == 200 and answer.headers["content-type"] == f"{kind}; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff" and "script-src 'self'" in answer.headers["content-security-policy"]
    assert client.get(path, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    head = client.head(path)
    assert head.status_code == 200 and head.headers["content-length"] == str(len(answer.content)) and not head.content


@pytest.mark.parametrize("path", ["/static/page.py", "/static/..%2fpage.py", "/static/index.html/", "/static/%2e%2e/page.py"])
def test_no_other_file_is_given_out(client, path):
    assert client.get(path, follow_redirects=False).status_code in (404, 307)
    assert b"router" not in client.get(path).content


def test_the_page_refers_to_itself_by_relative_addresses_and_to_nobody_else(client):
    for path in ("/status", "/static/page.css", "/static/page.js"):
        text = client.get(path).text
        assert "://" not in text and 'src="/' not in text and 'href="/' not in text and "innerHTML" not in text
    assert "style=" not in client.get("/status").text and "<script>" not in client.get("/status").text


def test_the_root_leads_to_the_page_whatever_the_prefix():
    app = FastAPI()
    app.include_router(page.router)
    assert TestClient(app, root_path="/weights").get("/weights/", follow_redirects=False).headers["location"] == "/weights/status"
