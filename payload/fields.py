"""What is known of each side array: how it is laid out and what an uncovered position means."""

from __future__ import annotations

from typing import Final, Literal

import msgspec


class Field(msgspec.Struct, frozen=True):
    """What is known of one side array.

    Attributes
    ----------
    fill : int or float or None
        Value of positions no segment covers, used only when a caller asks for ``fill="field"``.
    window : {"inputs", "labels", "sequence"}
        Which tokens a context-parallel rank needs rows for.
    ragged : bool
        Rows of different length: a table of offsets followed by values.
    dtype : str or None
        Dtype trainers compute with, used only when a caller asks for ``dtype="field"``.
    sparse : bool
        Whether an uncovered position is normal (prompt tokens have no sampling mask).
    """

    fill: int | float | None = None
    window: Literal["inputs", "labels", "sequence"] = "inputs"
    ragged: bool = False
    dtype: str | None = None
    sparse: bool = False


FIELDS: Final[dict[str, Field]] = {
    "routed_experts": Field(fill=0, window="inputs", dtype="int32"),
    "routed_expert_weights": Field(fill=0.0, window="inputs", dtype="float32"),
    "sampling_mask": Field(fill=-1, window="labels", ragged=True, dtype="int32", sparse=True),
    "sampling_mask_logprobs": Field(
        fill=float("-inf"), window="sequence", ragged=True, dtype="float32", sparse=True
    ),
}
"""The side arrays of prime-rl. A resolver takes more with ``fields=FIELDS | {"mine": Field(...)}``."""
