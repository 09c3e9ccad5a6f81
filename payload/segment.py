"""Segments: what a response carries in place of the bytes. Pure arithmetic on integers and names.

A payload segment says where one run of rows of one side array lies in a file and at which token
position its first row stands. Everything that arrives is checked here, in Python integers, before
any file is opened or any array is made.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final, Literal, NoReturn, SupportsIndex

import msgspec

from ._paths import UNPUBLISHED, why_illegal
from .dtypes import DTYPES
from .errors import PathError, SegmentError
from .fields import FIELDS

MAX_INT: Final = 2**63 - 1  # what an offset in a file can be, and what numpy indexes with
MAX_NDIM: Final = 31  # numpy 1 stops at 32 axes, one of them counts the rows
MAX_SEGMENTS: Final = 2**17  # a step of 256 rollouts with 50 turns and 4 side arrays has 51,200
MAX_MESSAGE: Final = 2**25  # bytes; MAX_SEGMENTS of the usual 250 bytes each

_KEYS: Final = ("field", "file", "offset", "pos", "rows", "dtype", "shape")
_VALUES: Final = operator.itemgetter(*_KEYS)


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One run of rows of a side array in one file.

    The constructor does not validate; `decode_segments` and every function that takes segments do.

    Attributes
    ----------
    field : str
        Side array the rows belong to, such as ``"routed_experts"``.
    file : str
        Absolute path, as the writing node spells it.
    offset : int
        Byte offset of the first row (of the offsets table for a ragged field).
    pos : int
        Token position of row 0.
    rows : int
        Number of rows.
    dtype : str
        Element type, one of the closed table `DTYPES`, little-endian.
    shape : tuple of int
        Shape of one row; ``()`` is a scalar.
    length : int or None
        Bytes in the file, if known; for a ragged field the table and the values.

    Examples
    --------
    >>> s = Segment("routed_experts", "/shared/v3/a.bin", 0, 2, 4, "uint8", (2, 3))
    >>> s.end, s.row_nbytes, s.nbytes
    (6, 6, 24)
    """

    field: str
    file: str
    offset: int
    pos: int
    rows: int
    dtype: str
    shape: tuple[int, ...]
    length: int | None = None

    @property
    def end(self) -> int:
        """Token position after the last row."""
        return self.pos + self.rows

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row; 4, one table entry, for a ragged field."""
        return _itemsize(self) * prod(self.shape)

    @property
    def nbytes(self) -> int | None:
        """Bytes in the file; None for a ragged field without `length`."""
        return self.length if is_ragged(self) else self.rows * self.row_nbytes


def _itemsize(segment: Segment) -> int:
    if segment.dtype not in DTYPES:
        check(segment)
    return DTYPES[segment.dtype].itemsize


def is_ragged(segment: Segment) -> bool:
    """Whether the rows lie as a table of offsets and values (CSR), rather than one after another.

    Examples
    --------
    >>> is_ragged(Segment("sampling_mask", "/shared/v3/a.bin", 0, 4, 3, "uint32", ()))
    True
    """
    if segment.shape:
        return False
    if segment.dtype == "uint32":
        return True
    field = FIELDS.get(segment.field)
    return field is not None and field.ragged and _itemsize(segment) == 4


# What was found legal, so that the common case is one look: a payload has one or two kinds of rows
# and a few directories. Bounded; emptied when full.
_ROWS: dict[tuple[str, tuple[int, ...]], tuple[int, tuple[int, ...]]] = {}  # -> (row bytes, shape)
_DIRECTORIES: set[str] = set()
_REMEMBERED: Final = 1024


def _first_doubtful(segments: Sequence[Any], first: int) -> int:
    """Index, from `first` on, of the first item that is not at one look a legal segment.

    Only what cannot be wrong is passed over; the rest is explained by `_explain`.
    """
    for index in range(first, len(segments)):
        s = segments[index]
        if type(s) is not Segment:
            return index
        offset, pos, rows, shape, file = s.offset, s.pos, s.rows, s.shape, s.file
        try:
            row_nbytes, known = _ROWS[s.dtype, shape]
            directory, _, name = file.rpartition("/")
            if (
                not (type(offset) is type(pos) is type(rows) is int)
                or (offset | pos | rows | pos + rows | offset + rows * row_nbytes + 4) >> 63
                or not row_nbytes
                or (s.length is not None and not _is_length(s, rows * row_nbytes))
                or not (type(s.field) is type(file) is type(s.dtype) is str)
                or directory not in _DIRECTORIES
                or name[:1] in UNPUBLISHED
                or "\0" in name
                or not name.isascii()
                or len(file) > 1000
            ):
                return index
        except (AttributeError, KeyError, TypeError):
            return index
        if shape is not known:  # True and 1.0 equal 1 as a key, a subclass its tuple
            if type(shape) is not tuple:
                return index
            for size in shape:
                if type(size) is not int:
                    return index
    return len(segments)


def _is_length(segment: Segment, nbytes: int) -> bool:
    """Whether a length is that of fixed rows; a ragged one takes a closer look."""
    length = segment.length
    return type(length) is int and length == nbytes and segment.shape != ()


def is_legal(segment: Segment) -> bool:
    """Whether a segment is at one look legal; otherwise `check` says."""
    return _first_doubtful((segment,), 0) == 1


def check(segment: Segment, place: str = "$", index: int | None = None) -> None:
    """Raise `SegmentError` unless every number and name of `segment` is legal.

    Holds for any segment, however it was made: types exact, numbers in [0, 2^63-1], dtype in the
    table, sums and products in range, path legal, length equal to what rows and shape say.
    """
    if is_legal(segment):
        return
    _explain(segment, place, index)
    if len(_ROWS) >= _REMEMBERED:
        _ROWS.clear()
    if len(_DIRECTORIES) >= _REMEMBERED:
        _DIRECTORIES.clear()
    _ROWS[segment.dtype, segment.shape] = segment.row_nbytes, segment.shape
    directory = segment.file.rpartition("/")[0]
    if directory:  # "" is also that of a name that is not absolute
        _DIRECTORIES.add(directory)


def _explain(segment: Segment, place: str, index: int | None) -> None:
    """Check one thing after the other, and say of the first that is wrong what, where and how much."""

    def wrong(key: str, message: str, **attributes: Any) -> NoReturn:
        kind = PathError if attributes["reason"] == "illegal_path" else SegmentError
        where = place + "".join(
            f"[{part}]" if part.isdigit() else f".{part}" for part in key.split()
        )
        if type(segment.field) is str:
            attributes["field"] = segment.field
        if type(segment.file) is str:
            attributes["path"] = segment.file
        raise kind(f"segment {message} - at {where}", index=index, **attributes)

    def number(key: str, value: object) -> int:
        if type(value) is not int:
            wrong(
                key, f"{key} is {_show(value)}: needs an integer", reason="wrong_type", actual=value
            )
        if not 0 <= value <= MAX_INT:
            wrong(
                key,
                f"{key} is {_show(value)}: needs 0 to {MAX_INT}",
                reason="out_of_range",
                expected=MAX_INT,
                actual=value,
            )
        return value

    for key, text in (("field", segment.field), ("file", segment.file), ("dtype", segment.dtype)):
        if type(text) is not str:
            wrong(key, f"{key} is {_show(text)}: needs a string", reason="wrong_type", actual=text)
    illegal = why_illegal(segment.file)
    if illegal:
        wrong("file", f"file {_show(segment.file)} {illegal}", reason="illegal_path")
    offset = number("offset", segment.offset)
    pos = number("pos", segment.pos)
    rows = number("rows", segment.rows)
    dtype = DTYPES.get(segment.dtype)
    if dtype is None:
        known = ", ".join(DTYPES)
        wrong(
            "dtype",
            f"dtype is {_show(segment.dtype)}: needs one of {known}",
            reason="unknown_dtype",
            expected=tuple(DTYPES),
            actual=segment.dtype,
        )
    shape = segment.shape
    if type(shape) is not tuple:
        wrong("shape", f"shape is {_show(shape)}: needs a tuple of integers", reason="wrong_type")
    if len(shape) > MAX_NDIM:
        wrong(
            "shape",
            f"shape has {len(shape)} dimensions: at most {MAX_NDIM} are allowed",
            reason="too_many_dimensions",
            expected=MAX_NDIM,
            actual=len(shape),
        )
    for axis, size in enumerate(shape):
        if type(size) is not int:
            wrong(
                f"shape {axis}", f"shape has {_show(size)}: needs an integer", reason="wrong_type"
            )
        if not 0 <= size <= MAX_INT:
            wrong(
                f"shape {axis}",
                f"shape has {_show(size)}: needs 0 to {MAX_INT}",
                reason="out_of_range",
                expected=MAX_INT,
                actual=size,
            )
    # Bounded also where a zero makes the product zero: numpy multiplies the other dimensions.
    bound = max(rows, 1) * dtype.itemsize * prod(size or 1 for size in shape)
    if bound > MAX_INT:
        wrong(
            "shape",
            f"of {rows} rows of {shape} {segment.dtype} has {bound} bytes: at most {MAX_INT} are allowed",
            reason="out_of_range",
            expected=MAX_INT,
            actual=bound,
        )
    nbytes = rows * dtype.itemsize * prod(shape)
    ragged = is_ragged(segment)
    if ragged:
        nbytes = 4 * (rows + 1) if rows else 0
    length = segment.length
    if length is not None:
        number("length", length)
        if length < nbytes if ragged else length != nbytes:
            need = f"{rows} rows of {shape} {segment.dtype} have {nbytes} bytes"
            if ragged:
                need = f"the table of {rows} rows alone has {nbytes} bytes"
            wrong(
                "length",
                f"length is {length}: {need}",
                reason="length_mismatch",
                expected=nbytes,
                actual=length,
            )
        nbytes = length
    for key, sum_, text in (
        ("offset", offset + nbytes, "offset + bytes"),
        ("pos", pos + rows, "pos + rows"),
    ):
        if sum_ > MAX_INT:
            wrong(
                key,
                f"{text} is {sum_}: at most {MAX_INT} is allowed",
                reason="out_of_range",
                expected=MAX_INT,
                actual=sum_,
            )


def decode_segments(obj: Any) -> list[Segment]:
    """Decode and check the ``payload`` of a response, whatever form it travelled in.

    Parameters
    ----------
    obj : None, sequence, bytes-like or msgspec.Raw
        None is an empty payload. A sequence holds `Segment` instances, objects with the seven
        wire keys, arrays of seven or more elements (the eighth is `length`), or objects of the
        plain form ``{"file", "offset", "length", "dtype", "shape"}`` whose shape is that of the
        whole array. Bytes are JSON if they begin with ``[``, ``n`` or white space, else msgpack.

    Returns
    -------
    list of Segment
        In order. Unknown keys of objects and elements past the eighth are ignored.

    Raises
    ------
    SegmentError
        When anything is illegal; it names the place, such as ``$.payload[2].offset``. No file is
        opened.

    Examples
    --------
    >>> decode_segments(b'[["mask", "/p/a.bin", 0, 0, 3, "uint8", [2], 6]]')[0].nbytes
    6
    >>> decode_segments([{"file": "/p/a", "offset": 8, "length": 6, "dtype": "uint8", "shape": [3, 2]}])
    [Segment(field='', file='/p/a', offset=8, pos=0, rows=3, dtype='uint8', shape=(2,), length=6)]
    """
    if isinstance(obj, (bytes, bytearray, memoryview, msgspec.Raw)):
        obj = _unpack(obj)
    items = obj if type(obj) is list else _items(obj)
    if len(items) > MAX_SEGMENTS:
        raise SegmentError(
            f"payload has {len(items)} segments: at most {MAX_SEGMENTS} are allowed - at $.payload",
            reason="too_many_segments",
            expected=MAX_SEGMENTS,
            actual=len(items),
        )
    segments = list(items)
    index = _first_doubtful(segments, 0)
    while index < len(segments):
        if type(segments[index]) is Segment and type(segments[index].shape) is not list:
            check(segments[index], f"$.payload[{index}]", index)
            index += 1
        else:  # so may be the rest
            for other in range(index, len(segments)):
                try:
                    segments[other] = _segment_of(segments[other], other)
                except SegmentError:
                    if other == index:
                        raise
                    break  # told when those before it are found legal
        index = _first_doubtful(segments, index)
    return segments


def _items(obj: Any) -> Sequence[Any]:
    if obj is None:
        return []
    if isinstance(obj, (str, Mapping)) or not isinstance(obj, Iterable):
        need = "bytes, or a list of segments" if isinstance(obj, str) else "a list of segments"
        raise SegmentError(
            f"payload is {_show(obj)}: needs {need} - at $.payload", reason="wrong_type"
        )
    return obj if isinstance(obj, Sequence) else list(obj)


def _unpack(data: Any) -> Any:
    data = memoryview(data)
    if not data.c_contiguous:
        data = memoryview(data.tobytes())
    if data.nbytes > MAX_MESSAGE:
        raise SegmentError(
            f"payload has {data.nbytes} bytes: at most {MAX_MESSAGE} are allowed - at $.payload",
            reason="message_too_large",
            expected=MAX_MESSAGE,
            actual=data.nbytes,
        )
    first = bytes(data[:1])
    is_json = bool(first) and first in b"[n \t\r\n"
    if first == b"{":
        raise SegmentError(
            "payload is a JSON object: needs a list of segments - at $.payload", reason="wrong_type"
        )
    try:
        return msgspec.json.decode(data) if is_json else msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, RecursionError, TypeError, ValueError) as error:
        form = "JSON" if is_json else "msgpack"
        raise SegmentError(
            f"payload is not valid {form} ({error}) - at $.payload", reason="malformed"
        ) from None


def _segment_of(item: Any, index: int) -> Segment:
    """A segment of an item in any form, not checked yet."""
    if type(item) is dict:
        return _from_object(item, index)
    if isinstance(item, Mapping):
        return _from_object(dict(item), index)
    if type(item) is Segment and type(item.shape) is tuple:
        return item
    if isinstance(item, Segment):  # by name: a subclass may have its fields in another order
        where = item.field, item.file, item.offset, item.pos, item.rows
        return Segment(*where, item.dtype, _tuple(item.shape), item.length)
    place = f"$.payload[{index}]"
    if isinstance(item, (list, tuple)):
        if len(item) < len(_KEYS):
            raise SegmentError(
                f"segment has {len(item)} elements: needs at least {len(_KEYS)} ({', '.join(_KEYS)}) "
                f"- at {place}",
                reason="missing_key",
                index=index,
                expected=len(_KEYS),
                actual=len(item),
            )
        field, file, offset, pos, rows, dtype, shape = item[:7]
        length = item[7] if len(item) > 7 else None
        return Segment(field, file, offset, pos, rows, dtype, _tuple(shape), length)
    raise SegmentError(
        f"segment is {_show(item)}: needs an object or an array - at {place}",
        reason="wrong_type",
        index=index,
    )


def _from_object(item: dict[Any, Any], index: int) -> Segment:
    try:
        field, file, offset, pos, rows, dtype, shape = _VALUES(item)
    except KeyError:
        return _from_plain(item, index)
    return Segment(field, file, offset, pos, rows, dtype, _tuple(shape), item.get("length"))


def _from_plain(item: dict[Any, Any], index: int) -> Segment:
    """Read the plain form, or say which keys are missing."""
    place = f"$.payload[{index}]"
    plain = "length" in item and "rows" not in item and "pos" not in item
    needed = ("file", "offset", "length", "dtype", "shape") if plain else _KEYS
    missing = [key for key in needed if key not in item]
    if missing:
        raise SegmentError(
            f"segment has no {', '.join(repr(key) for key in missing)}: needs {', '.join(needed)} "
            f"- at {place}",
            reason="missing_key",
            index=index,
        )
    shape = _tuple(item["shape"])
    length = item["length"]
    if type(shape) is not tuple or not shape:
        raise SegmentError(
            f"segment shape is {_show(item['shape'])}: without 'rows' it is the whole array's and needs "
            f"at least one dimension - at {place}.shape",
            reason="wrong_type",
            index=index,
        )
    if length is None:
        raise SegmentError(
            f"segment length is None: needs an integer - at {place}.length",
            reason="wrong_type",
            index=index,
        )
    field = item.get("field", "")
    return Segment(
        field, item["file"], item["offset"], 0, shape[0], item["dtype"], shape[1:], length
    )


def _tuple(shape: Any) -> Any:
    return tuple(shape) if type(shape) is list else shape


def _show(value: object) -> str:
    """Show a value from outside in an error, however long or deep it is."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


def encode_segments(
    segments: Iterable[Segment], form: Literal["object", "array"] = "object"
) -> list[Any]:
    """Encode segments as plain lists and dicts, ready for JSON or msgpack.

    Parameters
    ----------
    segments : iterable of Segment
    form : {"object", "array"}
        ``"object"`` gives the seven upstream keys and no other, as in a response: an extra key
        breaks upstream readers. ``"array"`` gives seven elements, and `length` as the eighth when
        it is known, as between orchestrator and trainer.

    Returns
    -------
    list
        Of dicts or of lists.

    Examples
    --------
    >>> encode_segments([Segment("mask", "/p/a.bin", 0, 0, 3, "uint8", (2,))], form="array")
    [['mask', '/p/a.bin', 0, 0, 3, 'uint8', [2]]]
    """
    if form not in ("object", "array"):
        raise ValueError(f"form is {form!r}: needs 'object' or 'array'")
    encoded: list[Any] = []
    for segment in decode_segments(segments):
        s = segment
        values = [s.field, s.file, s.offset, s.pos, s.rows, s.dtype, list(s.shape)]
        if form == "object":
            encoded.append(dict(zip(_KEYS, values, strict=True)))
        else:
            encoded.append(values if s.length is None else [*values, s.length])
    return encoded


def clip(segments: Iterable[Segment], lo: SupportsIndex, hi: SupportsIndex) -> list[Segment]:
    """Cut segments to the token positions [lo, hi); positions stay as they are.

    Parameters
    ----------
    segments : iterable of Segment
    lo, hi : int
        Window of token positions.

    Returns
    -------
    list of Segment
        In order, without those outside the window. A field that would vanish keeps one segment of
        zero rows: "no such field" and "nothing here" stay different.

    Raises
    ------
    ValueError
        When ``lo > hi``.
    SegmentError
        When a segment is illegal.

    Examples
    --------
    >>> s = Segment("routed_experts", "/p/a.bin", 0, 2, 4, "uint8", (2, 3))
    >>> [(c.offset, c.pos, c.rows) for c in clip([s], 3, 5)]
    [(6, 3, 2)]
    """
    lo, hi = window(lo, hi)
    kept: list[Segment | None] = []
    empty: dict[str, tuple[int, Segment]] = {}
    present: set[str] = set()
    for s in decode_segments(segments):
        start, stop = max(s.pos, lo), min(s.end, hi)
        rows = max(stop - start, 0)
        if rows == s.rows and rows:
            kept.append(s)
            present.add(s.field)
            continue
        start = start if rows else min(max(min(s.pos, hi), lo, 0), MAX_INT)
        skipped = start - s.pos if rows else 0
        length = None if is_ragged(s) or s.length is None else rows * s.row_nbytes
        cut = msgspec.structs.replace(
            s, offset=s.offset + skipped * s.row_nbytes, pos=start, rows=rows, length=length
        )
        if rows:
            kept.append(cut)
            present.add(s.field)
        elif s.field not in empty:
            empty[s.field] = (len(kept), cut)
            kept.append(None)
    for field, (at, cut) in empty.items():
        if field not in present:
            kept[at] = cut
    return [s for s in kept if s is not None]


def shift(segments: Iterable[Segment], by: SupportsIndex) -> list[Segment]:
    """Move segments by `by` token positions, as packing into a bin does.

    Raises
    ------
    ValueError
        When a position would leave [0, 2^63-1].
    SegmentError
        When a segment is illegal.

    Examples
    --------
    >>> shift([Segment("mask", "/p/a.bin", 0, 2, 4, "uint8", ())], 10)[0].pos
    12
    """
    by = operator.index(by)
    shifted = []
    for s in decode_segments(segments):
        if not 0 <= s.pos + by <= s.end + by <= MAX_INT:
            raise ValueError(
                f"shift by {by} moves pos {s.pos} to {s.pos + by}: needs 0 to {MAX_INT}"
            )
        shifted.append(msgspec.structs.replace(s, pos=s.pos + by))
    return shifted


def gaps(
    segments: Iterable[Segment], field: str, lo: SupportsIndex, hi: SupportsIndex
) -> list[tuple[int, int]]:
    """List the token positions of [lo, hi) that no segment of `field` covers.

    Returns
    -------
    list of (int, int)
        Half-open ranges, ascending, none empty, none touching.

    Raises
    ------
    ValueError
        When ``lo > hi``.
    SegmentError
        When a segment is illegal.

    Examples
    --------
    >>> gaps([Segment("mask", "/p/a.bin", 0, 2, 4, "uint8", ())], "mask", 0, 8)
    [(0, 2), (6, 8)]
    """
    lo, hi = window(lo, hi)
    runs = [(s.pos, s.end) for s in decode_segments(segments) if s.field == field and s.rows]
    return uncovered(runs, lo, hi)


def uncovered(runs: Iterable[tuple[int, int]], lo: int, hi: int) -> list[tuple[int, int]]:
    """List what of [lo, hi) is in none of the half-open `runs`, in any order."""
    found: list[tuple[int, int]] = []
    reached = lo
    for start, stop in sorted(runs):
        if start >= hi:
            break
        if start > reached:
            found.append((reached, start))
        reached = max(reached, stop)
    if reached < hi:
        found.append((reached, hi))
    return found


def window(lo: SupportsIndex, hi: SupportsIndex) -> tuple[int, int]:
    """Return the window as plain integers, refusing one that ends before it starts."""
    lo, hi = operator.index(lo), operator.index(hi)
    if lo > hi:
        raise ValueError(f"window [{lo}, {hi}) ends before it starts: needs lo <= hi")
    return lo, hi
