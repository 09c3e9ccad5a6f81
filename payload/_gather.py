"""Bytes from files straight into an array, each copied once, by pread: never out of a map.

A file that shrinks while it is read is then a typed error instead of a signal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from ._cast import NUMPY, allocate, check_fits
from ._files import Files
from .errors import PayloadCorruptError
from .segment import Segment

Array = np.ndarray[Any, Any]
Read = tuple[int, int, int]  # bytes [offset, offset + nbytes) of a file belong at byte `at`
Convert = tuple[Segment, int, Array]  # rows of a segment from `skip` on belong in this array

SCRATCH = 1 << 20  # bytes a thread holds for converting, besides the result
_IOV_MAX = 1024  # buffers one preadv takes


def bytes_of(array: Array) -> memoryview:
    """Return a C-contiguous array as flat bytes, sharing memory."""
    return array.reshape(-1).view(np.uint8).data


def add_read(reads: list[Read], read: Read) -> None:
    """Note a read of a file; one that continues the last, there and in the result, joins it."""
    if reads:
        offset, nbytes, at = reads[-1]
        if offset + nbytes == read[0] and at + nbytes == read[2]:
            reads[-1] = offset, nbytes + read[1], at
            return
    reads.append(read)


def run(
    files: Files,
    reads: dict[str, list[Read]],
    out: memoryview,
    total: int,
    converts: dict[str, list[Convert]] | None = None,
) -> dict[str, int]:
    """Carry out what each file owes the result, on threads where that pays.

    Parameters
    ----------
    reads : dict of path to list of Read
        Bytes for `out`.
    total : int
        Bytes to read in all.
    converts : dict of path to list of Convert, optional
        Rows that change dtype or are narrower than the result's.

    Returns
    -------
    dict of str to int
        Size in bytes of each file of `reads`.
    """
    sizes: dict[str, int] = {}
    whole, rows = list(reads.items()), list(converts.items()) if converts else []
    # Shared by the threads: whoever is free takes the next file.
    whole_left, rows_left = iter(whole), iter(rows)

    def work() -> None:
        try:
            _read_files(files, whole_left, out, sizes)
            scratch = None
            for _, wanted in rows_left:
                if scratch is None:
                    scratch = np.empty(SCRATCH, np.uint8)
                for segment, skip, into in wanted:
                    _convert(files, segment, skip, into, scratch)
        except BaseException:
            whole.clear()  # nobody needs the rest
            rows.clear()
            raise

    files.on_threads(work, len(whole) + len(rows), total)
    files.counts["bytes_read"] += total
    return sizes


def _read_files(
    files: Files, left: Iterator[tuple[str, list[Read]]], out: memoryview, sizes: dict[str, int]
) -> None:
    reads = 0
    open_file, preadv, close = files.open_read, os.preadv, os.close
    for path, wanted in left:
        if len(wanted) == 1:  # thousands of small files: no call that can be spared
            offset, nbytes, at = wanted[0]
            fd, size, _ = open_file(path, offset, offset + nbytes)
            part = out[at : at + nbytes]
            try:
                if preadv(fd, (part,), offset) != nbytes:
                    files.fill(fd, path, offset, part)
            except OSError as error:
                raise files.refused(path, error) from None
            finally:
                close(fd)
            reads += 1
        else:
            wanted.sort()
            stop = max(offset + nbytes for offset, nbytes, _ in wanted)
            fd, size, _ = open_file(path, wanted[0][0], stop)
            try:
                for first, parts in _neighbours(wanted):
                    files.fill(fd, path, first, *[out[at : at + n] for _, n, at in parts])
                    reads += 1
            finally:
                os.close(fd)
        sizes[path] = size
    files.counts["reads"] += reads


def _neighbours(wanted: list[Read]) -> Iterator[tuple[int, list[Read]]]:
    """Group sorted reads that follow each other in the file: one preadv scatters them."""
    parts: list[Read] = []
    first = stop = -1
    for read in wanted:
        if read[0] != stop or len(parts) == _IOV_MAX:
            if parts:
                yield first, parts
            parts, first = [], read[0]
        parts.append(read)
        stop = read[0] + read[1]
    yield first, parts


def _convert(files: Files, segment: Segment, skip: int, out: Array, scratch: Array) -> None:
    """Fill rows of `out` from row `skip` of `segment` on, changing dtype or widening rows.

    Narrower rows go into the leading entries of each dimension; the rest of `out` is left alone.
    """
    inner = out[(slice(None), *(slice(size) for size in segment.shape))]
    for first, block in blocks(files, segment, skip, len(out), NUMPY[segment.dtype], scratch):
        fit(segment, skip + first, block, out.dtype)
        inner[first : first + len(block)] = block


def blocks(
    files: Files,
    segment: Segment,
    skip: int,
    rows: int,
    dtype: np.dtype[Any],
    scratch: Array | None = None,
) -> Iterator[tuple[int, Array]]:
    """Yield (first row, rows) from row `skip` on, at most `SCRATCH` bytes or one row at a time.

    The yielded array is overwritten by the next one.
    """
    row_nbytes = segment.row_nbytes
    if not row_nbytes or not rows:
        return
    step = min(rows, max(1, SCRATCH // row_nbytes))
    offset = segment.offset + skip * row_nbytes
    # Opened first: a row as large as that must be in the file before it gets memory.
    fd, _, _ = files.open_read(segment.file, offset, offset + rows * row_nbytes)
    try:
        if scratch is None or scratch.nbytes < step * row_nbytes:
            what = f"field {segment.field!r}"
            scratch = allocate((step * row_nbytes,), np.dtype(np.uint8), files.max_bytes, what)
        buffer = scratch[: step * row_nbytes].view(dtype).reshape(step, *segment.shape)
        for first in range(0, rows, step):
            block = buffer[: min(step, rows - first)]
            files.fill(fd, segment.file, offset + first * row_nbytes, bytes_of(block))
            files.counts["reads"] += 1
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
