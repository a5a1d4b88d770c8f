"""The status page as people see it: a real group and a real endpoint on Ray, in a real browser."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.request
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from weight_actors import EngineRank, TrainerRank

pytest.importorskip("fastapi")
pytest.importorskip("websockets")
from browser import Page, browser, program
from ray import serve

from mooncake_ray.serve.deployment import run
from mooncake_ray.sync.group import WeightSyncGroup
from mooncake_ray.weights.snapshot import SnapshotStore
from mooncake_ray.weights.source import StateDictSource

pytestmark = pytest.mark.skipif(program() is None, reason="no Chromium here")

PICTURE = Path(__file__).parents[2] / "build" / "status-page.png"
DASH = "\N{EN DASH}"
EVIL = '<img src=x onerror="window.hurt=1"><script>window.hurt=1'
ENGINES = ("e0", "e1", EVIL)
RECEIVERS = {*ENGINES, "endpoint"}  # which is one itself, so that it can store what the group has


class Stage:
    """A group with a trainer and three engines (and a fourth, the endpoint), a store with a pinned version, and an endpoint over both."""

    def __init__(self, folder: Path) -> None:
        self.group = WeightSyncGroup(f"page-{uuid.uuid4().hex[:8]}", mode="p2p")
        self.trainer = TrainerRank.remote(self.group, "trainer", 0, 1)
        self.engines = {name: EngineRank.remote(self.group, name, 0, 1) for name in ENGINES}
        ray.get([a.ready.remote() for a in (self.trainer, *self.engines.values())], timeout=150)
        self.group.sync(timeout_s=150)
        self.folder = folder
        store = SnapshotStore(folder)
        store.save(0, StateDictSource({"w": torch.zeros(1 << 18)}))
        store.pin(0, "best")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.serve()

    def serve(self) -> None:
        serve.start(http_options={"host": "127.0.0.1", "port": self.port})
        run(self.folder, group=self.group.name, route_prefix="/weights")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/weights"

    def get(self, path: str, data: bytes | None = None):
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=200) as answer:
            return answer.headers, answer.read()

    def close(self) -> None:
        serve.shutdown()
        self.group.shutdown()


@pytest.fixture
def leaks_allowed(leaks_allowed):
    """What the stage's group keeps: versions and plans."""
    return replace(leaks_allowed, pool_bytes=1 << 20)


@pytest.fixture(scope="module")
def stage(pool_ray, tmp_path_factory):
    stage = Stage(tmp_path_factory.mktemp("store"))
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def page(stage) -> Page:
    with browser() as page:
        page.looks(1280, 800)
        page.open(stage.url)
        yield page


def test_what_there_is_can_be_seen(stage, page):
    page.until("document.getElementById('receivers-sum').innerText === '4 of 4 serve the newest version'")
    assert page.js("location.pathname") == "/weights/status"
    assert page.text("h1") == stage.group.name
    assert {e: page.text(f"#{e}") for e in ("version", "published", "staleness", "trainers")} == {
        "version": "0", "published": "0", "staleness": "none", "trainers": "1 of 1",
    }  # fmt: skip
    receivers = {row[0]: row for row in page.rows("receivers")}
    assert set(receivers) == RECEIVERS
    host = ray.util.get_node_ip_address()
    for row in receivers.values():
        assert row[1:5] == ["● serving", "0", "0", DASH] and re.fullmatch(r"[\d.]+ s|\d+ m \d\d s", row[5]) and row[6:] == ["1", host]
    (version,) = page.rows("versions")
    assert version[0] == "0" and version[3:] == ["pool, store", "4", "0", "best"] and version[1].startswith("1.0 MiB")
    late, first = page.rows("outcomes")
    assert late[1:4] == ["0", "catch up", "p2p"] and late[7:] == ["1", "✓ done"], "the endpoint came last"
    assert first[1:4] == ["0", "sync", "p2p"] and first[7:] == ["3", "✓ done"]
    assert page.text("#transfers-none") == "None is under way."
    (told,) = json.loads(stage.get("/v1/overview")[1])["nodes"]
    assert told["capacity_bytes"] == 256 << 20 and told["used_bytes"] > 0 and told["processes"] >= 4
    pool = page.text("#nodes li")
    assert host in pool and "256 MiB" in pool and page.js("document.querySelector('#nodes [role=meter]').getAttribute('aria-valuetext')")
    assert page.text("#link").startswith("● live") and page.js("document.title") == f"v0 · {stage.group.name}"
    page.screenshot(PICTURE)


def test_names_are_text_and_nothing_else_runs(stage, page):
    assert page.js("document.querySelectorAll('main img, main script').length") == 0 and page.js("window.hurt") is None
    policy = stage.get("/status")[0]["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    page.js("document.body.insertAdjacentHTML('beforeend', '<img id=bad src=x onerror=\"window.hurt=1\">')")
    page.until("document.getElementById('bad').complete")
    assert page.js("window.hurt") is None, "the policy does not let it run even if it got there"
    assert any("Content Security Policy" in t for t in page.troubles)
    page.js("document.getElementById('bad').remove()")
    page.troubles.clear()


def test_an_update_is_seen_while_it_is_under_way_and_after_it(stage, page):
    page.js("window.before = document.querySelector('#receivers tbody tr'); window.cell = window.before.cells[0].firstChild")
    ray.get(stage.trainer.train.remote(1))
    pid = ray.get(stage.engines["e1"].__ray_call__.remote(lambda self: __import__("os").getpid()))
    os.kill(pid, signal.SIGSTOP)
    try:
        ref = stage.group.async_sync(timeout_s=150)
        page.until("document.querySelector('#transfers tbody tr')?.cells[2].innerText === 'staging'")
        (row,) = page.rows("transfers")
        assert row[:3] == ["1", "sync, p2p", "staging"] and row[7] == "4 receivers"
        page.until("document.querySelector('#transfers progress').value > 0")
        assert re.fullmatch(r"[\d.]+( B)? of [\d.]+ KiB", page.rows("transfers")[0][4])
    finally:
        os.kill(pid, signal.SIGCONT)
    ray.get(ref, timeout=150)
    page.until("document.getElementById('version').innerText === '1'")
    page.until("document.getElementById('transfers').hidden")
    assert [row[2] for row in page.rows("receivers")] == ["1"] * 4
    assert page.js("window.before.isConnected && window.before.cells[0].firstChild === window.cell"), "the same rows, and no reload"
    assert page.rows("outcomes")[0][1:4] == ["1", "sync", "p2p"] and [v[0] for v in page.rows("versions")] == ["1", "0"]


def test_who_is_behind_is_seen(stage, page):
    stage.group.publish(timeout_s=150)
    page.until("document.getElementById('published').innerText === '2'")
    page.until("document.querySelector('#receivers tbody tr').cells[3].innerText === '▲ 1'")
    assert page.text("#staleness").startswith("1 version, ") and page.text("#receivers-sum") == "0 of 4 serve the newest version"
    stage.group.sync(timeout_s=150)
    page.until("document.getElementById('staleness').innerText === 'none'")


def test_a_lease_is_seen(stage, page):
    wish = json.dumps({"ttl_s": 600, "holder": "an eval"}).encode()
    stage.get("/v1/versions/0/pins", wish)
    page.until("/an eval/.test(document.getElementById('versions').innerText)")
    assert re.fullmatch(r"best, an eval \((9 m \d\d|10 m 00) s left\)", page.rows("versions")[-1][6])


def test_the_death_of_an_engine_is_seen(stage, page):
    ray.kill(stage.engines["e0"])
    page.until("document.querySelector('#receivers tbody tr .bad')")
    (dead, *others) = page.rows("receivers")
    assert dead[:3] == ["e0", "✕ gone", "2"] and "died" in dead[7], "the worst is first"
    assert [row[1] for row in others] == ["● serving"] * 3


CONTRASTS = """
(() => {
  const parse = (c) => { const n = c.match(/[\\d.]+/g).map(Number); return n.length < 4 || n[3] ? n.slice(0, 3) : null; };
  const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const back = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c) return c; } return null; };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), out = [];
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || !e.checkVisibility() || !back(e)) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(back(e))].sort((x, y) => y - x);
    out.push([walk.currentNode.textContent.trim(), (a + 0.05) / (b + 0.05)]);
  }
  return out;
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_can_be_read(page, dark):
    page.looks(1280, 800, dark)
    found = page.js(CONTRASTS)
    assert len(found) > 40 and not [(what, ratio) for what, ratio in found if ratio < 4.5], "WCAG 2 AA"
    page.screenshot(PICTURE.with_stem(f"status-page-{'dark' if dark else 'light'}"))


def test_it_can_be_used_without_eyes_or_mouse(page):
    tree = page.do("Accessibility.getFullAXTree")["nodes"]
    roles = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if not n.get("ignored")]
    assert {("heading", h) for h in ("Transfers", "Last updates")} <= set(roles) and sum(r == "columnheader" for r, _ in roles) >= 20
    assert any(role == "meter" and name.startswith("pool of") for role, name in roles) and ("status", "") in roles
    assert {("rowheader", "e0"), ("rowheader", EVIL)} <= set(roles)
    assert page.js("[...document.querySelectorAll('.scroll')].every(s => s.tabIndex === 0 && s.getAttribute('aria-labelledby'))")


def test_a_narrow_screen_has_room_for_it(page):
    page.looks(360, 800)
    assert page.js("document.documentElement.scrollWidth") <= 360
    page.screenshot(PICTURE.with_stem("status-page-narrow"))
    page.looks(1280, 800)


def test_who_has_no_token_is_asked_for_it(stage, page):
    run(stage.folder, name="private", route_prefix="/private", read_token="open sesame")
    page.open(stage.url.replace("/weights", "/private/"))
    page.until("/the endpoint answers 401: a bearer token is needed/.test(document.getElementById('problems').innerText)")
    assert page.js("document.getElementById('ask').checkVisibility()") and not page.rows("versions")
    for token in ("wrong", "open sesame"):
        page.js("document.getElementById('token').focus()")
        page.do("Input.insertText", text=token)
        page.js("document.querySelector('#ask button').click()")
        page.until(
            "/answers 403/.test(document.body.innerText)" if token == "wrong" else "document.getElementById('versions').rows.length > 1"
        )
    assert not page.js("document.getElementById('ask').checkVisibility()") and page.text("#receivers-none") == "This endpoint has no group."
    assert page.rows("versions")[0][3:6] == ["store", "0", "0"]
    page.open(stage.url)
    page.until("document.querySelectorAll('#receivers tbody tr').length === 4")
    page.troubles.clear()  # requests that were refused
    serve.delete("private")


def test_what_is_shown_is_called_old_when_the_endpoint_is_gone_and_new_when_it_is_back(stage, page):
    assert not page.troubles
    serve.shutdown()
    page.until("/no answer for [1-9]/.test(document.getElementById('link').innerText)")
    assert f"{DASH} what is shown is" in page.text("#problems") and "endpoint" in page.text("#problems")
    page.screenshot(PICTURE.with_stem("status-page-gone"))
    assert page.js("document.getElementById('live').textContent") == "The endpoint does not answer; what is shown is old."
    assert page.text("#version") == "2" and len(page.rows("receivers")) == 4
    stage.serve()
    page.until("document.getElementById('problems').hidden && document.getElementById('link').innerText.startsWith('● live')")
    stage.group.shutdown()
    page.until("document.getElementById('problems').innerText.startsWith('group: ')")
    assert page.text("#link").startswith("● live") and len(page.rows("receivers")) == 4, "the endpoint is there, and the group is not"
