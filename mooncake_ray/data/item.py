"""One row of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mooncake_ray.data.ragged import Ragged


@dataclass(eq=False)
class DataProtoItem:
    """One row of a `DataProto`.

    Attributes:
        batch: Per tensor column its row, without the row dimension. Of a ragged column a tensor of the row's own length, None for a null
            row, a `Ragged` where rows are lists of rows.
        non_tensor_batch: Per array column its element or row.
        meta_info: The batch's meta_info.
    """

    batch: dict[str, torch.Tensor | Ragged | None] = field(default_factory=dict)
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
