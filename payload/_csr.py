"""Ragged rows: tables of offsets in, `Ragged` or padded rows out.

A CSR segment is a table of rows + 1 absolute byte offsets (uint32) and, somewhere behind it, the
values. Upstream's older form is padded rows; both may stand in one list.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ._cast import allocate
from ._files import Deadline, Files
from ._gather import SCRATCH, Array, Read, blocks, bytes_of, fit, run, spread
from ._plan import Kind, Layout, Piece, cut
from .errors import PayloadCorruptError
from .ragged import Ragged
from .segment import Segment

_ROWS = 1 << 16  # table entries looked at at a time
_SPARSE = 8  # entries a value from which on naming places beats a mask of all entries; measured


class Part(NamedTuple):
    """Rows of one segment that stand in a window, and their table; None for padded ones."""

    segment: Segment
    table: Array | None


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
        ``[rows + 1]`` uint32 absolute byte offsets in the segment's file; ``[0]`` for no rows.

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
        for path, offset, nbytes, _ in reads:
            os.close(files.open(path, offset, offset + nbytes, deadline)[0])
    flat = allocate((starts[-1],), np.dtype("<u4"), files.max_bytes, "a table")
    sizes: dict[str, int] = {}
    run(files, reads, bytes_of(flat), flat.nbytes, sizes=sizes, deadline=deadline)
    found = []
    for segment, full, start, stop in zip(
        segments, whole or segments, starts, starts[1:], strict=False
    ):
        if segment.rows:
            size = sizes[segment.file]
            if segment.length is not None and segment.offset + segment.length > size:
                # Short, not corrupt: waits where it is worth it, else says so.
                end = segment.offset + segment.length
                fd, size, _ = files.open(segment.file, segment.offset, end, deadline)
                os.close(fd)
            table = flat[start:stop]
            _check_table(segment, full.offset + 4 * (full.rows + 1), table, size)
            found.append(table)
        else:
            found.append(np.zeros(1, "<u4"))
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

    for at in range(0, segment.rows, _ROWS):
        starts, stops = table[at : at + _ROWS], table[at + 1 : at + _ROWS + 1]
        starts = starts[: len(stops)]
        wrong = (stops < starts) | ((stops - starts) & 3 != 0)
        if wrong.any():
            row = at + int(np.argmax(wrong))
            before, after = int(table[row]), int(table[row + 1])
            goes = "falls" if after < before else "cuts an element"
            raise corrupt(f"{goes}: from {before} to {after} at row {row}", before, after)
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


def counts_of(table: Array, out: Array | None = None) -> Array:
    """Number of values of each row, by its table; int64, or into `out`."""
    counts = np.empty(len(table) - 1, np.int64) if out is None else out
    for at in range(0, len(counts), _ROWS):
        stops = table[at + 1 : at + _ROWS + 1]
        counts[at : at + len(stops)] = (stops - table[at : at + len(stops)]) >> 2
    return counts


def parts_of(
    files: Files,
    segments: Sequence[Segment],
    layouts: Mapping[Kind, Layout],
    pieces: Sequence[Piece],
    deadline: Deadline,
) -> list[Part]:
    """The rows of a window, with the tables of these rows alone."""
    rows = [cut(segments[which], start, stop) for which, start, stop in pieces]
    is_csr = [layouts[one.dtype, one.shape] == "csr" for one in rows]
    csr = [one for one, yes in zip(rows, is_csr, strict=True) if yes]
    whole = [segments[piece[0]] for piece, yes in zip(pieces, is_csr, strict=True) if yes]
    read = iter(tables(files, csr, deadline, whole))
    return [Part(one, next(read) if yes else None) for one, yes in zip(rows, is_csr, strict=True)]


def parts_and_width(
    files: Files,
    segments: Sequence[Segment],
    layouts: Mapping[Kind, Layout],
    pieces: Sequence[Piece],
    deadline: Deadline,
) -> tuple[list[Part], int]:
    """The rows of a window, and the width that holds every row of `segments`, outside it too.

    Ranks must agree on the width, so all tables are read, once.
    """
    width = max([1, *(shape[0] for (_, shape), layout in layouts.items() if layout == "padded")])
    csr = [i for i, one in enumerate(segments) if layouts[one.dtype, one.shape] == "csr"]
    read = dict(zip(csr, tables(files, [segments[i] for i in csr], deadline), strict=True))
    for entries in read.values():
        for at in range(0, len(entries) - 1, _ROWS):
            width = max(width, int(counts_of(entries[at : at + _ROWS + 1]).max()))
    parts = []
    for which, start, stop in pieces:
        segment, table = segments[which], read.get(which)
        if table is not None:
            table = table[start - segment.pos : stop - segment.pos + 1]
        parts.append(Part(cut(segment, start, stop), table))
    return parts, width


def whole(parts: Sequence[Part], rows: int) -> tuple[Segment, int, int] | None:
    """The segment, first byte and length of the values, if one CSR segment has all `rows`."""
    if len(parts) != 1:
        return None
    segment, table = parts[0]
    if table is None or segment.rows != rows or table[0] == table[-1]:
        return None
    return segment, int(table[0]), int(table[-1]) - int(table[0])


def offsets_of(
    files: Files, parts: Sequence[Part], lo: int, hi: int, fill: float | None, deadline: Deadline
) -> Array:
    """``[hi - lo + 1]`` int64: where the values of each row of a window start."""
    offsets = allocate((hi - lo + 1,), np.dtype(np.int64), files.max_bytes, "a window")
    offsets[:] = 0
    for segment, table in parts:
        counts = offsets[1 + segment.pos - lo : 1 + segment.end - lo]
        if table is not None:
            counts_of(table, counts)
            continue
        for first, block in _padded(files, segment, deadline):
            counts[first : first + len(block)] = Ragged.from_padded(block, fill).counts
    return np.cumsum(offsets, out=offsets)


def gather(
    files: Files,
    parts: Sequence[Part],
    lo: int,
    offsets: Array,
    dtype: np.dtype[Any],
    fill: float | None,
    deadline: Deadline,
) -> Array:
    """Return the values of all rows in one fresh array, each copied once."""
    values = allocate((int(offsets[-1]),), dtype, files.max_bytes, "a ragged window")
    reads: list[Read] = []
    total = 0
    for segment, table in parts:
        at = int(offsets[segment.pos - lo])
        if table is not None:
            nbytes = int(table[-1]) - int(table[0])
            total += nbytes
            if nbytes:
                reads.append((segment.file, int(table[0]), nbytes, at * values.itemsize))
            continue
        for first, block in _padded(files, segment, deadline):
            kept = Ragged.from_padded(block, fill).values
            fit(segment, first, kept, dtype)
            values[at : at + len(kept)] = kept
            at += len(kept)
    run(files, reads, bytes_of(values), total, deadline=deadline)
    files.counts["bytes_copied"] += values.nbytes
    return values


def scatter(
    files: Files,
    parts: Sequence[Part],
    lo: int,
    out: Array,
    dtype: np.dtype[Any],
    fill: float | None,
    deadline: Deadline,
) -> None:
    """Write the rows into padded `out`, ``[hi - lo, width]``; padding is left alone."""
    tasks = []
    total = 0
    for part in parts:
        rows = out[part.segment.pos - lo : part.segment.end - lo]
        if part.table is not None:
            total += int(part.table[-1]) - int(part.table[0])
            tasks.append(
                partial(_scatter_csr, files, part.segment, part.table, rows, dtype, deadline)
            )
        else:
            total += part.segment.rows * part.segment.row_nbytes
            tasks.append(partial(_scatter_padded, files, part.segment, rows, fill, deadline))
    if tasks:
        paths = {part.segment.file for part in parts}
        spread(files, tasks, files.helpers(len(paths), parts[0].segment.file, total))
    files.counts["bytes_copied"] += total


def _scatter_csr(
    files: Files,
    segment: Segment,
    table: Array,
    rows: Array,
    dtype: np.dtype[Any],
    deadline: Deadline,
) -> None:
    start, stop = int(table[0]), int(table[-1])
    if start == stop:
        return
    fd, _, _ = files.open_read(segment.file, start, stop, deadline)
    try:
        scratch = np.empty(0, dtype)
        row = 0
        while row < segment.rows:
            # Rows whose values fill the scratch buffer, or one row that is larger.
            ahead = table[row : row + _ROWS + 1]
            until = int(np.searchsorted(ahead, int(table[row]) + SCRATCH, "right")) - 1
            end = row + min(max(until, 1), len(ahead) - 1)
            count = (int(table[end]) - int(table[row])) >> 2
            if count > scratch.size:
                scratch = allocate((count,), dtype, files.max_bytes, f"field {segment.field!r}")
            values = scratch[:count]
            files.read_open(fd, segment.file, int(table[row]), bytes_of(values), deadline=deadline)
            fit(segment, row, values, rows.dtype)
            _store(rows[row:end], counts_of(table[row : end + 1]), values)
            row = end
    finally:
        os.close(fd)


def _scatter_padded(
    files: Files, segment: Segment, rows: Array, fill: float | None, deadline: Deadline
) -> None:
    for first, block in _padded(files, segment, deadline):
        kept = Ragged.from_padded(block, fill)
        fit(segment, first, kept.values, rows.dtype)
        _store(rows[first : first + len(block)], kept.counts, kept.values)


def _store(rows: Array, counts: Array, values: Array) -> None:
    """Put values into the leading entries of rows, with at most `SCRATCH` bytes besides."""
    width = rows.shape[1]
    step = max(1, SCRATCH // 4 // max(1, width))
    columns = np.arange(width, dtype=np.int32)
    flat = rows.reshape(-1)  # shares memory: rows are C-contiguous
    at = 0
    for first in range(0, len(rows), step):
        some = counts[first : first + step]
        ends = np.cumsum(some)
        count = int(ends[-1])
        if count * _SPARSE < len(some) * width:
            begins = np.arange(first, first + len(some)) * width - ends + some
            places = np.repeat(begins, some)
            places += np.arange(count)
            flat[places] = values[at : at + count]
        else:
            rows[first : first + step][columns < some[:, None]] = values[at : at + count]
        at += count


def _padded(files: Files, segment: Segment, deadline: Deadline) -> Iterator[tuple[int, Array]]:
    """Yield (first row, rows) of a padded segment, so few that what is made of them is small too."""
    return blocks(files, segment, segment.offset, segment.rows, deadline, SCRATCH // 4)
