"""What must not be talked to, asked for or set: a typed error that says what is wrong, the number and the limit."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time

import numpy as np
import pytest

import mooncake_ray
from mooncake_ray.config import Config, machine_bytes
from mooncake_ray.errors import BrokerMismatchError, ConfigError, ObjectNotFoundError, StoreError
from mooncake_ray.store import Store, node

MIB = 1 << 20


@pytest.fixture
def name() -> str:
    return f"test-{secrets.token_hex(8)}"


def listener(name: str) -> socket.socket:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.bind("\0" + node.broker_name(name))
    s.listen()
    return s


def test_a_broker_of_another_version(name):
    with listener(name) as door:

        def refuse() -> None:
            guest, _ = door.accept()
            with guest:
                guest.recv(1 << 16)
                text = b"this broker speaks protocol version 99, the client 2"
                guest.send(struct.pack("<HHIQQQQ", 7, 0, len(text), 0, 0, 0, 0) + text)

        thread = threading.Thread(target=refuse)
        thread.start()
        start = time.monotonic()
        with pytest.raises(BrokerMismatchError, match="protocol version 99, the client 2"):
            Store(name)
        assert time.monotonic() - start < Config().start_timeout_s / 2  # at once: waiting would not help
        thread.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_another_users_socket(name):
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.bind("\0" + f"mooncake_ray/0/{name}")
        door.listen()
        time.sleep(60)
        os._exit(0)
    try:
        end = time.monotonic() + 200
        while True:
            try:
                with pytest.raises(BrokerMismatchError, match=rf"another user's \(its process is {pid}\)"):
                    node.pool.Client.connect(node.broker_name(name), "x")
                break
            except mooncake_ray.BrokerDiedError:  # it does not listen yet
                assert time.monotonic() < end
        with pytest.raises(BrokerMismatchError):
            Store(name)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity_byte": 1 << 30}, "there is no setting capacity_byte; did you mean capacity_bytes?"),
        ({"capacity_bytes": machine_bytes() + 1}, f"capacity_bytes is {machine_bytes() + 1}, more than the {machine_bytes()} bytes"),
        ({"capacity_bytes": 4096}, "at least 1 MiB, got 4096"),
        ({"arena_bytes": 4096}, "at least 1 MiB, got 4096"),
        ({"huge_pages": "yes"}, "huge_pages must be one of auto, hugetlb, never; got 'yes'"),
        ({"numa": "on"}, "numa must be one of auto, off; got 'on'"),
        ({"spill_high": 1.5}, "spill_low <= spill_high <= 1"),
        ({"spill_high": 0.5}, "got 0.65 and 0.5"),
        ({"spill_dir": "here"}, "spill_dir must be an absolute path or 'off', got 'here'"),
        ({"quota_bytes": -1}, "quota_bytes must not be negative, got -1"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ConfigError) as e:
        mooncake_ray.install(**settings)
    assert message in str(e.value)
    assert not mooncake_ray.installed()


def test_a_variable_that_is_no_setting():
    with pytest.raises(ConfigError, match="did you mean MOONCAKE_RAY_SPILL_DIR"):
        Config.from_env({"MOONCAKE_RAY_SPILLDIR": "/tmp"})


def test_what_was_freed_is_not_found(scope):
    store = scope.store()
    key = store.put(np.zeros(MIB, np.uint8))
    store.free([key])
    with pytest.raises(ObjectNotFoundError, match=f"get: no object {key.id.hex()} in this pool"):
        store.get(key)


def test_a_closed_store(scope):
    store = scope.store()
    store.close()
    store.close()
    for use in (store.stats, lambda: store.put(1), lambda: store.create(10), lambda: store.grow(1 << 30)):
        with pytest.raises(StoreError, match="this store is closed"):
            use()
