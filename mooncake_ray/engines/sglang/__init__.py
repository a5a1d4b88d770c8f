"""New weights for SGLang: what its schedulers call, and the handle that drivers use.

A server is started with `--custom-weight-loader mooncake_ray.engines.sglang.load`. That is called in the scheduler's process of every rank,
with a message instead of weights. Told to `attach`, the process becomes a rank of an engine in a `WeightSyncGroup`: its own threads get the
weights it wants of each version, while the scheduler generates, and the scheduler's thread only copies them, told to `commit`.
"""

from mooncake_ray.engines.sglang.engine import SGLangEngine
from mooncake_ray.engines.sglang.scheduler import load

__all__ = ["SGLangEngine", "load"]
