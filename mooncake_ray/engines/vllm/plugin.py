"""Makes the backend `mooncake_ray` known to vLLM, which calls `register` in each of its processes (entry points `vllm.general_plugins`)."""

from __future__ import annotations

__all__ = ["BACKEND", "register"]

BACKEND = "mooncake_ray"
_HERE = "mooncake_ray.engines.vllm"


def register() -> None:
    """Idempotent. Imports neither engine before vLLM asks for it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for factory, module, name in (
        (WeightTransferEngineFactory, "worker", "MooncakeWeightTransferEngine"),
        (WeightTransferTrainerFactory, "trainer", "MooncakeTrainerWeightTransferEngine"),
    ):
        try:
            factory.register_engine(BACKEND, f"{_HERE}.{module}", name)
        except ValueError:  # it is registered already: by this function, in this process
            continue
