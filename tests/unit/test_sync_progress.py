"""How far an update is, as the group tells it."""

from __future__ import annotations

import pytest
import torch
from local_group import Group

from mooncake_ray.weights.source import StateDictSource


@pytest.mark.parametrize("mode", ["p2p", "nccl"])
@pytest.mark.parametrize("engines", [1, 3])
def test_what_ranks_have_staged_adds_up(mode, engines):
    with Group() as group:
        group.trainer(StateDictSource({"model.norm.weight": torch.zeros(1000)}), 0, 1)
        for n in range(engines):
            group.engine(StateDictSource({"model.norm.weight": torch.ones(1000)}), f"e{n}")
        report = group.sync(mode=mode)
        status = group.status()
        assert report.nbytes == 4000, "what is staged, once"
        assert status.moved_bytes == status.total_bytes == 4000 * engines, "by every rank"
