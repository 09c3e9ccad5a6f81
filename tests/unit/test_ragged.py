import pickle

import numpy as np
import pytest

from payload import Ragged

MASK = Ragged(np.array([7, 8, 9, 10], np.int32), [0, 1, 4, 4])


def test_rows_counts_and_slices_share_the_values() -> None:
    assert len(MASK) == 3
    assert [row.tolist() for row in MASK] == [[7], [8, 9, 10], []]
    assert MASK[-1].tolist() == []
    assert MASK.counts.tolist() == [1, 3, 0]
    part = MASK[1:3]
    assert part.offsets.tolist() == [0, 3, 3]
    assert part.offsets.dtype == np.int64
    assert np.shares_memory(part.values, MASK.values)
    assert len(MASK[2:1]) == len(MASK[9:]) == 0
    for row in (3, -4):
        with pytest.raises(IndexError, match=f"row {row} is out of range for 3 rows"):
            MASK[row]
    with pytest.raises(ValueError, match="step is 2"):
        MASK[::2]


def test_offsets_are_rebased_to_zero_and_widened() -> None:
    moved = Ragged(MASK.values, np.array([16, 17, 20, 20], np.uint32))
    assert moved.offsets.tolist() == [0, 1, 4, 4]
    assert moved.offsets.dtype == np.int64
    big = Ragged(np.empty(0, np.int32), np.array([2**40, 2**40], np.uint64))
    assert big.offsets.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("values", "offsets", "message"),
    [
        ([1] * 5, [0, 4, 2, 5], "falls from 4 to 2 at row 1"),
        ([1] * 4, [0, 4, 5], "spans 5 values, 4 are there"),
        ([1] * 4, [1, 4], "spans 3 values, 4 are there"),
        ([1], [], "needs rows"),
        ([1], [[0, 1]], "needs rows"),
        ([1], [0.0, 1.0], "needs rows"),
        ([[1]], [0, 1], "needs one axis"),
        ([1], np.array([0, 2**63], np.uint64), "needs less than 2\\^63"),
    ],
)
def test_offsets_that_describe_no_rows_are_refused(values, offsets, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ragged(np.array(values), offsets)


def test_padded_and_back() -> None:
    padded = MASK.to_padded(-1)
    assert padded.tolist() == [[7, -1, -1], [8, 9, 10], [-1, -1, -1]]
    assert padded.dtype == np.int32
    assert MASK.to_padded(-1, 5).shape == (3, 5)
    back = Ragged.from_padded(padded, -1)
    assert (back.values.tolist(), back.offsets.tolist()) == ([7, 8, 9, 10], [0, 1, 4, 4])
    with pytest.raises(ValueError, match="width is 2: the longest row has 3"):
        MASK.to_padded(-1, 2)
    with pytest.raises(ValueError, match="fill 2147483648 does not fit int32"):
        MASK.to_padded(2**31)
    assert Ragged.from_lists([]).to_padded(0).shape == (0, 0)
    assert Ragged.from_padded(np.zeros((2, 0), np.int32), -1).counts.tolist() == [0, 0]


def test_only_trailing_fill_is_padding() -> None:
    logprobs = np.array([[-np.inf, -0.5, -np.inf], [-np.inf] * 3], np.float32)
    rows = Ragged.from_padded(logprobs, -np.inf)
    assert rows.counts.tolist() == [2, 0]
    assert rows.values.tolist() == [-np.inf, -0.5]
    nans = Ragged.from_padded(np.array([[1.0, np.nan], [np.nan, np.nan]]), np.nan)
    assert nans.counts.tolist() == [1, 0]


def test_lists_and_counts_make_the_same_rows() -> None:
    rows = Ragged.from_lists([[7], np.array([8, 9, 10]), []])
    assert rows.values.dtype == np.int32
    assert rows.offsets.tolist() == Ragged.from_counts(rows.values, [1, 3, 0]).offsets.tolist()
    with pytest.raises(ValueError, match="value 4294967296 does not fit int32"):
        Ragged.from_lists([[1], [2**32]])
    with pytest.raises(ValueError, match="counts has -1 at row 1"):
        Ragged.from_counts(rows.values, [5, -1])
    floats = Ragged.from_lists([[-0.5], [float("-inf")]], np.float32)
    assert floats.values.tolist() == [-0.5, -np.inf]


def test_other_values_for_the_same_rows() -> None:
    """Logprobs that came inline beside a mask by handle."""
    logprobs = MASK.with_values(np.float32([0, -1, -2, -3]))
    assert [row.tolist() for row in logprobs] == [[0], [-1, -2, -3], []]
    with pytest.raises(ValueError, match=r"values has shape \(3,\): needs \(4,\)"):
        MASK.with_values(np.zeros(3))


def test_bits_of_values_that_are_not_finite_are_kept() -> None:
    bits = np.array([0x7FC00001, 0xFF800000, 0x7F800000], np.uint32).view(np.float32)
    kept = pickle.loads(pickle.dumps(Ragged(bits, [0, 3])))
    assert kept.values.view(np.uint32).tolist() == bits.view(np.uint32).tolist()
    assert repr(kept) == "Ragged(1 rows, 3 float32 values)"
