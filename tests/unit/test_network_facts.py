"""Addresses, devices and tables of `mooncake-ray bench-link`."""

from __future__ import annotations

import re

import pytest

from mooncake_ray.cli import bench_link, main
from mooncake_ray.cli.far_end import other_node
from mooncake_ray.cli.network_facts import device_of, parse_address, way_to
from mooncake_ray.errors import ConfigError
from mooncake_ray.transport.measure import Measured


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node", ("node", 9)),
        ("node:7", ("node", 7)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]:7", ("::1", 7)),
        ("[::1]", ("::1", 9)),
        ("fe80::1", ("fe80::1", 9)),
    ],
)
def test_addresses(text, address):
    assert parse_address(text, 9) == address


@pytest.mark.parametrize("text", ["", ":7", "node:x", "node:65536", "node:-1", "[::1", "[::1]7", "[]:7", "node:7 "])
def test_what_is_no_address(text):
    with pytest.raises(ValueError, match="not an address"):
        parse_address(text)


def test_the_way_to_this_machine():
    assert way_to("127.0.0.1") == ("127.0.0.1", ["lo"])
    assert device_of("198.51.100.1") == "" and device_of("nonsense") == ""


def test_a_table_says_why_a_transport_is_missing():
    found = [
        Measured("tcp", 4096, 1000, 25e-6, 0.0031, 1.6e8, 4, ["eth0 (10 Gbit/s)"]),
        Measured("shm", 1 << 30, 5, 1.25, 2.0, 8e8, 1),
        Measured("verbs", error="no device"),
    ]
    assert bench_link.lines(found) == [
        "TRANSPORT   SIZE     P50      P99  BANDWIDTH  STREAMS  DEVICES",
        "tcp        4 KiB   25 us  3.10 ms  153 MiB/s        4  eth0 (10 Gbit/s)",
        "shm        1 GiB  1.25 s   2.00 s  763 MiB/s        1  -",
        "verbs: not measured: no device",
    ]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "takes one of"),
        (["a:1", "--listen", "b"], "takes one of"),
        (["--ray", "--listen", "b"], "takes one of"),
        (["a:1", "--ray", "--listen", "b"], "takes one of"),
        (["a:1", "--max", "2GiB"], "--max must be from 4 KiB to 1 GiB, got 2 GiB"),
        (["a:1", "--max", "x"], "not a size"),
        (["a:1", "--streams", "0"], "--streams must be from 1 to 64"),
        (["a:x"], "not an address"),
        (["a:1", "--transport", "pigeon"], "no transport 'pigeon'"),
        (["a:1"], "set MOONCAKE_RAY_SECRET"),
    ],
)
def test_wrong_usage(args, text, capsys, monkeypatch):
    monkeypatch.delenv("MOONCAKE_RAY_SECRET", raising=False)
    assert main.main(["bench-link", *args]) == 1
    assert text in capsys.readouterr().err


def nodes(*numbers: int) -> list[dict]:
    return [{"NodeID": f"{n}{n}abc", "NodeManagerAddress": f"10.0.0.{n}", "Alive": n != 9} for n in numbers]


@pytest.mark.parametrize(
    ("there", "wanted", "chosen"),
    [
        ((1, 2), "", 2),
        ((1, 2, 9), "", 2),
        ((1, 2, 3), "10.0.0.3", 3),
        ((1, 2, 3), "33a", 3),
    ],
)
def test_another_node_of_the_cluster(there, wanted, chosen):
    assert other_node(nodes(*there), wanted, "11abc")["NodeManagerAddress"] == f"10.0.0.{chosen}"


@pytest.mark.parametrize(
    ("there", "wanted", "text"),
    [
        ((1, 2, 3), "", "say which node; besides this one the Ray cluster has 10.0.0.2 (22abc), 10.0.0.3 (33abc)"),
        ((1, 9), "", "has no other"),
        ((1, 2), "10.0.0.1", "0 nodes are meant by '10.0.0.1'"),
        ((1, 2), "10.0.0", "0 nodes"),
        ((1, 2, 2), "22", "2 nodes are meant by '22'"),
    ],
)
def test_no_other_node_of_the_cluster(there, wanted, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        other_node(nodes(*there), wanted, "11abc")
