"""What a loader does, learned without memory, is what it does to real tensors."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_models import MLA, MOE, Ranks, Sizes, TinyServed, metas_of, whole_model

from mooncake_ray.errors import PlanError
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.module_target import ModuleTarget
from mooncake_ray.weights.placement import Fragment, Placement
from mooncake_ray.weights.shard import Shard, views
from mooncake_ray.weights.tracing import TracedTarget


def fill(shard: Shard, whole: dict[str, torch.Tensor]) -> None:
    """Copies each fragment's part of the whole tensors to its place."""
    p = Placement.of("r", shard.fragments())
    for i, view in enumerate(views(p, shard.buffers())):
        tensor = whole[p.metas[p.tensor[i]].name]
        d = tensor.dim()
        index = tuple(slice(a, b) for a, b in zip(p.lo[i].tolist()[-d:], p.hi[i].tolist()[-d:], strict=True)) if d else ()
        view.copy_(tensor[index])


def same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def check(make, whole: dict[str, torch.Tensor], **how) -> TracedTarget:
    loaded, module, before = make(), make(), make()
    loaded.load_weights(whole.items())
    target = TracedTarget(module, metas_of(whole), **how)
    same(module, before)
    assert isinstance(target, Shard)
    fill(target, whole)
    for (name, a), (_, b) in zip(loaded.named_parameters(), module.named_parameters(), strict=True):
        covered = ~torch.isnan(a) & (a != 0)  # what a loader fills with zeros, nobody has to bring
        assert torch.equal(torch.where(covered, a, 0), torch.where(covered, b, 0)), name
    return target


@st.composite
def ranks(draw):
    c = draw(st.sampled_from([Sizes(), MOE, MLA]))
    tp_size = draw(st.sampled_from([1, 2, 4]))
    c = replace(
        c,
        vocab_size=draw(st.integers(9, 40)),
        num_key_value_heads=draw(st.sampled_from([1, 2, 4])),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        block=draw(st.sampled_from([0, 4, 5])) if not c.num_experts else 0,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])) if not c.num_experts else "float32",
    )
    ep_size = draw(st.sampled_from([1, 2, 3])) if c.num_experts else 1
    experts = tuple(draw(st.permutations(range(6)))[:3]) if c.num_experts and draw(st.booleans()) else None
    r = Ranks(draw(st.integers(0, tp_size - 1)), tp_size, draw(st.integers(0, ep_size - 1)), ep_size, experts)
    return c, r


@settings(deadline=None, max_examples=120)
@given(ranks(), st.booleans())
def test_served_models(case, nested):
    c, r = case
    check(lambda: TinyServed(c, r, nested=nested), whole_model(c, 1))


class Loads(torch.nn.Module):
    """A module of one parameter `w`, and its loader."""

    def __init__(self, load, *shape, dtype=torch.float32):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full(shape, 7).to(dtype), requires_grad=dtype.is_floating_point)
        self.load = load

    def load_weights(self, weights):
        for name, tensor in weights:
            self.load(self.w, name, tensor)


def whole(**shapes):
    return {n: torch.arange(1, 1 + torch.Size(s).numel(), dtype=torch.float32).view(s) for n, s in shapes.items()}


MOVES = {
    "transposed": lambda w, n, t: w.data.copy_(t.t()),
    "permuted": lambda w, n, t: w.data.copy_(t.permute(1, 0)),
    "copied": lambda w, n, t: w.data.copy_(t.t().contiguous()),
    "cloned in its order": lambda w, n, t: w.data.copy_(t.t().clone()),
    "reshaped over a copy": lambda w, n, t: w.data.view(-1).copy_(t.t().reshape(-1)),
    "flattened": lambda w, n, t: w.data.copy_(t.view(-1).view(4, 6)),
    "flattened and cut": lambda w, n, t: [w.data.view(-1)[a:b].copy_(t.flatten()[a:b]) for a, b in [(0, 5), (5, 17), (17, 24)]],
    "in chunks": lambda w, n, t: [a.copy_(b) for a, b in zip(w.data.t().chunk(3), t.chunk(3), strict=True)],
    "split": lambda w, n, t: [a.copy_(b) for a, b in zip(w.data.split([2, 4], 1), t.t().split([2, 4], 1), strict=True)],
    "unbound": lambda w, n, t: [w.data[:, i].copy_(row) for i, row in enumerate(t.unbind())],
    "indexed": lambda w, n, t: w.data.__setitem__((slice(None), slice(0, 6)), t[:, :].t()),
    "with a step": lambda w, n, t: [w.data[0::2].copy_(t.t()[0::2]), w.data[1::2].copy_(t.t()[1::2])],
    "unsqueezed": lambda w, n, t: w.data.unsqueeze(0).copy_(t.unsqueeze(-1).squeeze(-1).t()[None]),
    "joined again": lambda w, n, t: w.data.copy_(torch.cat([t[:2], t[2:]]).t()),
    "joined the other way around": lambda w, n, t: w.data.copy_(torch.cat([t.t()[:, 3:], t.t()[:, :3]], dim=-1)),
    "stacked": lambda w, n, t: w.data.copy_(torch.stack([t[i] for i in (5, 4, 3, 2, 1, 0)], dim=1)),
    "stacked along its last": lambda w, n, t: w.data.copy_(torch.stack(t.unbind(), dim=-1)),
    "a copy of a copy": lambda w, n, t: w.data.copy_(torch.cat([t.clone()[1:].contiguous(), t[:1]]).t().contiguous()),
    "the same dtype": lambda w, n, t: w.data.copy_(t.to(w.dtype).to(w.device).t()),
    "to a device": lambda w, n, t: w.data.copy_(t.cpu().t()),
    "twice": lambda w, n, t: [w.data.copy_(t.t()) for _ in range(2)],
    "after a constant": lambda w, n, t: [w.data.zero_(), w.data.copy_(t.t())],
    "unflattened": lambda w, n, t: w.data.unflatten(1, (2, 3)).copy_(t.t().unflatten(1, (3, 2)).transpose(1, 2)),
    "detached": lambda w, n, t: w.detach().copy_(t.detach().mT),
    "by the parameter": lambda w, n, t: w.copy_(t.movedim(0, 1)),
    "bytes": lambda w, n, t: w.data.view(torch.int32).copy_(t.view(torch.int32).t()),
}


@pytest.mark.parametrize("move", MOVES)
def test_moves(move):
    with torch.no_grad():
        check(lambda: Loads(MOVES[move], 4, 6), whole(t=(6, 4)))


def test_common_layouts_are_few_fragments():
    for move, count in {"transposed": 1, "copied": 1, "flattened": 1, "in chunks": 3, "joined again": 2, "twice": 1}.items():
        target = TracedTarget(Loads(MOVES[move], 4, 6), metas_of(whole(t=(6, 4))))
        assert len(target.fragments()) == count, move


REFUSED = {
    "arithmetic": (lambda w, n, t: w.data.copy_(t.t() * 2), r"t: the loader computes with it \(mul\)"),
    "in place": (lambda w, n, t: w.data.copy_(t.neg_().t()), r"t: the loader computes with it \(neg_\)"),
    "of the parameter": (lambda w, n, t: w.data.add_(t.t()), r"t: the loader computes with it \(add_\)"),
    "a value": (lambda w, n, t: t[0, 0].item(), "t: .*(_local_scalar_dense|item)"),
    "a condition": (lambda w, n, t: bool(t.any()), r"t: the loader computes with it \(any\)"),
    "a list": (lambda w, n, t: t.tolist(), "t: "),
    "an array": (lambda w, n, t: t.numpy(), "t: "),
    "another dtype": (
        lambda w, n, t: w.data.copy_(t.to(torch.bfloat16).t()),
        "t: the loader converts it from torch.float32 to torch.bfloat16",
    ),
    "another dtype, by copying": (
        lambda w, n, t: w.data.copy_(t.view(torch.int32).t()),
        "t: is torch.int32 and parameter w is torch.float32",
    ),
    "repeated": (lambda w, n, t: w.data.copy_(t[0].unsqueeze(1).expand(4, 6)), "t, into parameter w: one element is repeated"),
    "spread": (lambda w, n, t: w.data.copy_(t[0, :1]), "t: a part of shape .1. is copied into .4, 6. of parameter w"),
    "another shape": (lambda w, n, t: w.data.copy_(t), r"t: a part of shape \[6, 4\] is copied into \[4, 6\]"),
    "elsewhere": (lambda w, n, t: torch.empty(6, 4).copy_(t), "copy_ into a tensor that is none of the module's"),
    "by index": (lambda w, n, t: w.data.copy_(t[torch.tensor([0, 1, 2, 3, 4, 5])].t()), "index"),
    "into an index": (lambda w, n, t: w.data.index_copy_(0, torch.arange(4), t.t()), "index_copy_"),
    "a constant over it": (lambda w, n, t: [w.data.copy_(t.t()), w.data[1].zero_()], "a constant over what it loaded from t"),
    "the parameter itself": (lambda w, n, t: [w.data.copy_(t.t()), w.data.mul_(2)], "changes parameter w by mul_"),
    "a part": (lambda w, n, t: w.data[:, :5].copy_(t.t()[:, :5]), r"leaves 1 parameters unloaded, or parts of them: w\[0:4, 5:6\]"),
    "nothing": (lambda w, n, t: None, r"w\[0:4, 0:6\]"),
    "other memory": (lambda w, n, t: setattr(w, "data", torch.zeros(4, 6)), "other memory in the place of 1 parameters: w"),
    "its own error": (lambda w, n, t: {}["no such name"], "t: the module's loader fails: KeyError: 'no such name'"),
    "with zeros": (lambda w, n, t: w.data.copy_(torch.cat([t, torch.zeros(0, 4)]).t()), "none of the model's"),
    "halves of it": (lambda w, n, t: w.data.copy_(t.view(torch.int16).view(6, 8)[:, :4].t()), "of another size"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    load, says = REFUSED[what]
    module = Loads(load, 4, 6)
    with pytest.raises(PlanError, match=says):
        TracedTarget(module, metas_of(whole(t=(6, 4))))
    if what != "other memory":
        assert (module.w == 7).all()


def test_two_tensors_in_one_place():
    module = Loads(lambda w, n, t: w.data[: len(t)].copy_(t), 4, 6)
    with pytest.raises(PlanError, match="parameter w: the loader writes a and b to the same place"):
        TracedTarget(module, metas_of(whole(a=(4, 6), b=(2, 6))))


def test_too_scattered():
    module = Loads(lambda w, n, t: w.data.copy_(t[::2]), 1 << 17)
    with pytest.raises(PlanError, match="t, into parameter w: is scattered over more than 65536 boxes"):
        TracedTarget(module, [ParamMeta("t", "float32", (1 << 18,))])


def test_what_the_loader_passes_over():
    module = Loads(lambda w, n, t: w.data.copy_(t) if n == "a" else None, 4, 6)
    target = TracedTarget(module, metas_of(whole(a=(4, 6), b=(2, 6), c=(1,))))
    assert target.unused == ("b", "c")


def test_parameters_that_may_stay():
    module = Loads(lambda w, n, t: w.data.copy_(t), 4, 6)
    module.other = torch.nn.Parameter(torch.zeros(3))
    tensors = metas_of(whole(a=(4, 6)))
    with pytest.raises(PlanError, match=r"leaves 1 .*: other\[0:3\]"):
        TracedTarget(module, tensors)
    assert [f.buffer for f in TracedTarget(module, tensors, ignore=["other"]).fragments()] == ["w"]


def test_buffers_are_loaded_too():
    class Biased(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("bias", torch.zeros(4))
            self.register_buffer("table", torch.zeros(9))

        def load_weights(self, weights):
            for name, tensor in weights:
                self.get_buffer(name).copy_(tensor)

    assert [f.buffer for f in TracedTarget(Biased(), metas_of(whole(bias=(4,)))).fragments()] == ["bias"]


def test_a_loader_with_threads():
    def load(weights):
        with ThreadPoolExecutor(2) as pool:
            tasks = [pool.submit(module.get_parameter(name).data.copy_, tensor) for name, tensor in weights]
            tasks += [pool.submit(module.b.data.neg)]
            for task in tasks:
                task.result()

    module = torch.nn.Module()
    module.a, module.b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    submit = ThreadPoolExecutor.submit
    assert len(TracedTarget(module, metas_of(whole(a=(2,), b=(3,))), load).fragments()) == 2
    with pytest.raises(PlanError, match="a: a part of shape"):
        TracedTarget(module, metas_of(whole(a=(3,))), load)
    assert ThreadPoolExecutor.submit is submit


def test_a_thread_of_its_own_is_not_watched():
    def copy(tensor):
        try:
            module.w.data.copy_(tensor.t())
        except NotImplementedError as e:  # there is no memory to copy from
            errors.append(e)

    def load(weights):
        for _, tensor in weights:
            thread = threading.Thread(target=copy, args=[tensor])
            thread.start()
            thread.join()

    errors: list[Exception] = []
    module = Loads(None, 4, 6)
    with pytest.raises(PlanError, match="leaves 1 parameters unloaded"):
        TracedTarget(module, metas_of(whole(t=(6, 4))), load)
    assert errors and (module.w == 7).all()


def test_a_given_loader():
    module = torch.nn.Linear(3, 2, bias=False)
    target = TracedTarget(module, metas_of(whole(x=(2, 3))), load=lambda weights: [module.weight.data.copy_(t) for _, t in weights])
    fill(target, tensors := whole(x=(2, 3)))
    assert torch.equal(module.weight, tensors["x"])
    with pytest.raises(PlanError, match="Linear has no load_weights"):
        TracedTarget(module, [])


def test_bytes_of_another_dtype():
    """A loader that keeps FP8 in a parameter of bytes: the buffer says what the bytes are."""
    module = Loads(lambda w, n, t: w.data.copy_(t.view(torch.uint8)), 4, dtype=torch.uint8)
    target = TracedTarget(module, [ParamMeta("t", "float8_e4m3fn", (4,))])
    assert {n: b.dtype for n, b in target.buffers().items()} == {"w:float8_e4m3fn": torch.float8_e4m3fn}
    fill(target, {"t": torch.tensor([1.0, 2.0, -3.0, 4.0]).to(torch.float8_e4m3fn)})
    assert module.w.view(torch.float8_e4m3fn).float().tolist() == [1.0, 2.0, -3.0, 4.0]


def test_a_module_without_memory():
    with torch.device("meta"):
        module = TinyServed(MOE, Ranks(1, 2, 1, 3))
    real = TinyServed(MOE, Ranks(1, 2, 1, 3))
    metas = metas_of(whole_model(MOE, 1))
    assert TracedTarget(module, metas).fragments() == TracedTarget(real, metas).fragments()


def test_a_parameter_that_lies_otherwise_afterwards():
    module = Loads(MOVES["transposed"], 4, 6)
    target = TracedTarget(module, metas_of(whole(t=(6, 4))))
    module.w = torch.nn.Parameter(torch.zeros(4, 6))
    assert target.buffers()["w"].data_ptr() == module.w.data_ptr()
    module.w = torch.nn.Parameter(torch.zeros(6, 4).t())
    with pytest.raises(PlanError, match="parameter w was"):
        target.buffers()
    del module.w
    with pytest.raises(PlanError, match="gone"):
        target.buffers()


def test_fragments_of_a_module_that_has_no_such_parameter():
    meta = ParamMeta("t", "float32", (3,))
    with pytest.raises(PlanError, match=r"no nothing \(1 such"):
        ModuleTarget(torch.nn.Linear(3, 1), [Fragment(meta, (0,), (3,), "nothing", 0, (4,))])


def test_parameters_that_are_parts_of_one_memory():
    class Packed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            memory = torch.zeros(5, 4)
            self.a, self.b = torch.nn.Parameter(memory[:2]), torch.nn.Parameter(memory[2:])

        def load_weights(self, weights):
            for name, tensor in weights:
                self.get_parameter(name).data.copy_(tensor)

    module = Packed()
    target = TracedTarget(module, metas_of(tensors := whole(a=(2, 4), b=(3, 4))))
    assert sorted((f.buffer, f.offset) for f in target.fragments()) == [("a", 0), ("b", 0)]
    fill(target, tensors)
    assert torch.equal(module.a, tensors["a"]) and torch.equal(module.b, tensors["b"])
