"""The pure parts of `bench`: payloads, plans, ratios, tables, lines of JSON. Times nothing."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import (
    BENCHES,
    actor_pipeline,
    batch_server,
    delta,
    driver_server,
    fanout,
    partial_server,
    payloads,
    processes,
    pull,
    pull_server,
    put_get,
    report,
    spill,
)
from bench.__main__ import main
from bench.report import Result, Target, compare, duration, json_lines, quantity, summarize, tables, target_table
from bench.server import SUBJECTS
from bench.serving import ENVIRONMENTS

ROOT = Path(__file__).resolve().parents[2]


def result(case, subject, value, best=None, **extra):
    return Result("put_get", case, subject, value, value if best is None else best, 3, extra)


# ---------------------------------------------------------------- payloads


@pytest.mark.parametrize("size", ["64KiB", "1MiB", "16MiB"])
def test_sizes_are_exact(size):
    payload = payloads.tensors(payloads.SIZES[size])
    assert payloads.nbytes(payload) == payloads.SIZES[size]
    assert [t.dtype for t in payload.values()] == [torch.int64] * 2 + [torch.float32] * 2


def test_size_names():
    assert payloads.SIZES == {"64KiB": 65536, "1MiB": 1048576, "16MiB": 16777216, "256MiB": 268435456, "1GiB": 1073741824}


def test_payloads_are_seeded():
    assert payloads.same(payloads.build("64KiB"), payloads.build("64KiB"))
    assert payloads.same(payloads.build("small"), payloads.build("small"))


def test_small_is_small():
    assert payloads.nbytes(payloads.small()) < 1024


def test_same_sees_one_element():
    a, b = payloads.tensors(4096), payloads.tensors(4096)
    b["response_mask"][-1] += 1
    assert not payloads.same(a, b)


def test_same_sees_type_and_dtype():
    a = payloads.tensors(4096)
    assert not payloads.same(a, payloads.as_numpy(a))
    assert not payloads.same(np.zeros(2), np.zeros(2, np.float32))


def test_as_numpy_shares_memory():
    a = payloads.tensors(4096)
    assert all(np.shares_memory(x, y) for x, y in zip(payloads.arrays_of(a), payloads.arrays_of(payloads.as_numpy(a)), strict=True))


def test_probe_is_that_of_the_arrays():
    a = payloads.tensors(4096)
    assert payloads.probe(a) == payloads.probe(payloads.as_numpy(a)) != 0


def test_verl_batch():
    batch = payloads.verl_batch(prompts=2, samples=8, prompt_width=32, response_width=96)
    assert len(batch) == 16
    assert len(batch.batch.keys()) == 14
    assert payloads.nbytes(batch) == 16 * (32 * 32 + 72 * 96)
    assert payloads.same(batch, payloads.verl_batch(prompts=2, samples=8, prompt_width=32, response_width=96))
    prompt, mask = batch.batch["prompts"], batch.batch["attention_mask"][:, :32]
    assert torch.equal(batch.batch["input_ids"][:, :32], prompt)
    assert torch.equal(prompt != 151_643, mask.bool())  # padded on the left
    assert (mask[:, -1] == 1).all()


@pytest.mark.parametrize("convert", [lambda batch: batch, payloads.as_numpy])
def test_chunks_are_all_rows_in_order(convert):
    batch = payloads.verl_batch(prompts=2, samples=8, prompt_width=32, response_width=96)
    pieces = payloads.chunks_of(convert(batch), 16)
    assert len(pieces) == 16
    assert sum(map(payloads.nbytes, pieces)) == payloads.nbytes(batch)
    assert np.array_equal(payloads.arrays_of(pieces[3])[0], payloads.arrays_of(batch)[0][3:4])


@pytest.mark.parametrize("size", [4096, 1 << 20, 32 << 20])
def test_rollouts_are_told_apart_by_their_rewards(size):
    a, b = payloads.rollout(size, 0), payloads.rollout(size, 3)
    rewards = a.pop("rewards")
    assert payloads.nbytes(a) == size
    assert payloads.total(b) == payloads.total(a) + 3 * len(rewards) == payloads.total(payloads.as_numpy(b))
    assert payloads.same(b.pop("rewards"), payloads.rewards(size, 3))
    assert payloads.same(a, b)


def test_total_sees_every_element():
    a = payloads.tensors(4096)
    before = payloads.total(a)
    a["tokens"][17] += 1
    assert payloads.total(a) == before + 1


# ---------------------------------------------------------------- plan


def test_plan_by_default():
    steps = put_get.plan()
    cases = [case for step in steps for case in step.cases.values()]
    assert len(cases) == len(set(cases))
    assert set(cases) == {
        *(f"{t}/{s}" for t in ("put", "get", "putget", "actor") for s in payloads.SIZES),
        *("put/small", "get/small", "putget/verl", "chunk16/verl", "pass/256MiB"),
    }
    assert all(step.rounds >= 3 for step in steps)


def test_plan_quick():
    steps = put_get.plan(quick=True)
    assert {step.payload for step in steps} == {"small", "64KiB", "1MiB", "16MiB"}
    assert {step.rounds for step in steps if step.payload != "small"} == {5}


def test_plan_of_sizes_and_runs():
    steps = put_get.plan(["1MiB"], runs=2)
    assert {step.payload for step in steps} == {"small", "1MiB"}
    assert {step.rounds for step in steps} == {2}


def test_plan_refuses_unknown_sizes():
    with pytest.raises(ValueError, match="no payload '3MiB'; there are 64KiB"):
        put_get.plan(["3MiB"])


def test_every_subject_has_a_process():
    held = [name for names in SUBJECTS.values() for name in names]
    assert len(held) == len(set(held))
    assert all(set(step.subjects) <= set(held) for step in put_get.plan())
    kinds = {
        kind
        for held in (SUBJECTS, batch_server.SUBJECTS, partial_server.SUBJECTS, driver_server.SUBJECTS, pull_server.SUBJECTS)
        for kind in held
    }
    assert kinds == ENVIRONMENTS.keys()


def test_the_working_set_is_four_times_the_store():
    for step in (*spill.plan(), *spill.plan(quick=True)):
        assert step.objects * step.size == 4 * step.capacity


@pytest.mark.parametrize("bench", [actor_pipeline, spill])
def test_plans_of_one_step(bench):
    assert [step.rounds for step in bench.plan(runs=2)] == [2]
    assert bench.plan(quick=True)[0].size < bench.plan()[0].size
    with pytest.raises(ValueError, match="no sizes"):
        bench.plan(["1MiB"])


def test_plan_of_pulls():
    steps = pull.plan()
    assert [step.case for step in steps] == [
        "latency/64KiB",
        *(f"unshaped/{size}" for size in ("1MiB", "64MiB", "1GiB", "verl")),
        *(f"shaped/{size}" for size in ("1MiB", "64MiB", "1GiB")),
    ]
    assert all((step.link.bits_per_s == 10e9) is step.case.startswith("shaped") for step in steps)
    assert [(step.case, step.rounds) for step in pull.plan(["verl"], runs=2)] == [("unshaped/verl", 2)]
    with pytest.raises(ValueError, match="no payload '2MiB'"):
        pull.plan(["2MiB"])


def test_plan_of_fanout():
    (step,) = fanout.plan(runs=2)
    assert (step.readers, step.nodes, step.payload, step.rounds) == (8, 4, "256MiB", 2)
    with pytest.raises(ValueError, match="no sizes"):
        fanout.plan(["1MiB"])


@pytest.mark.parametrize(("all_of_them", "ok"), [(2.6, True), (2.7, False)])
def test_target_of_fanout(all_of_them, ok):
    seconds = {"one": 2.0, "all": all_of_them, "ray": 8.0}
    targets = fanout.targets([Result("fanout", "256MiB", s, v, v, 3) for s, v in seconds.items()])
    assert [t.ok for t in targets] == [ok, True]


def test_plan_of_delta():
    assert [(s.nbytes, s.rounds) for s in delta.plan()] == [(1 << 30, 5)]
    assert [(s.nbytes, s.rounds) for s in delta.plan(["64MiB"], runs=1)] == [(64 << 20, 1)]
    with pytest.raises(ValueError, match="one size, of 64MiB, 1GiB; not 2MiB"):
        delta.plan(["2MiB"])


def test_targets_of_delta():
    def found(bytes_per_changed, rate, slow):
        yield Result("delta", "bytes-per-changed/2%", "pool", bytes_per_changed, bytes_per_changed, 1, {}, "bytes")
        yield Result("delta", "bytes-per-changed/2%", "xor-zstd", 2.5, 2.5, 1, {}, "bytes")
        yield Result("delta", "encode/unchanged", "pool", rate, rate, 1, {"of_dense": 0.0}, "bytes/s")
        yield Result("delta", "encode/unchanged", "memory-read", 10e9, 10e9, 1, {}, "bytes/s")
        yield Result("delta", "apply/0.5%", "pool", 1e9, 1e9, 1, {"ns_per_changed": slow}, "bytes/s")
        yield Result("delta", "apply/5%", "pool", 1e9, 1e9, 1, {"ns_per_changed": 10.0}, "bytes/s")
        yield Result("delta", "encode/5%", "pool", 1e9, 1e9, 1, {"of_dense": slow / 20}, "bytes/s")

    assert [t.ok for t in delta.targets(list(found(1.0, 8e9, 15.0)))] == [True, True, True, True, None, True, None]
    assert [t.ok for t in delta.targets(list(found(1.2, 6e9, 25.0)))] == [False, False, False, False, None, True, None]
    assert {t.ok for t in delta.targets([])} == {None}


# ---------------------------------------------------------------- report


def test_summarize_takes_the_median():
    r = summarize("put_get", "put/1MiB", "ray", [5.0, 1.0, 2.0])
    assert (r.value, r.best, r.runs) == (2.0, 1.0, 3)
    assert summarize("put_get", "put/1MiB", "ray", [1.0, 2.0]).value == 1.5


def test_json_line():
    (line,) = json_lines([result("put/1MiB", "ray", 2)])
    assert json.loads(line) == {"bench": "put_get", "case": "put/1MiB", "subject": "ray", "value": 2.0, "unit": "s", "runs": 3}
    assert '"value": 2.0' in line


def test_json_line_with_bytes_copied():
    (line,) = json_lines([result("pass/256MiB", "pool", 0.5, bytes_copied=0)])
    assert json.loads(line)["bytes_copied"] == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.000 us"),
        (2e-6, "2.00 us"),
        (999e-6, "999 us"),
        (1e-3, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.25, "250 ms"),
        (1.234, "1.23 s"),
        (321.0, "321 s"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_table():
    times = {"memcpy": 1e-3, "ray": 8e-3, "pool": 2e-3}
    (table,) = tables([result("put/1MiB", s, t) for s, t in times.items()], ("memcpy", "ray"))
    assert table.splitlines() == [
        "put/1MiB, 3 runs",
        "           memcpy      ray     pool",
        "median    1.00 ms  8.00 ms  2.00 ms",
        "/ memcpy    1.00x    8.00x    2.00x",
        "/ ray       0.12x    1.00x    0.25x",
    ]


def test_table_of_rates():
    rates = {"ray": 100 << 20, "pool": 250 << 20}
    (table,) = tables([Result("spill", "put", s, v, v, 3, unit="bytes/s") for s, v in rates.items()], ("ray",))
    assert [line.split() for line in table.splitlines()[2:]] == [
        ["median", "100", "MiB/s", "250", "MiB/s"],
        ["/", "ray", "1.00x", "2.50x"],
    ]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.5, "s", "500 ms"), (3 << 29, "bytes", "1.50 GiB"), (2048, "bytes/s", "2.00 KiB/s"), (12, "bytes", "12.0 bytes")],
)
def test_quantity(value, unit, text):
    assert quantity(value, unit) == text


def test_the_best_rate_is_the_highest():
    assert summarize("spill", "put", "ray", [1.0, 3.0, 2.0], unit="bytes/s").best == 3.0
    assert summarize("actor_pipeline", "peak-memory", "ray", [1.0, 3.0, 2.0], unit="bytes").best == 1.0


def test_compare():
    a, b = (Result("spill", "put", s, v, v, 3, unit="bytes/s") for s, v in (("pool", 6.0), ("ray", 2.0)))
    assert compare("x", a, b, 2.0, at_least=True).ok
    assert not compare("x", a, b, 2.0).ok
    assert compare("x", a, None, 2.0).ok is None


def test_a_table_a_case():
    assert len(list(tables([result(case, "ray", 1) for case in ("put/small", "get/small")], put_get.BASELINES))) == 2


def test_table_with_bytes_copied():
    (table,) = tables([result("pass/256MiB", "ray", 2), result("pass/256MiB", "pool", 1, bytes_copied=0)], ("ray",))
    assert table.splitlines()[-1].split() == ["bytes_copied", "0"]


def test_target_table():
    targets = [Target("a", 1.1, 1.2, best=1.0, detail="11 us : 10 us"), Target("b", 5.0, 6, at_least=True), Target("c", None, 1)]
    assert [t.ok for t in targets] == [True, False, None]
    assert [line.split() for line in target_table(targets).splitlines()] == [
        ["target", "limit", "measured", "at", "best", "medians"],
        ["a", "<=", "1.2", "1.10x", "ok", "1.00x", "11", "us", ":", "10", "us"],
        ["b", ">=", "6", "5.00x", "miss", "-"],
        ["c", "<=", "1", "-", "not", "run", "-"],
    ]


# ---------------------------------------------------------------- targets


def by_name(results):
    return {t.name: t for t in put_get.targets(results)}


def test_no_target_is_judged_without_its_cases():
    assert {t.ok for t in put_get.targets([])} == {None}


def test_target_at_most():
    found = by_name([result("put/16MiB", "store", 1.3), result("put/16MiB", "memcpy", 1.0)])
    assert found["store put 16MiB / memcpy"].ratio == pytest.approx(1.3)
    assert not found["store put 16MiB / memcpy"].ok


def test_target_against_a_sum():
    results = [result("put/16MiB", "pool", 3.0), result("put/16MiB", "memcpy", 2.0), result("put/small", "ray", 0.6)]
    assert by_name(results)["pool put 16MiB / (ray put small + 1.2 memcpy)"].ratio == pytest.approx(1.0)


def test_target_at_least():
    found = by_name(
        [result("putget/256MiB", "pool", 1.0), result("putget/256MiB", "ray", 7.0), result("putget/256MiB", "ray-zero-copy", 1.4)]
    )
    assert found["ray / pool, putget/256MiB"].ok
    assert not found["ray-zero-copy / pool, putget/256MiB"].ok


def test_target_best_runs():
    found = by_name([result("put/small", "pool", 2.0, best=1.0), result("put/small", "ray", 1.0, best=1.0)])
    assert (found["pool / ray, put/small"].ratio, found["pool / ray, put/small"].best) == (2.0, 1.0)


@pytest.mark.parametrize(("copied", "ok"), [(0, True), (4096, False)])
def test_target_of_passing_on(copied, ok):
    assert by_name([result("pass/256MiB", "pool", 1.0, bytes_copied=copied)])["bytes copied / passed on, pass/256MiB"].ok is ok


@pytest.mark.parametrize(("bench", "targets"), [(actor_pipeline, 3), (spill, 1)])
def test_targets_against_ray(bench, targets):
    assert [t.ok for t in bench.targets([])] == [None] * targets
    cases = {"time": "s", "peak-memory": "bytes", "putget": "bytes/s"}

    def met(pool, ray):
        results = [Result(bench.NAME, c, s, v, v, 3, unit=u) for c, u in cases.items() for s, v in zip(bench._ALL, ray, strict=True)]
        results = [r for r in results if r.subject != "pool"] + [
            Result(bench.NAME, c, "pool", pool, pool, 3, unit=u) for c, u in cases.items()
        ]
        return [t.ok for t in bench.targets(results)]

    rivals = [10.0] * len(bench._ALL)
    assert met(2.0, rivals) == ([True] * 3 if bench is actor_pipeline else [False])
    assert met(30.0, rivals) == ([False] * 3 if bench is actor_pipeline else [True])


# ---------------------------------------------------------------- processes


def test_shared_memory_is_counted_once(tmp_path):
    """A process with a memfd and a child that maps it, under the name of a broker."""
    program = tmp_path / "mooncake-broker"
    program.symlink_to(sys.executable)
    code = """
import mmap, os
fd = os.memfd_create("arena")
os.ftruncate(fd, 16 << 20)
memory = mmap.mmap(fd, 16 << 20)
memory[:] = bytes(16 << 20)
private = bytearray(8 << 20)
if os.fork():
    print("ready", flush=True)
else:
    assert not any(memory[::4096])
    private[::4096] = bytes([1]) * 2048
    print("ready", flush=True)
input()
"""
    with subprocess.Popen(
        [program, "-c", code], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert [parent.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        pids = processes.family(parent.pid)
        assert len(pids) == 2
        assert processes.shared_bytes(pids) == 16 << 20
        own = [processes.usage(pid).own for pid in pids]
        assert sum(own) > 16 << 20  # the child has a copy of the private part
        assert processes.memory(pids) > (16 << 20) + (16 << 20)
        assert max(own) < 16 << 20  # and the shared part is nobody's own
        parent.communicate("\n")
    assert processes.usage(parent.pid) is None


def test_usage_of_this_process():
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(10)]
    with mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        before = processes.usage(os.getpid())
        memory[:] = b"x" * len(memory)
        after = processes.usage(os.getpid())
    for fd in held:
        os.close(fd)
    assert after.own - before.own >= 8 << 20
    assert before.descriptors - processes.usage(os.getpid()).descriptors == 10
    assert before.threads >= 1


# ---------------------------------------------------------------- command line


def test_help_lists_the_benches():
    out = subprocess.run([sys.executable, "-m", "bench", "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(name in out and what in out for name, what in BENCHES.items())
    assert all(option in out for option in ("--json", "--quick", "--sizes", "--runs"))


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["put_get", "--sizes", "3MiB"], ["put_get", "--runs", "0"]])
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as e:
        main(arguments)
    assert e.value.code == 2
    assert "error" in capsys.readouterr().err


def fake_run(results):
    def run(steps):
        yield results

    return run


def test_output_is_json_only(monkeypatch, capsys):
    monkeypatch.setattr(put_get, "run", fake_run([result("put/1MiB", "ray", 2.0), result("put/1MiB", "pool", 1.0)]))
    assert main(["put_get", "--json"]) == 0
    assert [json.loads(line)["subject"] for line in capsys.readouterr().out.splitlines()] == ["ray", "pool"]


def test_output_ends_with_the_targets(monkeypatch, capsys):
    monkeypatch.setattr(put_get, "run", fake_run([result("put/1MiB", "ray", 2.0)]))
    assert main(["put_get"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(report.target_table(put_get.targets([])).splitlines()[-1])


def test_interrupt(monkeypatch, capsys):
    def run(steps):
        yield [result("put/1MiB", "ray", 2.0)]
        raise KeyboardInterrupt

    monkeypatch.setattr(put_get, "run", run)
    assert main(["put_get", "--json"]) == 130
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert captured.err == "interrupted\n"
