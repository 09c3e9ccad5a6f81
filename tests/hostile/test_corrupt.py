"""Crafted files, byte by byte.

A headerless file with 4 bytes of routing before a mask of three rows, [7], [8, 9], []:

    byte   what            value
     0- 3  routing         1 2 3 4
     4- 7  table[0]        20   first value of row 0
     8-11  table[1]        24   row 1
    12-15  table[2]        32   row 2
    16-19  table[3]        32   end of row 2
    20-23  values[0]       7
    24-31  values[1:3]     8 9
"""

import itertools
from pathlib import Path

import numpy as np
import pytest

from payload import PayloadCorruptError, PayloadTruncatedError, Resolver, Segment

GOOD = bytes([1, 2, 3, 4]) + np.array([20, 24, 32, 32, 7, 8, 9], "<u4").tobytes()
ROWS = [[7], [8, 9], []]


def mask(path: Path, **changes: int) -> Segment:
    known = {"offset": 4, "pos": 0, "rows": 3} | changes
    return Segment(
        "sampling_mask", str(path), known["offset"], known["pos"], known["rows"], "uint32", ()
    )


def read(path: Path, segment: Segment, mode: str = "map") -> list[list[int]]:
    with Resolver(path.parent, mode=mode) as resolver:
        rows = resolver.ragged([segment], "sampling_mask", segment.pos, segment.end)
        padded = resolver.window([segment], "sampling_mask", segment.pos, segment.end)
        assert [[v for v in row if v != -1] for row in padded.tolist()] == [
            r.tolist() for r in rows
        ]
        return [row.tolist() for row in rows]


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_the_good_file_is_read(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(GOOD)
    assert read(path, mask(path), mode) == ROWS
    assert read(path, mask(path, offset=8, pos=1, rows=2), mode) == ROWS[1:]


@pytest.mark.parametrize("entry", range(4))
@pytest.mark.parametrize("value", [0, 3, 16, 19, 21, 28, 36, 2**31, 2**32 - 1])
def test_each_byte_of_a_table_set_wrong_is_noticed_or_harmless(
    entry: int, value: int, tmp_path: Path
) -> None:
    """A table that still rises in whole elements inside the file describes other rows, and no more."""
    path = tmp_path / "a.bin"
    table = [20, 24, 32, 32]
    table[entry] = value
    content = GOOD[:4] + np.array(table, "<u4").tobytes() + GOOD[20:]
    path.write_bytes(content)
    fits = (
        table == sorted(table)
        and all((b - a) % 4 == 0 for a, b in itertools.pairwise(table))
        and table[0] >= 20
        and table[3] <= len(content)
    )
    if not fits:
        with pytest.raises(
            PayloadCorruptError, match="table of 'sampling_mask' at byte 4"
        ) as caught:
            read(path, mask(path))
        assert caught.value.offset == 4
        return
    want = [np.frombuffer(content[a:b], "<i4").tolist() for a, b in itertools.pairwise(table)]
    assert read(path, mask(path)) == want


@pytest.mark.parametrize("size", [0, 4, 5, 19, 20, 24, 31])
def test_a_file_cut_anywhere_is_short_or_corrupt(size: int, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(GOOD[:size])
    with pytest.raises((PayloadTruncatedError, PayloadCorruptError)) as caught:
        read(path, mask(path))
    assert isinstance(caught.value, PayloadTruncatedError) is (size < 20)
    assert caught.value.actual == size


@pytest.mark.parametrize("offset", [0, 1, 8, 16, 28])
def test_a_table_looked_for_elsewhere_is_corrupt_or_short(offset: int, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(GOOD)
    with pytest.raises((PayloadTruncatedError, PayloadCorruptError)):
        read(path, mask(path, offset=offset))
