"""One rank of a real SGLang model, on a CPU.

python sglang_loader_program.py FOLDER RANK WORLD PORT [ep]
"""

from __future__ import annotations

import os
import sys

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1")

import torch
from loader_comparison import compare
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.model_loader.loader import _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.server_args import ServerArgs
from sglang.srt.weight_cache.daemon import SpawnRanks, publish, spawn_world_rank

from mooncake_ray.weights.layouts import sglang
from mooncake_ray.weights.layouts.serving import EngineRank


def main(folder: str, rank: int, world: int, port: str, ep: bool) -> None:
    arguments = ServerArgs(
        model_path=folder,
        device="cpu",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        tp_size=world,
        ep_size=world if ep else 1,
        dtype="bfloat16",
        mem_fraction_static=0.2,
    )
    publish(
        arguments,
        role="weight_cache_daemon",
        ranks=SpawnRanks(world_rank=spawn_world_rank(arguments, tp_rank=rank, pp_rank=0), gpu_id=0),
    )
    initialize_moe_config()
    config = ModelConfig.from_server_args(arguments)
    init_distributed_environment(
        backend="gloo", world_size=world, rank=rank, local_rank=rank, distributed_init_method=f"tcp://127.0.0.1:{port}"
    )
    initialize_model_parallel()
    initialize_dp_attention(arguments)
    with set_default_torch_dtype(torch.bfloat16):
        model = _initialize_model(config, LoadConfig())
    ranks = EngineRank((rank, world), ep=(rank, world) if ep else (0, 1))
    compare(model, folder, lambda metas, shapes: sglang.fragments(config.hf_config, metas, shapes, ranks))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], "ep" in sys.argv[5:])
