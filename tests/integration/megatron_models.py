"""Small models of megatron-core's own making, any rank of any layout, in one process without a GPU.

The process groups are torch's fake ones: megatron's own `parallel_state` says who is where. Nothing is communicated here; each rank is built,
filled and looked at by itself. Values are put where megatron's own `sharded_state_dict` says they belong.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.moe import experts, moe_utils
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


class CausalAttention(torch.nn.Module):
    """In place of megatron's, which has no parameters either: heads of different sizes, and context parallelism, it can only do on a GPU."""

    def __init__(self, *_, softmax_scale=None, **__):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *_, **__):
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # sequence, batch, heads, channels
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


__all__ = [
    "LayerType",
    "PipelineParallelLayerLayout",
    "chunks",
    "fill",
    "get_num_layers_to_build",
    "get_transformer_layer_offset",
    "rank_of",
]


@contextlib.contextmanager
def rank_of(rank: int, world: int, *, tp=1, pp=1, vpp=None, ep=1, etp=None, cp=1) -> Iterator[None]:
    """As this rank of such a world; on a CPU, where megatron takes a GPU for granted."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    patches = (
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.object(torch.Tensor, "cuda", lambda self, *a, **k: self),
        mock.patch.object(multi_latent_attention, "HAVE_TE", False),  # it is without, but takes the stand-ins for it
        mock.patch.object(experts, "gg", mock.Mock(unsafe=True)),  # the grouped layers are made, not run
        mock.patch.object(moe_utils, "te_general_gemm", None, create=True),  # likewise, but forgets this one
        mock.patch.object(CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()),
        torch.compiler.set_stance("force_eager"),
        warnings.catch_warnings(),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            parallel_state.initialize_model_parallel(
                tp,
                pp,
                vpp,
                context_parallel_size=cp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=etp,
                create_gloo_process_groups=False,
            )
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def chunks(vocab: int, *, tied=False, mla=False, rotary=1.0, etp=None, vpp=None, mtp=0, **config) -> list[GPTModel]:
    """What the current rank has of a model, a `GPTModel` for each virtual stage. Its values are not set."""
    state = parallel_state
    kind = MLATransformerConfig if mla else TransformerConfig
    full = kind(
        tensor_model_parallel_size=state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=state.get_expert_tensor_parallel_world_size(),
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        moe_token_dispatcher_type="allgather",
        mtp_num_layers=mtp or None,
        **config,
    )
    out = []
    for stage in range(vpp or 1):
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            full, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage if vpp else None
        )
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
        first = state.is_pipeline_first_stage(ignore_virtual=vpp is None, vp_stage=stage if vpp else None)
        last = state.is_pipeline_last_stage(ignore_virtual=vpp is None, vp_stage=stage if vpp else None)
        block = None
        if mtp and last:
            block = gpt_layer_specs.get_gpt_mtp_block_spec(full, spec, use_transformer_engine=False, vp_stage=stage if vpp else None)
        model = GPTModel(
            full,
            spec,
            vocab,
            64,
            pre_process=first,
            post_process=last,
            parallel_output=False,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            rotary_percent=rotary,
            mtp_block_spec=block,
            vp_stage=stage if vpp else None,
        )
        out.append(model.eval())
    return out


def as_trained(model: GPTModel) -> torch.nn.Module:
    """As megatron's training loop wraps it."""
    wrapped = Float16Module(model.config, model)
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), wrapped)


def fill(models: list[GPTModel], whole: dict[str, torch.Tensor], rows: int) -> None:
    """Puts this rank's part of the whole's values where megatron says it belongs. `whole` grows by what is not in it yet.

    Args:
        rows: Of the largest padded vocabulary that is going to be asked for.
    """

    def put(part: ShardedTensor) -> None:
        if part.key not in whole:
            shape = list(part.global_shape)
            if part.allow_shape_mismatch:
                shape[0] = rows
            generator = torch.Generator().manual_seed(len(whole))
            whole[part.key] = torch.randn(shape, generator=generator).mul_(0.3)
            if "norm" in part.key:
                whole[part.key] += 1
        at = tuple(slice(o, o + n) for o, n in zip(part.global_offset, part.global_shape, strict=True))
        extent = [1] * part.prepend_axis_num + list(part.local_shape)
        box = whole[part.key][tuple(slice(s.start, s.start + n) for s, n in zip(at, extent, strict=True))]
        part.data.copy_(box.reshape(part.local_shape))

    for model in models:
        for value in model.sharded_state_dict(
            metadata={"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        ).values():
            with torch.no_grad():
                if isinstance(value, ShardedTensorFactory):
                    built = value.build()
                    for part in built if isinstance(built, list) else [built]:
                        put(part)
                    parts = [part.data for part in built] if isinstance(built, list) else built.data
                    value.data.copy_(value.merge_fn(parts))
                elif isinstance(value, ShardedTensor):
                    put(value)
