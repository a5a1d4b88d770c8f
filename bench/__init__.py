"""Benchmarks: `python -m bench NAME`. Every figure is a ratio against a baseline of the same run."""

from __future__ import annotations

__all__ = ["BENCHES"]

BENCHES = {
    "put_get": "put, get and pass on tensors: the pool against memcpy and against Ray's own store",
    "actor_pipeline": "eight rollout actors to one trainer: seconds, and the memory of all processes together",
    "batch": "whole batches of a GRPO step: the pool, Ray, Mooncake, TransferQueue, pickle; bytes stored and seconds",
    "partial": "two of a stored batch's fields, and an eighth of its rows: bytes read and seconds",
    "driver": "eight producers to eight consumers, each needing rows of all: through the driver as refs, or as data",
    "pull": "get what was put on another node, over a shaped link and a free one: the pool, Ray, Mooncake, iperf3",
    "fanout": "one object to one reader, and to eight on four nodes, over shaped links",
    "sync": "a new version of a model from four trainer hosts to four engine hosts: broadcast as usual, ours, and what the links need",
    "engine_update": "new weights for real vLLM and SGLang: by the pool, and by their own ways; seconds, and seconds paused",
    "async_loop": "a job in which accelerators sleep, synchronously and asynchronously, and on Ray's store: samples per second, utilisation",
    "delta": "what a step of Adam changes of bfloat16 weights: bytes, making and applying, against xor+zstd, COO and dense",
    "serve": "64 readers of a version of 200 MB over HTTP: the endpoint, nginx; bytes per second",
    "spill": "a working set of four times the store: put all of it, then get all of it",
    "plan": "how all of Kimi-K2 goes from a trainer to engines: seconds, how even senders' shares are, bytes that leave",
}
"""Name of each bench, a module of this package, and what it measures."""
