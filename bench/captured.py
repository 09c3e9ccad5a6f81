"""Responses of a real engine, captured, and a synthetic rollout of production size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from payload import decode_routed_experts, decode_sampling_mask
from payload.testing.server import Completion

DATA = Path(__file__).parent.parent / "tests" / "data" / "vllm"


def captured(name: str) -> tuple[list[int], Completion]:
    """The prompt and first choice of a captured exchange."""
    request = json.loads((DATA / f"{name}.request.json").read_text())
    choice = json.loads((DATA / f"{name}.response.json").read_text())["choices"][0]
    prompt, tokens = request["token_ids"], choice["token_ids"]
    rows = decode_routed_experts(choice["routed_experts"])
    # The last sampled token is never forwarded, so rows end one before the sequence does.
    arrays: dict[str, Any] = {"routed_experts": (len(prompt) + len(tokens) - 1 - len(rows), rows)}
    if choice.get("sampling_mask"):
        mask = decode_sampling_mask(choice["sampling_mask"])
        arrays["sampling_mask"] = (len(prompt), mask)
    return prompt, Completion(
        token_ids=tokens, arrays=arrays, finish_reason=choice["finish_reason"]
    )


def synthetic(
    tokens: int = 30_000, completion: int = 1_000, layers: int = 48, top_k: int = 8
) -> tuple[list[int], Completion]:
    """A rollout with random routing over 128 experts; the same on every call."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 128, (tokens - 1, layers, top_k), np.uint8)
    ids = rng.integers(0, 150_000, tokens).tolist()
    return ids[:-completion], Completion(
        token_ids=ids[-completion:], arrays={"routed_experts": (0, rows)}
    )


def rollouts() -> dict[str, tuple[list[int], Completion]]:
    """Prompts and completions by name, those of the engine first."""
    names = ("short", "turn1", "turn2_start", "long_1500_548", "v030_long_1500_548_hit")
    return {name: captured(name) for name in names} | {"synthetic 30k": synthetic()}
