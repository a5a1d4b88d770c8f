"""`Ranks`: where one process is in Megatron's two grids, the dense one and the experts'."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_ray.errors import PlanError

__all__ = ["Ranks"]


@dataclass(frozen=True)
class Ranks:
    """Sizes and this process's place. Data- and context-parallel places are not in it: there it holds what its peers hold."""

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    etp: int = 1
    """Tensor parallelism of experts; as `tp` unless it is set apart."""
    etp_rank: int = 0

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "ep", "etp"):
            size, rank = getattr(self, axis), getattr(self, f"{axis}_rank")
            if not 0 <= rank < size:
                raise PlanError(f"{axis} rank {rank} is not one of {size}")

    @classmethod
    def of(cls, rank: int, world: int, *, tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None, cp: int = 1) -> Ranks:
        """The place of a global rank, in Megatron's default order (`tp-cp-ep-dp-pp`: tensor parallelism fastest, pipeline slowest).

        Raises:
            PlanError: the sizes do not divide the world.
        """
        etp = tp if etp is None else etp
        for what, size in (("tp x cp x pp", tp * cp * pp), ("etp x ep x pp", etp * ep * pp)):
            if world % size:
                raise PlanError(f"{world} ranks cannot be divided by {what} = {size}")
        if not 0 <= rank < world:
            raise PlanError(f"rank {rank} is not one of {world}")
        stage = world // pp
        within = rank % stage
        return cls(tp, within % tp, pp, rank // stage, ep, within // etp % ep, etp, within % etp)

    @classmethod
    def current(cls) -> Ranks:
        """This process's, as megatron-core has them.

        Raises:
            PlanError: model parallelism is not initialised.
            ImportError: there is no megatron-core.
        """
        from megatron.core import parallel_state as state

        if not state.model_parallel_is_initialized():
            raise PlanError("megatron's model parallelism is not initialised; give `ranks`")
        return cls(
            state.get_tensor_model_parallel_world_size(),
            state.get_tensor_model_parallel_rank(),
            state.get_pipeline_model_parallel_world_size(),
            state.get_pipeline_model_parallel_rank(),
            state.get_expert_model_parallel_world_size(),
            state.get_expert_model_parallel_rank(),
            state.get_expert_tensor_parallel_world_size(),
            state.get_expert_tensor_parallel_rank(),
        )
