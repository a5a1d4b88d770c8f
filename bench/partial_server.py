"""`python -m bench.partial_server KIND`: holds one stored batch and gets parts of it. See `partial`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench import payloads, serving, workloads

__all__ = ["FIELDS", "PARTS", "SUBJECTS"]

SUBJECTS = {"pool": ("pool",)}
"""Which subject each kind of process holds."""

FIELDS = ("input_ids", "old_log_probs")
PARTS = 8
_CAPACITY_BYTES = 4 << 30
_OBJECTS_BYTES = 512 << 20


def selected(rows: int) -> dict[str, Any]:
    """The rows of each selection: about a PARTS-th, from the middle or from everywhere."""
    part = rows // PARTS
    return {"slice": slice(3 * part, 4 * part), "scattered": np.arange(part) * PARTS + 3}


def needed(rollout: workloads.Rollout) -> dict[str, int]:
    """Bytes that the selected rows of FIELDS need: int32 for a token, float32 for a log-prob of a response token."""
    tokens = rollout.prompt_lengths + rollout.response_lengths
    return {
        what: int(4 * tokens[at].sum() + 4 * rollout.response_lengths[at].sum()) for what, at in selected(rollout.workload.rows).items()
    }


class _Server:
    def __init__(self) -> None:
        serving.start_ray(_CAPACITY_BYTES, _OBJECTS_BYTES)
        import mooncake_ray

        self._pool = mooncake_ray
        self._ref: Any = None

    def load(self, subject: str, workload: str) -> dict[str, int]:
        """Stores the batch, and checks every selection. Returns the bytes that each needs."""
        rollout = workloads.build(workload)
        batch = workloads.padded(rollout)
        self._ref = self._pool.put_batch(batch)
        for what, rows in selected(len(batch)).items():
            got = self._pool.get(self._ref, fields=FIELDS, rows=rows)
            wanted = batch[rows].select(batch_keys=list(FIELDS), non_tensor_batch_keys=[])
            assert payloads.same(got, wanted), f"{what}: what came back is not what was selected"
        return needed(rollout)

    def get(self, subject: str, what: str) -> tuple[float, int]:
        """Gets a selection, or the whole batch. Returns seconds, and bytes that were read."""
        rows = selected(len(self._ref)).get(what)
        fields = None if what == "whole" else FIELDS
        before = self._pool.stats()["batch_bytes_read"]
        start = time.perf_counter()
        payloads.touch(self._pool.get(self._ref, fields=fields, rows=rows, form="ragged"))
        seconds = time.perf_counter() - start
        return seconds, self._pool.stats()["batch_bytes_read"] - before

    def close(self) -> None:
        self._ref = None
        import ray

        ray.shutdown()


if __name__ == "__main__":
    serving.serve(_Server)
