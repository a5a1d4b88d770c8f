"""What is particular to our decorator: memory comes back, and what stays an ordinary function or class. (Its forms are oracle cases.)"""

from __future__ import annotations

import pytest
from conftest import until
from test_install import script

import mooncake_ray

KIT = """
import gc, weakref
os.environ["MOONCAKE_RAY_CAPACITY_BYTES"] = "128M"
def T(v): return {"t": torch.full((N,), float(v))}
def first(b): return float(b["t"][0])
"""


def test_first_call_of_a_process_is_a_dynamic_generator():
    """Nothing was routed before, and its items must not be taken for its returns."""
    script(
        KIT
        + """
@mooncake_ray.remote(num_returns="dynamic")
def items(n):
    for i in range(n): yield T(i)
ray_init()
outer = items.remote(3)
refs = list(ray.get(outer))
until(lambda: mooncake_ray.pool_stats()["claims_unanswered"] == 0, "an owner of all")
del outer
gc.collect()
assert [first(ray.get(ref)) for ref in refs] == [0, 1, 2] and mooncake_ray.pool_stats()["orphans"] == 0
ray.get(ray.put(1))
assert mooncake_ray.pool_stats()["objects"] == 3
del refs
settles()
"""
    )


def test_body_called_by_an_undecorated_task():
    """Its caller knows nothing of the pool, so what it returns must not be there."""
    script(
        KIT
        + """
ray_init()
@mooncake_ray.remote
def inner(v): return T(v)
@ray.remote
def outer(v): return inner(v)
class Base:
    @mooncake_ray.remote
    def make(self, v): return T(v)
@ray.remote
class Child(Base):
    def make(self, v): return super().make(v)
    def other(self, v): return self.make(v)
child = Child.remote()
refs = [outer.remote(1), child.make.remote(2), child.other.remote(3)]
assert [first(b) for b in ray.get(refs)] == [1, 2, 3] and mooncake_ray.stats()["opened"] == 0
assert first(ray.get(inner.remote(4))) == 4 and mooncake_ray.stats()["opened"] == 1
settles()
"""
    )


def test_inherited_methods_are_routed_and_parents_left_alone():
    script(
        KIT
        + """
ray_init()
class Parent:
    def make(self, v): return T(v)
    @staticmethod
    def static(v): return T(v)
    @classmethod
    def of_class(cls, v): return T(v)
plain = dict(vars(Parent))
@mooncake_ray.remote
class Child(Parent):
    def own(self, v): return T(v)
class Grandchild(Child):
    def newest(self, v): return T(v)
@mooncake_ray.remote
class Sibling(Child):
    pass
assert dict(vars(Parent)) == plain and isinstance(Child, type) and first(Child().make(1)) == 1 and Child().own(2)["t"].sum() == 2 * N
opened = 0
for cls, methods in ((Child, "make static of_class own"), (Grandchild, "make own newest"), (Sibling, "make own")):
    actor = cls.options(num_cpus=0).remote()
    for name in methods.split():
        assert first(ray.get(getattr(actor, name).remote(3))) == 3
        opened += 1
        assert mooncake_ray.stats()["opened"] == opened, (cls, name)
settles()
"""
    )


def test_a_decorated_function_can_go():
    script(
        KIT
        + """
def made():
    big = T(1)
    @mooncake_ray.remote
    def f(): return first(big)
    @mooncake_ray.remote
    class C:
        def f(self): return first(big)
    return f, C
f, C = made()
gone = [weakref.ref(f), weakref.ref(C)]
assert hasattr(f, "remote") and callable(C.remote)
del f, C
gc.collect()
assert [w() for w in gone] == [None, None]
"""
    )


@pytest.mark.parametrize("who", ["task", *(pytest.param(who, marks=pytest.mark.slow) for who in ("actor", "async actor"))])
def test_abandoned_and_slow_readers_of_generators(pool, pool_ray, who):
    """Backpressure bounds what is in the pool; what an abandoned generator had made goes."""
    ray = pool_ray
    import torch

    @mooncake_ray.remote(num_cpus=0)
    class Streams:
        def make(self, n):
            for i in range(n):
                yield torch.full((1 << 18,), float(i))

    @mooncake_ray.remote(num_cpus=0)
    class AsyncStreams:
        async def make(self, n):
            for i in range(n):
                yield torch.full((1 << 18,), float(i))

    @mooncake_ray.remote(num_cpus=0)
    def task(n):
        for i in range(n):
            yield torch.full((1 << 18,), float(i))

    make = {"task": lambda: task, "actor": lambda: Streams.remote().make, "async actor": lambda: AsyncStreams.remote().make}[who]()
    for i, ref in enumerate(make.options(_generator_backpressure_num_objects=2).remote(30)):
        assert float(ray.get(ref)[0]) == i
        until(lambda: pool.objects <= 4, "no more than two ahead, the one made and the one read")
    del ref
    pool.settles_at(0)
    stream = make.remote(20)
    kept = [next(stream) for _ in range(3)]
    del stream
    pool.settles_at(3)
    assert [float(ray.get(ref)[0]) for ref in kept] == [0, 1, 2]
    del kept
    pool.settles_at(0)
    if who == "async actor":
        return
    refs = list(ray.get(make.options(num_returns="dynamic").remote(6)))
    del refs[1:]
    gone = [float(ray.get(ref)[0]) for ref in refs]
    assert gone == [0]
    del refs
    pool.settles_at(0)
