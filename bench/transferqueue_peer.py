"""TransferQueue with the storage it has by default, as a peer: a controller and two storage actors, in a Ray of their own."""

from __future__ import annotations

import itertools
from typing import Any

from bench import payloads, serving
from bench.subjects import Roundtrips

__all__ = ["TransferQueue"]

_PARTITION = "bench"
_CPUS = 8  # its actors ask for one each


class TransferQueue(Roundtrips):
    """Puts and gets batches whole, as verl does: a key a row, columns as a TensorDict. `meta_info` stays with the caller.

    It gives padded columns back as nested tensors; they are viewed as what they were. It takes no Python lists but as values that it
    does not look into, so a dict of lists goes as such values.
    """

    def __init__(self, store_bytes: int) -> None:
        serving.start_ray(0, store_bytes, cpus=_CPUS)
        import transfer_queue

        transfer_queue.init()
        self._queue = transfer_queue
        self._numbers = itertools.count()

    def put(self, value: Any) -> Any:
        fields, meta_info, rows = _fields(value)
        batch = next(self._numbers)
        keys = [f"{batch}-{i}" for i in range(rows)]
        self._queue.kv_batch_put(keys=keys, partition_id=_PARTITION, fields=fields)
        return keys, meta_info

    def get(self, handle: Any) -> Any:
        import torch

        keys, meta_info = handle
        fields = self._queue.kv_batch_get(keys=keys, partition_id=_PARTITION)
        if isinstance(self.value, dict):
            return {name: fields.get(name).tolist() for name in self.value}
        from verl import DataProto

        tensors, others = {}, {}
        for name, column in fields.items():
            if isinstance(column, torch.Tensor):
                tensors[name] = column.values().view(len(keys), -1) if column.is_nested else column
            else:
                others[name] = payloads.objects(column.tolist())
        return DataProto.from_dict(tensors, others, meta_info=meta_info)

    def drop(self, handles: list[Any]) -> None:
        for keys, _ in handles:
            self._queue.kv_clear(keys=keys, partition_id=_PARTITION)
        handles.clear()

    def stored(self) -> int:
        """Bytes: of the columns as it encodes them to send them. Its storage keeps what it decodes from that, and knows no sizes."""
        from transfer_queue.utils.serial_utils import encode

        fields, _, _ = _fields(self.value)
        columns = {name: fields[name] for name in sorted(fields.keys())}
        return sum(memoryview(frame).nbytes for frame in encode(columns))

    def close(self) -> None:
        import ray

        self._queue.close()
        ray.shutdown()


def _fields(value: Any) -> tuple[Any, dict[str, Any], int]:
    """A batch as the TensorDict that it takes, what belongs to no row, and the number of rows."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    if isinstance(value, dict):
        rows = len(value["tokens"])
        columns = {name: NonTensorStack(*(NonTensorData(row) for row in column)) for name, column in value.items()}
        return TensorDict(columns, batch_size=[rows]), {}, rows
    fields = value.to_tensordict()
    for name in value.meta_info:
        fields.pop(name)
    return fields, value.meta_info, len(value)
