"""`Snapshot`: a committed one on this machine's disks, as a source of weights; and one behind HTTP."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from mooncake_ray.errors import ConfigError, CorruptBlockError
from mooncake_ray.weights.draft import MANIFEST
from mooncake_ray.weights.file_source import Directory
from mooncake_ray.weights.files import Lock
from mooncake_ray.weights.manifest import Manifest
from mooncake_ray.weights.meta import ITEMSIZE
from mooncake_ray.weights.placement import Fragment
from mooncake_ray.weights.shard import Shard
from mooncake_ray.weights.stored import Loaded, Stored, buffer_name, fragments, stretch
from mooncake_ray.weights.versions import OpenVersion, version_name

__all__ = ["FetchedSnapshot", "Snapshot", "SnapshotSource"]


class Snapshot(Stored, OpenVersion):
    """One version, immutable. A `Shard`: its fragments are the regions in its files, its buffers those files, mapped.

    It is not deleted as long as this is open (`close`, or a `with` block; garbage collection closes it, too), and may be read by any number of
    processes. Thread-safe, but for `close`. Tensors over it stay valid after `close`; they are private: writing one changes no file.
    """

    def __init__(self, path: Path, lock: Lock, version: int) -> None:
        """Of a directory that is locked. See `SnapshotStore.open`.

        Raises:
            CorruptBlockError, ChecksumError: the manifest is damaged, or a file has not the length that it says.
        """
        self.path, self._lock = path, lock
        where = path / MANIFEST
        try:
            super().__init__(Manifest.from_bytes(where.read_bytes(), str(where)), f"{path}/")
        except FileNotFoundError:
            raise CorruptBlockError(f"{where} is gone") from None
        if self.manifest.version != version:
            raise CorruptBlockError(f"{where} is of version {self.manifest.version}")
        self._maps: dict[str, mmap.mmap] = {}
        for part in self.manifest.parts:
            try:
                with open(path / part.file, "rb") as file:
                    nbytes = os.fstat(file.fileno()).st_size
                    if nbytes != part.nbytes:
                        raise CorruptBlockError(f"{path / part.file} has {nbytes} bytes of {part.nbytes}")
                    self._maps[part.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except FileNotFoundError:
                raise CorruptBlockError(f"{path / part.file} is gone") from None

    def buffers(self) -> dict[str, torch.Tensor]:
        """For each file and dtype in it: all of that file that is whole elements of that dtype."""
        return self.buffers_of({(file, meta.dtype) for file, meta, _ in self.regions})

    def buffers_of(self, of: Iterable[tuple[str, str]]) -> dict[str, torch.Tensor]:
        return {
            buffer_name(file, dtype): torch.frombuffer(
                self._maps[file], dtype=getattr(torch, dtype), count=len(self._maps[file]) // ITEMSIZE[dtype]
            )
            for file, dtype in of
        }

    def rows(self, number: int, first: int, last: int) -> torch.Tensor:
        """Rows of a region along the dimension of its blocks, as `tensor`."""
        file, meta, region = self.regions[number]
        begin, end, shape = stretch(meta, region, first, last)
        raw = torch.frombuffer(self._maps[file], dtype=torch.uint8, count=end - begin, offset=begin)
        return raw.view(getattr(torch, meta.dtype)).view(shape)

    def in_place(self) -> bool:
        """Whether this, while it is open, is what there is at its path. Somebody may have deleted it all the same, and written another."""
        return self._lock.holds(self.path)


class FetchedSnapshot(Stored):
    """One that is read, block by block, from a directory that cannot be locked or mapped, such as one behind HTTP. If it is deleted meanwhile,
    reading it fails. Not thread-safe."""

    def __init__(self, directory: Directory, version: int) -> None:
        """
        Raises:
            SnapshotNotFoundError: it is not there.
            CorruptBlockError, ChecksumError: its manifest is damaged.
        """
        self._directory, self._folder = directory, version_name(version)
        name = f"{self._folder}/{MANIFEST}"
        super().__init__(Manifest.from_bytes(directory.read(name), directory.where(name)), directory.where(f"{self._folder}/"))
        if self.version != version:
            raise CorruptBlockError(f"{directory.where(name)} is of version {self.version}")
        self._held: dict[int, tuple[int, int, torch.Tensor]] = {}

    def rows(self, number: int, first: int, last: int) -> torch.Tensor:
        file, meta, region = self.regions[number]
        dim, length, step = region.blocks(meta.itemsize)
        a, b, held = self._held.get(number, (0, 0, None))
        if held is None or not a <= first <= last <= b:
            # Whole blocks, as they are verified by blocks.
            a, b = first // step * step, min(length, -(-last // step) * step)
            begin, end, shape = stretch(meta, region, a, b)
            raw = torch.frombuffer(bytearray(self._directory.read(f"{self._folder}/{file}", begin, end)), dtype=torch.uint8)
            held = raw.view(getattr(torch, meta.dtype)).view(shape)
            self._held[number] = a, b, held
        return held.narrow(dim, first - a, last - first) if region.lo else held

    def load_into(self, shard: Shard, **options: object) -> Loaded:
        try:
            return super().load_into(shard, **options)
        finally:
            self._held.clear()


class SnapshotSource:
    """A snapshot as a trainer in a group of engines: a `Shard` of one or several ranks, each of which gives some of the files."""

    def __init__(self, directory: str | Path, version: int | None = None, *, rank: int = 0, world: int = 1) -> None:
        """
        Args:
            directory: Of a `SnapshotStore`.
            version: By default the newest.

        Raises:
            SnapshotNotFoundError: it is not there.
        """
        from mooncake_ray.weights.snapshot import SnapshotStore

        if not 0 <= rank < world:
            raise ConfigError(f"rank {rank} of {world}")
        self.snapshot = SnapshotStore(directory).open(version)
        files = {part.file for part in self.snapshot.manifest.parts[rank::world]}
        self._regions = [r for r in self.snapshot.regions if r[0] in files]

    @property
    def version(self) -> int:
        return self.snapshot.version

    def fragments(self) -> Sequence[Fragment]:
        return fragments(self._regions)

    def buffers(self) -> dict[str, torch.Tensor]:
        return self.snapshot.buffers_of({(file, meta.dtype) for file, meta, _ in self._regions})
