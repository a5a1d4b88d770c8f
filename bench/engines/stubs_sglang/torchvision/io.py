"""See the package."""

from torchvision import absent

__getattr__ = absent
