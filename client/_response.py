"""Decoding the body of a generate response."""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from .errors import MalformedGenerateResponseError

# vLLM clamps logprobs here and also sends it for "none recorded": it proves nothing.
NO_LOGPROB: Final = -9999.0


def parse_generate_response(raw: bytes) -> dict[str, Any]:
    """Decode the body of a generate response.

    Parameters
    ----------
    raw : bytes
        JSON object with ``choices``.

    Returns
    -------
    dict
        As `json.loads` gives it.

    Raises
    ------
    MalformedGenerateResponseError
        When it is not a JSON object with at least one choice.

    Examples
    --------
    >>> parse_generate_response(b'{"choices": [{"payload": null}]}')["choices"]
    [{'payload': None}]
    """
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        # Python's own parser also takes NaN, numbers past 1e308 and lone surrogates.
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise malformed("$", f"is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise malformed("$", f"is {kind(data)}: needs an object")
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices:
        said = f"; the server said {data['error']!r}" if data.get("error") else ""
        found = "empty" if choices == [] else kind(choices)
        raise malformed("$.choices", f"is {found}: needs a list of at least one{said}")
    for index, choice in enumerate(choices):
        if not isinstance(choice, dict):
            raise malformed(f"$.choices[{index}]", f"is {kind(choice)}: needs an object")
    return data


def token_ids(ids: Any, place: str) -> list[int]:
    """Return a list of token ids from a response, refusing anything else."""
    if not isinstance(ids, list):
        raise malformed(place, f"is {kind(ids)}: needs a list")
    if not set(map(type, ids)) <= {int}:
        index = next(i for i, token in enumerate(ids) if type(token) is not int)
        raise malformed(f"{place}[{index}]", f"is {ids[index]!r}: needs an integer")
    return ids


def completion_logprobs(choice: Mapping[str, Any], ids: list[int]) -> list[float]:
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
        token = ids[index]
        # vLLM writes "token": "token_id:N", since 0.31 "token_id": N.
        if entry.get("token") != f"token_id:{token}" and entry.get("token_id") != token:
            found = entry.get("token", entry.get("token_id"))
            raise malformed(f"{place}[{index}]", f"is of token {found!r}: needs token {token}")
        values.append(entry.get("logprob"))
    return _checked(values, len(ids), place, len(content))


def _checked(values: list[Any], tokens: int, place: str, found: int | None = None) -> list[float]:
    found = len(values) if found is None else found
    if found != tokens:
        raise malformed(place, f"has {found} entries: needs {tokens}, one a completion token")
    for index, value in enumerate(values):
        if type(value) is not float:
            if isinstance(value, bool) or not isinstance(value, int):
                raise malformed(f"{place}[{index}]", f"has logprob {value!r}: needs a number")
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
        raise malformed(f"{place}.dtype", f"is {packed.get('dtype')!r}: needs 'float32'")
    try:
        data = base64.b64decode(packed.get("data"), validate=True)  # type: ignore[arg-type]
    except (binascii.Error, TypeError, ValueError) as error:
        raise malformed(f"{place}.data", f"is not base64: {error}") from None
    shape = packed.get("shape")
    if shape != [len(data) // 4] or len(data) % 4:
        raise malformed(
            f"{place}.shape", f"is {shape!r}: {len(data)} bytes need [{len(data) / 4:g}]"
        )
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def malformed(place: str, message: str) -> MalformedGenerateResponseError:
    """Make the error for what is wrong at `place`."""
    return MalformedGenerateResponseError(f"response value {message} - at {place}")


def kind(value: object) -> str:
    """Name the JSON type of a decoded value."""
    if value is None:
        return "missing or null"
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
