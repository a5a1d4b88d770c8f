"""64 readers of a version of 200 MB at a time: the endpoint's data port against nginx, which gives out the same bytes as a plain file.

Both on loopback, from the disk's cache, by sendfile; the readers are the same program, which throws away what comes. They begin together, at
the endpoint with the control plane, which sends each on to the data port. Bytes per second of all readers together, until the last one has all.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.fleet import note
from bench.plans import one_step
from bench.report import Result, Target, compare, summarize
from bench.serving import ENVIRONMENTS

__all__ = ["BASELINES", "Step", "plan", "run", "targets"]

NAME = "serve"
BASELINES = ("nginx",)
_SUBJECTS = ("nginx", "serve")
_PROCESSES = 2  # of readers
_WARM_UPS = 1
_LIMIT = 0.8
_ROOT = Path(__file__).resolve().parents[1]
_NGINX = """
daemon off; pid nginx.pid; error_log stderr crit; worker_processes auto; {user}
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; tcp_nodelay on; types {{ }} default_type application/octet-stream;
  client_body_temp_path t; proxy_temp_path t; fastcgi_temp_path t; uwsgi_temp_path t; scgi_temp_path t;
  server {{ listen 127.0.0.1:{port} backlog=512; root {root}; }}
}}
"""


@dataclass(frozen=True)
class Step:
    """So many readers of a version of so many bytes."""

    payload: str = "200MB"
    readers: int = 64
    rounds: int = 7


def plan(sizes: Sequence[str] | None = None, *, quick: bool = False, runs: int | None = None) -> list[Step]:
    """What to run.

    Raises:
        ValueError: there are no sizes to choose from.
    """
    return one_step(NAME, Step(payload="20MB", rounds=2) if quick else Step(), sizes, runs)


def run(steps: Sequence[Step]) -> Iterator[list[Result]]:
    """Runs the steps; yields what each found."""
    rng = random.Random(1)
    for step in steps:
        rates = defaultdict(list)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            urls = _served(Path(folder), int(step.payload.removesuffix("MB")) * 10**6, stack)
            for n in range(-_WARM_UPS, step.rounds):
                began = time.monotonic()
                for subject in rng.sample(sorted(urls), len(urls)):
                    rate = _read(urls[subject], step.readers)
                    if n >= 0:
                        rates[subject].append(rate)
                note(f"round {n + 1} of {step.rounds}: {time.monotonic() - began:.0f} s")
        yield [summarize(NAME, f"{step.readers}-readers", s, rates[s], unit="bytes/s") for s in _SUBJECTS if s in rates]


def targets(results: Sequence[Result]) -> list[Target]:
    """What is asked of the package, and how near it came."""
    found = {r.subject: r for r in results}
    return [compare("serve / nginx", found.get("serve"), found.get("nginx"), _LIMIT, at_least=True)]


def _served(folder: Path, nbytes: int, stack: ExitStack) -> dict[str, str]:
    """Both servers up; their addresses. Without nginx, where there is none."""
    import torch

    from mooncake_ray.weights.hf_export import export_hf
    from mooncake_ray.weights.snapshot import SnapshotStore
    from mooncake_ray.weights.source import StateDictSource

    layers = 20
    width = (nbytes // 2 // layers // 1024) * 1024
    tensors = {f"model.layers.{n}.w": torch.randint(0, 1 << 15, (width,), dtype=torch.int16).view(torch.bfloat16) for n in range(layers)}
    store = SnapshotStore(folder / "store", fsync=False)
    store.save(1, StateDictSource(tensors))
    urls = {"serve": stack.enter_context(_line([sys.executable, "-m", "bench.serve_server", str(store.directory)]))}
    if program := shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"):
        with store.open() as snapshot:
            export_hf(snapshot, folder / "plain", fsync=False)
        urls["nginx"] = stack.enter_context(_nginx(program, folder))
    else:
        note("nginx: not run: it is not installed")
    return urls


@contextmanager
def _line(command: list[str]) -> Iterator[str]:
    """A program that says a line and goes on until its stdin ends."""
    env = os.environ | ENVIRONMENTS["plain"]  # Ray would have its workers run at a lower priority than nginx
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes, text=True, cwd=_ROOT, env=env) as process:
        try:
            if not (line := process.stdout.readline().strip()):
                raise RuntimeError(f"{command[2]} ended with status {process.wait()}")
            yield line
        finally:
            process.stdin.close()
            process.wait(60)


@contextmanager
def _nginx(program: str, folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = folder / "nginx"
    home.mkdir()
    user = "user root;" if os.geteuid() == 0 else ""  # who may read the folder
    (home / "nginx.conf").write_text(_NGINX.format(port=port, root=folder / "plain", user=user))
    with subprocess.Popen([program, "-p", str(home), "-c", "nginx.conf"]) as process:
        try:
            end = time.monotonic() + 30
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > end:
                        raise
                    time.sleep(0.02)
            yield f"http://127.0.0.1:{port}/model.safetensors"
        finally:
            process.terminate()
            process.wait(30)


def _read(url: str, readers: int) -> float:
    """Bytes per second of all readers together."""
    command = [sys.executable, "-m", "bench.sink", url, str(readers // _PROCESSES)]
    sinks = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT) for _ in range(_PROCESSES)]
    try:
        for sink in sinks:
            sink.stdout.readline()
        for sink in sinks:
            sink.stdin.write("\n")
            sink.stdin.flush()
        found = [json.loads(sink.stdout.readline()) for sink in sinks]
    finally:
        for sink in sinks:
            sink.kill()
            sink.communicate()
    if sum(f["readers"] for f in found) != readers // _PROCESSES * _PROCESSES:
        raise RuntimeError(f"not all readers got it: {found}")
    return sum(f["bytes"] for f in found) / (max(f["ended"] for f in found) - min(f["began"] for f in found))
