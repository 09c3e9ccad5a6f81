"""Bytes from files straight into an array, each copied once, by pread: never out of a map.

A file that shrinks while it is read is then a typed error instead of a signal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ._cast import NUMPY, allocate, check_fits
from ._files import Deadline, Files
from .errors import PayloadCorruptError
from .segment import Segment

Array = np.ndarray[Any, Any]
Read = tuple[str, int, int, int]  # bytes [offset, offset + nbytes) of a file belong at byte `at`


class Convert(NamedTuple):
    """Rows of a segment, from byte `offset` on, that belong in `into`; of each row these layers."""

    segment: Segment
    offset: int
    into: Array
    layers: list[int] | slice | None = None  # None: all
    row: int = 0  # number of the first one, for errors


SCRATCH = 1 << 20  # bytes a thread holds for converting, besides the result
_PART = 2 << 20  # bytes of one file that a thread takes at a time
_READ_MAX = 0x7FFF_F000  # bytes one preadv reads
_IOV_MAX = 1024  # buffers one preadv takes


def bytes_of(array: Array) -> memoryview:
    """Return a C-contiguous array as flat bytes, sharing memory."""
    return array.reshape(-1).view(np.uint8).data


def run(
    files: Files,
    reads: list[Read],
    out: memoryview,
    total: int,
    converts: dict[str, list[Convert]] | None = None,
    sizes: dict[str, int] | None = None,
    deadline: Deadline | None = None,
) -> None:
    """Carry out what each file owes the result, on threads where that pays.

    Parameters
    ----------
    reads : list of Read
        Bytes for `out`.
    total : int
        Bytes to read in all.
    converts : dict of path to list of Convert, optional
        Rows that change dtype, are narrower than the result's, or of which some layers are wanted.
    sizes : dict of path to int, optional
        Takes the size in bytes of each file of `reads`.
    deadline : Deadline, optional
        Of the call this is part of.
    """
    if not reads and not converts:
        return
    deadline = deadline or Deadline()
    paths = {read[0] for read in reads}
    one = reads[0][0] if reads else next(iter(converts or ()))
    count = len(paths) + len(converts or ())
    threads = files.helpers(count, one, total)
    # Threads take files; one large file they share.
    across, within = (threads, 1) if count > 1 else (1, threads)
    # Shares of neighbours, so that two threads seldom meet in one huge page of the result; whoever
    # is free takes the next.
    shares: list[Callable[[], None]] = []
    one_each = len(paths) == len(reads) and total <= _READ_MAX
    if one_each and within < 2 and not files.verify and sizes is None:
        shares += [
            partial(_read_singly, files, out, deadline, some) for some in _shares(reads, across)
        ]
    else:
        grouped = list(_by_file(reads).items())
        shares += [
            partial(_read, files, out, sizes, deadline, within, some)
            for some in _shares(grouped, across)
        ]
    if converts:
        rows = list(converts.items())
        shares += [
            partial(_convert_all, files, deadline, within, some) for some in _shares(rows, across)
        ]
    spread(files, shares, across)


def spread(files: Files, tasks: Iterable[Callable[[], None]], threads: int) -> None:
    """Carry out tasks on as many threads; whoever is free takes the next, the first error ends all."""
    if threads < 2:
        for task in tasks:
            task()
        return
    left = list(tasks)
    following = iter(left)

    def work() -> None:
        try:
            for task in following:
                task()
        except BaseException:
            left.clear()  # nobody needs the rest
            raise

    files.threads.run(work, min(threads, len(left)))


def _shares(items: list[Any], threads: int) -> list[list[Any]]:
    size = max(1, -(-len(items) // (4 * threads))) if threads > 1 else max(1, len(items))
    return [items[at : at + size] for at in range(0, len(items), size)]


def _by_file(reads: list[Read]) -> dict[str, list[Read]]:
    """Group reads by file, ascending; what follows on in the file and in the result is one read."""
    grouped: dict[str, list[Read]] = {}
    for path, offset, nbytes, at in sorted(reads, key=itemgetter(1)):
        wanted = grouped.setdefault(path, [])
        if wanted:
            _, last, length, place = wanted[-1]
            if last + length == offset and place + length == at:
                wanted[-1] = path, last, length + nbytes, place
                continue
        wanted.append((path, offset, nbytes, at))
    return grouped


def _read_singly(files: Files, out: memoryview, deadline: Deadline, reads: list[Read]) -> None:
    """Carry out one read a file: thousands of small files, so no call that can be spared."""
    try_open, preadv, close = files.try_open, os.preadv, os.close
    for path, offset, nbytes, at in reads:
        part = out[at : at + nbytes]
        got = 0
        try:
            fd, _, _ = try_open(path)
            try:
                got = preadv(fd, (part,), offset)
            finally:
                close(fd)
        except OSError:
            pass  # not there yet, gone stale, or worse: below it is waited for, or named
        if got != nbytes:
            files.read(path, offset, part, deadline=deadline)
    files.counts["reads"] += len(reads)
    files.counts["opens"] += len(reads)
    files.counts["bytes_read"] += sum(map(itemgetter(2), reads))


def _read(
    files: Files,
    out: memoryview,
    sizes: dict[str, int] | None,
    deadline: Deadline,
    threads: int,
    grouped: list[tuple[str, list[Read]]],
) -> None:
    for path, wanted in grouped:
        stop = max(offset + nbytes for _, offset, nbytes, _ in wanted)
        fd, size, _ = files.open_read(path, wanted[0][1], stop, deadline)
        try:
            tasks = (
                partial(_scatter, files, fd, path, out, deadline, first, parts)
                for first, parts in (_neighbours(wanted) if threads < 2 else _cut(wanted))
            )
            spread(files, tasks, threads)
        finally:
            os.close(fd)
        if sizes is not None:
            sizes[path] = size


def _scatter(
    files: Files,
    fd: int,
    path: str,
    out: memoryview,
    deadline: Deadline,
    first: int,
    parts: list[Read],
) -> None:
    buffers = [out[at : at + n] for _, _, n, at in parts]
    files.read_open(fd, path, first, *buffers, deadline=deadline)


def _neighbours(wanted: list[Read]) -> Iterator[tuple[int, list[Read]]]:
    """Group sorted reads that follow each other in the file: one preadv scatters them."""
    parts: list[Read] = []
    first = stop = -1
    for read in wanted:
        _, offset, nbytes, _ = read
        if offset != stop or len(parts) == _IOV_MAX:
            if parts:
                yield first, parts
            parts, first = [], offset
        parts.append(read)
        stop = offset + nbytes
    yield first, parts


def _cut(wanted: list[Read]) -> Iterator[tuple[int, list[Read]]]:
    """As `_neighbours`, in parts that threads can share."""
    for first, parts in _neighbours(wanted):
        group: list[Read] = []
        begin, size = first, 0
        for path, offset, nbytes, place in parts:
            for at in range(0, nbytes, _PART):
                length = min(_PART, nbytes - at)
                if group and size + length > _PART:
                    yield begin, group
                    group, begin, size = [], offset + at, 0
                group.append((path, offset + at, length, place + at))
                size += length
        yield begin, group


def _convert_all(
    files: Files, deadline: Deadline, threads: int, wanted_of: list[tuple[str, list[Convert]]]
) -> None:
    """Fill rows that are not as they are in the file, each thread through one scratch buffer."""
    # Of several threads each checks its rows through arrays of their own; smaller is as fast.
    scratch = SCRATCH if threads < 2 else SCRATCH // 4
    for path, wanted in wanted_of:
        start = min(one.offset for one in wanted)
        stop = max(one.offset + len(one.into) * one.segment.row_nbytes for one in wanted)
        fd, _, _ = files.open_read(path, start, stop, deadline)
        try:
            tasks = [
                partial(_convert, files, fd, deadline, scratch, some)
                for some in ([wanted] if threads < 2 else _shares(_cut_rows(wanted), threads))
            ]
            spread(files, tasks, threads)
        finally:
            os.close(fd)


def _cut_rows(wanted: list[Convert]) -> list[Convert]:
    """Long runs of rows in parts that threads can share."""
    found = []
    for segment, offset, rows, layers, row in wanted:
        row_nbytes = segment.row_nbytes
        step = max(1, _PART // max(1, row_nbytes))
        found += [
            Convert(segment, offset + at * row_nbytes, rows[at : at + step], layers, row + at)
            for at in range(0, len(rows), step)
        ]
    return found


def _convert(files: Files, fd: int, deadline: Deadline, nbytes: int, wanted: list[Convert]) -> None:
    """Fill rows of one open file; narrower ones fill the leading entries of each dimension alone."""
    scratch = np.empty(nbytes, np.uint8)
    for segment, offset, rows, layers, row in wanted:
        leading: tuple[Any, ...] = tuple(slice(size) for size in segment.shape)
        inner = rows[(slice(None), *leading)]
        for first, block in _blocks(files, fd, segment, offset, len(rows), deadline, scratch):
            some = block if layers is None else block[:, layers]
            fit(segment, row + first, some, rows.dtype)
            inner[first : first + len(block)] = some


def blocks(
    files: Files, segment: Segment, offset: int, rows: int, deadline: Deadline, scratch: int
) -> Iterator[tuple[int, Array]]:
    """Yield (first row, rows) of `segment` from byte `offset` on, `scratch` bytes or one row at a time.

    The yielded array is overwritten by the next one.
    """
    nbytes = rows * segment.row_nbytes
    if not nbytes:
        return
    # Opened first: a row as large as that must be in the file before it gets memory.
    fd, _, _ = files.open_read(segment.file, offset, offset + nbytes, deadline)
    try:
        buffer = np.empty(min(scratch, nbytes), np.uint8)
        yield from _blocks(files, fd, segment, offset, rows, deadline, buffer)
    finally:
        os.close(fd)


def _blocks(
    files: Files,
    fd: int,
    segment: Segment,
    offset: int,
    rows: int,
    deadline: Deadline,
    scratch: Array,
) -> Iterator[tuple[int, Array]]:
    row_nbytes = segment.row_nbytes
    if not row_nbytes:
        return
    step = min(rows, max(1, scratch.nbytes // row_nbytes))
    if scratch.nbytes < step * row_nbytes:
        what = f"field {segment.field!r}"
        scratch = allocate((step * row_nbytes,), np.dtype(np.uint8), files.max_bytes, what)
    flat = scratch[: step * row_nbytes].view(NUMPY[segment.dtype])
    buffer = flat.reshape(step, *segment.shape)
    for first in range(0, rows, step):
        block = buffer[: min(step, rows - first)]
        at = offset + first * row_nbytes
        files.read_open(fd, segment.file, at, bytes_of(block), deadline=deadline)
        yield first, block


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
