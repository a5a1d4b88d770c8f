"""`RawWeights`: what one rank of a vLLM model holds, as the model's loaders put it, before vLLM packs it for its kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.placement import Fragment
from mooncake_ray.weights.tracing import TracedTarget

__all__ = ["RawWeights", "as_loaded"]


@contextmanager
def as_loaded(model: torch.nn.Module) -> Iterator[None]:
    """Within, the model's parameters are as its loaders want them, on the meta device; afterwards, as they were. For the engine's own thread:
    the model cannot compute meanwhile."""
    there = []
    tied: dict[int, torch.nn.Parameter] = {}
    for layer in model.modules():
        parameters, buffers = get_layer_params_buffers(layer)
        there.append((layer, (parameters, buffers), set(layer._non_persistent_buffers_set)))
        restore_layer_on_meta(layer, get_layerwise_info(layer))
        for name, parameter in parameters.items():
            if name in layer._parameters:
                layer._parameters[name] = tied.setdefault(id(parameter), layer._parameters[name])
    try:
        yield
    finally:
        for layer, (parameters, buffers), transient in there:
            for name in get_layer_tensors(layer):
                delattr(layer, name)
            for name, parameter in parameters.items():
                layer.register_parameter(name, parameter)
            for name, buffer in buffers.items():
                layer.register_buffer(name, buffer, persistent=name not in transient)


class RawWeights:
    """A `Shard` in this process's memory, of which a model's weights can be made again. Costs as much memory as the rank's weights.

    Why a copy: vLLM repacks weights after they were loaded, on CPUs and with most quantizations, so that what it computes with can be neither
    patched nor written box by box. Zero until it is first written.
    """

    def __init__(self, model: torch.nn.Module, metas: Iterable[ParamMeta], *, ignore: Collection[str] = ()) -> None:
        """In the engine's own thread.

        Args:
            metas: the tensors of the model, whole.
            ignore: names of parameters that the model's loader may leave as they are.

        Raises:
            PlanError: as `TracedTarget`.
        """
        with as_loaded(model):
            target = TracedTarget(model, metas, ignore=ignore)
            self._fragments = target.fragments()
            like = target.buffers()
            self._bases = {
                name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu").zero_()
                for name, t in like.items()
                if ":" not in name
            }
            self._views = {name: t.dtype for name, t in like.items() if ":" in name}
            for name in self._views:
                base = name.partition(":")[0]
                if base not in self._bases:
                    t = model.get_parameter(base)
                    self._bases[base] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu").zero_()

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """By the model's own names."""
        return self._bases

    def fragments(self) -> Sequence[Fragment]:
        return self._fragments

    def buffers(self) -> dict[str, torch.Tensor]:
        return self._bases | {name: self._bases[name.partition(":")[0]].view(dtype) for name, dtype in self._views.items()}
