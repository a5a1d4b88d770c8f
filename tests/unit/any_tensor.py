"""Tensors of any bits."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis.extra import numpy as hnp


def random_tensor(draw, shape, dtype):
    tensor = torch.zeros(shape, dtype=dtype)
    if tensor.numel():
        raw = draw(hnp.arrays(np.uint8, tensor.nbytes))
        tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(raw & 1 if dtype == torch.bool else raw))
    return tensor
