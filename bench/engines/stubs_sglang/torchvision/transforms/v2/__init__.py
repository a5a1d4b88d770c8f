"""See the package above."""

from torchvision import InterpolationMode, absent
from torchvision.transforms.v2 import functional

__all__ = ["InterpolationMode", "functional"]
__getattr__ = absent
