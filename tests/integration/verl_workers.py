"""Workers as users of verl write them. Nothing here knows of the pool."""

from __future__ import annotations

import os

import numpy as np
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register


class Actor(Worker):
    """Two ranks of tensor parallelism for each of data parallelism, if there are that many."""

    def __init__(self, tp: int = 1) -> None:
        super().__init__()
        self._register_dispatch_collect_info("actor", dp_rank=self.rank // tp, is_collect=self.rank % tp == 0)
        self.seen = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def log_probs(self, data: DataProto) -> DataProto:
        self.seen = len(data)
        logits = data.batch["input_ids"].float() * data.meta_info["temperature"] + data.batch["attention_mask"]
        uid = np.array([f"{uid}@{self.rank}" for uid in data.non_tensor_batch["uid"]], dtype=object)
        return DataProto.from_dict({"log_probs": logits}, {"uid": uid}, meta_info={"metrics": {"rank": 1}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def later(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": data.batch["input_ids"] * 2})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def doubled(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": data.batch["values"] * 2})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def doubled_later(self, data: DataProto) -> DataProto:
        return self.doubled(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def nd(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"sums": data.batch["input_ids"].cumsum(1) + data.batch["lengths"][:, None]})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def nd_td(self, data):
        """On a TensorDict with rows of different lengths, as verl's newer workers have it."""
        from tensordict import TensorDict

        rows = data["responses"]
        doubled = torch.nested.as_nested_tensor([row * 2 for row in rows.unbind()], layout=torch.jagged)
        return TensorDict({"responses": doubled, "rank": torch.full((len(data),), self.rank)}, batch_size=[len(data)])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def everybody(self, data: DataProto, scale: int) -> torch.Tensor:
        return data.batch["input_ids"].sum() * scale + self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def each(self, data, name):
        return data.batch["input_ids"] if isinstance(data, DataProto) else (name, data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def metric(self, data: DataProto) -> dict:
        return {"rows": len(data), "sum": int(data.batch["input_ids"].sum())}

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first(self, data: DataProto) -> DataProto:
        return data.select(batch_keys=["input_ids"])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def dying(self, data: DataProto) -> DataProto:
        if self.rank == 1:
            os._exit(1)
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()


class Critic(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def values(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": data.batch["log_probs"].mean(-1)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()


def batch(rows: int, width: int = 20_000, seed: int = 0) -> DataProto:
    """As a rollout makes it, with columns large enough for the pool."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width, (rows,), generator=draw)
    mask = (torch.arange(width) < lengths[:, None]).long()
    ids = torch.randint(0, 1000, (rows, width), generator=draw) * mask
    uid = np.array([f"u{seed}-{i}" for i in range(rows)], dtype=object)
    extra = np.array([{"turn": i} for i in range(rows)], dtype=object)
    tensors = {"input_ids": ids, "attention_mask": mask, "lengths": lengths}
    return DataProto.from_dict(tensors, {"uid": uid, "extra": extra}, meta_info={"temperature": 0.5, "eos": [1, 2]})


def outcome(ranks: int, start) -> tuple:
    """The group, and what a program gets of every kind of call. `start(cls, ranks, *args)` makes a group of workers."""
    from tensordict import TensorDict
    from verl.protocol import DataProtoConfig, pad_dataproto_to_divisor, unpad_dataproto

    group, out = start(Actor, ranks, 2 if ranks % 2 == 0 else 1), {}
    data = batch(4 * ranks)
    done = group.log_probs(data)
    out["log_probs"] = done.batch["log_probs"], done.non_tensor_batch["uid"].tolist(), done.meta_info
    padded, size = pad_dataproto_to_divisor(batch(4 * ranks - 1), ranks)
    out["padded"] = unpad_dataproto(group.log_probs(padded), size).batch["log_probs"]
    auto = batch(4 * ranks - 1)
    auto.meta_info[DataProtoConfig.auto_padding_key] = True
    out["auto"] = group.log_probs(auto).batch["log_probs"]
    future = group.later(data)
    out["later"] = future.get().batch["values"], group.doubled(future).batch["values"]
    out["nd"] = group.nd(data).batch["sums"]
    rows = [torch.arange(5_000 + 300 * i) for i in range(4 * ranks)]
    td = TensorDict({"responses": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=[4 * ranks])
    got = group.nd_td(td)
    out["nd_td"] = [row.clone() for row in got["responses"].unbind()], got["rank"]
    out["everybody"] = group.everybody(data, scale=3)
    out["each"] = group.each([data[i : i + 1] for i in range(ranks)], ["a", "b", "c", "d"][:ranks])
    out["metric"] = group.metric(data)
    out["first"] = group.first(data).batch["input_ids"]
    return group, out


def colocated(ranks: int, together) -> dict:
    """Two roles in the same processes. `together({name: (class, *args)})` makes a group for each."""
    groups = together({"actor": (Actor,), "critic": (Critic,)}, ranks)
    data = batch(4 * ranks, seed=3)
    log_probs = groups["actor"].log_probs(data)
    values = groups["critic"].values(log_probs)
    return {"values": values.batch["values"], "same processes": groups["actor"].pid() == groups["critic"].pid()}
