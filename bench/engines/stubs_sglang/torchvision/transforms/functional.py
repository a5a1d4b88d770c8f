"""See the package above."""

from torchvision import InterpolationMode, absent

__all__ = ["InterpolationMode"]
__getattr__ = absent
