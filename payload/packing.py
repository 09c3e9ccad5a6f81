"""Samples into a micro batch, and which of its tokens a context-parallel rank needs. Pure."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex

import msgspec

from .segment import Segment, clip, decode_segments, shift

Window = tuple[int, int]


class Sample(msgspec.Struct, frozen=True):
    """One sample on its way into a micro batch.

    Attributes
    ----------
    num_tokens : int
        Tokens of the sample, prompt included, before the cut.
    payload : object
        Its segments, or what `decode_segments` takes; positions count from the sample's first token.
    cut : int or None
        Tokens kept, if the sample is truncated.
    """

    num_tokens: int
    payload: Any = None
    cut: int | None = None


class MicroBatch(msgspec.Struct, frozen=True):
    """Samples packed into one bin, in order.

    Attributes
    ----------
    segments : list of Segment
        Positions count from the first token of the bin.
    num_tokens : int
        Tokens of the bin, padding included.
    holes : list of (lo, hi)
        Positions known to have no row: the last token of each sample, which was never forwarded,
        and the padding. Made for ``Resolver.window(..., holes=)``.
    starts : list of int
        Position of the first token of each sample.
    """

    segments: list[Segment]
    num_tokens: int
    holes: list[Window]
    starts: list[int]


def pack(samples: Iterable[Sample], *, pad_to: int | None = None) -> MicroBatch:
    """Pack samples into a micro batch: clip each to its cut, shift it behind those before.

    Parameters
    ----------
    samples : iterable of Sample
    pad_to : int, optional
        Tokens of the bin; the rest is padding. Default: none.

    Returns
    -------
    MicroBatch

    Raises
    ------
    ValueError
        When a cut is longer than its sample, segments reach past the end of theirs, or the samples
        do not fit `pad_to`.
    SegmentError
        When a segment is illegal.

    Examples
    --------
    >>> turn = Segment("routed_experts", "/p/a", 0, 0, 6, "uint8", (4, 2))
    >>> batch = pack([Sample(7, [turn]), Sample(7, [turn], cut=3)], pad_to=12)
    >>> [(s.pos, s.rows) for s in batch.segments], batch.holes
    ([(0, 6), (7, 3)], [(6, 7), (10, 12)])
    """
    segments: list[Segment] = []
    holes: list[Window] = []
    starts: list[int] = []
    at = 0
    for number, sample in enumerate(samples):
        total = operator.index(sample.num_tokens)
        kept = total if sample.cut is None else operator.index(sample.cut)
        if not 0 <= kept <= total:
            raise ValueError(f"sample {number} has a cut of {kept}: needs 0 to its {total} tokens")
        decoded = decode_segments(sample.payload)
        for segment in decoded:
            if segment.end > total:
                raise ValueError(
                    f"sample {number} has {total} tokens, a segment of {segment.field!r} ends at "
                    f"{segment.end}: its positions do not count from the sample's first token"
                )
        segments += shift(clip(decoded, 0, kept), at)
        starts.append(at)
        at += kept
        if kept and kept == total:  # a cut one ends in a token that was forwarded
            holes.append((at - 1, at))
    if pad_to is not None:
        end = operator.index(pad_to)
        if end < at:
            raise ValueError(f"samples have {at} tokens, pad_to is {end}")
        if end > at:
            holes.append((at, end))
        at = end
    return MicroBatch(segments, at, _joined(holes), starts)


def cp_window(
    n: SupportsIndex,
    rank: SupportsIndex,
    size: SupportsIndex,
    kind: Literal["inputs", "labels", "sequence"],
    layout: Literal["contiguous", "zigzag"] = "contiguous",
) -> list[Window]:
    """Token positions of a micro batch that a context-parallel rank needs rows for.

    Parameters
    ----------
    n : int
        Tokens of the micro batch; a multiple of `size`, of ``2 * size`` for zigzag.
    rank, size : int
        The rank, and how many there are.
    kind : {"inputs", "labels", "sequence"}
        ``"inputs"`` are the positions of the rank's tokens. ``"labels"`` are those of the tokens
        it predicts, one further; past the end there is none, so the last window may be a row
        shorter. ``"sequence"`` is the whole micro batch. ``FIELDS[field].window`` names the kind.
    layout : {"contiguous", "zigzag"}
        One chunk a rank, or two: the `rank`-th from the front and from the back.

    Returns
    -------
    list of (lo, hi)
        Half-open windows in the order of the rank's tokens.

    Raises
    ------
    ValueError
        When `n` does not divide, or `rank` is not below `size`.

    Examples
    --------
    >>> cp_window(8, 1, 2, "inputs"), cp_window(8, 1, 2, "labels")
    ([(4, 8)], [(5, 8)])
    >>> cp_window(8, 0, 2, "inputs", "zigzag"), cp_window(8, 0, 2, "labels", "zigzag")
    ([(0, 2), (6, 8)], [(1, 3), (7, 8)])
    """
    n, rank, size = operator.index(n), operator.index(rank), operator.index(size)
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank is {rank} of {size}: needs 0 to {size - 1}")
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f"layout is {layout!r}: needs 'contiguous' or 'zigzag'")
    if kind not in ("inputs", "labels", "sequence"):
        raise ValueError(f"kind is {kind!r}: needs 'inputs', 'labels' or 'sequence'")
    chunks = size if layout == "contiguous" else 2 * size
    if n < 0 or n % chunks:
        raise ValueError(f"n is {n}: needs a multiple of {chunks} for {size} ranks, {layout}")
    if kind == "sequence":
        return [(0, n)]
    length = n // chunks
    mine = [rank] if layout == "contiguous" else [rank, chunks - 1 - rank]
    ahead = kind == "labels"
    return [
        (min(chunk * length + ahead, n), min((chunk + 1) * length + ahead, n)) for chunk in mine
    ]


def _joined(holes: list[Window]) -> list[Window]:
    """Join holes that touch."""
    joined: list[Window] = []
    for lo, hi in holes:
        if joined and joined[-1][1] == lo:
            joined[-1] = joined[-1][0], hi
        else:
            joined.append((lo, hi))
    return joined
