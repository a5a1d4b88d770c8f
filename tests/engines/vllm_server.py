"""A vLLM server on this machine's CPUs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooncake_ray.engines.http import JSONClient

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # without it there are no routes for new weights
    "HF_HUB_OFFLINE": "1",
}
START_S = 600.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """With its processes in a group of their own, and what they say in a file."""

    def __init__(
        self, python: str, folder: Path, log: Path, *, tp: int = 1, environment: dict[str, str] | None = None, more: Sequence[str] = ()
    ) -> None:
        self.port, self.log = free_port(), log
        self.url = f"http://127.0.0.1:{self.port}"
        bind = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(n % (os.cpu_count() or 1)) for n in range(tp))} if tp > 1 else {}
        options = {
            "--model": str(folder),
            "--served-model-name": "model",
            "--max-model-len": "256",
            "--max-num-seqs": "8",
            "--dtype": "bfloat16",
            "--block-size": "32",
            "--tensor-parallel-size": str(tp),
            "--weight-transfer-config": '{"backend": "mooncake_ray"}',
            "--host": "127.0.0.1",
            "--port": str(self.port),
        }
        command = [python, "-m", "vllm.entrypoints.openai.api_server", *(w for o in options.items() for w in o)]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, "--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out", *more],
                env={**os.environ, **ENVIRONMENT, **bind, **(environment or {})},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ready(self) -> Server:
        end = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise AssertionError(f"vLLM did not start:\n{self.said()}") from None
                time.sleep(0.2)

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def complete(self, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        """Greedy."""
        body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body | {"detokenize": False} | more).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.loads(answer.read())["choices"][0]
        except urllib.error.HTTPError as e:
            raise AssertionError(f"{e.code}: {e.read().decode()}\n{self.said()}") from None

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        return self.complete(prompt, tokens)["token_ids"]

    def spans(self, prompt: list[int], tokens: int) -> list[tuple[str, int, int]]:
        """Which versions made which tokens: version, from, to."""
        how = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "detokenize": False}
        answer = JSONClient(self.url).post("inference/v1/generate", {"token_ids": prompt, "sampling_params": how}, timeout_s=300)
        return [(s["version"], s["start"], s["end"]) for s in answer["choices"][0]["weight_versions"]]

    def pids(self, word: str) -> list[int]:
        """Of its processes that have a word in their name or command, as vLLM titles them."""
        out = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                session, command = int(fields[3]), (entry / "cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if session == self.process.pid and word in command:
                out.append(int(entry.name))
        return out

    def signal(self, number: int, word: str = "") -> None:
        """To all of its processes, or to those with that word."""
        for pid in self.pids(word):
            os.kill(pid, number)

    def kill(self) -> None:
        shared = self._shared()
        self.signal(signal.SIGKILL)
        self.process.wait(30)
        for path in shared:  # which nobody else tidies up
            path.unlink(missing_ok=True)

    def _shared(self) -> set[Path]:
        """Memory that it has shared among its processes."""
        found = set()
        for pid in self.pids(""):
            with contextlib.suppress(OSError):
                found |= {Path(line.split()[-1]) for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line}
        return {path for path in found if path.name.startswith(("psm_", "sem.mp-"))}

    def stop(self) -> None:
        """As an operator would; killed if that takes long."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.kill()
