"""The reference engine, over a model with fused parameters that its own loader describes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engine_suite import EngineSuite, pieces
from serving_models import Sizes, TinyServed, metas_of, whole_model

from mooncake_ray.engines import engine_names, get_engine, register_engine
from mooncake_ray.engines.torch_module import TorchModuleEngine
from mooncake_ray.errors import ConfigError, PlanError, WeightSyncError
from mooncake_ray.weights.digest import content_digest
from mooncake_ray.weights.tracing import TracedTarget

SIZES = Sizes()
PROMPT = torch.tensor([[1, 4, 2, 7, 5]])


def loaded(version: int) -> TinyServed:
    module = TinyServed(SIZES)
    module.load_weights(whole_model(SIZES, version).items())
    return module


class TestTorchModule(EngineSuite):
    name = "torch_module"

    def make(self):
        module = loaded(1)
        return TorchModuleEngine(module, shard=TracedTarget(module, metas_of(self.whole(1))), weight_version=1)

    def whole(self, version):
        return whole_model(SIZES, version)

    def before_each_token(self, engine, call):
        return engine.module.register_forward_pre_hook(lambda *_: call()).remove

    def answer(self, engine):
        return engine.forward(PROMPT).tolist()

    def expected(self, version):
        with torch.no_grad():
            return loaded(version)(PROMPT).tolist()


class Derives(torch.nn.Module):
    """Keeps a product of its weights."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(3, 3))
        self.b = torch.nn.Parameter(torch.ones(3, 3))
        self.product = self.compute(self)

    @staticmethod
    def compute(module):
        return (module.a @ module.b).detach()

    def forward(self, x):
        return x @ self.product


def new_weights(engine, version, **whole):
    engine.start_weight_update()
    engine.pause()
    engine.update_weights({"pieces": pieces(engine, whole)})
    engine.finish_weight_update(version)
    engine.resume()


TWOS = {"a": torch.full((3, 3), 2.0), "b": torch.full((3, 3), 2.0)}


def test_what_is_derived_is_computed_anew_where_it_is():
    module = Derives()
    engine = TorchModuleEngine(module, derived={"product": Derives.compute})
    captured = module.product  # as a CUDA graph would keep it
    new_weights(engine, 1, **TWOS)
    assert captured.tolist() == module.product.tolist() == torch.full((3, 3), 12.0).tolist()
    assert module.product.data_ptr() == captured.data_ptr()
    assert engine.forward(torch.eye(3)).tolist() == captured.tolist()


def test_a_hook_that_makes_it_anew_elsewhere_poisons():
    module = Derives()

    def post_load(module):
        module.product = Derives.compute(module)

    engine = TorchModuleEngine(module, post_load=post_load)
    with pytest.raises(WeightSyncError, match=r"1 tensors are not where they were .*product"):
        new_weights(engine, 1, **TWOS)
    assert "product" in engine.poisoned


def test_a_hook_that_fails_poisons_and_another_update_heals():
    module = Derives()
    fail = [True]

    def post_load(module):
        if fail.pop():
            raise RuntimeError("no kernel for that")

    engine = TorchModuleEngine(module, derived={"product": Derives.compute}, post_load=post_load)
    with pytest.raises(RuntimeError):
        new_weights(engine, 1, **TWOS)
    assert "no kernel" in engine.poisoned
    fail.append(False)
    engine.resume()
    new_weights(engine, 1, **TWOS)
    assert engine.forward(torch.eye(3)).tolist() == torch.full((3, 3), 12.0).tolist()


def test_what_is_derived_keeps_its_shape():
    engine = TorchModuleEngine(Derives(), derived={"product": lambda m: m.a[0].detach()})
    with pytest.raises(WeightSyncError, match="product was"):
        new_weights(engine, 1, **TWOS)
    with pytest.raises(PlanError, match="no nothing"):
        TorchModuleEngine(Derives(), derived={"nothing": Derives.compute})
    with pytest.raises(PlanError, match="no tensor but bool"):
        TorchModuleEngine(Derives(), derived={"training": Derives.compute})


def test_the_modules_own_hook():
    class Own(Derives):
        def post_load_weights(self):
            self.product.copy_(self.compute(self))

    module = Own()
    new_weights(TorchModuleEngine(module), 1, **TWOS)
    assert module.product.tolist() == torch.full((3, 3), 12.0).tolist()


def test_checksums_say_what_differs():
    one, other = (TorchModuleEngine(Derives()) for _ in range(2))
    assert one.checksums() == other.checksums()
    new_weights(one, 1, a=TWOS["a"], b=torch.ones(3, 3))
    assert [n for n, s in one.checksums().items() if other.checksums()[n] != s] == ["a"]


def test_digests_do_not_depend_on_the_layout():
    """Of a fused, transposed module as of a plain one; a box that is there twice counts once."""

    def digest(view, lo, shape):
        rows = torch.arange(view.shape[0]).view(-1, *[1] * (view.dim() - 1)) + lo[0] + 1
        return int((rows * (view * 64).long()).sum())

    class Fused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(3, 9))

        def load_weights(self, weights):
            for name, tensor in weights:
                self.w.data[:, :3].copy_(tensor.t()) if name == "a" else [self.w.data[:, at : at + 3].copy_(tensor) for at in (3, 6)]

    whole = {n: torch.arange(9.0).view(3, 3) + k for k, n in enumerate("ab")}
    module = Fused()
    fused = TorchModuleEngine(module, shard=TracedTarget(module, metas_of(whole)))
    plain = TorchModuleEngine(Derives())
    for engine in (fused, plain):
        new_weights(engine, 1, **whole)
    assert fused.digests() == plain.digests() == {n: content_digest(t, (0, 0), (3, 3)) for n, t in whole.items()}
    assert fused.digests(digest) == plain.digests(digest) == {n: digest(t, (0, 0), (3, 3)) for n, t in whole.items()}


def test_digests_wait_for_what_writes():
    engine = TorchModuleEngine(Derives())
    looked = threading.Event()

    def digest(view, lo, shape):
        looked.set()
        return 0

    with ThreadPoolExecutor(1) as pool:

        def slow():
            for piece in pieces(engine, TWOS):
                asked.append(pool.submit(engine.digests, digest))
                yield piece
                assert not looked.wait(0.01)

        asked = []
        engine.start_weight_update()
        engine.pause()
        engine.update_weights({"pieces": slow()})
        assert asked[0].result(60) == {"a": 0, "b": 0}
        engine.finish_weight_update(1)
        engine.resume()


def test_registry():
    assert engine_names() == ["torch_module"] and get_engine("torch_module") is TorchModuleEngine
    with pytest.raises(ConfigError, match="there are torch_module"):
        get_engine("none_such")
    with pytest.raises(ValueError, match="there already"):
        register_engine("torch_module", "elsewhere:Engine")
    with pytest.raises(ValueError, match="module:Class"):
        register_engine("other", "elsewhere")
    with pytest.raises(ValueError, match="needs a name"):
        register_engine("", "elsewhere:Engine")
    register_engine("torch_module", TorchModuleEngine)  # what is there anyway
