"""Copies and pickles that are none of Ray's business."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import ray
import ray.cloudpickle
import ray.util
import torch

from oracle_cases.flavour import remote
from oracle_cases.helpers import round_trip, strides
from oracle_cases.payloads import WithSlots, array, floats, small_network
from oracle_cases.registry import case
from oracle_cases.remotes import same


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

    @remote
    def use(pickled):
        return ray.get(ray.cloudpickle.loads(pickled)) + 1

    return ray.get(use.remote(ray.cloudpickle.dumps(ref)))


@case
def pickle_sent_as_bytes():
    @remote
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
