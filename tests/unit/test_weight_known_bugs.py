"""What went wrong with weights in other systems, and must not here. Coordinator and members are the real ones, without Ray."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time

import numpy as np
import pytest
import torch
from local_group import Group

from mooncake_ray.engines.torch_module import TorchModuleEngine
from mooncake_ray.errors import ObjectLostError, PlanError, SyncAbortedError, SyncTimeoutError
from mooncake_ray.sync.collective import Host, Ring, broadcast, receive
from mooncake_ray.testing import Allowed
from mooncake_ray.transfer.deadline import Deadline
from mooncake_ray.weights.described import Parallel, described
from mooncake_ray.weights.models import config_of
from mooncake_ray.weights.plan import publish_plan
from mooncake_ray.weights.source import ModuleSource, StateDictSource

MODES = ("p2p", "nccl", "delta")
SHAPE = (8, 4)
NAMES = ("model.embed_tokens.weight", "model.layers.0.up.weight", "model.layers.1.up.weight", "lm_head.weight")
SHORT_S = 0.5


def whole(version: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(version)
    return {name: torch.randn(SHAPE, generator=draw).to(torch.bfloat16) for name in NAMES}


def rows(tensors: dict[str, torch.Tensor], rank: int, world: int) -> tuple[dict[str, torch.Tensor], StateDictSource]:
    n = SHAPE[0] // world
    parts = {name: t[rank * n : (rank + 1) * n].clone() for name, t in tensors.items()}
    return parts, StateDictSource(parts, {name: (SHAPE, (rank * n, 0)) for name in parts})


def eventually(condition, what: str) -> None:
    end = time.monotonic() + 200.0
    while not condition():
        assert time.monotonic() < end, f"never came true: {what}"
        time.sleep(0.002)


class Job:
    """Trainers that cut rows among them, and engines that do."""

    def __init__(self, group: Group, *, trainers: int = 2, engines: int = 2, tp: int = 2) -> None:
        self.group = group
        self.trained = [rows(whole(0), rank, trainers) for rank in range(trainers)]
        self.served = [[rows(whole(99), rank, tp) for rank in range(tp)] for _ in range(engines)]
        self.trainers = [group.trainer(source, rank, trainers) for rank, (_, source) in enumerate(self.trained)]
        self.engines = [
            [group.engine(target, f"e{n}", rank, tp) for rank, (_, target) in enumerate(ranks)] for n, ranks in enumerate(self.served)
        ]

    def train(self, version: int) -> None:
        for rank, (parts, _) in enumerate(self.trained):
            for name, part in rows(whole(version), rank, len(self.trained))[0].items():
                parts[name].copy_(part)

    def has(self, version: int, *engines: int) -> bool:
        want = whole(version)
        return all(
            torch.equal(torch.cat([parts[name] for parts, _ in self.served[n]]), want[name])
            for n in engines or range(len(self.served))
            for name in NAMES
        )


@pytest.fixture
def group():
    with Group() as made:
        yield made


@pytest.fixture
def leaks_allowed() -> Allowed:
    return Allowed(threads=("pt_*", "Thread-*", "mooncake_ray.gloo"), descriptors=("socket:*", "pipe:*", "anon_inode:*"))  # torch's stores


def once(member, step: str, before) -> None:
    """Has something happen when a member is told to do a step."""
    do = getattr(member, f"do_{step}")

    def first(command):
        setattr(member, f"do_{step}", do)
        before()
        return do(command)

    setattr(member, f"do_{step}", first)


@pytest.mark.parametrize("mode", MODES)
def test_megatron_656_an_untied_lm_head_moves_by_itself(group, mode):
    """Megatron-LM#656: an output layer that only looks like the embedding, and whose buffer an overlapped gather has replaced."""
    embed = torch.ones(6, 4)
    trained = {"model.embed_tokens.weight": embed, "lm_head.weight": embed.clone()}
    served = {name: torch.zeros(6, 4) for name in trained}
    group.trainer(StateDictSource(trained), 0, 1)
    group.engine(StateDictSource(served), "e0")
    group.sync(mode=mode)
    assert all(torch.equal(t, embed) for t in served.values())
    trained["lm_head.weight"] = torch.full((6, 4), 2.0)
    group.sync(mode=mode)
    assert torch.equal(served["model.embed_tokens.weight"], embed)
    assert torch.equal(served["lm_head.weight"], torch.full((6, 4), 2.0))


def test_skyrl_1330_parameters_that_are_offloaded_are_told(group):
    """SkyRL#1330: sizes came from parameters whose storage was away, and were wrong. Here they come from shapes, and what is away is told."""
    job = Job(group)
    group.sync()
    away = job.trained[0][0][NAMES[1]]
    kept = away.untyped_storage().tolist()
    away.untyped_storage().resize_(0)
    with pytest.raises(PlanError, match=r"model.layers.0.up.weight: ends at byte 32 of buffer .*, which has 0"):
        group.sync()
    assert job.has(0) and group.versions() == {"e0": 0, "e1": 0}
    away.untyped_storage().resize_(len(kept))
    away.untyped_storage().copy_(torch.tensor(kept, dtype=torch.uint8).untyped_storage())
    job.train(1)
    assert group.sync().version == 1 and job.has(1)


@pytest.mark.parametrize("engines", [1, 4])
def test_sglang_8076_10597_staging_is_bounded(group, engines):
    """sglang#8076, #10597: out of memory during an update. The pool has at most two published versions and one copy of what engines want,
    however many of them want it."""
    size = 1 << 20
    group.trainer(StateDictSource({"a": torch.zeros(size, dtype=torch.uint8)}), 0, 1)
    for n in range(engines):
        group.engine(StateDictSource({"a": torch.ones(size, dtype=torch.uint8)}), f"e{n}")
    for _ in range(4):
        group.sync(mode="p2p")
    assert group.memory.most < 3.1 * size
    eventually(lambda: group.memory.nbytes < 1.1 * size, "one version is kept")


def test_verl_6967_7045_the_first_meeting_has_a_deadline():
    """verl#6967, #7045: making the first group waits for ever for somebody who does not come."""
    host = Host("127.0.0.1", "first", 30.0)
    begin = time.monotonic()
    with pytest.raises(SyncTimeoutError, match="2 ranks of a broadcast"):
        Ring(host.meeting, 0, 1, 2, "127.0.0.1", torch.device("cpu"), Deadline(SHORT_S), lambda: None)
    assert time.monotonic() - begin >= SHORT_S


def test_trl_6797_6913_slime_2331_groups_in_any_order_do_not_deadlock():
    """trl#6797, #6913: a world of more than two deadlocks. slime#2331: so do groups of stages that are made in different orders. Real Gloo."""
    host, owners, receivers = Host("127.0.0.1", "t", 60.0), 3, 3
    objects = [(owner, 64 + owner) for _ in range(3) for owner in range(owners)]
    may_begin = [threading.Event() for _ in range(owners)]

    def ring(owner: int, rank: int) -> Ring:
        return Ring(host.meeting, owner, rank, 1 + receivers, "127.0.0.1", torch.device("cpu"), Deadline(60.0), lambda: None)

    def send(owner: int) -> None:
        may_begin[owner].wait(60.0)
        mine = [np.full(n, 10 * i + o, np.uint8) for i, (o, n) in enumerate(objects) if o == owner]
        here = ring(owner, 0)
        if owner:
            may_begin[owner - 1].set()  # the last owner first, and receivers wait for the first one meanwhile
        broadcast(here, mine, torch.device("cpu"), Deadline(60.0), lambda: None)
        here.close()

    def get(rank: int) -> list[int]:
        with concurrent.futures.ThreadPoolExecutor(owners) as meeting:
            rings = list(meeting.map(lambda owner: ring(owner, 1 + rank), range(owners)))
        got = [int(data[-1]) for data in receive(rings, objects, torch.device("cpu"), Deadline(60.0), lambda: None)]
        for each in rings:
            each.close()
        return got

    may_begin[-1].set()
    with concurrent.futures.ThreadPoolExecutor(owners + receivers) as threads:
        sent = [threads.submit(send, owner) for owner in range(owners)]
        got = [threads.submit(get, rank) for rank in range(receivers)]
        want = [10 * i + o for i, (o, _) in enumerate(objects)]
        assert [g.result(60.0) for g in got] == [want] * receivers
        assert [s.result(60.0) for s in sent] == [None] * owners


@pytest.mark.parametrize("mode", MODES)
def test_tokenspeed_1373_no_success_with_memory_that_nobody_wrote(group, mode):
    """tokenspeed#1373: success was reported, and memory was what it had been. A tensor, or rows of one, that no trainer has is an error."""
    group.trainer(StateDictSource({"a": torch.zeros(4, 2)}, {"a": ((8, 2), (0, 0))}), 0, 1)
    for name, tensors, message in (("rows", {"a": torch.empty(8, 2)}, "a"), ("name", {"a": torch.empty(8, 2), "b": torch.empty(3)}, "b")):
        member = group.engine(StateDictSource(tensors), name)
        with pytest.raises(PlanError, match=rf"\b{message}\b"):
            group.sync(mode=mode)
        assert group.versions()[name] == -1 and group.engines[name][0].weight_version is None
        group.drop(member)
    member = group.engine(StateDictSource({"a": torch.full((4, 2), float("nan"))}, {"a": ((8, 2), (0, 0))}), "some")
    group.sync(mode=mode)
    assert not group.engines["some"][0].shard().mapping["a"].any(), "every element was written"


@pytest.mark.parametrize("mode", MODES)
def test_verl_7495_trl_7017_skyrl_2064_a_skipped_version_is_not_reported(group, mode):
    """verl#7495, trl#7017, SkyRL#2064: a version that was not delivered counted as delivered."""
    job = Job(group)
    group.sync(mode=mode)
    seen: set[int] = set()
    for engine in itertools.chain(*job.engines):
        finish = engine._adapter.finish_weight_update
        engine._adapter.finish_weight_update = lambda version, finish=finish: (seen.add(version), finish(version))
    job.train(1)
    assert group.publish() == 1
    with pytest.raises(SyncTimeoutError, match="version 1: engines behind"):
        group.wait_for(1, timeout_s=0.01)
    job.train(2)
    assert group.publish() == 2
    report = group.sync(mode=mode)
    assert report.version == 2 and group.versions() == {"e0": 2, "e1": 2} and job.has(2)
    assert seen == {2}, "nobody ever said that it was at version 1"

    def fail() -> None:
        raise RuntimeError("no")

    job.train(3)
    once(job.engines[1][0], "stage", fail)
    with pytest.raises(SyncAbortedError):
        group.sync(mode=mode)
    assert group.versions() == {"e0": 2, "e1": 2} and job.has(2) and seen == {2}


class Lookup(torch.nn.Module):
    """The next token is what the table says."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(8, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]


def test_nemo_rl_4018_miles_2783_sglang_27886_a_cache_by_version_is_never_stale(group):
    """NeMo-RL#4018, miles#2783, sglang#27886: prefixes that older weights had computed were used on. Every token says which version made
    it, and a version is never that of two different weights."""
    trained = Lookup()
    served = TorchModuleEngine(Lookup())
    group.trainer(ModuleSource(trained), 0, 1)
    group.engine(served, "e0")
    cache: dict[tuple[int | None, int], int] = {}

    def cached(token: int) -> int:
        with served.serving() as version:
            if (version, token) not in cache:
                cache[version, token] = int(served.module.table[token].argmax())
            return cache[version, token]

    for version in range(3):
        with torch.no_grad():
            trained.table.copy_(torch.roll(torch.eye(8), version + 1, dims=1))  # from t to t + version + 1
        group.sync()
        assert [cached(token) for token in range(8)] == [(token + version + 1) % 8 for token in range(8)]
        made = served.generate([0], 3)
        assert made.tokens == tuple((n + 1) * (version + 1) % 8 for n in range(3))
        assert [(s.version, s.start, s.end) for s in made.weight_versions] == [(version, 0, 3)]

    step, steps = Lookup.forward, []

    def during(self, tokens):
        out = step(self, tokens)
        steps.append(len(steps))
        if len(steps) == 2:  # between the second and the third token comes a version
            asked.set()
        return out

    asked = threading.Event()
    served.module.forward = during.__get__(served.module)
    with torch.no_grad():
        trained.table.copy_(torch.roll(torch.eye(8), 5, dims=1))
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        answer = threads.submit(served.generate, [0], 2000)
        assert asked.wait(30.0)
        group.sync()
        made = answer.result(60.0)
    at = 0
    for span in made.weight_versions:
        by = 5 if span.version == 3 else 3
        for n in range(span.start, span.end):
            at = (at + by) % 8
            assert made.tokens[n] == at, f"token {n} is that of version {span.version}"
    assert [s.version for s in made.weight_versions] in ([2, 3], [2])


@pytest.mark.parametrize("mode", MODES)
def test_verl_omni_433_a_dead_engine_is_no_success(group, mode):
    """verl-omni#433: an engine that had died was counted as having it, and the next update waited for it for ever."""
    job = Job(group)
    group.sync(mode=mode)
    job.train(1)
    victim = job.engines[1][1]

    def die() -> None:
        group.drop(victim)
        raise RuntimeError("dead")

    once(victim, "stage", die)
    report = group.sync(mode=mode)
    assert report.engines == ["e0"] and list(report.lost) == ["e1"]
    assert group.versions().get("e1", -1) == -1 and job.has(1, 0)
    job.train(2)
    report = group.sync(mode=mode)
    assert report.engines == ["e0"] and job.has(2, 0)


@pytest.mark.parametrize("mode", MODES)
def test_checkpoint_engine_38_43_a_rank_that_fails_does_not_hang_others(group, mode):
    """checkpoint-engine#38, #43: one worker's error, and its peers wait. They give up, and are ready for the next update."""
    job = Job(group, engines=3)
    group.sync(mode=mode)

    def fail() -> None:
        raise ObjectLostError("gone")

    job.train(1)
    once(job.engines[0][0], "stage", fail)  # leads units that the others wait for
    begin = time.monotonic()
    with pytest.raises(SyncAbortedError, match=r"e0/0: .*gone"):
        group.sync(mode=mode, timeout_s=150.0)
    assert time.monotonic() - begin < 140.0, "not at the deadline"
    assert job.has(0)
    group.sync(mode=mode)
    assert job.has(1)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_dead_trainer_had_published_is_not_waited_for(group, mode):
    """It is gone with it. The next version has a number of its own."""
    job = Job(group)
    group.sync(mode=mode)
    job.train(1)
    assert group.publish() == 1
    group.drop(job.trainers[1])
    group.trainer(job.trained[1][1], 1, 2)
    job.train(2)
    report = group.sync(mode=mode)
    assert report.version == 2 and report.mode == mode and job.has(2) and group.versions() == {"e0": 2, "e1": 2}


def test_checkpoint_engine_104_nobody_there(group):
    """checkpoint-engine#104: an empty topology, and an endless loop."""
    with pytest.raises(SyncTimeoutError, match=r"0 of . trainer ranks have joined"):
        group.sync(timeout_s=0.05)
    group.trainer(StateDictSource({"a": torch.zeros(2)}), 0, 1)
    report = group.sync()
    assert report.engines == [] and report.version == 0 and group.versions() == {}


@pytest.mark.parametrize("step", ["stage", "commit", "publish"])
def test_unirl_337_whoever_does_not_answer_is_waited_for_so_long(group, step):
    """UniRL#337: a wait without a timeout."""
    job = Job(group)
    group.sync()
    job.train(1)
    end = threading.Event()
    once((job.trainers if step == "publish" else job.engines[1])[0], step, lambda: end.wait(30.0))
    try:
        if step == "commit":  # the others have applied it by then
            report = group.sync(timeout_s=SHORT_S)
            assert report.engines == ["e0"] and list(report.lost) == ["e1"] and job.has(1, 0)
        else:
            with pytest.raises(SyncTimeoutError, match=f"{step} at (e1|trainer)/0: not done within"):
                group.sync(timeout_s=SHORT_S)
            assert job.has(0) and set(group.versions().values()) == {0}
    finally:
        end.set()
    assert group.sync(mode="p2p").version >= 1 or group.wait_for(1) == 1
    assert group.wait_for(1) >= 1 and job.has(1)


def test_miles_2553_2554_registrations_are_few_and_small():
    """miles#2553, #2554: devices refuse so many, or so large, pieces of memory. Objects are as large as buckets, however many tensors there are,
    and however large one is."""
    source = described(config_of("qwen3-30b-a3b"), Parallel(tp=2, dp=4, ep=4), engine=False)
    for bucket in (64 << 20, 256 << 20):
        publication = publish_plan(source, bucket_bytes=bucket)
        assert len(publication) > 18_000
        total = int(publication.nbytes.sum())
        assert len(publication.objects) <= 2 * total / bucket + len(publication.ranks)
        assert publication.object_nbytes.max() <= bucket + publication.nbytes.max()


def test_verl_7029_nothing_grows_and_nothing_moves(group):
    """verl#7029: decoding was slower after each update. Parameters stay where and as they are, and nothing piles up."""
    job = Job(group)
    engine = group.engines["e0"][0]

    def places() -> dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]]:
        return {name: (t.data_ptr(), t.stride(), t.shape) for name, t in engine.shard().buffers().items()}

    def sizes() -> tuple[int, int, int, int]:
        member = job.engines[0][0]
        return len(group.memory.there), threading.active_count(), len(member._leaders), len(member._plans)

    at, found = places(), []
    for version, mode in enumerate(["p2p", "nccl", "delta"] * 10):
        job.train(version)
        group.sync(mode=mode)
        assert job.has(version) and places() == at
        found.append(sizes())
    assert all(later <= first + 2 for later, first in zip(found[-1], np.max(found[:6], axis=0), strict=True)), found
