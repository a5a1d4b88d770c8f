"""`VLLMServer`: vLLM's OpenAI-compatible server on this machine's CPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from bench.engines.process import EngineProcess, free_port, omp_binding

__all__ = ["VLLMServer"]

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # without it there are no routes for new weights
    "HF_HUB_OFFLINE": "1",
}
_ANSWER_S = 300.0


class VLLMServer(EngineProcess):
    name: ClassVar[str] = "vLLM"
    up: ClassVar[str] = "health"
    shared: ClassVar[tuple[str, ...]] = ("psm_", "sem.mp-")

    def __init__(
        self, python: str, folder: Path, log: Path, *, tp: int = 1, environment: Mapping[str, str] | None = None, more: Sequence[str] = ()
    ) -> None:
        port = free_port()
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
            "--port": str(port),
        }
        flags = ("--skip-tokenizer-init", "--enforce-eager", "--enable-scale-out")
        command = [python, "-m", "vllm.entrypoints.openai.api_server", *(w for o in options.items() for w in o), *flags, *more]
        bind = omp_binding("VLLM_CPU_OMP_THREADS_BIND", tp)
        super().__init__(command, {**_ENVIRONMENT, **bind, **(environment or {})}, port, log)

    def complete(self, prompt: list[int], tokens: int, **more: Any) -> dict[str, Any]:
        """Greedy."""
        body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self.client.post("v1/completions", body | {"detokenize": False} | more, timeout_s=_ANSWER_S)["choices"][0]

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        return self.complete(prompt, tokens)["token_ids"]

    def spans(self, prompt: list[int], tokens: int) -> list[tuple[str, int, int]]:
        """Which versions made which tokens: version, from, to."""
        how = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "detokenize": False}
        answer = self.client.post("inference/v1/generate", {"token_ids": prompt, "sampling_params": how}, timeout_s=_ANSWER_S)
        return [(s["version"], s["start"], s["end"]) for s in answer["choices"][0]["weight_versions"]]
