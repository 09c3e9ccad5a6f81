"""Which rows of which segment land where in a window: integers only, before any file is opened."""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from .errors import CoverageError, SegmentError
from .fields import Field
from .segment import Segment

Layout = Literal["fixed", "padded", "csr"]
Holes = Literal["none", "any"] | Iterable[tuple[int, int]]

_UNKNOWN = Field()


Kind = tuple[str, tuple[int, ...]]  # dtype and row shape of a segment
Piece = tuple[int, int, int]  # (which segment of the list, first token position, one past the last)


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
            f"segment of {segment.field!r} has rows of {segment.shape} {segment.dtype}: {need}",
            reason="layout",
            field=segment.field,
            path=segment.file,
        )
    return found


def layouts_of(segments: Sequence[Segment], field: Field) -> dict[Kind, Layout]:
    """The layout of each kind of segment in a list of one field."""
    kinds = {(segment.dtype, segment.shape): segment for segment in segments}
    return {kind: layout_of(segment, field) for kind, segment in kinds.items()}


def widest(field: str, kinds: Sequence[Kind]) -> tuple[int, ...]:
    """Row shape that holds the rows of all `kinds`.

    Raises
    ------
    SegmentError
        When their rows differ in the number of dimensions.
    """
    shapes = [shape for _, shape in kinds]
    for shape in shapes:
        if len(shape) != len(shapes[0]):
            raise SegmentError(
                f"segments of {field!r} have rows of {len(shapes[0])} and of {len(shape)} dimensions "
                f"({shapes[0]} and {shape}): one field needs one number",
                reason="row_ranks",
                field=field,
                expected=len(shapes[0]),
                actual=len(shape),
            )
    return tuple(map(max, zip(*shapes, strict=True))) if len(shapes) > 1 else shapes[0]


def pieces(segments: Sequence[Segment], lo: int, hi: int) -> list[Piece]:
    """Cut the window [lo, hi) into pieces, ascending; of overlapping segments the later one wins."""
    found: list[Piece] = []
    reached = lo
    for which, segment in enumerate(segments):
        start = segment.pos
        stop = start + segment.rows
        if start < lo:
            start = lo
        if stop > hi:
            stop = hi
        if start >= stop:
            continue
        if start < reached:
            return _overlapping(segments, lo, hi)
        found.append((which, start, stop))
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
        which = -active[0][0]
        if found and found[-1][0] == which and found[-1][2] == start:
            found[-1] = which, found[-1][1], stop
        else:
            found.append((which, start, stop))
    return found


def layers_of(layers: Any, num_layers: Any) -> tuple[tuple[int, ...] | None, int]:
    """Return the layers to read, None for all, and how many there are.

    Raises
    ------
    ValueError, TypeError
        The caller's mistake: no `num_layers`, a layer that is not one of them, or one named twice.
    """
    if num_layers is None:
        raise ValueError(
            "layers needs num_layers, how many layers the model has, dense ones included: of ids "
            "alone nobody can tell whether the array has a slot for each of them"
        )
    count = operator.index(num_layers)
    if count < 1:
        raise ValueError(f"num_layers is {count}: needs at least 1")
    if layers is None:
        return None, count
    asked = list(layers)
    if any(isinstance(layer, bool) for layer in asked):
        raise TypeError("layers has booleans: needs layer ids")
    ids = tuple(operator.index(layer) for layer in asked)
    for layer in ids:
        if not 0 <= layer < count:
            raise ValueError(
                f"layers has {layer}: needs ids from 0 to {count - 1}, num_layers is {count}"
            )
    if len(set(ids)) < len(ids):
        twice = next(layer for layer in ids if ids.count(layer) > 1)
        raise ValueError(
            f"layers has {len(ids)} ids, {len(set(ids))} of them different: {twice} twice"
        )
    return None if ids == tuple(range(count)) else ids, count


def check_layers(field: str, kinds: Iterable[Kind], num_layers: int) -> None:
    """Refuse segments that do not have a slot for each layer of the model.

    Raises
    ------
    SegmentError
        An array of the MoE layers alone, or with the layers of a draft model behind, must not be
        read by the ids of the model's layers.
    """
    for _, shape in kinds:
        if not shape or shape[0] != num_layers:
            has = f"{shape[0]} layers" if shape else "no layers"
            raise SegmentError(
                f"field {field!r} has {has} in rows of {shape}, the model has {num_layers}: which slot is "
                "which layer is not known",
                reason="layers",
                field=field,
                expected=num_layers,
                actual=shape[0] if shape else 0,
            )


def runs(ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cut ids into runs of neighbours: (place among `ids`, first id, how many)."""
    found: list[tuple[int, int, int]] = []
    for place, one in enumerate(ids):
        if found and one == found[-1][1] + found[-1][2]:
            found[-1] = *found[-1][:2], found[-1][2] + 1
        else:
            found.append((place, one, 1))
    return found


def cut(segment: Segment, start: int, stop: int) -> Segment:
    """Return the rows of `segment` at the token positions [start, stop) as a segment."""
    if (start, stop) == (segment.pos, segment.end):
        return segment
    offset = segment.offset + (start - segment.pos) * segment.row_nbytes
    return msgspec.structs.replace(
        segment, offset=offset, pos=start, rows=stop - start, length=None
    )


def joined(segments: Sequence[Segment]) -> list[Segment]:
    """Return the same rows with neighbours joined: segments that follow on in file and position.

    Holds for tables too: what follows on in a table is a later part of the same one.
    """
    found: list[Segment] = []
    last: Segment | None = None
    rows = 0
    for segment in segments:
        if (
            last is not None
            and segment.rows
            and segment.pos == last.pos + rows
            and segment.file == last.file
            and segment.offset == last.offset + rows * last.row_nbytes
            and (segment.dtype, segment.shape) == (last.dtype, last.shape)
            and segment.length is None
        ):
            rows += segment.rows
            continue
        if last is not None:
            found.append(last if rows == last.rows else msgspec.structs.replace(last, rows=rows))
        last, rows = segment, segment.rows
        if segment.length is not None or not segment.rows:
            found.append(segment)  # a length holds for these rows alone
            last = None
    if last is not None:
        found.append(last if rows == last.rows else msgspec.structs.replace(last, rows=rows))
    return found


def holes_of(found: Sequence[Piece], lo: int, hi: int) -> list[tuple[int, int]]:
    """Positions of [lo, hi) that ascending pieces leave uncovered."""
    holes = []
    for _, start, stop in found:
        if start > lo:
            holes.append((lo, start))
        lo = stop
    if lo < hi:
        holes.append((lo, hi))
    return holes


def holes_allowed(holes: Any, known: Field) -> list[tuple[int, int]] | None:
    """Return the ranges that may be uncovered, None if any may be.

    Raises
    ------
    ValueError, TypeError
        When `holes` is not "none", "any" or a list of (lo, hi).
    """
    if holes is None:
        holes = "any" if known.sparse else "none"
    if isinstance(holes, str):
        if holes == "any":
            return None
        if holes == "none":
            return []
    else:
        try:
            pairs = [(operator.index(lo), operator.index(hi)) for lo, hi in holes]
        except (TypeError, ValueError):
            pairs = [(1, 0)]
        if all(lo <= hi for lo, hi in pairs):
            return _joined(sorted(pairs))
    raise ValueError(f"holes is {holes!r}: needs 'none', 'any' or a list of (lo, hi)")


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for lo, hi in ranges:
        if joined and lo <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], hi)
        else:
            joined.append((lo, hi))
    return joined


def check_coverage(
    missing: list[tuple[int, int]], field: str, allowed: list[tuple[int, int]], lo: int, hi: int
) -> None:
    """Refuse uncovered positions of [lo, hi) that are not in `allowed`.

    Raises
    ------
    CoverageError
        It lists the gaps. Judged on one range for all ranks, every rank comes to the same verdict.
    """
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


def _subtract(ranges: list[tuple[int, int]], taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What of ascending `ranges` is in none of the ascending `taken`; each is looked at once."""
    left = []
    at = 0
    for start, stop in ranges:
        while at < len(taken) and taken[at][1] <= start:
            at += 1
        ahead = at
        while start < stop and ahead < len(taken) and taken[ahead][0] < stop:
            lo, hi = taken[ahead]
            if lo > start:
                left.append((start, lo))
            start = max(start, hi)
            ahead += 1
        if start < stop:
            left.append((start, stop))
        at = max(at, ahead - 1)
    return left
