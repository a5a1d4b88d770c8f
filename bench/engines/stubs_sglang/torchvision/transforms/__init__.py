"""See the package above."""

from torchvision import InterpolationMode, absent
from torchvision.transforms import functional

__all__ = ["InterpolationMode", "functional"]
__getattr__ = absent
