"""Snapshots and isolation: whose write is seen by whom."""

from __future__ import annotations

import ray
import torch
from oracle_outcome import described

from oracle_cases.flavour import remote
from oracle_cases.helpers import round_trip
from oracle_cases.payloads import array, floats, small_network
from oracle_cases.registry import case
from oracle_cases.remotes import board, describe, keeper, overwrite_argument, same


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
    return ray.get(remote(lambda: described(got)).remote())


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
