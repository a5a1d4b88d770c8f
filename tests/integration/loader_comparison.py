"""What a real engine's loader does to real tensors, against what tracing it and the table of its layouts say. Runs in the engine's Python."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from mooncake_ray.weights.layouts.serving import shapes_of
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.module_target import ModuleTarget
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.shard import Shard, views
from mooncake_ray.weights.tracing import TracedTarget

__all__ = ["compare"]


def fill(shard: Shard, whole: dict[str, torch.Tensor]) -> int:
    p = Placement.of("r", shard.fragments())
    for i, view in enumerate(views(p, shard.buffers())):
        tensor = whole[p.metas[p.tensor[i]].name]
        d = tensor.dim()
        view.copy_(tensor[tuple(slice(a, b) for a, b in zip(p.lo[i].tolist()[-d:], p.hi[i].tolist()[-d:], strict=True))])
    return len(p)


@torch.no_grad()
def compare(model: torch.nn.Module, folder: str, table: Callable[..., list]) -> None:
    """Prints how many fragments there are by tracing, how many by `table(metas, shapes)`, and how many parameters. Ends the process if the
    contents differ."""
    from safetensors.torch import load_file

    whole = load_file(os.path.join(folder, "model.safetensors"))
    metas = [ParamMeta(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in whole.items()]
    parameters = dict(model.named_parameters())

    def emptied() -> None:
        for parameter in parameters.values():
            parameter.fill_(3)

    emptied()
    traced = TracedTarget(model, metas)
    if not all((p == 3).all() for p in parameters.values()):
        raise SystemExit("tracing changed the model")
    counts, results = [], []
    for shard in (traced, ModuleTarget(model, table(metas, shapes_of(model)))):
        emptied()
        counts.append(fill(shard, whole))
        results.append({n: p.detach().clone() for n, p in parameters.items()})
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
