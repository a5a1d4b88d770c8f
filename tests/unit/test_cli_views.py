"""What the command line concludes from a broker's words, and how it shows it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pool_sample import INSPECT_TEXT, MIB, STATS_TEXT, with_changes

from mooncake_ray.cli import memory, model, pools, services, status_view, text
from mooncake_ray.cli.pools import PoolName, Reading
from mooncake_ray.snapshot import Snapshot

POOL = PoolName("mooncake_ray/0/one", "one", 2)
FULL = Snapshot.parse(INSPECT_TEXT)
ID = {n: f"{n:032x}" for n in range(1, 6)}


def shown(words=INSPECT_TEXT, **reading) -> str:
    return "\n".join(status_view.lines(Reading(POOL, words, **reading), 10))


# ---- reading


def test_everything_a_broker_tells_is_read():
    assert FULL.capacity_bytes == 1024 * MIB and FULL.spill_dir.endswith("session_1") and FULL.waiting == 3
    assert FULL.arenas[0].largest_free_bytes == 200 * MIB and FULL.groups[0].quota_bytes == 512 * MIB
    assert FULL.object_rows[0].pins[0].count == 2 and FULL.object_rows[2].claims[1].owner == 11


def test_what_is_read_is_what_brokers_tell(store, scope):
    """A field that is missing would raise; one that only `inspect` has is 0 in what `stats` says."""
    store.create(1 << 20)
    key = store.put({"x": np.ones(1 << 17)})
    view = store.get(key)
    short, full = Snapshot.parse(store.client.stats()), Snapshot.parse(store.client.inspect())
    assert full.objects == len(full.object_rows) == 1 and full.object_rows[0].note.startswith("put at test_cli_views.py")
    assert (full.sessions[0].pinned_bytes or full.sessions[1].pinned_bytes) >= 1 << 20 and short.sessions[0].pinned_bytes == 0
    assert short.object_rows == () and short.arenas[0].size_bytes == full.arenas[0].size_bytes == scope.config.capacity_bytes
    del view
    store.free([key])


def test_a_broker_of_the_future():
    assert Snapshot.parse(with_changes(of_the_future=[1])) == Snapshot.parse(STATS_TEXT)


# ---- finding pools

SOCKETS = """\
Num       RefCount Protocol Flags    Type St Inode Path
00000000e5d66b50: 00000003 00000000 00000000 0005 03 1395240 @mooncake_ray/7/a b
00000000c0949cf2: 00000003 00000000 00000000 0005 03  395237 @mooncake_ray/7/a b
0000000031ac095c: 00000002 00000000 00010000 0005 01 1395232 @mooncake_ray/7/a b
0000000031ac095d: 00000002 00000000 00010000 0005 01 1395233 @mooncake_ray/77/theirs
0000000031ac095e: 00000002 00000000 00010000 0005 01 1395234 @mooncake_ray/7/idle
0000000031ac095f: 00000003 00000000 00000000 0005 03 1395235 @mooncake_ray/7/ended
000000001afd00d8: 00000003 00000000 00000000 0001 03  1238
0000000065efab8f: 00000002 00000000 00010000 0001 01  1239 /tmp/mooncake_ray/7/file
00000000d5d66b50: 00000002 00000000 00010000 0001 01  1240 @mooncake_ray/7/idle/engine
00000000d5d66b51: 00000003 00000000 00000000 0001 03  1241 @mooncake_ray/7/a b/engine
00000000d5d66b52: 00000002 00000000 00010000 0001 01  1242 @mooncake_ray/7/over/engine
"""


def test_pools_are_found_among_the_kernels_sockets():
    found = pools.parse_sockets(SOCKETS.splitlines(), 7)
    assert found == [PoolName("mooncake_ray/7/a b", "a b", 2), PoolName("mooncake_ray/7/idle", "idle", 0, served=True)]


def test_names_are_those_that_brokers_are_started_with(monkeypatch):
    from mooncake_ray.store import node

    monkeypatch.setattr("os.geteuid", lambda: 7)
    line = f"0: 00000002 00000000 00010000 0005 01 1 @{node.broker_name('x')}"
    assert pools.parse_sockets([line], 7) == [PoolName(node.broker_name("x"), "x", 0)]


# ---- modelling


def test_owners():
    found = {t.name: (t.objects, t.bytes // MIB) for t in model.by_owner(FULL)}
    assert found == {"train.py (pid 4001)": (2, 192), "rollout (pid 4002)": (2, 40), "nobody": (1, 1)}


def test_ages():
    assert [(t.name, t.objects) for t in model.by_age(FULL)] == [("< 10 s", 2), ("< 1 min", 1), ("< 10 min", 0), ("< 1 h", 1), ("older", 1)]


def test_who_pins_what_largest_first():
    assert [row.id for row in model.pinned(FULL)] == [ID[1], ID[3]]
    assert model.pinners(FULL, FULL.object_rows[0]) == "train.py (pid 4001) x2, rollout (pid 4002)"


# ---- status


def test_status_says_what_there_is():
    out = shown()
    assert "[##########..............................] 25 %: 256 MiB of 1 GiB used, 512 MiB populated" in out
    assert "pid 4000, up 1h01m, restarted 1 time" in out
    assert "waiting: 1 for room, 2 for one of several objects; the oldest for 3.5s" in out
    assert "spill: 64 MiB in 1 object on disk only, 96 MiB of disk in /tmp/mooncake_ray-0/session_1; 32 MiB in memory" in out
    assert "taken back from 1 process that died: 2 leases, 3 pins" in out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "4002 rollout 01000000 2m00s 1 (8 MiB) 2 (160 MiB) 1 (32 MiB)" in rows
    assert "01000000 256 MiB 512 MiB" in rows
    assert rows.index("train.py (pid 4001) 2 192 MiB") < rows.index("rollout (pid 4002) 2 40 MiB")


SERVICE = {
    "endpoint": "10.0.0.1:4242",
    "transports": ["tcp", "verbs"],
    "without": {"mooncake": "it is not installed"},
    "peers": {"10.0.0.2:4711": "verbs", "10.0.0.3:4712": ""},
    "connections": 5,
    "sessions": 2,
    "pins": 1,
    "requests": 99,
    "refused": 0,
    "bytes_sent": 3 * MIB,
    "replicas": 7,
    "remote_bytes_read": 70 * MIB,
    "relayed": 1,
    "relays_lost": 1,
    "remote_retries": 2,
}


def test_status_tells_of_the_node_service():
    rows = [" ".join(line.split()) for line in shown(service=SERVICE).splitlines()]
    assert "serves at 10.0.0.1:4242: 2 peer sessions by 5 connections, 1 pin, 99 requests, 3 MiB sent by its streams" in rows
    assert "brought here: 7 objects, 70 MiB read by its transports, 1 object from other readers, 3 retries" in rows
    assert "does without mooncake: it is not installed" in rows
    assert "offers tcp, verbs" in rows and "10.0.0.2:4711 verbs" in rows and "10.0.0.3:4712 -" in rows
    assert "3 connections refused" in shown(service=SERVICE | {"refused": 3})
    assert status_view.as_json(Reading(POOL, INSPECT_TEXT, service=SERVICE))["service"] == SERVICE


def test_status_says_that_there_is_no_service_or_that_it_is_silent():
    assert "none: other nodes cannot read this pool" in shown()
    assert "does not answer: it is stopped" in shown(service_error="it is stopped")
    assert status_view.as_json(Reading(POOL, INSPECT_TEXT, service_error="x"))["service_error"] == "x"


def test_the_services_of_a_cluster():
    told = [
        {"job": "02", "node": "b" * 56, "host": "10.0.0.2", "error": "did not answer within 10 s"},
        {"job": "02", "node": "a" * 56, "host": "10.0.0.1", "report": SERVICE},
    ]
    out = services.lines(told)
    assert out[0] == "node 10.0.0.1 (aaaaaaaa), job 02" and "  offers tcp, verbs" in out
    assert out[-3:] == ["", "node 10.0.0.2 (bbbbbbbb), job 02", "  did not answer within 10 s"]
    assert services.lines([]) == ["no node service is running in this Ray cluster: nodes do not read each other's pools"]


def test_status_of_an_empty_pool():
    out = shown(with_changes(sessions=[], groups=[], arenas=[]))
    assert "sessions" not in out and "by owner" not in out


def test_workers_of_ray_are_called_as_they_call_themselves(monkeypatch, tmp_path):
    assert "ray::Rollout.generate (pid 4002)" in shown(titles={4002: "ray::Rollout.generate"})
    for pid, line in ((1, b"ray::IDLE\0\0\0"), (2, b"python\0train.py\0")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(line)
    monkeypatch.setattr(pools, "Path", lambda path: tmp_path / path.removeprefix("/proc/"))
    assert [pools.title_of(pid) for pid in (1, 2, 3)] == ["ray::IDLE", "", ""]


def test_status_does_not_show_who_looks():
    assert "rollout   0100" not in shown(observer=12)


def test_status_names_the_error_of_the_disk():
    assert "spill error: No space left on device (/tmp/x)" in shown(with_changes(spill_error="No space left on device (/tmp/x)"))


def test_status_of_pools_that_say_nothing():
    assert status_view.lines(Reading(POOL), 10)[1] == "  idle: nobody is connected, so it will end"
    assert status_view.lines(Reading(POOL, error="no answer for 30 s"), 10)[1] == "  does not answer: no answer for 30 s"


def test_status_names_no_more_objects_than_asked():
    out = "\n".join(status_view.lines(Reading(POOL, INSPECT_TEXT), 1))
    assert ID[1] in out and ID[3] not in out and "and 1 more (--objects)" in out


def test_status_as_json():
    out = json.loads(json.dumps(status_view.as_json(Reading(POOL, INSPECT_TEXT))))
    assert out["stats"] == json.loads(INSPECT_TEXT) and out["by_owner"][0] == {
        "name": "train.py (pid 4001)",
        "objects": 2,
        "bytes": 192 * MIB,
    }
    assert status_view.as_json(Reading(POOL))["stats"] is None


# ---- memory


def table_of(sort="size", group_by=None, limit=None, units="auto"):
    return memory.lines(FULL, sort, group_by, limit, units)


def test_memory_lists_objects():
    out = table_of()
    assert [line.split()[0] for line in out[1:6]] == [ID[1], ID[2], ID[3], ID[4], ID[5]]
    assert " ".join(out[1].split()[1:]) == "128 MiB resident 11m40s train.py (pid 4001) token 3 put at train.py:31 in main"
    assert "self,token" in out[3] and "rollout (pid 4002)" in out[3] and "nobody" in out[5]
    assert out[-1] == "total: 5 objects, 233 MiB, of which 160 MiB pinned"


def test_memory_oldest_first_and_limited():
    out = table_of(sort="age", limit=2)
    assert [line.split()[0] for line in out[1:3]] == [ID[2], ID[1]] and out[3] == "and 3 objects more (--limit)"
    assert out[-1].startswith("total: 5 objects")


def test_memory_in_groups():
    out = table_of(group_by="note", units="MiB")
    assert "put at train.py:31 in main: 2 objects, 192 MiB" in out and "-: 3 objects, 41 MiB" in out
    assert [line for line in table_of(group_by="state") if "object" in line][:1] == ["resident: 3 objects, 161 MiB"]
    assert "nobody: 1 object, 1048576 B" in table_of(group_by="owner", units="B")


# ---- text


@pytest.mark.parametrize(
    ("nbytes", "unit", "said"),
    [
        (0, "auto", "0 B"),
        (1023, "auto", "1023 B"),
        (1536, "auto", "1.5 KiB"),
        (1 << 30, "auto", "1 GiB"),
        (300_000_000, "auto", "286 MiB"),
        (1 << 20, "B", "1048576 B"),
        (1 << 20, "GiB", "0.0 GiB"),
    ],
)
def test_sizes(nbytes, unit, said):
    assert text.size(nbytes, unit) == said


@pytest.mark.parametrize(("seconds", "said"), [(0.04, "0.0s"), (59, "59s"), (75.9, "1m15s"), (3600, "1h00m"), (90000, "1d01h")])
def test_ages_as_text(seconds, said):
    assert text.age(seconds) == said


def test_bars():
    assert text.bar(0, 0, 4) == "[....]" and text.bar(1, 1000, 4) == "[#...]" and text.bar(9, 3, 4) == "[####]"
