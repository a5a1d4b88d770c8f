"""The hosts that tests of several nodes run on: apart from each other, connected as told, and gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench import cluster
from bench.cluster import Link, Network, NetworkError

ROOT = Path(__file__).resolve().parents[2]
LISTEN = """
import socket
with socket.create_server(("", 7000)) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        connection.sendall(connection.recv(100))
        connection.close()
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), 1) as connection:
    connection.settimeout(1)
    connection.sendall(b"hello")
    assert connection.recv(100) == b"hello"
"""

pytestmark = pytest.mark.skipif(bool(cluster.unavailable()), reason=f"no network namespaces here: {cluster.unavailable()}")


@pytest.fixture
def network():
    with Network(shm_bytes=8 << 20) as network:
        yield network


@pytest.fixture
def pair(network):
    """Two hosts, of which the second answers."""
    hosts = network.add(0), network.add(1)
    with listening(hosts[1]) as server:
        yield hosts
        hosts[1].kill()
        server.wait(20)


def listening(host):
    server = host.popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE)
    assert server.stdout.readline() == b"ready\n"
    return server


def reaches(host, other) -> bool:
    return host.run([sys.executable, "-c", ASK, other.address], check=False).returncode == 0


def test_hosts_reach_each_other_and_nobody_else(pair):
    a, b = pair
    assert reaches(a, b)
    assert set(a.run(["ip", "-br", "link"]).stdout.split()) & {"lo", "eth0@if3", "eth0@if4"}
    assert subprocess.run(["ip", "route", "get", b.address], capture_output=True, text=True, check=False).stdout.count("dev v") == 0
    assert a.run(["ip", "-br", "-4", "addr", "show", "eth0"]).stdout.split()[2] == "198.18.0.1/24"


def test_hosts_have_shared_memory_and_processes_of_their_own(pair):
    a, b = pair
    a.run(["sh", "-c", "echo here >/dev/shm/file; echo here >/mnt/file"])
    assert a.run(["cat", "/dev/shm/file", "/mnt/file"]).stdout == "here\nhere\n"
    assert b.run(["ls", "/dev/shm"]).stdout == ""
    assert not Path("/dev/shm/file").exists() and not Path("/mnt/file").exists()
    assert a.file("/mnt/file").read_text() == "here\n"
    assert b.pids("socket.create_server") and not a.pids("socket.create_server")
    assert "create_server" not in a.run(["sh", "-c", "cat /proc/[0-9]*/cmdline"]).stdout


def test_a_link_is_cut_and_mended(pair):
    a, b = pair
    b.cut()
    assert not reaches(a, b)
    b.mend()
    assert reaches(a, b)


def test_a_link_is_shaped_in_both_directions(pair):
    a, b = pair
    b.shape(Link(bits_per_s=1e9, loss=0.01))
    assert "tbf" in b.run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
    assert "rate 1Gbit" in b.run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
    assert b.link == Link(bits_per_s=1e9, loss=0.01)
    b.shape(Link())
    assert "tbf" not in b.run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
    assert reaches(a, b)


@pytest.mark.parametrize("lossy", [0, 1])
def test_what_is_lost_does_not_arrive(pair, lossy):
    a, b = pair
    pair[lossy].shape(Link(loss=1.0))
    assert not reaches(a, b)
    pair[lossy].shape(Link())
    assert reaches(a, b)


def test_a_delay_is_there_or_refused(pair):
    a, b = pair
    if b.run(["tc", "qdisc", "add", "dev", "lo", "root", "netem"], check=False).returncode == 0:
        b.shape(Link(delay_s=0.3))
        assert "delay 300ms" in b.run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
        return
    with pytest.raises(NetworkError, match="netem"):
        b.shape(Link(delay_s=0.3))
    assert b.link == Link() and reaches(a, b)


@pytest.mark.parametrize("wrong", [{"bits_per_s": 0}, {"loss": 1.5}, {"loss": -0.1}, {"delay_s": -1}])
def test_links_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="must be"):
        Link(**wrong)


def test_a_host_is_killed_and_comes_back(network, pair):
    a, b = pair
    b.kill()
    b.kill()  # again is nothing
    assert not b.alive and not reaches(a, b)
    with pytest.raises(ValueError, match="host 0 is alive"):
        network.add(0)
    again = network.add(1)
    with listening(again) as server:
        assert reaches(a, again)
        server.kill()


def test_stopped_processes_go_on(pair):
    a, b = pair
    assert len(b.signal(signal.SIGSTOP, "create_server")) == 1
    assert not reaches(a, b)
    b.signal(signal.SIGCONT, "create_server")
    assert reaches(a, b)
    b.signal(signal.SIGSTOP)  # and a host whose processes are stopped can be ended


def test_whoever_kills_a_command_ends_it(pair):
    a, _ = pair
    sleeper = a.popen(["sleep", "1000"])
    while not a.pids("^sleep"):
        pass
    sleeper.kill()
    sleeper.wait()
    while a.pids("^sleep"):
        pass


def test_a_killed_program_leaves_no_host():
    """Neither its processes nor its namespaces."""
    code = """
from bench.cluster import Network
network = Network()
host = network.add(0)
host.popen(["sleep", "1000"])
while not host.pids("^sleep"): pass
print(*host.pids(), flush=True)
input()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert pids
        owner.kill()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        pass


@pytest.mark.slow
def test_a_task_gets_what_was_put_on_another_node(cluster_of):
    nodes = cluster_of(2)
    program = """
import ray, numpy as np
ray.init(log_to_driver=False)
there = ray.remote(lambda a: (ray.util.get_node_ip_address(), int(a.sum()))).options(resources={"node1": 0.1})
print(*ray.get(there.remote(ray.put(np.arange(1 << 20)))), flush=True)
"""
    expected = f"198.18.0.2 {sum(range(1 << 20))}"
    assert nodes.program(0, program).split("\n")[-2] == expected
    nodes.kill_node(1)
    nodes.start_node(1)
    assert nodes.program(0, program).split("\n")[-2] == expected
