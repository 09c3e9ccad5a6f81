"""Rows of different length in two flat arrays."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np

from ._cast import exact_fill, known_dtype, narrow

Array = np.ndarray[Any, Any]


class Ragged:
    """Rows of different length: `values` of all rows in one array, and where each row starts.

    Row ``i`` is ``values[offsets[i]:offsets[i + 1]]``. Slices share memory with what they were
    taken from.

    Parameters
    ----------
    values : ndarray
        ``[n]``, any dtype; kept as it is, not copied.
    offsets : array_like
        ``[rows + 1]`` integers, not falling, the last minus the first equal to ``n``. Kept as
        int64, rebased so that the first is 0.

    Raises
    ------
    ValueError
        When the offsets do not describe rows of `values`; it names the first bad place.

    Examples
    --------
    >>> mask = Ragged(np.array([7, 8, 9, 10]), [0, 1, 4, 4])
    >>> len(mask), mask[1].tolist(), mask.counts.tolist()
    (3, [8, 9, 10], [1, 3, 0])
    """

    __slots__ = ("offsets", "values")

    values: Array
    offsets: Array

    def __init__(self, values: Array, offsets: Any) -> None:
        values = np.asanyarray(values)
        table = np.asarray(offsets)
        if values.ndim != 1:
            raise ValueError(f"values has shape {values.shape}: needs one axis")
        if table.ndim != 1 or not table.size or table.dtype.kind not in "iu":
            raise ValueError(
                f"offsets is {table.dtype} of shape {table.shape}: needs rows + 1 integers"
            )
        if table.dtype.kind == "u" and table.max() > np.iinfo(np.int64).max:
            raise ValueError(f"offsets reaches {table.max()}: needs less than 2^63")
        table = table.astype(np.int64)
        steps = np.diff(table)
        if steps.size and steps.min() < 0:
            i = int(np.argmax(steps < 0))
            raise ValueError(f"offsets falls from {table[i]} to {table[i + 1]} at row {i}")
        if table[-1] - table[0] != values.size:
            raise ValueError(
                f"offsets spans {table[-1] - table[0]} values, {values.size} are there"
            )
        table -= table[0]
        self.values = values
        self.offsets = table

    @classmethod
    def _of(cls, values: Array, offsets: Array) -> Ragged:
        """Make one of arrays that were checked where they were made."""
        made = cls.__new__(cls)
        made.values, made.offsets = values, offsets
        return made

    @classmethod
    def from_lists(cls, rows: Iterable[Sequence[Any] | Array], dtype: Any = np.int32) -> Ragged:
        """Make one from a list of rows, checking that every value fits `dtype`.

        Examples
        --------
        >>> Ragged.from_lists([[7], [8, 9], []]).offsets.tolist()
        [0, 1, 3, 3]
        """
        lists = list(rows)
        counts = [len(row) for row in lists]
        flat = [
            value
            for row in lists
            for value in (row.tolist() if isinstance(row, np.ndarray) else row)
        ]
        return cls.from_counts(_exactly(flat, known_dtype(dtype)), counts)

    @classmethod
    def from_counts(cls, values: Array, counts: Any) -> Ragged:
        """Make one from flat values and the number of values in each row."""
        counts = np.asarray(counts, np.int64)
        if counts.size and counts.min() < 0:
            raise ValueError(
                f"counts has {counts.min()} at row {int(np.argmin(counts))}: needs 0 or more"
            )
        offsets = np.zeros(counts.size + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        return cls(values, offsets)

    @classmethod
    def from_padded(cls, rows: Array, fill: Any) -> Ragged:
        """Make one from ``[rows, width]``, dropping each row's trailing `fill`.

        Examples
        --------
        >>> Ragged.from_padded(np.array([[7, -1], [8, 9], [-1, -1]]), fill=-1).counts.tolist()
        [1, 2, 0]
        """
        if rows.ndim != 2:
            raise ValueError(f"rows has shape {rows.shape}: needs [rows, width]")
        kept = rows != fill if fill == fill else ~np.isnan(rows)
        width = rows.shape[1]
        # A row is as long as the place of its last value; a fill before that is a value.
        counts = (
            np.where(kept.any(1), width - np.argmax(kept[:, ::-1], 1), 0) if width else kept.sum(1)
        )
        return cls.from_counts(rows[np.arange(width) < counts[:, None]], counts)

    @property
    def counts(self) -> Array:
        """``[rows]`` int64: the number of values in each row."""
        return np.diff(self.offsets)

    def to_padded(self, fill: Any, width: int | None = None) -> Array:
        """Return ``[rows, width]`` in the values' dtype, each row followed by `fill`.

        Parameters
        ----------
        fill : number
            Must fit the dtype.
        width : int, optional
            Default: the longest row. A smaller one is a ValueError: nothing is cut.

        Examples
        --------
        >>> Ragged.from_lists([[7], [8, 9]]).to_padded(-1).tolist()
        [[7, -1], [8, 9]]
        """
        counts = self.counts
        longest = int(counts.max(initial=0))
        width = longest if width is None else operator.index(width)
        if width < longest:
            raise ValueError(f"width is {width}: the longest row has {longest} values")
        out = np.full((len(self), width), exact_fill(fill, self.values.dtype))
        out[np.arange(width) < counts[:, None]] = self.values
        return out

    def with_values(self, values: Array) -> Ragged:
        """Return the same rows with other values, such as logprobs beside a mask.

        Raises
        ------
        ValueError
            When there are not exactly as many values.
        """
        values = np.asanyarray(values)
        if values.shape != self.values.shape:
            raise ValueError(f"values has shape {values.shape}: needs {self.values.shape}")
        return Ragged(values, self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, key: int) -> Array: ...
    @overload
    def __getitem__(self, key: slice) -> Ragged: ...
    def __getitem__(self, key: int | slice) -> Array | Ragged:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise ValueError(f"step is {step}: only consecutive rows share memory")
            stop = max(start, stop)
            table = self.offsets[start : stop + 1]
            return Ragged(self.values[table[0] : table[-1]], table)
        row = operator.index(key)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} is out of range for {len(self)} rows")
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Array]:
        for row in range(len(self)):
            yield self[row]

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {self.values.size} {self.values.dtype} values)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Ragged, (self.values, self.offsets)


def _exactly(values: list[Any], target: np.dtype[Any]) -> Array:
    """Make an array of Python numbers; numpy alone would round integers that meet in a list."""
    kinds = set(map(type, values))
    if kinds <= {int, bool}:
        for wrong in (min(values, default=0), max(values, default=0)):
            if not -(2**63) <= wrong < 2**64:
                raise ValueError(f"value {wrong} does not fit {target}")
        if values and min(values) < 0 and max(values) >= 2**63:
            raise ValueError(f"value {max(values)} does not fit {target}")
        wide = np.uint64 if values and max(values) >= 2**63 else np.int64
        return narrow(np.array(values, wide), target)
    if not kinds <= {int, bool, float}:
        raise TypeError(
            f"values are {', '.join(sorted(kind.__name__ for kind in kinds))}: needs numbers"
        )
    for value in values:
        if type(value) is int and abs(value) > 2**53:
            raise ValueError(f"value {value} is not exact beside floats")
    return narrow(np.array(values, np.float64), target)
