"""Weights that change places with those that are served."""

from __future__ import annotations

import pytest
import torch

from mooncake_ray.engines.served import Served
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.module_target import ModuleTarget
from mooncake_ray.weights.placement import Fragment

ROWS, PADDED, WIDTH = 3, 4, 2


class Model(torch.nn.Module):
    """An embedding with a row that no checkpoint has, and a head that is the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(PADDED, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH, bias=False)
        self.head = torch.nn.Linear(WIDTH, PADDED, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            self.embed.weight.zero_()


@pytest.fixture
def model() -> Model:
    return Model()


def shard(model: Model) -> ModuleTarget:
    strides = (WIDTH * 4, 4)
    embed = ParamMeta("embed.weight", "float32", (ROWS, WIDTH))
    norm = ParamMeta("norm.weight", "float32", (WIDTH,))
    return ModuleTarget(
        model, [Fragment(embed, (0, 0), (ROWS, WIDTH), "embed.weight", 0, strides), Fragment(norm, (0,), (WIDTH,), "norm.weight", 0, (4,))]
    )


def pieces(value: float) -> dict:
    return {"pieces": [(0, torch.full((ROWS, WIDTH), value)), (1, torch.full((WIDTH,), value))]}


def one_more(targets) -> None:
    targets[0].add_(1.0)


def update(served: Served, value: float, version: int, between=lambda: None) -> None:
    served.open()
    info = pieces(value)
    served.prepare(info)
    between()
    served.look_again()
    served.check(info)
    served.write(info)
    served.finish(version)


def has(model: Model, value: float) -> bool:
    embed = torch.cat([torch.full((ROWS, WIDTH), value), torch.zeros(1, WIDTH)])
    return torch.equal(model.embed.weight, embed) and torch.equal(model.head.weight, embed) and bool((model.norm.weight == value).all())


def test_what_is_served_is_served_until_they_change_places(model):
    served = Served("model", shard(model), model)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    at = model.embed.weight.data_ptr()
    update(served, 1.0, 0)
    first = model.embed.weight.data_ptr()
    assert first != at and has(model, 1.0)
    seen = []
    update(served, 2.0, 1, lambda: seen.append(has(model, 1.0)))
    assert seen == [True] and has(model, 2.0)
    assert model.embed.weight.data_ptr() == at, "two memories take turns"
    update(served, 3.0, 2)
    assert has(model, 3.0) and model.head.weight is model.embed.weight
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters


def test_changes_of_what_is_served(model):
    """Each time against a copy of what is served, whatever the other memory had."""
    served = Served("model", shard(model), model)
    update(served, 1.0, 0)
    for version in (1, 2, 3):
        served.open()
        info = {"apply": one_more}
        served.prepare(info)
        assert bool((model.embed.weight[:ROWS] == version).all()), "it is served until they change places"
        served.look_again()
        served.write(info)
        served.finish(version)
        assert bool((model.embed.weight[:ROWS] == version + 1).all()) and bool((model.norm.weight == 1.0).all())


def test_an_update_in_place_between(model):
    served = Served("model", shard(model), model)
    update(served, 1.0, 0)
    served.open()
    served.write({"apply": lambda targets: [t.fill_(5.0) for t in targets] and None})
    served.finish(1)
    assert has(model, 5.0)
    update(served, 2.0, 2)
    assert has(model, 2.0)


@pytest.mark.parametrize("look", [lambda model: model.embed.weight.data, lambda model: model.embed.weight.detach()[1:]])
def test_what_something_else_looks_at_stays_where_it_is(model, look):
    served = Served("model", shard(model), model)
    model.norm.seen = look(model)
    at = model.embed.weight.data_ptr()
    update(served, 1.0, 0)
    assert has(model, 1.0) and model.embed.weight.data_ptr() == at and bool((model.norm.seen[:1] == 1.0).all())


def test_what_comes_to_look_at_it_while_it_is_prepared(model):
    served = Served("model", shard(model), model)
    at = model.embed.weight.data_ptr()
    update(served, 1.0, 0, lambda: setattr(model.norm, "seen", model.embed.weight.data))
    assert has(model, 1.0) and model.embed.weight.data_ptr() == at


def test_one_that_is_given_up_changes_nothing(model):
    served = Served("model", shard(model), model)
    update(served, 1.0, 0)
    served.open()
    served.prepare(pieces(2.0))
    served.abort()
    assert has(model, 1.0) and not served.poisoned
    served.open()
    broken = {"pieces": iter([(0, torch.full((ROWS, WIDTH), 9.0)), (7, torch.zeros(1))])}
    with pytest.raises(ValueError, match="no fragment 7"):
        served.prepare(broken)
    served.abort()
    assert has(model, 1.0) and not served.poisoned
    update(served, 3.0, 1)
    assert has(model, 3.0)
