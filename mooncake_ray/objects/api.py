"""The explicit forms, for code that wants to say it: put, get, wait, free; and what was routed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import ray

from mooncake_ray import counters
from mooncake_ray.errors import ConfigError
from mooncake_ray.objects import envelopes, install, nodes, routing, session
from mooncake_ray.store import devices

__all__ = ["free", "get", "pool_stats", "put", "stats", "wait"]


def put(value: Any, *, typed: bool = False, checksums: bool = False) -> ray.ObjectRef:
    """`ray.put`, with every tensor and array in `value` routed through the pool whatever its size, installed or not.

    Args:
        typed: Store batches in it column by column and without padding, whatever `Config.typed_batches` says.
        checksums: … and with a CRC-32 for every column.

    Returns a real `ray.ObjectRef`: it can be passed to any Ray call, and the memory follows Ray's reference counting.
    """
    install.open_seams()
    state = routing.state
    outer = state.chosen, state.batch, state.checksums
    state.chosen, state.batch, state.checksums = True, typed, checksums
    try:
        return ray.put(value)
    finally:
        state.chosen, state.batch, state.checksums = outer


def get(
    refs: Any,
    *,
    timeout: float | None = None,
    fields: Iterable[str] | None = None,
    rows: Any = None,
    form: Literal["as-put", "ragged", "padded"] = "as-put",
    lazy: bool = False,
    verify: bool = False,
    device: str | None = None,
) -> Any:
    """`ray.get`; and rows and columns of stored batches, of which only the bytes that are asked for are read, all by one request.

    Tensors are private copy-on-write views (or copies, where they were stored narrower), arrays read-only views. They stay valid as long as
    they live.

    Args:
        refs: What `ray.get` takes, or a `BatchRef`. For the arguments below a `BatchRef`, or the ref of a batch.
        timeout: In seconds; None waits for ever.
        fields: Names of columns; None for all.
        rows: A slice, row numbers, or a mask of booleans; None for all.
        form: `as-put`: what was put. `ragged`: columns that have row lengths (which a mask put with them tells) as `Ragged`, without padding;
            lists of numbers too, in the narrowest dtype that holds them. `padded`: `Ragged` columns as dense tensors, padded on the right with
            zeros. The last two give a `mooncake_ray.DataProto` whatever was put.
        lazy: A `DataProto` whose columns are loaded when they are first touched.
        verify: Compare the whole stored batch with the checksums it was put with.
        device: Where tensors go: "cpu", or "cuda:0", to which they are copied straight from the pool. None: where they were put from (or where
            `Config.cuda_get` says); those put from a CUDA device to the one of the same number, as Ray has it. Columns of batches that are
            stored typed are loaded on the CPU: move those with `to()`.

    Raises:
        ObjectLostError (ours and Ray's): the bytes are gone from the pool: freed explicitly, or its broker died.
        ray.exceptions.OwnerDiedError: the process that put the object died.
        SchemaError: a field is unknown, or the object is no batch.
        IndexError: a row is out of range.
        CorruptBlockError: the stored bytes are damaged.
    """
    if device is not None:
        if not re.fullmatch(r"as-put|cpu|cuda(:\d+)?", device):
            raise ValueError(f"device must be 'as-put', 'cpu', 'cuda' or 'cuda:' and a number, got {device!r}")
        with devices.loading(device):
            return get(refs, timeout=timeout, fields=fields, rows=rows, form=form, lazy=lazy, verify=verify)
    if hasattr(refs, "as_put") or fields is not None or rows is not None or form != "as-put" or lazy or verify:
        from mooncake_ray.objects.batches import get_batch  # needs torch

        return get_batch(refs, fields, rows, form=form, lazy=lazy, verify=verify, timeout=timeout)
    return ray.get(refs, timeout=timeout)


def wait(
    refs: Sequence[ray.ObjectRef], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
    """`ray.wait`."""
    return ray.wait(list(refs), num_returns=num_returns, timeout=timeout, fetch_local=fetch_local)


def free(refs: Any) -> int:
    """Frees the pool memory of objects now, on whatever node, although refs to them live: a later `ray.get` of them fails.

    Live views stay valid. Waits for the values, and reads only their envelopes.

    Only needed where a ref is kept longer than its data. Returns how many pool objects were freed.

    Args:
        refs: A `ray.ObjectRef`, a `BatchRef`, or lists and tuples of them, nested.

    Raises:
        TypeError: `refs` is something else.
        GetTimeoutError: another node that has some of them does not answer.
    """
    wanted = envelopes.flat(refs)
    here = session.current()
    if here is None or not wanted:
        return 0
    install.open_seams()
    ids: dict[bytes, set[bytes]] = {}
    for ref in wanted:
        for obj in envelopes.named(ref, None):
            ids.setdefault(obj.pool_id, set()).add(obj.id)
    for pool_id, there in ids.items():
        here.client.remove(sorted(there))  # or a replica
        if pool_id != here.client.pool_id:
            nodes.remove(pool_id, sorted(there), here.config.pull_timeout_s)
    return sum(map(len, ids.values()))


def stats() -> dict[str, int]:
    """What this process did: `routed` serialisations, `bytes_copied` into the pool, `bytes_passed_on` without a copy, `opened` pool objects,
    `adopted` returns, `fallbacks` to Ray's store (and `fallbacks:<reason>`)."""
    return counters.snapshot()


def pool_stats() -> dict[str, Any]:
    """The node's pool: bytes, objects, pins, claims, and a row a process. Raises ConfigError where Ray or the pool is not up."""
    here = session.current()
    if here is None:
        raise ConfigError("no pool: ray.init() has not been called, or the broker could not be started")
    return json.loads(here.client.stats())
