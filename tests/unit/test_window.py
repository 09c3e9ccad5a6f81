"""What a window promises beyond its rows: verdicts, dtypes, buffers, counts."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload import (
    CoverageError,
    PayloadCorruptError,
    PayloadError,
    PayloadTruncatedError,
    Ragged,
    Resolver,
    Segment,
    SegmentError,
    Writer,
    encode_segments,
)

NAME = "routed_experts"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def put(root: Path, name: str, array: np.ndarray, pos: int = 0, field: str = NAME) -> Segment:
    (root / name).write_bytes(array.tobytes())
    return Segment(field, f"{root}/{name}", 0, pos, len(array), array.dtype.name, array.shape[1:])


def table(
    root: Path, name: str, words: list[int], pos: int = 0, rows: int | None = None
) -> Segment:
    (root / name).write_bytes(np.array(words, "<u4").tobytes())
    return Segment("sampling_mask", f"{root}/{name}", 0, pos, rows or 2, "uint32", ())


def test_no_segment_of_the_field_is_none(root: Path) -> None:
    with Resolver(root) as resolver:
        assert resolver.window([], NAME, 0, 3) is None
        assert resolver.window(None, NAME, 0, 3) is None
        assert resolver.window([put(root, "a", np.zeros((2, 2), np.uint8))], "other", 0, 3) is None
        assert resolver.ragged(None, "sampling_mask", 0, 3) is None
        assert resolver.read_into(None, NAME, 0, 3, np.empty(3)) is None


def test_one_segment_is_a_view_and_many_are_one_copy(root: Path) -> None:
    a, b = (
        put(root, "a", np.arange(12, dtype=np.uint8).reshape(6, 2)),
        put(root, "b", np.arange(12, dtype=np.uint8).reshape(6, 2), 6),
    )
    with Resolver(root) as resolver:
        view = resolver.window([a, b], NAME, 1, 5)
        assert np.shares_memory(view, resolver.view(a))
        assert not view.flags.writeable
        assert resolver.stats().bytes_copied == 0
        both = resolver.window([a, b], NAME, 1, 8)
        assert both.flags.writeable
        assert both.flags.owndata
        assert resolver.stats().bytes_copied == resolver.stats().bytes_read == both.nbytes == 14
        # A later segment that covers the window whole hides the one before.
        assert np.shares_memory(resolver.window([a, b, a], NAME, 0, 6), resolver.view(a))


def test_fifty_turns_copy_what_one_segment_of_the_same_rows_copies(root: Path) -> None:
    turns = [put(root, f"t{i}", np.full((20, 6), i, np.uint8), 20 * i) for i in range(50)]
    whole = put(root, "whole", np.repeat(np.arange(50, dtype=np.uint8), 20)[:, None].repeat(6, 1))
    with Resolver(root, mode="copy") as resolver:
        many = resolver.window(turns, NAME, 0, 1000)
        copied = resolver.stats().bytes_copied
        one = resolver.window([whole], NAME, 0, 1000)
        np.testing.assert_array_equal(many, one, strict=True)
        assert resolver.stats().bytes_copied == 2 * copied == 12_000
        assert resolver.stats().opens == 51


def test_reads_of_one_file_open_it_once_and_neighbours_are_read_at_once(root: Path) -> None:
    rows = np.arange(240, dtype=np.uint8).reshape(60, 4)
    (root / "a").write_bytes(rows.tobytes())
    parts = [Segment(NAME, f"{root}/a", 40 * i, 10 * i, 10, "uint8", (4,)) for i in range(6)]
    swapped = [*parts[::-1][:3], *parts[:3]]
    apart = [Segment(NAME, f"{root}/a", 40 * i, 10 * (5 - i), 10, "uint8", (4,)) for i in range(6)]
    for segments, want, reads in (
        (parts, rows, 1),
        (swapped, rows, 1),
        (apart, np.concatenate([rows[10 * i : 10 * i + 10] for i in range(5, -1, -1)]), 1),
        (parts[::2], None, 3),
    ):
        with Resolver(root) as resolver:
            options: Any = {} if want is not None else {"fill": 0, "holes": "any"}
            got = resolver.window(segments, NAME, 0, 60, **options)
            if want is not None:
                np.testing.assert_array_equal(got, want)
            assert (resolver.stats().opens, resolver.stats().reads) == (1, reads)


def test_a_read_cut_short_is_gone_on_with(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reads at most 2 GiB at a time."""
    import os

    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: real(fd, [b[:5] for b in bufs][:1], at))
    rows = np.arange(48, dtype=np.uint8).reshape(12, 4)
    first, second = put(root, "a", rows), put(root, "b", rows, 12)
    apart = [Segment(NAME, f"{root}/a", 4 * i, 24 + 11 - i, 1, "uint8", (4,)) for i in range(12)]
    with Resolver(root, mode="copy") as resolver:
        np.testing.assert_array_equal(resolver.view(first), rows)
        got = resolver.window([first, second, *apart], NAME, 0, 36)
        np.testing.assert_array_equal(got, np.concatenate([rows, rows, rows[::-1]]))


def test_all_ranks_come_to_one_verdict_on_the_extent(root: Path) -> None:
    segments = [
        put(root, "a", np.zeros((3, 2), np.uint8)),
        put(root, "b", np.zeros((2, 2), np.uint8), 4),
    ]
    with Resolver(root) as resolver:
        for lo, hi in ((0, 2), (2, 4), (4, 6)):
            with pytest.raises(CoverageError) as caught:
                resolver.window(segments, NAME, lo, hi, extent=(0, 6))
            assert (caught.value.actual, caught.value.field) == ([(3, 4)], NAME)
            for options in ({"holes": [(3, 4)]}, {"holes": "any"}):
                with pytest.raises(ValueError, match="pass fill="):
                    resolver.window(segments, NAME, lo, hi, extent=(0, 6), **options)
                rows = resolver.window(segments, NAME, lo, hi, extent=(0, 6), fill=0, **options)
                assert rows.shape == (2, 2)
        assert resolver.window(segments, NAME, 0, 2).shape == (2, 2)
        with pytest.raises(
            ValueError, match=r"extent \[1, 6\) does not contain the window \[0, 2\)"
        ):
            resolver.window(segments, NAME, 0, 2, extent=(1, 6))


def test_the_gaps_are_listed_and_only_those_not_allowed(root: Path) -> None:
    segments = [put(root, f"{i}", np.zeros((1, 2), np.uint8), 2 * i) for i in range(8)]
    with Resolver(root) as resolver:
        with pytest.raises(CoverageError) as caught:
            resolver.window(segments, NAME, 0, 16, holes=[(0, 4), (6, 8)])
        assert caught.value.actual == [(5, 6), (9, 10), (11, 12), (13, 14), (15, 16)]
        assert "5 of 16 rows uncovered in [0, 16)" in str(caught.value)
        with pytest.raises(CoverageError, match="and 3 more ranges"):
            resolver.window(segments, NAME, 0, 16)


@pytest.mark.parametrize(
    "holes", ["all", 7, ["a"], [(3, 1)], (6, 7), [(1, 2, 3)], [(0.5, 2)], [None]]
)
def test_holes_that_make_no_sense_are_refused_even_without_a_gap(holes: Any, root: Path) -> None:
    with (
        Resolver(root) as resolver,
        pytest.raises(ValueError, match="needs 'none', 'any' or a list"),
    ):
        resolver.window([put(root, "a", np.zeros((3, 2), np.uint8))], NAME, 0, 3, holes=holes)


def test_an_uncovered_mask_row_is_normal_unless_asked(root: Path) -> None:
    [segment] = Writer(root).write({"sampling_mask": (4, Ragged.from_lists([[7], []]))})
    with Resolver(root) as resolver:
        assert resolver.window([segment], "sampling_mask", 3, 7).tolist() == [[-1], [7], [-1], [-1]]
        assert resolver.ragged([segment], "sampling_mask", 3, 7).counts.tolist() == [0, 1, 0, 0]
        with pytest.raises(CoverageError, match=r"\[3, 4\), \[6, 7\)"):
            resolver.ragged([segment], "sampling_mask", 3, 7, holes="none")
        assert resolver.window([segment], "sampling_mask", 3, 5, fill=-7).tolist() == [[-7], [7]]


@pytest.mark.parametrize("fill", [-1, 256, 0.5, "zero", [0]])
def test_a_fill_that_does_not_fit_is_the_callers_mistake_even_if_nothing_is_filled(
    fill: Any, root: Path
) -> None:
    segments = [
        put(root, "a", np.zeros((3, 2), np.uint8)),
        put(root, "b", np.zeros((3, 2), np.uint8), 3),
    ]
    with Resolver(root) as resolver, pytest.raises((ValueError, TypeError)) as caught:
        resolver.window(segments, NAME, 0, 6, fill=fill)
    assert not isinstance(caught.value, PayloadError)


def test_rows_narrower_than_the_widest_need_a_fill(root: Path) -> None:
    wide, narrow = (
        put(root, "a", np.full((2, 2, 3), 5, np.uint8)),
        put(root, "b", np.full((2, 1, 2), 6, np.uint8), 2),
    )
    with Resolver(root) as resolver:
        with pytest.raises(ValueError, match="narrower rows and no fill"):
            resolver.window([wide, narrow], NAME, 0, 2)  # whatever the window
        got = resolver.window([wide, narrow], NAME, 1, 3, fill=9)
        assert got.tolist() == [[[5] * 3] * 2, [[6, 6, 9], [9, 9, 9]]]
        flat = put(root, "c", np.zeros((2, 6), np.uint8), 4)
        with pytest.raises(
            SegmentError, match=r"rows of 2 and of 1 dimensions \(\(2, 3\) and \(6,\)\)"
        ):
            resolver.window([wide, flat], NAME, 0, 2)


def test_the_dtype_is_the_widest_of_all_segments_whatever_the_window(root: Path) -> None:
    narrow, wide = (
        put(root, "a", np.full((2, 1), 7, np.uint8)),
        put(root, "b", np.full((2, 1), 700, np.uint16), 2),
    )
    empty = Segment(NAME, f"{root}/none", 0, 0, 0, "int32", (1,))
    with Resolver(root) as resolver:
        assert resolver.window([narrow], NAME, 0, 2).dtype == np.uint8
        assert resolver.window([narrow, wide], NAME, 0, 2).dtype == np.uint16
        assert resolver.window([narrow, wide, empty], NAME, 0, 2).dtype == np.int32
        assert resolver.window([narrow, wide], NAME, 0, 4).ravel().tolist() == [7, 7, 700, 700]
        signed = put(root, "c", np.zeros((1, 1), np.int64), 4)
        unsigned = put(root, "d", np.zeros((1, 1), np.uint64), 5)
        with pytest.raises(SegmentError, match="no common integer type; pass dtype="):
            resolver.window([signed, unsigned], NAME, 4, 6)
        assert resolver.window([signed, unsigned], NAME, 4, 6, dtype="int8").dtype == np.int8


def test_a_value_that_would_change_is_refused_with_its_place(root: Path) -> None:
    segment = put(root, "a", np.array([[1], [2], [300]], np.uint16), 5)
    with Resolver(root) as resolver:
        with pytest.raises(PayloadCorruptError) as caught:
            resolver.window([segment], NAME, 5, 8, dtype="uint8")
        assert "value 300 does not fit uint8" in str(caught.value)
        assert (caught.value.reason, caught.value.field, caught.value.index) == (
            "narrowing",
            NAME,
            0,
        )
        assert resolver.window([segment], NAME, 5, 7, dtype="uint8").ravel().tolist() == [1, 2]
        for dtype in (">u2", "O", "complex128"):
            with pytest.raises(TypeError, match="needs one of bool"):
                resolver.window([segment], NAME, 5, 7, dtype=dtype)
        other = put(root, "b", np.zeros((1, 1), np.uint8), 0, "mine")
        with pytest.raises(ValueError, match="has no dtype in the field table"):
            resolver.window([other], "mine", 0, 1, dtype="field")


def test_a_large_block_is_checked_whole_and_converted_in_parts(root: Path) -> None:
    values = np.zeros((3000, 500), np.uint16)  # three times the scratch buffer
    values[-1, -1] = 256
    segment = put(root, "a", values)
    with Resolver(root) as resolver:
        with pytest.raises(PayloadCorruptError, match="value 256 does not fit uint8"):
            resolver.window([segment], NAME, 0, 3000, dtype="uint8")
        got = resolver.window([segment], NAME, 0, 3000, dtype="int64")
        np.testing.assert_array_equal(got, values.astype(np.int64), strict=True)


def test_out_is_filled_or_refused(root: Path) -> None:
    segments = [
        put(root, "a", np.full((2, 2), 5, np.uint8)),
        put(root, "b", np.full((2, 2), 6, np.uint8), 2),
    ]
    with Resolver(root) as resolver:
        out = np.zeros((4, 2), np.uint8)
        assert resolver.window(segments, NAME, 0, 4, out=out) is out
        assert out.ravel().tolist() == [5] * 4 + [6] * 4
        one = np.zeros((2, 2), np.uint8)  # not a view, though one segment covers it
        assert resolver.window(segments, NAME, 0, 2, out=one) is one
        wide = np.zeros((4, 2), np.int64)
        assert resolver.read_into(segments, NAME, 0, 4, wide) is wide
        assert wide.sum() == 44
        locked = np.zeros((4, 2), np.uint8)
        locked.flags.writeable = False
        for bad in (
            np.zeros((5, 2), np.uint8), np.zeros((4, 2), np.int8), np.zeros((2, 4), np.uint8).T,
            np.zeros((8, 2), np.uint8)[::2], locked,
        ):  # fmt: skip
            with pytest.raises(ValueError, match="out is"):
                resolver.window(segments, NAME, 0, 4, out=bad)
        with pytest.raises(ValueError, match="out is"):
            resolver.window(segments, NAME, 0, 4, dtype="int16", out=out)


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize(
    ("words", "reason", "message"),
    [
        ([12, 8, 16, 7], "table", "falls: from 12 to 8 at row 0"),
        ([12, 14, 16, 7], "table", "cuts an element: from 12 to 14 at row 0"),
        ([8, 12, 16, 7], "table", "begins its values at 8, inside itself: needs 12 or more"),
        ([0, 0, 0, 7], "table", "begins its values at 0"),
        ([12, 16, 20, 7], "table", "ends its values at 20, the file has 16 bytes"),
        ([12, 16, 2**32 - 4, 7], "table", "ends its values at 4294967292"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_is_corrupt_before_anything_is_allocated(
    words: list[int], reason: str, message: str, mode: str, root: Path
) -> None:
    segment = table(root, "t", words)
    with Resolver(root, mode=mode) as resolver:
        for call in (
            lambda: resolver.window([segment], "sampling_mask", 0, 2),
            lambda: resolver.ragged([segment], "sampling_mask", 0, 2),
            lambda: resolver.resolve([segment]),
        ):
            with pytest.raises(PayloadCorruptError, match=message) as caught:
                call()
            assert (caught.value.reason, caught.value.field) == (reason, "sampling_mask")
            assert caught.value.index == 0


def test_a_good_table_beside_the_bad_ones_still_reads(root: Path) -> None:
    segment = table(root, "t", [12, 16, 20, 7, 8])
    with Resolver(root) as resolver:
        assert resolver.window([segment], "sampling_mask", 0, 2).tolist() == [[7], [8]]
        short = table(root, "s", [12, 16])
        with pytest.raises(PayloadTruncatedError, match="has 8 bytes, its segment needs 12"):
            resolver.window([short], "sampling_mask", 0, 2)


def test_a_cut_file_whose_length_is_known_is_short_not_corrupt(root: Path) -> None:
    [segment] = Writer(root).write({"sampling_mask": (0, Ragged.from_lists([[7], [8, 9]]))})
    content = Path(segment.file).read_bytes()
    Path(segment.file).write_bytes(content[:-4])
    with Resolver(root) as resolver:
        with pytest.raises(PayloadTruncatedError) as caught:
            resolver.ragged([segment], "sampling_mask", 0, 2)
        assert (caught.value.expected, caught.value.actual) == (len(content), len(content) - 4)
        with pytest.raises(PayloadCorruptError, match=f"ends its values at {len(content)}"):
            resolver.ragged(encode_segments([segment]), "sampling_mask", 0, 2)
        Path(segment.file).write_bytes(content + b"\0" * 8)
        wrong = encode_segments([segment], "array")
        wrong[0][7] += 4
        with pytest.raises(PayloadCorruptError, match="the segment's length says"):
            resolver.ragged(wrong, "sampling_mask", 0, 2)


def test_a_table_cannot_claim_more_rows_than_the_file_has(root: Path) -> None:
    claim = table(root, "t", [12, 16, 20, 7, 8], rows=2**40)
    with Resolver(root) as resolver:
        for call in (resolver.ragged, resolver.window):
            with pytest.raises(PayloadError):
                call([claim], "sampling_mask", 0, 2**40)
            with pytest.raises(PayloadError):
                call([claim], "sampling_mask", 0, 2)


def test_mask_and_logprobs_of_one_file_are_views(root: Path) -> None:
    mask = Ragged.from_lists([[7], [8, 9, 10], []])
    logprobs = mask.with_values(np.float32([0, -1, -np.inf, -0.5]))
    segments = Writer(root).write(
        {"sampling_mask": (4, mask), "sampling_mask_logprobs": (4, logprobs)}
    )
    with Resolver(root) as resolver:
        got = resolver.ragged(segments, "sampling_mask_logprobs", 4, 7)
        assert got.values.tolist() == [0, -1, -np.inf, -0.5]
        assert got.values.dtype == np.float32
        assert not got.values.flags.writeable
        part = resolver.ragged(segments, "sampling_mask", 5, 6)
        assert [row.tolist() for row in part] == [[8, 9, 10]]
        assert resolver.stats().bytes_copied == 0
        both = resolver.ragged(segments * 2, "sampling_mask", 3, 8)
        assert [row.tolist() for row in both] == [[], [7], [8, 9, 10], [], []]


def test_long_masks_are_gathered_in_parts(root: Path) -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 400, 3000)
    counts[7] = 300_000  # one row larger than the scratch buffer
    mask = Ragged.from_counts(rng.integers(0, 9, counts.sum()).astype(np.int32), counts)
    [segment] = Writer(root).write({"sampling_mask": (0, mask)})
    with Resolver(root) as resolver:
        got = resolver.window([segment], "sampling_mask", 8, 3000, dtype="int16")
        assert got.shape == (2992, 300_000)
        np.testing.assert_array_equal((got >= 0).sum(1), counts[8:])
        np.testing.assert_array_equal(got[got >= 0], mask.values[mask.offsets[8] :])


@pytest.mark.parametrize("most", [3, 24, 400])
def test_padded_rows_are_the_same_however_full_they_are(most: int, root: Path) -> None:
    """One row is 400 wide, and the rest of a segment fills little of that, some, or all."""
    rng = np.random.default_rng(most)
    lists = [rng.integers(0, 99, rng.integers(0, most + 1)).tolist() for _ in range(3000)]
    lists[1500] = list(range(400))
    segments = Writer(root).write({"sampling_mask": (7, Ragged.from_lists(lists))})
    want = np.full((3001, 400), -1, np.int32)
    for row, ids in zip(want[1:], lists, strict=True):
        row[: len(ids)] = ids
    with Resolver(root) as resolver:
        got = resolver.window(segments, "sampling_mask", 6, 3007, holes="any")
        np.testing.assert_array_equal(got, want, strict=True)
        got = resolver.window(segments, "sampling_mask", 1000, 2000, dtype="int64")
        np.testing.assert_array_equal(got, want[994:1994])


@pytest.mark.parametrize("field", ["sampling_mask", NAME])
def test_lo_past_hi_is_the_callers_mistake(field: str, root: Path) -> None:
    with Resolver(root) as resolver:
        for call in (resolver.window, resolver.ragged):
            with pytest.raises(ValueError, match=r"window \[5, 3\)") as caught:
                call([], field, 5, 3)
            assert not isinstance(caught.value, PayloadError)
            with pytest.raises(TypeError):
                call([], field, 0.0, 3)
        segment = put(root, "a", np.zeros((9, 1), np.uint8))
        assert resolver.window([segment], NAME, np.int64(2), np.uint8(4)).shape == (2, 1)


def test_errors_in_a_list_name_the_segment(root: Path) -> None:
    good = put(root, "a", np.zeros((3, 2), np.uint8))
    gone = Segment(NAME, f"{root}/gone", 0, 3, 3, "uint8", (2,))
    with Resolver(root) as resolver:
        for call in (
            lambda: resolver.resolve([good, gone]),
            lambda: resolver.window([good, gone], NAME, 0, 6),
            lambda: resolver.window([good, gone], NAME, 0, 6, dtype="int32"),
        ):
            with pytest.raises(FileNotFoundError) as caught:
                call()
            error = caught.value
            assert (error.index, error.field, error.path) == (1, NAME, f"{root}/gone")


def test_of_two_segments_in_one_file_the_error_names_the_bad_one(root: Path) -> None:
    (root / "a").write_bytes(bytes(30))
    good = Segment(NAME, f"{root}/a", 0, 0, 3, "uint8", (4,))
    short = Segment(NAME, f"{root}/a", 20, 3, 3, "uint8", (4,))
    with Resolver(root) as resolver:
        for call in (
            lambda: resolver.window([good, short], NAME, 0, 6),
            lambda: resolver.window([good, short], NAME, 0, 6, dtype="int16"),
            lambda: resolver.resolve([good, short]),
            lambda: resolver.view(short),
        ):
            with pytest.raises(PayloadTruncatedError) as caught:
                call()
            assert (caught.value.field, caught.value.offset) == (NAME, 20)
            assert (caught.value.expected, caught.value.actual) == (32, 30)
        assert caught.value.index is None


def test_a_failed_window_is_freed_when_its_error_is(root: Path) -> None:
    import gc
    import weakref

    segments = [put(root, f"{i}", np.zeros((3000, 48, 8), np.uint8), 3000 * i) for i in range(4)]
    (root / "3").unlink()
    out = np.zeros((12_000, 48, 8), np.uint8)
    watch = weakref.ref(out)
    gc.disable()
    try:
        with Resolver(root) as resolver:
            met = False
            try:
                resolver.read_into(segments, NAME, 0, 12_000, out)
            except FileNotFoundError:  # pytest.raises would keep the error, and that the frames
                met = True
            del out
            assert met
            for _ in range(200):  # a helping thread lets go of its task a moment later
                if watch() is None:
                    break
                time.sleep(0.01)
            assert watch() is None
    finally:
        gc.enable()


def test_prefetch_returns_and_reports_nothing(root: Path) -> None:
    segments = [
        put(root, "a", np.zeros((3, 2), np.uint8)),
        Segment(NAME, f"{root}/x", 0, 0, 1, "uint8", ()),
    ]
    with Resolver(root) as resolver:
        assert resolver.prefetch(segments) is None
        with pytest.raises(SegmentError):
            resolver.prefetch([[NAME, "/x", -1, 0, 1, "uint8", []]])
        assert resolver.window(segments[:1], NAME, 0, 3).shape == (3, 2)


def test_a_list_checked_before_is_checked_again_when_it_changed(root: Path) -> None:
    segments = [
        put(root, "a", np.zeros((3, 2), np.uint8)),
        put(root, "b", np.ones((3, 2), np.uint8), 3),
    ]
    with Resolver(root) as resolver:
        assert resolver.window(segments, NAME, 0, 6).sum() == 6
        segments[1] = Segment(NAME, f"{root}/b", 0, 3, True, "uint8", (2,))
        with pytest.raises(SegmentError, match=r"rows is True"):
            resolver.window(segments, NAME, 0, 4)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads share one file from 64 bytes on, 40 bytes at a time; collects how many took part."""
    from payload import _files, _gather, _threads

    monkeypatch.setattr(_files, "THREADED_PART", 64)
    monkeypatch.setattr(_files, "_CPUS", 3)
    monkeypatch.setattr(_gather, "_PART", 40)
    counted: list[int] = []
    real = _threads.Threads.run

    def run(self: Any, work: Any, threads: int) -> None:
        counted.append(threads)
        real(self, work, threads)

    monkeypatch.setattr(_threads.Threads, "run", run)
    return counted


def test_threads_share_one_large_file_and_give_the_same_rows(root: Path, shared: list[int]) -> None:
    rows = np.arange(960, dtype=np.uint8).reshape(40, 4, 6)
    whole, narrow = put(root, "a", rows), put(root, "b", rows[:, :3, :5])
    halves = [
        Segment(NAME, whole.file, 480 * (1 - i), 20 * i, 20, "uint8", (4, 6)) for i in range(2)
    ]
    holes: dict[str, Any] = {"fill": 9, "holes": "any"}
    padded = np.full((41, 4, 6), 9, np.uint8)
    padded[:40, :3, :5] = rows[:, :3, :5]
    layers = {"layers": [2, 0], "num_layers": 4}
    for segments, bounds, options, want in (
        ([whole], (0, 41), holes, np.concatenate([rows, np.full((1, 4, 6), 9, np.uint8)])),
        ([whole], (1, 40), {"dtype": "int32"}, rows[1:].astype(np.int32)),
        (halves, (0, 40), {}, np.concatenate([rows[20:], rows[:20]])),
        ([whole], (0, 40), layers, rows[:, [2, 0]]),
        ([whole], (0, 40), layers | {"dtype": "int64"}, rows[:, [2, 0]].astype(np.int64)),
        ([Segment(NAME, f"{root}/none", 0, 0, 0, "uint8", (4, 6)), narrow], (0, 41), holes, padded),
    ):
        shared.clear()
        with Resolver(root) as resolver:
            got = resolver.window(segments, NAME, *bounds, **options)
            np.testing.assert_array_equal(got, want, strict=True)
            assert resolver.stats().opens == 1
            assert shared == [3]


def test_threads_that_share_a_file_tell_what_is_wrong_with_it(
    root: Path, shared: list[int]
) -> None:
    rows = np.arange(960, dtype=np.int16).reshape(40, 24)
    whole = put(root, "a", rows)
    with Resolver(root, mode="copy") as resolver:
        with pytest.raises(PayloadCorruptError, match=r"in rows \[1\d, "):
            resolver.window([whole], NAME, 0, 40, dtype="uint8")
        real = resolver._files.open

        def shrinks(*arguments: Any) -> Any:
            found = real(*arguments)
            (root / "a").write_bytes(rows.tobytes()[:-1])
            return found

        resolver._files.open = shrinks  # type: ignore[method-assign]
        for options in ({}, {"dtype": "int32"}):
            (root / "a").write_bytes(rows.tobytes())
            with pytest.raises(PayloadTruncatedError) as caught:
                resolver.window([whole], NAME, 0, 40, **options)
            assert (caught.value.expected, caught.value.actual) == (1920, 1919)
    assert set(shared) == {3}
