"""What goes wrong with RDMA, and what is left then."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from pairs import GUARD, MIB, SESSION, TIMEOUT_S, Pair, memory

from mooncake_ray.config import Config
from mooncake_ray.errors import PeerLostError, RegistrationError, TransportError, TransportUnavailableError
from mooncake_ray.store import gpudirect
from mooncake_ray.transport import Memory, get_transport

QUICK = {"timeout": 16, "retries": 3}  # a peer that does not answer is given up after a second: a busy one is not
PATIENT = {"timeout": 20, "retries": 6}  # after half a minute


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def pair_with():
    pairs = []

    def make(*args, **kwargs):
        pairs.append(Pair(*args, **kwargs))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def wrong_keys(description):
    for region in description["regions"]:
        for piece in region[3]:
            piece[2] = [key ^ 0xFF for key in piece[2]]


def larger_region(description):
    for region in description["regions"]:
        region[2] += MIB
        region[3][-1][1] += MIB


def test_a_wrong_key_is_refused_and_a_new_connection_works(pair):
    connection = pair.connect(wrong_keys)
    with pytest.raises(TransportError, match="remote access error") as refused:
        connection.read(pair.ranges((0, 0, 4096)), TIMEOUT_S)
    assert not isinstance(refused.value, PeerLostError)
    assert (refused.value.op, refused.value.errno, refused.value.peer) == ("read", errno.EREMOTEIO, "there:1")
    assert (pair.target == GUARD).all()
    with pytest.raises(TransportError, match=r"closed: .*remote access error"):
        connection.read(pair.ranges((0, 0, 4096)), TIMEOUT_S)
    pair.read_all(pair.connect())


def test_out_of_the_peers_bounds_is_refused_by_its_device(pair):
    connection = pair.connect(larger_region)
    nbytes = pair.source.nbytes
    with pytest.raises(TransportError, match="remote access error"):
        connection.read(pair.ranges((nbytes - 100, 0, 200)), TIMEOUT_S)
    assert (pair.target[200:] == GUARD).all()
    pair.read_all(pair.connect())


def test_memory_that_is_not_registered_here(pair):
    connection = pair.connect()
    other = memory(4096, GUARD)
    ranges = pair.ranges((0, 0, 4096))
    ranges[0, 2] = other.ctypes.data
    with pytest.raises(TransportError, match="not registered") as refused:
        connection.read(ranges, TIMEOUT_S)
    assert refused.value.errno == errno.EINVAL
    ranges = pair.ranges((0, pair.target.nbytes - 100, 101))
    with pytest.raises(TransportError, match="not registered"):
        connection.read(ranges, TIMEOUT_S)
    pair.read_all(connection)


def test_a_peer_that_went_away(pair_with):
    pair = pair_with(here=QUICK)
    connection = pair.connect()
    pair.read_all(connection)
    pair.there.ended(SESSION)
    with pytest.raises(PeerLostError, match="transport retry counter exceeded") as lost:
        connection.read(pair.ranges((0, 0, 4096)), TIMEOUT_S)
    assert lost.value.peer == "there:1"
    pair.read_all(pair.connect())


def test_the_deadline_of_a_read(pair_with):
    pair = pair_with(here=PATIENT)
    connection = pair.connect()
    pair.there.ended(SESSION)
    start = time.monotonic()
    with pytest.raises(TransportError, match=r"within 0\.5 s") as late:
        connection.read(pair.ranges((0, 0, MIB)), 0.5)
    assert late.value.errno == errno.ETIMEDOUT
    assert 0.5 <= time.monotonic() - start < 20, "not the deadline, but the device ended it"
    assert (pair.target == GUARD).all()


def test_a_read_that_waits_for_its_turn_waits_no_longer_than_its_deadline(pair_with):
    pair = pair_with(here=PATIENT)
    connection = pair.connect()
    pair.there.ended(SESSION)
    outcomes = []

    def read(timeout_s):
        try:
            connection.read(pair.ranges((0, 0, MIB)), timeout_s)
        except TransportError as e:
            outcomes.append((timeout_s, e.errno))

    threads = [threading.Thread(target=read, args=(s,)) for s in (TIMEOUT_S, 0.2)]
    threads[0].start()
    while not is_asleep(threads[0].native_id):  # it has its turn
        assert threads[0].is_alive()
    threads[1].start()
    threads[1].join(TIMEOUT_S)
    assert outcomes == [(0.2, errno.ETIMEDOUT)]
    assert threads[0].is_alive()
    connection.close()
    threads[0].join(TIMEOUT_S)
    assert outcomes[1:] == [(TIMEOUT_S, errno.ECANCELED)]


@pytest.mark.parametrize("at", ["here", "there", "both"])
@pytest.mark.parametrize("most", [2 * MIB, 100_000])
def test_registered_in_pieces(pair_with, at, most):
    options = {"largest_registration": most}
    pair = pair_with(5 * MIB, here=options if at != "there" else {}, there=options if at != "here" else {})
    pieces = pair.there.describe()["regions"][0][3]
    assert (len(pieces) > 2) == (at != "here")
    assert sum(nbytes for _, nbytes, _ in pieces) == 5 * MIB
    connection = pair.connect()
    pair.read_all(connection)
    pair.target[:] = GUARD
    ranges = pair.ranges((99_999, 3, 100_002), (2 * MIB - 7, MIB - 1, 2 * MIB + 9))
    connection.read(ranges, TIMEOUT_S)
    np.testing.assert_array_equal(pair.target[3 : 3 + 100_002], pair.source[99_999 : 99_999 + 100_002])
    np.testing.assert_array_equal(pair.target[MIB - 1 : 3 * MIB + 8], pair.source[2 * MIB - 7 : 4 * MIB + 2])
    assert (pair.target[:3] == GUARD).all() and (pair.target[3 * MIB + 8 :] == GUARD).all()


def test_a_description_that_lies_about_its_pieces(pair):
    def gap(description):
        description["regions"][0][3][0][1] -= 4096

    def few_keys(description):
        description["regions"][0][3][0][2] = []

    for lie in (gap, few_keys):
        with pytest.raises(PeerLostError, match="not understood"):
            pair.connect(lie)


def test_a_port_on_another_kind_of_network(pair):
    def infiniband(description):
        for rail in description["rails"]:
            rail["ethernet"] = False

    with pytest.raises(TransportUnavailableError, match=r"198\.18\.0\.1.* reaches"):
        pair.connect(infiniband)


def test_a_peer_that_refuses(pair):
    with pytest.raises(TransportError, match="there:1 refused") as refused:
        pair.connect(exchange=lambda blob: b"")
    assert refused.value.errno == errno.ECONNREFUSED
    pair.read_all(pair.connect())


def test_old_connections_make_room(pair):
    """What a closed connection had at the peer goes when the next one comes; open ones stay, and their number has a limit."""
    for _ in range(70):
        last = pair.connect()
        last.close()
    held = [pair.connect() for _ in range(64)]
    with pytest.raises(TransportError, match="at most 64 connections"):
        pair.connect()
    held.pop().close()
    pair.read_all(pair.connect())
    pair.read_all(held[0])


def test_requests_that_are_not_understood(pair):
    good = {}
    pair.connect(exchange=lambda blob: good.update(json.loads(blob)) or pair.there.accept(SESSION, blob))
    queue = good["queues"][0]
    for queues in (
        [],
        [queue] * 300,
        [[9, *queue[1:]]],
        [[0, 9, *queue[2:]]],
        [[0, 0, 1 << 24, 0]],
        [[0, 0, -1, 0]],
        [[0, 0, "x", 0]],
        [5],
    ):
        with pytest.raises(TransportError, match="not understood"):
            pair.there.accept(SESSION, json.dumps({**good, "queues": queues}).encode())
    for change in ({"gid": "00"}, {"mtu": 77}, {"lid": -1}, {"ethernet": None, "gid": 5}):
        rails = [{**good["rails"][0], **change}]
        with pytest.raises(TransportError, match="not understood"):
            pair.there.accept(SESSION, json.dumps({**good, "rails": rails}).encode())
    pair.read_all(pair.connect())


def is_asleep(pid):
    """Whether a process or thread waits for something."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def in_a_process(body: str, **popen) -> subprocess.Popen:
    code = "import ctypes, errno, os, resource, signal, sys\nfrom pairs import *\nfrom mooncake_ray.errors import *\n" + body
    path = f"{Path(__file__).parent}:{Path(__file__).parents[2]}"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )


def said(process: subprocess.Popen) -> list[str]:
    out, err = process.communicate(timeout=TIMEOUT_S * 2)
    assert process.returncode == 0, out + err
    return out.splitlines()


def test_ctrl_c_ends_a_read():
    process = in_a_process(
        "pair = Pair(here={'timeout': 20})\nconnection = pair.connect()\npair.there.ended(SESSION)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n    print('reading', flush=True)\n    connection.read(pair.ranges((0, 0, MIB)), 600)\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n"
        "try:\n    connection.read(pair.ranges((0, 0, 1)), 600)\nexcept TransportError as e:\n    print(e)\npair.close()\n"
    )
    assert process.stdout.readline() == "reading\n"
    while not is_asleep(process.pid):  # it waits for the device
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    first, second = said(process)
    assert first == "interrupted"
    assert "interrupted" in second


def test_locked_memory_is_limited():
    asked, limit = 16 * MIB, 8 * MIB
    out = said(
        in_a_process(
            "verbs = get_transport('verbs')(Config())\n"
            f"resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit}, {limit}))\nos.setuid(65534)\n"
            f"held = memory({asked}, 0)\n"
            f"verbs.register(Memory(0, held.ctypes.data, {MIB}))\n"
            f"try:\n    verbs.register(Memory(1, held.ctypes.data + {MIB}, {asked - MIB}))\n"
            "except RegistrationError as e:\n    print(e.errno == errno.ENOMEM, e)\n"
            "print(len(verbs.describe()['regions']))\nverbs.close()\n"
        )
    )
    assert out[0].startswith("True")
    for number in (asked - MIB, limit, MIB):
        assert f"{number} bytes" in out[0]
    assert "RLIMIT_MEMLOCK" in out[0]
    assert out[1] == "1"


def test_a_registration_that_fails_half_way_leaves_what_can_be_closed():
    most = 4 * MIB
    out = said(
        in_a_process(
            f"verbs = get_transport('verbs')(Config(), largest_registration={most})\n"
            f"resource.setrlimit(resource.RLIMIT_MEMLOCK, ({3 * most}, {3 * most}))\nos.setuid(65534)\n"
            f"held = memory({5 * most}, 0)\n"
            "for _ in '12':\n"
            f"    try:\n        verbs.register(Memory(1, held.ctypes.data, {5 * most}))\n"
            "    except RegistrationError as e:\n        print(e)\n"
            "print(verbs.describe()['regions'])\nverbs.close()\n"
            f"again = get_transport('verbs')(Config())\nagain.register(Memory(1, held.ctypes.data, {2 * most}))\nagain.close()\n"
        )
    )
    for number in (most, 3 * most):
        assert f"{number} bytes" in out[0]
    assert f"all {5 * most} bytes" in out[0]
    assert out[1:] == [out[0], "[]"], "what was registered before the failure is in the way"


def test_registering_what_is_registered(pair):
    at = pair.target.ctypes.data
    for address, nbytes in ((at, pair.target.nbytes), (at + MIB, 4096), (at - 4096, 8192)):
        with pytest.raises(RegistrationError):
            pair.here.register(Memory(9, address, nbytes))
    pair.read_all(pair.connect())


def test_a_dma_buf_that_is_none(pair):
    native = pair.here._rails
    with open("/dev/zero", "rb") as file, pytest.raises(RegistrationError, match="rxe0 cannot register 8192 bytes") as refused:
        native.register_dmabuf(file.fileno(), 0, 1 << 40, 8192)
    assert refused.value.op == "ibv_reg_dmabuf_mr" and refused.value.errno
    pair.read_all(pair.connect())


@pytest.mark.gpu
@pytest.mark.skipif(bool(gpudirect.unsupported()), reason=gpudirect.unsupported() or "there is a device")
def test_memory_of_a_gpu(pair):
    """From this machine's memory into a GPU's, and back."""
    import torch

    there, back = (torch.zeros(pair.target.nbytes, dtype=torch.uint8, device="cuda") for _ in "12")
    pair.here.register(Memory(6, there.data_ptr(), there.nbytes, device=0))
    ranges = pair.ranges((0, 0, there.nbytes))
    ranges[0, 2] = there.data_ptr()
    pair.connect().read(ranges, TIMEOUT_S)
    np.testing.assert_array_equal(there.cpu().numpy(), pair.source)
    back[:] = there.flip(0)
    torch.cuda.synchronize()
    pair.there.register(Memory(6, back.data_ptr(), back.nbytes, device=0))
    ranges = pair.ranges((0, 0, back.nbytes))
    ranges[0, 0] = 6
    pair.connect().read(ranges, TIMEOUT_S)
    np.testing.assert_array_equal(pair.target, pair.source[::-1])


def test_registering_what_is_not_mapped(pair):
    with pytest.raises(RegistrationError, match="Bad address"):
        pair.here.register(Memory(9, 4096, 4096))


def test_a_forked_child_may_not_use_it_and_does_not_harm_it():
    out = said(
        in_a_process(
            "pair = Pair()\nconnection = pair.connect()\npair.read_all(connection)\npid = os.fork()\n"
            "if pid == 0:\n"
            "    refused = 0\n"
            "    read, register = lambda: connection.read(pair.ranges((0, 0, 1)), 1), lambda: pair.here.register(Memory(5, 4096, 4096))\n"
            "    for what in (read, pair.connect, register):\n"
            "        try:\n            what()\n        except TransportError as e:\n            refused += 'fork' in str(e)\n"
            "    pair.close()\n    del connection, pair\n"
            "    sys.stdout.flush()\n    os._exit(refused)\n"
            "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
            "pair.source[:] = 77\npair.read_all(connection)\npair.close()\n"
        )
    )
    assert out == ["3"]


def test_unknown_devices():
    config = Config(rdma_devices="mlx5_9, nothing:2")
    assert "mlx5_9" in get_transport("verbs").unavailable(config)
    with pytest.raises(TransportUnavailableError, match="mlx5_9"):
        get_transport("verbs")(config)
