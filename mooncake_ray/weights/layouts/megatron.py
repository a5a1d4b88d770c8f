"""`MegatronSource`: what a rank of a Megatron model holds, as boxes of Hugging Face's tensors over Megatron's own storage."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.dtensor import is_dtensor
from mooncake_ray.weights.held import Held, held_tensors
from mooncake_ray.weights.layouts.megatron_names import pieces_of
from mooncake_ray.weights.layouts.ranks import Ranks
from mooncake_ray.weights.layouts.spec import ModelSpec
from mooncake_ray.weights.placement import Fragment

__all__ = ["MegatronSource"]

_WRAPPERS = re.compile(r"^(?:(?:module|_orig_mod)\.)+")


class MegatronSource:
    """A rank's chunks of a `GPTModel`, in place: nothing is gathered, converted or copied, whatever the parallelism (tensor, pipeline with
    virtual stages, expert, expert tensor, data, context).

    A `Shard`, so a target as well. Tensors are looked up at every `buffers()`: an optimizer may replace them by others of the same layout. Each
    rank only knows its own chunks and place; nothing is remembered from one source to the next.

    Attributes:
        aliases: Canonical names that are another one's very tensor (tied embeddings, those of multi-token prediction), on every rank alike.
    """

    def __init__(
        self,
        chunks: torch.nn.Module | Sequence[torch.nn.Module],
        hf: Any,
        ranks: Ranks | None = None,
        layers: Sequence[Sequence[int]] | None = None,
    ):
        """
        Args:
            chunks: This rank's part of the model: one module, or one for each virtual stage. May be wrapped (`DistributedDataParallel`,
                `Float16Module`, `torch.compile`).
            hf: The Hugging Face config of the model (an object or a mapping), or its `ModelSpec`.
            ranks: This rank's place; as megatron-core's `parallel_state` has it by default.
            layers: For each chunk the model's numbers of its decoder layers, from 0; as the layers themselves say (`layer_number`) by default.

        Raises:
            PlanError: a tensor has no counterpart in the Hugging Face model, or not the shape that it should have on this rank.
        """
        self.chunks = [chunks] if isinstance(chunks, torch.nn.Module) else list(chunks)
        self.spec = _as_built(self.chunks, hf if isinstance(hf, ModelSpec) else ModelSpec.of(hf))
        self.ranks = Ranks.current() if ranks is None else ranks
        self.aliases = self.spec.aliases
        self._held = Held()
        if layers is not None and len(layers) != len(self.chunks):
            raise PlanError(f"layers of {len(layers)} chunks are given, but there are {len(self.chunks)}")
        unknown = []
        for i, chunk in enumerate(self.chunks):
            _keep_biases(chunk)
            numbers = _numbers(chunk) if layers is None else dict(enumerate(layers[i]))
            for buffer, name, tensor in _tensors(i, chunk):
                if is_dtensor(tensor):
                    raise PlanError(f"{name} is a DTensor: megatron's own FSDP is not supported")
                pieces = pieces_of(name, tensor, self.spec, self.ranks, lambda n, numbers=numbers: _number(numbers, n))
                if pieces is None:
                    unknown.append(name)
                else:
                    self._held.add(buffer, tensor, pieces)
        if unknown:
            raise PlanError(f"{len(unknown)} of megatron's tensors have no counterpart: {', '.join(unknown[:5])}")

    def fragments(self) -> Sequence[Fragment]:
        return tuple(self._held.rows)

    def buffers(self) -> dict[str, torch.Tensor]:
        """The chunks' tensors as they are now, detached, over the same memory; their names begin with the chunk's number.

        Raises:
            PlanError: one is gone, or looks different from when the layout was described.
        """
        return self._held.checked({buffer: tensor for i, chunk in enumerate(self.chunks) for buffer, _, tensor in _tensors(i, chunk)})


def _as_built(chunks: Sequence[torch.nn.Module], spec: ModelSpec) -> ModelSpec:
    """The spec, as far as the trainer may decide otherwise: every rank's config says so alike.

    Raises:
        PlanError: values are others than Hugging Face's, not only elsewhere.
    """
    inner = [m for chunk in chunks for m in chunk.modules() if hasattr(m, "config")]
    if not inner:
        return spec
    config = inner[0].config
    if getattr(config, "layernorm_zero_centered_gamma", False) != spec.family.centred_norms:
        raise PlanError("norms are stored less one on one side only (layernorm_zero_centered_gamma): they would have to be converted")
    if getattr(config, "rotary_interleaved", False):
        raise PlanError("queries' and keys' rows are in another order (rotary_interleaved) than Hugging Face's")
    if getattr(config, "moe_mlp_glu_interleave_size", None):
        raise PlanError("experts' gates are interleaved (moe_mlp_glu_interleave_size), which is not supported")
    if (predict := getattr(config, "mtp_num_layers", None) or 0) and not spec.family.predicts:
        raise PlanError(f"how checkpoints of this family name {predict} layers of multi-token prediction is not known")
    tied = [m.share_embeddings_and_output_weights for m in inner if hasattr(m, "share_embeddings_and_output_weights")]
    return replace(
        spec,
        predict=predict,
        tied=tied[0] if tied else spec.tied,
        output_gate=getattr(config, "attention_output_gate", spec.output_gate),
    )


def _keep_biases(chunk: torch.nn.Module) -> None:
    """Routers' biases back in float32, which wrapping a model for half precision takes from them. The routers do so as well, before their first
    batch and before they are saved: what is described must be what will be."""
    for module in chunk.modules():
        if (keep := getattr(module, "_maintain_float32_expert_bias", None)) is not None:
            keep()


def _tensors(i: int, chunk: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Buffer names, Megatron's names without wrappers, tensors."""
    for own, tensor in held_tensors(chunk):
        name = _WRAPPERS.sub("", own)
        yield f"{i}.{name}", name, tensor


def _numbers(chunk: torch.nn.Module) -> dict[int, int]:
    """From a layer's place in the chunk to its number in the model, as it says itself."""
    out = {}
    for own, module in chunk.named_modules():
        name = _WRAPPERS.sub("", own + ".").rstrip(".")
        if (match := re.fullmatch(r"decoder\.layers\.(\d+)", name)) and (number := getattr(module, "layer_number", None)) is not None:
            out[int(match[1])] = number - 1
    return out


def _number(numbers: dict[int, int], n: int) -> int:
    if n not in numbers:
        raise PlanError(f"decoder layer {n} of a chunk does not say which one of the model it is: give `layers`")
    return numbers[n]
