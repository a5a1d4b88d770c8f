"""One rank of a real vLLM model, on a CPU.

python vllm_loader_program.py FOLDER RANK WORLD PORT [ep]
"""

from __future__ import annotations

import os
import sys

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")

import torch
from loader_comparison import compare
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from mooncake_ray.weights.layouts import vllm
from mooncake_ray.weights.layouts.serving import EngineRank


def main(folder: str, rank: int, world: int, port: str, ep: bool) -> None:
    how = {"tensor_parallel_size": world, "enable_expert_parallel": ep, "distributed_executor_backend": "mp" if world > 1 else None}
    config = EngineArgs(
        model=folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="bfloat16", **how
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(world)
        ranks = EngineRank((rank, world), ep=(rank, world) if ep else (0, 1))
        hf = config.model_config.hf_config
        compare(initialize_model(vllm_config=config), folder, lambda metas, shapes: vllm.fragments(hf, metas, shapes, ranks))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], "ep" in sys.argv[5:])
