"""One request asked twice, inline and by handle, and every byte of the two answers compared."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx2
import numpy as np

from payload import Resolver, decode_routed_experts, decode_sampling_mask

from .engine import MASKS, SAMPLED, Engine

_salts = itertools.count()
# What differs between two answers to one request.
VOLATILE = ("request_id", "created")
BY_HANDLE = ("routed_experts", "sampling_mask", "payload")


class Tally:
    """What the run compared, for its last lines."""

    def __init__(self) -> None:
        self.choices = self.rows = self.bytes = self.values = 0
        self.files: set[str] = set()
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        self.notes.append(line)

    def lines(self) -> list[str]:
        return [
            f"{self.choices} choices compared with their inline answer: {self.rows} rows, "
            f"{self.bytes} bytes and {self.values} mask ids, all equal; {len(self.files)} files read",
            *self.notes,
        ]


def body(prompt: list[int], **params: Any) -> dict[str, Any]:
    """A request no other shares cached tokens with, whose answer its seed fixes."""
    top = {key: params.pop(key) for key in ("cache_salt", "request_id", "stream") if key in params}
    return {
        "model": "tiny",
        "token_ids": prompt,
        "cache_salt": f"salt {next(_salts)}",
        "sampling_params": SAMPLED | {"seed": 1, "ignore_eos": True} | params,
    } | top


def by_handle(request: dict[str, Any], payload_dir: Any) -> dict[str, Any]:
    """The same request, asking by handle."""
    params = request["sampling_params"] | {"extra_args": {"payload_dir": payload_dir}}
    return request | {"sampling_params": params}


def salted(request: dict[str, Any]) -> dict[str, Any]:
    """The same request without a cached token."""
    return request | {"cache_salt": f"salt {next(_salts)}"}


def post(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Ask, on a connection of its own; the answer must be a success."""
    response = httpx2.post(f"{engine.url}/inference/v1/generate", json=request, timeout=300)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def both(engine: Engine, request: dict[str, Any], tally: Tally, at: str = "v3") -> list[Any]:
    """Ask inline and by handle, compare; return the answers, inline first."""
    inline = post(engine, request)
    handle = post(engine, salted(by_handle(request, str(engine.root / at))))
    equal(inline, handle, request, engine, tally)
    return [inline, handle]


def equal(
    inline: dict[str, Any],
    handle: dict[str, Any],
    request: dict[str, Any],
    engine: Engine,
    tally: Tally,
) -> None:
    """Compare two answers to one request: side arrays byte for byte, and the rest."""
    prompt = len(request["token_ids"])
    start = request["sampling_params"].get("routed_experts_prompt_start", 0)
    with Resolver(engine.root, verify="checksum") as resolver:
        for here, there in zip(inline["choices"], handle["choices"], strict=True):
            assert here["token_ids"] == there["token_ids"]
            assert len(json.dumps({key: there[key] for key in BY_HANDLE})) < 2048
            assert (there["routed_experts"], there["sampling_mask"]) == (None, None)
            found = resolver.resolve(there["payload"])
            expected = decode_routed_experts(here["routed_experts"])
            [rows] = found.pop("routed_experts")
            assert rows.dtype == expected.dtype
            np.testing.assert_array_equal(rows, expected)
            tokens = len(here["token_ids"])
            assert len(rows) == prompt + tokens - 1 - start
            assert there["payload"][0]["pos"] == start
            tally.choices += 1
            tally.rows += len(rows)
            tally.bytes += rows.nbytes
            assert bool(here["sampling_mask"]) == MASKS
            if MASKS:
                mask = decode_sampling_mask(here["sampling_mask"])
                [kept] = found.pop("sampling_mask")
                np.testing.assert_array_equal(kept.values, mask.values)
                np.testing.assert_array_equal(kept.offsets, mask.offsets)
                assert len(kept) == tokens
                assert there["payload"][1]["pos"] == prompt
                tally.values += kept.values.size
            assert not found
            files = {segment["file"] for segment in there["payload"]}
            assert len(files) == 1
            assert not files & tally.files, "a name was used twice"
            tally.files |= files
    assert _rest(inline) == _rest(handle)


def _rest(answer: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in answer.items() if key not in VOLATILE}
    drop = set(BY_HANDLE)
    rest["choices"] = [
        {key: value for key, value in choice.items() if key not in drop}
        for choice in answer["choices"]
    ]
    return rest
