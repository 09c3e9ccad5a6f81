"""What became of a request for side arrays by handle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec


class PayloadStatus(msgspec.Struct, frozen=True):
    """What a result holds of what its request asked for.

    Attributes
    ----------
    state : {"by_handle", "inline", "missing", "nothing", "not_asked"}
        ``by_handle``: there is a payload. ``inline``: asked by handle, but the side arrays came in
        the body. ``missing``: asked, and neither came although tokens were sampled. ``nothing``:
        asked, neither came, and none is owed: no token was sampled, or the generation was aborted.
        ``not_asked``: the request named no directory.
    message : str
        The same in words, with what to do.
    """

    state: Literal["by_handle", "inline", "missing", "nothing", "not_asked"]
    message: str


_INLINE = ("routed_experts", "sampling_mask", "sampling_mask_logprobs")


def payload_status(
    result: Mapping[str, Any], sampling_params: Mapping[str, Any] | None
) -> PayloadStatus:
    """Tell what became of a request for side arrays by handle.

    Servers and routers drop what they do not know without a word; this tells at once what would
    otherwise surface in the trainer. What came is not validated: the reader does that.

    Parameters
    ----------
    result : mapping
        What `generate` returned, or a choice of a response.
    sampling_params : mapping or None
        What the request was sent with.

    Returns
    -------
    PayloadStatus
        Its `state` is for programs, its `message` for people.

    Raises
    ------
    TypeError
        When `result` is neither.

    Examples
    --------
    >>> result = {"payload": None, "routed_experts": None, "completion_ids": [5, 6]}
    >>> payload_status(result, {"extra_args": {"payload_dir": "/shared/payload/v3"}}).state
    'missing'
    """
    if not isinstance(result, Mapping) or not {"completion_ids", "token_ids"} & set(result):
        raise TypeError("result has no tokens: needs what generate returned, or a choice")
    params = sampling_params or {}
    extra = params.get("extra_args")
    directory = extra.get("payload_dir") if isinstance(extra, Mapping) else None
    payload = result.get("payload")
    inline = [name for name in _INLINE if not _is_empty(result.get(name))]
    came = " and ".join(inline)
    if payload:
        beside = f"; {came} came inline beside it" if inline else ""
        return PayloadStatus("by_handle", f"payload came by handle: {_fields(payload)}{beside}")
    if directory is None:
        came = f"{came} came inline" if inline else "no side array came"
        return PayloadStatus(
            "not_asked",
            f"payload was not asked for, {came}: sampling_params.extra_args.payload_dir asks",
        )
    if inline:
        return PayloadStatus(
            "inline",
            f"payload was asked for in {directory!r}, {came} came inline: the server does not write "
            "by handle or could not write, its log tells; payload.spill makes a by-handle one of it",
        )
    tokens = len(result.get("completion_ids", result.get("token_ids")) or [])
    reason = result.get("finish_reason")
    if tokens and reason != "abort":
        return PayloadStatus(
            "missing",
            f"payload was asked for in {directory!r}, no side array came with {tokens} tokens: start "
            "the server with --enable-return-routed-experts (and --return-sampling-mask), and let "
            "every router between pass sampling_params.extra_args and the fields of a choice",
        )
    return PayloadStatus(
        "nothing",
        f"payload was asked for and none is owed: {tokens} tokens were sampled, finish_reason is "
        f"{reason!r}",
    )


def _is_empty(value: Any) -> bool:
    """Whether an inline side array has no rows, as far as that shows without decoding it."""
    if isinstance(value, Mapping):
        packed = value.get("ids", value)
        shape = packed.get("shape") if isinstance(packed, Mapping) else None
        return isinstance(shape, list) and 0 in shape
    return value is None or value == []


def _fields(payload: Any) -> str:
    """Names of the fields a payload carries, in any of the forms of its segments."""
    names: dict[Any, None] = {}
    for segment in payload if isinstance(payload, (list, tuple)) else ():
        if isinstance(segment, Mapping):
            names[segment.get("field")] = None
        elif isinstance(segment, (list, tuple)):
            names[segment[0] if segment else None] = None
        else:
            names[getattr(segment, "field", None)] = None
    return ", ".join(map(str, names)) or f"a {type(payload).__name__} and no list"
