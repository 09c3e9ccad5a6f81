"""Hypothesis strategies for payloads: legal segment lists over the bytes of files.

They draw what is easily forgotten: overlaps, holes, rows of no bytes, segments of no rows, unaligned
offsets, several files, several segments of one range, mixed widths and dtypes, clipped tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from ..dtypes import DTYPES
from ..fields import FIELDS
from ..segment import Segment, clip

PREFIX = "/prefix"
MAX_POSITION = 24
FILE_SIZE = 400  # holds the largest segment drawn: 5 rows of 3 x 3 items of 8 bytes
# Any two of a group have a common type that holds both exactly.
GROUPS = (
    ("uint8", "uint16"),
    ("uint8", "int8", "int16", "uint32", "int64"),
    ("uint64", "uint16"),
    ("float16", "float32", "uint16"),
    ("bool", "uint8"),
    ("float64",),
)


@st.composite
def fixed(draw: st.DrawFn, field: str = "routed_experts") -> tuple[dict[str, bytes], list[Segment]]:
    """Files by their names on the wire, and segments of one fixed field."""
    files = {
        f"{PREFIX}/v{i}/f{i}.bin": draw(st.binary(min_size=FILE_SIZE, max_size=FILE_SIZE))
        for i in range(draw(st.integers(1, 3)))
    }
    dtypes = draw(st.sampled_from(GROUPS))
    ndim = draw(st.integers(0, 2))
    segments = []
    for _ in range(draw(st.integers(1, 7))):
        path = draw(st.sampled_from(sorted(files)))
        dtype = draw(st.sampled_from(dtypes))
        shape = tuple(draw(st.lists(st.integers(0, 3), min_size=ndim, max_size=ndim)))
        if (dtype, shape) == ("uint32", ()):
            dtype = "uint16" if "uint16" in dtypes else "uint8"  # else it would be a table
        rows = draw(st.integers(0, 5))
        size = rows * int(np.prod(shape)) * DTYPES[dtype].itemsize
        offset = draw(st.integers(0, FILE_SIZE - size))
        pos = draw(st.integers(0, MAX_POSITION))
        segments.append(Segment(field, path, offset, pos, rows, dtype, shape))
    if dtypes[0] == "bool":  # a byte that is no bool is not a legal file
        files = {path: bytes(byte & 1 for byte in content) for path, content in files.items()}
    return files, segments


@st.composite
def ragged(draw: st.DrawFn, field: str = "sampling_mask") -> tuple[dict[str, bytes], list[Segment]]:
    """Files by their names on the wire, and CSR and padded segments of one ragged field."""
    known = FIELDS[field]
    value = st.integers(0, 2**31 - 1) if known.fill == -1 else st.floats(-100, 0, width=32)
    files: dict[str, bytes] = {}
    segments: list[Segment] = []
    for i in range(draw(st.integers(1, 3))):
        path = f"{PREFIX}/v{i}/f{i}.bin"
        content = draw(st.binary(max_size=5))
        for _ in range(draw(st.integers(1, 3))):
            lists = draw(st.lists(st.lists(value, max_size=4), max_size=5))
            pos = draw(st.integers(0, MAX_POSITION))
            if draw(st.booleans()):
                segment, content = _csr(field, path, pos, lists, content, str(known.dtype))
            else:
                segment, content = _padded(draw, field, path, pos, lists, content)
            segments.append(segment)
            if draw(st.booleans()) and segment.rows:
                lo = draw(st.integers(pos, segment.end))
                segments += clip([segment], lo, draw(st.integers(lo, segment.end)))
            content += draw(st.binary(max_size=5))
        files[path] = content
    return files, draw(st.permutations(segments))


def _csr(
    field: str, path: str, pos: int, lists: list[list[Any]], content: bytes, dtype: str
) -> tuple[Segment, bytes]:
    offset = len(content)
    start = offset + 4 * (len(lists) + 1)
    counts = [len(values) for values in lists]
    table = start + 4 * np.cumsum([0, *counts])
    flat = np.array([value for values in lists for value in values], dtype)
    content += table.astype("<u4").tobytes() + flat.tobytes()
    return Segment(field, path, offset, pos, len(lists), "uint32", ()), content


def _padded(
    draw: st.DrawFn, field: str, path: str, pos: int, lists: list[list[Any]], content: bytes
) -> tuple[Segment, bytes]:
    known = FIELDS[field]
    width = max([len(values) for values in lists], default=0) + draw(st.integers(0, 2))
    array = np.full((len(lists), width), known.fill, known.dtype)
    for i, values in enumerate(lists):
        array[i, : len(values)] = values
    segment = Segment(field, path, len(content), pos, len(lists), str(known.dtype), (width,))
    return segment, content + array.tobytes()
