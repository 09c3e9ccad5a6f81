import json
from collections import defaultdict, deque

import msgspec
import pytest

import payload
from payload import (
    PathError,
    Segment,
    SegmentError,
    clip,
    decode_segments,
    encode_segments,
)
from payload.segment import MAX_INT, MAX_MESSAGE, MAX_NDIM, MAX_SEGMENTS, check
from tests.conftest import segment

OBJECT = {
    "field": "routed_experts",
    "file": "/shared/payload/v3/0123.bin",
    "offset": 0,
    "pos": 2,
    "rows": 4,
    "dtype": "uint8",
    "shape": [2, 3],
}
ARRAY = list(OBJECT.values())


def refused(obj: object) -> SegmentError:
    with pytest.raises(SegmentError) as caught:
        decode_segments(obj)
    return caught.value


@pytest.mark.parametrize(
    "form",
    [
        [OBJECT],
        [ARRAY],
        (tuple(ARRAY),),
        [segment()],
        deque([OBJECT]),
        [OBJECT | {"weights_version": 7}],
        [[*ARRAY, None]],
        [[*ARRAY, None, "more", 9]],
        json.dumps([OBJECT]).encode(),
        b"\n " + json.dumps([ARRAY]).encode(),
        bytearray(json.dumps([ARRAY]).encode()),
        memoryview(msgspec.msgpack.encode([ARRAY])),
        msgspec.Raw(msgspec.msgpack.encode([OBJECT])),
        [segment(shape=[2, 3])],
    ],
    ids=lambda form: type(form).__name__,
)
def test_every_form_of_a_segment_decodes_to_the_same(form: object) -> None:
    assert decode_segments(form) == [segment()]


@pytest.mark.parametrize(
    "nothing", [None, [], b"null", b"[]", b" []", msgspec.msgpack.encode(None)]
)
def test_no_payload_decodes_to_no_segments(nothing: object) -> None:
    assert decode_segments(nothing) == []


def test_the_plain_form_counts_rows_along_the_first_dimension_of_its_shape() -> None:
    plain = {"file": "/p/a", "offset": 8, "length": 24, "dtype": "uint16", "shape": [4, 3]}
    assert decode_segments([plain]) == [Segment("", "/p/a", 8, 0, 4, "uint16", (3,), 24)]
    assert decode_segments([plain | {"field": "mine"}])[0].field == "mine"


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"shape": []}, "$.payload[0].shape"),
        ({"shape": 4}, "$.payload[0].shape"),
        ({"length": 23}, "$.payload[0].length"),
        ({"length": None}, "$.payload[0].length"),
        ({"length": True}, "$.payload[0].length"),
        ({"shape": [-4, 3]}, "$.payload[0].rows"),
        ({"shape": [4, -3]}, "$.payload[0].shape[0]"),
    ],
)
def test_a_plain_form_that_does_not_add_up_is_refused(change: dict, place: str) -> None:
    plain = {"file": "/p/a", "offset": 8, "length": 24, "dtype": "uint16", "shape": [4, 3]}
    assert str(refused([plain | change])).endswith(f"- at {place}")


HUGE = 10**400
BAD = [
    ("field", None, "wrong_type", "$.payload[1].field"),
    ("field", 7, "wrong_type", "$.payload[1].field"),
    ("file", 7, "wrong_type", "$.payload[1].file"),
    ("file", "a.bin", "illegal_path", "$.payload[1].file"),
    ("file", "", "illegal_path", "$.payload[1].file"),
    ("file", "/", "illegal_path", "$.payload[1].file"),
    ("file", "/a//b", "illegal_path", "$.payload[1].file"),
    ("file", "/a/./b", "illegal_path", "$.payload[1].file"),
    ("file", "/a/../b", "illegal_path", "$.payload[1].file"),
    ("file", "/a/..", "illegal_path", "$.payload[1].file"),
    ("file", "/a/b/", "illegal_path", "$.payload[1].file"),
    ("file", "/a/\0b", "illegal_path", "$.payload[1].file"),
    ("file", "/a/\udc80", "illegal_path", "$.payload[1].file"),
    ("file", "/" + "a" * 5000, "illegal_path", "$.payload[1].file"),
    ("file", "/" + "ä" * 2100, "illegal_path", "$.payload[1].file"),
    ("offset", -1, "out_of_range", "$.payload[1].offset"),
    ("offset", -(2**63), "out_of_range", "$.payload[1].offset"),
    ("offset", 2**63, "out_of_range", "$.payload[1].offset"),
    ("offset", MAX_INT - 23, "out_of_range", "$.payload[1].offset"),
    ("offset", HUGE, "out_of_range", "$.payload[1].offset"),
    ("offset", 1.0, "wrong_type", "$.payload[1].offset"),
    ("offset", True, "wrong_type", "$.payload[1].offset"),
    ("offset", "1", "wrong_type", "$.payload[1].offset"),
    ("offset", None, "wrong_type", "$.payload[1].offset"),
    ("pos", -1, "out_of_range", "$.payload[1].pos"),
    ("pos", MAX_INT - 3, "out_of_range", "$.payload[1].pos"),
    ("pos", False, "wrong_type", "$.payload[1].pos"),
    ("rows", -1, "out_of_range", "$.payload[1].rows"),
    ("rows", 2**62, "out_of_range", "$.payload[1].shape"),
    ("rows", 4.0, "wrong_type", "$.payload[1].rows"),
    ("dtype", "uint7", "unknown_dtype", "$.payload[1].dtype"),
    ("dtype", ">u2", "unknown_dtype", "$.payload[1].dtype"),
    ("dtype", "O", "unknown_dtype", "$.payload[1].dtype"),
    ("dtype", "S1000000000", "unknown_dtype", "$.payload[1].dtype"),
    ("dtype", "float", "unknown_dtype", "$.payload[1].dtype"),
    ("dtype", "uint8 ", "unknown_dtype", "$.payload[1].dtype"),
    ("dtype", 8, "wrong_type", "$.payload[1].dtype"),
    ("shape", None, "wrong_type", "$.payload[1].shape"),
    ("shape", 6, "wrong_type", "$.payload[1].shape"),
    ("shape", "23", "wrong_type", "$.payload[1].shape"),
    ("shape", {"2": 3}, "wrong_type", "$.payload[1].shape"),
    ("shape", [-1, 4], "out_of_range", "$.payload[1].shape[0]"),
    ("shape", [2, 2**63], "out_of_range", "$.payload[1].shape[1]"),
    ("shape", [2**32, 2**32], "out_of_range", "$.payload[1].shape"),
    ("shape", [0, 2**40, 2**40], "out_of_range", "$.payload[1].shape"),
    ("shape", [True, 3], "wrong_type", "$.payload[1].shape[0]"),
    ("shape", [2, 3.0], "wrong_type", "$.payload[1].shape[1]"),
    ("shape", [2, "3"], "wrong_type", "$.payload[1].shape[1]"),
    ("shape", [2, [3]], "wrong_type", "$.payload[1].shape[1]"),
    ("shape", [1] * (MAX_NDIM + 1), "too_many_dimensions", "$.payload[1].shape"),
    ("length", 23, "length_mismatch", "$.payload[1].length"),
    ("length", 25, "length_mismatch", "$.payload[1].length"),
    ("length", -24, "out_of_range", "$.payload[1].length"),
    ("length", 24.0, "wrong_type", "$.payload[1].length"),
]


@pytest.mark.parametrize(("key", "value", "reason", "place"), BAD, ids=lambda v: str(v)[:24])
def test_an_illegal_value_is_refused_with_its_place_in_every_form(
    key: str, value: object, reason: str, place: str
) -> None:
    obj = OBJECT | {key: value}
    array = [*[obj[k] for k in OBJECT], obj.get("length")]
    built = segment(**{key: tuple(value) if isinstance(value, list) else value})
    for form in (obj, array, built):
        error = refused([OBJECT, form])
        assert (error.reason, error.index) == (reason, 1)
        assert str(error).endswith(f"- at {place}"), error
        assert str(error) == str(error).strip()
        assert len(str(error)) < 500
        assert isinstance(error, PathError) is (reason == "illegal_path")
    with pytest.raises(SegmentError):
        check(built)


@pytest.mark.parametrize("key", list(OBJECT))
def test_a_missing_key_is_named(key: str) -> None:
    error = refused([{k: v for k, v in OBJECT.items() if k != key}])
    assert (error.reason, error.index) == ("missing_key", 0)
    assert f"has no '{key}'" in str(error)


def test_a_mapping_that_makes_up_values_for_missing_keys_is_not_asked_for_them() -> None:
    for key in OBJECT:
        made_up = defaultdict(int, {k: v for k, v in OBJECT.items() if k != key})
        assert refused([made_up]).reason == "missing_key"


@pytest.mark.parametrize("later", [{}, [], 5, {"rows": 1}], ids=repr)
def test_of_illegal_items_the_first_is_named_whatever_is_wrong_with_the_next(later: object) -> None:
    for first in (OBJECT | {"offset": -1}, [*ARRAY[:2], -1, *ARRAY[3:]]):
        error = refused([OBJECT, first, ARRAY, later])
        assert (error.reason, error.index) == ("out_of_range", 1)
    error = refused([OBJECT, ARRAY, later, OBJECT | {"offset": -1}])
    assert error.index == 2


class Reordered(Segment, frozen=True, array_like=True, kw_only=True):
    """What is named again for keywords alone stands after the rest."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    length: int | None = None


def test_an_instance_of_a_subclass_with_another_order_of_fields_is_read_by_name() -> None:
    assert Reordered.__struct_fields__[2:5] == ("pos", "rows", "offset")
    made = Reordered(
        field="f", file="/p/a", offset=24, pos=8, rows=3, dtype="uint8", shape=(2,), length=6
    )
    for items in ([made], [OBJECT, made], [made, ARRAY]):
        assert Segment("f", "/p/a", 24, 8, 3, "uint8", (2,), 6) in decode_segments(items)


@pytest.mark.parametrize("key", ["field", "file", "dtype", "shape"])
def test_a_subclass_of_str_or_tuple_is_refused_before_and_after_its_like_was_seen(key: str) -> None:
    kind = type("Mine", (tuple if key == "shape" else str,), {})
    bad = OBJECT | {"file": f"/shared/{key}/a.bin", "shape": (len(key), 17)}
    good, bad = bad, bad | {key: kind(bad[key])}
    for _ in range(2):
        assert refused([bad]).reason == "wrong_type"
        decode_segments([good])


def test_a_short_array_says_how_many_elements_it_needs() -> None:
    error = refused([ARRAY[:6]])
    assert (error.reason, error.expected, error.actual) == ("missing_key", 7, 6)


@pytest.mark.parametrize(
    "junk",
    [7, "[]", True, 1.5, {"a": 1}, object(), [7], [None], ["x"], [[[]]], b"", b"[", b"{}", b"7",
     b"nul", b"[" * 100_000, b"\xc1", b"\xd9", msgspec.msgpack.encode({"a": 1}),
     msgspec.msgpack.encode([msgspec.msgpack.Ext(1, b"x")]), b"\x91\x81\x90\x01"],
    ids=lambda junk: str(junk)[:20],
)  # fmt: skip
def test_what_is_no_list_of_segments_is_refused(junk: object) -> None:
    assert "- at $.payload" in str(refused(junk))


def test_floods_are_refused_with_the_limit_named() -> None:
    error = refused([None] * (MAX_SEGMENTS + 1))
    assert (error.reason, error.expected, error.actual) == (
        "too_many_segments", MAX_SEGMENTS, MAX_SEGMENTS + 1,
    )  # fmt: skip
    error = refused(b"[" + b" " * MAX_MESSAGE)
    assert (error.reason, error.expected) == ("message_too_large", MAX_MESSAGE)
    error = refused([OBJECT | {"shape": [1] * 1_000_000}])
    assert (error.reason, error.actual) == ("too_many_dimensions", 1_000_000)


def test_the_largest_numbers_that_are_legal_are_taken() -> None:
    for legal in (
        segment(offset=MAX_INT - 24),
        segment(pos=MAX_INT - 4),
        segment(shape=(0, MAX_INT // 4)),
        segment(shape=(1,) * MAX_NDIM),
        segment(rows=0, shape=(2**62,)),
    ):
        assert decode_segments([legal]) == [legal]


def test_encoding_gives_exactly_the_upstream_keys() -> None:
    with_length = segment(length=24)
    assert encode_segments([with_length]) == [OBJECT]
    assert list(encode_segments([with_length])[0]) == list(OBJECT)
    assert encode_segments([segment(), with_length], form="array") == [ARRAY, [*ARRAY, 24]]
    with pytest.raises(ValueError, match="form is 'dict'"):
        encode_segments([], form="dict")


def test_the_struct_itself_travels_as_an_array() -> None:
    encoded = msgspec.msgpack.encode([segment()])
    assert msgspec.msgpack.decode(encoded) == [[*ARRAY, None]]
    assert decode_segments(encoded) == [segment()]


def test_a_segment_knows_its_size() -> None:
    one = segment(dtype="uint16")
    assert (one.end, one.row_nbytes, one.nbytes) == (6, 12, 48)
    ragged = segment(field="sampling_mask", dtype="uint32", shape=())
    assert (ragged.row_nbytes, ragged.nbytes) == (4, None)
    assert segment(field="sampling_mask", dtype="uint32", shape=(), length=99).nbytes == 99
    assert segment(field="sampling_mask", dtype="int32", shape=(5,)).nbytes == 80
    with pytest.raises(SegmentError, match="dtype is 'uint7'"):
        _ = segment(dtype="uint7").nbytes


def test_clip_cuts_and_keeps_positions() -> None:
    assert clip([segment()], 3, 5) == [segment(offset=6, pos=3, rows=2)]
    assert clip([segment()], 0, 9) == [segment()]
    assert clip([segment(length=24)], 3, 9) == [segment(offset=6, pos=3, rows=3, length=18)]
    ragged = segment(field="sampling_mask", dtype="uint32", shape=(), length=60)
    assert clip([ragged], 3, 5) == [
        segment(field="sampling_mask", dtype="uint32", shape=(), offset=4, pos=3, rows=2)
    ]


def test_a_field_clipped_to_nothing_keeps_one_segment_of_no_rows() -> None:
    other = segment(field="mine", pos=100)
    assert clip([segment(), segment(pos=6), other], 100, 200) == [
        segment(pos=100, rows=0),
        other,
    ]
    [kept] = clip([segment(pos=50)], -9, -3)
    assert (kept.pos, kept.rows) == (0, 0)


def test_shift_moves_and_refuses_to_leave_the_range() -> None:
    assert payload.shift([segment()], 10) == [segment(pos=12)]
    assert payload.shift([segment()], -2) == [segment(pos=0)]
    for by in (-3, MAX_INT):
        with pytest.raises(ValueError, match=f"shift by {by} moves pos 2"):
            payload.shift([segment()], by)


def test_gaps_lists_what_no_segment_covers() -> None:
    segments = [segment(), segment(pos=8, rows=1), segment(pos=3, rows=0), segment(field="mine")]
    assert payload.gaps(segments, "routed_experts", 0, 10) == [(0, 2), (6, 8), (9, 10)]
    assert payload.gaps(segments, "routed_experts", 2, 6) == []
    assert payload.gaps(segments, "routed_experts", 4, 4) == []
    assert payload.gaps(segments, "absent", -2, 2) == [(-2, 2)]


@pytest.mark.parametrize(
    "function", [lambda s: clip(s, 5, 3), lambda s: payload.gaps(s, "f", 5, 3)]
)
def test_a_window_that_ends_before_it_starts_is_the_callers_mistake(function) -> None:
    with pytest.raises(ValueError, match=r"window \[5, 3\)") as caught:
        function([segment()])
    assert not isinstance(caught.value, payload.PayloadError)


@pytest.mark.parametrize(
    "function",
    [
        lambda s: clip(s, 0, 9),
        lambda s: payload.shift(s, 1),
        lambda s: payload.gaps(s, "routed_experts", 0, 9),
        encode_segments,
    ],
)
def test_a_segment_built_by_hand_meets_the_same_verdict_everywhere(function) -> None:
    with pytest.raises(SegmentError, match=r"pos is -2: .* at \$\.payload\[0\]\.pos"):
        function([segment(pos=-2)])


def test_a_list_of_several_forms_is_decoded_in_order_and_subclasses_are_plain_segments() -> None:
    class Mine(Segment):  # type: ignore[misc]
        extra: int = 7

    first = decode_segments([OBJECT])[0]
    loose = msgspec.structs.replace(first, shape=list(first.shape))
    mine = Mine(*msgspec.structs.astuple(first))
    forms = [first, OBJECT, first, loose, ARRAY, mine, dict(OBJECT)]
    decoded = decode_segments(forms)
    assert [type(one) for one in decoded] == [Segment] * len(forms)
    assert [msgspec.structs.replace(one, length=None) for one in decoded] == [
        msgspec.structs.replace(first, length=None)
    ] * len(forms)
    for shape in (None, "48", {}):
        for form in (msgspec.structs.replace(first, shape=shape), {**OBJECT, "shape": shape}):
            error = refused([first, OBJECT, form])
            assert (error.reason, error.index) == ("wrong_type", 2)
