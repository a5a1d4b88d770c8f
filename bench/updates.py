"""Weights as an optimizer moves them: bfloat16 casts of float32 masters, before and after one step of Adam."""

from __future__ import annotations

import numpy as np

__all__ = ["Updates"]

_CHUNK = 1 << 22
_WIDTH = 0.02  # standard deviation of the weights
# In a steady state, Adam's mean of gradients over the root of their mean square is about this wide where gradients are noise: sqrt(0.1 / 1.9)
# at a beta of 0.9. It leans to one side where they are not.
_NOISE, _LEAN = 0.229, 0.05


class Updates:
    """Elements of one weight, uint16 bits of bfloat16; reproducible."""

    def __init__(self, elements: int, seed: int = 1) -> None:
        self.elements, self.seed = elements, seed
        self.old = np.empty(elements, np.uint16)
        for start in range(0, elements, _CHUNK):
            self.old[start : start + _CHUNK] = _bfloat16(self._masters(start)[0])

    def new(self, fraction: float) -> np.ndarray:
        """What they are after a step by which about that fraction of them changes."""
        rate = self._rate(fraction)
        out = np.empty_like(self.old)
        for start in range(0, self.elements, _CHUNK):
            master, step = self._masters(start)
            out[start : start + _CHUNK] = _bfloat16(master - np.float32(rate) * step)
        return out

    def _masters(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Of some elements: float32 masters, and what Adam subtracts from them at a learning rate of 1."""
        n = min(_CHUNK, self.elements - start)
        rng = np.random.default_rng([self.seed, start])
        master = rng.standard_normal(n, np.float32) * np.float32(_WIDTH)
        lean = rng.standard_normal(n, np.float32) * np.float32(_LEAN)
        return master, lean + rng.standard_normal(n, np.float32) * np.float32(_NOISE)

    def _rate(self, fraction: float) -> float:
        """The learning rate by which that fraction changes."""
        master, step = self._masters(0)
        was, low, high = _bfloat16(master), 1e-9, 1e-1
        for _ in range(30):
            middle = (low * high) ** 0.5
            changed = np.mean(_bfloat16(master - np.float32(middle) * step) != was)
            low, high = (middle, high) if changed < fraction else (low, middle)
        return high


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest, ties to even: uint16."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
