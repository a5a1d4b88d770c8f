"""The oracle cases: ordinary Ray programs, each returning what its user would see.

A case uses Ray's public API only and knows nothing of the pool. Payloads are 256 KiB to 1 MiB, large
enough to be routed, unless the name says small. Nothing here waits for time to pass: cases that need
an order of events let the shared Board open a gate.
"""

import importlib

from oracle_cases.registry import CASES
from oracle_cases.remotes import warm_up

__all__ = ["CASES", "warm_up"]

THEMES = [
    *("containers", "torch_values", "numpy_values", "snapshots", "lifetimes", "waiting", "tasks", "actors", "streams", "errors", "pickles"),
    *("restarts", "cancellation", "concurrency", "detached", "captured", "forms"),
]

for theme in THEMES:
    importlib.import_module(f"oracle_cases.{theme}")
