"""The leak detector, on leaks of every kind. What each of these tests leaves behind, it cleans up when it has been told."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from mooncake_ray import testing
from mooncake_ray.testing import Allowed

SOON = Allowed(deadline_s=0.1)


@pytest.fixture
def undo():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def store(store):
    """One that has its pool mapped already, as any that was used has."""
    store.free([store.put({"x": np.ones(1 << 16)})])
    key = store.put({"x": np.ones(1 << 16)})
    store.get(key)
    store.free([key])
    return store


class Watch:
    """What was left behind since it was made."""

    def __init__(self):
        self.before = testing.measure()

    def left(self, allowed=SOON):
        return testing.find(self.before, allowed)


def test_nothing(store):
    watch = Watch()
    key = store.put({"x": np.ones(1 << 16)})
    view = store.get(key)
    with open("/dev/null"):
        pass
    del view
    store.free([key])
    assert watch.left(Allowed()) == []


def test_a_lease(store):
    watch = Watch()
    lease = store.create(1 << 20)
    assert "1 leases or pins of this process" in watch.left()
    lease.abort()
    assert watch.left(Allowed()) == []


def test_a_pin(store):
    key = store.put({"x": np.ones(1 << 16)})
    watch = Watch()
    view = store.get(key)
    left = watch.left()
    assert "1 leases or pins of this process" in left and any("of a pool's memory" in line for line in left)
    del view
    assert watch.left(Allowed()) == []


def test_a_view_in_a_cycle_is_no_leak(store):
    key = store.put({"x": np.ones(1 << 16)})
    watch = Watch()
    ring = [store.get(key)]
    ring.append(ring)
    del ring
    assert watch.left(Allowed()) == []


def test_pages(store, scope):
    watch = Watch()
    key = store.put({"x": np.ones(1 << 17)})
    (line,) = watch.left()
    nbytes = int(line.split()[0])
    assert line.endswith(f"bytes in pool mooncake_ray/{os.geteuid()}/{scope.name}") and nbytes >= 1 << 20
    assert watch.left(Allowed(pool_bytes=nbytes)) == [] and watch.left(Allowed(pool_bytes=nbytes - 1, deadline_s=0.1)) == [line]
    store.free([key])
    assert watch.left(Allowed()) == []


def test_a_file_descriptor(undo, tmp_path):
    watch = Watch()
    fd = os.open(tmp_path / "forgotten", os.O_CREAT)
    undo.callback(os.close, fd)
    assert watch.left() == [f"file descriptor {fd} -> {tmp_path}/forgotten"]
    assert watch.left(Allowed(descriptors=("*/forgotten",), deadline_s=0.1)) == []


def test_a_file_in_shared_memory(undo):
    watch = Watch()
    path = Path(f"/dev/shm/test-leaks-{os.getpid()}")
    undo.callback(path.unlink)
    path.write_bytes(b"x" * 5000)
    assert watch.left() == [f"file {path} (8192 bytes)"]


def test_a_file_that_another_program_uses_is_not_ours(undo):
    """As on a machine where others run, too. Their environment lacks our mark, and we are not their parent."""
    watch = Watch()
    path = f"/dev/shm/test-leaks-{os.getpid()}"
    code = f"import sys, time; f = open({path!r}, 'w'); print(flush=True); sys.stdin.read()"
    start = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}])"
    read, write = os.pipe()
    undo.callback(os.unlink, path)
    env = {k: v for k, v in os.environ.items() if k != testing._MARK}
    with subprocess.Popen([sys.executable, "-c", start], env=env, stdin=read, stdout=subprocess.PIPE) as child:
        os.close(read)
        child.stdout.readline()
        child.wait()
        try:
            assert [line for line in watch.left() if path in line] == []
        finally:
            os.close(write)


def test_a_file_that_was_spilled(undo, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    watch = Watch()
    spilled = tmp_path / f"mooncake_ray-{os.geteuid()}" / "scope"
    spilled.mkdir(parents=True)
    (spilled / "0").write_bytes(b"x")
    assert watch.left() == [f"file {spilled} (4096 bytes)", f"file {spilled}/0 (4096 bytes)"]


def test_a_thread(undo):
    end = threading.Event()
    watch = Watch()
    thread = threading.Thread(target=end.wait, name="forgotten")
    thread.start()
    undo.callback(thread.join)
    undo.callback(end.set)
    assert watch.left() == ["thread 'forgotten'"]
    assert watch.left(Allowed(threads=("forg*",), deadline_s=0.1)) == []


def test_a_child(undo):
    watch = Watch()
    child = subprocess.Popen(["sleep", "1000"])
    undo.callback(child.wait)
    undo.callback(child.kill)
    assert watch.left() == [f"process {child.pid}: sleep 1000"]
    assert watch.left(Allowed(processes=("sleep *",), deadline_s=0.1)) == []


def test_a_child_that_nobody_waited_for(undo):
    watch = Watch()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    undo.callback(os.waitpid, pid, 0)
    assert watch.left() == [f"process {pid}: (a zombie, which nobody waited for)"]


def test_a_grandchild(undo):
    """Its parent is gone; it is known by the environment."""
    watch = Watch()
    child = subprocess.run(["sh", "-c", "sleep 1000 >/dev/null & echo $!"], stdout=subprocess.PIPE, text=True, check=True)
    pid = int(child.stdout)
    undo.callback(os.kill, pid, 9)
    assert watch.left() == [f"process {pid}: sleep 1000"]


def test_a_broker(scope):
    watch = Watch()
    store = scope.store(linger_s=1000)
    (pid,) = scope.brokers()
    del store
    scope.close()
    (line,) = [line for line in watch.left() if "broker" in line]
    assert line.startswith(f"broker {pid}: ") and f"--name mooncake_ray/{os.geteuid()}/{scope.name}" in line
    os.kill(pid, 9)
    assert watch.left(Allowed()) == []


def test_what_a_broker_of_before_spills_is_its_own(scope, tmp_path, monkeypatch):
    monkeypatch.setenv("MOONCAKE_RAY_SPILL_DIR", str(tmp_path))
    store = scope.store(spill_dir=str(tmp_path))
    watch = Watch()
    keys = [store.put({"x": np.ones(1 << 19)}) for _ in range(12)]  # 48 MiB of 32
    scope.eventually(lambda: list(tmp_path.glob("*/*/data")))
    store.free(keys)
    del store
    scope.stores[0].close()
    assert watch.left(Allowed(deadline_s=0.1, descriptors=("*",), maps=("*",))) == []
    scope.close()
    assert watch.left(Allowed()) == []


def test_a_broker_that_lingers_is_waited_for(scope):
    watch = Watch()
    scope.store()
    scope.close()
    assert watch.left(Allowed()) == []


# ---- as a plugin


def run_pytest(tmp_path: Path, test: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['mooncake_ray.testing']")
    head = "import pytest, threading\nfrom mooncake_ray.testing import Allowed\nend = threading.Event()\n"
    start = "def start(): threading.Thread(target=end.wait, name='forgotten', daemon=True).start()\n"
    allow = "@pytest.fixture\ndef leaks_allowed(): return Allowed(threads=ALLOWED, deadline_s=0.2)\n"
    (tmp_path / "test_it.py").write_text(head + start + allow + test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)


def test_a_test_that_leaks_fails(tmp_path):
    done = run_pytest(tmp_path, "ALLOWED = ()\ndef test(no_leaks): start()\n")
    assert done.returncode == 1 and "this test left behind:\n  thread 'forgotten'" in done.stdout, done.stdout + done.stderr


def test_a_test_that_may_leak_passes(tmp_path):
    done = run_pytest(tmp_path, "ALLOWED = ('forgotten',)\ndef test(no_leaks): start()\n")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_test_that_fails_is_not_blamed_twice(tmp_path):
    done = run_pytest(tmp_path, "ALLOWED = ()\ndef test(no_leaks):\n  start()\n  raise KeyError('mine')\n")
    assert done.returncode == 1 and "1 failed" in done.stdout and "left behind" not in done.stdout, done.stdout


def test_what_a_fixture_gave_is_no_leak(tmp_path):
    body = (
        "import os, pytest\nALLOWED = ()\n"
        "class Held:\n  def __init__(self): self.fd = os.open('/dev/null', 0)\n  def __del__(self): os.close(self.fd)\n"
        "@pytest.fixture\ndef held(): return Held()\n"
        "def test(no_leaks, held): pass\n"
    )
    done = run_pytest(tmp_path, body)
    assert done.returncode == 0, done.stdout + done.stderr
