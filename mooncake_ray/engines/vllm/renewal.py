"""`Renewal`: a vLLM model's weights made anew from `RawWeights`, as much of it as can be beside those that are served.

A layer that vLLM repacks gets its packed form made on a shadow: another module object that shares all but the parameters. Taking it over is
then a matter of pointers. What cannot be made that way goes through vLLM's own layerwise reload, which needs the pause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from mooncake_ray.engines.vllm.raw import RawWeights
from mooncake_ray.errors import WeightSyncError
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.shard import views

__all__ = ["Renewal"]

_APART = ("_parameters", "_buffers", "_modules")
_STATELESS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@dataclass(frozen=True)
class _Shadow:
    """A layer with new weights, and what it is to replace."""

    layer: torch.nn.Module
    tensors: dict[str, torch.Tensor]
    attributes: dict[str, Any]
    """That processing the weights has changed."""

    def take_over(self) -> None:
        for name, new in self.tensors.items():
            getattr(self.layer, name).data = new
        self.layer.__dict__.update(self.attributes)


class Renewal:
    """For a model on a CPU; on other devices nothing is made beforehand, since what was captured with an address stays there.

    Not thread-safe: `prepare` in any thread while the model computes, then `apply` in the engine's own.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any, raw: RawWeights) -> None:
        self._model, self._model_config, self._raw = model, model_config, raw
        self._placement = Placement.of("vllm", raw.fragments())
        self._layers: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}
        tied: dict[int, torch.Tensor] = {}
        for prefix, layer in model.named_modules():
            for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                if tensor is None:
                    continue
                new = raw.tensors.get(f"{prefix}.{name}".lstrip("."), tied.get(id(tensor)))
                if new is not None:
                    self._layers.setdefault(layer, {})[name] = tied.setdefault(id(tensor), new)
        self._reloaded = [layer for layer in self._layers if not _can_be_shadowed(layer)]
        self._shadows: list[_Shadow] | None = None

    @property
    def layerwise(self) -> int:
        """How many layers can only be made anew in the pause."""
        return len(self._reloaded)

    @torch.no_grad()
    def prepare(self) -> None:
        self._shadows = [_shadow(layer, raw) for layer, raw in self._layers.items() if layer not in self._reloaded]

    @torch.no_grad()
    def apply(self) -> None:
        """Raises WeightSyncError if nothing was prepared; what vLLM's reload raises."""
        if self._shadows is None:
            raise WeightSyncError("new weights were not prepared")
        shadows, self._shadows = self._shadows, None
        for shadow in shadows:
            shadow.take_over()
        if self._reloaded:
            for layer in self._reloaded:
                initialize_layerwise_reload(layer)
            try:
                self._model.load_weights(self._whole_tensors())
            finally:
                for layer in self._reloaded:
                    finalize_layerwise_reload(layer, self._model_config)
        for layer in self._model.modules():
            if is_deferred_attention_layer(layer):  # what it derives from the weights of others
                layer.process_weights_after_loading(self._model_config.dtype)

    def forget(self) -> None:
        self._shadows = None

    def _whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As a checkpoint has them, of the layers that are reloaded. Only what this rank's loaders look at is in them: the rest is never
        touched, and so takes no memory."""
        p = self._placement
        prefixes = {id(layer): prefix for prefix, layer in self._model.named_modules()}
        wanted = {f"{prefixes[id(layer)]}.{name}".lstrip(".") for layer in self._reloaded for name in self._layers[layer]}
        rows: dict[int, list[int]] = {}
        for i, (tensor, buffer) in enumerate(zip(p.tensor.tolist(), p.buffer.tolist(), strict=True)):
            if p.buffers[buffer].partition(":")[0] in wanted:
                rows.setdefault(tensor, []).append(i)
        parts = list(views(p, self._raw.buffers()))
        for tensor, of in rows.items():
            meta = p.metas[tensor]
            whole = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype))
            for i in of:
                box = tuple(slice(a, b) for a, b in zip(p.lo[i, -whole.dim() :].tolist(), p.hi[i, -whole.dim() :].tolist(), strict=True))
                whole[box] = parts[i].reshape(whole[box].shape)
            yield meta.name, whole


def _can_be_shadowed(layer: torch.nn.Module) -> bool:
    if any(t.device.type != "cpu" for t in (*layer._parameters.values(), *layer._buffers.values()) if t is not None):
        return False
    method = getattr(layer, "quant_method", None)
    return method is None or type(method) in _STATELESS or type(method) is UnquantizedFusedMoEMethod


def _shadow(layer: torch.nn.Module, raw: dict[str, torch.Tensor]) -> _Shadow:
    before = dict(layer.__dict__)
    shadow = object.__new__(type(layer))
    shadow.__dict__.update(before)
    for apart in _APART:
        shadow.__dict__[apart] = dict(before[apart])
    for name, tensor in raw.items():
        like = layer._parameters.get(name)
        held = tensor if like is None else torch.nn.Parameter(tensor, requires_grad=False)
        shadow.__dict__["_buffers" if like is None else "_parameters"][name] = held
    method = getattr(layer, "quant_method", None)
    if type(method) is UnquantizedFusedMoEMethod:
        method.moe_kernel.fused_experts.process_weights_after_loading(shadow)  # which vLLM itself leaves out when it loads again
    elif method is not None:
        method.process_weights_after_loading(shadow)
    new = {name: getattr(shadow, name).data for name in raw}
    kept = {t.untyped_storage().data_ptr() for t in raw.values()}
    tensors = {n: t.clone() if t.untyped_storage().data_ptr() in kept else t for n, t in new.items() if t.numel()}
    changed = {k: v for k, v in shadow.__dict__.items() if k not in _APART and (k not in before or before[k] is not v)}
    return _Shadow(layer, tensors, changed)
