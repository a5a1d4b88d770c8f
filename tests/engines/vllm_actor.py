"""An actor that holds a vLLM engine, with the methods of `AsyncLLM` that vLLM's own Ray client calls."""

from __future__ import annotations

from typing import Any, ClassVar


class Held:
    environment: ClassVar[dict[str, str]] = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._llm: Any = None

    async def ready(self) -> bool:
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=self._folder,
                skip_tokenizer_init=True,
                enforce_eager=True,
                max_model_len=128,
                dtype="bfloat16",
                max_num_seqs=4,
                distributed_executor_backend="mp",
                weight_transfer_config=WeightTransferConfig(backend="mooncake_ray"),
            )
        )
        return True

    async def generate(self, prompt: list[int], tokens: int) -> list[int]:
        import uuid

        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
        async for out in self._llm.generate({"prompt_token_ids": prompt}, greedy, uuid.uuid4().hex):
            last = out
        return list(last.outputs[0].token_ids)

    async def init_weight_transfer_engine(self, request) -> None:
        await self._llm.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        await self._llm.start_weight_update()

    async def update_weights(self, request) -> None:
        await self._llm.update_weights(request)

    async def finish_weight_update(self) -> None:
        await self._llm.finish_weight_update()

    async def update_weight_version(self, version: str) -> None:
        await self._llm.update_weight_version(version)

    async def get_weight_version(self) -> str:
        return await self._llm.get_weight_version()

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        return await self._llm.compute_weight_checksums()

    async def pause_generation(self, **how: Any) -> None:
        await self._llm.pause_generation(**how)

    async def resume_generation(self) -> None:
        await self._llm.resume_generation()

    async def reset_prefix_cache(self, **how: Any) -> bool:
        return await self._llm.reset_prefix_cache(**how)
