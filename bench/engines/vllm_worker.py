"""What users of vLLM put into its workers (`--worker-extension-cls`) to give them new weights: tensors in a request, or a broadcast."""

from __future__ import annotations

import base64
import datetime
import pickle
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Native", "gloo"]

_TIMEOUT = datetime.timedelta(seconds=300)


def gloo(host: str, port: int, rank: int) -> Any:
    """A group of two, of which rank 0 waits for the other."""
    store = torch.distributed.TCPStore(host, port, 2, rank == 0, _TIMEOUT)
    return torch.distributed.ProcessGroupGloo(store, rank, 2, _TIMEOUT)


class Native:
    """Methods of every worker."""

    def take_tensors(self, pickled: str) -> None:
        self.model_runner.reload_weights(weights_iterator=iter(pickle.loads(base64.b64decode(pickled))))

    def join(self, host: str, port: int) -> None:
        self.broadcasts = gloo(host, port, 1)

    def take_broadcast(self, names: list[str], shapes: list[list[int]]) -> None:
        def received() -> Iterator[tuple[str, torch.Tensor]]:
            for name, shape in zip(names, shapes, strict=True):
                tensor = torch.empty(shape, dtype=torch.bfloat16)
                self.broadcasts.broadcast(tensor, 0).wait()
                yield name, tensor

        self.model_runner.reload_weights(weights_iterator=received())
