"""Changing a dtype only where no value changes. numpy alone would wrap 511 to 255 in silence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .dtypes import DTYPES
from .errors import PayloadError

Array = np.ndarray[Any, Any]
New = Callable[[tuple[int, ...], np.dtype[Any]], Array]  # makes an array, its content undefined
DTypeLike = Any

_CHUNK = 1 << 14  # values checked at a time: what is made of them stays small

NUMPY: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in DTYPES}


def known_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return `dtype` as numpy's, refusing what is not in the closed table."""
    try:
        found = np.dtype(dtype)
    except (SyntaxError, TypeError, ValueError):
        raise TypeError(f"dtype is {dtype!r}: needs one of {', '.join(DTYPES)}") from None
    if found.name not in DTYPES or not found.isnative:
        raise TypeError(
            f"dtype is {found.str}: needs one of {', '.join(DTYPES)}, native byte order"
        )
    return found


def common_dtype(names: Iterable[str]) -> np.dtype[Any]:
    """Return the narrowest dtype that holds values of all `names`, as np.result_type has it.

    Raises
    ------
    ValueError
        When integers would meet in a float: uint64 and int64 have no common integer type.
    """
    dtypes = [NUMPY[name] for name in dict.fromkeys(names)]
    found = np.result_type(*dtypes)
    if found.kind == "f" and all(dtype.kind in "biu" for dtype in dtypes):
        raise ValueError(
            f"{' and '.join(dtype.name for dtype in dtypes)} have no common integer type"
        )
    return found


def allocate(
    shape: tuple[int, ...], dtype: np.dtype[Any], limit: int, what: str, new: New = np.empty
) -> Array:
    """Return an empty array, of a size that came from outside; `new` makes it.

    Raises
    ------
    PayloadError
        When it has more than `limit` bytes, or the system has no such memory.
    """
    nbytes = math.prod(size or 1 for size in shape) * dtype.itemsize
    if nbytes > limit:
        raise PayloadError(
            f"{what} needs an array of {nbytes} bytes, max_bytes is {limit}: ask for a smaller window, or "
            "raise it",
            reason="max_bytes",
            expected=limit,
            actual=nbytes,
        )
    try:
        return new(shape, dtype)
    except MemoryError:
        raise PayloadError(
            f"{what} needs an array of {nbytes} bytes, which the system does not have",
            reason="memory",
            actual=nbytes,
        ) from None


def always_fits(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Whether every value of `source` is exactly a value of `target`."""
    if source.kind in "iu" and source.itemsize == 8 and target.kind == "f":
        return False  # numpy calls it safe; 2^53 + 1 has no float64
    return np.can_cast(source, target, "safe")


def check_fits(values: Array, target: np.dtype[Any]) -> None:
    """Raise ValueError unless `target` holds each of `values`; floats may round, not overflow."""
    source = values.dtype
    if not values.size or always_fits(source, target):
        return
    if values.size > _CHUNK:
        flat = values.reshape(-1)  # a view of what is contiguous, as blocks are
        for at in range(0, flat.size, _CHUNK):
            check_fits(flat[at : at + _CHUNK], target)
        return
    if source.kind in "biu":
        low, high = int(values.min()), int(values.max())
        if target.kind in "biu":
            least, most = _limits(target)
            wrong = low if low < least else high
            if low < least or high > most:
                raise ValueError(f"value {wrong} does not fit {target} ({least} to {most})")
            return
        exact = 2 ** (np.finfo(target).nmant + 1)
        if -exact <= low and high <= exact:
            return
        for value, cast in zip(
            values.ravel().tolist(), _cast(values, target).ravel().tolist(), strict=True
        ):
            if cast in (float("inf"), float("-inf")) or int(cast) != value:
                raise ValueError(f"value {value} is not exact in {target}")
        return
    if target.kind == "f":
        lost = np.isfinite(values) & ~np.isfinite(_cast(values, target))
        if lost.any():
            raise ValueError(f"value {values[lost].flat[0]} overflows {target}")
        return
    least, most = _limits(target)
    values = values.astype(np.float64)  # exact; in float16 the limits themselves would be infinite
    # float(most) may round up to most + 1, so that bound is exclusive.
    inside = (values >= least) & (values < float(most) + 1) & (values == np.trunc(values))
    if not inside.all():
        raise ValueError(f"value {values[~inside].flat[0]} is not an integer of {target}")


def narrow(values: Array, dtype: DTypeLike) -> Array:
    """Return `values` as `dtype`, all of them checked before any is changed."""
    target = known_dtype(dtype)
    check_fits(values, target)
    return values.astype(target, copy=False)


def exact_fill(fill: Any, target: np.dtype[Any]) -> Any:
    """Return `fill` as a scalar of `target`.

    Raises
    ------
    TypeError, ValueError
        The caller's mistake: -1 in uint8 would become 255, a legal expert id.
    """
    if not isinstance(fill, (bool, int, float, np.bool_, np.number)) or isinstance(fill, complex):
        raise TypeError(f"fill is {fill!r}: needs a number")
    if isinstance(fill, int) and not -(2**63) <= fill < 2**64:
        raise ValueError(f"fill {fill} does not fit {target}")
    try:
        return narrow(np.atleast_1d(np.asarray(fill)), target)[0]
    except ValueError:
        raise ValueError(f"fill {fill!r} does not fit {target}") from None


def _cast(values: Array, target: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        return values.astype(target)


def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    if dtype.kind == "b":
        return 0, 1
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)
