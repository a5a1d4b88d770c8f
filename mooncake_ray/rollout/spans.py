"""`VersionSpans`: which version of the weights made which token of each sample of a batch. As runs: versions change rarely in a sample.

They travel as two ragged columns of the batch: see `attach` and `spans_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mooncake_ray.data import DataProto, Ragged, ops
from mooncake_ray.data.block.read import Runs, offsets_of
from mooncake_ray.data.exact import INTEGERS, as_dtype
from mooncake_ray.data.indices import RowIndex
from mooncake_ray.data.lazy import Columns
from mooncake_ray.errors import SchemaError, StaleVersionError

__all__ = ["NO_VERSION", "VERSION_IDS", "VERSION_LENGTHS", "VersionSpans", "attach", "spans_of"]

VERSION_IDS = "version_ids"
"""The column of a batch that has each sample's versions, int64, ragged."""
VERSION_LENGTHS = "version_lengths"
"""The column of a batch that has how many tokens each of them made, int64, ragged."""
NO_VERSION = -1
"""What `oldest` and `newest` say of a sample without tokens. Versions are not negative, so it is none of them, and the result needs no mask."""

_LARGEST = np.iinfo(np.int64).max
_DIGITS = len(str(_LARGEST))
_FIELDS = ("version", "start", "end")

Span = tuple[int | str, int, int] | Mapping[str, int | str]


@dataclass(frozen=True, eq=False, slots=True)
class VersionSpans:
    """Sample i was made in the runs `offsets[i]` to `offsets[i + 1] - 1`: run r is `lengths[r]` tokens, all of them by `versions[r]`.

    Neighbouring runs may be of one version. The arrays are not to be written to; results share them where they can. Nothing here loops over
    samples or tokens in Python, but `of`, whose input is Python objects. Reading from several threads is safe.

    Attributes:
        versions: int64 (runs,), not negative.
        lengths: int64 (runs,), tokens, each at least 1.
        offsets: int64 (samples + 1,), from 0 to the number of runs, not falling. A sample without tokens has no run.
    """

    versions: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        """Raises SchemaError: an array has another dtype or shape, or a number in it cannot be."""
        for name in self.__slots__:
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != np.int64 or array.ndim != 1:
                found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}"
                raise SchemaError(f"{name} is {found}, expected an int64 array of one dimension")
        runs = len(self.versions)
        if len(self.lengths) != runs:
            raise SchemaError(f"there are {len(self.lengths)} lengths for {runs} versions, expected as many")
        if not len(self.offsets) or self.offsets[0] != 0 or self.offsets[-1] != runs or (np.diff(self.offsets) < 0).any():
            raise SchemaError(f"offsets do not rise from 0 to the {runs} runs")
        for name, least in (("versions", 0), ("lengths", 1)):
            bad = np.flatnonzero(getattr(self, name) < least)
            if bad.size:
                raise SchemaError(f"{name}[{bad[0]}] is {getattr(self, name)[bad[0]]}, expected at least {least}")

    @classmethod
    def constant(cls, version: int, lengths: Any) -> VersionSpans:
        """Samples that one version made.

        Args:
            version: Not negative.
            lengths: Tokens of each sample, integers (samples,).

        Raises:
            SchemaError: The version or a length is no such number.
        """
        counts = _counts(lengths, "lengths")
        some = counts[counts > 0]
        return cls(np.full(len(some), _number(version, "version"), np.int64), some, offsets_of(counts > 0))

    @classmethod
    def of(cls, spans: Iterable[Sequence[Span]]) -> VersionSpans:
        """What engines say of their answers: vLLM's and SGLang's `weight_versions`, for each sample the spans `[start, end)` of its tokens.

        Args:
            spans: For each sample its spans in order: `(version, start, end)`, or mappings with these names. A version is an int or a string
                of decimal digits. They cover the sample from token 0 on, without gap or overlap; empty ones are left out, and neighbours of
                one version become one run.

        Raises:
            SchemaError: A span is something else. Names the sample and the span.
        """
        numbers: list[tuple[int, int, int]] = []
        counts: list[int] = []
        for sample, row in enumerate(spans):
            if not isinstance(row, Sequence) or isinstance(row, str | bytes):
                raise SchemaError(f"sample {sample} is a {type(row).__name__}, expected a list of spans")
            numbers += (_span(span, sample, place) for place, span in enumerate(row))
            counts.append(len(row))
        versions, starts, ends = np.array(numbers, np.int64).reshape(-1, 3).T
        offsets = offsets_of(np.array(counts, np.int64))
        expected = np.concatenate(([0], ends))[:-1]
        expected[offsets[:-1][np.diff(offsets) > 0]] = 0
        bad = np.flatnonzero((starts != expected) | (ends < starts))
        if bad.size:
            run = int(bad[0])
            sample = int(np.searchsorted(offsets, run, side="right")) - 1
            where = f"sample {sample}, span {run - offsets[sample]}"
            raise SchemaError(f"{where} is [{starts[run]}, {ends[run]}), expected it to begin at {expected[run]} and not to end before")
        kept = ends > starts
        return cls(*_merged(versions[kept], (ends - starts)[kept], _offsets_among(kept, offsets)))

    @classmethod
    def from_tokens(cls, versions: Ragged | torch.Tensor) -> VersionSpans:
        """From the version of every token.

        Args:
            versions: A column of a batch: ragged integers, a row a sample; or a tensor (samples, tokens), all of whose samples are so long.

        Raises:
            SchemaError: It is something else, has a null row, or a number that is no version.
        """
        column = ops.as_column(versions)
        if isinstance(column, torch.Tensor) and column.ndim == 2:
            column = Ragged(column.reshape(-1), torch.arange(len(column) + 1) * column.shape[1])
        values, offsets = _integers(column, "the column of versions")
        return cls(*_merged(values, np.ones(len(values), np.int64), offsets))

    # ---------------------------------------------------------------- samples

    def __len__(self) -> int:
        """Samples."""
        return len(self.offsets) - 1

    def lengths_of_samples(self) -> np.ndarray:
        """Tokens of each sample, int64 (samples,)."""
        return np.diff(offsets_of(self.lengths)[self.offsets])

    def oldest(self) -> np.ndarray:
        """The least version in each sample, int64 (samples,); `NO_VERSION` where it has no token."""
        return self._reduced(np.minimum)

    def newest(self) -> np.ndarray:
        """The greatest version in each sample, int64 (samples,); `NO_VERSION` where it has no token."""
        return self._reduced(np.maximum)

    def _reduced(self, what: np.ufunc) -> np.ndarray:
        some = np.diff(self.offsets) > 0
        out = np.full(len(self), NO_VERSION, np.int64)
        if some.any():
            out[some] = what.reduceat(self.versions, self.offsets[:-1][some])
        return out

    def select(self, rows: slice | RowIndex) -> VersionSpans:
        """Samples by a slice, by number (negative ones count from the end) or by mask, in that order and as often as given.

        Raises:
            IndexError: A number is out of range, or the index has a wrong shape, length or dtype.
        """
        numbers = ops.runs_of(rows, len(self)).positions()
        counts = np.diff(self.offsets)[numbers]
        runs = Runs(self.offsets[numbers], counts).positions()
        return VersionSpans(self.versions[runs], self.lengths[runs], offsets_of(counts))

    @staticmethod
    def concat(parts: Sequence[VersionSpans]) -> VersionSpans:
        """The samples of all, one part after the other. ValueError where there is no part."""
        if not parts:
            raise ValueError("cannot concat an empty list, expected at least one part")
        counts = np.concatenate([np.diff(part.offsets) for part in parts])
        versions, lengths = (np.concatenate([getattr(part, name) for part in parts]) for name in ("versions", "lengths"))
        return VersionSpans(versions, lengths, offsets_of(counts))

    def append(self, other: VersionSpans) -> VersionSpans:
        """Continues each sample by the tokens of the other's: partial rollouts that went on under newer versions.

        Returns:
            As many samples. Neighbouring runs of one version have become one.

        Raises:
            SchemaError: The other has more samples, or fewer.
            StaleVersionError: A sample would go back to a version that is older than its newest. Names the sample.
        """
        samples = len(self)
        if len(other) != samples:
            raise SchemaError(f"cannot append {len(other)} samples to {samples}, expected as many")
        newest, oldest = self.newest(), other.oldest()
        back = np.flatnonzero((oldest < newest) & (oldest != NO_VERSION))
        if back.size:
            sample = back[0]
            raise StaleVersionError(
                f"sample {sample} goes on with version {oldest[sample]}, expected at least its newest, {newest[sample]}"
            )
        turns = np.arange(2 * samples).reshape(2, samples).T.reshape(-1)  # sample 0 of both, sample 1 of both, ...
        both = VersionSpans.concat([self, other]).select(turns)
        return VersionSpans(*_merged(both.versions, both.lengths, both.offsets[::2]))

    def truncate(self, lengths: Any) -> VersionSpans:
        """The first tokens of each sample.

        Args:
            lengths: How many at most, integers (samples,); one number for all. A shorter sample stays whole.

        Raises:
            SchemaError: A length is no such number, or there are not as many as samples.
        """
        limits = np.broadcast_to(_counts(lengths, "lengths"), (len(self),)) if np.ndim(lengths) == 0 else _counts(lengths, "lengths")
        if len(limits) != len(self):
            raise SchemaError(f"there are {len(limits)} lengths for {len(self)} samples, expected as many")
        counts, before = np.diff(self.offsets), offsets_of(self.lengths)
        starts = before[:-1] - np.repeat(before[self.offsets[:-1]], counts)  # of each run, in its sample
        left = np.clip(np.repeat(limits, counts) - starts, 0, self.lengths)
        kept = left > 0
        return VersionSpans(self.versions[kept], left[kept], _offsets_among(kept, self.offsets))

    # ---------------------------------------------------------------- tokens

    def tokens(self) -> Ragged:
        """The version of every token: a row a sample, int32, or int64 where a version does not fit."""
        return self._by_token(self.versions)

    def ages(self, current: int) -> Ragged:
        """By how many versions `current` is newer than what made each token: a row a sample, int32, or int64 where one does not fit.

        Raises:
            StaleVersionError: A token was made by a newer version. Names the sample.
        """
        return self._by_token(self._not_ahead(current) - self.versions)

    def staleness(self, current: int) -> np.ndarray:
        """The age of each sample's oldest token, int64 (samples,); 0 where it has none: nothing in it is stale.

        Raises:
            StaleVersionError: A token was made by a version newer than `current`. Names the sample.
        """
        current, oldest = self._not_ahead(current), self.oldest()
        return np.where(oldest == NO_VERSION, 0, current - oldest)

    def _not_ahead(self, current: int) -> int:
        """The current version, unless a token is of a newer one."""
        current, newest = _number(current, "the current version"), self.newest()
        ahead = np.flatnonzero(newest > current)
        if ahead.size:
            raise StaleVersionError(f"sample {ahead[0]} has tokens of version {newest[ahead[0]]}, newer than the current one, {current}")
        return current

    def _by_token(self, values: np.ndarray) -> Ragged:
        """Numbers of the runs, for each token of the run."""
        fits = not len(values) or values.max() <= np.iinfo(np.int32).max
        items = np.repeat(values.astype(np.int32 if fits else np.int64), self.lengths)
        return Ragged(torch.from_numpy(items), torch.from_numpy(offsets_of(self.lengths)[self.offsets]))


def attach(batch: DataProto, spans: VersionSpans, response: str | None = None) -> DataProto:
    """The batch with the spans of its samples as two more columns, or in place of those it has. Nothing is copied or loaded.

    Args:
        batch: Not changed.
        spans: As many samples as the batch has rows.
        response: The column of the tokens that they are of: see `spans_of`.

    Raises:
        SchemaError: It is no `DataProto`, there are not as many samples as rows, or their lengths are not those of the response.
    """
    _check_batch(batch)
    if response is not None:
        _check_lengths(batch, spans, response)
    columns, offsets = Columns(batch.batch), torch.from_numpy(spans.offsets)
    columns[VERSION_IDS] = Ragged(torch.from_numpy(spans.versions), offsets)
    columns[VERSION_LENGTHS] = Ragged(torch.from_numpy(spans.lengths), offsets)
    return type(batch)(batch=columns, non_tensor_batch=batch.non_tensor_batch, meta_info=batch.meta_info)


def spans_of(batch: DataProto, response: str | None = None) -> VersionSpans:
    """The spans that `attach` has put into a batch, of the rows that are in it now. Of pending columns it loads these two, and `response`.

    Args:
        batch: As it came out of `chunk`, `select_idxs`, `concat`, the pool, ...
        response: The column of the tokens that they are of. Where it is ragged, each row must be as long as the sample; where it is padded,
            (rows, width, ...), no sample may be longer than its width. None: not looked at.

    Raises:
        SchemaError: It is no `DataProto`, a column is missing or something else, the two disagree, or the lengths are not those of the
            response. Names the sample.
    """
    _check_batch(batch)
    missing = [name for name in (VERSION_IDS, VERSION_LENGTHS) if name not in batch.batch]
    if missing:
        raise SchemaError(f"the batch has no columns {missing}; it has {list(batch.batch)}")
    batch.load([VERSION_IDS, VERSION_LENGTHS])
    versions, offsets = _integers(batch.batch[VERSION_IDS], f"batch[{VERSION_IDS!r}]")
    lengths, same = _integers(batch.batch[VERSION_LENGTHS], f"batch[{VERSION_LENGTHS!r}]")
    if not np.array_equal(offsets, same):
        row = int(np.flatnonzero(np.diff(offsets) != np.diff(same))[0])
        raise SchemaError(f"row {row} has {np.diff(offsets)[row]} versions and {np.diff(same)[row]} lengths of them, expected as many")
    spans = VersionSpans(versions, lengths, offsets)
    if response is not None:
        _check_lengths(batch, spans, response)
    return spans


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, DataProto):
        raise SchemaError(f"the batch is a {type(batch).__name__}, expected a mooncake_ray.DataProto")


def _check_lengths(batch: DataProto, spans: VersionSpans, response: str) -> None:
    if response not in batch.batch:
        raise SchemaError(f"the batch has no column {response!r}; it has {list(batch.batch)}")
    column, lengths = batch.batch[response], spans.lengths_of_samples()
    if len(column) != len(lengths):
        raise SchemaError(f"there are versions of {len(lengths)} samples, expected {len(column)} as in {response!r}")
    if isinstance(column, Ragged):
        expected, what = column.lengths().numpy(), ""
        bad = np.flatnonzero(lengths != expected)
    elif column.ndim > 1:
        expected, what = np.full(len(lengths), column.shape[1]), "at most "
        bad = np.flatnonzero(lengths > expected)
    else:
        raise SchemaError(f"column {response!r} has one number a row, expected tokens")
    if bad.size:
        raise SchemaError(f"sample {bad[0]} has versions of {lengths[bad[0]]} tokens, expected {what}{expected[bad[0]]} as in {response!r}")


def _merged(versions: np.ndarray, lengths: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same runs, with neighbours of one version in one sample joined."""
    first = np.ones(len(versions), bool)
    first[1:] = versions[1:] != versions[:-1]
    first[offsets[:-1][np.diff(offsets) > 0]] = True
    starts = np.flatnonzero(first)
    joined = np.add.reduceat(lengths, starts) if len(starts) else lengths
    return versions[starts], joined, _offsets_among(first, offsets)


def _offsets_among(kept: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Where samples begin once only those runs are left."""
    return offsets_of(kept)[offsets]


def _integers(column: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Items and offsets of a ragged column of integers, int64 both. SchemaError if it is something else, or has null rows."""
    if not isinstance(column, Ragged) or column.dtype not in INTEGERS or column.full_row_shape != (None,):
        found = column.describe() if isinstance(column, Ragged) else f"a {type(column).__name__}"
        raise SchemaError(f"{what} is {found}, expected a ragged column of integers")
    if column.null_count:
        raise SchemaError(f"{what} has {column.null_count} null rows, expected none")
    part = column.compact()
    return as_dtype(part.values.cpu(), torch.int64, what).numpy(), part.offsets.numpy()


def _counts(lengths: Any, what: str) -> np.ndarray:
    """Numbers of tokens as int64 (samples,); one number becomes (1,)."""
    array = np.asarray(lengths.detach().cpu() if isinstance(lengths, torch.Tensor) else lengths)
    array = np.atleast_1d(array) if array.size else array.astype(np.int64)  # an empty list has numpy's default dtype, a float
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise SchemaError(f"{what} is {array.dtype}{list(array.shape)}, expected integers (samples,)")
    bad = np.flatnonzero((array < 0) | (array > _LARGEST))
    if bad.size:
        raise SchemaError(f"{what}[{bad[0]}] is {array[bad[0]]}, expected at least 0")
    return array.astype(np.int64)


def _span(span: Any, sample: int, place: int) -> tuple[int, int, int]:
    if isinstance(span, Mapping):
        missing = [name for name in _FIELDS if name not in span]
        if missing:
            raise SchemaError(f"sample {sample}, span {place} has no {missing}; it has {list(span)}")
        span = tuple(span[name] for name in _FIELDS)
    if not isinstance(span, tuple | list) or len(span) != 3:
        raise SchemaError(f"sample {sample}, span {place} is {span!r}, expected (version, start, end), or a mapping of these")
    version, start, end = span
    if isinstance(version, str) and version.isascii() and version.isdecimal() and len(version) <= _DIGITS:
        version = int(version)
    for name, value in zip(_FIELDS, (version, start, end), strict=True):
        if not _is_number(value):
            raise _no_number(value, f"the {name} of sample {sample}, span {place}")
    return version, start, end


def _number(value: Any, what: str) -> int:
    if not _is_number(value):
        raise _no_number(value, what)
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _no_number(value: Any, what: str) -> SchemaError:
    return SchemaError(f"{what} is {value!r}, expected an integer from 0 to {_LARGEST}")
