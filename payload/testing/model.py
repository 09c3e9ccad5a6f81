"""What a window means, written for reading and not for speed: one position after the other.

The oracle of our property tests, and of yours. It knows nothing of files that are late, short or
hostile; it is given their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..fields import FIELDS, Field
from ..segment import Segment

Array = np.ndarray[Any, Any]
Files = Mapping[str, bytes]


def is_csr(segment: Segment, field: Field) -> bool:
    """Whether a segment of a field is a table of offsets."""
    return field.ragged and segment.shape == ()


def row(files: Files, segment: Segment, index: int, field: Field) -> Array:
    """Row `index` of a segment; without the padding, if the field is ragged."""
    content = files[segment.file]
    if is_csr(segment, field):
        table = segment.offset + 4 * index
        start = int.from_bytes(content[table : table + 4], "little")
        stop = int.from_bytes(content[table + 4 : table + 8], "little")
        return np.frombuffer(content[start:stop], field.dtype)
    nbytes = segment.row_nbytes
    start = segment.offset + index * nbytes
    values = np.frombuffer(content[start : start + nbytes], segment.dtype).reshape(segment.shape)
    if field.ragged:
        last = max((i for i, value in enumerate(values) if value != field.fill), default=-1)
        return values[: last + 1]
    return values


def rows(
    files: Files, segments: Sequence[Segment], name: str, lo: int, hi: int, field: Field
) -> list[Array | None]:
    """The row of each position of [lo, hi), None where no segment covers it; the last one wins."""
    last: list[Segment | None] = [None] * (hi - lo)
    for segment in segments:
        if segment.field == name:
            for position in range(max(lo, segment.pos), min(hi, segment.end)):
                last[position - lo] = segment
    return [
        None if segment is None else row(files, segment, position - segment.pos, field)
        for position, segment in enumerate(last, lo)
    ]


def window(
    files: Files,
    segments: Sequence[Segment],
    name: str,
    lo: int,
    hi: int,
    *,
    fill: float,
    dtype: Any = None,
    fields: Mapping[str, Field] = FIELDS,
) -> Array | None:
    """What ``Resolver.window(..., holes="any")`` gives, or None."""
    mine = [segment for segment in segments if segment.field == name]
    if not mine:
        return None
    field = fields.get(name, Field())
    if field.ragged:
        width = 1
        for segment in mine:
            if is_csr(segment, field):
                lengths = [len(row(files, segment, i, field)) for i in range(segment.rows)]
                width = max([width, *lengths])
            else:
                width = max(width, segment.shape[0])
        shape: tuple[int, ...] = (width,)
        dtype = dtype or field.dtype
    else:
        shape = tuple(max(sizes) for sizes in zip(*[s.shape for s in mine], strict=True))
        dtype = dtype or np.result_type(*[segment.dtype for segment in mine])
    out = np.full((hi - lo, *shape), fill, dtype)
    for position, values in enumerate(rows(files, segments, name, lo, hi, field)):
        if values is not None:
            leading: tuple[Any, ...] = tuple(slice(size) for size in values.shape)
            out[(position, *leading)] = values
    return out
