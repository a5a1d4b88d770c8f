"""The bits of tensors, whatever their dtype means: most dtypes have no NumPy form, and many no operators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mooncake_ray.errors import SchemaError

__all__ = ["as_ints", "dtype_name", "flat_bytes", "from_bytes", "is_plain", "named_dtype", "named_tensor", "owned"]

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_ints(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width, which every operator takes. Complex numbers of 16 bytes stay what they are."""
    plain = tensor.detach().resolve_conj().resolve_neg()  # lazy conjugates do not hold the bits they stand for
    return plain.view(_INTS[plain.itemsize]) if plain.itemsize in _INTS else plain


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes in row-major order, uint8 (bytes,). A view where the tensor is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def from_bytes(raw: np.ndarray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor on the memory of a uint8 array (bytes,), which has exactly its bytes."""
    return torch.from_numpy(raw).view(dtype).view(shape) if raw.nbytes else torch.empty(shape, dtype=dtype)


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it is a part of a larger storage: pickling a tensor pickles all of its storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is dense strided memory: not nested, sparse or quantised."""
    return not tensor.is_nested and tensor.layout is torch.strided and not tensor.is_quantized


def dtype_name(dtype: torch.dtype | np.dtype) -> str:
    """`int64` for torch.int64; for NumPy the name it prints (`<U3`, `object`)."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype | None:
    """torch's dtype of that name, or None where it has none."""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def named_tensor(raw: np.ndarray | bytearray, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of these bytes: what pickles call that hold tensors as bytes.

    Raises:
        SchemaError: This version of torch has no such dtype.
    """
    kind = named_dtype(dtype)
    if kind is None:
        raise SchemaError(f"this version of torch has no dtype {dtype}")
    return from_bytes(np.frombuffer(raw, np.uint8), kind, shape)
