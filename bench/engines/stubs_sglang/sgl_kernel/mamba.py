"""See the package."""

import sgl_kernel

__getattr__ = sgl_kernel.__getattr__
