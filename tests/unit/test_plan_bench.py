"""The pure parts of the bench of plans: which pairs, what is told from a few layers, targets."""

from __future__ import annotations

import pytest

from bench import plan, plan_server, report
from bench.fleet import ServerError


def test_pairs():
    assert [s.pair for s in plan.plan()] == list(plan.PAIRS) and len(plan.PAIRS) == 4 and plan.PAIRS[0] == "k2-32x8-32x2"
    assert plan.plan(quick=True) == [plan.Step("k2-32x8-32x2", 1)]
    assert plan.plan(["k2-8x1-4x2"], runs=7) == [plan.Step("k2-8x1-4x2", 7)]
    assert plan_server.sizes_of("k2-16x4-8x2") == ((16, 4), (8, 2))
    for name in ("k2", "k2-5x1-4x2", "k2-0x1-4x2", "M1G"):
        with pytest.raises(ValueError, match=f"no pair '{name}'"):
            plan.plan([name])


POOL = {
    "seconds": 1.5, "cpu": 1.0, "load": 1.01, "bytes": 1000, "model": 1000, "source fragments": 9, "target fragments": 8, "undivided": 6,
    "reads": 7, "rss": 1 << 29,
}  # fmt: skip


def found(pool, upstream):
    return {(r.case, r.subject): r for step in plan._results("k2-a", pool, upstream) for r in step}


def test_the_other_is_told_from_a_few_layers():
    upstream = {
        2: [{"seconds": 0.1, "sent": [10, 4], "target fragments": 2}],
        3: [{"seconds": 0.4, "sent": [11, 6], "target fragments": 3}],
    }
    out = found([POOL, {**POOL, "seconds": 2.5}], upstream)
    assert out["time/k2-a", "upstream"].value == pytest.approx(0.4 * (6 / 3) ** 2)
    sent = [11 + 58, 6 + 58 * 2]
    assert out["bytes/k2-a", "upstream"].value == sum(sent) and out["load/k2-a", "upstream"].value == max(sent) / (sum(sent) / 2)
    assert out["time/k2-a", "pool"].value == 2.0 and out["time/k2-a", "pool"].runs == 2
    assert len(out) == 8 and list(report.json_lines(out.values()))


def test_targets():
    out = {t.name: t for t in plan.targets(found([POOL], {}).values())}
    assert out["pool, seconds, k2-a"].ratio == 1.5 and out["pool, GiB of memory, k2-a"].ratio == 0.5 and all(t.ok for t in out.values())
    slow = plan.targets(found([{**POOL, "seconds": 2.5, "rss": 1 << 31, "load": 1.03, "bytes": 1001}], {}).values())
    assert len(slow) == 4 and not any(t.ok for t in slow)


class Fleet:
    def __init__(self, fails):
        self.fails = fails

    def start(self, kinds):
        if self.fails == "start":
            raise ServerError("no module named mooncake")

    def ask(self, subject, **request):
        if self.fails == request["do"]:
            raise ServerError("died")
        return {}


@pytest.mark.parametrize("fails", ["start", "load", "plan"])
def test_the_other_may_be_missing(fails, capsys):
    assert plan._upstream(Fleet(fails), plan.Step("k2-32x8-32x2", 1)) == {}
    assert "upstream: not run: " in capsys.readouterr().err
    assert list(plan._upstream(Fleet(""), plan.Step("k2-32x8-32x2", 1))) == [2, 3]
