import base64
import binascii
import copy
import json
import math
import pickle
import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from payload import (
    InlineError,
    PathError,
    PayloadWriteError,
    Ragged,
    Resolver,
    Writer,
    decode_segments,
)
from payload.dtypes import DTYPES
from payload.inline import (
    decode_array,
    decode_routed_experts,
    decode_sampling_mask,
    decode_sampling_mask_logprobs,
    spill,
)

DATA = Path(__file__).parent.parent / "data"
WIRE: dict[str, Any] = json.loads((DATA / "golden.json").read_text())["wire"]
ROWS = np.arange(1, 25, dtype=np.uint8).reshape(4, 2, 3)
MASK = Ragged.from_lists([[7], [8, 9, 10], []])
INTEGERS = [name for name, dtype in DTYPES.items() if dtype.kind in "iu"]


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def packed(array: Any, dtype: str = "int32", **more: Any) -> dict[str, Any]:
    array = np.asarray(array, dtype)
    return {
        "data": b64(array.tobytes()),
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        **more,
    }


def npy(array: np.ndarray, version: tuple[int, int] = (1, 0)) -> bytes:
    file = BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def npy_with(header: str | bytes, data: bytes = bytes(24), version: bytes = b"\1\0") -> str:
    text = header.encode() if isinstance(header, str) else header
    size = len(text).to_bytes(2 if version == b"\1\0" else 4, "little")
    return b64(b"\x93NUMPY" + version + size + text + data)


def choice(**keys: Any) -> dict[str, Any]:
    return {"index": 0, "token_ids": [5, 6, 7], "finish_reason": "stop", **keys}


def refused(call: Callable[..., Any], *arguments: Any, **options: Any) -> InlineError:
    with pytest.raises(InlineError) as caught:
        call(*arguments, **options)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (str(error), error.reason, error.field) == (
        str(caught.value),
        caught.value.reason,
        caught.value.field,
    )
    assert len(str(error)) < 500
    return error


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if not path.is_dir()]


# What servers send


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("routed_experts_inline", ROWS),
        ("routed_experts_stock_vllm_npy_b64", ROWS),
        ("routed_experts_base85_old", np.arange(6, dtype=np.int32).reshape(1, 2, 3)),
    ],
)
@pytest.mark.parametrize("kind", [str, str.encode, lambda s: memoryview(s.encode())])
def test_every_golden_form_of_routed_experts_is_decoded(
    name: str, array: np.ndarray, kind: Callable[[str], Any]
) -> None:
    value = WIRE[name]
    value = kind(value) if isinstance(value, str) else value | {"data": kind(value["data"])}
    found = decode_routed_experts(value)
    np.testing.assert_array_equal(found, array, strict=True)
    assert found.dtype.isnative
    assert found.flags.aligned


def test_the_golden_packed_arrays_are_decoded() -> None:
    logprobs = decode_array(WIRE["completion_logprobs_packed"])
    expected = np.array(WIRE["completion_logprobs_packed"]["_decoded"], np.float32)
    np.testing.assert_array_equal(logprobs, expected, strict=True)
    mask = decode_sampling_mask(WIRE["sampling_mask_packed"])
    assert [row.tolist() for row in mask] == WIRE["sampling_mask_packed"]["_rows"]
    assert mask.values.dtype == np.int32
    packed_logprobs = WIRE["sampling_mask_logprobs_packed"]
    found = decode_sampling_mask_logprobs(packed_logprobs, mask)
    values = [float(value) for value in packed_logprobs["_decoded"]]
    np.testing.assert_array_equal(found.values, np.array(values, np.float32), strict=True)
    assert found.counts.tolist() == [1, 3, 0]


@pytest.mark.parametrize("name", DTYPES)
def test_a_packed_array_of_any_dtype_keeps_its_bits(name: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(name)
    np.testing.assert_array_equal(decode_array(packed(array, name)), array, strict=True)
    scalar = decode_array(packed(array[0, 1], name))
    assert (scalar.shape, scalar.item()) == ((), 1)


@pytest.mark.parametrize("name", INTEGERS)
def test_routed_experts_have_the_dtype_that_was_sent(name: str) -> None:
    array = ROWS.astype(name)
    for value in (
        packed(array, name),
        packed(array, name, start=None),
        b64(npy(array)),
        b64(npy(array, (2, 0))),
    ):
        np.testing.assert_array_equal(decode_routed_experts(value), array, strict=True)


@pytest.mark.parametrize("more", [{}, {"start": 2}, {"dtype": None}, {"start": None}])
def test_routed_experts_without_dtype_are_uint8(more: dict[str, Any]) -> None:
    value = {"data": b64(ROWS.tobytes()), "shape": [4, 2, 3], **more}
    np.testing.assert_array_equal(decode_routed_experts(value), ROWS, strict=True)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 100])
def test_base85_is_told_from_base64_by_its_length(count: int) -> None:
    array = np.arange(count, dtype=np.int32).reshape(1, 1, count)
    old = {"data": base64.b85encode(array.tobytes()).decode(), "shape": [1, 1, count]}
    np.testing.assert_array_equal(decode_routed_experts(old), array, strict=True)
    new = old | {"data": b64(array.astype(np.uint8).tobytes())}
    np.testing.assert_array_equal(decode_routed_experts(new), array.astype(np.uint8), strict=True)
    # With a start it is of a server that sends base64.
    assert refused(decode_routed_experts, old | {"start": 0}).reason in ("base64", "shape")


def test_what_is_decoded_cannot_be_written_to() -> None:
    for value in (WIRE["routed_experts_inline"], WIRE["routed_experts_stock_vllm_npy_b64"]):
        assert not decode_routed_experts(value).flags.writeable


def test_a_foreign_npy_header_of_any_length_gives_an_aligned_array() -> None:
    header = "{'descr': '<i4', 'fortran_order': False, 'shape': (1, 2, 3)}"
    for pad in range(8):
        value = npy_with(header + " " * pad, np.arange(6, dtype="<i4").tobytes())
        found = decode_routed_experts(value)
        assert found.tolist() == [[[0, 1, 2], [3, 4, 5]]]
        assert found.flags.aligned


def test_a_mask_of_any_form_is_the_same() -> None:
    ids, counts = [7, 8, 9, 10], [1, 3, 0]
    for value in (
        [[7], [8, 9, 10], []],
        ((7,), (8, 9, 10), ()),
        {"ids": packed(ids), "counts": packed(counts)},
        {"ids": packed(ids, "int64"), "counts": packed(counts, "uint8")},
        {"ids": packed(ids)["data"], "counts": packed(counts)["data"].encode()},
    ):
        mask = decode_sampling_mask(value)
        assert mask.values.dtype == np.int32
        assert (mask.values.tolist(), mask.counts.tolist()) == (ids, counts)


def test_nothing_is_a_value_too() -> None:
    empty = {"ids": packed([]), "counts": packed([])}
    for value in ([], (), empty):
        mask = decode_sampling_mask(value)
        assert (len(mask), mask.values.size) == (0, 0)
        assert len(decode_sampling_mask_logprobs([], mask)) == 0
        assert len(decode_sampling_mask_logprobs(packed([], "float32"), mask)) == 0
    for value in (
        {"data": "", "shape": [0, 2, 3]},
        {"data": "", "shape": [0, 2, 3], "start": 6, "dtype": "uint8"},
        b64(npy(ROWS[:0])),
    ):
        found = decode_routed_experts(value)
        assert (found.shape, found.dtype) == ((0, 2, 3), np.uint8)


def test_the_greatest_ids_fit() -> None:
    for value in (
        [[2**31 - 1, 0]],
        {"ids": packed([2**31 - 1, 0], "int64"), "counts": packed([2])},
    ):
        assert decode_sampling_mask(value).values.tolist() == [2**31 - 1, 0]


def test_logprobs_in_lists_round_to_float32() -> None:
    rows = [[0], [-0.1, -math.inf, -9999.0], []]
    found = decode_sampling_mask_logprobs(rows, MASK)
    expected = np.array([0, -0.1, -math.inf, -9999.0], np.float32)
    np.testing.assert_array_equal(found.values, expected, strict=True)
    assert found.offsets.tolist() == MASK.offsets.tolist()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4))
def test_packed_logprobs_keep_their_bits(bits: list[int]) -> None:
    raw = np.array(bits, "<u4").tobytes()
    value = {"data": b64(raw), "shape": [4], "dtype": "float32"}
    assert decode_sampling_mask_logprobs(value, MASK).values.tobytes() == raw


@given(st.lists(st.lists(st.floats(width=32, allow_nan=False, max_value=0), max_size=4)))
def test_lists_and_packed_logprobs_are_the_same(rows: list[list[float]]) -> None:
    mask = Ragged.from_lists([range(len(row)) for row in rows])
    flat = [value for row in rows for value in row]
    one = decode_sampling_mask_logprobs(json.loads(json.dumps(rows)), mask)
    two = decode_sampling_mask_logprobs(packed(flat, "float32"), mask)
    np.testing.assert_array_equal(one.values, two.values, strict=True)


# What is malformed, and where

EXPERTS = packed(ROWS, "uint8", start=2)
HEADER = "{'descr': '|u1', 'fortran_order': False, 'shape': (4, 2, 3), }"


def deep(levels: int = 100_000) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "reason", "message"),
    [
        (None, "form", "routed_experts is None: needs an object with data and shape"),
        (7, "form", "routed_experts is 7"),
        ([[[1, 2], [3, 4]]], "form", "routed_experts is a list"),
        ({}, "shape", "shape is None: needs a list of integers - at $.routed_experts.shape"),
        (EXPERTS | {"data": None}, "base64", "data is None: needs base64 text - at $.routed_experts.data"),
        (EXPERTS | {"data": [1, 2]}, "base64", "data is a list"),
        (EXPERTS | {"data": "AQ\n"}, "base64", "data is not base64: Only base64 data is allowed - at $.routed_experts.data"),
        (EXPERTS | {"data": "AQI"}, "base64", "Incorrect padding"),
        (EXPERTS | {"data": "A"}, "base64", "data is not base64"),
        (EXPERTS | {"data": "AQ==AQ=="}, "base64", "data is not base64"),
        (EXPERTS | {"data": "_-8="}, "base64", "data is not base64"),
        (EXPERTS | {"data": "\u0661\ud800"}, "base64", "data is not base64"),
        (EXPERTS | {"data": memoryview(b"AAAAAAAA")[::2]}, "base64", "data is not base64"),
        (EXPERTS | {"data": b64(bytes(23))}, "shape", "shape is [4, 2, 3] of uint8: needs 24 bytes, data has 23 - at $.routed_experts.shape"),
        (EXPERTS | {"data": b64(bytes(25))}, "shape", "needs 24 bytes, data has 25"),
        (EXPERTS | {"dtype": "uint16"}, "shape", "shape is [4, 2, 3] of uint16: needs 48 bytes, data has 24"),
        (EXPERTS | {"dtype": "u1"}, "dtype", "dtype is 'u1': needs one of uint8, "),
        (EXPERTS | {"dtype": "O"}, "dtype", "dtype is 'O'"),
        (EXPERTS | {"dtype": "float32"}, "dtype", "dtype is 'float32'"),
        (EXPERTS | {"dtype": ["uint8"]}, "dtype", "dtype is a list"),
        (EXPERTS | {"dtype": {}}, "dtype", "dtype is a dict"),
        (EXPERTS | {"dtype": "x" * 10**6}, "dtype", "(1000000 characters)"),
        (EXPERTS | {"dtype": deep()}, "dtype", "- at $.routed_experts.dtype"),
        (EXPERTS | {"shape": 24}, "shape", "shape is 24"),
        (EXPERTS | {"shape": "423"}, "shape", "shape is '423'"),
        (EXPERTS | {"shape": [4, 6]}, "shape", "shape has 2 dimensions: needs 3 (rows, layers, top_k) - at $.routed_experts.shape"),
        (EXPERTS | {"shape": [1, 4, 2, 3]}, "shape", "shape has 4 dimensions"),
        (EXPERTS | {"shape": [1] * 10**6}, "shape", "shape has 1000000 dimensions"),
        (EXPERTS | {"shape": [-4, -2, 3]}, "shape", "shape has -4 at axis 0"),
        (EXPERTS | {"shape": [4, 2, 3.0]}, "shape", "shape has 3.0 at axis 2"),
        (EXPERTS | {"shape": [24, True, True]}, "shape", "shape has True at axis 1"),
        (EXPERTS | {"shape": [4, 2, None]}, "shape", "shape has None at axis 2"),
        (EXPERTS | {"shape": [4, 2, deep()]}, "shape", "shape has a list at axis 2"),
        (EXPERTS | {"shape": [10**9999, 2, 3]}, "shape", "shape has an integer of 33216 bits at axis 0"),
        (EXPERTS | {"shape": [2**62, 2**62, 2**62]}, "shape", "needs 9807971461541688"),
        (EXPERTS | {"shape": [0, 2**62, 2**62], "data": ""}, "shape", "at most 9223372036854775807 bytes are allowed"),
        (EXPERTS | {"start": -1}, "position", "start is -1: needs an integer, 0 or more - at $.routed_experts.start"),
        (EXPERTS | {"start": True}, "position", "start is True"),
        (EXPERTS | {"start": 2.0}, "position", "start is 2.0"),
        (EXPERTS | {"start": 2**63}, "position", "start is 9223372036854775808"),
        (EXPERTS | {"start": {}}, "position", "start is a dict"),
        ({"data": "A" * 28, "shape": [4, 2, 3]}, "shape", "needs 32 characters of base64 (uint8) or 120 of base85 (int32), data has 28 - at $.routed_experts.shape"),
        ({"data": "AA=A" * 8, "shape": [4, 2, 3]}, "base64", "data is not base64"),
        ({"data": "\x00" * 120, "shape": [4, 2, 3]}, "base85", "data is not base85: bad base85 character at position 0 - at $.routed_experts.data"),
        ({"data": "~" * 120, "shape": [4, 2, 3]}, "base85", "data is not base85: base85 overflow"),
        ({"data": "\u0661" * 120, "shape": [4, 2, 3]}, "base85", "data is not base85"),
        ({"data": 5, "shape": [4, 2, 3]}, "base64", "data is 5"),
        ("", "npy", "routed_experts begins with b'': needs a .npy file - at $.routed_experts"),
        ("junk!", "base64", "routed_experts is not base64"),
        (b64(bytes(24)), "npy", "routed_experts begins with b'\\x00"),
        (b64(b"\x93NUMPY"), "npy", "version of the .npy file is (): needs 1.0 or 2.0"),
        (npy_with(HEADER, version=b"\3\0"), "npy", "version of the .npy file is (3, 0)"),
        (b64(b"\x93NUMPY\1\0"), "npy", "header of the .npy file has 0 bytes"),
        (b64(b"\x93NUMPY\1\0\x76\0{'descr'"), "npy", "header of the .npy file has 118 bytes: at most 1024 are allowed, 8 are there"),
        (npy_with(" " * 1025), "npy", "header of the .npy file has 1025 bytes"),
        (b64(b"\x93NUMPY\2\0\xff\xff\xff\xff{}"), "npy", "header of the .npy file has 4294967295 bytes"),
        (npy_with("{}"), "npy", "is no dict of descr, fortran_order and shape"),
        (npy_with("{'descr': '|u1', 'fortran_order': False, 'shape': (4, 2, 3), 'x': 1}"), "npy", "is no dict of"),
        (npy_with("{'descr': '|u1', 'fortran_order': False, 'shape': __import__('os')}"), "npy", "is no dict of"),
        (npy_with("(" * 1000), "npy", "is no dict of"),
        (npy_with("-" * 1000 + "1"), "npy", "is no dict of"),
        (npy_with("[" * 90 + "]" * 90), "npy", "is no dict of"),
        (npy_with("{[]: 1}"), "npy", "is no dict of"),
        (npy_with("{'a': '\\d'}"), "npy", "is no dict of"),
        (npy_with(b"\0\xff"), "npy", "is no dict of"),
        (npy_with(HEADER.replace("False", "True")), "npy", "fortran_order of the .npy file is True: needs False"),
        (npy_with(HEADER.replace("False", "0")), "npy", "fortran_order of the .npy file is 0"),
        (npy_with(HEADER.replace("|u1", ">u2")), "dtype", "descr of the .npy file is '>u2'"),
        (npy_with(HEADER.replace("|u1", "|O")), "dtype", "descr of the .npy file is '|O'"),
        (npy_with(HEADER.replace("|u1", "<f4")), "dtype", "descr of the .npy file is '<f4'"),
        (npy_with(HEADER.replace("'|u1'", "[('a', '|u1')]")), "dtype", "descr of the .npy file is a list"),
        (npy_with(HEADER.replace("(4, 2, 3)", "(4, 6)")), "shape", "shape has 2 dimensions"),
        (npy_with(HEADER.replace("4, 2", "4, -2")), "shape", "shape has -2 at axis 1"),
        (npy_with(HEADER.replace("4, 2", "4, 2.0")), "shape", "shape has 2.0 at axis 1"),
        (npy_with(HEADER.replace("(4, 2, 3)", "24")), "shape", "shape is 24"),
        (npy_with(HEADER, bytes(23)), "shape", "needs 24 bytes, data has 23"),
        (npy_with(HEADER, bytes(25)), "shape", "needs 24 bytes, data has 25"),
        (b64(npy(np.asfortranarray(ROWS))), "npy", "fortran_order"),
        (b64(npy(np.array([[[None]]], object))), "dtype", "descr of the .npy file is '|O'"),
    ],
    ids=lambda v: str(type(v).__name__ if isinstance(v, dict) else v)[:40],
)  # fmt: skip
def test_malformed_routed_experts_are_refused_with_the_place(
    value: Any, reason: str, message: str
) -> None:
    error = refused(decode_routed_experts, value)
    assert message in str(error)
    assert "- at $.routed_experts" in str(error)
    assert (error.reason, error.field) == (reason, "routed_experts")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "array is None: needs an object with data, shape and dtype - at $"),
        ([0.5], "array is a list"),
        (packed([1.0], "float32") | {"dtype": None}, "dtype is None: needs one of bool, uint8, "),
        (packed([1.0], "float32") | {"dtype": "<f4"}, "- at $.dtype"),
        (packed([1.0], "float32") | {"shape": [2]}, "needs 8 bytes, data has 4 - at $.shape"),
        (packed([1.0], "float32") | {"shape": [1] * 33}, "shape has 33 dimensions: needs at most 32"),
        (packed([1.0], "float32") | {"data": "?"}, "data is not base64"),
        ({"data": "AAEC", "shape": [3], "dtype": "bool"}, "data of bool has other bytes than 0 and 1"),
        ({"version": 1, "encoding": "base64", "dtype": "<f4", "count": 1, "data": "AAAAvw=="}, "dtype is '<f4'"),
    ],
)  # fmt: skip
def test_a_malformed_packed_array_is_refused_with_the_place(value: Any, message: str) -> None:
    error = refused(decode_array, value)
    assert message in str(error)
    assert error.field is None


V1 = WIRE["sampling_mask_int64_packed_v1"]["rows"]
V2 = WIRE["sampling_mask_int64_packed_v2"]["row"]


def mask_of(ids: Any, counts: Any) -> dict[str, Any]:
    return {"ids": ids, "counts": counts}


@pytest.mark.parametrize(
    ("value", "reason", "message"),
    [
        (None, "form", "sampling_mask is None: needs a list of lists, or an object with ids and counts - at $.sampling_mask"),
        ("AAAA", "form", "sampling_mask is 'AAAA'"),
        ([7], "form", "row 0 is 7: needs a list - at $.sampling_mask[0]"),
        ([[7], None], "form", "row 1 is None: needs a list - at $.sampling_mask[1]"),
        ([[7], "89"], "form", "row 1 is '89'"),
        ([[7], {"ids": 1}], "form", "row 1 is a dict"),
        ([[7], [8, True]], "ids", "id is True: needs an integer, 0 to 2147483647 - at $.sampling_mask[1][1]"),
        ([[7], [8.0]], "ids", "id is 8.0: needs an integer, 0 to 2147483647 - at $.sampling_mask[1][0]"),
        ([[None]], "ids", "id is None"),
        ([["7"]], "ids", "id is '7'"),
        ([[[7]]], "ids", "id is a list"),
        (deep(), "ids", "id is a list"),
        ([[math.nan]], "ids", "id is nan"),
        ([[7, -1]], "ids", "id -1 does not fit int32: needs 0 to 2147483647 - at $.sampling_mask[0][1]"),
        ([[2**31]], "ids", "id 2147483648 does not fit int32: needs 0 to 2147483647 - at"),
        ([[10**9999]], "ids", "id an integer of 33216 bits does not fit int32"),
        (V1, "ids", "with a logprob in its high half, send the low half, 5 - at $.sampling_mask[0][0]"),
        ([[7], V2], "ids", "with a logprob in its high half, send the low half, 5 - at $.sampling_mask[1][0]"),
        (mask_of(packed(V1[0], "int64"), packed([2])), "ids", "send the low half, 5 - at $.sampling_mask.ids[0]"),
        (mask_of(packed([3, -1]), packed([2])), "ids", "id -1 does not fit int32: needs 0 to 2147483647 - at $.sampling_mask.ids[1]"),
        (mask_of(packed([2**32 - 1], "uint32"), packed([1])), "ids", "id 4294967295 does not fit int32"),
        (mask_of(packed([2**64 - 1], "uint64"), packed([1])), "ids", "id 18446744073709551615 does not fit int32"),
        (mask_of(packed([7.0], "float32"), packed([1])), "dtype", "dtype is 'float32': needs one of uint8, uint16, uint32, uint64, int8, int16, int32, int64 - at $.sampling_mask.ids.dtype"),
        (mask_of(packed([7]) | {"dtype": None}, packed([1])), "dtype", "dtype is None"),
        (mask_of(packed([[7]]), packed([1])), "shape", "shape has 2 dimensions: needs 1 - at $.sampling_mask.ids.shape"),
        (mask_of(packed([7]), packed(1)), "shape", "shape has 0 dimensions: needs 1 - at $.sampling_mask.counts.shape"),
        (mask_of(packed([7]), None), "form", "counts is None: needs an object with data, shape and dtype - at $.sampling_mask.counts"),
        (mask_of(None, packed([1])), "form", "ids is None"),
        (mask_of([7], [1]), "form", "ids is a list"),
        ({}, "form", "ids is None"),
        (mask_of("AAA=", packed([1])), "shape", "ids has 2 bytes: needs a multiple of 4, int32 - at $.sampling_mask.ids"),
        (mask_of("A", packed([1])), "base64", "ids is not base64"),
        (mask_of(packed([7, 8]), packed([1])), "counts", "counts add up to 1: needs 2, the number of ids - at $.sampling_mask.counts"),
        (mask_of(packed([7, 8]), packed([3])), "counts", "counts add up to 3: needs 2"),
        (mask_of(packed([7, 8]), packed([3, -1])), "counts", "count is -1: needs 0 to 9223372036854775807 - at $.sampling_mask.counts[1]"),
        (mask_of(packed([7]), packed([2**64 - 1, 2], "uint64")), "counts", "count is 18446744073709551615"),
        (mask_of(packed([7]), packed([2**63 - 1] * 2 + [3], "uint64")), "counts", "counts add up to 18446744073709551617"),
    ],
    ids=lambda v: str(type(v).__name__ if isinstance(v, (dict, list)) else v)[:40],
)  # fmt: skip
def test_a_malformed_mask_is_refused_with_the_place(value: Any, reason: str, message: str) -> None:
    error = refused(decode_sampling_mask, value)
    assert message in str(error)
    assert (error.reason, error.field) == (reason, "sampling_mask")


@pytest.mark.parametrize(
    ("value", "reason", "message"),
    [
        (None, "form", "sampling_mask_logprobs is None: needs a list of lists, or an object"),
        ([[0.0], [0.0] * 3], "counts", "sampling_mask_logprobs has 2 rows: needs 3, as the mask - at $.sampling_mask_logprobs"),
        ([[0.0], [0.0] * 2, [0.0]], "counts", "row 1 has 2 logprobs: needs 3, as the mask - at $.sampling_mask_logprobs[1]"),
        ([[0.0], [0.0, None, 0.0], []], "logprobs", "logprob is None: needs a number - at $.sampling_mask_logprobs[1][1]"),
        ([[False], [0.0] * 3, []], "logprobs", "logprob is False: needs a number - at $.sampling_mask_logprobs[0][0]"),
        ([[0.0], [0.0, 0.0, "-inf"], []], "logprobs", "logprob is '-inf'"),
        ([[0.0], [0.0, 0.0, math.nan], []], "logprobs", "logprob is nan: needs a float32 number, or -Infinity - at $.sampling_mask_logprobs[1][2]"),
        ([[math.inf], [0.0] * 3, []], "logprobs", "logprob is inf"),
        ([[-1e39], [0.0] * 3, []], "logprobs", "logprob is -1e+39"),
        ([[-(10**9999)], [0.0] * 3, []], "logprobs", "logprob is an integer of 33216 bits"),
        ([[deep()], [0.0] * 3, []], "logprobs", "logprob is a list"),
        (packed([0.0] * 3, "float32"), "counts", "sampling_mask_logprobs has 3 values: needs 4, as many as the mask has ids - at $.sampling_mask_logprobs.shape"),
        (packed([0.0] * 4, "float64"), "dtype", "dtype is 'float64': needs float32 - at $.sampling_mask_logprobs.dtype"),
        (packed([[0.0] * 4], "float32"), "shape", "shape has 2 dimensions: needs 1"),
        ({}, "dtype", "dtype is None"),
    ],
    ids=lambda v: str(type(v).__name__ if isinstance(v, (dict, list)) else v)[:40],
)  # fmt: skip
def test_malformed_logprobs_are_refused_with_the_place(
    value: Any, reason: str, message: str
) -> None:
    error = refused(decode_sampling_mask_logprobs, value, MASK)
    assert message in str(error)
    assert (error.reason, error.field) == (reason, "sampling_mask_logprobs")


# Spilling


def captured() -> list[Any]:
    found = []
    for file in sorted((DATA / "vllm").glob("*.response.json")):
        request = json.loads(Path(str(file).replace(".response.", ".request.")).read_text())
        choices = json.loads(file.read_text()).get("choices", [])
        found += [
            pytest.param(request, sent, id=f"{file.name.split('.')[0]}-{sent['index']}")
            for sent in choices
        ]
    return found


def test_the_captured_bodies_are_there() -> None:
    assert len(captured()) == 19


@pytest.mark.parametrize(("request_body", "sent"), captured())
def test_a_captured_choice_spills_and_reads_back_byte_for_byte(
    request_body: dict[str, Any], sent: dict[str, Any], tmp_path: Path
) -> None:
    start = request_body["sampling_params"].get("routed_experts_prompt_start", 0)
    prompt_len, completion = len(request_body["token_ids"]), len(sent["token_ids"])
    before = copy.deepcopy(sent)
    spilled = spill(sent, Writer(tmp_path), prompt_len=prompt_len, start=start, payload_dir="v3")
    assert sent == before
    kept = {
        k: v for k, v in spilled.items() if k not in ("payload", "routed_experts", "sampling_mask")
    }
    assert kept == {k: v for k, v in sent.items() if k in kept}
    assert spilled["routed_experts"] is spilled["sampling_mask"] is None
    segments = decode_segments(json.dumps(spilled["payload"]).encode())
    experts = np.load(BytesIO(base64.b64decode(sent["routed_experts"])))
    with Resolver(tmp_path, verify="checksum") as resolver:
        read = resolver.resolve(segments)
    [found] = read.pop("routed_experts")
    np.testing.assert_array_equal(found, experts, strict=True)
    assert (segments[0].pos, segments[0].end) == (start, prompt_len + completion - 1)
    if sent["sampling_mask"] is not None:
        [mask] = read.pop("sampling_mask")
        assert [row.tolist() for row in mask] == sent["sampling_mask"]
        assert (segments[1].pos, segments[1].rows) == (prompt_len, completion)
    assert not read
    assert len(files(tmp_path)) == 1


def test_everything_packed_spills_in_the_order_of_the_contract(tmp_path: Path) -> None:
    sent = choice(
        sampling_mask_logprobs=WIRE["sampling_mask_logprobs_packed"],
        sampling_mask=WIRE["sampling_mask_packed"],
        routed_experts=WIRE["routed_experts_inline"],
        completion_logprobs=WIRE["completion_logprobs_packed"],
    )
    before = copy.deepcopy(sent)
    spilled = spill(sent, Writer(tmp_path), prompt_len=4, start=2)
    assert sent == before
    none = dict.fromkeys(("routed_experts", "sampling_mask", "sampling_mask_logprobs"))
    assert spilled == sent | none | {"payload": spilled["payload"]}
    places = [(s["field"], s["pos"], s["rows"]) for s in spilled["payload"]]
    assert places == [
        ("routed_experts", 2, 4),
        ("sampling_mask", 4, 3),
        ("sampling_mask_logprobs", 4, 3),
    ]
    assert all(len(segment) == 7 for segment in spilled["payload"])
    with Resolver(tmp_path, verify="checksum") as resolver:
        read = resolver.resolve(spilled["payload"])
    np.testing.assert_array_equal(read["routed_experts"][0], ROWS, strict=True)
    assert [row.tolist() for row in read["sampling_mask"][0]] == [[7], [8, 9, 10], []]
    assert read["sampling_mask_logprobs"][0].values.tolist() == [0.0, -1.0, -math.inf, -0.5]


def test_odd_bits_of_logprobs_come_through_a_file(tmp_path: Path) -> None:
    raw = struct.pack("<4I", 0x7FC00123, 0xFFFFFFFF, 0x80000000, 0x00000001)
    sent = choice(
        sampling_mask=[[7], [8, 9, 10], []],
        sampling_mask_logprobs={"data": b64(raw), "shape": [4], "dtype": "float32"},
    )
    spilled = spill(sent, Writer(tmp_path), prompt_len=4)
    with Resolver(tmp_path) as resolver:
        [found] = resolver.resolve(spilled["payload"])["sampling_mask_logprobs"]
    assert found.values.tobytes() == raw


@pytest.mark.parametrize("other", [{}, {"sampling_mask": None}])
def test_kept_tokens_are_a_sampling_mask(other: dict[str, Any], tmp_path: Path) -> None:
    sent = choice(kept_tokens=WIRE["sampling_mask_packed"], **other)
    spilled = spill(sent, Writer(tmp_path), prompt_len=4)
    assert spilled == sent | {"kept_tokens": None, "payload": spilled["payload"]}
    [segment] = spilled["payload"]
    assert (segment["field"], segment["pos"], segment["rows"]) == ("sampling_mask", 4, 3)


def test_a_decode_instance_has_rows_from_the_last_prompt_token_on(tmp_path: Path) -> None:
    sent = choice(routed_experts=packed(ROWS[:3], "uint8"))
    [segment] = spill(sent, Writer(tmp_path), prompt_len=9)["payload"]
    assert (segment["pos"], segment["rows"]) == (8, 3)


@pytest.mark.parametrize("value", [packed(ROWS[:0], "uint8", start=6), b64(npy(ROWS[:0])), {"data": "", "shape": [0, 2, 3]}])  # fmt: skip
def test_zero_rows_are_a_segment_of_zero_rows(value: Any, tmp_path: Path) -> None:
    spilled = spill(choice(routed_experts=value), Writer(tmp_path), prompt_len=4, start=6)
    [segment] = spilled["payload"]
    assert (segment["pos"], segment["rows"], segment["shape"]) == (6, 0, [2, 3])
    with Resolver(tmp_path) as resolver:
        assert resolver.resolve([segment])["routed_experts"][0].shape == (0, 2, 3)


def test_an_aborted_choice_without_a_token_spills(tmp_path: Path) -> None:
    sent = choice(token_ids=[], routed_experts=packed(ROWS[:3], "uint8", start=0), sampling_mask=[])
    spilled = spill(sent, Writer(tmp_path), prompt_len=4, start=0)
    assert [(s["pos"], s["rows"]) for s in spilled["payload"]] == [(0, 3), (4, 0)]


@pytest.mark.parametrize(
    "more", [{}, {"routed_experts": None, "sampling_mask": None}, {"payload": None}]
)
def test_nothing_inline_writes_nothing(more: dict[str, Any], tmp_path: Path) -> None:
    sent = choice(**more)
    spilled = spill(sent, Writer(tmp_path / "root"), prompt_len=4)
    assert spilled == sent | {"payload": None}
    assert spilled is not sent
    by_handle = choice(payload=[WIRE["segment_dict"]], routed_experts=None)
    assert spill(by_handle, Writer(tmp_path / "root"), prompt_len=4) == by_handle
    assert not files(tmp_path)


@pytest.mark.parametrize(
    ("more", "options", "reason", "message"),
    [
        ({"routed_experts": EXPERTS}, {"start": 3}, "position", "start is 3: 4 rows that end at token position 6 begin at 2 - at $.routed_experts"),
        ({"routed_experts": EXPERTS | {"start": 1}}, {}, "position", "start is 1: 4 rows that end at token position 6 begin at 2 - at $.routed_experts.start"),
        ({"routed_experts": EXPERTS | {"start": 1}}, {"start": 2}, "position", "start is 1: "),
        ({"routed_experts": EXPERTS}, {"start": 2, "prompt_len": 5}, "position", "start is 2: 4 rows that end at token position 7 begin at 3"),
        ({"routed_experts": EXPERTS}, {"prompt_len": 1}, "position", "routed_experts has 4 rows: 1 prompt and 3 completion tokens have at most 3 - at $.routed_experts"),
        ({"routed_experts": packed(ROWS[:0], "uint8"), "token_ids": []}, {"prompt_len": 0}, "position", "routed_experts has 0 rows: 0 prompt and 0 completion tokens have at most 0"),
        ({"routed_experts": "x"}, {}, "base64", "- at $.routed_experts"),
        ({"sampling_mask": [[7], [8]]}, {}, "counts", "sampling_mask has 2 rows: needs 3, one a completion token - at $.sampling_mask"),
        ({"kept_tokens": [[7], [8]]}, {}, "counts", "kept_tokens has 2 rows: needs 3, one a completion token - at $.kept_tokens"),
        ({"kept_tokens": [[7], [8], [-1]]}, {}, "ids", "- at $.kept_tokens[2][0]"),
        ({"kept_tokens": {"ids": 1}}, {}, "form", "- at $.kept_tokens.ids"),
        ({"kept_tokens": [], "sampling_mask": []}, {}, "form", "kept_tokens comes beside sampling_mask: needs one - at $.kept_tokens"),
        ({"sampling_mask_logprobs": [[0.0]] * 3}, {}, "form", "sampling_mask_logprobs comes without sampling_mask: needs the ids it is of - at $.sampling_mask_logprobs"),
        ({"sampling_mask": [[7]] * 3, "sampling_mask_logprobs": [[0.0]] * 2}, {}, "counts", "sampling_mask_logprobs has 2 rows: needs 3"),
        ({"sampling_mask": [[7]] * 3, "payload": [WIRE["segment_dict"]]}, {}, "payload", "payload comes beside inline sampling_mask: needs null - at $.payload"),
        ({"routed_experts": EXPERTS, "payload": []}, {}, "payload", "payload comes beside inline routed_experts"),
        ({"routed_experts": EXPERTS, "token_ids": None}, {}, "form", "token_ids is None: needs a list - at $.token_ids"),
        ({"routed_experts": EXPERTS, "token_ids": 3}, {}, "form", "token_ids is 3"),
        ({"routed_experts": EXPERTS, "token_ids": "abc"}, {}, "form", "token_ids is 'abc'"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_a_choice_that_does_not_fit_together_writes_nothing(
    more: dict[str, Any], options: dict[str, Any], reason: str, message: str, tmp_path: Path
) -> None:
    sent = choice(**more)
    before = copy.deepcopy(sent)
    error = refused(spill, sent, Writer(tmp_path / "root"), **({"prompt_len": 4} | options))
    assert message in str(error)
    assert error.reason == reason
    assert sent == before
    assert not files(tmp_path)


@pytest.mark.parametrize("sent", [None, 7, "x", [], [choice()]])
def test_what_is_no_choice_is_refused(sent: Any, tmp_path: Path) -> None:
    error = refused(spill, sent, Writer(tmp_path), prompt_len=4)
    assert str(error).endswith("needs an object - at $")


def test_what_the_caller_gets_wrong_is_a_plain_error(tmp_path: Path) -> None:
    sent = choice(routed_experts=EXPERTS)
    with pytest.raises(ValueError, match="prompt_len is -1: needs 0 or more") as caught:
        spill(sent, Writer(tmp_path), prompt_len=-1)
    assert not isinstance(caught.value, InlineError)
    for options in ({"prompt_len": 4.0}, {"prompt_len": 4, "start": "2"}):
        with pytest.raises(TypeError):
            spill(sent, Writer(tmp_path), **options)
    [segment] = spill(sent, Writer(tmp_path), prompt_len=np.int64(4), start=np.uint8(2))["payload"]
    assert type(segment["pos"]) is int


def test_what_the_writer_refuses_comes_through(tmp_path: Path) -> None:
    sent = choice(routed_experts=EXPERTS)
    before = copy.deepcopy(sent)
    with pytest.raises(PathError):
        spill(sent, Writer(tmp_path), prompt_len=4, payload_dir="/etc")
    with pytest.raises(PayloadWriteError, match="max_bytes is 8"):
        spill(sent, Writer(tmp_path, max_bytes=8), prompt_len=4)
    assert sent == before
    assert not files(tmp_path)


# Anything else

NUMBERS = st.one_of(
    st.integers(-3, 9), st.integers(), st.integers(2**31 - 2, 2**64), st.floats(), st.booleans()
)
TEXTS = st.one_of(
    st.text(max_size=12),
    st.binary(max_size=40).map(b64),
    st.binary(max_size=24).map(lambda b: base64.b85encode(b).decode()),
    st.sampled_from([*DTYPES, WIRE["routed_experts_stock_vllm_npy_b64"], ""]),
    st.text(alphabet="{}()[]',: descrfotanhp|u10<-", max_size=80).map(npy_with),
)
KEYS = st.one_of(
    st.sampled_from(["data", "shape", "dtype", "start", "ids", "counts"]), st.text(max_size=3)
)
SHAPES = st.lists(st.one_of(st.integers(0, 4), NUMBERS), max_size=4)
PACKED = st.fixed_dictionaries(
    {"data": TEXTS, "shape": SHAPES},
    optional={"dtype": st.one_of(st.sampled_from(list(DTYPES)), TEXTS), "start": NUMBERS},
)
FITTING = st.binary(max_size=24).map(lambda b: {"data": b64(b), "shape": [len(b), 1, 1]})
COLUMN = st.lists(st.integers(0, 3), max_size=4).map(packed)
JUNK = st.recursive(
    st.one_of(st.none(), NUMBERS, TEXTS, PACKED, FITTING, COLUMN),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
        st.fixed_dictionaries({"ids": st.one_of(COLUMN, inner), "counts": st.one_of(COLUMN, inner)}),
        st.lists(st.lists(st.one_of(st.integers(0, 9), NUMBERS), max_size=3), max_size=4),
    ),
    max_leaves=12,
)  # fmt: skip


def outcome(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return call(*arguments, **options)
    except InlineError as error:
        return error


@given(JUNK)
def test_any_junk_is_a_result_or_an_inline_error(value: Any) -> None:
    for found, kind in (
        (outcome(decode_routed_experts, value), np.ndarray),
        (outcome(decode_array, value), np.ndarray),
        (outcome(decode_sampling_mask, value), Ragged),
        (outcome(decode_sampling_mask_logprobs, value, MASK), Ragged),
    ):
        assert " - at $" in str(found) if isinstance(found, InlineError) else type(found) is kind


CHOICES = st.fixed_dictionaries(
    {"token_ids": st.one_of(st.lists(st.integers(0, 9), max_size=3), JUNK)},
    optional={
        "routed_experts": st.one_of(FITTING, JUNK),
        "sampling_mask": st.one_of(st.lists(st.lists(st.integers(0, 9)), max_size=3), JUNK),
        "kept_tokens": JUNK,
        "sampling_mask_logprobs": JUNK,
        "payload": st.one_of(st.none(), JUNK),
    },
)


@given(CHOICES, st.one_of(st.none(), st.integers(-1, 30)))
def test_any_junk_in_a_choice_is_by_handle_or_an_inline_error(
    tmp_path: Path, sent: dict[str, Any], start: int | None
) -> None:
    before = repr(sent)
    found = outcome(spill, sent, Writer(tmp_path), prompt_len=28, start=start)
    assert repr(sent) == before
    if isinstance(found, InlineError):
        assert " - at $" in str(found)
        return
    inline = {key for key in sent if key not in ("token_ids", "payload") and sent[key] is not None}
    assert not any(found[key] for key in inline)
    if inline:
        with Resolver(tmp_path, verify="checksum") as resolver:
            assert len(resolver.resolve(found["payload"])) == len(inline)


@given(st.integers(0, 150), st.integers(0, 255))
def test_an_npy_file_with_any_byte_changed_is_a_result_or_an_inline_error(
    at: int, byte: int
) -> None:
    data = bytearray(binascii.a2b_base64(WIRE["routed_experts_stock_vllm_npy_b64"]))
    data[at] = byte
    found = outcome(decode_routed_experts, b64(data))
    if isinstance(found, InlineError):
        assert found.reason in ("npy", "dtype", "shape")
    else:
        assert found.nbytes == 24
