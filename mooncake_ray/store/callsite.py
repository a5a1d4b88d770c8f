"""Where in the user's code an object was put."""

from __future__ import annotations

import os
import sys

__all__ = ["call_site"]

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DEEPEST = 40  # frames


def call_site() -> str:
    """`file.py:12 in function`: the innermost frame that is neither this package's nor Ray's; "" where there is none. Costs microseconds."""
    frame = sys._getframe(1)
    rays = os.path.dirname(sys.modules["ray"].__file__ or "") + os.sep if "ray" in sys.modules else _OURS
    for _ in range(_DEEPEST):
        code = frame.f_code
        if not code.co_filename.startswith((_OURS, rays)):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
