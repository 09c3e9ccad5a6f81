"""Bytes from files straight into an array, each copied once, by pread: never out of a map.

A file that shrinks while it is read is then a typed error instead of a signal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ._cast import NUMPY, check_fits
from ._files import Files
from .errors import PayloadCorruptError
from .segment import Segment

Array = np.ndarray[Any, Any]

SCRATCH = 1 << 20  # bytes a conversion holds besides the result


class Read(NamedTuple):
    """Bytes ``[offset, offset + nbytes)`` of a file that belong at byte `at` of the result."""

    path: str
    offset: int
    nbytes: int
    at: int


def bytes_of(array: Array) -> memoryview:
    """Return a C-contiguous array as flat bytes, sharing memory."""
    return array.reshape(-1).view(np.uint8).data


def read(files: Files, reads: Sequence[Read], out: memoryview) -> dict[str, int]:
    """Carry out `reads` into `out`; return the size in bytes of each file that was opened."""
    by_file: dict[str, list[Read]] = {}
    for one in reads:
        if one.nbytes:
            by_file.setdefault(one.path, []).append(one)
    sizes = {}
    for path, wanted in by_file.items():
        sizes[path] = _read_file(files, path, wanted, out)
    return sizes


def _read_file(files: Files, path: str, wanted: list[Read], out: memoryview) -> int:
    start = min(one.offset for one in wanted)
    fd, size, _ = files.open(path, start, max(one.offset + one.nbytes for one in wanted))
    try:
        offset = stop = at = -1
        for one in wanted:
            if one.offset == stop and one.at == at + stop - offset:
                stop += one.nbytes  # neighbours in the file and in the result: one read
                continue
            if stop > offset:
                files.fill(fd, path, offset, out[at : at + stop - offset])
            offset, stop, at = one.offset, one.offset + one.nbytes, one.at
        files.fill(fd, path, offset, out[at : at + stop - offset])
    finally:
        os.close(fd)
    return size


def convert(files: Files, segment: Segment, skip: int, out: Array) -> None:
    """Fill the rows of `out` from row `skip` of `segment` on, changing dtype or widening rows.

    Narrower rows go into the leading entries of each dimension; the rest of `out` is left alone.
    """
    inner = out[(slice(None), *(slice(size) for size in segment.shape))]
    dtype = NUMPY[segment.dtype]
    for first, block in blocks(files, segment, skip, len(out), dtype):
        fit(segment, skip + first, block, out.dtype)
        inner[first : first + len(block)] = block


def blocks(
    files: Files, segment: Segment, skip: int, rows: int, dtype: np.dtype[Any]
) -> Iterator[tuple[int, Array]]:
    """Yield (first row, rows) from row `skip` on, at most `SCRATCH` bytes or one row at a time.

    The yielded array is overwritten by the next one.
    """
    row_nbytes = segment.row_nbytes
    if not row_nbytes or not rows:
        return
    step = min(rows, max(1, SCRATCH // row_nbytes))
    scratch = np.empty((step, *segment.shape), dtype)
    offset = segment.offset + skip * row_nbytes
    fd, _, _ = files.open(segment.file, offset, offset + rows * row_nbytes)
    try:
        for first in range(0, rows, step):
            block = scratch[: min(step, rows - first)]
            files.fill(fd, segment.file, offset + first * row_nbytes, bytes_of(block))
            yield first, block
    finally:
        os.close(fd)


def fit(segment: Segment, row: int, block: Array, target: np.dtype[Any]) -> None:
    """Refuse `block`, rows of `segment` from `row` on, if `target` cannot hold it."""
    try:
        check_fits(block, target)
    except ValueError as error:
        raise PayloadCorruptError(
            f"field {segment.field!r} of {segment.file!r} cannot be read as {target}: {error}, in rows "
            f"[{row}, {row + len(block)}); ask for a wider dtype",
            reason="narrowing",
            field=segment.field,
            path=segment.file,
        ) from None
