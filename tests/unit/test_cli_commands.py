"""The command line as a program, on pools that live."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mooncake_ray.store import node

COMMAND = str(Path(sys.executable).with_name("mooncake-ray"))


def run(*args: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([COMMAND, *args], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture
def batch(store):
    """One object, and one view of it."""
    key = store.put({"x": np.ones(1 << 18)})
    views = [store.get(key)]
    yield
    views.clear()
    store.free([key])


def test_status(scope, batch):
    out = run("status", "--scope", scope.name).stdout
    assert out.startswith(f"pool {scope.name}") and "1 object, 0 leases, 1 pin (2.0 MiB)" in out and "mooncake-ray" not in out


def test_status_lists_every_pool(scope, batch):
    other = type(scope)()
    other.store()
    try:
        done = subprocess.run([COMMAND, "status"], capture_output=True, text=True, timeout=200, check=False)  # 1, if another's pool is ill
        assert f"pool {scope.name}" in done.stdout and f"pool {other.name}" in done.stdout, done.stderr
    finally:
        other.close()


def test_status_as_json(scope, batch):
    (found,) = json.loads(run("status", "--json", "--scope", scope.name).stdout)["pools"]
    assert found["scope"] == scope.name and found["error"] is None and found["stats"]["pins"] == 1


def test_no_such_pool(scope):
    assert "no pool nowhere of this user is running" in run("status", "--scope", "nowhere", status=1).stdout
    assert json.loads(run("status", "--json", "--scope", "nowhere", status=1).stdout) == {"pools": []}
    assert scope.brokers() == [], "looking must not start a broker"


def test_looking_again_and_again_does_not_keep_a_broker(scope, tmp_path):
    scope.store(linger_s=1.0)
    said = tmp_path / "said"
    with said.open("w") as out:
        watch = subprocess.Popen([COMMAND, "status", "--watch", "0.1", "--scope", scope.name], stdout=out)
    try:
        scope.eventually(lambda: f"pool {scope.name}" in said.read_text())
        scope.close()
        scope.eventually(lambda: f"no pool {scope.name}" in said.read_text())
    finally:
        watch.send_signal(signal.SIGINT)
        watch.wait()


def test_a_pool_that_nobody_uses_is_not_asked(scope):
    scope.store(linger_s=1000)
    (pid,) = scope.brokers()
    scope.close()
    scope.eventually(lambda: "idle: nobody is connected" in run("status", "--scope", scope.name).stdout)
    os.kill(pid, signal.SIGKILL)


def test_ctrl_c(scope, batch):
    watch = subprocess.Popen(
        [COMMAND, "status", "--watch", "--scope", scope.name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert watch.stdout.readline().startswith("--- "), "plain lines, if nobody sees a screen"
    assert watch.stdout.readline().startswith(f"pool {scope.name}  (pid ")
    watch.send_signal(signal.SIGINT)
    _, err = watch.communicate(timeout=200)
    assert (watch.returncode, err) == (130, "")


def test_a_broker_that_does_not_answer():
    """Here: something that listens under a pool's name, and hangs up."""
    scope = f"test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        listener.bind("\0" + node.broker_name(scope))
        listener.listen()
        listener.settimeout(30)
        peer.connect("\0" + node.broker_name(scope))
        command = subprocess.Popen([COMMAND, "status", "--scope", scope], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with listener.accept()[0]:
            listener.accept()[0].close()
        out, err = command.communicate(timeout=200)
    assert (command.returncode, err) == (1, "") and f"pool {scope}\n  does not answer: " in out


@pytest.mark.parametrize("args", [["status"], ["memory"], ["doctor"], ["--help"]])
def test_starts_without_the_heavy_imports(args):
    code = (
        "import sys\nfrom mooncake_ray.cli.main import main\n"
        f"try: main({args!r})\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'ray', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout


@pytest.mark.parametrize("args", [[], ["status"], ["memory"], ["doctor"], ["grafana"]])
def test_help(args):
    assert run(*args, "--help").stdout.startswith("usage: mooncake-ray")


@pytest.mark.parametrize(
    "args",
    [[], ["nonsense"], ["status", "--watch", "0"], ["status", "--watch", "--json"], ["status", "--watch", "x"], ["memory", "--sort", "x"]],
)
def test_usage(args):
    done = run(*args, status=2)
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_a_reader_that_has_seen_enough():
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([COMMAND, "grafana"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=200, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_is_quick():
    """What takes seconds to import is not imported to look at a pool."""
    program = (
        "import sys; from mooncake_ray.cli.main import main; status = main(); print(status, sorted({'ray', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "status", "--scope", "nowhere"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.endswith("1 []\n"), done
