"""Put and get: containers and objects."""

from __future__ import annotations

import collections
import pickle

import numpy as np
import torch

from oracle_cases.helpers import round_trip
from oracle_cases.payloads import (
    Color,
    Episode,
    FrozenSample,
    ListOfTensors,
    Pair,
    Sample,
    WithReduce,
    WithSlots,
    WithState,
    array,
    floats,
    random_bytes,
)
from oracle_cases.registry import case


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
