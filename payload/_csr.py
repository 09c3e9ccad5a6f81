"""Ragged rows: tables of offsets in, `Ragged` or padded rows out.

A CSR segment is a table of rows + 1 absolute byte offsets (uint32) and, somewhere behind it, the
values. Upstream's older form is padded rows; both may stand in one list.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ._cast import allocate
from ._files import Deadline, Files
from ._gather import SCRATCH, Array, Read, blocks, bytes_of, fit, run
from ._plan import Kind, Layout, Piece
from .errors import PayloadCorruptError
from .ragged import Ragged
from .segment import Segment


def tables(
    files: Files,
    segments: Sequence[Segment],
    deadline: Deadline,
    whole: Sequence[Segment] | None = None,
) -> list[Array]:
    """Read and check the offsets table of each CSR segment.

    Parameters
    ----------
    segments : sequence of Segment
    whole : sequence of Segment, optional
        What `segments` were cut from: no value can lie inside the whole table.

    Returns
    -------
    list of ndarray
        ``[rows + 1]`` int64 absolute byte offsets in the segment's file; ``[0]`` for no rows.

    Raises
    ------
    PayloadCorruptError
        When a table falls, leaves the file, or cuts an element. Nothing is allocated by it.
    """
    starts = [0]
    reads: list[Read] = []
    for segment in segments:
        if segment.rows:
            reads.append((segment.file, segment.offset, 4 * (segment.rows + 1), 4 * starts[-1]))
        starts.append(starts[-1] + (segment.rows + 1 if segment.rows else 0))
    if 4 * starts[-1] > SCRATCH:
        # Before so much memory is taken on their word, the tables must be in their files.
        for segment in segments:
            end = segment.offset + 4 * (segment.rows + 1)
            if segment.rows:
                os.close(files.open(segment.file, segment.offset, end, deadline)[0])
    flat = allocate((starts[-1],), np.dtype("<u4"), files.max_bytes, "a table")
    sizes: dict[str, int] = {}
    run(files, reads, bytes_of(flat), flat.nbytes, sizes=sizes, deadline=deadline)
    found = []
    for segment, full, start, stop in zip(
        segments, whole or segments, starts, starts[1:], strict=False
    ):
        if segment.rows:
            table = flat[start:stop].astype(np.int64)
            size = sizes[segment.file]
            if segment.length is not None and segment.offset + segment.length > size:
                # Short, not corrupt: waits where it is worth it, else says so.
                end = segment.offset + segment.length
                fd, size, _ = files.open(segment.file, segment.offset, end, deadline)
                os.close(fd)
            _check_table(segment, full.offset + 4 * (full.rows + 1), table, size)
            found.append(table)
        else:
            found.append(np.zeros(1, np.int64))
    return found


def _check_table(segment: Segment, values: int, table: Array, size: int) -> None:
    def corrupt(text: str, expected: int, actual: int) -> PayloadCorruptError:
        return PayloadCorruptError(
            f"table of {segment.field!r} at byte {segment.offset} of {segment.file!r} {text}",
            reason="table",
            field=segment.field,
            path=segment.file,
            offset=segment.offset,
            expected=expected,
            actual=actual,
        )

    steps = np.diff(table)
    wrong = (steps < 0) | (steps % 4 != 0)
    if wrong.any():
        row = int(np.argmax(wrong))
        goes = "falls" if steps[row] < 0 else "cuts an element"
        raise corrupt(
            f"{goes}: from {table[row]} to {table[row + 1]} at row {row}",
            int(table[row]),
            int(table[row + 1]),
        )
    first, last = int(table[0]), int(table[-1])
    if first < values:
        raise corrupt(
            f"begins its values at {first}, inside itself: needs {values} or more", values, first
        )
    if last > size:
        raise corrupt(f"ends its values at {last}, the file has {size} bytes", last, size)
    if segment.length is not None and last != segment.offset + segment.length:
        end = segment.offset + segment.length
        raise corrupt(f"ends its values at {last}, the segment's length says {end}", end, last)


def _value_blocks(
    files: Files, segment: Segment, table: Array, dtype: np.dtype[Any], deadline: Deadline
) -> Iterator[tuple[int, int, Array]]:
    """Yield (first row, row after the last, values) of a CSR segment, as `blocks` does."""
    row, stop_row = 0, segment.rows
    if table[row] == table[stop_row]:
        return
    start, stop = int(table[row]), int(table[stop_row])
    fd, _, _ = files.open_read(segment.file, start, stop, deadline)
    try:
        scratch = np.empty(0, dtype)
        while row < stop_row:
            limit = int(np.searchsorted(table[row : stop_row + 1], table[row] + SCRATCH, "right"))
            stop = min(max(row + limit - 1, row + 1), stop_row)
            count = int(table[stop] - table[row]) // 4
            if count > scratch.size:
                scratch = allocate((count,), dtype, files.max_bytes, f"field {segment.field!r}")
            values = bytes_of(scratch[:count])
            files.read_open(fd, segment.file, int(table[row]), values, deadline=deadline)
            yield row, stop, scratch[:count]
            row = stop
    finally:
        os.close(fd)


def cut(segment: Segment, start: int, stop: int) -> Segment:
    """Return the rows of `segment` at the token positions [start, stop) as a segment."""
    if (start, stop) == (segment.pos, segment.end):
        return segment
    offset = segment.offset + (start - segment.pos) * segment.row_nbytes
    return msgspec.structs.replace(
        segment, offset=offset, pos=start, rows=stop - start, length=None
    )


class Rows:
    """The ragged rows of a window: which segments, which pieces of them, and their tables.

    Attributes
    ----------
    counts : ndarray
        ``[hi - lo]`` int64: values in each row, 0 where nothing is recorded.
    """

    def __init__(
        self,
        files: Files,
        segments: Sequence[Segment],
        layouts: Mapping[Kind, Layout],
        pieces: Sequence[Piece],
        lo: int,
        hi: int,
        dtype: np.dtype[Any],
        fill: float | None,
        deadline: Deadline,
    ) -> None:
        self._files = files
        self._deadline = deadline
        self._lo = lo
        self._dtype = dtype
        self._fill = fill
        rows = [cut(segments[which], start, stop) for which, start, stop in pieces]
        self._pieces = [(one, layouts[one.dtype, one.shape]) for one in rows]
        csr = [segment for segment, layout in self._pieces if layout == "csr"]
        whole = [
            segments[piece[0]]
            for piece, (_, layout) in zip(pieces, self._pieces, strict=True)
            if layout == "csr"
        ]
        read_tables = iter(tables(files, csr, deadline, whole))
        self._tables = [
            next(read_tables) if layout == "csr" else None for _, layout in self._pieces
        ]
        self.counts = allocate((hi - lo,), np.dtype(np.int64), files.max_bytes, "a window")
        self.counts[:] = 0
        for (segment, _), table in zip(self._pieces, self._tables, strict=True):
            counts = np.diff(table) // 4 if table is not None else self._padded_counts(segment)
            self.counts[segment.pos - lo : segment.end - lo] = counts

    def whole(self) -> tuple[Segment, int, int] | None:
        """The segment, first byte and length of the values, if one CSR segment has all rows."""
        if len(self._pieces) != 1 or self._tables[0] is None:
            return None
        segment, table = self._pieces[0][0], self._tables[0]
        if segment.rows != len(self.counts) or table[0] == table[-1]:
            return None
        return segment, int(table[0]), int(table[-1] - table[0])

    def gather(self) -> Ragged:
        """Return all rows in one fresh array, each value copied once."""
        offsets = np.zeros(len(self.counts) + 1, np.int64)
        np.cumsum(self.counts, out=offsets[1:])
        total = int(offsets[-1])
        values = allocate((total,), self._dtype, self._files.max_bytes, "a ragged window")
        reads: list[Read] = []
        for (segment, _), table in zip(self._pieces, self._tables, strict=True):
            at = int(offsets[segment.pos - self._lo])
            if table is not None:
                nbytes = int(table[-1] - table[0])
                if nbytes:
                    reads.append((segment.file, int(table[0]), nbytes, at * values.itemsize))
                continue
            for first, _, kept in self._value_blocks(segment, None):
                fit(segment, first, kept, self._dtype)
                values[at : at + len(kept)] = kept
                at += len(kept)
        run(self._files, reads, bytes_of(values), values.nbytes, deadline=self._deadline)
        self._files.counts["bytes_copied"] += values.nbytes
        return Ragged(values, offsets)

    def scatter(self, out: Array) -> None:
        """Write the rows into padded `out`, ``[hi - lo, width]``; padding is left alone."""
        columns = np.arange(out.shape[1])
        for (segment, _), table in zip(self._pieces, self._tables, strict=True):
            window = slice(segment.pos - self._lo, segment.end - self._lo)
            rows, counts = out[window], self.counts[window]
            for start, stop, values in self._value_blocks(segment, table):
                fit(segment, start, values, out.dtype)
                rows[start:stop][columns < counts[start:stop, None]] = values
        self._files.counts["bytes_copied"] += int(self.counts.sum()) * self._dtype.itemsize

    def _value_blocks(
        self, segment: Segment, table: Array | None
    ) -> Iterator[tuple[int, int, Array]]:
        """Yield (first row, row after the last, values without padding)."""
        if table is not None:
            yield from _value_blocks(self._files, segment, table, self._dtype, self._deadline)
            return
        for first, block in self._padded_blocks(segment):
            yield first, first + len(block), Ragged.from_padded(block, self._fill).values

    def _padded_blocks(self, segment: Segment) -> Iterator[tuple[int, Array]]:
        return blocks(self._files, segment, 0, segment.rows, self._deadline)

    def _padded_counts(self, segment: Segment) -> Array:
        counts = np.zeros(segment.rows, np.int64)
        for first, block in self._padded_blocks(segment):
            counts[first : first + len(block)] = Ragged.from_padded(block, self._fill).counts
        return counts


def longest(
    files: Files, segments: Sequence[Segment], layouts: Mapping[Kind, Layout], deadline: Deadline
) -> int:
    """Width that holds every row of `segments`, whatever the window: ranks must agree on it."""
    width = max([1, *(shape[0] for (_, shape), layout in layouts.items() if layout == "padded")])
    csr = [one for one in segments if layouts[one.dtype, one.shape] == "csr"]
    for table in tables(files, csr, deadline):
        width = max(width, int(np.diff(table).max(initial=0)) // 4)
    return width
