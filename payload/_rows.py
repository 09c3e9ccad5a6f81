"""Fixed rows of a window, from segments of one or several kinds into one array.

Each range is one read, or rows that are converted, or layers of rows; what nobody wrote is filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ._files import Deadline, Files
from ._gather import Array, Convert, Read, bytes_of, run
from ._plan import Kind, Piece, holes_of, runs
from .segment import Segment

# Bytes of a row that cost as much to read and leave out as another read: measured on tmpfs and
# ext4, and what a network moves in the time of one request.
_SKIPPED, _SKIPPED_REMOTELY = 32_768, 1_048_576


def gather(
    files: Files,
    wanted: Sequence[Segment],
    kinds: Sequence[Kind],
    found: Sequence[Piece],
    lo: int,
    result: Array,
    layers: tuple[int, ...] | None,
    deadline: Deadline,
) -> None:
    """Read the rows of a window that segments cover into `result`, where all fit; or layers of them."""
    if layers is not None:
        _gather_layers(files, wanted, found, lo, result, layers, deadline)
        return
    row_nbytes = result[:1].nbytes
    shape, name = result.shape[1:], result.dtype.name
    reads: list[Read] = []
    converts: dict[str, list[Convert]] = {}
    copied = 0
    one_kind = len(kinds) == 1 and kinds[0] == (name, shape)
    for which, start, stop in found:
        segment = wanted[which]
        skip, rows = start - segment.pos, stop - start
        if one_kind or (segment.dtype == name and segment.shape == shape):
            nbytes = rows * row_nbytes
            offset = segment.offset + skip * row_nbytes
            reads.append((segment.file, offset, nbytes, (start - lo) * row_nbytes))
            copied += nbytes
        else:
            offset = segment.offset + skip * segment.row_nbytes
            into = result[start - lo : stop - lo]
            converts.setdefault(segment.file, []).append(Convert(segment, offset, into))
            copied += rows * segment.row_nbytes
    run(files, reads, bytes_of(result), copied, converts, deadline=deadline)
    files.counts["bytes_copied"] += copied


def _gather_layers(
    files: Files,
    wanted: Sequence[Segment],
    found: Sequence[Piece],
    lo: int,
    result: Array,
    layers: tuple[int, ...],
    deadline: Deadline,
) -> None:
    """As `gather`, of each row the layers alone: read alone where what is skipped is long."""
    ranges = runs(layers)
    index = slice_of(ranges[0]) if len(ranges) == 1 else list(layers)
    reads: list[Read] = []
    converts: dict[str, list[Convert]] = {}
    row_nbytes = result[:1].nbytes
    total = copied = 0
    for which, start, stop in found:
        segment = wanted[which]
        offset = segment.offset + (start - segment.pos) * segment.row_nbytes
        into = result[start - lo : stop - lo]
        layer = segment.row_nbytes // segment.shape[0]
        nbytes = len(into) * len(layers) * layer
        copied += nbytes
        skipped = _SKIPPED if files.is_local(segment.file) else _SKIPPED_REMOTELY
        if segment.row_nbytes - len(layers) * layer < skipped * len(ranges):
            convert = Convert(segment, offset, into, index)
            converts.setdefault(segment.file, []).append(convert)
            total += len(into) * segment.row_nbytes
            continue
        total += nbytes
        same = segment.dtype == result.dtype.name and segment.shape[1:] == result.shape[2:]
        for place, first, count in ranges:
            at = (start - lo) * row_nbytes + place * layer
            part = msgspec.structs.replace(segment, shape=(count, *segment.shape[1:]))
            for row in range(len(into)):
                begin = offset + row * segment.row_nbytes + first * layer
                if same:
                    reads.append((segment.file, begin, count * layer, at + row * row_nbytes))
                else:
                    rows = into[row : row + 1, place : place + count]
                    convert = Convert(part, begin, rows, None, row)
                    converts.setdefault(segment.file, []).append(convert)
    run(files, reads, bytes_of(result), total, converts, deadline=deadline)
    files.counts["bytes_copied"] += copied


def slice_of(run: tuple[int, int, int]) -> slice:
    """A run of layers as an index."""
    _, first, count = run
    return slice(first, first + count)


def fill_gaps(
    wanted: Sequence[Segment],
    found: Sequence[Piece],
    lo: int,
    hi: int,
    result: Array,
    filling: Any,
) -> None:
    """Fill uncovered rows, and what rows narrower than the result's lack."""
    for start, stop in holes_of(found, lo, hi):
        result[start - lo : stop - lo] = filling
    shape = result.shape[1:]
    for which, start, stop in found:
        for axis, size in enumerate(wanted[which].shape):
            if size < shape[axis]:
                before = (slice(start - lo, stop - lo), *[slice(None)] * axis, slice(size, None))
                result[before] = filling
