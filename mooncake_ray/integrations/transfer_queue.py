"""TransferQueue with its data in the pool: a storage backend named `MooncakeRay`.

    mooncake_ray.install()  # or, in the process that initialises TransferQueue: import mooncake_ray.integrations.transfer_queue
    tq.init(OmegaConf.create({"backend": {"storage_backend": "MooncakeRay"}}))

Other processes register the backend when they read TransferQueue's configuration, installed or not. Everything a put brings is one block,
written once by the process that has it; an actor keeps which block holds which row's field, and a read takes only the rows and fields it
asks for. What is cleared or replaced is freed when its last reader lets go of it.

Options of the section `backend.MooncakeRay`: `rows: jagged` returns every column of tensors with more than one dimension as jagged, as
TransferQueue's own backends do; by default (`as-put`) what was put as a dense tensor of several rows is dense again. `threads` (4) is how
many puts and gets of one client run at a time.
"""

from __future__ import annotations

import asyncio
import functools
import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

import mooncake_ray
from mooncake_ray.data import DataProto
from mooncake_ray.data.ragged import Ragged
from mooncake_ray.errors import ConfigError, SchemaError
from mooncake_ray.integrations.cell_index import CellIndex, Missing, Piece
from mooncake_ray.integrations.columns import from_rows, rows_of

try:
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
    kinds: Mapping[str, Hashable]  # of its columns: those of one kind can be joined as they are

    @classmethod
    def put(cls, batch: DataProto, kinds: Mapping[str, Hashable] | None = None) -> _Block:
        return cls(mooncake_ray.put_batch(batch), len(batch), kinds or _kinds(batch))


class _Index(CellIndex):
    """The index as an actor. It also owns the blocks, so that they outlive who put them."""

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def put_here(self, rows: Sequence[int], kinds: Mapping[str, Hashable], batch: DataProto) -> None:
        """A put from this node, as a ref. Its columns are not loaded, and put again they name the same bytes: nothing is copied."""
        self.put(rows, kinds, _Block.put(batch, kinds))


class _Backend:
    """Stands in the configuration: to unpickle it is to have imported this module, and so to have the backend registered."""

    def __reduce__(self) -> Any:
        return _Backend, ()


@StorageBootstrapProvider.register_provider(BACKEND)
def start(conf: Any) -> dict[str, Any]:
    """Starts the actor that keeps the index. It ends, and frees all that it refers to, when TransferQueue is closed.

    Raises:
        ConfigError: An option has a value that there is not.
    """
    options = dict(conf.backend.get(BACKEND) or {})
    if (rows := options.get("rows", _ROWS[0])) not in _ROWS:
        raise ConfigError(f"backend.{BACKEND}.rows is {rows!r}, expected one of {', '.join(_ROWS)}")
    index = ray.remote(_Index).options(name=_INDEX, namespace=_NAMESPACE, num_cpus=0).remote()
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
        self._near = self._call("node") == ray.get_runtime_context().get_node_id()
        self._threads = ThreadPoolExecutor(int(config.get("threads") or _THREADS), thread_name_prefix="mooncake_ray.transfer_queue")

    async def put_data(self, data: TensorDict, metadata: BatchMeta, data_parser: Callable[[Any], Any] | None = None) -> None:
        """Writes one block, and tells the index and the controller. The put is visible to readers when this returns.

        Tensors on other devices are stored as tensors on the CPU. A put on the node of the index outlives its process, others do not.

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
        schema = extract_field_schema(data)
        if schema:
            await self._run(self._put, data, rows, data_parser)
            await self.notify_data_update(metadata.partition_ids[0], rows, schema)

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """The fields and rows of the metadata, in its order. Tensors are private: writing to them changes nobody else's.

        Rows that were put one at a time come back jagged even if they happen to have one length, because the next ones may not.

        Raises:
            StorageKeyNotFoundError: A row has not got a field (any more).
            ObjectLostError: The memory of a block is gone.
        """
        if not metadata.size or not metadata.field_names:
            return TensorDict({}, batch_size=metadata.size)
        return await self._run(self._get, list(metadata.global_indexes), list(metadata.field_names))

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Forgets all fields of these rows. A block without rows is freed."""
        await self._run(self._call, "clear", list(metadata.global_indexes))

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

    def _call(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self._index, method).remote(*args))

    def _put(self, data: TensorDict, rows: list[int], parser: Callable[[Any], Any] | None) -> None:
        columns = {name: _plain(name, data.get(name), len(rows)) for name in data.keys()}  # noqa: SIM118 - it iterates over rows
        if parser is not None:
            columns = _parsed(columns, parser)
        stored = {name: self._stored(column) for name, column in columns.items()}
        tensors = {name: column for name, column in stored.items() if not isinstance(column, list)}
        others = {name: column for name, column in stored.items() if isinstance(column, list)}
        batch = DataProto.from_dict(tensors, others)
        if self._near:
            self._call("put_here", rows, _kinds(batch), mooncake_ray.put(batch))
        else:
            self._call("put", rows, list(columns), _Block.put(batch))

    def _stored(self, column: Any) -> Any:
        """As it is to come back: ragged, if it is a single row, or all are to be."""
        if isinstance(column, torch.Tensor) and column.is_nested:
            return Ragged.from_jagged(column) if column.layout is torch.jagged else rows_of(column)
        if isinstance(column, torch.Tensor) and column.dim() > 1 and (self._jagged or len(column) == 1):
            return Ragged(column.flatten(0, 1), torch.arange(len(column) + 1) * column.shape[1])
        return column

    def _get(self, rows: list[int], fields: list[str]) -> TensorDict:
        pieces = self._call("locate", rows, fields)
        if isinstance(pieces, Missing):
            raise StorageKeyNotFoundError(f"row {pieces.row} has no field {pieces.field!r}: it was never put, or was cleared")
        columns = _read(pieces)
        return TensorDict({name: _returned(columns[name]) for name in fields}, batch_size=len(rows))

    def _save(self, directory: Path) -> None:
        spans, blocks = self._call("dump")
        directory.mkdir(parents=True, exist_ok=True)
        for number, block in blocks.items():
            mooncake_ray.get(block.ref).save_to_disk(directory / f"{number}.pkl")
        (directory / "index.pkl").write_bytes(pickle.dumps((spans, list(blocks))))

    def _load(self, directory: Path) -> None:
        spans, numbers = pickle.loads((directory / "index.pkl").read_bytes())
        blocks = {number: _Block.put(DataProto.load_from_disk(directory / f"{number}.pkl")) for number in numbers}
        self._call("restore", spans, blocks)


def register(package: Any = None) -> None:
    """Makes `MooncakeRay` one of TransferQueue's backends in this process. To import this module has done so already."""


def _plain(name: str, column: Any, rows: int) -> Any:
    """A tensor as it is, everything else as a list with a value a row."""
    if isinstance(column, NonTensorStack):
        return column.tolist()
    if isinstance(column, NonTensorData):
        value = column.data  # an array of objects, too, is held as one value that stands for all rows, though it is a value a row
        return list(value) if isinstance(value, np.ndarray) and value.shape[:1] == (rows,) else [value] * rows
    if isinstance(column, torch.Tensor):
        return column.cpu()
    raise SchemaError(f"field {name!r} is a {type(column).__name__}, expected a tensor or non-tensor rows")


def _parsed(columns: dict[str, Any], parser: Callable[[Any], Any]) -> dict[str, Any]:
    """What a TransferQueue `data_parser` makes of the batch. It sees nested tensors as lists of their rows."""
    seen = {name: rows_of(c) if isinstance(c, torch.Tensor) and c.is_nested else c for name, c in columns.items()}
    lengths = {name: len(column) for name, column in seen.items()}
    out = parser(seen)
    if not isinstance(out, dict):
        raise SchemaError(f"data_parser returned a {type(out).__name__}, expected a dict")
    found = {name: len(column) for name, column in out.items()}
    if found != lengths:
        raise SchemaError(f"data_parser changed the fields or how many rows they have: {lengths} before, {found} after")
    return {name: from_rows(column) if isinstance(column, list) else column for name, column in out.items()}


def _kinds(batch: DataProto) -> dict[str, Hashable]:
    return {name: _kind(column) for part in (batch.batch, batch.non_tensor_batch) for name, column in part.items()}


def _kind(column: Any) -> Hashable:
    if isinstance(column, np.ndarray):
        return "values"
    return (column.dtype, column.full_row_shape) if isinstance(column, Ragged) else (column.dtype, tuple(column.shape[1:]))


def _read(pieces: Sequence[Piece]) -> dict[str, Any]:
    """All columns of the pieces, their rows in place: those of one kind together, as one batch of which the pool gives just these rows."""
    holding: dict[str, list[int]] = {}
    for number, piece in enumerate(pieces):
        for name in piece.fields:
            holding.setdefault(name, []).append(number)
    together: dict[tuple[int, ...], list[str]] = {}
    columns: dict[str, Any] = {}
    for name, numbers in holding.items():
        if len({pieces[n].block.kinds[name] for n in numbers}) == 1:
            together.setdefault(tuple(numbers), []).append(name)
        else:
            columns[name] = _read_rows(name, [pieces[n] for n in numbers])
    if together:
        refs = [_placed([pieces[n] for n in numbers], names) for numbers, names in together.items()]
        columns |= _columns(mooncake_ray.get(functools.reduce(lambda left, right: left.append(right), refs)))
    return columns


def _placed(pieces: Sequence[Piece], names: Sequence[str]) -> Any:
    """One ref of the pieces' rows in the order of their places."""
    parts = [piece.block.ref.select(names)[piece.rows] for piece in pieces]
    ref = parts[0] if len(parts) == 1 else mooncake_ray.concat_batches(parts)
    places = np.concatenate([piece.places for piece in pieces])
    return ref if (places[:-1] < places[1:]).all() else ref[np.argsort(places)]


def _read_rows(name: str, pieces: Sequence[Piece]) -> Any:
    """A column whose pieces are of different kinds, such as dense ones of different widths."""
    rows: list[Any] = [None] * sum(len(piece.places) for piece in pieces)
    for piece in pieces:
        column = _columns(mooncake_ray.get(piece.block.ref, fields=[name], rows=piece.rows))[name]
        for place, row in zip(piece.places, rows_of(column), strict=True):
            rows[place] = row
    return from_rows(rows)


def _columns(batch: DataProto) -> dict[str, Any]:
    return {**batch.batch, **{name: array.tolist() for name, array in batch.non_tensor_batch.items()}}


def _returned(column: Any) -> Any:
    """As TransferQueue's callers know it. A list of tensors, as of rows that differ in two dimensions, becomes nested."""
    if isinstance(column, list):
        column = from_rows(column)
    if isinstance(column, list):
        return NonTensorStack(*column)
    return column.to_jagged() if isinstance(column, Ragged) else column
