"""`load`: what SGLang's schedulers call, told to join a group, or to take over new weights.

SGLang ends all of the server when a loader raises: `load` never does. What went wrong is said elsewhere: to whoever attaches over a connection
of its own, and of updates to the group.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mooncake_ray.engines.answers import Address
from mooncake_ray.engines.handover import Handover
from mooncake_ray.engines.joining import Joining
from mooncake_ray.engines.membership import Membership
from mooncake_ray.engines.sglang.rank import Rank, Ranks, Settings
from mooncake_ray.engines.sglang.server import Server
from mooncake_ray.errors import ConfigError, SyncTimeoutError, WeightSyncError
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.tracing import TracedTarget

if TYPE_CHECKING:
    import torch

__all__ = ["load"]

logger = logging.getLogger("mooncake_ray")

_LONGEST_S = 600.0


class _Scheduler:
    """This process."""

    def __init__(self) -> None:
        self.handover = Handover()
        self.membership = Membership(self._forget)
        self.adapter: Rank | None = None
        self.ranks: Ranks | None = None

    def hear(self, model: torch.nn.Module, message: Mapping[str, Any]) -> None:
        """In the scheduler's own thread."""
        if self.ranks is None:
            self.ranks = _ranks()
        match message.get("do"):
            case "attach":
                threading.Thread(target=self._attach, args=(model, message), name="mooncake_ray.attach", daemon=True).start()
            case "learn":
                self.handover.take(min(float(message["timeout_s"]), _LONGEST_S))
            case "commit":
                self._commit(min(float(message["timeout_s"]), _LONGEST_S))
            case "check":
                self._check(model, message)
            case "forget":
                if self.adapter is not None:
                    self.adapter.forget()
            case "detach":
                threading.Thread(target=self.membership.leave, name="mooncake_ray.detach", daemon=True).start()
            case other:
                raise ConfigError(f"there is no message {other!r}")

    def _commit(self, timeout_s: float) -> None:
        try:
            self.handover.take(timeout_s)
        except SyncTimeoutError:  # the others wait to hear of this rank
            if self.ranks is not None:
                self.ranks.least([0, 0, 0])
            raise

    def _check(self, model: torch.nn.Module, message: Mapping[str, Any]) -> None:
        """Whether the model would be loaded whole."""
        error: Exception | None = None
        try:
            TracedTarget(model, [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in message["metas"]])
        except Exception as e:
            error = e
        rank = self.ranks.rank if self.ranks is not None else -1
        answer = Address(**message["answer"])
        threading.Thread(target=_say, args=(answer, rank, "checked", error), name="mooncake_ray.check", daemon=True).start()

    def _attach(self, model: torch.nn.Module, message: Mapping[str, Any]) -> None:
        """Beside the scheduler's thread, which only learns where weights lie: it says when it is ready to."""
        answer = Address(**message["answer"])
        ranks = self.ranks
        try:
            if ranks is None:
                raise WeightSyncError("the scheduler has not said which rank it is")
            joining, settings = Joining.parse(message["joining"]), Settings.parse(message["settings"])
            server = Server.at(message["url"], message.get("api_key", ""))

            def adapter(metas: Sequence[ParamMeta]) -> Rank:
                learned = self.handover.leave(lambda: TracedTarget(model, metas))
                answer.say(ranks.rank, "ready")
                shard = learned.result(joining.timeout_s)
                self.adapter = Rank(shard, ranks, self.handover, server, settings, _post_load(model), model)
                return self.adapter

            self.membership.join(joining, ranks.rank, ranks.world, adapter)
            answer.say(ranks.rank, "joined")
        except Exception as e:
            logger.exception("mooncake_ray: rank %s cannot join its group", ranks and ranks.rank)
            self.handover.withdraw()
            _say(answer, ranks.rank if ranks else -1, "failed", e)

    def _forget(self) -> None:
        self.adapter = None


def _say(answer: Address, rank: int, what: str, error: Exception | None) -> None:
    try:
        answer.say(rank, what, error=error)
    except OSError as gone:
        logger.warning("mooncake_ray: nobody hears that rank %d is %s: %s", rank, what, gone)


_scheduler = _Scheduler()


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """What SGLang calls in each rank's scheduler, between two steps; see `Server.tell` for the one tensor it wants. Never raises: all that
    goes wrong is logged here, and said where it is asked for."""
    try:
        ((_, text),) = named_tensors
        message = json.loads(text.cpu().numpy().tobytes())
        _scheduler.hear(model, message)
    except Exception:
        logger.exception("mooncake_ray: a message could not be obeyed; the weights that were served are served on")


def _ranks() -> Ranks:
    import torch
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    group = parallel.tp_group.cpu_group

    def least(said: list[int]) -> list[int]:
        numbers = torch.tensor(said, dtype=torch.int64)
        torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MIN, group=group)
        return numbers.tolist()

    return Ranks(parallel.tp_rank, parallel.tp_size, least)


def _post_load(model: torch.nn.Module) -> Callable[[], None]:
    """SGLang does not do it after a loader of others."""

    def post_load() -> None:
        from sglang.srt.model_loader.loader import post_load_weights

        post_load_weights(model)

    return post_load
