"""Every window of every payload is what the naive model says, in map and copy mode."""

import itertools
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from payload import (
    FIELDS,
    CoverageError,
    Ragged,
    Resolver,
    Segment,
    Writer,
    clip,
    cp_window,
    gaps,
    pack,
    shift,
)
from payload.packing import Sample
from payload.testing import model, strategies

BOUNDS = st.tuples(st.integers(-3, 32), st.integers(-3, 32)).map(sorted)
MODES = st.sampled_from(["map", "copy"])


def place(files: dict[str, bytes], root: str) -> None:
    for path, content in files.items():
        local = Path(root + path.removeprefix(strategies.PREFIX))
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_bytes(content)


def open_resolver(root: str, mode: str) -> Resolver:
    return Resolver({strategies.PREFIX: root}, mode=mode)


@given(strategies.fixed(), BOUNDS, MODES, st.integers(0, 1))
def test_a_fixed_window_is_what_the_model_says(drawn, bounds, mode: str, fill: int) -> None:
    files, segments = drawn
    lo, hi = bounds
    want = model.window(files, segments, "routed_experts", lo, hi, fill=fill)
    with tempfile.TemporaryDirectory() as root, open_resolver(root, mode) as resolver:
        place(files, root)
        options: Any = {"fill": fill, "holes": "any"}
        got = resolver.window(segments, "routed_experts", lo, hi, **options)
        np.testing.assert_array_equal(got, want, strict=True)
        out = np.full(want.shape, 77).astype(want.dtype)
        assert resolver.read_into(segments, "routed_experts", lo, hi, out, **options) is out
        np.testing.assert_array_equal(out, want, strict=True)
        # Splitting the window anywhere gives the same rows, with the same shape and dtype.
        middle = (lo + hi) // 2
        parts = [
            resolver.window(segments, "routed_experts", a, b, extent=(lo, hi), **options)
            for a, b in ((lo, middle), (middle, hi))
        ]
        np.testing.assert_array_equal(np.concatenate(parts), want, strict=True)
        if want.dtype.kind in "iu" and want.size and want.max() <= 2**53 and want.min() >= -(2**53):
            wide = resolver.window(segments, "routed_experts", lo, hi, dtype="float64", **options)
            np.testing.assert_array_equal(wide, want.astype(np.float64), strict=True)
        uncovered = gaps(segments, "routed_experts", lo, hi)
        if uncovered:
            with pytest.raises(CoverageError) as caught:
                resolver.window(segments, "routed_experts", lo, hi, fill=fill)
            assert caught.value.actual == uncovered
        allowed = resolver.window(segments, "routed_experts", lo, hi, fill=fill, holes=uncovered)
        np.testing.assert_array_equal(allowed, want, strict=True)


@pytest.mark.parametrize("field", ["sampling_mask", "sampling_mask_logprobs"])
@given(data=st.data(), bounds=BOUNDS, mode=MODES)
def test_a_ragged_window_is_what_the_model_says(field: str, data, bounds, mode: str) -> None:
    files, segments = data.draw(strategies.ragged(field))
    lo, hi = bounds
    known = FIELDS[field]
    want = model.window(files, segments, field, lo, hi, fill=known.fill)
    rows = model.rows(files, segments, field, lo, hi, known)
    with tempfile.TemporaryDirectory() as root, open_resolver(root, mode) as resolver:
        place(files, root)
        padded = resolver.window(segments, field, lo, hi)
        np.testing.assert_array_equal(padded, want, strict=True)
        got = resolver.ragged(segments, field, lo, hi)
        assert got.values.dtype == known.dtype
        assert got.offsets.dtype == np.int64
        assert [row.tolist() for row in got] == [[] if r is None else r.tolist() for r in rows]
        narrow = resolver.ragged([s for s in segments if s.rows], field, lo, hi)
        assert narrow is None or narrow.counts.tolist() == got.counts.tolist()
        if gaps(segments, field, lo, hi):
            with pytest.raises(CoverageError):
                resolver.ragged(segments, field, lo, hi, holes="none")


@given(strategies.fixed(), BOUNDS, MODES, st.integers(0, 1))
def test_a_window_that_threads_share_is_what_the_model_says(
    drawn, bounds, mode: str, fill: int
) -> None:
    files, segments = drawn
    want = model.window(files, segments, "routed_experts", *bounds, fill=fill)
    with tempfile.TemporaryDirectory() as root, open_resolver(root, mode) as resolver:
        place(files, root)
        with (
            mock.patch.multiple("payload._files", THREADED_PART=1, THREADED_FILE=1, _CPUS=2),
            mock.patch("payload._gather._PART", 7),
        ):
            got = resolver.window(segments, "routed_experts", *bounds, fill=fill, holes="any")
        np.testing.assert_array_equal(got, want, strict=True)


@given(strategies.fixed(), st.data())
def test_clip_and_shift_change_no_row(drawn, data) -> None:
    files, segments = drawn
    lo, hi = sorted(data.draw(st.tuples(st.integers(0, 30), st.integers(0, 30))))
    by = data.draw(st.integers(0, 9))
    moved = shift(clip(segments, lo, hi), by)
    rows = model.rows(files, segments, "routed_experts", lo, hi, FIELDS["routed_experts"])
    got = model.rows(files, moved, "routed_experts", lo + by, hi + by, FIELDS["routed_experts"])
    assert [r if r is None else r.tobytes() for r in got] == [
        r if r is None else r.tobytes() for r in rows
    ]
    assert all(lo + by <= s.pos <= s.end <= hi + by for s in moved)
    assert {s.field for s in moved} == {s.field for s in segments}


@given(st.data())
def test_our_own_files_give_back_what_was_written(data) -> None:
    """Arrays of several fields and turns, written by our Writer, stitched into one window."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    dtype = data.draw(st.sampled_from(["uint8", "uint16", "int32"]))
    mode = data.draw(MODES)
    total = sum(lengths)
    experts = rng.integers(0, 200, (total, 2, 3)).astype(dtype)
    masks = [rng.integers(0, 99, rng.integers(0, 4)).tolist() for _ in range(total)]
    with tempfile.TemporaryDirectory() as root:
        writer, segments, at = Writer(root), [], 0
        for length in lengths:
            arrays = {
                "routed_experts": (at, experts[at : at + length]),
                "sampling_mask": (at, Ragged.from_lists(masks[at : at + length])),
            }
            segments += writer.write(arrays, payload_dir="v1")
            at += length
        # The model follows byte offsets, as upstream's reader does, and knows no header.
        files = {segment.file: Path(segment.file).read_bytes() for segment in segments}
        for field, fill in (("routed_experts", 0), ("sampling_mask", -1)):
            want = model.window(files, segments, field, 0, total, fill=fill)
            with Resolver(root) as resolver:
                got = resolver.window(segments, field, 0, total, fill=fill)
            np.testing.assert_array_equal(got, want, strict=True)
        with Resolver(root, mode=mode, verify="checksum") as resolver:
            got = resolver.window(segments, "routed_experts", 0, total)
            np.testing.assert_array_equal(got, experts, strict=True)
            mask = resolver.ragged(segments, "sampling_mask", 0, total)
            assert [row.tolist() for row in mask] == masks


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@given(data=st.data())
def test_windows_over_packed_token_ids_give_the_packed_token_ids(layout: str, data) -> None:
    """Token ids stored as a payload: if rows were misaligned anywhere, ids would differ."""
    ranks = data.draw(st.sampled_from([1, 2, 4]))
    turns = data.draw(
        st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4)
    )
    cuts = [data.draw(st.integers(0, sum(lengths))) for lengths in turns]
    bin_size = -(-max(sum(cuts), 1) // (2 * ranks)) * 2 * ranks
    next_id = iter(range(1, 10_000))
    with tempfile.TemporaryDirectory() as root, Resolver(root) as resolver:
        writer, samples, packed = Writer(root), [], []
        for lengths, cut in zip(turns, cuts, strict=True):
            ids = np.array([next(next_id) for _ in range(sum(lengths))], np.int32)
            segments, at = [], 0
            for number, length in enumerate(lengths):
                # The last token of the sample is never forwarded: no row for it.
                stop = at + length - (number == len(lengths) - 1)
                segments += writer.write({"ids": (at, ids[at:stop])})
                at += length
            samples.append(Sample(len(ids), segments, cut))
            forwarded = np.append(ids[:-1], 0)
            packed += forwarded[:cut].tolist()
        batch = pack(samples, pad_to=bin_size)
        packed += [0] * (bin_size - len(packed))
        assert batch.num_tokens == bin_size
        assert all(0 <= s.pos <= s.end <= bin_size for s in batch.segments)

        def read(kind: str) -> list[list[int]]:
            found = []
            for rank in range(ranks):
                mine: list[int] = []
                for lo, hi in cp_window(bin_size, rank, ranks, kind, layout):
                    rows = resolver.window(
                        batch.segments,
                        "ids",
                        lo,
                        hi,
                        fill=0,
                        holes=batch.holes,
                        extent=(0, bin_size),
                    )
                    mine += rows.tolist()
                found.append(mine)
            return found

        chunk = bin_size // ranks if layout == "contiguous" else bin_size // (2 * ranks)
        for rank, (inputs, labels, sequence) in enumerate(
            zip(read("inputs"), read("labels"), read("sequence"), strict=True)
        ):
            chunks = [rank] if layout == "contiguous" else [rank, 2 * ranks - 1 - rank]
            assert inputs == [t for c in chunks for t in packed[c * chunk : (c + 1) * chunk]]
            assert labels == [
                t for c in chunks for t in packed[c * chunk + 1 : (c + 1) * chunk + 1]
            ]
            assert sequence == packed


def test_the_strategies_draw_what_is_easily_forgotten() -> None:
    seen: set[str] = set()

    @given(strategies.fixed(), strategies.ragged())
    def look(fixed, ragged) -> None:
        for segment in fixed[1]:
            seen.update({"no rows"} if not segment.rows else set())
            seen.update({"no bytes"} if segment.rows and not segment.row_nbytes else set())
            itemsize = np.dtype(segment.dtype).itemsize
            seen.update({"unaligned"} if segment.offset % itemsize else set())
        if len({s.file for s in fixed[1]}) > 1:
            seen.add("several files")
        if len({(s.dtype, s.shape) for s in fixed[1]}) > 1:
            seen.add("mixed kinds")
        spans = sorted((s.pos, s.end) for s in fixed[1] if s.rows)
        if any(a[1] > b[0] for a, b in itertools.pairwise(spans)):
            seen.add("overlap")
        if len({s.shape == () for s in ragged[1]}) > 1:
            seen.add("both forms")

    look()
    assert seen == {
        "no rows", "no bytes", "unaligned", "several files", "mixed kinds", "overlap", "both forms",
    }  # fmt: skip


def test_removing_a_directory_does_not_disturb_the_oracle(tmp_path: Path) -> None:
    files = {f"{tmp_path}/a": bytes(range(12))}
    segments = [Segment("f", f"{tmp_path}/a", 1, 2, 2, "uint8", (3,))]
    got = model.window(files, segments, "f", 1, 5, fill=9)
    assert got.tolist() == [[9] * 3, [1, 2, 3], [4, 5, 6], [9] * 3]
    assert not os.listdir(tmp_path)
