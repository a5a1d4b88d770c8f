"""Checkpoint engines for verl, both ends in this process, driven as verl's manager drives them."""

from __future__ import annotations

import asyncio

import pytest
import torch
from verl_actors import model, same

from mooncake_ray.integrations.verl_checkpoint import MooncakeRayCheckpointEngine as Engine
from mooncake_ray.integrations.verl_weights import board as boards
from mooncake_ray.testing import Allowed

BUCKET = 1 << 16  # bytes
SMALL = {"chunk_megabytes": BUCKET / (1 << 20), "timeout_s": 60}


@pytest.fixture
def leaks_allowed() -> Allowed:
    return Allowed(threads=("*",), descriptors=("*",), maps=("r?-s",), processes=("ray::*",))


@pytest.fixture(autouse=True, scope="module")
def board(pool_ray):
    """One board for all tests, as one job of verl's has: to start one is most of a test's time."""
    one = boards.new_board()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(boards, "new_board", lambda: one)
        yield


class Group:
    """Trainers and rollout workers, an engine each."""

    updates = 0  # of all groups, which share the board

    def __init__(self, senders: int, receivers: int, **kwargs) -> None:
        kwargs = SMALL | kwargs
        self.senders = [Engine(2 << 20, is_master=rank == 0, **kwargs) for rank in range(senders)]
        self.receivers = [Engine(2 << 20, **kwargs) for _ in range(receivers)]
        self.got: list[dict[str, torch.Tensor]] = [{} for _ in range(receivers)]

    def connect(self) -> None:
        metadata = [engine.prepare() for engine in (*self.senders, *self.receivers)]
        metadata[0]["number"] = Group.updates
        for engines, kwargs in zip(
            (self.senders, self.receivers), Engine.build_topology(len(self.senders), len(self.receivers), metadata), strict=True
        ):
            for i, engine in enumerate(engines):
                engine.init_process_group(**{name: values[i] for name, values in kwargs.items()})
        Group.updates = self.topology.update.number

    @property
    def topology(self):
        """Of the update that is, or was last."""
        return self.senders[0]._topology

    async def receive(self, number: int, step: int | None = None) -> None:
        got: dict[str, torch.Tensor] = {}
        self.got[number] = got
        async for name, tensor in self.receivers[number].receive_weights(global_steps=step):
            got[name] = tensor.clone()
            tensor.zero_() if tensor.numel() else None  # nobody else sees that

    async def send(self, number: int, weights, step: int | None = None) -> dict[str, float]:
        return await self.senders[number].send_weights(iter(weights.items()) if isinstance(weights, dict) else weights, step)

    async def everybody(self, *weights, step: int | None = None, expected: int | None = None) -> list:
        sends = [self.send(n, w, step) for n, w in zip(range(len(self.senders)), weights, strict=True)]
        gets = [self.receive(n, step if expected is None else expected) for n in range(len(self.receivers))]
        return await asyncio.gather(*sends, *gets, return_exceptions=True)

    def update(self, *weights, step: int | None = None, expected: int | None = None) -> list:
        """One update. Returns what each rank returned or raised."""
        self.connect()
        done = asyncio.run(self.everybody(*weights, step=step, expected=expected))
        if not errors(done):
            for engine in (*self.senders, *self.receivers):
                engine.finalize()
        return done

    def passes(self, *weights, **kwargs) -> list:
        """One update, which must succeed."""
        done = self.update(*weights, **kwargs)
        assert not errors(done), errors(done)
        return done

    def succeeds(self, seed: int) -> bool:
        self.passes(*[model(seed)] * len(self.senders), step=seed)
        return all(same(got, model(seed)) for got in self.got)


def errors(done: list) -> list[BaseException]:
    return [each for each in done if isinstance(each, BaseException)]


def loses(bucket) -> None:
    """In place of a receiver's `fetch`."""
    raise OSError("no memory")
