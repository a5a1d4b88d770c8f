"""Memory follows Ray's reference counting: nothing that is referenced or viewed goes, everything else comes back."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import os
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import until

import mooncake_ray

N = 1 << 18  # elements: 1 MiB of float32


def batch(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"t": torch.full((N,), float(value))}


def first(b) -> float:
    return float(b["t"][0])


@pytest.fixture(scope="module")
def kit(pool_ray):
    """Actors and tasks, made once."""
    import ray

    @ray.remote
    class Worker:
        def make(self, value=1.0):
            return batch(value)

        def two(self):
            return batch(1), 7, batch(2)

        def stream(self, n):
            for i in range(n):
                yield batch(i)

        def use(self, b, *, extra=None):
            return first(b) + (first(extra) if extra is not None else 0.0)

        def use_nested(self, refs):
            return first(ray.get(refs[0]))

        def keep(self, thing):
            self.kept = thing
            return True

        def keep_slice(self, b):
            self.kept = b["t"][10:20]
            return True

        def kept_sum(self):
            return float(self.kept.sum())

        def drop(self):
            self.kept = None
            gc.collect()

        def put(self, value):
            return [ray.put(batch(value))]

        def pass_on(self, b):
            return b

        def stats(self):
            return mooncake_ray.stats()

        def boom(self, b):
            raise ValueError("application error")

        def pid(self):
            return os.getpid()

        def block(self):
            signal.pause()

    @ray.remote
    class Async:
        async def make(self, value):
            await asyncio.sleep(0)
            return batch(value)

        async def use(self, b):
            return first(b)

        async def stream(self, n):
            for i in range(n):
                await asyncio.sleep(0)
                yield batch(i)

        async def pid(self):
            return os.getpid()

    @ray.remote
    def make(value):
        return batch(value)

    @ray.remote
    def use(b):
        return first(b)

    @ray.remote
    def echo(b):
        return b

    class Kit:
        pass

    k = Kit()
    k.Worker, k.Async, k.make, k.use, k.echo, k.ray = Worker, Async, make, use, echo, ray
    k.a, k.b, k.async_ = Worker.remote(), Worker.remote(), Async.remote()
    ray.get([k.a.pid.remote(), k.b.pid.remote(), k.async_.pid.remote()])
    return k


def gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def kill(ray, actor) -> None:
    pid = ray.get(actor.pid.remote())
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid), "the actor's death")


def test_put_lives_as_long_as_its_ref(pool, kit):
    ref = kit.ray.put(batch())
    assert pool.objects == 1
    assert first(kit.ray.get(ref)) == 1
    gc.collect()
    assert pool.objects == 1 and pool.pins == 0
    del ref
    pool.settles_at(0)


def test_view_outlives_the_ref(pool, kit):
    ref = kit.ray.put(batch(5))
    part = kit.ray.get(ref)["t"][7:9]
    del ref
    until(lambda: pool.claims == 0)
    assert pool.objects == 1 and part.tolist() == [5, 5]
    del part
    pool.settles_at(0)


def test_array_view_outlives_the_ref(pool, kit):
    ref = kit.ray.put(np.arange(N))
    part = kit.ray.get(ref)[3:5]
    del ref
    until(lambda: pool.claims == 0)
    assert part.tolist() == [3, 4] and not part.flags.writeable
    del part
    pool.settles_at(0)


def test_one_object_for_many_tensors(pool, kit):
    ref = kit.ray.put({i: torch.full((3000,), i) for i in range(200)})
    assert pool.objects == 1 and pool.claims == 1
    assert all(bool((t == i).all()) for i, t in kit.ray.get(ref).items())


def test_no_cycles_hold_memory(pool, kit):
    gc.collect()
    gc.disable()
    try:
        ref = kit.ray.put([batch(), {"deep": [batch(2)]}])
        got = kit.ray.get(ref)
        assert first(got[1]["deep"][0]) == 2
        del ref, got
        until(lambda: pool.objects == 0, "memory back without a garbage collection")
    finally:
        gc.enable()


def test_by_value_argument(pool, kit):
    for value in range(20):
        assert kit.ray.get(kit.a.use.remote(batch(value))) == value
    pool.settles_at(0)


def test_by_value_arguments_queue_up(pool, kit):
    results = [kit.a.use.remote(batch(i), extra=batch(100)) for i in range(30)]
    assert kit.ray.get(results) == [i + 100 for i in range(30)]


def test_by_value_argument_from_many_threads(pool, kit):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda i: kit.ray.get(kit.use.remote(batch(i))), range(24)))
    assert answers == list(range(24))


def test_argument_by_ref_may_be_dropped_at_once(pool, kit):
    assert kit.ray.get(kit.a.use.remote(kit.ray.put(batch(3)), extra=kit.b.make.remote(4))) == 7
    assert kit.ray.get(kit.use.remote(kit.make.remote(5))) == 5


def test_chain_of_tasks_drops_what_is_behind(pool, kit):
    ref = kit.a.make.remote(1)
    for _ in range(6):
        ref = kit.b.pass_on.remote(kit.a.pass_on.remote(ref))
    assert first(kit.ray.get(ref)) == 1
    until(lambda: pool.objects == 1, "only one object left of a chain")


@pytest.mark.parametrize("made", ["put", "return", "return of an async actor", "return of a task"])
def test_what_a_kept_return_was_made_of(pool, kit, made):
    """Dropped before the return, it is that one's lineage: what it contains, Ray would not let go of in the end."""
    makes = {"put": lambda: kit.ray.put(batch(2)), "return": lambda: kit.a.make.remote(2)}
    makes |= {"return of an async actor": lambda: kit.async_.make.remote(2), "return of a task": lambda: kit.make.remote(2)}
    source = makes[made]()
    product = kit.echo.remote(source)
    assert first(kit.ray.get(product)) == 2
    del source
    gc.collect()
    assert pool.objects == 1  # the product passes on what its source is
    del product
    pool.settles_at(0)


def test_argument_waits_in_a_queue(pool, kit):
    """The value was inlined long before the task runs."""
    actor = kit.Worker.remote()
    blocked = actor.block.remote()
    later = actor.use.remote(kit.ray.put(batch(8)))
    kit.ray.wait([blocked], timeout=0.2)
    assert pool.objects == 1
    del blocked
    kit.ray.kill(actor)
    with pytest.raises(kit.ray.exceptions.RayActorError):
        kit.ray.get(later)


def test_nested_refs(pool, kit):
    assert kit.ray.get(kit.a.use_nested.remote([kit.ray.put(batch(6))])) == 6
    inner = kit.ray.put(batch(9))
    outer = kit.ray.put({"payload": batch(1), "refs": [inner]})  # a pickle inside the pickle must not lose `inner`
    del inner
    gc.collect()
    assert first(kit.ray.get(kit.ray.get(outer)["refs"][0])) == 9
    del outer
    pool.settles_at(0)


def test_borrower_keeps_it(pool, kit):
    ref = kit.ray.put(batch())
    kit.ray.get(kit.a.keep.remote([ref]))
    del ref
    gc.collect()
    kit.ray.get(kit.b.pid.remote())
    assert pool.objects == 1
    kit.ray.get(kit.a.drop.remote())
    pool.settles_at(0)


def test_slice_kept_by_an_actor(pool, kit):
    for made in (lambda: kit.ray.put(batch(2)), lambda: kit.b.make.remote(2)):
        kit.ray.get(kit.a.keep_slice.remote(made()))
        until(lambda: pool.claims == 0)
        assert pool.objects == 1 and kit.ray.get(kit.a.kept_sum.remote()) == 20
        kit.ray.get(kit.a.drop.remote())
        pool.settles_at(0)


def test_return_belongs_to_the_caller(pool, kit):
    actor = kit.Worker.remote()
    ref = actor.make.remote(4)
    kit.ray.wait([ref])
    kill(kit.ray, actor)
    assert first(kit.ray.get(ref)) == 4
    assert kit.ray.get(kit.a.use.remote(ref)) == 4
    del ref
    pool.settles_at(0)


def test_return_of_an_async_actor_belongs_to_the_caller(pool, kit):
    actor = kit.Async.remote()
    ref = actor.make.remote(4)
    kit.ray.wait([ref])
    kill(kit.ray, actor)
    until(
        lambda: any(s["pid"] == os.getpid() and s["claims"] for s in mooncake_ray.pool_stats()["sessions"]),
        "this process to inherit the claim",
    )
    assert first(kit.ray.get(ref)) == 4
    del ref
    pool.settles_at(0)


def test_put_of_a_dead_actor_is_lost(pool, kit):
    actor = kit.Worker.remote()
    (inner,) = kit.ray.get(actor.put.remote(4))
    assert first(kit.ray.get(inner)) == 4
    kill(kit.ray, actor)
    pool.settles_at(0)
    with pytest.raises(kit.ray.exceptions.ObjectLostError):
        kit.ray.get(inner)


def test_view_of_a_dead_actors_put_stays(pool, kit):
    actor = kit.Worker.remote()
    (inner,) = kit.ray.get(actor.put.remote(4))
    view = kit.ray.get(inner)
    kill(kit.ray, actor)
    until(lambda: pool.claims == 0)
    assert first(view) == 4
    del inner, view
    pool.settles_at(0)


def test_num_returns(pool, kit):
    one, number, two = kit.a.two.options(num_returns=3).remote()
    kit.ray.wait([one, number, two], num_returns=3)
    assert pool.objects == 2
    del one
    pool.settles_at(1)
    assert first(kit.ray.get(two)) == 2 and kit.ray.get(number) == 7


def test_return_nobody_waits_for(pool, kit):
    for i in range(10):
        kit.a.make.remote(i)
        kit.make.remote(i)
        kit.async_.make.remote(i)
    kit.ray.get([kit.a.pid.remote(), kit.async_.pid.remote()])
    pool.settles_at(0)


@pytest.mark.parametrize("who", ["a", "async_"])
def test_streams(pool, kit, who):
    actor = getattr(kit, who)
    assert [first(kit.ray.get(ref)) for ref in actor.stream.remote(12)] == list(range(12))
    pool.settles_at(0)
    assert [kit.ray.get(kit.b.use.remote(ref)) for ref in actor.stream.remote(12)] == list(range(12))
    pool.settles_at(0)
    kept = list(actor.stream.remote(4))
    assert pool.objects == 4 and [first(kit.ray.get(r)) for r in kept] == [0, 1, 2, 3]
    del kept[1]
    pool.settles_at(3)


@pytest.mark.parametrize("who", ["a", "async_"])
def test_abandoned_stream(pool, kit, who):
    stream = getattr(kit, who).stream.remote(8)
    ref = next(stream)
    del stream
    assert first(kit.ray.get(ref)) == 0
    del ref
    pool.settles_at(0)


@pytest.mark.parametrize("who", ["a", "async_"])
def test_no_item_of_a_stream_is_lost(pool, kit, who):
    """Ray may free refs inside an item of a stream before the reader has it; items must not depend on such refs."""
    actor = getattr(kit, who)
    seen = 0
    for _ in range(10):
        for i, ref in enumerate(actor.stream.remote(12)):
            assert kit.ray.get(kit.async_.use.remote(ref)) == i
            seen += 1
    assert seen == 120


def test_stream_outlives_its_actor(pool, kit):
    actor = kit.Worker.remote()
    refs = list(actor.stream.remote(3))
    kill(kit.ray, actor)
    assert [first(kit.ray.get(r)) for r in refs] == [0, 1, 2]


def test_dynamic_returns(pool, kit):
    @kit.ray.remote(num_returns="dynamic")
    def items(n):
        for i in range(n):
            yield batch(i)

    whole = items.remote(3)
    refs = list(kit.ray.get(whole))
    del whole
    assert [first(kit.ray.get(r)) for r in refs] == [0, 1, 2]
    del refs
    pool.settles_at(0)


def test_failing_and_cancelled_consumers(pool, kit):
    with pytest.raises(ValueError, match="application error"):
        kit.ray.get(kit.a.boom.remote(batch()))
    with pytest.raises(ValueError, match="application error"):
        kit.ray.get(kit.a.boom.remote(kit.ray.put(batch())))

    @kit.ray.remote(max_retries=0)
    def blocks(b):
        signal.pause()

    running = blocks.remote(batch())
    until(lambda: pool.pins == 1, "the task to have its argument")
    kit.ray.cancel(running, force=True)
    with pytest.raises(kit.ray.exceptions.RayError):
        kit.ray.get(running)
    del running
    pool.settles_at(0)


def test_retried_task_reads_its_argument_again(pool, kit, tmp_path):
    tries = tmp_path / "tries"
    tries.write_text("")

    @kit.ray.remote(max_retries=2)
    def dies_twice(b, extra):
        with open(tries, "a") as f:
            f.write("x")
        if len(tries.read_text()) < 3:
            os._exit(1)
        return first(b) + first(extra)

    assert kit.ray.get(dies_twice.remote(batch(1), kit.ray.put(batch(2)))) == 3
    assert len(tries.read_text()) == 3


def test_restarted_actor_gets_its_arguments_again(pool, kit):
    @kit.ray.remote(max_restarts=1, max_task_retries=1)
    class Holder:
        def __init__(self, value, ref):
            self.sum = first(value) + first(ref)

        def get(self):
            return self.sum

        def pid(self):
            return os.getpid()

    holder = Holder.remote(batch(1), kit.ray.put(batch(2)))
    assert kit.ray.get(holder.get.remote()) == 3
    kill(kit.ray, holder)
    assert kit.ray.get(holder.get.remote()) == 3
    kit.ray.kill(holder)
    del holder
    pool.settles_at(0)


def test_passing_on_copies_nothing(pool, kit):
    before = mooncake_ray.stats()
    ref = kit.a.make.remote(3)
    got = kit.ray.get(ref)
    again = kit.ray.put({"renamed": got["t"], "half": got["t"][: N // 2]})
    assert kit.ray.get(kit.b.use.remote({"t": got["t"]})) == 3
    after = mooncake_ray.stats()
    assert after["bytes_copied"] == before["bytes_copied"] and after["bytes_passed_on"] - before["bytes_passed_on"] == (1 << 20) * 5 // 2
    assert pool.objects == 1
    del ref, got
    until(lambda: pool.claims == 1)
    assert float(kit.ray.get(again)["half"].sum()) == 3 * N // 2
    del again
    pool.settles_at(0)


def test_an_actor_that_passes_on_copies_nothing(pool, kit):
    before = kit.ray.get(kit.b.stats.remote())["bytes_copied"]
    ref = kit.b.pass_on.remote(kit.b.pass_on.remote(kit.a.make.remote(3)))
    assert first(kit.ray.get(ref)) == 3
    assert kit.ray.get(kit.b.stats.remote())["bytes_copied"] == before
    assert pool.objects == 1


@pytest.mark.parametrize("write", ["torch", "numpy"])
def test_what_was_changed_is_not_passed_on(pool, kit, write):
    ref = kit.ray.put(batch(1))
    got = kit.ray.get(ref)
    if write == "torch":
        got["t"][5] = 42
    else:
        got["t"].numpy()[5] = 42  # unseen by torch's version counter
    assert float(kit.ray.get(kit.ray.put(got))["t"][5]) == 42
    assert float(kit.ray.get(ref)["t"][5]) == 1


def test_writes_are_private(pool, kit):
    ref = kit.ray.put(batch(1))
    mine, other = kit.ray.get(ref), kit.ray.get(ref)
    mine["t"].add_(41)
    assert first(mine) == 42 and first(other) == 1 and first(kit.ray.get(ref)) == 1 and kit.ray.get(kit.a.use.remote(ref)) == 1


def test_copies_and_plain_pickles_stay_out_of_the_pool(pool, kit):
    before = mooncake_ray.stats()["routed"]
    b = batch(2)
    assert first(copy.deepcopy(b)) == 2 and first(pickle.loads(pickle.dumps(b))) == 2
    big = torch.ones(N)

    @kit.ray.remote
    def closure():
        return float(big.sum())

    assert kit.ray.get(closure.remote()) == N
    assert mooncake_ray.stats()["routed"] == before and pool.objects == 0


def test_error_with_a_tensor(pool, kit):
    class Carrying(Exception):
        def __init__(self, payload):
            super().__init__("with payload")
            self.payload = payload

    @kit.ray.remote
    def fails():
        raise Carrying(torch.ones(N))

    with pytest.raises(Carrying) as caught:
        kit.ray.get(fails.remote())
    assert float(caught.value.payload.sum()) == N
    del caught


def test_free(pool, kit):
    ref = kit.ray.put(batch(1))
    view = kit.ray.get(ref)
    assert mooncake_ray.free(ref) == 1
    with pytest.raises(mooncake_ray.ObjectLostError, match="lost from the pool"):
        mooncake_ray.get(ref)
    with pytest.raises(kit.ray.exceptions.ObjectLostError):
        kit.ray.get(ref)
    assert first(view) == 1
    del view, ref
    pool.settles_at(0)


def test_explicit_put_routes_small_objects(pool, kit):
    ref = mooncake_ray.put({"x": torch.ones(3)})
    assert pool.objects == 1 and mooncake_ray.get(ref)["x"].tolist() == [1, 1, 1]
    assert mooncake_ray.wait([ref])[0] == [ref]
    del ref
    pool.settles_at(0)


def test_small_objects_are_rays(pool, kit):
    before = mooncake_ray.stats()["routed"]
    assert kit.ray.get(kit.ray.put({"x": torch.ones(100), "y": [1, "a"]}))["x"].sum() == 100
    assert mooncake_ray.stats()["routed"] == before


def test_threads_of_an_actor_put(pool, kit):
    @kit.ray.remote
    class Threads:
        def puts(self):
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(4) as threads:
                return list(threads.map(lambda i: kit.ray.put(batch(i)), range(8)))

    actor = Threads.remote()
    refs = kit.ray.get(actor.puts.remote())
    assert [first(b) for b in kit.ray.get(refs)] == list(range(8))
    del refs
    pool.settles_at(0)


def test_pool_full_falls_back_to_ray(pool, kit):
    """An object larger than the pool is Ray's; the job does not notice."""
    before = mooncake_ray.stats()
    big = torch.ones((pool.capacity_bytes >> 2) + 1024, dtype=torch.float32)
    ref = kit.ray.put(big[: 1 << 26])
    huge = kit.ray.put(big)
    assert float(kit.ray.get(huge)[-1]) == 1
    after = mooncake_ray.stats()
    assert after["fallbacks:StoreFullError"] == before.get("fallbacks:StoreFullError", 0) + 1 + (after["routed"] == before["routed"])
    del ref, huge


def test_killed_worker_leaves_nothing(pool, kit):
    actors = [kit.Worker.remote() for _ in range(2)]
    for i, actor in enumerate(actors):
        kit.ray.get(actor.keep.remote(batch(i)))
        with contextlib.suppress(kit.ray.exceptions.RayError):
            kit.ray.get(actor.put.remote(i))
    for actor in actors:
        kill(kit.ray, actor)
    del actors, actor
    pool.settles_at(0)
