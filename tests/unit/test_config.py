"""Settings: defaults, environment, limits."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_ray.config import Config, machine_bytes, parse_bytes
from mooncake_ray.errors import ConfigError, MooncakeRayError
from mooncake_ray.machine import address_in
from mooncake_ray.store import node


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1073741824", 1 << 30),
        ("512M", 512 << 20),
        ("512m", 512 << 20),
        ("512MB", 512 << 20),
        ("8GiB", 8 << 30),
        (" 8 GiB ", 8 << 30),
        ("1.5K", 1536),
        ("2T", 2 << 40),
        ("100B", 100),
    ],
)
def test_parse_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "M",
        "12Q",
        "1.2.3",
        "lots",
        "0x10",
        "B",
        "-1",
        "-1M",
        "nan",
        "inf",
        "1e999",
    ],
)
def test_parse_bytes_refuses(text):
    with pytest.raises(ConfigError) as e:
        parse_bytes(text)
    assert text in str(e.value)


@given(st.integers(0, 1 << 50), st.sampled_from(["", "K", "M", "G"]), st.sampled_from(["", "B", "iB"]))
def test_parse_bytes_of_whole_numbers_is_exact(number, unit, suffix):
    # A double holds whole numbers up to 2**53.
    assert parse_bytes(f"{number}{unit}{suffix}") == number * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[unit]


@given(st.text())
def test_parse_bytes_raises_nothing_else(text):
    with contextlib.suppress(ConfigError):
        assert parse_bytes(text) >= 0


def test_defaults():
    config = Config()
    assert config == Config.from_env({})
    assert config.enabled
    assert config.pool_bytes == machine_bytes() * 3 // 10
    assert Config(capacity_bytes=5 << 20).pool_bytes == 5 << 20
    with pytest.raises(AttributeError):
        config.enabled = False


def test_environment():
    env = {
        "MOONCAKE_RAY_CAPACITY_BYTES": "64M",
        "MOONCAKE_RAY_PREFAULT_BYTES": "16MiB",
        "MOONCAKE_RAY_MIN_BYTES": "2000",
        "MOONCAKE_RAY_PUT_TIMEOUT_S": "0.5",
        "MOONCAKE_RAY_START_TIMEOUT_S": "7",
        "MOONCAKE_RAY_LINGER_S": "1e-1",
        "MOONCAKE_RAY_ENABLED": "1",
        "UNRELATED": "?",
    }
    expected = Config(
        capacity_bytes=64 << 20,
        prefault_bytes=16 << 20,
        min_bytes=2000,
        put_timeout_s=0.5,
        start_timeout_s=7.0,
        linger_s=0.1,
        enabled=True,
    )
    assert Config.from_env(env) == expected
    assert Config.from_env(env, min_bytes=5, enabled=False) == Config.from_env(
        env | {"MOONCAKE_RAY_MIN_BYTES": "5", "MOONCAKE_RAY_ENABLED": "0"}
    )


def test_the_process_environment_is_read(monkeypatch):
    monkeypatch.setenv("MOONCAKE_RAY_MIN_BYTES", "123")
    assert Config.from_env().min_bytes == 123
    assert Config().min_bytes != 123


@pytest.mark.parametrize(
    ("env", "enabled"),
    [
        ({}, True),
        ({"MOONCAKE_RAY_ENABLED": "0"}, False),
        ({"MOONCAKE_RAY_ENABLED": "False"}, False),
        ({"MOONCAKE_RAY_ENABLED": " off "}, False),
        ({"MOONCAKE_RAY_ENABLED": "no"}, False),
        ({"MOONCAKE_RAY_ENABLED": "true"}, True),
        ({"MOONCAKE_RAY": "0"}, False),
        ({"MOONCAKE_RAY": "1"}, True),
        ({"MOONCAKE_RAY": "0", "MOONCAKE_RAY_ENABLED": "1"}, False),
    ],
)
def test_enabled(env, enabled):
    assert Config.from_env(env).enabled is enabled


@pytest.mark.parametrize("name", ["CAPACITY_BYTES", "PREFAULT_BYTES", "MIN_BYTES", "PUT_TIMEOUT_S", "START_TIMEOUT_S", "LINGER_S"])
@pytest.mark.parametrize("text", ["", "many", "-1"])
def test_a_bad_variable_is_named(name, text):
    with pytest.raises(ConfigError, match=name.lower() if text == "-1" and name.endswith("_S") else f"MOONCAKE_RAY_{name}"):
        Config.from_env({f"MOONCAKE_RAY_{name}": text})


@pytest.mark.parametrize("field", ["capacity_bytes", "prefault_bytes", "min_bytes", "put_timeout_s", "start_timeout_s", "linger_s"])
def test_nothing_is_negative(field):
    with pytest.raises(ConfigError, match=f"{field} must not be negative, got -1"):
        Config(**{field: -1})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_duration_is_finite(value):
    with pytest.raises(ConfigError):
        Config(linger_s=value)


def test_capacity_has_limits():
    with pytest.raises(ConfigError, match="at least 1 MiB"):
        Config(capacity_bytes=(1 << 20) - 1)
    with pytest.raises(ConfigError, match=f"more than the {machine_bytes()} bytes"):
        Config(capacity_bytes=machine_bytes() + 1)
    assert Config(capacity_bytes=1 << 20).pool_bytes == 1 << 20
    with pytest.raises(ConfigError):
        Config.from_env({"MOONCAKE_RAY_CAPACITY_BYTES": "1000T"})


def test_errors_are_what_a_caller_expects():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, MooncakeRayError)


def test_a_scope_has_to_fit_into_a_socket_name():
    assert node.broker_name("x").endswith("/x")
    node.broker_name("x" * 60)
    for scope in ("x" * 100, "é" * 60):
        with pytest.raises(ValueError, match=r"scope too long: \d+ bytes of 100"):
            node.broker_name(scope)


def test_hosts_are_addresses_or_networks():
    assert Config(host="10.1.0.0/16").host == "10.1.0.0/16" and Config(host="10.1.2.3/16").host and Config(host="fd00::/8").host
    for wrong in ("10.1.0.0/33", "10.1/16/2", "ten/8"):
        with pytest.raises(ConfigError, match="host must be an address or a network"):
            Config(host=wrong)


def test_the_machines_address_in_a_network():
    assert address_in("127.0.0.0/8") == address_in("127.0.0.1/32") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"no address in the network 198\.51\.100\.0/24"):
        address_in("198.51.100.0/24")  # kept for documents
