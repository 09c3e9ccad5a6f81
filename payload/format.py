"""The file we write: a safetensors file whose tensors are side arrays.

Layout: 8 bytes little-endian length of the header, the header (JSON, padded with spaces so that the
data begins on a 64-byte boundary), then the tensors without gaps in falling order of item size.
A fixed side array is one tensor named as its field. A ragged one is ``<field>.offsets`` (U32,
rows + 1 absolute byte offsets in the file) followed directly by ``<field>.values``.
``__metadata__`` holds ``format``, per field ``<field>.pos`` and ``<field>.xxh3_64``, and what the
caller adds. A reader that has the segment needs no header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from .dtypes import DTYPES
from .errors import PayloadCorruptError
from .segment import MAX_NDIM

FORMAT: Final = "byhandle/1"
SUFFIX: Final = ".safetensors"
ALIGNMENT: Final = 64  # a cache line, and what vector loads like best
MAX_HEADER: Final = 2**20  # bytes; a response's header has a few hundred

_NAMES: Final = {dtype.safetensors: name for name, dtype in DTYPES.items()}


class Tensor(msgspec.Struct, frozen=True):
    """One tensor of a file: its dtype, shape, and absolute byte range [start, stop)."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(msgspec.Struct, frozen=True):
    """What the header of a file says: where the data begins, its tensors by name, its metadata."""

    data_start: int
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def why_illegal_field(field: str) -> str | None:
    """Say why `field` cannot name a side array in a file, or None if it can."""
    if not field:
        return "is empty"
    if field == "__metadata__" or field.endswith((".offsets", ".values")):
        return "is a name the file format uses itself"
    return None


def header_size(encoded: int) -> int:
    """Where the data begins for a JSON header of `encoded` bytes."""
    return -(-(8 + encoded) // ALIGNMENT) * ALIGNMENT


def encode_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """Encode the header of a file whose data area holds `tensors` in the order given.

    Parameters
    ----------
    tensors : mapping of name to (dtype, shape, bytes)
    metadata : mapping of str to str

    Returns
    -------
    bytes
        Length word and padded JSON; the data area follows directly.
    """
    document: dict[str, Any] = {"__metadata__": {"format": FORMAT, **metadata}}
    at = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        document[name] = {
            "dtype": DTYPES[dtype].safetensors,
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = msgspec.json.encode(document)
    text = text.ljust(header_size(len(text)) - 8)
    return len(text).to_bytes(8, "little") + text


class _WireTensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def decode_header(data: bytes | memoryview, path: str, file_size: int) -> Header | None:
    """Decode and check the header at the start of `data`; None if the file has none of ours.

    Parameters
    ----------
    data : bytes-like
        At least the first ``MAX_HEADER + 8`` bytes of the file, or all of it.
    path : str
        Named in errors.
    file_size : int
        Bytes in the file; the tensors must fill it exactly.

    Raises
    ------
    PayloadCorruptError
        When the header says it is ours and does not fit the file.
    """
    start = 8 + int.from_bytes(data[:8], "little")
    if start > min(len(data), MAX_HEADER + 8) or bytes(data[8:9]) != b"{":
        return None
    try:
        document = msgspec.json.decode(data[8:start], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(document.pop("__metadata__"), type=dict[str, str])
    except (msgspec.DecodeError, KeyError, RecursionError):
        return None
    if metadata.get("format") != FORMAT:
        return None
    tensors: dict[str, Tensor] = {}
    reached = start
    try:
        for name, raw in document.items():
            wire = msgspec.json.decode(raw, type=_WireTensor)
            if wire.dtype not in _NAMES:
                raise ValueError(f"tensor {name[:64]!r} has dtype {wire.dtype[:16]!r}")
            dtype, shape = _NAMES[wire.dtype], tuple(wire.shape)
            if len(shape) > MAX_NDIM + 1:  # rows besides
                raise ValueError(f"tensor {name[:64]!r} has {len(shape)} dimensions")
            nbytes = DTYPES[dtype].itemsize
            for size in shape:
                if size < 0:
                    raise ValueError(f"shape {shape} is negative")
                nbytes *= size
            begin, end = (start + offset for offset in wire.data_offsets)
            if begin != reached or end - begin != nbytes:
                raise ValueError(f"bytes [{begin}, {end}): needs [{reached}, {reached + nbytes})")
            tensors[name] = Tensor(dtype, shape, begin, end)
            reached = end
        if reached != file_size:
            raise ValueError(f"tensors end at byte {reached}, the file at {file_size}")
    except (msgspec.DecodeError, KeyError, RecursionError, ValueError) as error:
        raise PayloadCorruptError(
            f"header of {path!r} does not fit the file: {error}",
            reason="header",
            path=path,
            expected=file_size,
            actual=reached,
        ) from None
    return Header(start, tensors, metadata)


def checksums(header: Header, path: str) -> list[tuple[int, int, str]]:
    """List the side arrays of a file as (start, stop, xxh3_64 in hex) of absolute bytes.

    Raises
    ------
    PayloadCorruptError
        When the metadata names a side array the file does not have.
    """
    found = []
    for key, digest in header.metadata.items():
        field, dot, what = key.rpartition(".")
        if not dot or what != "xxh3_64":
            continue
        names = [
            name
            for name in (field, f"{field}.offsets", f"{field}.values")
            if name in header.tensors
        ]
        if not names:
            raise PayloadCorruptError(
                f"header of {path!r} has a checksum of {field!r} and no such tensor",
                reason="header",
                path=path,
                field=field,
            )
        found.append((header.tensors[names[0]].start, header.tensors[names[-1]].stop, digest))
    return found
