"""Every form in which Ray's decorator, or ours, is written."""

from __future__ import annotations

import asyncio
import functools

import ray
import torch
from oracle_outcome import described

from oracle_cases.flavour import above, below, remote
from oracle_cases.helpers import drain, error_of, kind_of
from oracle_cases.payloads import DomainError, array, floats
from oracle_cases.registry import case
from oracle_cases.remotes import Gate

SCALE, THIRD = floats(3), array(1)

# Functions -------------------------------------------------------------------------------------


@remote
def bare(tensor, factor=2):
    """What it does."""
    return tensor * factor


@remote(num_cpus=0.5, max_retries=1)
def with_options(tensor, *, factor=2):
    return tensor * factor


@above
@ray.remote(num_returns=2)
def ours_above(tensor):
    return tensor + 1, described(tensor)


@ray.remote(num_cpus=0.5)
@below
def ours_below(tensor):
    return tensor - 1


@remote(num_returns="dynamic")
def dynamic(count, fail_at=None):
    for i in range(count):
        if i == fail_at:
            raise DomainError("in a dynamic generator", floats(i))
        yield floats(i)


@remote(num_returns="streaming")
def streaming(count):
    for i in range(count):
        yield {"i": i, "t": floats(i)}


@remote
def generating(count):
    sent = yield floats(0)
    yield from (floats(i) for i in range(1, count))
    return sent


@remote
def keywords_only(*, tensor, scale=SCALE, **others):
    return tensor * scale, others


@remote
def many_kinds(first, /, second, *rest, third=THIRD, **others):
    return described([first, second, rest, third, others])


@remote
def calls_another(tensor):
    return ray.get(bare.remote(tensor)), ray.get(with_options.remote(ray.put(tensor), factor=3))


@remote
def calls_itself(tensor, depth):
    return tensor if depth == 0 else ray.get(calls_itself.options(num_cpus=0).remote(tensor + 1, depth - 1))


double = remote(lambda tensor: tensor * 2)


@case
def functions_in_every_form():
    refs = [bare.remote(floats()), with_options.remote(floats(1)), *ours_above.remote(floats(2)), ours_below.remote(floats(3))]
    return ray.get([*refs, bare.options(name="named", num_cpus=0).remote(ray.put(floats(4)), factor=5)])


@case
def generators_in_every_form():
    items = ray.get(dynamic.remote(3))
    by_option = generating.options(num_returns="dynamic").remote(3)
    return [ray.get(list(items)), drain(streaming.remote(3)), drain(generating.remote(3)), ray.get(list(ray.get(by_option)))]


@case
def dynamic_generator_that_fails():
    return [_items_and_error(dynamic.remote(4, fail_at)) for fail_at in (2, 0)]


def _items_and_error(outer):
    got = []
    for ref in ray.get(outer):
        value = error_of(ray.get, ref)
        got.append(value["no error, but"] if isinstance(value, dict) else value)
    return got


@case
def signatures_in_every_form():
    given = [keywords_only.remote(tensor=floats()), keywords_only.remote(tensor=floats(1), scale=ray.put(floats(2)), more=array())]
    given += [many_kinds.remote(floats(), array()), many_kinds.remote(1, 2, floats(2), third=ray.put(floats(4)), fourth=[5])]
    wrong = [kind_of(keywords_only.remote, floats()), kind_of(many_kinds.remote, 1), kind_of(bare.remote), kind_of(bare.remote, 1, other=2)]
    return [ray.get(given), wrong]


@case
def lambdas_and_nested_functions():
    captured, numbers = floats(5), array(1)

    @remote
    def nested(tensor):
        return tensor + captured, numbers

    @remote(num_returns=2)
    def nested_two(tensor):
        return ray.get(nested.remote(tensor))

    made = [remote(lambda tensor, k=k: tensor * k) for k in range(3)]
    refs = [double.remote(floats()), nested.remote(floats(1)), *nested_two.remote(floats(2)), *(f.remote(floats(3)) for f in made)]
    return ray.get(refs)


@case
def functions_that_call_functions():
    return ray.get([calls_another.remote(floats()), calls_itself.remote(floats(1), 3)])


@case
def what_is_no_function_is_refused():
    wrong = [functools.partial(floats, 1), floats.__get__(1), len]
    refused = [isinstance(error_of(remote, target), Exception) for target in (3, "text", None, floats(), [floats])]
    return [kind_of(remote, target)[0] for target in wrong], [kind_of(remote(num_cpus=1), target)[0] for target in wrong], refused


@case
def wrong_options_are_refused():
    calls = [lambda: remote(num_returns=-3)(floats), lambda: remote(nonsense=1)(floats), lambda: remote(num_cpus=-1)(floats)]
    calls += [lambda: bare.options(nonsense=1).remote(floats()), lambda: remote(floats, num_cpus=1), lambda: remote(floats, array)]
    return [error_of(call) is not None and "no error, but" not in str(error_of(call)) for call in calls]


@case
def functions_bound_in_a_graph():
    node = bare.bind(ours_below.bind(floats()), factor=3)
    return ray.get([node.execute(), with_options.options(num_cpus=0).bind(floats(1), factor=4).execute()])


@case
def function_sent_to_a_task():
    @ray.remote
    def use(function, tensor):
        return ray.get(function.remote(tensor))

    @remote
    def nested(tensor):
        return tensor + 7

    return ray.get([use.remote(with_options, floats()), use.remote(ours_below, floats(1)), use.remote(nested, floats(2))])


# Classes ---------------------------------------------------------------------------------------


class Plain:
    """A parent that knows nothing of Ray."""

    def __init__(self, value):
        self.value = value

    def read(self):
        return self.value

    def overridden(self, tensor):
        return tensor + 1

    @ray.method(num_returns=2)
    def parents_two(self, tensor):
        return tensor, self.overridden(tensor)

    def parents_stream(self, count):
        for i in range(count):
            yield self.overridden(floats(i))

    @staticmethod
    def parents_static(tensor):
        return tensor * 3


class Child(Plain):
    def overridden(self, tensor):
        return super().overridden(tensor) * 10

    def own(self, tensor):
        return tensor - 1, self.value


class Side(Plain):
    def overridden(self, tensor):
        return super().overridden(tensor) + 1000


@remote(num_cpus=0)
class DecoratedChild(Child):
    def last(self, tensor):
        return self.own(tensor)[0], self.parents_static(tensor)


@remote(num_cpus=0)
class DecoratedDiamond(Child, Side):
    pass


@ray.remote(num_cpus=0)
@below
class Full:
    """All kinds of methods."""

    shared = floats(50)

    def __init__(self, value, *, extra=None):
        self.value, self.extra = value, extra

    def __call__(self, tensor):
        return tensor + self.value

    def __len__(self):
        return 7

    @property
    def doubled(self):
        return self.value * 2

    def method(self, tensor, *args, factor=2, **kwargs):
        return tensor * factor, args, kwargs, self.doubled

    @staticmethod
    def static(tensor):
        return tensor + 1

    @classmethod
    def of_class(cls, tensor):
        return tensor + cls.shared, cls.__name__

    def stream(self, count):
        for i in range(count):
            yield self.value + i

    @below
    @ray.method(num_returns=2)
    def two_inside(self, tensor):
        return tensor, self.value

    @ray.method(num_returns=2)
    @below
    def two_outside(self, tensor):
        return tensor, self.value

    @ray.method
    def nothing_said(self, tensor):
        return tensor

    def _private(self, tensor):
        return tensor - 2

    def calls_itself(self, tensor):
        return self.method(tensor)[0], list(self.stream(2)), self(tensor), len(self)

    def refs(self, tensor):
        return [ray.put(tensor), bare.remote(tensor)]

    def die(self):
        ray.actor.exit_actor()

    def name(self):
        return (
            type(self).__name__,
            type(self).__qualname__,
            self.method.__name__,
            Full.__name__ if isinstance(Full, type) else "actor class",
        )


@above
@ray.remote(num_cpus=0, concurrency_groups={"io": 2})
class AsyncFull:
    def __init__(self, value):
        self.value, self.met = value, asyncio.Event()

    async def method(self, tensor):
        await asyncio.sleep(0)
        return tensor + self.value

    @ray.method(concurrency_group="io")
    @below
    async def arrive(self, tensor):
        await self.met.wait()
        return tensor

    @below
    @ray.method(concurrency_group="io")
    async def release(self, tensor):
        self.met.set()
        return tensor

    async def stream(self, count):
        try:
            for i in range(count):
                await asyncio.sleep(0)
                yield self.value + i
        finally:
            self.met.set()

    async def wait_for_the_end_of_the_stream(self):
        await self.met.wait()
        return self.value

    async def __call__(self, tensor):
        return tensor


@ray.remote(num_cpus=0)
class SomeMethods:
    """Only some methods are ours."""

    def __init__(self, value):
        self.value = value

    @below
    def ours(self):
        return self.value

    def rays(self):
        return self.ours() + 1

    @below
    def stream(self, count):
        for i in range(count):
            yield self.value + i


@case
def classes_in_every_form():
    full = Full.remote(floats(1), extra=ray.put(array()))
    calls = [
        full.method.remote(floats(), array(), factor=3, more=floats(4)),
        full.static.remote(floats(2)),
        full.of_class.remote(floats(3)),
    ]
    calls += [*full.two_inside.remote(floats()), *full.two_outside.remote(floats()), full.nothing_said.remote(floats(9))]
    calls += [full.calls_itself.remote(floats()), full.__call__.remote(floats()), full._private.remote(floats()), full.__len__.remote()]
    refs = full.refs.remote(floats(6))
    return [ray.get(calls), drain(full.stream.remote(3)), ray.get(ray.get(refs)), ray.get(full.name.remote())]


@case
def methods_with_options():
    full = Full.options(name="forms-full").remote(floats(1))
    three = full.method.options(num_returns=4, name="call").remote(floats())
    stream = full.stream.options(num_returns="streaming", _generator_backpressure_num_objects=1).remote(3)
    dynamic_items = full.stream.options(num_returns="dynamic").remote(3)
    return [ray.get(three), drain(stream), ray.get(list(ray.get(dynamic_items))), ray.get(full.static.options(name="x").remote(floats()))]


@case
def async_classes_in_every_form():
    actor = AsyncFull.remote(floats(1))
    waiting = actor.arrive.remote(floats())
    first = ray.get([actor.method.remote(floats(i)) for i in range(3)])
    released = actor.release.remote(floats(4))
    return [first, ray.get([waiting, released, actor.__call__.remote(floats(5))]), drain(actor.stream.remote(3))]


@case
def async_stream_abandoned_ends_its_body():
    actor = AsyncFull.remote(floats(1))
    stream = actor.stream.remote(3)
    first = ray.get(next(stream))
    del stream
    return [first, ray.get(actor.wait_for_the_end_of_the_stream.remote())]


@case
def some_methods_are_ours():
    actor = SomeMethods.remote(floats(1))
    return [ray.get([actor.ours.remote(), actor.rays.remote()]), drain(actor.stream.remote(3))]


@case
def inherited_methods():
    actor = DecoratedChild.remote(floats(1))
    calls = [
        actor.read.remote(),
        actor.overridden.remote(floats()),
        *actor.parents_two.remote(floats(2)),
        actor.parents_static.remote(floats()),
    ]
    calls += [actor.own.remote(floats(3)), actor.last.remote(floats(4))]
    return [ray.get(calls), drain(actor.parents_stream.remote(3))]


@case
def inherited_methods_in_a_diamond():
    actor = DecoratedDiamond.remote(floats(1))
    return [ray.get([actor.overridden.remote(floats()), *actor.parents_two.remote(floats(2))]), drain(actor.parents_stream.remote(2))]


@case
def class_captured_and_sent():
    captured = floats(3)

    @remote(num_cpus=0)
    class Nested(Plain):
        def overridden(self, tensor):
            return super().overridden(tensor) + captured

    @ray.remote
    def use(cls, value):
        actor = cls.remote(value)
        return ray.get([actor.read.remote(), actor.overridden.remote(value)])

    return ray.get([use.remote(Nested, floats()), use.remote(DecoratedChild, floats(1))])


@case
def handles_sent_to_others():
    full = Full.remote(floats(1))

    @ray.remote
    def use(actors, tensor):
        (actor,) = actors
        one, two = actor.two_inside.remote(tensor)
        return ray.get([one, two, actor(tensor) if callable(actor) else actor.__call__.remote(tensor)]), drain(actor.stream.remote(2))

    return ray.get(use.remote([full], floats(2)))


@case
def class_bound_in_a_graph():
    node = Full.bind(floats(1))
    return ray.get([node.nothing_said.bind(bare.bind(floats())).execute(), node.static.bind(floats(2)).execute()])


@case
def class_restarts():
    gate = Gate("forms_class_restarts")

    @remote(num_cpus=0)
    class Mortal:
        def __init__(self, value):
            self.value = value

        def die_at_first(self, tensor):
            import os

            if gate.next() == 1:
                os._exit(1)
            return tensor + self.value

    actor = Mortal.options(max_restarts=1, max_task_retries=1).remote(1)
    return ray.get(actor.die_at_first.remote(floats()))


@case
def class_named_and_detached():
    options = {"name": "forms-detached", "lifetime": "detached", "get_if_exists": True}
    first, second = Full.options(**options).remote(floats(1)), Full.options(**options).remote(floats(2))
    found = ray.get_actor("forms-detached")
    values = ray.get([actor.static.remote(floats()) for actor in (first, second, found)])
    kept = ray.get(found.two_inside.remote(floats(4)))
    ray.kill(found)
    return [values, kept]


@case
def class_with_its_own_exit():
    full = Full.remote(floats(1))
    kept = full.static.remote(floats())
    ray.wait([kept])
    kind_of(ray.get, full.die.remote())
    while not isinstance(kind_of(ray.get, full.static.remote(floats())), list):
        pass
    return [ray.get(kept), kind_of(ray.get, full.static.remote(floats()))]


@case
def arguments_of_methods_are_checked():
    full = Full.remote(floats(1))
    calls = [full.method.remote, full.static.remote, full.of_class.remote]
    wrong = [kind_of(call) for call in calls] + [kind_of(full.static.remote, 1, 2), kind_of(full.static.remote, 1, other=2)]
    return [wrong, kind_of(lambda: full.no_such_method), kind_of(Full.remote), kind_of(Full.remote, 1, other=2)]


@case
def modules_as_actors():
    """A class with a large parent of its own."""

    @remote(num_cpus=0)
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(256, 384, bias=False)
            with torch.no_grad():
                self.linear.weight.copy_(floats(shape=(384, 256)))

        def forward(self, tensor):
            return self.linear(tensor)

        def run(self, tensor):
            with torch.no_grad():
                return self(tensor)

    model = Model.remote()
    return ray.get(
        [model.run.remote(torch.ones(300, 256)), model.get_parameter.remote("linear.weight"), model.forward.remote(torch.ones(1, 256))]
    )
