"""The closed table of element types a segment may name.

A dtype string from the network never reaches numpy before it was found here: numpy would accept
``"S1000000000"`` or ``"O"``. All types are little-endian.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class DType(NamedTuple):
    """Item size in bytes, kind (``b u i f``, as numpy spells them), and the safetensors spelling."""

    itemsize: int
    kind: str
    safetensors: str


DTYPES: Final[dict[str, DType]] = {
    "bool": DType(1, "b", "BOOL"),
    "uint8": DType(1, "u", "U8"),
    "uint16": DType(2, "u", "U16"),
    "uint32": DType(4, "u", "U32"),
    "uint64": DType(8, "u", "U64"),
    "int8": DType(1, "i", "I8"),
    "int16": DType(2, "i", "I16"),
    "int32": DType(4, "i", "I32"),
    "int64": DType(8, "i", "I64"),
    "float16": DType(2, "f", "F16"),
    "float32": DType(4, "f", "F32"),
    "float64": DType(8, "f", "F64"),
}
