"""What the doctor finds, and what it makes of it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_ray.cli import doctor, host_facts, judge, software_facts, spill_facts
from mooncake_ray.cli.host_facts import Host
from mooncake_ray.cli.main import main
from mooncake_ray.cli.software_facts import RdmaPort, Software
from mooncake_ray.cli.spill_facts import Spill
from mooncake_ray.config import Config

GIB = 1 << 30
HOST = Host(
    kernel="6.1.0",
    populate_error="",
    pidfd_error="",
    seals_error="",
    memory_bytes=100 * GIB,
    available_bytes=80 * GIB,
    cgroup_limit_bytes=None,
    cgroup_path="",
    open_files=65536,
    open_files_hard=1 << 20,
    locked_bytes=8 << 20,
    max_map_count=65530,
    overcommit=0,
    huge_pages_total=0,
    huge_pages_free=0,
    huge_page_bytes=2 << 20,
    shmem_thp="never",
    numa_nodes=1,
    shm_bytes=50 * GIB,
    shm_free_bytes=50 * GIB,
)
SPILL = Spill(directory="/d", probed="/d", write_error="", file_system="ext4", free_bytes=500 * GIB, direct_error="", punch_error="")
SOFTWARE = Software(
    version="0.1.0",
    ray="2.60.0",
    torch="2.13.0+cpu",
    not_for_metrics=(),
    extension_error="",
    broker_error="",
    config_error="",
    config=None,
    ports=(),
    verbs_error="",
)


def levels(found):
    return {f.check: f.level for f in found if f.level != judge.OK}


def test_a_good_machine():
    found = [*judge.host(HOST, 30 * GIB, False), *judge.spill(SPILL, 30 * GIB), *judge.leftovers([]), *judge.software(SOFTWARE)]
    assert levels(found) == {} and all(f.found for f in found)


@pytest.mark.parametrize(
    ("change", "check", "level"),
    [
        ({"populate_error": "Invalid argument"}, "populate", "warning"),
        ({"pidfd_error": "Operation not permitted"}, "pidfd", "warning"),
        ({"seals_error": "Operation not permitted"}, "memfd", "error"),
        ({"cgroup_limit_bytes": 20 * GIB}, "memory", "error"),
        ({"cgroup_limit_bytes": 40 * GIB}, "memory", "warning"),
        ({"available_bytes": 10 * GIB}, "memory", "warning"),
        ({"overcommit": 2}, "overcommit", "warning"),
        ({"shm_bytes": 64 << 20}, "/dev/shm", "warning"),
        ({"open_files": 1024}, "open files", "warning"),
        ({"max_map_count": 1000}, "memory maps", "warning"),
    ],
)
def test_a_machine_that_lacks_something(change, check, level):
    found = judge.host(replace(HOST, **change), 30 * GIB, False)
    assert levels(found) == {check: level}
    assert next(f for f in found if f.check == check).advice


def test_locked_memory_matters_to_rdma_only():
    assert levels(judge.host(HOST, GIB, True)) == {"locked memory": "warning"}
    assert levels(judge.host(replace(HOST, locked_bytes=-1, open_files=-1), GIB, True)) == {}


@pytest.mark.parametrize(
    ("change", "check", "level"),
    [
        ({"write_error": "Read-only file system"}, "spill directory", "error"),
        ({"file_system": "tmpfs"}, "spill directory", "warning"),
        ({"file_system": "nfs4"}, "spill directory", "warning"),
        ({"free_bytes": GIB}, "spill directory", "warning"),
        ({"direct_error": "Invalid argument"}, "spill O_DIRECT", "warning"),
        ({"punch_error": "Operation not supported"}, "spill holes", "warning"),
    ],
)
def test_a_disk_that_lacks_something(change, check, level):
    assert levels(judge.spill(replace(SPILL, **change), 30 * GIB)) == {check: level}


def test_a_spill_directory_that_is_not_there_yet():
    assert "/d (not there yet; / is)" in judge.spill(replace(SPILL, probed="/"), 0)[0].found


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ray": ""}, {"ray": "warning"}),
        ({"ray": "2.49.1"}, {"ray": "error"}),
        ({"ray": "2.50.0"}, {}),
        ({"ray": "2.60.9"}, {}),
        ({"ray": "2.61.0"}, {"ray": "warning"}),
        ({"ray": "3.0.0.dev0"}, {"ray": "warning"}),
        ({"not_for_metrics": ("aiohttp",)}, {"metrics": "warning"}),
        ({"torch": ""}, {"torch": "warning"}),
        ({"torch": "2.4.1"}, {"torch": "error"}),
        ({"extension_error": "undefined symbol"}, {"extension": "error"}),
        ({"broker_error": "x is missing"}, {"broker": "error"}),
        ({"config_error": "not a size: 'x'"}, {"settings": "error"}),
        ({"ports": (RdmaPort("mlx5_0", 1, "ACTIVE", 3),)}, {}),
        ({"ports": (RdmaPort("mlx5_0", 1, "DOWN", 3),)}, {"RDMA": "warning"}),
        ({"ports": (RdmaPort("mlx5_0", 1, "ACTIVE", 0),)}, {"RDMA": "warning"}),
        ({"ports": (RdmaPort("mlx5_0", 1, "ACTIVE", 1),), "verbs_error": "no such file"}, {"libibverbs": "warning"}),
    ],
)
def test_software(change, expected):
    assert levels(judge.software(replace(SOFTWARE, **change))) == expected


# ---- looking


def test_this_machine_can_run_the_pool():
    found = host_facts.collect()
    assert found.seals_error == "" and found.memory_bytes > found.available_bytes > 0 and found.max_map_count > 0


def test_meminfo():
    assert host_facts.parse_meminfo("MemTotal:  10 kB\nHugePages_Total:   3\nOdd:\n") == {"MemTotal": 10240, "HugePages_Total": 3}


def test_file_system_of_a_path():
    mounts = "/dev/a / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n/dev/b /tmp/my\\040disk xfs rw 0 0\n"
    assert [spill_facts.file_system_of(p, mounts) for p in ("/x", "/tmpx", "/tmp/x", "/tmp/my disk/y")] == ["ext4", "ext4", "tmpfs", "xfs"]


def test_probing_a_disk_leaves_nothing(tmp_path):
    found = spill_facts.collect(tmp_path / "not" / "there")
    assert found.probed == str(tmp_path) and found.write_error == "" and found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written():
    found = spill_facts.collect(Path("/proc/self"))
    assert found.write_error and levels(judge.spill(found, 0)) == {"spill directory": "error"}


def test_leftovers_are_what_nobody_has_open(tmp_path):
    for name in ("dead", "live", "lively", "waited"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spill").write_bytes(b"x" * 5000)
    janitor = ["sh", "-c", "read x", "mooncake-broker", "--clean-up-after", "1", str(tmp_path / "waited")]
    with open(tmp_path / "live" / "spill"), subprocess.Popen(janitor, stdin=subprocess.PIPE):
        found = spill_facts.leftovers(tmp_path)
    assert [Path(x.path).name for x in found] == ["dead", "lively"] and found[0].bytes >= 4096
    assert levels(judge.leftovers(found)) == {"leftover": "warning"}
    assert spill_facts.leftovers(tmp_path / "none") == []


def test_rdma_ports(tmp_path):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "gids" / "0").write_text("fe80:0000:0000:0000:0000:0000:0000:0001\n")
    (port / "gids" / "1").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    assert software_facts.rdma_ports(tmp_path) == (RdmaPort("mlx5_0", 1, "ACTIVE", 1),)
    assert software_facts.rdma_ports(tmp_path / "none") == ()


@pytest.mark.parametrize(("name", "value"), [("CAPACITY_BYTES", "much"), ("CAPACTY_BYTES", "1G"), ("SPILL_DIR", "relative")])
def test_settings_are_checked(name, value):
    found = software_facts.collect({f"MOONCAKE_RAY_{name}": value})
    assert found.config_error and found.config is None
    assert software_facts.collect({"MOONCAKE_RAY_SPILL_DIR": "off"}).config.spill_dir == "off"


def test_a_broker_is_tried(monkeypatch, tmp_path):
    assert software_facts.collect({}).broker_error == ""
    from mooncake_ray._native import pool

    monkeypatch.setattr(pool, "__file__", str(tmp_path / "pool.so"))
    assert "No such file" in software_facts.collect({}).broker_error
    (tmp_path / "mooncake-broker").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "mooncake-broker").chmod(0o755)
    assert "ended with status 3" in software_facts.collect({}).broker_error
    (tmp_path / "mooncake-broker").write_text("#!/bin/sh\necho no memory\nexit 1\n")  # it says why on standard output
    assert software_facts.collect({}).broker_error == "no memory"
    (tmp_path / "mooncake-broker").write_text("#!/bin/sh\nexit 0\n")
    assert "no broker" in software_facts.collect({}).broker_error


# ---- the command


def test_no_spilling():
    assert levels(judge.spill(None, GIB)) == {} and Config(spill_dir="off").spill_root is None
    assert Config(spill_dir="/big").spill_root == Path(f"/big/mooncake_ray-{os.geteuid()}")


def test_lines_say_what_to_do():
    out = doctor.lines([judge.Finding("a", "ok", "fine"), judge.Finding("bcd", "error", "bad", "mend it")])
    assert out == ["ok       a    fine", "error    bcd  bad", "              -> mend it", "", "1 error, 0 warnings, 2 checks"]


def test_status_of_the_command(monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", {**os.environ, "MOONCAKE_RAY_CAPACITY_BYTES": "much"})
    assert main(["doctor", "--json"]) == 1
    out = json.loads(capsys.readouterr().out)
    assert not out["ok"] and [f["check"] for f in out["findings"] if f["level"] == "error"] == ["settings"]


def test_a_leftover_is_told(monkeypatch, capsys, tmp_path):
    (tmp_path / f"mooncake_ray-{os.geteuid()}" / "gone").mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    main(["doctor"])
    assert f"rm -r {tmp_path}/mooncake_ray-{os.geteuid()}/gone" in capsys.readouterr().out
