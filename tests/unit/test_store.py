"""`Store`: values, views, lifetimes, errors. Every test ends with a pool that is empty."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mooncake_ray._native import pool
from mooncake_ray.config import Config
from mooncake_ray.errors import (
    BrokerDiedError,
    ConfigError,
    GetTimeoutError,
    ObjectLostError,
    ObjectNotFoundError,
    StoreError,
    StoreFullError,
)
from mooncake_ray.store import ObjectKey, Store

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
CAPACITY = 32 << 20
PAGE = 4096


@dataclasses.dataclass
class Batch:
    name: str
    tokens: torch.Tensor
    scores: np.ndarray
    more: Any = None


def same(a: Any, b: Any) -> bool:
    """Bit for bit, types included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        flat = [t.detach().clone(memory_format=torch.contiguous_format).reshape(-1) for t in (a, b)]
        as_bytes = [t.view(torch.uint8) if t.numel() else t for t in flat]
        return a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad and torch.equal(*as_bytes)
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return all(map(same, a.flat, b.flat)) if a.dtype.hasobject else a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return same(vars(a), vars(b))
    return a == b or (a != a and b != b)


def in_pool(store: Store, value: torch.Tensor | np.ndarray) -> bool:
    """Whether this memory is the pool's, unchanged."""
    address, nbytes = (value.data_ptr(), value.nbytes) if isinstance(value, torch.Tensor) else (value.ctypes.data, value.nbytes)
    return store.client.locate(address, nbytes) is not None


def ramp(n: int = 10_000, start: int = 0) -> np.ndarray:
    return np.arange(start, start + n)


NUMPY = {c: np.dtype({"M": "M8[s]", "m": "m8[s]", "S": "S5", "U": "U5"}.get(c, c)) for c in "?bhqBHQefdDSUMm"}


def fill(store: Store, free_bytes: int) -> list[ObjectKey]:
    """Takes all the room but `free_bytes`."""
    stats = store.stats()
    size = stats["capacity_bytes"] - stats["used_bytes"] - free_bytes
    return [store.publish(store.create(size))]


VALUES: dict[str, Any] = {
    "none": lambda: None,
    "numbers": lambda: [1, -(2**100), 1.5, float("nan"), True, 2j],
    "text": lambda: "ä" * 3,
    "long text": lambda: "ä" * 100_000,
    "long bytes": lambda: bytes(range(256)) * 1000,
    "empty containers": lambda: [(), {}, [], set()],
    "small tensor": lambda: torch.arange(3),
    "scalar tensor": lambda: torch.tensor(3.5),
    "empty tensor": lambda: torch.empty(0, 7, dtype=torch.int16),
    "tensor": lambda: torch.randn(100, 100),
    "large tensor": lambda: torch.randn(1 << 20),
    "transposed": lambda: torch.randn(60, 50).T,
    "strided": lambda: torch.randn(200, 50)[::3, ::2],
    "expanded": lambda: torch.randn(50, 1).expand(50, 300),
    "channels last": lambda: torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last),
    "grad": lambda: torch.randn(1000, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.randn(1000)),
    "sparse": lambda: torch.eye(100).to_sparse().coalesce().indices(),
    "array": lambda: np.random.default_rng(1).random((100, 100)),
    "fortran": lambda: np.asfortranarray(np.arange(10_000).reshape(100, 100)),
    "not contiguous": lambda: np.arange(40_000).reshape(200, 200)[::2, ::3],
    "backwards": lambda: np.arange(10_000)[::-1],
    "structured": lambda: np.array([(i, i / 2, b"x") for i in range(1000)], dtype=[("a", "<i4"), ("b", ">f8"), ("c", "S3")]),
    "dates": lambda: np.arange(10_000).astype("M8[s]"),
    "durations": lambda: np.arange(10_000).astype("m8[us]"),
    "big endian": lambda: np.arange(10_000, dtype=">i4"),
    "records": lambda: np.zeros(1000, dtype=[("a", "i4")]).view(np.recarray),
    "unicode": lambda: np.array(["word"] * 3000),
    "zero dimensions": lambda: np.array(7.0),
    "empty array": lambda: np.empty((0, 5), np.float32),
    "objects": lambda: np.array(["a", None, 3, ramp(3)], dtype=object),
    "nested": lambda: {"t": torch.ones(5000), "l": [ramp(), (torch.zeros(2000, dtype=torch.bfloat16), {"d": ramp(5)})], 3: None},
    "ordered": lambda: OrderedDict(b=torch.ones(5000), a=1),
    "dataclass": lambda: Batch("n", torch.ones(5000), ramp(), [Batch("m", torch.zeros(1), ramp(1))]),
    "many": lambda: {f"k{i}": torch.full((i * 50,), i) for i in range(100)},
}


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_round_trip(store, make):
    value = make()
    key = store.put(value)
    assert same(store.get(key), value)
    assert same(store.get(key, timeout_s=0), value)
    store.free([key])


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    ],
    ids=str,
)
def test_every_dtype_is_a_view_of_the_pool(store, dtype):
    value = torch.randint(0, 2, (4096 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    out = store.get(store.put([value]))[0]
    assert same(out, value)
    assert in_pool(store, out)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(
    st.recursive(
        st.one_of(
            st.none(),
            st.integers(),
            st.text(max_size=20),
            st.tuples(st.sampled_from("?bhqBHQefdDSUMm"), hnp.array_shapes(max_dims=3, max_side=30)).map(
                lambda a: np.ones(a[1]).astype(NUMPY[a[0]])
            ),
            st.integers(0, 5000).map(torch.arange),
        ),
        lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=5), children, max_size=4),
        max_leaves=12,
    )
)
def test_any_structure(store, value):
    key = store.put(value)
    assert same(store.get(key), value)
    store.free([key])


def test_what_is_named_twice_is_one_object_again(store):
    tensor, array = torch.randn(5000), ramp()
    out = store.get(store.put({"a": tensor, "b": [tensor], "c": array, "d": (array,)}))
    assert out["a"] is out["b"][0]
    assert out["c"] is out["d"][0]


def test_a_value_that_cannot_be_pickled_leaves_nothing(store, scope):
    with pytest.raises((TypeError, AttributeError)):
        store.put([ramp(), threading.Lock()])
    assert scope.is_empty()


# ---- views


def test_tensors_are_private(store):
    value = torch.zeros(5000)
    key = store.put({"t": value})
    one, two = store.get(key)["t"], store.get(key)["t"]
    assert in_pool(store, one)
    one += 1
    assert not in_pool(store, one)
    assert in_pool(store, two)
    assert value.sum() == two.sum() == store.get(key)["t"].sum() == 0
    assert one.sum() == 5000


def test_arrays_are_read_only(store):
    key = store.put(ramp())
    out = store.get(key)
    with pytest.raises(ValueError, match="read-only"):
        out[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        out.sort()
    assert same(store.get(key), ramp())


def test_arrays_that_were_copied_are_writable_and_private(store):
    key = store.put(ramp()[::2])
    out = store.get(key)
    out[:] = 0
    assert same(store.get(key), np.ascontiguousarray(ramp()[::2]))


def test_what_is_put_is_a_copy(store):
    value = torch.zeros(5000)
    key = store.put(value)
    value += 1
    assert store.get(key).sum() == 0


def test_views_outlive_free(store, scope):
    key = store.put([torch.ones(100_000), ramp(100_000)])
    tensor, array = store.get(key)
    store.free([key])
    with pytest.raises(ObjectNotFoundError):
        store.get(key)
    other = store.put(np.zeros(400_000))  # would take the pages if they were free
    assert tensor.sum() == 100_000
    assert same(np.array(array), ramp(100_000))
    store.free([other])
    del tensor
    assert scope.stats()["removed_but_pinned"] == 1  # the array
    del array
    scope.eventually(scope.is_empty, scope.stats)


def test_views_outlive_close(scope):
    store = scope.store()
    array, tensor = store.get(store.put([ramp(100_000), torch.ones(100_000)]))
    store.close()
    assert same(np.array(array), ramp(100_000))
    tensor += 1
    assert tensor.sum() == 200_000
    stats = scope.stats()
    assert stats["pins"] > 0  # nobody reuses what they look at
    assert stats["reaped_sessions"] == 0
    del array, tensor
    scope.eventually(scope.is_empty, scope.stats)


def test_a_slice_of_a_view_keeps_the_memory(store, scope):
    key = store.put(torch.arange(100_000))
    part = store.get(key)[500:510].reshape(2, 5).T
    store.free([key])
    gc.collect()
    scope.eventually(lambda: scope.stats()["removed_but_pinned"] == 1)
    assert part.sum() == sum(range(500, 510))
    del part
    scope.eventually(scope.is_empty, scope.stats)


def test_memory_comes_back_again_and_again(store):
    for i in range(20):  # five times the capacity
        key = store.put(np.full(1 << 20, i))
        assert store.get(key)[-1] == i
        store.free([key])


def test_a_waiting_put_gets_the_memory_of_a_dying_view(store):
    key = store.put(np.zeros(20 << 20, np.uint8))
    view = [store.get(key)]
    store.free([key])
    done = threading.Event()

    def put():
        store.free([store.put(np.ones(20 << 20, np.uint8), timeout_s=60)])
        done.set()

    thread = threading.Thread(target=put)
    thread.start()
    assert not done.is_set()
    assert view[0].sum() == 0
    view.clear()
    thread.join()
    assert done.is_set()


# ---- create, publish, view


def test_create_and_publish(store):
    lease = store.create(10_000)
    raw = memoryview(lease)
    raw[:5] = b"hello"
    assert not raw.readonly
    with pytest.raises(GetTimeoutError, match="still being written"):
        store.view(ObjectKey(store.client.pool_id, lease.id), timeout_s=0.01)
    raw.release()
    key = store.publish(lease)
    shared, own = store.view(key), store.view(key, mutable=True)
    assert shared.readonly
    assert not own.readonly
    assert shared.nbytes == own.nbytes == 10_000
    own[:5] = b"HELLO"
    assert bytes(shared[:5]) == bytes(store.view(key)[:5]) == b"hello"
    with pytest.raises(TypeError):
        shared[0] = 1
    for use in (lambda: memoryview(lease), lambda: store.publish(lease), lambda: lease.copy([])):
        with pytest.raises(ValueError, match="sealed or given back"):
            use()
    lease.abort()  # too late: nothing happens
    assert bytes(store.view(key)[:5]) == b"hello"


def test_a_lease_that_is_dropped_gives_its_memory_back(store, scope):
    lease = store.create(1 << 20)
    assert scope.stats()["used_bytes"] == 1 << 20
    assert scope.stats()["leases"] == 1
    del lease
    scope.eventually(scope.is_empty, scope.stats)
    lease = store.create(1 << 20)
    lease.abort()
    lease.abort()
    scope.eventually(scope.is_empty, scope.stats)


def test_a_lease_in_a_cycle_is_collected(scope):
    """A traceback is such a cycle: an exception between create and publish makes one."""
    program = scope.run("""
store = Store(scope, config)
def fail():
    lease = store.create(1 << 20)
    try:
        lease.copy([(2 << 20, 0, 1)])
    except ValueError as e:
        caught = e
fail()
gc.collect()
while store.stats()["leases"]: time.sleep(0.001)
""")
    program.finish()


def test_get_waits_for_publish(store):
    lease = store.create(1 << 20)
    key = ObjectKey(store.client.pool_id, lease.id)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(bytes(store.view(key, timeout_s=60)[:3])))
    thread.start()
    memoryview(lease)[:3] = b"abc"
    store.publish(lease)
    thread.join()
    assert seen == [b"abc"]


@pytest.mark.parametrize("nbytes", [0, 1, 8, 100])
def test_bytes_that_no_put_made_are_no_value(store, nbytes):
    key = store.publish(store.create(nbytes))
    assert store.view(key).nbytes == nbytes
    with pytest.raises(ObjectNotFoundError, match=r"not stored by Store\.put"):
        store.get(key)


def test_copy_into_a_lease_is_checked(store):
    source = ramp(1000)
    lease = store.create(source.nbytes)
    lease.copy([(0, source.ctypes.data, 4000), (4000, source.ctypes.data + 4000, 4000)], threads=3)
    lease.copy([])
    lease.copy([(source.nbytes, 0, 0)])
    for offset, nbytes in [
        (1, 8000),
        (8001, 0),
        (8000, 1),
        (0, 8001),
        (5 << 30, 1),
        (2**63, 8000),
        (2**64 - 1, 2),
        (2, 2**64 - 1),
        (2**64 - 8, 16),
    ]:
        with pytest.raises(ValueError, match="exceeds the lease of 8000 bytes"):
            lease.copy([(offset, source.ctypes.data, nbytes)])
    for offset, nbytes in [(-1, 1), (0, -1), (2**64, 1)]:
        with pytest.raises(OverflowError):
            lease.copy([(offset, source.ctypes.data, nbytes)])
    assert lease.nbytes == 8000
    key = store.publish(lease)
    assert np.array_equal(np.frombuffer(store.view(key), source.dtype), source)


def test_sizes_beyond_all_reason(store):
    for nbytes in (CAPACITY + 1, 5 << 30, 2**63, 2**64 - 1):
        with pytest.raises(StoreFullError, match="larger than the pool"):
            store.create(nbytes)
    with pytest.raises(OverflowError):
        store.create(2**64)
    with pytest.raises(OverflowError):
        store.create(-1)
    store.free([store.publish(store.create(CAPACITY))])


# ---- full


def test_full_says_who_holds_what_and_loses_nothing(store, scope):
    kept = store.put(ramp(1 << 17))  # 1 MiB
    view = store.get(kept)
    rest = fill(store, free_bytes=2 << 20)
    with pytest.raises(StoreFullError) as e:
        store.put(np.zeros(4 << 20, np.uint8), timeout_s=0.05)
    text = str(e.value)
    for part in (
        "no room within 0.05 s",
        "need 4.0 MiB",
        "capacity 32.0 MiB",
        "free 2.0 MiB (largest extent 2.0 MiB)",
        "owns ",
        "and reads 1.0 MiB",
    ):
        assert part in text, text
    assert f"(pid {os.getpid()})" in text
    assert isinstance(e.value, MemoryError)
    assert same(np.array(store.get(kept)), ramp(1 << 17))
    assert same(np.array(view), ramp(1 << 17))
    stats = scope.stats()
    assert stats["objects"] == 2
    assert stats["leases"] == 0
    assert stats["orphans_dropped"] == 0
    store.free([store.put(np.zeros(1 << 20, np.uint8), timeout_s=0.05), *rest])
    store.free([store.put(np.zeros(4 << 20, np.uint8), timeout_s=20)])


def test_many_small_values_have_all_the_room_there_is(store):
    keys = [store.put(bytes([i % 256]) * 7000) for i in range(400)]  # more than the broker keeps in its own heap
    assert all(store.get(k) == bytes([i % 256]) * 7000 for i, k in enumerate(keys))
    store.free(keys)


# ---- free, wait, keys


def test_free(store, scope):
    keys = [store.put(v) for v in (1, ramp(), "x" * 100_000)]
    store.free(keys)
    for key in keys:
        with pytest.raises(ObjectNotFoundError, match=key.id.hex()):
            store.get(key)
    store.free(keys)  # again is no error
    store.free([])
    scope.eventually(scope.is_empty, scope.stats)


def test_a_consumer_frees_what_a_producer_put(scope):
    producer, consumer = scope.store(), scope.store()
    for value in (5, ramp()):
        key = producer.put(value)
        assert same(np.array(consumer.get(key)), np.array(value))
        consumer.free([key])
    # Not a trace: a producer that lives long must not fill the broker with claims on nothing.
    scope.eventually(scope.is_empty, scope.stats)


def test_what_a_store_put_goes_when_it_closes(scope):
    producer, consumer = scope.store(), scope.store()
    key, seen = producer.put(ramp()), producer.put(ramp())
    view = consumer.get(seen)
    producer.close()
    scope.eventually(lambda: scope.stats()["claims"] == 0)
    with pytest.raises(ObjectNotFoundError):
        consumer.get(key)
    assert same(np.array(view), ramp())
    del view
    scope.eventually(scope.is_empty, scope.stats)


def test_wait(store):
    there, also = store.put(1), store.put(ramp())
    lease = store.create(100)
    coming = ObjectKey(store.client.pool_id, lease.id)
    keys = [coming, there, also]
    assert store.wait(keys, num_returns=2) == ([there, also], [coming])
    assert store.wait(keys, num_returns=1, timeout_s=0) == ([there, also], [coming])
    assert store.wait(keys, timeout_s=0.01) == ([there, also], [coming])
    assert store.wait([]) == ([], [])
    thread = threading.Timer(0.0, store.publish, [lease])
    thread.start()
    assert store.wait(keys) == (keys, [])
    thread.join()
    for wrong in (0, 4, -1):
        with pytest.raises(ValueError, match="num_returns"):
            store.wait(keys, num_returns=wrong)


def test_one_thread_sees_its_own_calls_in_order(store):
    for i in range(300):
        key = store.put(i if i % 2 else ramp(2000, i))
        store.get(key, timeout_s=0)
        assert store.wait([key], timeout_s=0) == ([key], [])
        store.free([key])
        with pytest.raises(ObjectNotFoundError):
            store.get(key)


def test_keys_are_plain_data(store):
    import pickle

    key = store.put(1)
    again = pickle.loads(pickle.dumps(key))
    assert again == key
    assert hash(again) == hash(key)
    assert store.get(again) == 1
    assert key.id.hex() in repr(key)
    assert len({key, again}) == 1


def test_bad_arguments(store):
    key = store.put(ramp())
    with pytest.raises(ValueError, match="timeout_s"):
        store.get(key, timeout_s=-1)
    with pytest.raises(ValueError, match="16 bytes"):
        store.get(ObjectKey(key.pool, b"short"))
    with pytest.raises(TypeError):
        pool.Client()
    with pytest.raises(ValueError, match="28 bytes"):
        store.client.unclaim(pool.KIND_SELF, b"x" * 29)


def test_errors_are_what_a_caller_expects(store, scope):
    key = store.put(ramp())
    store.free([key])
    with pytest.raises(KeyError) as not_found:
        store.get(key)
    assert isinstance(not_found.value, ObjectNotFoundError)
    assert str(not_found.value).startswith("get: no object")  # a sentence, not KeyError's repr
    lease = store.create(10)
    with pytest.raises(TimeoutError) as late:
        store.get(ObjectKey(key.pool, lease.id), timeout_s=0.01)
    lease.abort()
    assert isinstance(late.value, GetTimeoutError)
    with pytest.raises(MemoryError):
        store.put(np.zeros(CAPACITY + PAGE, np.uint8))
    foreign = ObjectKey(b"\0" * 16, key.id)
    for use in (store.get, store.view, lambda k: store.free([k]), lambda k: store.wait([k])):
        with pytest.raises(ObjectLostError, match="another pool"):
            use(foreign)
    assert issubclass(BrokerDiedError, ConnectionError)
    assert issubclass(ConfigError, ValueError)
    for error in (ObjectNotFoundError, ObjectLostError, GetTimeoutError, StoreFullError, BrokerDiedError):
        assert issubclass(error, StoreError)


def test_two_scopes_do_not_meet(store):
    other = Store(store._name.rpartition("/")[2] + "-other", Config(capacity_bytes=1 << 20, linger_s=0.2))
    with other:
        key = store.put(1)
        with pytest.raises(ObjectLostError):
            other.get(key)
        assert other.client.capacity == 1 << 20


def test_a_broker_that_cannot_start(scope):
    with pytest.raises(ValueError, match="scope too long"):
        Store("x" * 200)
    with pytest.raises(ConfigError):
        Store(scope.name, Config(capacity_bytes=5))


# ---- threads and processes


def test_threads(store):
    failures = []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            keys = []
            for i in range(60):
                value = rng.integers(0, 100, rng.integers(1, 40_000))
                keys.append((store.put({"a": value, "t": torch.from_numpy(value)}), value))
                key, expected = keys[rng.integers(len(keys))]
                out = store.get(key)
                assert np.array_equal(out["a"], expected)
                out["t"] += i
                if len(keys) > 4:
                    store.free([keys.pop(0)[0]])
            store.free([k for k, _ in keys])
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_another_process_sees_the_bytes(store, scope):
    key = store.put([ramp(), {"x": 1.5}])
    other = scope.run(
        """
store = Store(scope, config)
out = store.get(key_of(sys.argv[1]))
assert np.array_equal(out[0], np.arange(10_000)) and out[1] == {"x": 1.5}
say(text_of(store.put(out[0] * 2)))
wait()
del out
store.close()
""",
        f"{key.pool.hex()}:{key.id.hex()}",
    )
    theirs = ObjectKey(*map(bytes.fromhex, other.line().split(":")))
    out = store.get(theirs)
    assert same(np.array(out), ramp() * 2)
    other.go()
    other.finish()
    scope.eventually(lambda: scope.stats()["claims"] == 1)
    assert same(np.array(out), ramp() * 2)  # its owner is gone, the view is not
    assert same(np.array(store.get(theirs)), ramp() * 2)  # and as long as it lives, there is something to get
    del out
    gc.collect()
    with pytest.raises(ObjectNotFoundError):
        store.get(theirs)


def test_a_forked_child_connects_anew_and_leaves_its_parent_alone(scope):
    program = scope.run("""
store = Store(scope, config)
key = store.put(np.arange(50_000))
view = store.get(key)
session, before = store.client.session, store.stats()
child = os.fork()
if not child:
    assert not store.client is None and store.client.session != session
    assert view.sum() == store.get(key).sum() == sum(range(50_000))
    mine = store.put(np.ones(50_000))
    assert store.get(mine).sum() == 50_000
    del view
    gc.collect()
    store.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
after = store.stats()
assert store.client.session == session
assert {k: before[k] for k in ("pins", "claims", "objects")} == {"pins": 1, "claims": 1, "objects": 1}
while store.stats()["claims"] != 1: time.sleep(0.001)
assert store.stats()["pins"] == 1
assert np.array_equal(view, np.arange(50_000)) and np.array_equal(store.get(key), np.arange(50_000))
""")
    program.finish()


def test_a_store_and_its_client_are_collected(scope):
    store = scope.store()
    client = weakref.ref(store)
    scope.stores.clear()
    view = store.get(store.put(ramp()))
    del store
    gc.collect()
    assert client() is None
    assert same(np.array(view), ramp())
    del view
    scope.eventually(scope.is_empty, scope.stats)


def test_a_lease_is_not_sealed_while_it_can_be_written(scope):
    store = scope.store()
    lease = store.create(4096)
    view = memoryview(lease)
    for give_up in (lambda: store.publish(lease), lease.abort):
        with pytest.raises(BufferError, match="1 buffers of this lease live"):
            give_up()
    view.release()
    store.free([store.publish(lease)])


def test_a_closed_store_stays_closed(scope):
    store = scope.store()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.put(1)
