"""`mooncake-ray bench-link`, its two ends as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("mooncake_ray._native.peer")

COMMAND = [sys.executable, "-c", "from mooncake_ray.cli.main import main; raise SystemExit(main())", "bench-link"]
LIMIT_S = 120


def environ(**more: str) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if not k.startswith("MOONCAKE_RAY_")}, **more}


class Listening:
    def __init__(self, *args: str, **env: str) -> None:
        command = [*COMMAND, "--listen", "127.0.0.1", "--max", "1MiB", "--json", *args]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ(**env))
        line = self.process.stdout.readline()
        assert line, self.process.communicate()
        self.facts: dict[str, Any] = json.loads(line)

    def measure(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, self.facts["listening"], "--max", "1MiB", *args]
        return subprocess.run(command, capture_output=True, text=True, env=environ(**env), timeout=LIMIT_S)

    def interrupt(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, err


@pytest.fixture
def listening() -> Iterator[Listening]:
    end = Listening()
    yield end
    end.process.kill()
    end.process.communicate()


def test_two_ends(listening):
    assert listening.facts["token"].isalnum(), "as an argument it could be taken for an option"
    done = listening.measure("--json", "--streams", "2", MOONCAKE_RAY_SECRET=listening.facts["token"])
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    for name in ("tcp", "shm"):
        rows = [r for r in results if r["transport"] == name]
        assert [r["nbytes"] for r in rows] == [4096, 65536, 1 << 20], rows
        for r in rows:
            assert not r["error"] and r["runs"] >= 5
            assert 0 < r["p50_s"] <= r["p99_s"] and r["bytes_per_s"] == pytest.approx(r["nbytes"] / r["p50_s"])
            assert (r["streams"], r["nics"]) == ((2, ["lo"]) if name == "tcp" else (1, []))
    assert "tcp: 4096 bytes" in done.stderr, "it says how far it is"
    again = listening.measure("--transport", "tcp", "--token", listening.facts["token"])
    assert again.returncode == 0 and again.stdout.startswith("TRANSPORT") and "shm" not in again.stdout, again.stderr
    code, err = listening.interrupt()
    assert code == 130 and not err


def test_what_one_end_lacks_is_said(listening):
    done = listening.measure("--transport", "loopback", MOONCAKE_RAY_SECRET=listening.facts["token"])
    assert done.returncode == 1
    assert "loopback: not measured: no transport 'loopback' between these two" in done.stdout and "it is not offered" in done.stdout


def test_another_secret(listening):
    done = listening.measure("--json", MOONCAKE_RAY_SECRET="not-the-secret")
    assert done.returncode == 1 and not done.stdout
    assert len(done.stderr.strip().splitlines()) == 1 and listening.facts["token"] not in done.stderr + done.stdout


def test_a_secret_that_was_set_is_not_printed():
    end = Listening(MOONCAKE_RAY_SECRET="agreed-before-hand-1234")
    try:
        assert set(end.facts) == {"listening"}
        done = end.measure("--transport", "tcp", "--json", MOONCAKE_RAY_SECRET="agreed-before-hand-1234")
        assert done.returncode == 0, done.stderr
    finally:
        assert end.interrupt()[0] == 130


def test_nobody_is_there():
    command = [*COMMAND, "127.0.0.1:1", "--token", "x" * 32]
    done = subprocess.run(command, capture_output=True, text=True, env=environ(), timeout=LIMIT_S)
    assert done.returncode == 1 and done.stderr.startswith("mooncake-ray: ") and "127.0.0.1:1" in done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_not_on_every_address(host):
    done = subprocess.run([*COMMAND, "--listen", host, "--max", "64K"], capture_output=True, text=True, env=environ(), timeout=LIMIT_S)
    assert done.returncode == 1 and "cannot listen" in done.stderr, done.stderr
