"""One rank of a real vLLM model, on a CPU: what its loader does to real tensors, against what tracing it and the table of its layouts say.

python vllm_loader_program.py FOLDER RANK WORLD PORT [ep]
"""

from __future__ import annotations

import os
import sys

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from mooncake_ray.weights.layouts import vllm
from mooncake_ray.weights.layouts.serving import EngineRank, shapes_of
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.module_target import ModuleTarget
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.shard import Shard, views
from mooncake_ray.weights.tracing import TracedTarget


def fill(shard: Shard, whole: dict[str, torch.Tensor]) -> int:
    p = Placement.of("r", shard.fragments())
    for i, view in enumerate(views(p, shard.buffers())):
        tensor = whole[p.metas[p.tensor[i]].name]
        d = tensor.dim()
        view.copy_(tensor[tuple(slice(a, b) for a, b in zip(p.lo[i].tolist()[-d:], p.hi[i].tolist()[-d:], strict=True))])
    return len(p)


@torch.no_grad()
def main(folder: str, rank: int, world: int, port: str, ep: bool) -> None:
    how = {"tensor_parallel_size": world, "enable_expert_parallel": ep, "distributed_executor_backend": "mp" if world > 1 else None}
    config = EngineArgs(
        model=folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="bfloat16", **how
    ).create_engine_config()
    whole = load_file(os.path.join(folder, "model.safetensors"))
    metas = [ParamMeta(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in whole.items()]
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(world)
        model = initialize_model(vllm_config=config)
        parameters = dict(model.named_parameters())

        def emptied() -> None:
            for parameter in parameters.values():
                parameter.fill_(3)

        def contents() -> dict[str, torch.Tensor]:
            return {n: p.detach().clone() for n, p in parameters.items()}

        emptied()
        traced = TracedTarget(model, metas)
        if not all((p == 3).all() for p in parameters.values()):
            raise SystemExit("tracing changed the model")
        ranks = EngineRank((rank, world), ep=(rank, world) if ep else (0, 1))
        table = ModuleTarget(model, vllm.fragments(config.model_config.hf_config, metas, shapes_of(model), ranks))
        counts, results = [], []
        for shard in (traced, table):
            emptied()
            counts.append(fill(shard, whole))
            results.append(contents())
        emptied()
        model.load_weights(iter(whole.items()))
    for name, parameter in parameters.items():
        padding = torch.zeros_like(parameter, dtype=torch.bool)
        if "embed_tokens" in name or "lm_head" in name:  # what is over is zero in one, and was not touched in the other
            padding = (parameter == 0).all(1, keepdim=True).expand_as(parameter)
        for result in results:
            if not torch.equal(parameter[~padding], result[name][~padding]):
                raise SystemExit(f"{name} differs")
    print(*counts, len(parameters), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], "ep" in sys.argv[5:])
