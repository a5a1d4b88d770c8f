"""An SGLang server on this machine's CPUs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from mooncake_ray.engines.sglang import SGLangEngine

STUBS = Path(__file__).parent / "stubs_sglang"
START_S = 600.0
OPTIONS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--grammar-backend", "none", "--mem-fraction-static", "0.2"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled", "--disable-overlap-schedule"),
    *("--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle", "--max-running-requests", "4", "--host", "127.0.0.1"),
]
OURS = ("--custom-weight-loader", "mooncake_ray.engines.sglang.load")


class Server:
    """With its processes in a group of their own, and what they say in a file."""

    def __init__(self, python: str, folder: Path, log: Path, *more: str, tp: int = 1, loader: tuple[str, ...] = OURS) -> None:
        self.python, self.log, self.tp, self.more = python, log, tp, more
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        length = () if "--context-length" in more else ("--context-length", "256", "--max-total-tokens", "2048")
        command = [
            python,
            "-W",
            "ignore",
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(folder),
            "--port",
            str(port),
            "--tp-size",
            str(tp),
        ]
        environment = os.environ | {
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(STUBS),
            "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),
        }
        if tp > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(n % (os.cpu_count() or 1)) for n in range(tp))
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, *OPTIONS, *length, *loader, *more], env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.engine = SGLangEngine(self.url)

    def ready(self) -> Server:
        end = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                    return self
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end:
                    self.kill()
                    raise AssertionError(f"SGLang did not start:\n{self.said()}") from None
                time.sleep(0.2)

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    @property
    def serves(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=20):
                return self.process.poll() is None
        except OSError:
            return False

    def complete(self, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        """Greedy."""
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
        return self.engine.server.call("generate", body | more, timeout_s=120)

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        return self.complete(prompt, tokens)["output_ids"]

    def pids(self, word: str = "") -> list[int]:
        """Of its processes that have a word in their names: "scheduler", say."""
        out = []
        for entry in Path("/proc").iterdir():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
                if fields and int(fields[3]) == self.process.pid and word in (entry / "cmdline").read_text():
                    out.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return out

    def signal(self, number: int, word: str = "") -> None:
        for pid in self.pids(word):
            os.kill(pid, number)

    def kill(self) -> None:
        """All at once; and away with what they shared, which nobody is left to tidy up."""
        pids = self.pids()
        shared = {path for pid in pids for path in _shared(pid)}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.process.wait(30)
        for path in shared:
            path.unlink(missing_ok=True)


def _shared(pid: int) -> list[Path]:
    """Files in memory that a process has mapped."""
    try:
        paths = {line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line}
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [Path(path) for path in paths if Path(path).name.startswith(("sglang_", "sgl_", "sem.mp-", "psm_"))]
