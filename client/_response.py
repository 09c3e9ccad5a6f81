"""Decoding the body of a generate response."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import secrets
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, TypedDict

import msgspec

from .errors import MalformedGenerateResponseError

# vLLM clamps logprobs here and also sends it for "none recorded": it proves nothing.
NO_LOGPROB: Final = -9999.0
# What decoders raise; of msgspec a ValueError only from 0.21 on.
_UNDECODABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)


def parse_generate_response(raw: bytes) -> dict[str, Any]:
    """Decode the body of a generate response.

    Megabytes of inline routed experts are cut out before the JSON is decoded and put back after.

    Parameters
    ----------
    raw : bytes
        JSON object with ``choices``.

    Returns
    -------
    dict
        As `json.loads` gives it, except that ``routed_experts.data`` of a choice is a memoryview
        of `raw` where the object is written compactly with ``data`` first, as prime-rl's servers
        write it. Its base64 is neither decoded nor checked.

    Raises
    ------
    MalformedGenerateResponseError
        When it is not a JSON object with at least one choice, or is a stream.

    Examples
    --------
    >>> parse_generate_response(b'{"choices": [{"payload": null}]}')["choices"]
    [{'payload': None}]
    """
    data = _spliced(raw, _decoded)
    if data is None:
        data = _decoded(raw)
    if not isinstance(data, dict):
        raise malformed("$", f"is {kind(data)}: needs an object")
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices:
        said = f"; the server said {shown(data['error'])}" if data.get("error") else ""
        found = "empty" if choices == [] else kind(choices)
        raise malformed("$.choices", f"is {found}: needs a list of at least one{said}")
    for index, choice in enumerate(choices):
        if not isinstance(choice, dict):
            raise malformed(f"$.choices[{index}]", f"is {kind(choice)}: needs an object")
    return data


def _decoded(raw: bytes) -> Any:
    if raw.startswith((b"data:", b"event:", b":")):
        raise malformed("$", "is a stream of events: needs one JSON object; ask without streaming")
    try:
        return msgspec.json.decode(raw)
    except _UNDECODABLE:
        # Python's own parser also takes NaN, numbers past 1e308 and lone surrogates.
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise malformed("$", f"is not valid JSON: {error}") from None


_KEY: Final = b'"routed_experts"'
# The form whose text upstream's client hands over as a memoryview: so do we, in every choice.
_COMPACT: Final = b'"routed_experts":{"data":"'
# Up to the text: the value itself, or "data" of an object after members that are no objects.
_OPENING: Final = re.compile(
    rb'"routed_experts"\s*:\s*(?:\{\s*(?:(?!"data")"[^"\\]*"\s*:\s*'
    rb'(?:"[^"\\]*"|\[[\d\s,]*\]|[\w.+-]+)\s*,\s*)*"data"\s*:\s*)?"'
)
# Shorter texts are decoded with the rest sooner than they are cut out.
_SHORT: Final = 1 << 16
# What stands in for a text meanwhile; no server can know it.
_MARK: Final = f"spliced-{secrets.token_hex(16)}-"


def _spliced(raw: bytes, decode: Callable[[bytes], Any]) -> Any:
    """Decode a body without its long routed experts; None if that cannot be told apart safely."""
    pieces: list[bytes] = []
    texts: list[memoryview | str] = []
    at = done = 0
    while (at := raw.find(_KEY, at)) >= 0:
        opening = _OPENING.match(raw, at)
        at += len(_KEY)
        if opening is None:
            continue
        start = opening.end()
        end = raw.find(b'"', start)
        compact = raw.startswith(_COMPACT, opening.start())
        if end < 0 or (end - start < _SHORT and not compact) or raw.find(b"\\", start, end) >= 0:
            continue
        text = memoryview(raw)[start:end]
        try:
            texts.append(text if compact else str(text, "ascii"))
        except UnicodeDecodeError:
            return None
        pieces += raw[done:start], f"{_MARK}{len(texts) - 1}".encode()
        at = done = end
    if not texts:
        return None
    try:
        data = decode(b"".join([*pieces, raw[done:]]))
    except _UNDECODABLE:
        return None
    choices = data.get("choices") if isinstance(data, dict) else None
    found = 0
    for choice in choices if isinstance(choices, list) else ():
        value = choice.get("routed_experts") if isinstance(choice, dict) else None
        place, key = (value, "data") if isinstance(value, dict) else (choice, "routed_experts")
        mark = place.get(key) if isinstance(place, dict) else None
        if isinstance(mark, str) and mark.startswith(_MARK):
            place[key] = texts[int(mark[len(_MARK) :])]
            found += 1
    # A key of this name elsewhere, or twice in a choice: only the whole body tells what it means.
    return data if found == len(texts) else None


class _Entry(msgspec.Struct, gc=False):
    """One logprob; a thousand dicts a response in its place keep the garbage collector busy."""

    logprob: float
    token: str | None = None
    token_id: int | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry]


class _Choice(TypedDict, total=False):
    token_ids: list[int]
    finish_reason: Any
    logprobs: _Logprobs | None
    completion_logprobs: Any
    routed_experts: Any
    sampling_mask: Any
    sampling_mask_logprobs: Any
    payload: Any


class _Body(TypedDict, total=False):
    request_id: Any
    usage: Any
    prompt_token_ids: Any
    mm_placeholders: Any
    choices: list[_Choice]


_as_expected: Final = msgspec.json.Decoder(_Body).decode


def sampled(raw: bytes) -> tuple[dict[str, Any], dict[str, Any], list[int], list[float]]:
    """Return the body, its first choice, and that choice's token ids and logprobs.

    Raises
    ------
    MalformedGenerateResponseError
        When the body, the tokens or the logprobs are not what the endpoint promises.
    """
    try:
        data: Any = _spliced(raw, _as_expected) or _as_expected(raw)
        choice: Any = data["choices"][0]
        ids = choice["token_ids"]
    except (LookupError, *_UNDECODABLE):
        pass  # another form, or malformed: looked at in detail below
    else:
        given = choice.get("logprobs")
        if given is None or choice.get("completion_logprobs") is not None:
            return data, choice, ids, _completion_logprobs(choice, ids)
        logprobs = [entry.logprob for entry in given.content]
        numbers = [entry.token_id for entry in given.content]
        names = [entry.token for entry in given.content]
        none = [None] * len(ids)
        # vLLM writes "token": "token_id:N", since 0.31 "token_id": N.
        newer = numbers == ids and names == none
        older = numbers == none and names == [f"token_id:{token}" for token in ids]
        if (newer or older) and NO_LOGPROB not in logprobs:
            return data, choice, ids, logprobs
    data = parse_generate_response(raw)
    choice = data["choices"][0]
    ids = token_ids(choice.get("token_ids"), "$.choices[0].token_ids")
    return data, choice, ids, _completion_logprobs(choice, ids)


def token_ids(ids: Any, place: str) -> list[int]:
    """Return a list of token ids from a response, refusing anything else."""
    if not isinstance(ids, list):
        raise malformed(place, f"is {kind(ids)}: needs a list")
    if not set(map(type, ids)) <= {int}:
        index = next(i for i, token in enumerate(ids) if type(token) is not int)
        raise malformed(f"{place}[{index}]", f"is {shown(ids[index])}: needs an integer")
    return ids


def _completion_logprobs(choice: Mapping[str, Any], ids: list[int]) -> list[float]:
    """Return the logprob of each completion token, from whichever form the choice has.

    Raises
    ------
    MalformedGenerateResponseError
        When one is missing, of another token, not finite, or the engine's "none recorded".
    """
    packed = choice.get("completion_logprobs")
    if packed is not None:
        return _checked(_unpack(packed), len(ids), "$.choices[0].completion_logprobs")
    logprobs = choice.get("logprobs")
    if logprobs is None and not ids:
        return []  # aborted before the first token
    place = "$.choices[0].logprobs"
    if not isinstance(logprobs, Mapping):
        raise malformed(place, f"is {kind(logprobs)}: needs an object")
    content = logprobs.get("content")
    place += ".content"
    if not isinstance(content, list):
        raise malformed(place, f"is {kind(content)}: needs a list")
    values = []
    for index, entry in enumerate(content[: len(ids)]):
        if not isinstance(entry, Mapping):
            raise malformed(f"{place}[{index}]", f"is {kind(entry)}: needs an object")
        name, number = entry.get("token"), entry.get("token_id")
        token = ids[index]
        right = name in (None, f"token_id:{token}") and (
            number is None or (type(number) is int and number == token)
        )
        if not right or (name is None and number is None):
            said = " and ".join(shown(one) for one in (name, number) if one is not None) or "none"
            raise malformed(f"{place}[{index}]", f"is of token {said}: needs token {token}")
        values.append(entry.get("logprob"))
    return _checked(values, len(ids), place, len(content))


def _checked(values: list[Any], tokens: int, place: str, found: int | None = None) -> list[float]:
    found = len(values) if found is None else found
    if found != tokens:
        raise malformed(place, f"has {found} entries: needs {tokens}, one a completion token")
    for index, value in enumerate(values):
        if type(value) is not float:
            if isinstance(value, bool) or not isinstance(value, int):
                raise malformed(f"{place}[{index}]", f"has logprob {shown(value)}: needs a number")
            try:
                values[index] = value = float(value)
            except OverflowError:
                value = math.inf
        if not math.isfinite(value):
            raise malformed(f"{place}[{index}]", f"has logprob {value}: needs a finite number")
        if value == NO_LOGPROB:
            raise malformed(f"{place}[{index}]", f"has logprob {value}: the engine recorded none")
    return values


def _unpack(packed: Any) -> list[Any]:
    place = "$.choices[0].completion_logprobs"
    if not isinstance(packed, Mapping):
        raise malformed(place, f"is {kind(packed)}: needs an object")
    if packed.get("dtype") != "float32":
        raise malformed(f"{place}.dtype", f"is {shown(packed.get('dtype'))}: needs 'float32'")
    try:
        data = base64.b64decode(packed.get("data"), validate=True)  # type: ignore[arg-type]
    except (binascii.Error, TypeError, ValueError) as error:
        raise malformed(f"{place}.data", f"is not base64: {error}") from None
    shape = packed.get("shape")
    if shape != [len(data) // 4] or len(data) % 4:
        raise malformed(
            f"{place}.shape", f"is {shown(shape)}: {len(data)} bytes need [{len(data) / 4:g}]"
        )
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def malformed(place: str, message: str) -> MalformedGenerateResponseError:
    """Make the error for what is wrong at `place`."""
    return MalformedGenerateResponseError(f"response value {message} - at {place}")


def shown(value: object) -> str:
    """Return what was found, as far as an error needs it."""
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def kind(value: object) -> str:
    """Name the JSON type of a decoded value."""
    if value is None:
        return "missing or null"
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
