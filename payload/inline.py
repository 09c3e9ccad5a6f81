"""Side arrays that came inside the response body, in every form servers send, and out of it.

A form is checked whole before an array is made: sizes in Python integers, then compared with the
bytes that are there. Whatever the value is, the answer is an array or an `InlineError`, whose
``reason`` says what is wrong: ``form, shape, dtype, base64, base85, npy, ids, counts, logprobs,
position, payload``.
"""

from __future__ import annotations

import ast
import binascii
import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, Final, SupportsIndex

import numpy as np

from ._cast import NUMPY, Array
from .dtypes import DTYPES
from .errors import InlineError
from .ragged import Ragged
from .segment import MAX_INT, MAX_NDIM, encode_segments
from .writer import Writer

MAX_ID: Final = 2**31 - 1  # trainers read token ids as int32
MAX_NPY_HEADER: Final = 1024  # bytes; numpy writes 118, and Python parses what is in there

_INTEGERS: Final = tuple(name for name, dtype in DTYPES.items() if dtype.kind in "iu")
_NPY_DTYPES: Final = {NUMPY[name].str: name for name in _INTEGERS}  # "<u2" -> "uint16"
_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)
_TEXT: Final = (str, bytes, bytearray, memoryview)
# Key of a response choice -> the side array it carries.
_KEYS: Final = {
    "routed_experts": "routed_experts",
    "sampling_mask": "sampling_mask",
    "kept_tokens": "sampling_mask",
    "sampling_mask_logprobs": "sampling_mask_logprobs",
}


def decode_routed_experts(value: Any) -> Array:
    """Decode the inline `routed_experts` of a response choice.

    Parameters
    ----------
    value : mapping or str or bytes-like
        ``{"data", "shape", "start", "dtype"}`` with base64 data (no dtype is uint8), the base64 of
        a whole ``.npy`` file, or vLLM 0.20's ``{"data", "shape"}`` with base85 data of int32.

    Returns
    -------
    ndarray
        ``[rows, layers, top_k]`` of the dtype that was sent, read-only.

    Raises
    ------
    InlineError
        When it is malformed; it names the place, such as ``$.routed_experts.shape``.

    Examples
    --------
    >>> sent = {"data": "AQIDBAUG", "shape": [1, 2, 3], "start": 2, "dtype": "uint8"}
    >>> decode_routed_experts(sent).tolist()
    [[[1, 2, 3], [4, 5, 6]]]
    """
    place = "$.routed_experts"
    if isinstance(value, _TEXT):
        return _npy(value, place)
    if not isinstance(value, Mapping):
        raise _wrong(
            place,
            "form",
            f"routed_experts is {_said(value)}: needs an object with data and shape, or base64 of "
            "a .npy file",
        )
    start = _start(value, place)
    if value.get("dtype") is None and start is None:
        return _base64_or_base85(value, place)
    return _packed(value, place, dims=3, dtypes=_INTEGERS, default="uint8")


def decode_array(value: Any) -> Array:
    """Decode a packed inline array, such as `completion_logprobs`.

    Parameters
    ----------
    value : mapping
        ``{"data", "shape", "dtype"}``, the data in base64, any dtype of the closed table.

    Returns
    -------
    ndarray
        Of exactly this shape and dtype, read-only.

    Raises
    ------
    InlineError
        When it is malformed; it names the place, such as ``$.shape``.

    Examples
    --------
    >>> decode_array({"data": "AAAAvwAAgL4=", "shape": [2], "dtype": "float32"}).tolist()
    [-0.5, -0.25]
    """
    return _packed(value, "$")


def decode_sampling_mask(value: Any) -> Ragged:
    """Decode the inline `sampling_mask` of a response choice, or its older name `kept_tokens`.

    Parameters
    ----------
    value : sequence or mapping
        A list of token ids per completion token, or ``{"ids", "counts"}`` of packed arrays (bare
        base64 is that of int32).

    Returns
    -------
    Ragged
        One row of int32 ids per completion token.

    Raises
    ------
    InlineError
        When it is malformed; it names the place, such as ``$.sampling_mask[4][0]``.

    Examples
    --------
    >>> decode_sampling_mask([[7], [8, 9, 10], []]).counts.tolist()
    [1, 3, 0]
    """
    return _mask(value, "$.sampling_mask")


def decode_sampling_mask_logprobs(value: Any, mask: Ragged) -> Ragged:
    """Decode the inline `sampling_mask_logprobs` of a response choice.

    Parameters
    ----------
    value : sequence or mapping
        A list of logprobs per completion token (a null or NaN is refused, -Infinity is not), or
        ``{"data", "shape", "dtype": "float32"}`` parallel to the ids, whose bits are kept.
    mask : Ragged
        The sampling mask they belong to.

    Returns
    -------
    Ragged
        float32, the rows of `mask`.

    Raises
    ------
    InlineError
        When it is malformed or its rows are not those of `mask`; it names the place.

    Examples
    --------
    >>> mask = decode_sampling_mask([[7], [8, 9], []])
    >>> decode_sampling_mask_logprobs([[0.0], [-0.5, float("-inf")], []], mask)[1].tolist()
    [-0.5, -inf]
    """
    place = "$.sampling_mask_logprobs"
    if isinstance(value, Mapping):
        values = _packed(value, place, dims=1, dtypes=("float32",))
        if values.size != mask.values.size:
            raise _wrong(
                f"{place}.shape",
                "counts",
                f"sampling_mask_logprobs has {values.size} values: needs {mask.values.size}, as "
                "many as the mask has ids",
                mask.values.size,
                values.size,
            )
        return mask.with_values(values)
    rows = _rows(value, place, "an object with data, shape and dtype")
    if len(rows) != len(mask):
        raise _wrong(
            place,
            "counts",
            f"sampling_mask_logprobs has {len(rows)} rows: needs {len(mask)}, as the mask",
            len(mask),
            len(rows),
        )
    for i, (row, count) in enumerate(zip(rows, mask.counts.tolist(), strict=True)):
        if len(row) != count:
            raise _wrong(
                f"{place}[{i}]",
                "counts",
                f"row {i} has {len(row)} logprobs: needs {count}, as the mask",
                count,
                len(row),
            )
    flat = list(chain.from_iterable(rows))
    if set(map(type, flat)) <= {int, float}:
        try:
            wide = np.array(flat, np.float64)
        except OverflowError:
            raise _first(rows, place, "logprobs", _why_no_logprob) from None
        if ((np.abs(wide) <= _MAX_FLOAT32) | np.isneginf(wide)).all():
            return mask.with_values(wide.astype(np.float32))
    raise _first(rows, place, "logprobs", _why_no_logprob)


def spill(
    choice: Mapping[str, Any],
    writer: Writer,
    *,
    prompt_len: SupportsIndex,
    start: SupportsIndex | None = None,
    payload_dir: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Turn a response choice with inline side arrays into one that has them by handle.

    The rows of `routed_experts` end before the last sampled token, which was never forwarded; so
    they begin at ``prompt_len + completion - 1 - rows``. Those of the sampling mask and its logprobs
    begin at `prompt_len`.

    Parameters
    ----------
    choice : mapping
        With ``token_ids`` (or ``completion_ids``: a result of `client.generate` will do), and `routed_experts`, `sampling_mask` (or `kept_tokens`) and
        `sampling_mask_logprobs` in any inline form, missing, or None. It is not changed.
    writer : Writer
        Writes one file for all of them, or none if nothing is inline. It blocks: an async server
        calls this on a thread.
    prompt_len : int
        Tokens of the prompt, as the engine saw it.
    start : int, optional
        Token position the first row of `routed_experts` must have, such as the request's
        ``routed_experts_prompt_start``. Default: what the value itself says, if it does.
    payload_dir : path, optional
        As for `Writer.write`.

    Returns
    -------
    dict
        A copy of the choice: what was inline is None, ``payload`` holds the segment objects
        (`routed_experts`, `sampling_mask`, `sampling_mask_logprobs`, in this order).

    Raises
    ------
    InlineError
        When a side array is malformed, does not fit the tokens, begins elsewhere than `start`, or
        comes beside a payload. Nothing is written.
    PathError, PayloadWriteError
        When the writer cannot write.

    Examples
    --------
    >>> import tempfile
    >>> experts = {"data": "AQIDBAUGBwgJCgsM", "shape": [4, 1, 3], "dtype": "uint8"}
    >>> choice = {"index": 0, "token_ids": [5, 6, 7], "routed_experts": experts}
    >>> with tempfile.TemporaryDirectory() as root:
    ...     spilled = spill(choice, Writer(root), prompt_len=4, payload_dir="v3")
    >>> spilled["routed_experts"], [(s["pos"], s["rows"]) for s in spilled["payload"]]
    (None, [(2, 4)])
    """
    prompt = operator.index(prompt_len)
    if prompt < 0:
        raise ValueError(f"prompt_len is {prompt}: needs 0 or more")
    wanted = None if start is None else operator.index(start)
    if not isinstance(choice, Mapping):
        raise _wrong("$", "form", f"choice is {_said(choice)}: needs an object")
    inline = {key: choice[key] for key in _KEYS if choice.get(key) is not None}
    payload = choice.get("payload")
    if not inline:
        return {**choice, "payload": payload}
    if payload is not None:
        raise _wrong(
            "$.payload", "payload", f"payload comes beside inline {', '.join(inline)}: needs null"
        )
    tokens = choice.get("token_ids", choice.get("completion_ids"))
    if not isinstance(tokens, (list, tuple)):
        raise _wrong("$.token_ids", "form", f"token_ids is {_said(tokens)}: needs a list")
    arrays: dict[str, tuple[int, Array | Ragged]] = {}
    if "routed_experts" in inline:
        value = inline["routed_experts"]
        experts = decode_routed_experts(value)
        starts = {"$.routed_experts": wanted, "$.routed_experts.start": _start(value)}
        pos = anchored(len(experts), prompt, len(tokens), starts)
        arrays["routed_experts"] = pos, experts
    masks = [key for key in inline if _KEYS[key] == "sampling_mask"]
    if len(masks) > 1:
        raise _wrong("$.kept_tokens", "form", "kept_tokens comes beside sampling_mask: needs one")
    for key in masks:
        mask = _mask(inline[key], f"$.{key}")
        if len(mask) != len(tokens):
            raise _wrong(
                f"$.{key}",
                "counts",
                f"{key} has {len(mask)} rows: needs {len(tokens)}, one a completion token",
                len(tokens),
                len(mask),
            )
        arrays["sampling_mask"] = prompt, mask
    if "sampling_mask_logprobs" in inline:
        if not masks:
            raise _wrong(
                "$.sampling_mask_logprobs",
                "form",
                "sampling_mask_logprobs comes without sampling_mask: needs the ids it is of",
            )
        logprobs = decode_sampling_mask_logprobs(inline["sampling_mask_logprobs"], mask)
        arrays["sampling_mask_logprobs"] = prompt, logprobs
    segments = encode_segments(writer.write(arrays, payload_dir))
    return {**choice, **dict.fromkeys(inline), "payload": segments}


def anchored(rows: int, prompt: int, completion: int, starts: Mapping[str, int | None]) -> int:
    """Return the token position of the first of `rows`; each of `starts`, by place, must be that."""
    end = prompt + completion - 1
    pos = end - rows
    if pos < 0:
        raise _wrong(
            "$.routed_experts",
            "position",
            f"routed_experts has {rows} rows: {prompt} prompt and {completion} completion tokens "
            f"have at most {max(end, 0)}",
            max(end, 0),
            rows,
        )
    for place, start in starts.items():
        if start is not None and start != pos:
            raise _wrong(
                place,
                "position",
                f"start is {start}: {rows} rows that end at token position {end} begin at {pos}",
                pos,
                start,
            )
    return pos


def _start(value: Any, place: str = "$.routed_experts") -> int | None:
    start = value.get("start") if isinstance(value, Mapping) else None
    if start is not None and (type(start) is not int or not 0 <= start <= MAX_INT):
        raise _wrong(
            f"{place}.start", "position", f"start is {_said(start)}: needs an integer, 0 or more"
        )
    return start


def _base64_or_base85(value: Mapping[str, Any], place: str) -> Array:
    """Decode what does not say its dtype: base64 of uint8, or base85 of int32."""
    shape = _shape(value.get("shape"), f"{place}.shape", 3)
    text = _text(value.get("data"), f"{place}.data")
    count = prod(shape)
    found = text.nbytes if isinstance(text, memoryview) else len(text)
    # The two lengths differ but for no values at all, where both mean the same.
    if found == 4 * -(-count // 3):
        return _array(_base64(text, f"{place}.data"), shape, "uint8", f"{place}.shape")
    if found != 5 * count:
        raise _wrong(
            f"{place}.shape",
            "shape",
            f"shape is {list(shape)} without dtype: needs {4 * -(-count // 3)} characters of base64 "
            f"(uint8) or {5 * count} of base85 (int32), data has {found}",
            (4 * -(-count // 3), 5 * count),
            found,
        )
    from base64 import b85decode  # one old form needs it

    try:
        data = b85decode(text)
    except ValueError as error:
        raise _wrong(f"{place}.data", "base85", f"data is not base85: {error}") from None
    return _array(data, shape, "int32", f"{place}.shape")


def _packed(
    value: Any,
    place: str,
    *,
    dims: int | None = None,
    dtypes: Collection[str] = DTYPES,
    default: str | None = None,
) -> Array:
    """Decode ``{"data", "shape", "dtype"}``, of `dims` axes and one of `dtypes`."""
    if not isinstance(value, Mapping):
        name = "array" if place == "$" else place.rpartition(".")[2]
        raise _wrong(
            place, "form", f"{name} is {_said(value)}: needs an object with data, shape and dtype"
        )
    dtype = value.get("dtype")
    if dtype is None and default is not None:
        dtype = default
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise _wrong(
            f"{place}.dtype",
            "dtype",
            f"dtype is {_said(dtype)}: needs {'one of ' * (len(dtypes) > 1)}{', '.join(dtypes)}",
            tuple(dtypes),
            dtype if isinstance(dtype, str) else None,
        )
    shape = _shape(value.get("shape"), f"{place}.shape", dims)
    data = _base64(_text(value.get("data"), f"{place}.data"), f"{place}.data")
    return _array(data, shape, dtype, f"{place}.shape")


def _npy(text: Any, place: str) -> Array:
    """Decode the base64 of a ``.npy`` file; numpy's own reader would also unpickle one."""
    data = _base64(text, place)
    if data[:6] != b"\x93NUMPY":
        raise _wrong(place, "npy", f"routed_experts begins with {data[:6]!r}: needs a .npy file")
    version = tuple(data[6:8])
    if version not in ((1, 0), (2, 0)):
        raise _wrong(place, "npy", f"version of the .npy file is {version}: needs 1.0 or 2.0")
    begin = 10 if version == (1, 0) else 12
    size = int.from_bytes(data[8:begin], "little")
    at = begin + size
    if size > MAX_NPY_HEADER or at > len(data):
        raise _wrong(
            place,
            "npy",
            f"header of the .npy file has {size} bytes: at most {MAX_NPY_HEADER} are allowed, "
            f"{max(len(data) - begin, 0)} are there",
        )
    try:
        header = ast.literal_eval(data[begin:at].decode("latin-1"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        header = None
    if type(header) is not dict or set(header) != {"descr", "fortran_order", "shape"}:
        raise _wrong(
            place, "npy", "header of the .npy file is no dict of descr, fortran_order and shape"
        )
    if header["fortran_order"] is not False:
        raise _wrong(
            place,
            "npy",
            f"fortran_order of the .npy file is {_said(header['fortran_order'])}: needs False",
        )
    descr = header["descr"]
    if not isinstance(descr, str) or descr not in _NPY_DTYPES:
        raise _wrong(
            place,
            "dtype",
            f"descr of the .npy file is {_said(descr)}: needs one of {', '.join(_NPY_DTYPES)}",
            tuple(_NPY_DTYPES),
            descr if isinstance(descr, str) else None,
        )
    return _array(data, _shape(header["shape"], place, 3), _NPY_DTYPES[descr], place, at)


def _mask(value: Any, place: str) -> Ragged:
    if isinstance(value, Mapping):
        ids = _column(value.get("ids"), f"{place}.ids")
        counts = _column(value.get("counts"), f"{place}.counts")
        _check_all(ids, f"{place}.ids", "ids", _why_no_id, MAX_ID)
        _check_all(counts, f"{place}.counts", "counts", _why_no_count, MAX_INT)
        total = sum(counts.tolist())
        if total != ids.size:
            raise _wrong(
                f"{place}.counts",
                "counts",
                f"counts add up to {total}: needs {ids.size}, the number of ids",
                ids.size,
                total,
            )
        return Ragged.from_counts(ids.astype(np.int32, copy=False), counts)
    rows = _rows(value, place, "an object with ids and counts")
    flat = list(chain.from_iterable(rows))
    if not set(map(type, flat)) <= {int} or (flat and not 0 <= min(flat) <= max(flat) <= MAX_ID):
        raise _first(rows, place, "ids", _why_no_id)
    return Ragged.from_counts(np.array(flat, np.int32), [len(row) for row in rows])


def _column(value: Any, place: str) -> Array:
    """Decode one axis of packed integers; what was sent before they had a dtype is int32."""
    if isinstance(value, _TEXT):
        data = _base64(value, place)
        if len(data) % 4:
            raise _wrong(
                place,
                "shape",
                f"{place.rpartition('.')[2]} has {len(data)} bytes: needs a multiple of 4, int32",
                actual=len(data),
            )
        return _array(data, (len(data) // 4,), "int32", place)
    return _packed(value, place, dims=1, dtypes=_INTEGERS)


def _check_all(
    values: Array, place: str, reason: str, why: Callable[[Any], str | None], most: int
) -> None:
    if values.size and not 0 <= int(values.min()) <= int(values.max()) <= most:
        index = int(np.argmax((values < 0) | (values > most)))
        message = why(values[index].item())
        raise _wrong(f"{place}[{index}]", reason, str(message))


def _rows(value: Any, place: str, other: str) -> Sequence[Sequence[Any]]:
    if not isinstance(value, (list, tuple)):
        raise _wrong(
            place, "form", f"{place[2:]} is {_said(value)}: needs a list of lists, or {other}"
        )
    for i, row in enumerate(value):
        if not isinstance(row, (list, tuple)):
            raise _wrong(f"{place}[{i}]", "form", f"row {i} is {_said(row)}: needs a list")
    return value


def _first(
    rows: Sequence[Sequence[Any]], place: str, reason: str, why: Callable[[Any], str | None]
) -> InlineError:
    """Return the error for the first value of `rows` that has one, known to be there."""
    i, j, message = next(
        (i, j, message)
        for i, row in enumerate(rows)
        for j, value in enumerate(row)
        if (message := why(value)) is not None
    )
    return _wrong(f"{place}[{i}][{j}]", reason, message)


def _why_no_id(value: Any) -> str | None:
    if type(value) is not int:
        return f"id is {_said(value)}: needs an integer, 0 to {MAX_ID}"
    if 0 <= value <= MAX_ID:
        return None
    message = f"id {_said(value)} does not fit int32: needs 0 to {MAX_ID}"
    if -(2**63) <= value < 2**63 and value >> 32 not in (0, -1):
        message += (
            f"; if it is the engine's own int64, with a logprob in its high half, send the low half, "
            f"{value & 0xFFFFFFFF}"
        )
    return message


def _why_no_count(value: Any) -> str | None:
    return None if 0 <= value <= MAX_INT else f"count is {value}: needs 0 to {MAX_INT}"


def _why_no_logprob(value: Any) -> str | None:
    if type(value) not in (int, float):
        return f"logprob is {_said(value)}: needs a number"
    if value == float("-inf") or -_MAX_FLOAT32 <= value <= _MAX_FLOAT32:
        return None
    return f"logprob is {_said(value)}: needs a float32 number, or -Infinity"


def _shape(value: Any, place: str, dims: int | None) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise _wrong(place, "shape", f"shape is {_said(value)}: needs a list of integers")
    if len(value) > MAX_NDIM + 1 or (dims is not None and len(value) != dims):
        need = {None: f"at most {MAX_NDIM + 1}", 3: "3 (rows, layers, top_k)"}.get(dims, dims)
        raise _wrong(
            place, "shape", f"shape has {len(value)} dimensions: needs {need}", dims, len(value)
        )
    for axis, size in enumerate(value):
        if type(size) is not int or not 0 <= size <= MAX_INT:
            raise _wrong(
                place,
                "shape",
                f"shape has {_said(size)} at axis {axis}: needs an integer, 0 to {MAX_INT}",
            )
    return tuple(value)


def _text(value: Any, place: str) -> str | bytes | bytearray | memoryview:
    if not isinstance(value, _TEXT):
        raise _wrong(place, "base64", f"data is {_said(value)}: needs base64 text")
    return value


def _base64(text: str | bytes | bytearray | memoryview, place: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (TypeError, ValueError, BufferError) as error:  # a memoryview may have gaps
        name = place.rpartition(".")[2]
        raise _wrong(place, "base64", f"{name} is not base64: {error}") from None


def _array(data: bytes, shape: tuple[int, ...], dtype: str, place: str, at: int = 0) -> Array:
    """Return ``data[at:]`` as an array, if that is exactly what the shape needs."""
    itemsize = DTYPES[dtype].itemsize
    needed, found = prod(shape) * itemsize, len(data) - at
    # Bounded also where a zero makes the product zero: numpy multiplies the other dimensions.
    if needed != found or prod(size or 1 for size in shape) * itemsize > MAX_INT:
        raise _wrong(
            place,
            "shape",
            f"shape is {list(shape)} of {dtype}: needs {needed} bytes, data has {found}"
            if needed != found
            else f"shape is {list(shape)} of {dtype}: at most {MAX_INT} bytes are allowed",
            needed,
            found,
        )
    if dtype == "bool" and data.translate(None, b"\0\1"):
        raise _wrong(place, "dtype", "data of bool has other bytes than 0 and 1")
    array: Array = np.ndarray(shape, NUMPY[dtype], data, at)
    return array if array.flags.aligned else array.copy()


def _said(value: object) -> str:
    """Show a value from outside in an error, however long or deep it is."""
    if isinstance(value, (str, bytes)) and len(value) > 80:
        return f"{value[:60]!r}... ({len(value)} characters)"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (str, bytes, int, float, type(None))):
        return repr(value)
    return f"a {type(value).__name__}"


def _wrong(
    place: str, reason: str, message: str, expected: Any = None, actual: Any = None
) -> InlineError:
    key = place[2:].partition(".")[0].partition("[")[0]
    return InlineError(
        f"{message} - at {place}",
        reason=reason,
        field=_KEYS.get(key),
        expected=expected,
        actual=actual,
    )
