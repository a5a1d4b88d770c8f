"""Miles' and slime's weight updates: what their trainers call, on ranks with a process group, to engines that join over a server's handle."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest
import ray
import torch
from weight_actors import EngineRank, cut, model

from mooncake_ray.errors import ConfigError, SyncTimeoutError, WeightSyncError
from mooncake_ray.integrations import miles_weights
from mooncake_ray.integrations.miles_weights import PoolWeightUpdater, install

ARGS = {"pause_generation_mode": "retract", "colocate": False, "update_weight_transfer_mode": "broadcast"}


@ray.remote(num_cpus=0)
class Server:
    """What starts a server, in theirs. Where it is says here which rank of a group is its."""

    def __init__(self, number: int) -> None:
        self.server_host, self.server_port = f"engine{number}", 30000 + number


@ray.remote(num_cpus=0)
class Handles:
    """Keeps the ranks that joined, for tests to look at."""

    def __init__(self) -> None:
        self.ranks, self.asked = {}, []

    def attach(self, group, url: str, name: str, settings: dict) -> None:
        self.asked.append((url, name, settings))
        self.ranks[name] = EngineRank.remote(group, name, 0, 1)
        ray.get(self.ranks[name].ready.remote(), timeout=150)

    def end(self) -> None:
        for rank in self.ranks.values():
            ray.kill(rank)

    def have(self, version: int) -> list[bool]:
        return ray.get([rank.has.remote(version) for rank in self.ranks.values()])

    def said(self) -> list:
        return self.asked


class Handle:
    def __init__(self, url: str, handles) -> None:
        self.url, self.handles = url, handles

    def attach(self, group, name, **settings) -> None:
        if "bad" in self.url:
            raise WeightSyncError(f"{self.url} refuses")
        ray.get(self.handles.attach.remote(group, self.url, name, settings))


@ray.remote(num_cpus=0)
class TrainerRank:
    """The calls that a trainer of theirs makes, in their order."""

    def __init__(self, rank: int, world: int, port: int, handles, mode: str) -> None:
        import mooncake_ray
        from mooncake_ray.weights.source import StateDictSource

        mooncake_ray.install()
        torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        self.rank, self.world = rank, world
        self.parts, boxes = cut(model(-1), rank, world)
        args = SimpleNamespace(**{**ARGS, "pause_generation_mode": mode})
        shard = StateDictSource(self.parts, boxes)
        self.updater = PoolWeightUpdater(
            args, [], lambda: {}, model_name="m", shard=shard, engine_of=lambda url: Handle(url, handles), timeout_s=100
        )

    def update(self, seed: int, engines, has_new: bool) -> tuple[int, dict]:
        for name, tensor in cut(model(seed), self.rank, self.world)[0].items():
            self.parts[name].copy_(tensor)
        if has_new or not self.updater.is_rollout_engines_fresh():
            places = {"engine_gpu_counts": [1], "engine_gpu_offsets": [0], "all_engine_actors": engines}
            self.updater.connect_rollout_engines(engines, None, **places)
        self.updater.update_weights()
        return self.updater.weight_version, self.updater.pop_metrics()

    def end(self) -> None:
        joined = self.updater._joined
        self.updater.close()
        torch.distributed.barrier()
        if self.rank == 0 and joined is not None:
            joined[0].shutdown()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def trainers(pool_ray):
    made, handles = [], Handles.remote()

    def start(world: int = 2, mode: str = "retract"):
        port = free_port()
        made.extend(TrainerRank.remote(rank, world, port, handles, mode) for rank in range(world))
        return list(made), handles

    yield start
    ray.get([trainer.end.remote() for trainer in made], timeout=200)
    ray.get(handles.end.remote(), timeout=200)


def update(trainers, *args):
    return ray.get([trainer.update.remote(*args) for trainer in trainers], timeout=200)


def test_updates_as_the_trainers_ask_for_them(trainers):
    ranks, handles = trainers(2)
    servers = [Server.remote(0)]
    for seed in (1, 2):
        done = update(ranks, seed, servers, seed == 1)
        assert [version for version, _ in done] == [seed, seed]
        assert ray.get(handles.have.remote(seed)) == [True]
        assert done[0][1]["perf/update_weights_wire_bytes"] > 0 and done[0][1]["perf/update_weights_pause_s"] > 0 and done[1][1] == {}
    servers.append(Server.remote(1))  # another engine, later
    update(ranks, 3, servers, True)
    assert ray.get(handles.have.remote(3)) == [True, True]
    servers.append(Server.remote(2))  # and another, in a list that the first is not in any more
    update(ranks, 4, servers[1:], True)
    assert ray.get(handles.have.remote(4)) == [True] * 3, "none has taken another's place"
    said = ray.get(handles.said.remote())
    names = [f"engine-{server._actor_id.hex()[:12]}" for server in servers]
    assert [(url, name) for url, name, _ in said] == [(f"http://engine{n}:{30000 + n}", names[n]) for n in range(3)]
    assert said[0][2] == {"pause": "keep", "keep": "retract", "flush": True, "timeout_s": 100}


def test_joining_is_tried_again(monkeypatch):
    class Late:
        """A group whose trainers are together at the second try."""

        tries = 0

        def __init__(self, name: str) -> None:
            self.name = name

        def trainer(self, shard, rank, world, *, timeout_s):
            Late.tries += 1
            if Late.tries == 1:
                raise SyncTimeoutError("the other trainers have not come")
            return SimpleNamespace(close=lambda: None)

        def status(self):
            return SimpleNamespace(published=3, version=2, engines={})

    monkeypatch.setattr(miles_weights, "WeightSyncGroup", Late)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01000000"))
    updater = PoolWeightUpdater(SimpleNamespace(), [], None, shard=object())
    with pytest.raises(SyncTimeoutError):
        updater.connect_rollout_engines([])
    assert not updater.is_rollout_engines_fresh()
    updater.connect_rollout_engines([])
    assert Late.tries == 2 and updater.is_rollout_engines_fresh() and updater.weight_version == 3
    updater.mark_engine_connection_stale()
    assert not updater.is_rollout_engines_fresh()


@pytest.mark.slow
def test_an_engine_that_cannot_join_is_every_ranks_error(trainers):
    ranks, handles = trainers(2)

    @ray.remote(num_cpus=0)
    class Bad:
        def __init__(self) -> None:
            self.server_host, self.server_port = "bad", 1

    bad = Bad.remote()
    for trainer in [trainer.update.remote(1, [bad], True) for trainer in ranks]:
        with pytest.raises(WeightSyncError, match="refuses"):
            ray.get(trainer, timeout=100)
    (first, _), (second, _) = update(ranks, 2, [Server.remote(0)], True)
    assert first == second >= 1
    assert ray.get(handles.have.remote(2)) == [True]


@pytest.fixture
def framework(request):
    """A module with the name, and what is looked for in it, that a trainer's process has."""
    name = f"{request.param}.backends.megatron_utils.actor"
    module = sys.modules[name] = types.ModuleType(name)
    module.UpdateWeightFromDistributed = object
    yield module
    del sys.modules[name]


@pytest.mark.parametrize("framework", ["miles", "slime"], indirect=True)
def test_the_hook(framework):
    install(SimpleNamespace(**ARGS))
    install(SimpleNamespace(**ARGS))
    assert framework.UpdateWeightFromDistributed is PoolWeightUpdater


@pytest.mark.parametrize("framework", ["miles"], indirect=True)
@pytest.mark.parametrize(
    "wrong", [{"colocate": True}, {"update_weight_transfer_mode": "p2p"}, {"update_weight_transfer_mode": "disk-delta"}]
)
def test_what_the_hook_refuses(framework, wrong):
    with pytest.raises(ConfigError):
        install(SimpleNamespace(**ARGS | wrong))
    assert framework.UpdateWeightFromDistributed is object


def test_there_is_no_trainer():
    with pytest.raises(ConfigError, match="miles or slime"):
        install(SimpleNamespace(**ARGS))


@pytest.mark.parametrize(
    ("wrong", "why"), [({"is_lora": True}, "LoRA"), ({"quantization_config": {"quant_method": "fp8"}}, "fp8"), ({"mode": "now"}, "now")]
)
def test_what_it_is_not_for(wrong, why):
    args = SimpleNamespace(pause_generation_mode=wrong.pop("mode", "abort"))
    with pytest.raises(ConfigError, match=why):
        PoolWeightUpdater(args, [], None, shard=object(), **wrong)


def test_before_it_is_connected():
    updater = PoolWeightUpdater(SimpleNamespace(), [], None, shard=object())
    assert not updater.is_rollout_engines_fresh() and updater.pop_metrics() == {}
    with pytest.raises(ConfigError, match="connect"):
        updater.update_weights()
    assert miles_weights._place() == (0, 1)
