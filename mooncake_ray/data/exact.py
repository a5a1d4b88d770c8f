"""Conversions of dtypes that change no value, or say where they would."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mooncake_ray.data.bits import as_ints, dtype_name
from mooncake_ray.errors import SchemaError

__all__ = ["INTEGERS", "as_dtype", "converted"]

_INTS: dict[torch.dtype, Any] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
}
INTEGERS = frozenset(_INTS) - {torch.bool}
"""The dtypes of integers that can be computed with."""


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """The tensor in another dtype, itself where it has it.

    Raises:
        SchemaError: A value would change. Says `what` it is, its row (place in the first dimension) and the value.
    """
    result, bad = converted(tensor, dtype)
    if bad is not None:
        value = tensor.detach().reshape(-1)[bad].item()
        row = bad // max(1, tensor.shape[1:].numel())
        raise SchemaError(f"{what}, row {row}: {value!r} ({dtype_name(tensor.dtype)}) is not exact as {dtype_name(dtype)}")
    return result


def converted(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int | None]:
    """The tensor in another dtype, and the flat index of the first element whose value changes by that (None: all are exact).

    Exact is what can be converted back bit for bit; and any NaN for a NaN. So 3.0 is exact as an integer, and -0.0 is not.
    """
    if tensor.dtype == dtype:
        return tensor, None
    source, target = _kind(tensor.dtype), _kind(dtype)
    if source is None or target is None or (source == "complex" and target != "complex"):
        raise SchemaError(f"there is no exact conversion of {dtype_name(tensor.dtype)} to {dtype_name(dtype)}")
    if target == "int":
        values = tensor.detach().cpu()
        return _to_ints(values.numpy() if source == "int" else values.double().numpy(), dtype, tensor.device)
    if source == "int":
        return _ints_to_floats(tensor, dtype)
    result = tensor.to(dtype)
    back = result.detach()
    if source == "float" and target == "complex":
        back = back.real
    back = back.to(tensor.dtype)
    bad = _bits(back) != _bits(tensor)
    bad &= ~(_nan(back) & _nan(tensor))
    return result, _first(bad.cpu().numpy())


def _kind(dtype: torch.dtype) -> str | None:
    if dtype in _INTS:
        return "int"
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point and dtype.itemsize * 8 == torch.finfo(dtype).bits else None


def _to_ints(values: np.ndarray, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, int | None]:
    """Integers or doubles as integers."""
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if values.dtype.kind == "f":
        # high + 1 is a power of two and so a double, high may be none. Some processors complain of signalling NaNs, which are bad anyway.
        with np.errstate(invalid="ignore"):
            bad = ~((values >= low) & (values < float(high + 1))) | (np.trunc(values) != values) | ((values == 0) & np.signbit(values))
    elif values.dtype.kind == "b":
        bad = np.zeros(values.shape, bool)
    else:
        limits = np.iinfo(values.dtype)  # a bound beyond what the source can hold is none
        bad = (values < max(low, limits.min)) | (values > min(high, limits.max))
    result = np.where(bad, np.zeros((), values.dtype), values).astype(_INTS[dtype])
    return torch.from_numpy(np.asarray(result)).to(device), _first(bad)


def _ints_to_floats(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int | None]:
    values = tensor.detach().cpu().numpy()
    doubles = values.astype(np.float64)
    back, beyond = _to_ints(doubles, tensor.dtype, torch.device("cpu"))  # beyond: rounded up past the largest integer there is
    bad = _first(back.numpy() != values)
    result, inexact = converted(torch.from_numpy(np.asarray(doubles)).to(tensor.device), dtype)
    return result, min((n for n in (beyond, bad, inexact) if n is not None), default=None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.dtype == torch.complex128 else as_ints(tensor)


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach()
    return torch.isnan(value if value.dtype in (torch.float32, torch.float64) or value.dtype.is_complex else value.double())


def _first(bad: np.ndarray) -> int | None:
    return int(np.argmax(bad)) if bad.any() else None
