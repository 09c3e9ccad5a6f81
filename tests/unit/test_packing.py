import pytest

from payload import Sample, Segment, SegmentError, cp_window, encode_segments, pack


def turn(pos: int, rows: int, field: str = "routed_experts") -> Segment:
    return Segment(field, "/p/a", 0, pos, rows, "uint8", (4, 2))


def test_samples_are_clipped_to_their_cut_and_shifted_behind_each_other() -> None:
    first = Sample(10, [turn(0, 4), turn(4, 5)])
    second = Sample(8, encode_segments([turn(0, 7), turn(3, 5, "mine")]), cut=5)
    batch = pack([first, Sample(0), second, Sample(3)], pad_to=24)
    assert [(s.field, s.pos, s.rows) for s in batch.segments] == [
        ("routed_experts", 0, 4),
        ("routed_experts", 4, 5),
        ("routed_experts", 10, 5),
        ("mine", 13, 2),
    ]
    assert batch.starts == [0, 10, 10, 15]
    assert batch.num_tokens == 24
    # Last token of each whole sample, then the padding; the cut one ends in a forwarded token.
    assert batch.holes == [(9, 10), (17, 24)]


def test_without_samples_a_batch_is_all_padding() -> None:
    assert pack([]).num_tokens == 0
    assert pack([], pad_to=4).holes == [(0, 4)]


@pytest.mark.parametrize(
    ("samples", "pad_to", "message"),
    [
        ([Sample(3, None, 4)], None, "sample 0 has a cut of 4: needs 0 to its 3 tokens"),
        ([Sample(3, None, -1)], None, "cut of -1"),
        ([Sample(-1)], None, "sample 0"),
        ([Sample(3), Sample(3)], 5, "samples have 6 tokens, pad_to is 5"),
        ([Sample(3, [turn(1, 3)])], None, "a segment of 'routed_experts' ends at 4"),
    ],
)
def test_what_does_not_fit_is_refused(samples, pad_to, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(samples, pad_to=pad_to)
    with pytest.raises(SegmentError):
        pack([Sample(3, [turn(-1, 3)])])


def test_each_rank_gets_its_chunks_and_labels_are_one_further() -> None:
    assert [cp_window(12, r, 3, "inputs") for r in range(3)] == [[(0, 4)], [(4, 8)], [(8, 12)]]
    assert [cp_window(12, r, 3, "labels") for r in range(3)] == [[(1, 5)], [(5, 9)], [(9, 12)]]
    assert cp_window(12, 1, 3, "sequence") == cp_window(12, 0, 3, "sequence", "zigzag") == [(0, 12)]
    assert [cp_window(12, r, 3, "inputs", "zigzag") for r in range(3)] == [
        [(0, 2), (10, 12)], [(2, 4), (8, 10)], [(4, 6), (6, 8)],
    ]  # fmt: skip
    assert cp_window(12, 0, 3, "labels", "zigzag") == [(1, 3), (11, 12)]
    assert cp_window(0, 0, 2, "labels") == [(0, 0)]
    assert cp_window(2, 0, 1, "labels", "zigzag") == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    "arguments",
    [
        (12, 3, 3, "inputs"), (12, -1, 3, "inputs"), (12, 0, 0, "inputs"), (11, 0, 3, "inputs"),
        (9, 0, 3, "inputs", "zigzag"), (12, 0, 3, "outputs"), (12, 0, 3, "inputs", "ring"), (-3, 0, 3, "inputs"),
    ],
)  # fmt: skip
def test_windows_that_do_not_come_out_even_are_refused(arguments) -> None:
    with pytest.raises(ValueError, match="needs"):
        cp_window(*arguments)
