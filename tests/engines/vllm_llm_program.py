"""vLLM in a process, and a trainer in the same, as vLLM's documentation has them: `trainer_init`, and `send_weights` at each step.

python vllm_llm_program.py ADDRESS FOLDER KIND
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

import ray
import torch
from training import Trained, save
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import ModuleSource, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from mooncake_ray.engines.vllm import renewal
from mooncake_ray.engines.vllm.trainer import MooncakeTrainerInitInfo

TOKENS = 4


class Client:
    """The four calls of vLLM's protocol, for an `LLM` in this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.said: list[str | None] = []

    def init_weight_transfer_engine(self, init_info) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.said.append(weight_version)
        self._llm.finish_weight_update()


class Listed(WeightSource):
    """Weights of which nothing is known but what iterating gives: as exporters yield them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._named = module

    def metadata(self):
        return []

    def __iter__(self):
        return iter([(name, p.detach().clone()) for name, p in self._named.named_parameters()])


def main(address: str, folder: str, kind: str) -> None:
    from pathlib import Path

    trained = Trained("dense")
    save(trained.module, Path(folder))
    torch.cpu._init_amx()  # or vLLM's attention stops at an illegal instruction, in a process that has computed with torch before
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        dtype="bfloat16",
        max_num_seqs=4,
        weight_transfer_config=WeightTransferConfig(backend="mooncake_ray"),
    )
    ray.init(address=address, log_to_driver=False)
    client = Client(llm)
    source = Listed(trained.module) if kind == "listed" else ModuleSource(trained.module)
    if kind == "reloaded":  # as on devices, and for layers of other kinds
        renewal._can_be_shadowed = lambda layer: False
    info = MooncakeTrainerInitInfo(rank=0, group=f"llm-{kind}", timeout_s=120.0)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, detokenize=False, ignore_eos=True)
    agree, modes = [], []
    for _ in range(3):
        trained.step(0.2)
        trainer.send_weights()
        modes.append(trainer.report.mode)
        for prompt, expected in trained.clear(3, TOKENS):
            made = llm.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)[0].outputs[0].token_ids
            agree.append(list(made) == expected)
    trainer.shutdown()
    print(json.dumps({"agree": agree, "said": client.said, "modes": modes, "version": trainer.version}))


if __name__ == "__main__":
    main(*sys.argv[1:])
