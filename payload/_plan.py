"""Which rows of which segment land where in a window: integers only, before any file is opened."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from .errors import CoverageError, SegmentError
from .fields import Field
from .segment import Segment, gaps, window

Layout = Literal["fixed", "padded", "csr"]
Holes = Literal["none", "any"] | Iterable[tuple[int, int]]

_UNKNOWN = Field()


class Piece(NamedTuple):
    """Rows of one segment, by place in the list, that fill token positions [start, stop)."""

    which: int
    start: int
    stop: int


def field_of(name: str, fields: Mapping[str, Field]) -> Field:
    """What is known of a side array; an unknown one reads as fixed, without a default fill."""
    return fields.get(name, _UNKNOWN)


def layout_of(segment: Segment, field: Field) -> Layout:
    """How the rows of a checked segment lie in the file.

    Raises
    ------
    SegmentError
        When dtype and shape fit no layout of the field.
    """
    found: Layout | None = None
    if field.ragged:
        if len(segment.shape) == 1:
            found = "padded"
        elif not segment.shape and segment.row_nbytes == 4:
            found = "csr"
    elif segment.shape or segment.dtype != "uint32":
        found = "fixed"
    if found is None:
        need = (
            "a ragged field needs row shape () with a 4-byte dtype, or one dimension"
            if field.ragged
            else "that is a table of offsets, and the field is not known as ragged: pass fields="
        )
        raise SegmentError(
            f"segment of {segment.field!r} has rows of {segment.shape} {segment.dtype}: {need} - at $.shape",
            reason="layout",
            field=segment.field,
            path=segment.file,
        )
    return found


def widest(segments: Sequence[Segment]) -> tuple[int, ...]:
    """Row shape that holds the rows of all `segments`.

    Raises
    ------
    SegmentError
        When their rows differ in the number of dimensions.
    """
    shapes = list(dict.fromkeys(segment.shape for segment in segments))
    for shape in shapes:
        if len(shape) != len(shapes[0]):
            raise SegmentError(
                f"segments of {segments[0].field!r} have rows of {len(shapes[0])} and of {len(shape)} "
                f"dimensions ({shapes[0]} and {shape}): one field needs one number",
                reason="row_ranks",
                field=segments[0].field,
                expected=len(shapes[0]),
                actual=len(shape),
            )
    return tuple(map(max, zip(*shapes, strict=True))) if len(shapes) > 1 else shapes[0]


def pieces(segments: Sequence[Segment], lo: int, hi: int) -> list[Piece]:
    """Cut the window [lo, hi) into pieces, ascending; of overlapping segments the later one wins."""
    found: list[Piece] = []
    reached = lo
    for index, segment in enumerate(segments):
        start, stop = segment.pos, segment.pos + segment.rows
        if start < lo:
            start = lo
        if stop > hi:
            stop = hi
        if start >= stop:
            continue
        if start < reached:
            return _overlapping(segments, lo, hi)
        found.append(Piece(index, start, stop))
        reached = stop
    return found


def _overlapping(segments: Sequence[Segment], lo: int, hi: int) -> list[Piece]:
    """As `pieces`, for any order: sweep over the edges with the latest segment on top of a heap."""
    runs = []
    for index, segment in enumerate(segments):
        start, stop = max(segment.pos, lo), min(segment.end, hi)
        if start < stop:
            runs.append((start, stop, index))
    runs.sort()
    found: list[Piece] = []
    active: list[tuple[int, int]] = []  # (-index, stop)
    edges = sorted({edge for start, stop, _ in runs for edge in (start, stop)})
    opened = 0
    for start, stop in itertools.pairwise(edges):
        while opened < len(runs) and runs[opened][0] <= start:
            heapq.heappush(active, (-runs[opened][2], runs[opened][1]))
            opened += 1
        while active and active[0][1] <= start:
            heapq.heappop(active)
        if not active:
            continue
        index = -active[0][0]
        if found and found[-1].which == index and found[-1].stop == start:
            found[-1] = found[-1]._replace(stop=stop)
        else:
            found.append(Piece(index, start, stop))
    return found


def holes_of(found: Sequence[Piece], lo: int, hi: int) -> list[tuple[int, int]]:
    """Positions of [lo, hi) that ascending pieces leave uncovered."""
    holes = []
    for piece in found:
        if piece.start > lo:
            holes.append((lo, piece.start))
        lo = piece.stop
    if lo < hi:
        holes.append((lo, hi))
    return holes


def check_coverage(
    segments: Sequence[Segment], field: str, known: Field, holes: Any, lo: int, hi: int
) -> list[tuple[int, int]]:
    """Return the uncovered positions of [lo, hi), refusing those that `holes` does not allow.

    Raises
    ------
    CoverageError
        It lists the gaps. Judged on one range for all ranks, every rank comes to the same verdict.
    """
    missing = gaps(segments, field, lo, hi)
    if holes is None:
        holes = "any" if known.sparse else "none"
    if holes == "any" or not missing:
        return missing
    allowed: list[tuple[int, int]] = []
    if holes != "none":
        if isinstance(holes, str):
            raise ValueError(f"holes is {holes!r}: needs 'none', 'any' or a list of (lo, hi)")
        allowed = sorted(window(*hole) for hole in holes)
    refused = _subtract(missing, allowed)
    if refused:
        rows = sum(stop - start for start, stop in refused)
        shown = ", ".join(f"[{start}, {stop})" for start, stop in refused[:5])
        more = f" and {len(refused) - 5} more ranges" if len(refused) > 5 else ""
        raise CoverageError(
            f"field {field!r} has {rows} of {hi - lo} rows uncovered in [{lo}, {hi}): {shown}{more}; "
            "pass holes= and fill= if they are meant to be missing",
            field=field,
            expected=hi - lo,
            actual=refused,
        )
    return missing


def _subtract(ranges: list[tuple[int, int]], taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
    left = []
    for start, stop in ranges:
        for a, b in taken:
            if b <= start or a >= stop:
                continue
            if a > start:
                left.append((start, a))
            start = max(start, b)
            if start >= stop:
                break
        if start < stop:
            left.append((start, stop))
    return left
