"""What is exported, with Ray's metrics replaced by ones that remember. (The real ones: tests/integration/test_metrics_export.py.)"""

from __future__ import annotations

import json
import re
import threading

import pytest
from pool_sample import STATS

from mooncake_ray import counters
from mooncake_ray.cli.grafana import DASHBOARD
from mooncake_ray.errors import BrokerDiedError
from mooncake_ray.objects import metrics


class Metric:
    made: dict = {}  # noqa: RUF012 - emptied for each test

    def __init__(self, name, text, *args):
        self.name, self.values = name, []
        Metric.made[name] = self

    def set_default_tags(self, tags):
        self.tags = tags
        return self

    def inc(self, n, tags):
        self.values.append((n, tags))

    def observe(self, value):
        self.values.append(value)

    set = observe


class Node:
    def hex(self):
        return "ab"


class Worker:
    current_node_id = Node()


class Client:
    usable = True
    session = 11
    asked = 0

    def __init__(self):
        self.said = dict(STATS)

    def stats(self):
        self.asked += 1
        if self.said is None:
            raise BrokerDiedError("gone")
        return json.dumps(self.said)


class Session:
    worker = Worker()
    over = False

    def __init__(self):
        self.client = Client()


@pytest.fixture
def exporter(monkeypatch):
    Metric.made = {}
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, kind, Metric)
    yield metrics.Exporter(Session(), 1.0)
    counters.timing(False)


def taken(name):
    values, Metric.made[name].values = Metric.made[name].values, []
    return values


def test_what_is_counted_is_exported_once(exporter):
    counters.count("routed", 2)
    counters.count("fallbacks")
    counters.count("fallbacks:StoreFullError")
    exporter.flush()
    assert taken("mooncake_ray_puts") == [(2, {})]
    assert taken("mooncake_ray_fallbacks") == [(1, {"reason": "StoreFullError"})]
    counters.count("routed")
    exporter.flush()
    assert taken("mooncake_ray_puts") == [(1, {})] and taken("mooncake_ray_fallbacks") == []


def test_what_was_counted_before_the_session_is_not_its_own(exporter):
    counters.count("routed", 5)
    second = metrics.Exporter(Session(), 1.0)
    second.flush()
    assert taken("mooncake_ray_puts") == []


def test_times(exporter):
    with counters.timed("put"):
        pass
    with pytest.raises(KeyError), counters.timed("put"):
        raise KeyError("a put that fails took no time that tells anything")
    exporter.flush()
    (seconds,) = taken("mooncake_ray_put_seconds")
    assert 0 < seconds < 1 and taken("mooncake_ray_get_seconds") == []


def test_waits_are_creates_that_took_long(exporter, monkeypatch):
    clock = iter([0.0, 0.001, 1.0, 1.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    with counters.timed("room"):
        pass
    with pytest.raises(MemoryError), counters.timed("room"):
        raise MemoryError
    monkeypatch.undo()
    exporter.flush()
    assert taken("mooncake_ray_put_waits") == [(1, {})] and taken("mooncake_ray_put_wait_seconds") == [(0.5, {})]


def test_nothing_is_kept_where_nobody_exports():
    counters.timing(False)
    with counters.timed("get"):
        pass
    assert counters.take("get") == []


def test_the_node_is_exported_by_the_session_that_the_broker_names(exporter):
    exporter.flush()
    assert taken("mooncake_ray_pool_used_bytes") == [STATS["used_bytes"]] and taken("mooncake_ray_pool_waiting") == [3]
    reaped = {tags["kind"]: n for n, tags in taken("mooncake_ray_reaped")}
    assert reaped == {"sessions": 1, "leases": 2, "pins": 3}
    exporter.session.client.said["reaped_pins"] = 5
    exporter.flush()
    assert taken("mooncake_ray_reaped") == [(2, {"kind": "pins"})]


def test_other_sessions_seldom_ask(exporter):
    exporter.session.client.said["first_listener"] = 99
    for _ in range(metrics._ASK_EVERY):
        exporter.flush()
    assert exporter.session.client.asked == 1 and taken("mooncake_ray_pool_used_bytes") == []
    exporter.session.client.said["first_listener"] = 11
    exporter.flush()
    assert len(taken("mooncake_ray_pool_used_bytes")) == 1


def test_nobody_is_named_yet(exporter):
    exporter.session.client.said.update(first_listener=0, sessions=[])
    exporter.flush()
    exporter.flush()
    assert exporter.session.client.asked == 2


def ended(exporter):
    exporter.thread.start()
    exporter.thread.join(30)
    return not exporter.thread.is_alive()


def test_the_thread_ends_with_the_session(exporter):
    exporter.session.over = True
    assert ended(exporter)


@pytest.mark.parametrize("error", [BrokerDiedError, RuntimeError])
def test_a_bad_round_is_not_the_last(exporter, monkeypatch, error):
    rounds = []

    def flush():
        rounds.append(1)
        exporter.session.over = len(rounds) == 2
        raise error("bad")

    monkeypatch.setattr(exporter, "flush", flush)
    exporter.interval_s = 0.01
    assert ended(exporter) and len(rounds) == 2


def test_the_next_broker_counts_from_nothing(exporter):
    exporter.flush()
    taken("mooncake_ray_reaped")
    exporter.session.client = Client()
    exporter.session.client.said["reaped_pins"] = 1
    exporter.flush()
    assert {"pins": 1}.items() <= {tags["kind"]: n for n, tags in taken("mooncake_ray_reaped")}.items()


def test_the_process_of_a_service_exports_it(exporter):
    said = {"sessions": 2, "connections": 5, "pins": 1, "bytes_sent": 1000, "refused": 1}
    exporter.service = lambda: said
    exporter.flush()
    assert taken("mooncake_ray_remote_sent_bytes") == [(1000, {})] and taken("mooncake_ray_peers_refused") == [(1, {})]
    assert (
        taken("mooncake_ray_peer_sessions") == [2]
        and taken("mooncake_ray_peer_connections") == [5]
        and taken("mooncake_ray_peer_pins") == [1]
    )
    said["bytes_sent"] = 1500
    exporter.flush()
    assert taken("mooncake_ray_remote_sent_bytes") == [(500, {})] and taken("mooncake_ray_peers_refused") == []
    said["bytes_sent"] = 70  # another engine
    exporter.flush()
    assert taken("mooncake_ray_remote_sent_bytes") == [(70, {})]


def test_between_two_brokers_nobody_is_asked(exporter):
    exporter.session.client.usable = False
    exporter.flush()
    assert exporter.session.client.asked == 0


def test_off():
    before = threading.active_count()
    assert metrics.start(Session(), 0) is None and threading.active_count() == before


# ---- the dashboard

PROMETHEUS = re.compile(r"ray_(mooncake_ray_[a-z_]+)")


def exported() -> set[str]:
    histograms = {f"{name}_bucket" for name in metrics.HISTOGRAMS}
    return histograms | {f"{name}_total" for name in metrics.COUNTERS} | set(metrics.GAUGES) | set(metrics.SERVICE_GAUGES)


def test_names():
    names = [*metrics.HISTOGRAMS, *metrics.COUNTERS, *metrics.GAUGES, *metrics.SERVICE_GAUGES]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"mooncake_ray_[a-z][a-z_]*[a-z]", name) and not name.endswith("_total"), name
    assert list(metrics.BUCKETS_S) == sorted(set(metrics.BUCKETS_S)) and metrics.BUCKETS_S[0] == 50e-6 and metrics.BUCKETS_S[-1] == 10


def test_the_dashboard_shows_what_is_exported():
    board = json.loads(DASHBOARD.read_text())
    ids = [p["id"] for p in board["panels"]]
    assert len(set(ids)) == len(ids) >= 10
    shown = {name for p in board["panels"] for t in p["targets"] for name in PROMETHEUS.findall(t["expr"])}
    assert shown == exported()
    asked = {name for v in board["templating"]["list"] for name in PROMETHEUS.findall(json.dumps(v))}
    assert asked <= exported()


def test_panels_do_not_overlap():
    places = [p["gridPos"] for p in json.loads(DASHBOARD.read_text())["panels"]]
    cells = [(x, y) for g in places for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
