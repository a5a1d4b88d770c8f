"""TransferQueue with its data in the pool: a storage backend named `MooncakeRay`.

    mooncake_ray.install()  # or, in the process that initialises TransferQueue: import mooncake_ray.integrations.transfer_queue
    tq.init(OmegaConf.create({"backend": {"storage_backend": "MooncakeRay"}}))

Other processes register the backend when they read TransferQueue's configuration, installed or not. Everything a put brings is one block,
written once by the process that has it; an actor keeps which block holds which row's field, and a read takes only the rows and fields it
asks for. What is cleared or replaced is freed when its last reader lets go of it.

Options of the section `backend.MooncakeRay`: `rows: jagged` returns every column of tensors as nested, as TransferQueue's own backends do;
the default, `as-put`, returns dense what was put as a dense tensor of several rows. `threads` (4) is how many puts and gets of one client
run at a time.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

import mooncake_ray
from mooncake_ray.errors import ConfigError, SchemaError
from mooncake_ray.integrations import columns
from mooncake_ray.integrations.cell_index import CellIndex, Missing, Piece

try:
    import torch
    from tensordict import NonTensorData, NonTensorStack, TensorDict
    from transfer_queue.metadata import BatchMeta, extract_field_schema
    from transfer_queue.storage import StorageKeyNotFoundError
    from transfer_queue.storage.bootstrap import StorageBootstrapProvider
    from transfer_queue.storage.managers.base import StorageManager, StorageManagerFactory
except ImportError as e:
    raise ImportError(f"the storage backend for TransferQueue needs the packages TransferQueue and tensordict: {e}") from e

__all__ = ["BACKEND", "MooncakeRayStorageManager", "register"]

BACKEND = "MooncakeRay"
_INDEX, _NAMESPACE = "MooncakeRayCellIndex", "transfer_queue"
_ROWS = ("as-put", "jagged")
_THREADS = 4
_DIRECTORY = "mooncake_ray"  # in a checkpoint's


@dataclass(frozen=True, slots=True)
class _Block:
    """What one put brought."""

    ref: Any  # a BatchRef
    rows: int


class _Backend:
    """Stands in the configuration: to unpickle it is to have imported this module, and so to have the backend registered."""

    def __reduce__(self) -> Any:
        return _Backend, ()


@StorageBootstrapProvider.register_provider(BACKEND)
def start(conf: Any) -> dict[str, Any]:
    """Starts the actor that keeps the index. It ends, and frees all that it refers to, when TransferQueue is closed."""
    options = dict(conf.backend.get(BACKEND) or {})
    if (rows := options.get("rows", _ROWS[0])) not in _ROWS:
        raise ConfigError(f"backend.{BACKEND}.rows is {rows!r}, expected one of {', '.join(_ROWS)}")
    index = ray.remote(CellIndex).options(name=_INDEX, namespace=_NAMESPACE, num_cpus=0).remote()
    conf.backend[BACKEND] = {**options, "registered_by": _Backend()}
    return {"index": index}


@StorageManagerFactory.register(BACKEND)
class MooncakeRayStorageManager(StorageManager):
    """What a TransferQueue client stores through. Its coroutines only wait: the work is done on threads of its own."""

    def __init__(self, controller_info: Any, config: Mapping[str, Any] | None, zmq_context: Any = None) -> None:
        """Connects to the controller and to the index. `zmq_context` is the caller's and not used: no data goes through ZMQ."""
        config = config or {}
        super().__init__(controller_info, config)
        self._jagged = config.get("rows") == "jagged"
        self._index = ray.get_actor(_INDEX, namespace=_NAMESPACE)
        self._threads = ThreadPoolExecutor(int(config.get("threads") or _THREADS), thread_name_prefix="mooncake_ray.transfer_queue")

    async def put_data(self, data: TensorDict, metadata: BatchMeta, data_parser: Callable[[Any], Any] | None = None) -> None:
        """Writes one block, and tells the index and the controller. The put is visible to readers when this returns.

        Raises:
            SchemaError: The rows are not as many as the metadata says, belong to several partitions, or `data_parser` changed which fields
                or how many rows there are.
            StoreFullError: There was no room for the block.
        """
        rows = list(metadata.global_indexes)
        if data.batch_size[0] != len(rows):
            raise SchemaError(f"a put of {data.batch_size[0]} rows for {len(rows)} keys")
        if len(set(metadata.partition_ids)) > 1:
            raise SchemaError(f"a put into {len(set(metadata.partition_ids))} partitions, expected one")
        if not rows:
            return
        schema = extract_field_schema(data)
        await self._run(self._put, data, rows, data_parser)
        await self.notify_data_update(metadata.partition_ids[0], rows, schema)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """The fields and rows of the metadata, in its order. Tensors are private: writing to them changes nobody else's.

        Raises:
            StorageKeyNotFoundError: A row has not got a field (any more).
            ObjectLostError: The process that put a block is gone, and its memory with it.
        """
        if not metadata.size or not metadata.field_names:
            return TensorDict({}, batch_size=metadata.size)
        return await self._run(self._get, list(metadata.global_indexes), list(metadata.field_names))

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Forgets all fields of these rows. A block without rows is freed."""
        await self._run(ray.get, self._index.clear.remote(list(metadata.global_indexes)))

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes every block to a file of its own, one at a time, in a directory `mooncake_ray`. Nothing may be put or cleared meanwhile."""
        await self._run(self._save, Path(checkpoint_dir) / _DIRECTORY)

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Puts what `save_checkpoint` wrote in place of what is stored. The files are pickles: one from someone else can run code.

        Raises:
            FileNotFoundError: The directory has no such checkpoint, or lacks a block's file.
        """
        await self._run(self._load, Path(checkpoint_dir) / _DIRECTORY)

    def close(self) -> None:
        """Ends the threads, once they are idle, and what TransferQueue started."""
        threads = self.__dict__.pop("_threads", None)
        if threads is not None:
            threads.shutdown(wait=False)
        super().close()

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _put(self, data: TensorDict, rows: list[int], parser: Callable[[Any], Any] | None) -> None:
        batch = dict(_plain_columns(data))
        if parser is not None:
            batch = _parsed(batch, parser)
        ref = mooncake_ray.put_batch(batch)
        ray.get(self._index.put.remote(rows, list(batch), _Block(ref, len(rows))))

    def _save(self, directory: Path) -> None:
        spans, blocks = ray.get(self._index.dump.remote())
        directory.mkdir(parents=True, exist_ok=True)
        for number, block in blocks.items():
            _write(directory / f"{number}.pkl", mooncake_ray.get(block.ref))
        _write(directory / "index.pkl", (spans, {number: block.rows for number, block in blocks.items()}))

    def _load(self, directory: Path) -> None:
        spans, rows = _read_file(directory / "index.pkl")
        blocks = {number: _Block(mooncake_ray.put_batch(_read_file(directory / f"{number}.pkl")), n) for number, n in rows.items()}
        ray.get(self._index.restore.remote(spans, blocks))

    def _get(self, rows: list[int], fields: list[str]) -> TensorDict:
        pieces = ray.get(self._index.locate.remote(rows, fields))
        if isinstance(pieces, Missing):
            raise StorageKeyNotFoundError(f"row {pieces.row} has no field {pieces.field!r}: it was never put, or was cleared")
        parts: dict[str, list[columns.Part]] = {name: [] for name in fields}
        for piece in pieces:
            for name, column in _read(piece).items():
                parts[name].append(columns.Part(column, piece.places, piece.block.rows > 1))
        joined = {name: columns.join(of, len(rows), jagged=self._jagged) for name, of in parts.items()}
        return TensorDict({name: _stacked(column) for name, column in joined.items()}, batch_size=len(rows))


def register(package: Any = None) -> None:
    """Makes `MooncakeRay` one of TransferQueue's backends in this process. To import this module has done so already."""


def _read(piece: Piece) -> dict[str, Any]:
    whole = piece.rows == list(range(piece.block.rows))
    return mooncake_ray.get(piece.block.ref, fields=list(piece.fields), rows=None if whole else piece.rows)


def _write(path: Path, value: Any) -> None:
    with path.open("wb") as file:
        pickle.dump(value, file, protocol=5)


def _read_file(path: Path) -> Any:
    with path.open("rb") as file:
        return pickle.load(file)


def _stacked(column: Any) -> Any:
    return column if isinstance(column, torch.Tensor) else NonTensorStack(*column)


def _plain_columns(data: TensorDict) -> Iterator[tuple[str, Any]]:
    """Tensors as they are, everything else as a list with a value a row."""
    for name in data.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        column = data.get(name)
        if isinstance(column, NonTensorStack):
            yield name, column.tolist()
        elif isinstance(column, NonTensorData):
            yield name, _constant(column.data, data.batch_size[0])
        elif not isinstance(column, torch.Tensor):
            raise SchemaError(f"field {name!r} is a {type(column).__name__}, expected a tensor or non-tensor rows")
        elif column.is_nested and column.layout is not torch.jagged:
            yield name, columns.rows_of(column)
        else:
            yield name, column


def _constant(value: Any, rows: int) -> list[Any]:
    """A TensorDict holds an array of objects as one value that stands for all rows, though it is a value a row."""
    return list(value) if hasattr(value, "dtype") and getattr(value, "shape", ())[:1] == (rows,) else [value] * rows


def _parsed(batch: dict[str, Any], parser: Callable[[Any], Any]) -> dict[str, Any]:
    """What a TransferQueue `data_parser` makes of the batch. It sees nested tensors as lists of their rows."""
    seen = {name: columns.rows_of(c) if isinstance(c, torch.Tensor) and c.is_nested else c for name, c in batch.items()}
    lengths = {name: len(column) for name, column in seen.items()}
    out = parser(seen)
    if not isinstance(out, dict):
        raise SchemaError(f"data_parser returned a {type(out).__name__}, expected a dict")
    found = {name: len(column) for name, column in out.items()}
    if found != lengths:
        raise SchemaError(f"data_parser changed the fields or how many rows they have: {lengths} before, {found} after")
    return {name: columns.from_rows(column) if isinstance(column, list) else column for name, column in out.items()}
