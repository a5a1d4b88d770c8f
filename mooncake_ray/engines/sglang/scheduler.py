"""`load`: what SGLang's schedulers call, told to join a group, or to take over new weights.

SGLang ends all of the server when a loader raises: `load` never does. What went wrong is said elsewhere: to whoever attaches over a connection
of its own, and of updates to the group.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mooncake_ray.engines.answers import Address
from mooncake_ray.engines.handover import Handover
from mooncake_ray.engines.sglang.rank import Rank, Ranks, Settings
from mooncake_ray.engines.sglang.server import Server
from mooncake_ray.errors import ConfigError, SyncTimeoutError, WeightSyncError
from mooncake_ray.weights.meta import ParamMeta
from mooncake_ray.weights.tracing import TracedTarget

if TYPE_CHECKING:
    import torch

    from mooncake_ray.sync.engine import Engine

__all__ = ["load"]

logger = logging.getLogger("mooncake_ray")

_LONGEST_S = 600.0
_LOOK_S = 1.0
_GONE_S = 10.0  # Ray ends a process whose cluster is gone for 60 s, and leaving takes its time, too


class _Scheduler:
    """This process."""

    def __init__(self) -> None:
        self.handover = Handover()
        self.member: Engine | None = None
        self.adapter: Rank | None = None
        self.ranks: Ranks | None = None
        self._joining = threading.Lock()
        self._connected = False  # to Ray, by this module

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
                threading.Thread(target=self._detach, name="mooncake_ray.detach", daemon=True).start()
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
        import ray

        from mooncake_ray.engines.joining import Joining

        answer = Address(**message["answer"])
        ranks = self.ranks
        try:
            with self._joining:
                if ranks is None:
                    raise WeightSyncError("the scheduler has not said which rank it is")
                joining, settings = Joining.parse(message["joining"]), Settings.parse(message["settings"])
                server = Server(message["url"], message.get("api_key", ""))
                self._leave()

                def adapter(metas: Sequence[ParamMeta]) -> Rank:
                    learned = self.handover.leave(lambda: TracedTarget(model, metas))
                    answer.say(ranks.rank, "ready")
                    shard = learned.result(joining.timeout_s)
                    self.adapter = Rank(shard, ranks, self.handover, server, settings, _post_load(model), model)
                    return self.adapter

                self._connected = not ray.is_initialized()
                self.member = joining.join(ranks.rank, ranks.world, adapter)
                threading.Thread(target=self._watch, args=(self.member,), name="mooncake_ray.watch", daemon=True).start()
                answer.say(ranks.rank, "joined")
        except Exception as e:
            logger.exception("mooncake_ray: rank %s cannot join its group", ranks and ranks.rank)
            self.handover.withdraw()
            with self._joining:
                self._leave()
            _say(answer, ranks.rank if ranks else -1, "failed", e)

    def _detach(self) -> None:
        with self._joining:
            self._leave()

    def _watch(self, member: Engine) -> None:
        """Leaves when the group has ended, or its cluster is gone: the server serves on."""
        import ray

        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        heard = time.monotonic()
        while self.member is member:
            if _listens(host, int(port)):
                heard = time.monotonic()
            gone = time.monotonic() - heard > _GONE_S
            if member.closed or gone:
                logger.warning("mooncake_ray: %s leaves: its %s", member.member, "cluster is gone" if gone else "group has ended")
                with self._joining:
                    if self.member is member:
                        self._leave()
                return
            time.sleep(_LOOK_S)

    def _leave(self) -> None:
        """A process that stays connected to Ray would end with the cluster."""
        import ray

        member, self.member, self.adapter = self.member, None, None
        if member is not None:
            member.close()
        if self._connected:
            self._connected = False
            ray.shutdown()


def _say(answer: Address, rank: int, what: str, error: Exception | None) -> None:
    try:
        answer.say(rank, what, error=error)
    except OSError as gone:
        logger.warning("mooncake_ray: nobody hears that rank %d is %s: %s", rank, what, gone)


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), _LOOK_S):
        return True
    return False


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
