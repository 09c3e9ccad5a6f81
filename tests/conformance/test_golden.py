"""Answers of the upstream reader, and where ours differ on purpose."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from payload import (
    FIELDS,
    PayloadCorruptError,
    PayloadMissingError,
    PayloadTruncatedError,
    Ragged,
    Resolver,
    SegmentError,
    Writer,
    decode_segments,
    encode_segments,
)
from payload.testing import model

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "golden.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}
WIRE = GOLDEN["wire"]
RECIPE = {"fill": "field", "holes": "any", "dtype": "field"}

# What upstream does and we do not: name -> our error, or our values.
OURS: dict[str, Any] = {
    "ERR_fixed_short_file": PayloadTruncatedError,
    "ERR_missing_file": PayloadMissingError,
    "ERR_lo_gt_hi": ValueError,
    "ERR_csr_decreasing_offsets": PayloadCorruptError,
    "QUIRK_negative_pos": SegmentError,
    # A later segment resets the rows it covers: no residue of the wider one.
    "QUIRK_fixed_overlap_later_narrower_keeps_residue": (
        "int32",
        [[[201, 202, 0], [0, 0, 0]], [[203, 204, 0], [0, 0, 0]], [[205, 206, 0], [0, 0, 0]]],
    ),
    "QUIRK_padmask_overlap_later_narrower_keeps_residue": (
        "int32",
        [[7, -1, -1], [1, -1, -1], [2, -1, -1]],
    ),
    # The field's dtype decides, not the first segment's: nothing is cut to an integer.
    "QUIRK_float_dtype_decided_by_first_segment": (
        "float32",
        [[[1.0, 2.0]], [[0.5, 0.25]], [[0.125, -0.0]]],
    ),
}


def placed(case: dict[str, Any], root: Path) -> list[dict[str, Any]]:
    """Write the files of a case; return its segments with their real paths."""
    for name, content in case["files"].items():
        (root / name).write_bytes(bytes.fromhex(content))
    return [segment | {"file": f"{root}/{segment['file']}"} for segment in case["segments"]]


def numbers(values: Any) -> Any:
    if isinstance(values, list):
        return [numbers(value) for value in values]
    return {"inf": np.inf, "-inf": -np.inf, None: np.nan}.get(values, values)


def test_the_corpus_is_there() -> None:
    assert len(CASES) == 35
    assert set(OURS) == {name for name in CASES if name.startswith(("ERR_", "QUIRK_"))}


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in OURS])
def test_a_window_gives_upstreams_values(name: str, mode: str, tmp_path: Path) -> None:
    case = CASES[name]
    segments = placed(case, tmp_path)
    with Resolver(tmp_path, mode=mode) as resolver:
        got = resolver.window(segments, **case["query"], **RECIPE)
    expected = case["expected"]
    if expected is None:
        assert got is None
        return
    assert got.dtype == expected["dtype"]
    want = np.array(numbers(expected["values"]), expected["dtype"]).reshape(expected["shape"])
    np.testing.assert_array_equal(got, want, strict=True)


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize("name", list(OURS))
def test_where_upstream_errs_ours_is_a_typed_error_or_the_right_rows(
    name: str, mode: str, tmp_path: Path
) -> None:
    case = CASES[name]
    segments = placed(case, tmp_path)
    with Resolver(tmp_path, mode=mode) as resolver:
        if isinstance(OURS[name], type):
            with pytest.raises(OURS[name]):
                resolver.window(segments, **case["query"], **RECIPE)
            return
        got = resolver.window(segments, **case["query"], **RECIPE)
    dtype, values = OURS[name]
    np.testing.assert_array_equal(got, np.array(values, dtype), strict=True)


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize(
    "name", [n for n in CASES if not n.startswith("ERR_") and n != "QUIRK_negative_pos"]
)
def test_files_of_our_own_writer_give_the_same(name: str, mode: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / "theirs").mkdir()
    segments = decode_segments(placed(case, tmp_path / "theirs"))
    files = {segment.file: Path(segment.file).read_bytes() for segment in segments}
    writer, ours = Writer(tmp_path), []
    for segment in segments:
        field = FIELDS[segment.field]
        rows: Any = [model.row(files, segment, i, field) for i in range(segment.rows)]
        if field.ragged and segment.shape == ():
            rows = Ragged.from_lists(rows, field.dtype)
        elif field.ragged:
            rows = Ragged.from_lists(rows, field.dtype).to_padded(field.fill, *segment.shape)
        else:
            rows = np.array(rows, segment.dtype).reshape(segment.rows, *segment.shape)
        ours += writer.write({segment.field: (segment.pos, rows)})
    with Resolver(tmp_path, mode=mode) as resolver:
        want = resolver.window(segments, **case["query"], **RECIPE)
        got = resolver.window(ours, **case["query"], **RECIPE)
    assert (got is None) is (want is None) is (case["expected"] is None)
    if got is not None:
        np.testing.assert_array_equal(got, want, strict=True)


def test_the_wire_forms_decode_and_encode_byte_for_byte() -> None:
    as_object, as_array = WIRE["segment_dict"], WIRE["segment_json_array"]
    packed = bytes.fromhex(WIRE["segment_msgpack_array_hex"])
    segments = decode_segments([as_object])
    assert decode_segments([as_array]) == segments
    assert decode_segments(b"\x91" + packed) == segments
    assert decode_segments(json.dumps([as_object]).encode()) == segments
    assert encode_segments(segments) == [as_object]
    assert json.dumps(encode_segments(segments)[0]) == json.dumps(as_object)
    assert json.dumps(encode_segments(segments, "array")[0]) == json.dumps(as_array)
    assert msgspec.msgpack.encode(encode_segments(segments, "array")[0]) == packed
