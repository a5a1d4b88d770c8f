"""Rows that are NumPy arrays or torch tensors.

arrays, tensors  raw row-major items of all rows, one row after the other, in `buffer`; the `dtype` is NumPy's (`str`), or torch's name.
                 Either all rows have one `shape`; or they differ in their first dimension and have one `tail`, and `node.spans` counts its
                 multiples; or `shapes` (a buffer of `shapes_type`) holds `ndim` numbers a row and `node.spans` counts items.
                 An array is `fortran` where its items are in column-major order, and `writeable` or not, as a pickle would have it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from mooncake_ray.data import kernels
from mooncake_ray.data.bits import named_dtype
from mooncake_ray.data.block.chunk import Builder, Chunk
from mooncake_ray.data.block.node import Node, corrupt, decoder, items, lengths, narrow, natural, number_type, spans, typed
from mooncake_ray.data.block.read import Read, Runs, Steps, together
from mooncake_ray.data.block.scalars import numpy_type

__all__ = ["array_group", "encode_arrays", "encode_tensors", "tensor_group"]

Shape = tuple[int, ...]


def array_group(array: np.ndarray) -> Any:
    """What arrays of one node have in common; None for one that is not stored raw."""
    dtype, flags = array.dtype, array.flags
    if dtype.kind not in "biufcmMSU" or dtype.metadata or not dtype.itemsize:
        return None
    fortran = flags.f_contiguous and not flags.c_contiguous
    # A pickle of memory that is in one piece says whether it can be written; anything else comes back as an array of its own.
    plain = flags.c_contiguous or flags.f_contiguous
    return dtype.str, array.ndim, fortran, flags.writeable or not plain or dtype.kind in "mM"


def encode_arrays(values: list[np.ndarray], out: Builder) -> Node:
    """Encodes exact arrays of one group."""
    name, _, fortran, writeable = array_group(values[0])
    rows = [np.ascontiguousarray(value.T if fortran else value) for value in values]
    fields = _encode_shapes([value.T.shape if fortran else value.shape for value in values], out)
    chunk = _chunk(rows, [row.ctypes.data for row in rows], [row.nbytes for row in rows])
    return {"kind": "arrays", **fields, "dtype": name, "fortran": fortran, "writeable": writeable, "buffer": out.add(chunk)}


@decoder("arrays")
def _decode_arrays(node: Node, runs: Runs) -> Steps[list[np.ndarray]]:
    dtype = numpy_type(node.get("dtype"))
    if not dtype.itemsize:
        raise corrupt(f"items of {dtype} have no size")
    data, places = yield from _rows(node, runs, dtype.itemsize)
    writeable, fortran = node.get("writeable") is True, node.get("fortran") is True
    if writeable and not data.flags.writeable:
        data = data.copy()
    flat = data.view(dtype)
    flat.flags.writeable = writeable
    rows = [flat[a:b].reshape(shape) for a, b, shape in places]
    return [row.T for row in rows] if fortran else rows


def tensor_group(tensor: torch.Tensor) -> Any:
    """What tensors of one node have in common; None for one that is not stored raw."""
    plain = (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.is_quantized or tensor.is_nested or tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
        and not tensor._backward_hooks
    )
    return (tensor.dtype, tensor.ndim) if plain else None


def encode_tensors(values: list[torch.Tensor], out: Builder) -> Node:
    """Encodes exact tensors of one group. They come back row-major."""
    name = str(values[0].dtype).removeprefix("torch.")
    rows = [value.contiguous() for value in values]
    fields = _encode_shapes([tuple(row.shape) for row in rows], out)
    chunk = _chunk(rows, [row.data_ptr() for row in rows], [row.nbytes for row in rows])
    return {"kind": "tensors", **fields, "dtype": name, "buffer": out.add(chunk)}


@decoder("tensors")
def _decode_tensors(node: Node, runs: Runs) -> Steps[list[torch.Tensor]]:
    name = node.get("dtype")
    dtype = named_dtype(name) if isinstance(name, str) else None
    if dtype is None:
        raise corrupt(f"{name!r} is no dtype of torch")
    data, places = yield from _rows(node, runs, dtype.itemsize)
    if not data.size:
        return [torch.empty(shape, dtype=dtype) for _, _, shape in places]
    if not data.flags.writeable:
        data = data.copy()
    rows = torch.from_numpy(data).view(dtype).split_with_sizes([b - a for a, b, _ in places])
    return [row.view(shape) if len(shape) != 1 else row for row, (_, _, shape) in zip(rows, places, strict=True)]


def _chunk(owner: Any, addresses: list[int], sizes: list[int]) -> Chunk:
    """Pieces of memory, one after the other."""
    if len(sizes) == 1:
        return Chunk(sizes[0], owner, address=addresses[0])
    starts, nbytes = np.array(addresses, np.int64), np.array(sizes, np.int64)
    return Chunk(int(nbytes.sum()), owner, write=lambda to: kernels.gather(0, starts, nbytes, to))


def _encode_shapes(shapes: list[Shape], out: Builder) -> Node:
    rows, shape = len(shapes), shapes[0]
    distinct = set(shapes)
    if len(distinct) == 1:
        return {"rows": rows, "shape": list(shape)}
    if len({each[1:] for each in distinct}) == 1:
        counts = np.fromiter((each[0] for each in shapes), np.int64, rows)
        return {"rows": rows, "tail": list(shape[1:]), **lengths(counts, out)}
    table = np.array(shapes, np.int64)
    dtype = narrow(int(table.max()))
    sizes = np.fromiter(map(math.prod, shapes), np.int64, rows)
    fields = {"rows": rows, "ndim": len(shape), "shapes": out.add(table.astype(dtype)), "shapes_type": dtype.name}
    return {**fields, **lengths(sizes, out)}


def _rows(node: Node, runs: Runs, item: int) -> Steps[tuple[np.ndarray, list[tuple[int, int, Shape]]]]:
    """The bytes of the selected rows; and for each row where its items begin and end, and its shape."""
    buffer = natural(node, "buffer")
    if "shape" in node:
        shape = _dimensions(node, "shape")
        size = math.prod(shape)
        (data,) = yield [Read.items(buffer, runs, _small(size * item))]
        typed(data, np.dtype(np.uint8), runs.total * size * item)
        return data, [(row * size, (row + 1) * size, shape) for row in range(runs.total)]
    if "tail" in node:
        tail = _dimensions(node, "tail")
        size = math.prod(tail)
        inner, edges = yield from spans(node, runs)
        shapes: Any = [(count, *tail) for count in np.diff(edges).tolist()]
    else:
        size, ndim = 1, natural(node, "ndim")
        dtype = number_type(node, "shapes_type", "u")
        table = items(natural(node, "shapes"), runs.scaled(ndim), dtype)
        (inner, edges), table = yield from together([spans(node, runs), table])
        shapes = list(map(tuple, table.reshape(runs.total, ndim).tolist()))
        if list(map(math.prod, shapes)) != np.diff(edges).tolist():
            raise corrupt(f"shapes of {node['kind']} do not have as many items as are stored")
    (data,) = yield [Read.items(buffer, inner, _small(size * item))]
    typed(data, np.dtype(np.uint8), inner.total * size * item)
    bounds = (edges * size).tolist()
    return data, list(zip(bounds[:-1], bounds[1:], shapes, strict=True))


def _dimensions(node: Node, name: str) -> Shape:
    shape = node[name]
    if not isinstance(shape, list) or len(shape) > 64:
        raise corrupt(f"{name!r} of {node['kind']} is {shape!r}, expected a list of numbers")
    return tuple(natural({"kind": node["kind"], name: n}, name) for n in shape)


def _small(nbytes: int) -> int:
    """Bytes of a row, which a run of rows is multiplied by."""
    if nbytes >= 1 << 48:
        raise corrupt(f"a row of {nbytes} bytes")
    return nbytes
