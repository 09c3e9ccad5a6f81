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
        asked, but an aborted or empty completion has no rows. ``not_asked``: the request named no
        directory.
    message : str
        The same in words, with what to do.
    """

    state: Literal["by_handle", "inline", "missing", "nothing", "not_asked"]
    message: str


def payload_status(
    result: Mapping[str, Any], sampling_params: Mapping[str, Any] | None
) -> PayloadStatus:
    """Tell what became of a request for side arrays by handle.

    Servers and routers drop what they do not know without a word; this tells at once what would
    otherwise surface in the trainer.

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

    Examples
    --------
    >>> result = {"payload": None, "routed_experts": None, "completion_ids": [5, 6]}
    >>> payload_status(result, {"extra_args": {"payload_dir": "/shared/payload/v3"}}).state
    'missing'
    """
    params = sampling_params or {}
    directory = (params.get("extra_args") or {}).get("payload_dir")
    payload = result.get("payload")
    inline = [
        name
        for name in ("routed_experts", "sampling_mask", "sampling_mask_logprobs")
        if result.get(name) is not None
    ]
    came = " and ".join(inline)
    if payload:
        fields = [segment.get("field") for segment in payload if isinstance(segment, Mapping)]
        names = ", ".join(dict.fromkeys(map(str, fields)))
        beside = f"; {came} came inline beside it" if inline else ""
        return PayloadStatus("by_handle", f"payload came by handle: {names}{beside}")
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
            "by handle or could not write, its log tells; payload.spill turns the choice into a "
            "by-handle one",
        )
    completion = result.get("completion_ids", result.get("token_ids")) or []
    reason = result.get("finish_reason")
    start = params.get("routed_experts_prompt_start") or 0
    prompt = result.get("prompt_ids")
    if not completion or reason == "abort":
        why = f"finish_reason is {reason!r} and {len(completion)} tokens were sampled"
    elif prompt is not None and start >= len(prompt) + len(completion) - 1:
        # The last sampled token is never forwarded, so it has no row.
        why = f"no token from position {start} on was forwarded"
    else:
        return PayloadStatus(
            "missing",
            f"payload was asked for in {directory!r}, no side array came with {len(completion)} "
            "tokens: start the server with --enable-return-routed-experts, and let every router "
            "between pass sampling_params.extra_args and the fields of a choice",
        )
    return PayloadStatus("nothing", f"payload was asked for, there was nothing to send: {why}")
