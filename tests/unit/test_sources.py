"""What plain modules, DTensors and state dicts say they hold is what they hold."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.dtensor import boxes
from mooncake_ray.weights.layouts.checkpoint import checkpoint_names
from mooncake_ray.weights.placement import Placement
from mooncake_ray.weights.shard import Shard, views
from mooncake_ray.weights.source import ModuleSource, Slice, StateDictSource


def assembled(*shards) -> dict[str, torch.Tensor]:
    """Whole tensors out of shards' boxes; every element must be there."""
    out, seen = {}, {}
    for shard in shards:
        placement = Placement.of("r", shard.fragments())
        for i, view in enumerate(views(placement, shard.buffers())):
            meta = placement.metas[placement.tensor[i]]
            n = len(meta.shape)
            d = placement.lo.shape[1]
            at = tuple(slice(*b) for b in zip(placement.lo[i][d - n :], placement.hi[i][d - n :], strict=True))
            whole = out.setdefault(meta.name, torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype)))
            whole[at] = view.reshape(view.shape[d - n :])
            seen.setdefault(meta.name, torch.zeros(meta.shape, dtype=torch.bool))[at] = True
    assert all(bool(s.all()) for s in seen.values())
    return out


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_module_is_its_state_dict():
    module = Tied()
    source = ModuleSource(module)
    assert isinstance(source, Shard)
    equal(assembled(source), dict(module.state_dict()))  # scratch is not in it; num_batches_tracked has no dimensions


def test_vllm_56689_tied_names_are_not_dropped():
    source = ModuleSource(Tied())
    assert source.aliases == {"head.weight": "embed.weight"}
    rows = {f.meta.name: f for f in source.fragments()}
    assert rows["head.weight"].buffer == rows["embed.weight"].buffer == "embed.weight"


def test_modules_that_are_there_twice_have_both_names():
    shared = torch.nn.Linear(2, 3)
    module = torch.nn.ModuleDict({"a": shared, "b": shared})
    source = ModuleSource(module)
    assert source.aliases == {"b.weight": "a.weight", "b.bias": "a.bias"}
    equal(assembled(source), dict(module.state_dict()))


def test_replaced_parameters_are_seen():
    module = torch.nn.Linear(3, 2)
    source = ModuleSource(module)
    module.weight = torch.nn.Parameter(torch.full((2, 3), 7.0))
    equal(assembled(source), dict(module.state_dict()))
    module.weight = torch.nn.Parameter(torch.zeros(3, 2).t())
    with pytest.raises(PlanError, match=r"weight was .* and is"):
        source.buffers()


def test_names():
    module = torch.nn.Linear(3, 2)
    assert {f.meta.name for f in ModuleSource(module, {"weight": "w", "bias": None}.get).fragments()} == {"w"}
    with pytest.raises(PlanError, match="bias has no canonical name"):
        ModuleSource(module, {"weight": "w"})
    with pytest.raises(PlanError, match="w is both weight and bias"):
        ModuleSource(module, lambda name: "w")


def test_wrappers_are_seen_through():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2))
    names = {"0.weight", "0.bias"}
    with as_rank(0, 2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for wrapped in (torch.compile(module), torch.nn.parallel.DistributedDataParallel(module)):
            assert {f.meta.name for f in ModuleSource(wrapped).fragments()} == names
    checkpointed = torch.nn.Sequential(checkpoint_wrapper(module[0]))
    assert {f.meta.name for f in ModuleSource(checkpointed).fragments()} == names


def test_parts_of_a_state_dict():
    whole = torch.arange(35).reshape(5, 7)
    parts = {"a": whole[:2].clone(), "b": whole[2:, :3], "c": whole[2:, 3:].t().contiguous().t()}
    source = StateDictSource(parts, {"a": ((5, 7), (0, 0), "w"), "b": ((5, 7), (2, 0), "w"), "c": ((5, 7), (2, 3), "w")})
    equal(assembled(source), {"w": whole})
    with pytest.raises(PlanError, match=r"a: a part of shape \[5, 7\] at \[0, 2\] is not in a whole of \[5, 8\]"):
        StateDictSource({"a": whole}, {"a": ((5, 8), (0, 2))})
    with pytest.raises(PlanError, match="boxes are given for 1 tensors that are not there: z"):
        StateDictSource({"a": whole}, {"z": ((5, 7), (0, 0))})


@st.composite
def sharded(draw):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    kinds = st.one_of(
        st.just(Replicate()), dims.map(Shard), st.builds(lambda d, n: _StridedShard(d, split_factor=n), dims, st.integers(1, 4))
    )
    return shape, mesh, [draw(kinds) for _ in mesh]


@given(sharded())
@settings(deadline=None, max_examples=150)
def test_boxes_are_torchs(case):
    """Against torch's own split of the whole, placement by placement."""
    shape, mesh, placements = case
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for coordinate in torch.cartesian_prod(*(torch.arange(n) for n in mesh)).reshape(-1, len(mesh)).tolist():
        local = whole
        for size, at, placement in zip(mesh, coordinate, placements, strict=True):
            if not placement.is_replicate():
                local = placement._split_tensor(local, size, with_padding=False, contiguous=False)[0][at]
        there = torch.full(local.shape, -1)
        for lo, hi, at in boxes(shape, mesh, coordinate, placements):
            assert all(a < b for a, b in zip(lo, hi, strict=True))
            box = whole[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]
            there[tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))] = box
        assert torch.equal(there, local)


MESHES = itertools.count()


@contextlib.contextmanager
def as_rank(rank: int, *shape: int):
    """The mesh of this shape as this rank sees it, with nobody to talk to. What is tested here talks to nobody."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("fake", rank=rank, world_size=torch.Size(shape).numel(), store=FakeStore())
        try:
            # torch takes a mesh that it has seen for an equal one, and so another rank's for this one's: no two have the same names.
            names = [f"{axis}{next(MESHES)}" for axis in ("outer", "inner")]
            yield init_device_mesh("cpu", shape, mesh_dim_names=tuple(names[-len(shape) :]))
        finally:
            torch.distributed.destroy_process_group()


class Odd(torch.nn.Module):
    """Rows that cannot be divided by 4: some ranks have fewer, some none."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 8)
        self.up = torch.nn.Linear(8, 6)
        self.down = torch.nn.Linear(6, 8, bias=False)
        self.norm = torch.nn.LayerNorm(1, bias=False)
        self.register_buffer("steps", torch.tensor(3))
        self.head = torch.nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight


def test_fsdp2():
    from torch.distributed.fsdp import fully_shard

    module = Odd()
    whole = dict(module.state_dict())
    for mesh_shape in ((4,), (5,), (2, 2), (3, 2)):
        world = torch.Size(mesh_shape).numel()
        empty = 0
        seen: dict[str, torch.Tensor] = {}
        for rank in range(world):
            with as_rank(rank, *mesh_shape) as mesh:
                mine = copy.deepcopy(module)
                fully_shard(mine, mesh=mesh)
                source = ModuleSource(mine)
                assert source.aliases == {"head.weight": "embed.weight"}
                placement = Placement.of("r", source.fragments())
                empty += sum(not local.numel() for local in source.buffers().values())
                for i, view in enumerate(views(placement, source.buffers())):
                    meta = placement.metas[placement.tensor[i]]
                    d, n = placement.lo.shape[1], len(meta.shape)
                    at = tuple(slice(*b) for b in zip(placement.lo[i, d - n :].tolist(), placement.hi[i, d - n :].tolist(), strict=True))
                    assert torch.equal(view.reshape(view.shape[d - n :]), whole[meta.name][at]), meta.name
                    seen.setdefault(meta.name, torch.zeros(meta.shape, dtype=torch.int))[at] += 1
        assert empty  # the norm's one weight is nobody's but the first's
        replicas = mesh_shape[0] if len(mesh_shape) == 2 else 1
        assert seen.keys() == whole.keys()
        for name, count in seen.items():
            copies = world if name == "steps" else replicas  # a buffer is on every rank
            assert torch.equal(count, torch.full_like(count, copies)), name


def test_fsdp2_over_tensor_parallelism_cuts_one_dimension_twice():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    module = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 8, bias=False))
    whole = {k: v.clone() for k, v in module.state_dict().items()}
    found = []
    for rank in range(4):
        with as_rank(rank, 2, 2) as mesh:
            data, tensor = (mesh[name] for name in mesh.mesh_dim_names)
            mine = copy.deepcopy(module)
            parallelize_module(mine, tensor, {"0": ColwiseParallel(), "1": RowwiseParallel()}, src_data_rank=None)
            fully_shard(mine, mesh=data)
            source = ModuleSource(mine)
            found += [(f, source.buffers()[f.buffer].clone()) for f in source.fragments()]
            # Of rows that tensor parallelism has halved, data parallelism halves those: rank 1 is (0, 1), the third quarter.
            [weight] = [f for f in source.fragments() if f.meta.name == "0.weight"]
            assert weight.lo == ({0: 0, 1: 6, 2: 3, 3: 9}[rank], 0)
    for fragment, local in found:
        box = whole[fragment.meta.name][tuple(slice(a, b) for a, b in zip(fragment.lo, fragment.hi, strict=True))]
        assert torch.equal(local, box)
    for name, tensor in whole.items():
        assert (
            sum(torch.Size(b - a for a, b in zip(f.lo, f.hi, strict=True)).numel() for f, _ in found if f.meta.name == name)
            == tensor.numel()
        )


def test_a_gathered_module_is_told():
    """While its parameters are gathered, FSDP has others in their places."""
    from torch.distributed.fsdp import fully_shard

    with as_rank(1, 2) as mesh:
        module = torch.nn.Linear(4, 4)
        fully_shard(module, mesh=mesh)
        source = ModuleSource(module)
        module.unshard()
        with pytest.raises(PlanError, match=r"weight was torch.float32 \[2, 4\] .* and is torch.float32 \[4, 4\]"):
            source.buffers()
        module.reshard()
        assert source.buffers()["weight"].shape == (2, 4)


def test_partial_sums_are_refused():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    with as_rank(0, 2, 2) as mesh:
        sums = DTensor.from_local(torch.ones(3), mesh, [Replicate(), Partial()], run_check=False)
        with pytest.raises(PlanError, match=r"w: P.* is neither a shard nor a replica"):
            StateDictSource({"w": sums})
        short = DTensor.from_local(
            torch.ones(2, 3), mesh, [Replicate(), Shard(0)], run_check=False, shape=torch.Size((5, 3)), stride=(3, 1)
        )
        with pytest.raises(PlanError, match="is 9 elements here, but there are 6"):
            StateDictSource({"w": short})


def test_two_axes_on_one_dimension():
    """Outer axis first: 10 rows over (2, 3) are 5 and 5, then 2, 2 and 1."""
    from torch.distributed.tensor import Shard as Cut

    rows = [[(lo[0], hi[0]) for lo, hi, _ in boxes((10, 2), (2, 3), at, [Cut(0), Cut(0)])] for at in itertools.product(range(2), range(3))]
    assert rows == [[(0, 2)], [(2, 4)], [(4, 5)], [(5, 7)], [(7, 9)], [(9, 10)]]


class Packed(torch.Tensor):
    """As a library's FP8 tensor: what it says is not what its storage holds."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def test_tensors_that_are_not_their_bytes_are_refused():
    packed = torch.Tensor._make_wrapper_subclass(Packed, (2, 2), dtype=torch.bfloat16)
    with pytest.raises(PlanError, match="w: a Packed keeps its values in its own way"):
        StateDictSource({"w": packed})
    with pytest.raises(PlanError, match="w: a tensor of dtype complex128 cannot be moved"):
        StateDictSource({"w": torch.zeros(2, dtype=torch.complex128)})


def test_a_source_is_a_target_too():
    """What is written through its views is in the module, tied names once."""
    module, other = Tied(), Tied()
    source = ModuleSource(other)
    placement = Placement.of("r", source.fragments())
    values = dict(module.state_dict())
    for i, view in enumerate(views(placement, source.buffers())):
        view.copy_(values[placement.metas[placement.tensor[i]].name].reshape(view.shape))
    equal(dict(other.state_dict()), values)
    assert other.head.weight is other.embed.weight


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Qwen2Moe", "Mixtral", "DeepseekV3", "Qwen3"])
def test_transformers_modules_are_their_checkpoints(kind, tmp_path, monkeypatch):
    """What transformers itself writes, names and values, out of one process and out of shards of FSDP2."""
    import safetensors.torch
    import tqdm
    import transformers
    from torch.distributed.fsdp import fully_shard

    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # it would stay as a thread
    sizes = {"hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 20, "num_experts": 5, "num_local_experts": 5, "n_routed_experts": 5, "head_dim": 4}
    sizes |= {"shared_expert_intermediate_size": 6}
    if kind == "Mixtral":
        del sizes["moe_intermediate_size"]
    if kind == "DeepseekV3":
        sizes |= {"first_k_dense_replace": 1, "q_lora_rank": 4, "kv_lora_rank": 4, "n_group": 1, "topk_group": 1}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, tie_word_embeddings=kind == "Qwen3", num_nextn_predict_layers=0, pad_token_id=0
    )
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(tmp_path)
    expected = safetensors.torch.load_file(tmp_path / "model.safetensors")
    source = ModuleSource(model, checkpoint_names(config))
    if kind == "Qwen3":
        assert source.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    equal(assembled(source), expected)
    sources = []
    for rank in range(3):  # five experts are two, two and one
        with as_rank(rank, 3) as mesh:
            mine = copy.deepcopy(model)
            for layer in mine.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(mine, mesh=mesh)
            sources.append(ModuleSource(mine, checkpoint_names(config)))
    equal(assembled(*sources), expected)


def test_slices_must_be_within():
    module = torch.nn.Linear(4, 6, bias=False)
    for wrong in (Slice("w", (0, 0), (7, 4)), Slice("w", (0,), (6,)), Slice("w", (0, 0), (2, 4), 1)):
        with pytest.raises(PlanError, match=r"weight: .* is no slice of a tensor of shape \[6, 4\]"):
            ModuleSource(module, {"weight": [wrong]})
    rows = [Slice(f"w{i}", (i, 0), (i + 1, 4), 1) for i in range(6)]
    equal(assembled(ModuleSource(module, {"weight": rows})), {f"w{i}": row for i, row in enumerate(module.weight)})
