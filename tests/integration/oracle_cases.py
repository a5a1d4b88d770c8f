"""The oracle cases: ordinary Ray programs, each returning what its user would see.

A case uses Ray's public API only and knows nothing of the pool. Payloads are 256 KiB to 1 MiB, large
enough to be routed, unless the name says small. Nothing here waits for time to pass: cases that need
an order of events let the shared Board open a gate.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import copy
import dataclasses
import enum
import functools
import gc
import io
import os
import pickle
import queue
import threading
import typing

import numpy as np
import ray
import ray.cloudpickle
import ray.util
import torch
from oracle_outcome import counting, described, routed, tensor_bytes
from ray.util.queue import Queue

CASES: dict[str, typing.Callable] = {}


def case(function=None, *, needs=None):
    """Registers a case; `needs` names a module without which it is skipped."""
    if function is None:
        return functools.partial(case, needs=needs)
    assert function.__name__ not in CASES
    function.needs = needs
    CASES[function.__name__] = function
    return function


# Payloads --------------------------------------------------------------------------------------


def floats(seed=0, shape=(256, 384)):
    return torch.arange(seed, seed + int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def array(seed=0, shape=(256, 384), dtype=np.float32):
    return np.arange(seed, seed + int(np.prod(shape))).reshape(shape).astype(dtype)


def random_bytes(size=512 * 1024):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


@dataclasses.dataclass
class Sample:
    prompt: torch.Tensor
    scores: np.ndarray
    tags: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSample:
    prompt: torch.Tensor
    name: str


class Pair(typing.NamedTuple):
    left: typing.Any
    right: typing.Any


class Color(enum.Enum):
    RED = 1


class Episode:
    """An arbitrary object with tensors in attributes and in containers."""

    def __init__(self, seed=0):
        self.states = floats(seed)
        self.info = {"rewards": [array(seed), floats(seed + 1)], "length": 3}
        self.parent = self


class WithState:
    """Chooses itself what is pickled."""

    def __init__(self, data):
        self.data, self.cache = data, lambda: None

    def __getstate__(self):
        return {"data": self.data}

    def __setstate__(self, state):
        self.data, self.cache = state["data"], "rebuilt"


class WithReduce:
    def __init__(self, data, note):
        self.data, self.note = data, note

    def __reduce__(self):
        return WithReduce, (self.data, self.note + "+")


class WithSlots:
    __slots__ = ("data", "other")

    def __init__(self, data):
        self.data = data


class ListOfTensors(list):
    """A list subclass with an attribute of its own."""


class BrokenState:
    """Pickles, but cannot be unpickled."""

    def __init__(self, data):
        self.data = data

    def __setstate__(self, state):
        raise ValueError("this state is refused")


class Unpicklable:
    def __reduce__(self):
        raise ArithmeticError("this object refuses to be pickled")


class LabelledTensor(torch.Tensor):
    """A tensor subclass that keeps its label."""

    @classmethod
    def labelled(cls, tensor, label):
        result = tensor.as_subclass(cls)
        result.label = label
        return result


class ScaledTensor(torch.Tensor):
    """A wrapper subclass: no storage of its own, the data are in two inner tensors."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values, scale):
        self.values_, self.scale_ = values, scale

    def __tensor_flatten__(self):
        return ["values_", "scale_"], None

    @classmethod
    def __torch_dispatch__(cls, function, kinds, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].values_, args[0].scale_)
        raise NotImplementedError(str(function))

    def __repr__(self):
        return "ScaledTensor"


class LabelledArray(np.ndarray):
    """A NumPy subclass as NumPy's manual describes it; its label is not pickled."""

    def __array_finalize__(self, source):
        self.label = getattr(source, "label", "none")


class DomainError(Exception):
    """Carries a tensor argument and a tensor attribute."""

    def __init__(self, message, tensor):
        super().__init__(message, tensor)
        self.culprit = tensor + 1

    def __str__(self):
        return f"{self.args[0]} of shape {tuple(self.args[1].shape)}"


class ErrorWithoutReduce(Exception):
    """Cannot be rebuilt from its args alone."""

    def __init__(self, message, tensor):
        super().__init__(message)
        self.tensor = tensor


def small_network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 384), torch.nn.BatchNorm1d(384), torch.nn.Linear(384, 256))


# Remote functions and actors -------------------------------------------------------------------


@ray.remote
def describe(*args, **kwargs):
    return described({"args": args, "kwargs": kwargs})


@ray.remote
def describe_nested(container):
    """What a task sees of refs inside a container, and behind them."""
    inner = container["items"][0]
    return described([container, ray.get(inner), ray.get(container["items"])])


@ray.remote
def scale(tensor, factor, *after):
    return tensor * factor


@ray.remote
def same(value, *after):
    return value


@ray.remote
def rows(tensor, count):
    return tuple(tensor[i] for i in range(count))


@ray.remote
def nothing(tensor):
    return None


@ray.remote
def overwrite_argument(tensor):
    tensor.fill_(-1)
    return tensor[-1]


@ray.remote
def stream(count, fail_at=None, shape=(256, 384)):
    for i in range(count):
        if i == fail_at:
            raise DomainError(f"item {i}", floats(i))
        yield floats(i, shape)


@ray.remote
def fail_with(error):
    raise error


@ray.remote
def fail_chained(tensor):
    try:
        raise DomainError("inner", tensor)
    except DomainError as error:
        raise LookupError("outer") from error


@ray.remote
def put_inside(seed):
    return ray.put(floats(seed))


@ray.remote
def fan_out(tensor):
    """Puts, calls nested tasks by value and by ref, and returns refs."""
    put = ray.put(tensor + 1)
    calls = [scale.remote(tensor, 2), scale.remote(put, 3)]
    return {"refs": [put, *calls], "got": ray.get(calls[1])}


@ray.remote
def recurse(tensor, depth):
    if depth == 0:
        return tensor
    return ray.get(recurse.remote(tensor + 1, depth - 1)) * 2


@ray.remote(max_retries=1)
def crash_at_first(board, gate, tensor):
    if ray.get(board.next.remote(gate)) == 1:
        os._exit(1)
    return described(tensor)


@ray.remote(max_retries=5, retry_exceptions=[ConnectionError])
def flaky(board, gate, tensor):
    attempt = ray.get(board.next.remote(gate))
    if attempt < 3:
        raise ConnectionError(f"attempt {attempt}")
    return attempt, tensor + attempt


@ray.remote(max_retries=0)
def crash(tensor):
    os._exit(1)


@ray.remote(max_calls=1)
def scale_once(tensor, factor):
    """Its worker exits after the call."""
    return tensor * factor


@ray.remote
def environment(name, tensor):
    return os.environ.get(name), described(tensor)


@ray.remote
def run_until_cancelled(board, gate, tensor):
    ray.get(board.open.remote(gate))
    never = board.wait.remote(gate + "-never")
    while True:
        ray.wait([never], timeout=0.05)


@ray.remote
def task_context(tensor):
    context = ray.get_runtime_context()
    return context.get_task_name(), context.get_actor_id(), described(tensor)


DEFAULT_TENSOR = floats(77)


@ray.remote
def with_default(tensor=DEFAULT_TENSOR, *, bias=3):
    return tensor + bias


@ray.remote(num_cpus=0)
class Board:
    """Named gates and counters: how cases order events without waiting for time to pass."""

    def __init__(self):
        self.gates = collections.defaultdict(asyncio.Event)
        self.counts = collections.Counter()

    async def wait(self, gate):
        await self.gates[gate].wait()
        return gate

    async def open(self, gate):
        self.gates[gate].set()

    async def next(self, counter):
        self.counts[counter] += 1
        return self.counts[counter]


class KeeperMethods:
    """Keeps one value and offers the ways to use it."""

    def __init__(self, value=None, *, extra=None):
        self.value, self.extra = value, extra

    def routed(self):
        return routed()

    def keep(self, value):
        self.value = value

    def keep_inner(self, refs):
        self.value = ray.get(refs[0])

    def read(self):
        return self.value

    def read_inner(self):
        return ray.get(self.value[0])

    def describe(self, *args, **kwargs):
        return described([self.value, self.extra, args, kwargs])

    def scale(self, tensor, factor):
        return tensor * factor

    def add(self, tensor):
        self.value = tensor if self.value is None else self.value + tensor
        return self.value[0]

    def overwrite(self, fill):
        self.value.fill_(fill)

    @ray.method(num_returns=2)
    def pair(self, tensor):
        return tensor + 1, {"minus": tensor - 1}

    def triple(self, tensor):
        return tensor, 2, [tensor]

    def put(self, tensor):
        return ray.put(tensor)

    def relay(self, other, tensor):
        return ray.get(other.scale.remote(tensor, 3)) + 1

    def fail(self, message, tensor):
        raise DomainError(message, tensor)

    def stream(self, count, fail_at=None):
        for i in range(count):
            if i == fail_at:
                raise DomainError(f"item {i}", floats(i))
            yield floats(i)

    def context(self):
        context = ray.get_runtime_context()
        return context.get_actor_name(), context.was_current_actor_reconstructed, len(context.get_actor_id())


@ray.remote(num_cpus=0)
class Keeper(KeeperMethods):
    pass


@ray.remote(num_cpus=0)
class Meeting:
    """A threaded actor whose calls return only once all of them are inside."""

    def __init__(self, parties):
        self.barrier = threading.Barrier(parties)

    def meet(self, tensor, factor):
        self.barrier.wait(timeout=50)
        inner = ray.put(tensor)
        return ray.get(inner) * factor

    def routed(self):
        return routed()


@ray.remote(num_cpus=0)
class AsyncKeeper:
    def __init__(self):
        self.value = None
        self.arrived = asyncio.Event()
        self.waiting = 0

    async def routed(self):
        return routed()

    async def exchange(self, tensor, parties):
        """Returns only once `parties` calls are inside at the same time."""
        self.waiting += 1
        if self.waiting == parties:
            self.arrived.set()
        await self.arrived.wait()
        return tensor * parties

    async def gather(self, container):
        first, *rest = container["refs"]
        values = [await first, *await asyncio.gather(*rest)]
        return described([container, values]), values

    async def call(self, tensor):
        put = ray.put(tensor)
        return await scale.remote(put, 2), await scale.remote(tensor, 3)

    async def keep(self, value):
        self.value = value

    async def read(self):
        return self.value

    async def stream(self, count, fail_at=None):
        for i in range(count):
            await asyncio.sleep(0)
            if i == fail_at:
                raise DomainError(f"item {i}", floats(i))
            yield floats(i)

    async def fail(self, message, tensor):
        raise DomainError(message, tensor)

    async def hang(self, board, gate, tensor):
        await board.open.remote(gate)
        await asyncio.Event().wait()


class BrokenActor:
    def __init__(self, tensor):
        raise DomainError("no actor", tensor)

    def call(self):
        return None


@functools.cache
def keeper(number=0):
    return Keeper.remote()


@functools.cache
def async_keeper():
    return AsyncKeeper.remote()


@functools.cache
def board():
    return Board.remote()


def warm_up():
    """Starts the shared actors and some workers side by side."""
    actors = [keeper(0), keeper(1), keeper(2), async_keeper()]
    ray.get([*(actor.read.remote() for actor in actors), board().next.remote("warm_up"), *map(same.remote, range(4))])


# Helpers of cases ------------------------------------------------------------------------------


def round_trip(value):
    return ray.get(ray.put(value))


def error_of(call, *args, **kwargs):
    """The exception a call raises, or what it returned in place of one."""
    try:
        return {"no error, but": call(*args, **kwargs)}
    except BaseException as error:
        return error.with_traceback(None)


def kind_of(call, *args, **kwargs):
    """The kind of exception alone, for those whose text names ids or addresses."""
    result = error_of(call, *args, **kwargs)
    return [kind.__qualname__ for kind in type(result).__mro__] if isinstance(result, BaseException) else result


def churn(count=12):
    """Puts and drops enough to reuse whatever memory is free by now."""
    gc.collect()
    for i in range(count):
        ray.get(ray.put(floats(1000 + i, (512, 512))))
        ray.get(scale.remote(floats(2000 + i, (512, 384)), 2))


def gone(actor):
    """Returns once calls to the killed actor fail; says how."""
    while not isinstance(kind := kind_of(ray.get, actor.read.remote()), list):
        del kind
    return kind


def kind_once_lost(ref):
    """The kind of error of a get, once Ray has dropped the copies that outlive the owner for a moment."""
    never = board().wait.remote("never")
    while not isinstance(kind := kind_of(ray.get, ref), list):
        del kind
        ray.wait([never], timeout=0.05)
    return kind


def in_order(tensors):
    """For results whose order Ray leaves open."""
    return sorted(tensors, key=lambda tensor: float(tensor[0, 1]))


def strides(value):
    return list(value.stride() if isinstance(value, torch.Tensor) else value.strides)


# Put and get: containers and objects -----------------------------------------------------------


@case
def put_get_tensor():
    return round_trip(floats())


@case
def put_get_dict():
    return round_trip({"a": floats(1), 7: floats(2), ("t", 1): "text", None: array(3)})


@case
def put_get_nested_containers():
    return round_trip([1, (floats(), [array(), {"deep": (floats(4), None)}]), {"x": [floats(5)], "y": ()}])


@case
def put_get_container_kinds():
    ordered = collections.OrderedDict([("z", floats()), ("a", floats(1))])
    default = collections.defaultdict(list, {"k": [floats(2)]})
    counted = ListOfTensors([floats(3)])
    counted.origin = floats(4)
    return round_trip([ordered, default, collections.deque([floats(5), 1], maxlen=4), counted])


@case
def put_get_dataclass():
    return round_trip([Sample(floats(), array(), ["x", floats(1)]), FrozenSample(floats(2), "frozen")])


@case
def put_get_namedtuple():
    return round_trip(Pair(floats(), Pair(array(), [floats(2)])))


@case
def put_get_object():
    return round_trip(Episode())


@case
def put_get_objects_with_pickle_hooks():
    return round_trip([WithState(floats()), WithReduce(floats(1), "note"), WithSlots(floats(2))])


@case
def put_get_small_values():
    plain = [None, True, 3, -2.5, float("inf"), 1 + 2j, "text", b"bytes", 2**80, Color.RED, range(3)]
    return round_trip([*plain, {1, 2}, frozenset("ab"), torch.arange(5), np.arange(4), {"k": torch.tensor(3.5)}])


@case
def put_get_small_each_alone():
    return [round_trip(x) for x in (None, 1, "text", b"bytes", (), [], {}, torch.ones(3), np.ones(3), np.float32(2))]


@case
def put_get_large_bytes_and_text():
    raw = bytes(random_bytes().numpy())
    return round_trip([raw, bytearray(raw), "ä" * 300_000, {"t": floats(), "raw": raw}])


@case
def put_get_out_of_band_buffer():
    return bytes(round_trip(pickle.PickleBuffer(array())))


@case
def put_get_cyclic_list():
    container = [floats(), "x"]
    container.append(container)
    return round_trip(container)


@case
def put_get_types_and_functions():
    values = [torch.float16, torch.device("cpu"), torch.Size([2, 3]), np.dtype("f4")]
    return round_trip([Sample, floats, *values, floats()])


@case
def put_get_many_tensors():
    return round_trip([floats(i, (64, 1024)) for i in range(12)] + [torch.full((4,), i) for i in range(40)])


@case
def same_tensor_twice_is_one_object():
    tensor, numbers = floats(), array()
    got = round_trip({"a": tensor, "b": [tensor], "c": numbers, "d": numbers})
    got["a"][0, 0] = -5
    return [got, got["a"] is got["b"][0], got["c"] is got["d"]]


@case
def views_of_one_storage():
    base = floats()
    got = round_trip([base, base[:128], base.view(-1)])
    got[0][0, 0] = -5
    pointers = [tensor.untyped_storage().data_ptr() for tensor in got]
    return [got, pointers[0] == pointers[1], pointers[0] == pointers[2]]


@case
def numpy_views_of_one_base():
    base = array()
    got = round_trip([base, base[:128], base.reshape(-1)])
    return [got, np.shares_memory(got[0], got[1]), np.shares_memory(got[0], got[2])]


# Put and get: torch ----------------------------------------------------------------------------

DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
DTYPES_TORCH_MAY_NOT_PICKLE = "uint16 uint32 uint64 complex32 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"


@case
def tensor_dtypes():
    raw = random_bytes()
    return {name: round_trip(raw.clone().view(getattr(torch, name))) for name in DTYPES.split() if name != "bool"}


@case
def tensor_bool():
    return round_trip(random_bytes() > 100)


@case
def tensor_dtypes_torch_may_not_pickle():
    """Some releases of torch cannot unpickle these; carrying them intact is as good as the same refusal."""
    return {name: _intact_or_refused(getattr(torch, name)) for name in DTYPES_TORCH_MAY_NOT_PICKLE.split()}


def _intact_or_refused(dtype):
    source = random_bytes().view(dtype)
    try:
        got = round_trip(source)
    except ray.exceptions.RaySystemError:
        return "intact or refused"
    intact = got.dtype == source.dtype and got.shape == source.shape and tensor_bytes(got) == tensor_bytes(source)
    return "intact or refused" if intact else got


@case
def tensor_special_floats():
    tensor = floats()
    tensor[0, :5] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-42])
    return round_trip(tensor)


@case
def tensor_views():
    base = floats(shape=(512, 512))
    views = [base.t(), base[::2, 1::3], base[10:400], base[3].expand(256, 512), base[:, 5:300], base.permute(1, 0)]
    return [round_trip(view) for view in views]


@case
def tensor_strides():
    """Memory layout of dense tensors. (A slice is packed to its own size, where plain Ray ships all that it is a slice of.)"""
    base = floats(shape=(64, 64, 64))
    views = [base, base.transpose(0, 2), base[:32]]
    views.append(base.unsqueeze(0).to(memory_format=torch.channels_last))
    return [[strides(got), got.is_contiguous()] for got in map(round_trip, views)]


@case
def tensor_conjugate_and_negative_views():
    tensor = torch.complex(floats(), floats(3))
    got = round_trip([tensor.conj(), tensor.conj().imag, tensor.imag])
    return [got, [x.is_conj() for x in got], [x.is_neg() for x in got], got[0] * 2]


@case
def tensor_empty_and_scalar():
    empty = [torch.empty(0), torch.empty(0, 5, dtype=torch.int64)]
    return round_trip([*empty, torch.tensor(2.5), floats(), torch.tensor(True)])


@case
def tensor_requires_grad():
    leaf = floats().requires_grad_()
    return [round_trip(leaf), round_trip({"leaf": leaf, "plain": floats(1)})]


@case
def tensor_result_of_autograd():
    leaf = floats().requires_grad_()
    leaf.square().sum().backward()
    return [round_trip(leaf * 2), round_trip(leaf), round_trip(leaf.grad)]


@case
def nn_parameter():
    got = round_trip([torch.nn.Parameter(floats()), torch.nn.Parameter(floats(1), requires_grad=False)])
    return [got, [isinstance(x, torch.nn.Parameter) for x in got]]


@case
def parameter_with_attribute():
    parameter = torch.nn.Parameter(floats())
    parameter.shard = {"rank": 1, "of": floats(2)}
    return round_trip(parameter)


@case
def tensor_subclass_with_attribute():
    got = round_trip([LabelledTensor.labelled(floats(), {"origin": floats(1)}), floats(2)])
    return [got, type(got[0] + 1).__qualname__]


@case
def tensor_wrapper_subclass():
    got = round_trip(ScaledTensor(random_bytes(), floats(1)))
    return [type(got).__qualname__, got.shape, got.dtype, got.values_, got.scale_]


@case
def tensor_with_python_attribute():
    tensor = floats()
    tensor.note = "kept?"
    tensor.mask = floats(9)
    return round_trip(tensor)


@case
def state_dict_of_module():
    state = small_network().state_dict()
    got = round_trip(state)
    return [got, got._metadata, small_network().load_state_dict(got)]


@case
def nn_module():
    module = small_network().eval()
    got = round_trip(module)
    return [got, got(torch.ones(2, 256)).shape, [p.requires_grad for p in got.parameters()]]


@case
def optimizer_state():
    module = torch.nn.Linear(256, 384)
    with torch.no_grad():
        module.weight.copy_(floats(shape=(384, 256)))
    optimizer = torch.optim.Adam([module.weight], lr=0.5)
    module.weight.square().sum().backward()
    optimizer.step()
    return round_trip(optimizer.state_dict())


@case
def sparse_tensors():
    dense = floats() * (floats() % 3 == 0)
    return round_trip([dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse().coalesce()])


@case
def jagged_nested_tensor():
    parts = [floats(i, (100 * i, 256)) for i in (1, 2, 3)]
    return round_trip({"jagged": torch.nested.nested_tensor(parts, layout=torch.jagged), "plain": parts[0]})


@case
def quantized_tensor():
    return round_trip(torch.quantize_per_tensor(floats() / 1000, 0.1, 10, torch.qint8))


@case
def meta_tensor():
    return round_trip([torch.empty(1000, 1000, device="meta"), floats()])


@case
def packed_sequence():
    sequence = torch.nn.utils.rnn.pack_sequence([floats(i, (200 - i, 512)) for i in range(2)])
    return round_trip(sequence)


@case(needs="tensordict")
def tensordict_plain_and_nested():
    from tensordict import TensorDict

    inner = TensorDict({"x": floats(shape=(64, 1024))}, batch_size=[64])
    outer = TensorDict({"a": floats(1, (64, 2048)), "inner": inner, "mask": torch.ones(64, dtype=torch.bool)}, [64])
    got = round_trip(outer)
    got["a"][0] = 5
    return [got, round_trip(outer.lock_()), got[:3].batch_size, torch.cat([got, got]).batch_size]


@case(needs="tensordict")
def tensordict_with_non_tensors():
    from tensordict import NonTensorData, TensorDict
    from tensordict.tensorclass import NonTensorStack

    texts = NonTensorStack(*[NonTensorData(f"text {i}") for i in range(4)])
    source = TensorDict({"a": floats(shape=(4, 40_000)), "texts": texts, "meta": NonTensorData({"k": 1}, [4])}, [4])
    got = round_trip(source)
    return [got["a"], list(got["texts"]), got["meta"], sorted(map(str, got.keys())), got.batch_size]


@case(needs="tensordict")
def tensordict_to_and_from_workers():
    from tensordict import TensorDict

    source = TensorDict({"a": floats(shape=(64, 2048)), "b": {"c": floats(1, (64, 512))}}, [64])
    ray.get(keeper().keep.remote(source))
    kept, returned = keeper().read.remote(), same.remote(ray.put(source))
    return [ray.get(kept), ray.get(returned), ray.get(scale.remote(source, 2))]


@case(needs="verl")
def verl_dataproto():
    from verl import DataProto

    tensors = {"ids": floats(shape=(8, 16_384)).long(), "mask": torch.ones(8, 16, dtype=torch.bool)}
    source = DataProto.from_dict(tensors, {"uid": np.array(list("abcdefgh"), dtype=object)}, {"step": 3, "t": floats()})
    got, seen = round_trip(source), ray.get(same.remote(source))
    parts = [(dict(part.batch.items()), part.non_tensor_batch, part.meta_info) for part in got.chunk(2)]
    return [type(got).__qualname__, len(got), got.batch, got.non_tensor_batch, got.meta_info, parts, seen.batch]


# Put and get: NumPy ----------------------------------------------------------------------------


def numpy_facts(got):
    return [got, got.flags.c_contiguous, got.flags.f_contiguous, got.flags.aligned, strides(got)]


@case
def numpy_layouts():
    base = array(shape=(300, 300))
    sources = [base, np.asfortranarray(base), base[::2, 1:], base[::-1], base.T, np.broadcast_to(base[0], (300, 300))]
    return [numpy_facts(round_trip(source)) for source in sources]


@case
def numpy_dtypes():
    names = "?,i1,u1,i2,u2,i4,u4,i8,u8,f2,f4,f8,c8,c16"
    return [*(round_trip(array(dtype=name)) for name in names.split(",")), round_trip(long_doubles())]


def long_doubles():
    """Long doubles whose padding bytes are zero, so that all bytes can be compared."""
    size = np.dtype(np.longdouble).itemsize
    raw = array(dtype=np.longdouble).reshape(-1, 1).view(np.uint8).copy()
    raw[:, 10:] = 0
    return raw.reshape(-1).view(np.longdouble).reshape(-1, size)


@case
def numpy_byte_order():
    return round_trip([array(dtype=">f4"), array(dtype=">i8"), array(dtype="<u2")])


@case
def numpy_structured():
    kind = np.dtype([("id", "i8"), ("xy", "f4", (2,)), ("name", "S5")], align=True)
    structured = np.zeros(20_000, kind)
    structured["id"], structured["name"] = np.arange(20_000), b"abc"
    record = structured.view(np.recarray)
    got = round_trip([structured, record, structured["xy"], structured[3]])
    return [got, got[1].id[:4]]


@case
def numpy_datetime():
    days = np.datetime64("2020-01-01", "D") + np.arange(50_000)
    return round_trip([days, days.astype("M8[ns]"), np.diff(days), days[0]])


@case
def numpy_object_dtype():
    mixed = np.empty((2, 3), object)
    mixed[0] = [floats(), array(1), "text"]
    mixed[1] = [None, {"k": floats(2)}, 5]
    texts = np.array(["x" * (i % 7) for i in range(40_000)], object)
    return round_trip([mixed, texts])


@case
def numpy_scalar_and_empty():
    sources = [np.empty(0), np.empty((0, 4), np.int8), np.empty((3, 0, 2))]
    sources += [np.array(3.5), np.float32(2), np.bool_(True)]
    return [round_trip(sources), [round_trip(source) for source in sources]]


@case
def numpy_strings():
    texts = [f"text {i % 99} ü" for i in range(30_000)]
    return round_trip([np.array(texts), np.array([t.encode() for t in texts]), np.array(texts).reshape(100, -1).T])


@case
def numpy_variable_strings():
    got = round_trip(np.array(["x" * (i % 50) for i in range(20_000)], np.dtypes.StringDType()))
    return [repr(got.dtype), "|".join(got.tolist())]


@case
def numpy_subclasses():
    labelled = array().view(LabelledArray)
    labelled.label = "mine"
    masked = np.ma.masked_array(array(), mask=array() % 2 == 0, fill_value=-1)
    return round_trip([labelled, masked, np.matrix(array(1))])


@case
def numpy_result_is_read_only():
    ref = ray.put({"big": array(), "small": np.arange(3), "fortran": np.asfortranarray(array(2))})
    got, alone = ray.get(ref), round_trip(array(3))
    writes = [error_of(np.ndarray.fill, target, 1) for target in (*got.values(), alone)]
    flags = [error_of(target.setflags, write=True) for target in (got["big"], alone)]
    return [writes, flags, ray.get(ref)]


@case
def numpy_read_only_source():
    source = array()
    source.setflags(write=False)
    return [round_trip(source), source.flags.writeable]


@case
def numpy_result_usable():
    got = round_trip(array())
    copied = got.copy()
    copied += 1
    derived = [got.max(), (got @ got.T).shape, got[5], memoryview(got).nbytes, memoryview(got).readonly]
    return [copied, derived, torch.tensor(got)]


# Snapshots and isolation -----------------------------------------------------------------------


@case
def put_takes_a_snapshot():
    tensor, numbers = floats(), array()
    ref = ray.put([tensor, numbers])
    tensor.zero_()
    numbers[:] = 0
    return ray.get(ref)


@case
def put_leaves_the_source_alone():
    tensor, numbers = floats().requires_grad_(), array()
    before = (tensor.data_ptr(), numbers.ctypes.data)
    ref = ray.put({"t": tensor, "n": numbers})
    ray.get(describe.remote(ref))
    unmoved = before == (tensor.data_ptr(), numbers.ctypes.data)
    return [unmoved, tensor, numbers, vars(tensor), tensor.is_shared()]


@case
def argument_takes_a_snapshot():
    tensor, gate = floats(), "argument_snapshot"
    result = same.remote(tensor, board().wait.remote(gate))
    tensor.zero_()
    ray.get(board().open.remote(gate))
    return ray.get(result)


@case
def result_takes_a_snapshot():
    actor = keeper()
    ray.get(actor.keep.remote(floats()))
    first = actor.read.remote()
    ray.get(actor.overwrite.remote(-1))
    return [ray.get(first), ray.get(actor.read.remote())]


@case
def write_is_not_seen_by_second_get():
    ref = ray.put({"t": floats()})
    first = ray.get(ref)
    first["t"].fill_(-1)
    first["new"] = 1
    return [ray.get(ref), first]


@case
def get_of_one_ref_twice_in_a_list():
    ref = ray.put([floats(), array()])
    first, second = ray.get([ref, ref])
    first[0].fill_(-1)
    return [first, second, first is second]


@case
def write_is_not_seen_by_other_actor():
    ref, one, other = ray.put(floats()), keeper(0), keeper(1)
    ray.get([one.keep.remote(ref), other.keep.remote(ref)])
    ray.get(one.overwrite.remote(-1))
    return [ray.get(one.read.remote()), ray.get(other.read.remote()), ray.get(ref)]


@case
def argument_written_by_task():
    tensor = floats()
    ref = ray.put(tensor)
    sums = ray.get([overwrite_argument.remote(tensor), overwrite_argument.remote(ref)])
    return [sums, tensor, ray.get(ref)]


@case
def put_again_what_was_got():
    got = round_trip([floats(), array(), floats(1)])
    got[0].add_(1)
    again = round_trip(got)
    again[2].fill_(-1)
    return [got, again, round_trip(again), ray.get(describe.remote(again, again[1][::2], key=got[2]))]


@case
def closure_over_what_was_got():
    got = round_trip({"t": floats(), "n": array()})
    return ray.get(ray.remote(lambda: described(got)).remote())


@case
def puts_of_one_tensor_are_independent():
    tensor = floats()
    one, other = ray.get([ray.put(tensor), ray.put(tensor)])
    one.fill_(-1)
    return [one, other, tensor]


@case
def tensor_result_is_an_ordinary_tensor():
    got = round_trip(floats())
    facts = [got.is_shared(), got.is_pinned(), got.data_ptr() % 16, got.storage_offset()]
    got.add_(1)
    got.numpy()[0, 0] = -7
    exchanged = torch.from_dlpack(got)
    exchanged[0, 1] = -8
    return [facts, got, got.numpy().flags.writeable]


@case
def tensor_result_can_be_replaced():
    """(`resize_` beyond its size is the one thing a view of the pool refuses.)"""
    got = round_trip(floats())
    got.resize_(128, 64)
    other = round_trip(floats(1))
    other.set_(floats(2))
    third = round_trip(floats(3))
    third.data = torch.ones(3)
    return [got, other, third]


@case
def tensor_result_moves_to_shared_memory():
    got = round_trip(floats()).share_memory_()
    return [got, got.is_shared()]


@case
def tensor_result_in_autograd():
    weight, data = round_trip(floats().requires_grad_()), round_trip(floats(5))
    (weight * data).sum().backward()
    module = round_trip(small_network())
    module(torch.ones(4, 256)).sum().backward()
    return [weight.grad, [p.grad is not None for p in module.parameters()]]


# Lifetimes -------------------------------------------------------------------------------------


@case
def value_outlives_ref():
    ref = ray.put([floats(), array(), floats(2)[::2]])
    got = ray.get(ref)
    part = got[1][10:20]
    del ref
    churn()
    return [got, part]


@case
def part_of_value_outlives_the_rest():
    got = ray.get(ray.put({"a": floats(), "b": array()}))
    row, column = got["a"][3], got["b"][:, 3]
    del got
    churn()
    return [row, column]


@case
def kept_argument_outlives_the_call():
    actor = keeper()
    ray.get(actor.keep.remote([floats(), array()]))
    churn()
    return ray.get(actor.describe.remote())


@case
def borrowed_ref_outlives_drivers_ref():
    ref, actor = ray.put(floats()), keeper()
    ray.get(actor.keep.remote([ref]))
    del ref
    churn()
    return ray.get(actor.read_inner.remote())


@case
def inner_ref_outlives_outer_ref():
    outer = ray.put([ray.put(floats()), ray.put(array())])
    refs = ray.get(outer)
    del outer
    churn()
    return ray.get(refs)


@case
def ref_held_only_by_an_object_in_the_store():
    outer = ray.put({"inner": [ray.put(floats())]})
    churn()
    return ray.get(ray.get(outer)["inner"])


@case
def argument_waits_in_the_queue():
    gate, ref = "queued_argument", ray.put(floats(2))
    result = describe.remote(floats(1), ref, board().wait.remote(gate))
    del ref
    churn()
    ray.get(board().open.remote(gate))
    return ray.get(result)


@case
def results_nobody_wants():
    """Refs dropped while their tasks are queued, running or just replying."""
    for i in range(60):
        for j in range(6):
            scale.remote(floats(j), 2)
            ray.put(floats(j))
        ray.get(scale.remote(floats(i), 2))
    return ray.get(scale.remote(floats(), 2))


@case
def ref_is_an_ordinary_object_ref():
    ref, other = ray.put(floats()), ray.put(floats())
    again = pickle.loads(ray.cloudpickle.dumps(ref))
    facts = [isinstance(ref, ray.ObjectRef), len(ref.hex()), ref == again, ref == other, hash(ref) == hash(again)]
    return [type(ref).__qualname__, facts, len({ref, again, other}), ray.get(again)]


# Waiting ---------------------------------------------------------------------------------------


@case
def wait_num_returns():
    gate = "wait_num_returns"
    blocked = same.remote(floats(9), board().wait.remote(gate))
    ready_refs = [ray.put(floats(i)) for i in range(3)]
    refs = [blocked, *ready_refs]
    ready, pending = ray.wait(refs, num_returns=3)
    facts = [ready == ready_refs, pending == [blocked], [len(x) for x in ray.wait(refs, num_returns=1)]]
    ray.get(board().open.remote(gate))
    ready, pending = ray.wait(refs, num_returns=4)
    return [facts, ready == refs, pending, ray.get(ready)]


@case
def wait_timeout_zero():
    gate = "wait_timeout_zero"
    blocked, put = same.remote(floats(9), board().wait.remote(gate)), ray.put(floats())
    ray.wait([put])
    ready, pending = ray.wait([blocked, put], num_returns=2, timeout=0)
    none_ready = ray.wait([blocked], timeout=0)
    ray.get(board().open.remote(gate))
    return [ready == [put], pending == [blocked], none_ready == ([], [blocked]), ray.get(blocked)]


@case
def wait_fetch_local():
    refs = [scale.remote(floats(i), 2) for i in range(2)]
    ready, pending = ray.wait(refs, num_returns=2, fetch_local=False)
    return [ready == refs, pending, ray.get(ready)]


@case
def wait_arguments_refused():
    ref = ray.put(floats())
    calls = [([ref, ref],), (ref,), ([1],), ([ref], 0)]
    return [kind_of(ray.wait, refs, **({"num_returns": n[0]} if n else {})) for refs, *n in calls]


@case
def wait_for_failed_task():
    failed = fail_with.remote(DomainError("waited for", floats()))
    ready, _ = ray.wait([failed])
    return [ready == [failed], error_of(ray.get, failed)]


@case
async def await_refs():
    return [await ray.put(floats()), await scale.remote(floats(1), 2), await same.remote({"k": [array()]})]


@case
async def gather_refs():
    refs = [ray.put(floats()), scale.remote(floats(1), 2), *(ray.put(array(i)) for i in range(4))]
    first = await refs[0]
    first.zero_()
    return await asyncio.gather(*refs)


@case
async def await_with_timeout_and_failure():
    gate = "await_with_timeout"
    blocked = same.remote(floats(), board().wait.remote(gate))
    timeout = await _async_error(asyncio.wait_for(asyncio.wrap_future(blocked.future()), 0.01))
    failure = await _async_error(_awaited(fail_with.remote(DomainError("awaited", floats()))))
    await board().open.remote(gate)
    done, pending = await asyncio.wait([asyncio.ensure_future(_awaited(ref)) for ref in (blocked, ray.put(floats(1)))])
    return [type(timeout).__qualname__, failure, in_order(task.result() for task in done), len(pending)]


async def _awaited(ref):
    return await ref


async def _async_error(awaitable):
    try:
        return {"no error, but": await awaitable}
    except Exception as error:
        return error.with_traceback(None)


@case
def future_of_ref():
    futures = [ray.put(floats()).future(), scale.remote(floats(1), 2).future()]
    concurrent.futures.wait(futures)
    failed = fail_with.remote(DomainError("in a future", floats())).future()
    return [[future.result() for future in futures], failed.exception(), type(futures[0]).__qualname__]


@case
def get_of_lists():
    refs = [ray.put(floats(i)) for i in range(5)]
    return [ray.get(refs), ray.get([]), ray.get(refs[0], timeout=30), ray.get(refs[::-1][:2], timeout=30)]


@case
def as_completed_and_map_unordered():
    completed = ray.util.as_completed([scale.remote(floats(i), 2) for i in range(4)])
    mapped = ray.util.map_unordered(same, [floats(i) for i in range(4)])
    return [in_order(completed), in_order(mapped)]


@case
def threads_of_the_driver():
    shared = ray.put(floats())

    def work(i):
        mine = ray.get(shared)
        mine.add_(i)
        return [round_trip(mine), ray.get(scale.remote(mine, 2))]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return [list(pool.map(work, range(8))), ray.get(shared)]


# Tasks -----------------------------------------------------------------------------------------


@case
def task_argument_by_value():
    return ray.get(describe.remote(floats(), array(), {"x": [floats(2)]}))


@case
def task_argument_by_ref():
    return ray.get(describe.remote(ray.put(floats()), ray.put([array(), floats(1)])))


@case
def task_keyword_arguments():
    return ray.get(describe.remote(floats(), by_value=floats(1), by_ref=ray.put(array()), small=3))


@case
def task_argument_small():
    return ray.get(describe.remote(torch.arange(4), np.arange(3), "x", ray.put(torch.ones(2)), k=[torch.zeros(1)]))


@case
def task_argument_nested_ref_stays_a_ref():
    refs = [ray.put(floats()), scale.remote(floats(1), 2)]
    return ray.get(describe_nested.remote({"items": refs, "tensor": floats(3)}))


@case
def task_argument_twice():
    tensor, ref = floats(), ray.put(floats(1))
    return [ray.get(describe.remote(tensor, tensor, [tensor])), ray.get(describe.remote(ref, ref))]


@case
def task_argument_kinds():
    sources = [Sample(floats(), array()), Pair(floats(1), 2), torch.nn.Parameter(floats(2))]
    sources.append(np.asfortranarray(array(3)))
    return ray.get(describe.remote(*sources, subclass=LabelledTensor.labelled(floats(4), "x"), episode=Episode()))


@case
def task_default_argument():
    return ray.get([with_default.remote(), with_default.remote(bias=4), with_default.remote(floats(1))])


@case
def task_returns_value():
    values = [floats(), {"a": [array(), floats(1)]}, Sample(floats(), array()), array()[:, ::2]]
    return ray.get([same.remote(value) for value in values])


@case
def task_returns_small():
    return ray.get([same.remote(torch.arange(3)), same.remote(None), same.remote("x"), nothing.remote(floats())])


@case
def task_returns_its_argument():
    ref = ray.put(floats())
    returned = same.remote(ref)
    first = ray.get(returned)
    first.zero_()
    return [ray.get(returned), ray.get(ref), returned == ref]


@case
def task_num_returns():
    big = floats(shape=(3, 100_000))
    two, three = rows.options(num_returns=2).remote(big, 2), rows.options(num_returns=3).remote(big, 3)
    return [ray.get(two), ray.get(list(reversed(three))), len(two), ray.get(scale.remote(three[1], 2))]


@case
def task_num_returns_zero():
    return nothing.options(num_returns=0).remote(floats())


@case
def task_num_returns_mismatch():
    refs = rows.options(num_returns=3).remote(floats(shape=(2, 100_000)), 2)
    single = rows.options(num_returns=2).remote(floats(shape=(2, 100_000)), 1)
    return [error_of(ray.get, ref) for ref in (*refs, *single)]


@case
def task_num_returns_dynamic():
    generator = ray.get(stream.options(num_returns="dynamic").remote(3))
    return [type(generator).__qualname__, ray.get(list(generator))]


@case
def task_returns_nested_refs():
    result = ray.get(fan_out.remote(floats()))
    return [result, ray.get(result["refs"])]


@case
def task_returns_a_ref():
    inner = ray.get(put_inside.remote(3))
    return [inner, ray.get(inner), ray.get(describe.remote(inner)), ray.get(scale.remote(inner, 2))]


@case
def task_chain():
    ref = scale.remote(floats(), 2)
    for factor in (3, 5):
        ref = scale.remote(ref, factor)
    return ray.get(ref)


@case
def task_recursion():
    return ray.get(recurse.remote(floats(), 2))


@case
def task_closure_with_tensor():
    captured, numbers = floats(), array()

    @ray.remote
    def use(k):
        return captured * k, numbers, described(captured)

    return ray.get([use.remote(2), use.remote(3)])


@case
def task_closure_with_ref():
    captured = ray.put(floats())
    refs = [captured, scale.remote(floats(1), 2)]

    @ray.remote
    def use(k):
        return ray.get(captured) * k, described(refs), ray.get(refs)

    return ray.get(use.remote(2))


@case
def task_name_and_context():
    named = task_context.options(name="oracle-task").remote(floats())
    return ray.get([named, task_context.remote(floats(1))])


@case
def task_with_own_environment():
    own = {"env_vars": {"ORACLE_VARIABLE": "set"}}
    inside = environment.options(runtime_env=own).remote("ORACLE_VARIABLE", floats())
    return [ray.get(inside), ray.get(environment.remote("ORACLE_VARIABLE", floats()))]


@case
def task_result_of_worker_that_exits():
    ref = scale_once.remote(floats(), 2)
    again = scale_once.remote(ref, 3)
    return ray.get([ref, again])


@case
def task_graph():
    node = scale.bind(scale.bind(floats(), 2), 3)
    return ray.get(node.execute())


@case
def task_of_lambda():
    return ray.get(ray.remote(lambda tensor: tensor[:, ::2] + 1).remote(floats()))


@case
def many_tasks_at_once():
    source = ray.put(floats())
    return ray.get([scale.remote(source if i % 2 else floats(i), i) for i in range(12)])


# Actors ----------------------------------------------------------------------------------------


@case
def actor_constructor_and_restart():
    """A restarted actor gets its constructor arguments again; Ray asks its user to hold those given by ref."""
    options, held = Keeper.options(max_restarts=1, max_task_retries=2), ray.put(floats(1))
    actor = options.remote([floats(), array()], extra=held)
    first = ray.get(actor.describe.remote(floats(2)))
    churn(4)
    ray.kill(actor, no_restart=False)
    while not ray.get(actor.context.remote())[1]:
        pass  # the kill has not reached it yet
    second = ray.get(actor.describe.remote(floats(2)))
    ray.kill(actor)
    return [first, second, ray.get(held)]


@case
def actor_state_over_calls():
    actor = keeper()
    ray.get(actor.keep.remote(None))
    with counting(actor):
        sums = ray.get([actor.add.remote(floats(i)) for i in range(4)])
        return [sums, ray.get(actor.read.remote())]


@case
def actor_method_arguments():
    ray.get(keeper().keep.remote(None))
    by_key = {"key": floats(1), "ref": ray.put(floats(2)), "refs": [ray.put(floats(3))]}
    return ray.get(keeper().describe.remote(floats(), ray.put(array()), **by_key))


@case
def actor_method_returns():
    pair = keeper().pair.remote(floats())
    with counting(keeper()):
        triple = keeper().triple.options(num_returns=3).remote(floats(1))
        return [ray.get(pair), ray.get(triple)]


@case
def actor_to_actor():
    with counting(keeper(0), keeper(1)):
        return ray.get(keeper(0).relay.remote(keeper(1), floats()))


@case
def object_through_three_actors():
    ref = ray.put(floats())
    for number in range(3):
        ref = keeper(number).scale.remote(ref, number + 2)
    return ray.get(ref)


@case
def state_moves_between_actors():
    ray.get(keeper(0).keep.remote([floats(), array()]))
    for number in (1, 2):
        ray.get(keeper(number).keep.remote(keeper(number - 1).read.remote()))
    return ray.get(keeper(2).describe.remote())


@case
def actor_puts_and_driver_gets():
    with counting(keeper()):
        ref = ray.get(keeper().put.remote(floats()))
        return [ref, ray.get(ref), ray.get(scale.remote(ref, 2)), ray.get(keeper(1).scale.remote(ref, 3))]


@case
def actor_reads_a_nested_ref():
    with counting(keeper()):
        ray.get(keeper().keep_inner.remote([ray.put([floats(), array()])]))
        return ray.get(keeper().describe.remote(ray.put(floats(1))))


@case
def actor_named():
    first = Keeper.options(name="oracle-named", get_if_exists=True).remote(floats())
    actor = ray.get_actor("oracle-named")
    same_one = Keeper.options(name="oracle-named", get_if_exists=True).remote(floats(1))
    return ray.get([actor.context.remote(), actor.read.remote(), same_one.read.remote(), first.read.remote()])


@case
def actor_handle_and_tensor_in_one_argument():
    @ray.remote
    def use(container):
        return ray.get(container["actor"].scale.remote(container["tensor"], 2))

    return ray.get(use.remote({"actor": keeper(), "tensor": floats()}))


@case
def actor_threaded():
    actor = Meeting.options(max_concurrency=3).remote(3)
    with counting(actor):
        return ray.get([actor.meet.remote(floats(i), 2) for i in range(6)])


@case
def actor_async_concurrent_calls():
    actor = async_keeper()
    with counting(actor):
        return ray.get([actor.exchange.remote(floats(i), 4) for i in range(4)])


@case
def actor_async_awaits_nested_refs():
    refs = [ray.put(floats()), scale.remote(floats(1), 2), ray.put({"k": array()})]
    return ray.get(async_keeper().gather.remote({"refs": refs, "tensor": floats(3)}))


@case
def actor_async_calls_tasks():
    with counting(async_keeper()):
        return ray.get(async_keeper().call.remote(floats()))


@case
def actor_async_keeps_state():
    ray.get(async_keeper().keep.remote([floats(), array()]))
    churn(4)
    return ray.get(async_keeper().read.remote())


@case
def actor_pool():
    pool = ray.util.ActorPool([keeper(0), keeper(1)])
    ordered = list(pool.map(lambda actor, tensor: actor.scale.remote(tensor, 2), [floats(i) for i in range(5)]))
    unordered = pool.map_unordered(lambda actor, tensor: actor.scale.remote(tensor, 3), [floats(i) for i in range(5)])
    return [ordered, in_order(unordered)]


@case
def queue_of_tensors():
    items = Queue(maxsize=4)
    items.put(floats())
    items.put({"k": [array(), floats(1)]})
    items.put_nowait_batch([floats(2), ray.put(floats(3))])
    full = kind_of(items.put_nowait, floats(4))
    got = [items.get(), items.get(), *items.get_nowait_batch(2)]
    sizes = [items.size(), items.empty(), items.full()]
    empty = kind_of(items.get_nowait)
    items.shutdown()
    return [got, ray.get(got[3]), sizes, full, empty, issubclass(ray.util.queue.Empty, queue.Empty)]


@case
def queue_between_task_and_driver():
    items = Queue(maxsize=2)

    @ray.remote
    def produce(target):
        for i in range(5):
            target.put(floats(i))

    producer = produce.remote(items)
    got = [items.get() for _ in range(5)]
    ray.get(producer)
    items.shutdown(force=True)
    return got


# Streaming generators --------------------------------------------------------------------------


def drain(generator):
    """All items, then how the generator ends."""
    got = []
    for ref in generator:
        try:
            got.append(ray.get(ref))
        except Exception as error:
            got.append(error.with_traceback(None))
    return [type(generator).__qualname__, got, kind_of(next, generator)]


@case
def stream_of_task():
    return [drain(stream.remote(4)), drain(stream.remote(3, shape=(2, 2))), drain(stream.remote(0))]


@case
def stream_of_actor():
    with counting(keeper()):
        return drain(keeper().stream.remote(4))


@case
def stream_of_async_actor():
    with counting(async_keeper()):
        return drain(async_keeper().stream.remote(4))


@case
def stream_raises_midway():
    return [drain(stream.remote(4, fail_at=2)), drain(stream.remote(4, fail_at=0))]


@case
def stream_of_actor_raises_midway():
    return [drain(keeper().stream.remote(4, fail_at=2)), drain(async_keeper().stream.remote(4, fail_at=2))]


@case
def stream_abandoned():
    firsts = []
    for source in (stream, keeper().stream, async_keeper().stream):
        generator = source.remote(8)
        firsts.append(ray.get(next(generator)))
        del generator
    churn(4)
    return [firsts, ray.get(keeper().scale.remote(floats(), 2)), ray.get(async_keeper().call.remote(floats()))]


@case
def stream_items_outlive_the_generator():
    generator = stream.remote(4)
    refs = list(generator)
    del generator
    churn(4)
    return [ray.get(refs), ray.get(scale.remote(refs[1], 2))]


@case
def stream_with_backpressure():
    generator = stream.options(_generator_backpressure_num_objects=1).remote(5)
    return ray.get([scale.remote(ref, 2) for ref in generator])


@case
async def stream_consumed_by_async_for():
    task = [await ref async for ref in stream.remote(3)]
    return [task, [await ref async for ref in async_keeper().stream.remote(3)]]


@case
def stream_waited_for():
    generator = stream.remote(2)
    ready, _ = ray.wait([generator])
    first = ray.get(next(generator))
    return [ready == [generator], first, ray.get(list(generator)), ray.get(generator.completed())]


@case
def stream_made_inside_a_task():
    @ray.remote
    def consume():
        return [ray.get(ref) for ref in stream.remote(3)]

    return ray.get(consume.remote())


# Errors ----------------------------------------------------------------------------------------


@case
def error_with_tensor_argument():
    sources = [DomainError("bad", floats()), ValueError("v", floats(1))]
    errors = [error_of(ray.get, fail_with.remote(source)) for source in sources]
    return [errors, [isinstance(error, (DomainError, ValueError)) for error in errors]]


@case
def error_with_tensor_attribute():
    error = RuntimeError("plain")
    error.tensor, error.table = floats(), {"k": [array()]}
    raised = error_of(ray.get, fail_with.remote(error))
    return [raised, raised.cause.tensor, raised.cause.table]


@case
def error_that_cannot_be_rebuilt():
    return kind_of(ray.get, fail_with.remote(ErrorWithoutReduce("odd", floats())))


@case
def error_chained():
    return error_of(ray.get, fail_chained.remote(floats()))


@case
def error_of_actor_methods():
    calls = [keeper().fail.remote("sync", floats()), async_keeper().fail.remote("async", floats(1))]
    return [error_of(ray.get, call) for call in calls]


@case
def error_got_twice():
    failed = fail_with.remote(DomainError("twice", floats()))
    return [error_of(ray.get, failed), error_of(ray.get, failed), error_of(ray.get, [ray.put(floats()), failed])]


@case
def error_of_a_dependency():
    failed = fail_with.remote(DomainError("upstream", floats()))
    task = scale.remote(failed, 2)
    dependents = [task, keeper().scale.remote(failed, floats()), same.remote(task)]
    return [error_of(ray.get, dependent) for dependent in dependents]


@case
def error_returned_as_value():
    return [ray.get(same.remote(DomainError("a value", floats()))), round_trip([ValueError("v", array())])]


@case
def error_inside_nested_task():
    @ray.remote
    def outer(tensor):
        return ray.get(fail_with.remote(DomainError("nested", tensor)))

    return error_of(ray.get, outer.remote(floats()))


@case
def error_caught_inside_task():
    @ray.remote
    def outer(tensor):
        return described(error_of(ray.get, fail_with.remote(DomainError("caught", tensor))))

    return ray.get(outer.remote(floats()))


@case
def retry_after_application_error():
    return ray.get(flaky.remote(board(), "flaky", floats()))


@case
def retry_after_worker_death():
    return ray.get(crash_at_first.remote(board(), "crash_at_first", floats()))


@case
def worker_death_without_retry():
    return [kind_of(ray.get, crash.remote(floats())), ray.get(scale.remote(floats(), 2))]


@case
def get_timeout():
    gate = "get_timeout"
    blocked = same.remote(floats(), board().wait.remote(gate))
    kinds = [kind_of(ray.get, blocked, timeout=0.01), kind_of(ray.get, [ray.put(floats()), blocked], timeout=0)]
    ray.get(board().open.remote(gate))
    return [kinds, ray.get(blocked, timeout=50)]


@case
def cancel_of_queued_task():
    blocked = same.remote(floats(), board().wait.remote("cancel_queued"))
    ray.cancel(blocked)
    return [kind_of(ray.get, blocked), kind_of(ray.get, same.remote(blocked))]


@case
def cancel_of_running_task():
    running = run_until_cancelled.remote(board(), "cancel_running", floats())
    ray.get(board().wait.remote("cancel_running"))
    ray.cancel(running)
    return [kind_of(ray.get, running), ray.get(scale.remote(floats(), 2))]


@case
def cancel_of_async_actor_call():
    running = async_keeper().hang.remote(board(), "cancel_async", floats())
    ray.get(board().wait.remote("cancel_async"))
    ray.cancel(running)
    return [kind_of(ray.get, running), ray.get(async_keeper().call.remote(floats()))]


@case
def get_of_what_is_no_ref():
    ref = ray.put(floats())
    return [kind_of(ray.get, value) for value in ("text", 3, floats(), (ref,), {"k": ref}, [ref, 1], None)]


@case
def put_of_a_ref():
    return [kind_of(ray.put, ray.put(floats())), round_trip([ray.put(floats())])]


@case
def argument_cannot_be_pickled():
    held = {"tensor": floats(), "lock": threading.Lock()}
    kinds = [kind_of(ray.put, held), kind_of(same.remote, held)]
    refused = error_of(ray.put, [floats(), Unpicklable(), array()])
    return [kinds, type(refused).__qualname__, str(refused)[:60], round_trip(floats()), ray.get(same.remote(floats(1)))]


@case
def result_cannot_be_pickled():
    @ray.remote
    def give():
        return [floats(), Unpicklable()]

    return [kind_of(ray.get, give.remote()), ray.get(scale.remote(floats(), 2))]


@case
def value_cannot_be_unpickled():
    ref = ray.put([floats(), BrokenState(array())])
    return [kind_of(ray.get, ref), kind_of(ray.get, ref), kind_of(ray.get, same.remote(ref))]


@case
def wrong_arguments():
    return [kind_of(scale.remote, floats()), kind_of(scale.remote, floats(), 2, other=1), kind_of(scale, floats())]


@case
def actor_constructor_fails():
    actor = ray.remote(num_cpus=0)(BrokenActor).remote(floats())
    return kind_of(ray.get, actor.call.remote())


@case
def actor_killed_after_returning():
    """What an actor returned outlives it."""
    actor = Keeper.remote()
    refs = [actor.scale.remote(floats(i), 2) for i in range(3)]
    ray.wait(refs, num_returns=3)
    ray.kill(actor)
    ended = gone(actor)
    churn(4)
    after = ray.get([refs[0], scale.remote(refs[1], 3), keeper().scale.remote(refs[2], 4)])
    return [ended, after, kind_of(ray.get, actor.scale.remote(floats(), 2))]


@case
def actor_killed_after_putting():
    """What an actor put does not outlive it."""
    actor = Keeper.remote()
    outer = actor.put.remote(floats())
    ray.wait([outer])
    ray.kill(actor)
    ended = gone(actor)
    inner = ray.get(outer)
    return [ended, kind_once_lost(inner), kind_of(ray.get, inner), kind_of(ray.get, scale.remote(inner, 2))]


# Copies and pickles ----------------------------------------------------------------------------


@case
def deepcopy_of_results():
    got = round_trip({"t": floats(), "n": array(), "twice": None})
    got["twice"] = got["t"]
    copied = copy.deepcopy(got)
    copied["t"].zero_()
    return [got, copied, copied["t"] is copied["twice"], copy.copy(got["t"]), copy.copy(got["n"])]


@case
def clone_of_results():
    got = round_trip([floats(), floats().t(), array()])
    return [got[0].clone(), got[1].clone(), got[2].copy(), strides(got[1].clone()), got[0].detach(), got[0].half()]


def _pickled_size(pickled, payload):
    """Torch writes the address of the storage, so sizes agree only nearly."""
    return "payload and little else" if payload <= len(pickled) < payload + 4096 else len(pickled)


@case
def pickle_of_tensor_results():
    got, part = round_trip(floats()), round_trip(floats(shape=(1024, 384)))[:256].clone()
    pickles = [pickle.dumps(value, protocol) for value in (got, part) for protocol in (4, 5)]
    return [[_pickled_size(p, got.nbytes) for p in pickles], [pickle.loads(p) for p in pickles]]


@case
def pickle_of_numpy_results():
    got = round_trip([array(), np.asfortranarray(array(1)), array(2)[::2]])
    pickles = [pickle.dumps(got, protocol) for protocol in (2, 4, 5)]
    buffers = []
    in_band = pickle.dumps(got, 5, buffer_callback=buffers.append)
    again = pickle.loads(in_band, buffers=buffers)
    return [[len(p) for p in pickles], [pickle.loads(p) for p in pickles], len(in_band), len(buffers), again]


@case
def pickle_of_unsent_containers():
    """Pickling that has nothing to do with Ray stays as it was."""
    container = {"t": floats(), "n": array(), "p": torch.nn.Parameter(floats(1))}
    pickled = pickle.dumps(container)
    numbers = len(pickle.dumps([array(), array(1)]))
    return [pickle.loads(pickled), _pickled_size(pickled, 3 * floats().nbytes), numbers, copy.deepcopy(container)]


@case
def cloudpickle_of_tensors():
    values = [floats(), {"n": array(), "t": [floats(1)]}, torch.nn.Parameter(floats(2))]
    pickles = [ray.cloudpickle.dumps(value) for value in values]
    sizes = [_pickled_size(p, n * floats().nbytes) for p, n in zip(pickles, (1, 2, 1), strict=True)]
    return [sizes, [pickle.loads(p) for p in pickles], [ray.cloudpickle.loads(p) for p in pickles]]


@case
def cloudpickle_of_closure():
    captured = floats()
    function = ray.cloudpickle.loads(ray.cloudpickle.dumps(lambda k: captured * k))
    return function(2)


@case
def cloudpickle_of_ref_sent_as_bytes():
    ref = ray.put(floats())

    @ray.remote
    def use(pickled):
        return ray.get(ray.cloudpickle.loads(pickled)) + 1

    return ray.get(use.remote(ray.cloudpickle.dumps(ref)))


@case
def pickle_sent_as_bytes():
    @ray.remote
    def use(pickled):
        return pickle.loads(pickled)

    return ray.get(use.remote(pickle.dumps([floats(), array()])))


@case
def torch_save_of_results():
    files = [io.BytesIO(), io.BytesIO()]
    torch.save(round_trip({"t": floats(), "p": torch.nn.Parameter(floats(1))}), files[0])
    torch.save(round_trip(small_network().state_dict()), files[1])
    sizes = [len(file.getvalue()) for file in files]
    return [sizes, [torch.load(io.BytesIO(file.getvalue())) for file in files]]


@case
def numpy_save_of_results():
    file = io.BytesIO()
    np.save(file, round_trip(np.asfortranarray(array())))
    return [len(file.getvalue()), np.load(io.BytesIO(file.getvalue()))]


@case
def serializer_registered_by_the_user():
    ray.util.register_serializer(WithSlots, serializer=_slots_to_state, deserializer=_slots_from_state)
    try:
        return [round_trip([WithSlots(floats())]), ray.get(same.remote(WithSlots(array())))]
    finally:
        ray.util.deregister_serializer(WithSlots)


def _slots_to_state(value):
    return {"data": value.data, "by": "serializer"}


def _slots_from_state(state):
    rebuilt = WithSlots(state["data"])
    rebuilt.other = state["by"]
    return rebuilt
