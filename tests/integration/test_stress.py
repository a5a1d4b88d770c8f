"""The long runs, short: they end well, they end when they are told to, and they can fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from stress import content, soak
from stress.content import Board, CorruptError, Slot

from bench.cluster import unavailable
from bench.processes import family
from mooncake_ray.store import ObjectKey

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stress", *arguments, "--json"]
    plain = {name: value for name, value in os.environ.items() if name != "RAY_RUNTIME_ENV_HOOK" and not name.startswith("MOONCAKE_RAY")}
    environment = {**plain, "PYTHONPATH": str(ROOT / "tests")}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome_of(process: subprocess.Popen[str], timeout_s: float = 280) -> dict:
    out, err = process.communicate(timeout=timeout_s)
    assert out, err
    found = json.loads(out.splitlines()[-1])
    assert (process.returncode == 0) == found["ok"], err
    return found


@pytest.mark.parametrize("more", [pytest.param([], marks=pytest.mark.slow), ["--broker-kills"]])
def test_a_short_storm_over_the_store(more):
    found = outcome_of(start("store", "--seconds", "6", "--kills-per-second", "4", *more))
    assert found["ok"], found
    assert min(found[count] for count in ("kills", "puts", "gets", "spill_written_bytes", "spill_read_bytes")) > 0
    assert not more or found["broker_kills"] > 0


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_short_storm_over_ray():
    found = outcome_of(start("ray", "--seconds", "10"))
    assert found["ok"], found
    assert found["driver_puts"] > 0 and any(count.startswith("kills:") for count in found)


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.skipif(bool(unavailable()), reason=f"no namespaces here: {unavailable()}")
def test_a_short_chaos():
    found = outcome_of(start("chaos", "--seconds", "20"), 800)
    assert found["ok"], found
    assert found["puts"] > 0 and found["gets"] > 0


@pytest.mark.slow
def test_ctrl_c_ends_a_storm_and_its_clients():
    process = start("store", "--seconds", "600")
    assert "puts" in process.stderr.readline()  # it tells of its progress
    all_of_it = family(process.pid)
    assert len(all_of_it) > 5
    process.send_signal(signal.SIGINT)
    found = outcome_of(process)
    assert found["interrupted"] and not found["violations"] and process.returncode == 130
    assert not [pid for pid in all_of_it if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return b"stress" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# ---- what they judge by


@pytest.mark.parametrize("seed", [2, 4])
def test_one_wrong_word_is_seen(seed):
    value = content.value(seed)
    content.check(value)
    content.check(value, seed)
    with pytest.raises(CorruptError, match="got the value of"):
        content.check(value, seed + 4)
    body = np.asarray(value["body"])
    body[body.size // 2] += 1
    with pytest.raises(CorruptError, match=f"1 of {body.size} words"):
        content.check(value)


def test_one_wrong_byte_is_seen():
    seed = 7
    raw = memoryview(bytearray(content.raw_bytes(seed)))
    content.fill_raw(raw, seed)
    content.check_raw(raw, seed)
    raw[-1] ^= 1
    with pytest.raises(CorruptError, match="words are wrong"):
        content.check_raw(raw, seed)
    raw[0] ^= 2
    with pytest.raises(CorruptError, match="got the object of"):
        content.check_raw(raw, seed)


def test_a_torn_slot_names_nothing():
    fd = os.memfd_create("board")
    os.ftruncate(fd, Board.NBYTES)
    board = Board(fd)
    assert board.read(3) is None
    slot = Slot(ObjectKey(b"p" * 16, b"i" * 16), 12)
    board.write(3, slot)
    assert board.read(3) == slot
    at = 3 * Board.NBYTES // Board.SLOTS
    os.pwrite(fd, b"torn", at + 20)
    assert board.read(3) is None
    os.close(fd)


def test_slope():
    assert soak.slope([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx(2)
    assert soak.slope([0, 1, 2, 3], [5, 5, 5, 5]) == 0
    assert soak.slope([1], [5]) == 0
