"""What a payload file holds, and what is wrong with it: for the command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, Literal

import msgspec
import numpy as np
import xxhash

from ._files import Files
from ._gather import Array, bytes_of
from ._verify import header_of
from .format import Header, Tensor

_BLOCK: Final = 1 << 20  # bytes read at a time
_NOTES: Final = (".pos", ".xxh3_64")  # metadata of ours, by the end of the key

Read = Callable[[int, memoryview], None]  # fills a buffer from a byte of the file on
Checksum = Literal["ok", "differs", "none"]


class SideArray(msgspec.Struct):
    """One side array of a file, as its header lists it and as its bytes are.

    Attributes
    ----------
    field, kind, dtype, shape, rows
        Shape of one row; dtype of the values and shape ``()`` for a ragged one.
    pos, end : int or None
        Token positions [pos, end); None if the header has none.
    start, stop : int
        Bytes [start, stop) in the file, table included.
    values, longest_row : int or None
        Of a ragged one: number of values, and of the longest row; None if the table is broken.
    checksum : {"ok", "differs", "none"}
    """

    field: str
    kind: Literal["fixed", "ragged"]
    dtype: str
    shape: tuple[int, ...]
    rows: int
    pos: int | None
    start: int
    stop: int
    values: int | None = None
    longest_row: int | None = None
    checksum: Checksum = "none"

    @property
    def end(self) -> int | None:
        """Token position after the last row."""
        return None if self.pos is None else self.pos + self.rows

    @property
    def nbytes(self) -> int:
        """Bytes in the file, table included."""
        return self.stop - self.start


class Contents(msgspec.Struct):
    """What a look into a file found: its header, arrays, what is wrong, and what is suspicious."""

    path: str
    nbytes: int
    header: Header | None = None
    arrays: list[SideArray] = []
    problems: list[str] = []
    doubts: list[str] = []


def examine(files: Files, path: str) -> Contents:
    """Look at everything a file holds; only what its header promises is read, in blocks.

    Raises
    ------
    PayloadError
        When the file cannot be read, or its header is damaged.
    """
    fd, size, _ = files.open(path, 0, 0)
    try:
        return _contents(lambda at, out: files.fill(fd, path, at, out), path, size)
    finally:
        os.close(fd)


def _contents(read: Read, path: str, size: int) -> Contents:
    header = header_of(read, path, size)
    found = Contents(path, size, header)
    if header is None:
        return found
    for name, tensor in header.tensors.items():
        field, dot, part = name.rpartition(".")
        if not dot or part not in ("offsets", "values"):
            _add_fixed(found, read, header, name, tensor)
        elif part == "offsets" and f"{field}.values" in header.tensors:
            _add_ragged(found, read, header, field, tensor, header.tensors[f"{field}.values"])
        elif f"{field}.offsets" not in header.tensors or part == "offsets":
            other = "values" if part == "offsets" else "offsets"
            found.problems.append(f"field {field!r} has {part} and no {other}")
    known = {array.field for array in found.arrays}
    for key in header.metadata:
        for note in _NOTES:
            field = key.removesuffix(note)
            if field != key and field not in known:
                found.problems.append(f"header has {key!r} and no such side array")
    return found


def _add_fixed(found: Contents, read: Read, header: Header, field: str, tensor: Tensor) -> None:
    if not tensor.shape:
        found.problems.append(f"field {field!r} has no axis that counts rows")
        return
    rows, shape = tensor.shape[0], tensor.shape[1:]
    array = SideArray(field, "fixed", tensor.dtype, shape, rows, None, tensor.start, tensor.stop)
    found.arrays.append(array)
    filled = _check_notes(found, read, header, array, [(tensor.start, tensor.stop)])
    if tensor.start == tensor.stop:
        return
    if not filled:
        found.doubts.append(f"field {field!r}: every byte is zero")
    elif rows > 1 and _repeats(read, tensor.start, tensor.stop, array.nbytes // rows):
        found.doubts.append(f"field {field!r}: all {rows} rows are equal")


def _add_ragged(
    found: Contents, read: Read, header: Header, field: str, table: Tensor, values: Tensor
) -> None:
    rows = table.shape[0] - 1 if table.shape else -1
    start, stop = min(table.start, values.start), max(table.stop, values.stop)
    array = SideArray(field, "ragged", values.dtype, (), max(rows, 0), None, start, stop)
    found.arrays.append(array)
    filled = _check_notes(
        found, read, header, array, [(table.start, table.stop), (values.start, values.stop)]
    )
    if table.dtype != "uint32" or len(table.shape) != 1 or rows < 0:
        wanted = "needs rows + 1 uint32 offsets"
        found.problems.append(
            f"table of {field!r} is {table.dtype} of shape {table.shape}: {wanted}"
        )
        return
    if len(values.shape) != 1 or values.stop - values.start != 4 * values.shape[0]:
        wanted = "needs one axis of 4-byte values"
        found.problems.append(
            f"field {field!r} has {values.dtype} values of shape {values.shape}: {wanted}"
        )
        return
    array.values = values.shape[0]
    shortest, longest, problem = _look_at_table(read, table, values)
    if problem:
        found.problems.append(f"table of {field!r} {problem}")
    if longest is None:
        return
    array.longest_row = longest
    if values.stop - values.start == 0:
        return
    if not filled:
        found.doubts.append(f"field {field!r}: every byte of its values is zero")
    elif (
        rows > 1 and shortest == longest and _repeats(read, values.start, values.stop, 4 * longest)
    ):
        found.doubts.append(f"field {field!r}: all {rows} rows are equal")


def _look_at_table(read: Read, table: Tensor, values: Tensor) -> tuple[int, int | None, str | None]:
    """Return the shortest row, the longest (None if the table is broken), and what is wrong."""
    entries = table.shape[0]
    first = last = _entry(read, table.start)
    shortest, longest = 2**32, 0
    step = _BLOCK // 4
    for at in range(0, entries - 1, step):
        block = np.empty(min(step, entries - 1 - at) + 1, "<u4")
        read(table.start + 4 * at, bytes_of(block))
        counts: Array = np.diff(block.astype(np.int64))
        wrong = (counts < 0) | (counts & 3 != 0)
        if wrong.any():
            row = at + int(np.argmax(wrong))
            before, after = int(block[row - at]), int(block[row - at + 1])
            goes = "falls" if after < before else "cuts an element"
            return 0, None, f"{goes}: from {before} to {after} at row {row}"
        shortest, longest = min(shortest, int(counts.min())), max(longest, int(counts.max()))
        last = int(block[-1])
    problem = None
    says, are = f"[{first}, {last})", f"[{values.start}, {values.stop})"
    if last - first != values.stop - values.start:
        return 0, None, f"says its values are bytes {says}, the header says {are}"
    if first != values.start:
        problem = (
            f"says its values are bytes {says}, they are {are}: another tool saved the file and moved "
            "them; by this file rows start at (t - t[0]) // 4"
        )
    elif table.stop != values.start:
        problem = f"ends at byte {table.stop}, its values begin at {values.start}: needs no gap"
    return shortest // 4, longest // 4, problem


def _entry(read: Read, at: int) -> int:
    word = bytearray(4)
    read(at, memoryview(word))
    return int.from_bytes(word, "little")


def _check_notes(
    found: Contents, read: Read, header: Header, array: SideArray, parts: list[tuple[int, int]]
) -> bool:
    """Take the position, compare the checksum; say if the last part has a bit set."""
    field = array.field
    pos = header.metadata.get(f"{field}.pos", "")
    if pos.isascii() and pos.isdigit() and len(pos) < 20:
        array.pos = int(pos)
    else:
        found.problems.append(
            f"field {field!r} has {pos!r} for a position: needs that of its first row"
        )
    expected = header.metadata.get(f"{field}.xxh3_64")
    state, filled = xxhash.xxh3_64(), False
    scratch = memoryview(bytearray(min(_BLOCK, array.nbytes)))
    for start, stop in parts:
        filled = False
        for at in range(start, stop, _BLOCK):
            block = scratch[: min(_BLOCK, stop - at)]
            read(at, block)
            state.update(block)
            filled = filled or bool(np.frombuffer(block, np.uint8).any())
    if expected is None:
        found.doubts.append(f"field {field!r}: no checksum, which our writer would have left")
    else:
        array.checksum = "ok" if state.hexdigest() == expected else "differs"
    if array.checksum == "differs":
        found.problems.append(
            f"field {field!r} has checksum {state.hexdigest()}, the writer's was {expected}: the file "
            "was changed, or its pages were lost"
        )
    return filled


def _repeats(read: Read, start: int, stop: int, nbytes: int) -> bool:
    """Whether bytes [start, stop) are the first `nbytes` of them over and over."""
    size = min(_BLOCK, stop - start)
    here, before = memoryview(bytearray(size)), memoryview(bytearray(size))
    for at in range(start + nbytes, stop, _BLOCK):
        count = min(_BLOCK, stop - at)
        read(at, here[:count])
        read(at - nbytes, before[:count])
        if here[:count] != before[:count]:
            return False
    return True


def reader(root: str) -> Files:
    """Open files beneath one directory: no link followed, nothing mapped, nothing waited for."""
    return Files(root, "copy", 0.0, False, None, None)


def metadata_of(header: Header) -> dict[str, str]:
    """What the caller of the writer added."""
    return {
        key: value
        for key, value in header.metadata.items()
        if key != "format" and not key.endswith(_NOTES)
    }
