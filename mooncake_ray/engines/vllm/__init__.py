"""vLLM as an engine of a `WeightSyncGroup`: `--weight-transfer-config '{"backend": "mooncake_ray"}'`.

`plugin` is what vLLM calls in every process; `worker` and `trainer` are what it then finds under the name; `driver` is for whoever has a server
or an actor and wants it in a group. Importing this imports no vLLM.
"""

from mooncake_ray.engines.vllm.driver import VLLMEngine

__all__ = ["VLLMEngine"]
