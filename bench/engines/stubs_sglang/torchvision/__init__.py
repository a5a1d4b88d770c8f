"""Stands for torchvision, whose package wants CUDA to be imported at all. SGLang imports it for models that see; those here only read."""

from __future__ import annotations

import enum

__version__ = "0.0.0"


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def absent(name: str) -> type:
    """Something that may be named, and not used."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"there is no torchvision: {name}")

    return type(name, (), {"__init__": refuse})
