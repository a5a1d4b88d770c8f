"""`Ragged` from and to padded tensors, and torch's jagged ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mooncake_ray.data import kernels, ragged_rows
from mooncake_ray.data.bits import as_ints, dtype_name, flat_bytes, from_bytes, is_plain
from mooncake_ray.data.block.read import Runs
from mooncake_ray.data.exact import converted
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.errors import SchemaError

__all__ = ["from_jagged", "from_padded", "mask", "to_jagged", "to_padded"]


def from_padded(padded: Any, lengths: Any, mask: Any, side: str, ragged_dim: int) -> Ragged:
    """See `Ragged.from_padded`."""
    if not isinstance(padded, torch.Tensor) or not is_plain(padded) or padded.ndim < 2 + ragged_dim:
        raise SchemaError(f"got {_kind(padded)}, expected a dense tensor of shape (rows, width, ...)")
    if (lengths is None) == (mask is None):
        raise SchemaError("expected either lengths= or mask=")
    side = _side(side)
    padded = padded.movedim(1 + ragged_dim, 1) if ragged_dim else padded
    rows, width = padded.shape[:2]
    counts = _counts(lengths, rows, width) if mask is None else _mask_counts(mask, rows, width, side)
    starts = np.arange(rows) * width + _starts(counts, width, side)
    flat = padded.reshape(rows * width, *padded.shape[2:])
    return Ragged(ragged_rows.take_items(flat, Runs(starts, counts)), ragged_rows.offsets_of(counts), None, ragged_dim)


def _counts(lengths: Any, rows: int, width: int) -> np.ndarray:
    counts = torch.as_tensor(lengths).detach().cpu()
    if counts.shape != (rows,) or counts.is_floating_point() or counts.dtype == torch.bool:
        raise SchemaError(f"lengths is {dtype_name(counts.dtype)}{list(counts.shape)}, expected integers [{rows}]")
    numbers = counts.numpy().astype(np.int64)
    bad = np.flatnonzero((numbers < 0) | (numbers > width))
    if bad.size:
        raise SchemaError(f"row {bad[0]} has the length {numbers[bad[0]]}, expected 0 to the width {width}")
    return numbers


def _mask_counts(mask: Any, rows: int, width: int, side: str) -> np.ndarray:
    if not isinstance(mask, torch.Tensor) or tuple(mask.shape) != (rows, width):
        raise SchemaError(f"mask is {_kind(mask)}, expected a tensor of shape {(rows, width)}")
    mask = mask.detach().cpu().contiguous()
    if mask.numel():
        found = kernels.find_spans(_cells(mask), _one(mask.dtype))
        if found is not None:
            starts, counts = found
            if (starts[counts > 0] == (0 if side == "right" else width - counts[counts > 0])).all():
                return counts
    hot = mask != 0
    counts = hot.sum(1, dtype=torch.int64)
    places = torch.arange(width)
    expected = places >= width - counts[:, None] if side == "left" else places < counts[:, None]
    bad = ((hot != expected) | (mask != hot)).any(1)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise SchemaError(f"row {row} of the mask is not {int(counts[row])} ones with all zeros to the {side}: {mask[row].tolist()}")
    return counts.numpy()


def _cells(padded: torch.Tensor) -> kernels.Cells:
    """A contiguous tensor (rows, width, ...)."""
    rows, width = padded.shape[:2]
    item = padded.itemsize * padded.shape[2:].numel()
    return kernels.Cells(padded.data_ptr(), rows, width, width * item, item)


def _one(dtype: torch.dtype) -> bytes:
    return bytes(flat_bytes(torch.ones(1).to(dtype)).numpy())


def _starts(lengths: np.ndarray, width: int, side: str) -> np.ndarray:
    return width - lengths if side == "left" else np.zeros(len(lengths), np.int64)


def mask(column: Ragged, width: int | None, side: str, dtype: torch.dtype) -> torch.Tensor:
    """See `Ragged.mask`."""
    lengths, side = column.lengths(), _side(side)
    rows, width = len(lengths), _width(lengths, width)
    out = from_bytes(kernels.empty(rows * width * dtype.itemsize), dtype, (rows, width))
    if out.numel():
        inside = np.tile(np.frombuffer(_one(dtype), np.uint8), (rows, 1))
        kernels.fill_spans(_cells(out), _starts(lengths.numpy(), width, side), lengths.numpy(), inside, bytes(dtype.itemsize))
    return out.to(column.device)


def to_padded(column: Ragged, width: int | None, side: str, pad: Any) -> torch.Tensor:
    """See `Ragged.to_padded`."""
    _one_level(column, "a padded tensor")
    lengths = column.lengths()
    width = _width(lengths, width)
    filler = _filler(pad, column.dtype)
    start, stop = column.span
    values = column.values[start:stop]
    if values.requires_grad or not ragged_rows.in_memory(values):
        out = _padded_by_torch(values, lengths, width, _side(side), filler)
    else:
        out = _padded(values, column.offsets.numpy() - start, width, _side(side), filler)
    return out.movedim(1, 1 + column.ragged_dim) if column.ragged_dim else out


def _padded(values: torch.Tensor, offsets: np.ndarray, width: int, side: str, filler: torch.Tensor) -> torch.Tensor:
    rows, shape = len(offsets) - 1, values.shape[1:]
    out = from_bytes(kernels.empty(rows * width * ragged_rows.item_bytes(values)), values.dtype, (rows, width, *shape))
    if out.numel():
        pad = bytes(flat_bytes(filler).numpy()) * shape.numel()
        kernels.unpack(values.data_ptr(), offsets, _starts(np.diff(offsets), width, side), _cells(out), pad)
    return out


def _padded_by_torch(values: torch.Tensor, lengths: torch.Tensor, width: int, side: str, filler: torch.Tensor) -> torch.Tensor:
    """On other devices, for gradients, and for items that do not lie one after the other."""
    rows, shape = len(lengths), values.shape[1:]
    out = filler.to(values.device).expand(rows * width, *shape).clone(memory_format=torch.contiguous_format)
    firsts = np.arange(rows) * width + _starts(lengths.numpy(), width, side)
    places = torch.from_numpy(Runs(firsts, lengths.numpy()).positions()).to(values.device)
    if values.requires_grad:
        out = out.index_copy(0, places, values)
    else:
        as_ints(out).index_copy_(0, places, as_ints(values))
    return out.view(rows, width, *shape)


def _width(lengths: torch.Tensor, width: int | None) -> int:
    longest = int(lengths.max()) if len(lengths) else 0
    if width is None:
        return longest
    if width < longest:
        row = int(lengths.argmax())
        raise SchemaError(f"row {row} has the length {longest}, expected at most the width {width}")
    return width


def _side(side: str) -> str:
    if side not in ("left", "right"):
        raise ValueError(f"side is {side!r}, expected 'left' or 'right'")
    return side


def _filler(pad: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(pad, torch.Tensor) and pad.dtype == dtype and pad.ndim == 0:
        return pad
    if pad == 0 and isinstance(pad, int):
        return torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)[0]  # for dtypes that cannot be converted to
    kind = torch.uint64 if isinstance(pad, int) and pad >= 2**63 else None
    kind = torch.float64 if isinstance(pad, float) else kind
    filler, bad = converted(torch.tensor(pad, dtype=kind), dtype)
    if bad is not None:
        raise SchemaError(f"pad {pad!r} is not exact as {dtype_name(dtype)}")
    return filler


def from_jagged(nested: Any) -> Ragged:
    """See `Ragged.from_jagged`."""
    if not isinstance(nested, torch.Tensor) or not nested.is_nested or nested.layout is not torch.jagged:
        raise SchemaError(f"got {_kind(nested)}, expected a nested tensor of the layout torch.jagged")
    ragged_dim = nested._ragged_idx - 1
    values = nested.values()
    values = values.movedim(ragged_dim, 0) if ragged_dim else values
    offsets, lengths = nested.offsets().detach().cpu().to(torch.int64), nested.lengths()
    if lengths is None:
        return Ragged(values, offsets, None, ragged_dim)
    counts = lengths.detach().cpu().to(torch.int64).numpy()  # rows with holes between them
    runs = Runs(offsets.numpy()[: len(counts)], counts)
    return Ragged(ragged_rows.take_items(values, runs), ragged_rows.offsets_of(counts), None, ragged_dim)


def to_jagged(column: Ragged) -> torch.Tensor:
    """See `Ragged.to_jagged`."""
    _one_level(column, "a jagged tensor")
    if column.null_count:
        row = int((~ragged_rows.marks(column)).nonzero()[0])
        raise SchemaError(f"row {row} is null, which a jagged tensor has no form for")
    start, stop = column.span
    lengths = column.lengths()
    values = column.values[start:stop]
    values = (values.movedim(0, column.ragged_dim) if column.ragged_dim else values).contiguous()
    # Without its lengths' bounds, to_padded_tensor pads every row to the sum of all lengths.
    return torch.nested.nested_tensor_from_jagged(
        values,
        (column.offsets - start).to(values.device),
        jagged_dim=column.ragged_dim + 1,
        min_seqlen=int(lengths.min()) if len(lengths) else 0,
        max_seqlen=int(lengths.max()) if len(lengths) else 0,
    )


def _one_level(column: Ragged, what: str) -> None:
    if column.levels > 1:
        raise SchemaError(f"rows are lists of rows ({column.describe()}), which {what} has no form for")


def _kind(value: Any) -> str:
    return f"{dtype_name(value.dtype)}{list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
