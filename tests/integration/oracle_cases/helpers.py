"""What cases are written with."""

from __future__ import annotations

import gc

import ray
import torch

from oracle_cases.payloads import floats
from oracle_cases.remotes import board, scale


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


def drain(generator):
    """All items, then how the generator ends."""
    got = []
    for ref in generator:
        try:
            got.append(ray.get(ref))
        except Exception as error:
            got.append(error.with_traceback(None))
    return [type(generator).__qualname__, got, kind_of(next, generator)]
