"""Comparing side arrays with the checksums their writer left in the header."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from .errors import PayloadCorruptError
from .format import FORMAT, MAX_HEADER, SUFFIX, Header, checksums, decode_header

_BLOCK = 1 << 20  # bytes read at a time

Fill = Callable[[int, memoryview], None]  # fills a buffer from a byte of the file on


def compare(fill: Fill, path: str, size: int, start: int, stop: int) -> list[tuple[int, int]]:
    """Compare the checksums of the side arrays that bytes [start, stop) belong to.

    Parameters
    ----------
    fill : callable
        Reads the file: ``fill(offset, buffer)``.
    path, size
        The file's name and bytes.

    Returns
    -------
    list of (int, int)
        The bytes that were compared. All of the file if it has no header and is none of ours:
        upstream's files have no checksums.

    Raises
    ------
    PayloadCorruptError
        When one differs, the header is damaged, or no side array has those bytes.
    """
    header = header_of(fill, path, size)
    if header is None:
        return [(0, size)]
    scratch = memoryview(bytearray(min(_BLOCK, size)))
    reached, compared = start, []
    for begin, end, digest in sorted(checksums(header, path)):
        if begin >= stop or end <= start:
            continue
        state = xxhash.xxh3_64()
        for at in range(begin, end, _BLOCK):
            block = scratch[: min(_BLOCK, end - at)]
            fill(at, block)
            state.update(block)
        if state.hexdigest() != digest:
            raise PayloadCorruptError(
                f"bytes [{begin}, {end}) of {path!r} have checksum {state.hexdigest()}, the writer's was "
                f"{digest}: the file was changed, or its pages were lost",
                reason="checksum",
                path=path,
                offset=begin,
                expected=digest,
                actual=state.hexdigest(),
            )
        if begin <= reached:
            reached = max(reached, end)
        compared.append((begin, end))
    if reached < stop:
        raise PayloadCorruptError(
            f"bytes [{reached}, {stop}) of {path!r} belong to no side array its header lists",
            reason="header",
            path=path,
            offset=reached,
        )
    return compared


def header_of(fill: Fill, path: str, size: int) -> Header | None:
    """Return the header of a file, None if it is none of ours.

    Raises
    ------
    PayloadCorruptError
        When the header does not fit the file, or the name says that there must be one.
    """
    head = bytearray(min(size, 8))
    fill(0, memoryview(head))
    data = bytearray(min(size, 8 + int.from_bytes(head, "little"), 8 + MAX_HEADER))
    fill(0, memoryview(data))
    header = decode_header(bytes(data), path, size)
    if header is None and path.endswith(SUFFIX):
        raise PayloadCorruptError(
            f"file {path!r} has no header of {FORMAT!r}: it was damaged, or saved by another tool",
            reason="header",
            path=path,
        )
    return header
