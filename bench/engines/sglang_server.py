"""`SGLangServer`: SGLang's server on this machine's CPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from bench.engines.process import EngineProcess, free_port, omp_binding
from mooncake_ray.engines.sglang import SGLangEngine

__all__ = ["STUBS", "SGLangServer"]

STUBS = Path(__file__).parent / "stubs_sglang"
"""Of packages that SGLang imports, and that have no build for CPUs."""

_OURS = ("--custom-weight-loader", "mooncake_ray.engines.sglang.load")
_OPTIONS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--grammar-backend", "none", "--mem-fraction-static", "0.2"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled", "--disable-overlap-schedule"),
    *("--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle", "--max-running-requests", "4", "--host", "127.0.0.1"),
    *("--context-length", "256", "--max-total-tokens", "2048"),
)
_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(STUBS)}


class SGLangServer(EngineProcess):
    name: ClassVar[str] = "SGLang"
    up: ClassVar[str] = "ready"
    shared: ClassVar[tuple[str, ...]] = ("sglang_", "sgl_", "sem.mp-", "psm_")

    def __init__(self, python: str, folder: Path, log: Path, *, tp: int = 1, loader: tuple[str, ...] = _OURS) -> None:
        port = free_port()
        model = ("--model-path", str(folder), "--port", str(port), "--tp-size", str(tp))
        command = [python, "-W", "ignore", "-m", "sglang.launch_server", *model, *_OPTIONS, *loader]
        bind = omp_binding("SGLANG_CPU_OMP_THREADS_BIND", tp)
        auth = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token")}
        super().__init__(command, {**_ENVIRONMENT, **bind, **auth}, port, log)
        self.engine = SGLangEngine(self.url)

    def complete(self, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        """Greedy."""
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
        return self.client.post("generate", body | more, timeout_s=120)

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        return self.complete(prompt, tokens)["output_ids"]
