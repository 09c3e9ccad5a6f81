"""What is measured: side arrays of the field's shapes, laid out on a root in every form a way takes."""

from __future__ import annotations

import base64
import itertools
import os
import uuid
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from bench.rivals import FIXED, MASKS, Array, Way
from payload import Ragged, Segment, Writer, encode_segments


class Scenario(msgspec.Struct, frozen=True):
    """Rollouts of so many turns and tokens; rows of routed experts, or of a sampling mask."""

    name: str
    about: str
    rollouts: int
    turns: int
    tokens: int  # of a rollout
    experts: int = 128  # 0: a sampling mask
    layers: int = 48
    top_k: int = 8

    @property
    def ways(self) -> tuple[Way, ...]:
        return FIXED if self.experts else MASKS


class Laid(msgspec.Struct):
    """Where a scenario lies on a root, and the digest every way's arrays must have."""

    scenario: Scenario
    root: str
    segments: list[list[Segment]]
    digest: str
    nbytes: int  # of the side arrays
    messages: dict[str, list[list[str]]]  # paths of messages, by form
    message_bytes: dict[str, int]
    twins: dict[str, list[list[str]]]  # paths of files in a rival's format, by suffix


def scenarios(scale: float, quick: bool) -> list[Scenario]:
    """The field's shapes; `scale` times the tokens of the step, fewer of all when quick."""
    step = max(50, round(1_000 * scale / (4 if quick else 1)))
    rollouts, tokens = (4, 10_000) if quick else (8, 20_000)
    return [
        Scenario("rollout", "one rollout of 30,000 tokens, 48 layers, top-8, uint8", 1, 1, 30_000),
        Scenario("step", f"one step: 256 rollouts of {step:,} tokens", 256, 1, step),
        Scenario(
            "agentic", f"{rollouts} rollouts of 50 turns, {tokens:,} tokens each", rollouts, 50, tokens
        ),
        Scenario("wide", "30,000 tokens, 512 experts, uint16", 1, 1, 30_000, experts=512),
        Scenario(
            "masks", "sampling masks of 30,000 tokens: p50 2, p99 82 entries", 1, 1, 30_000, experts=0
        ),
    ]  # fmt: skip


def rows_of(scenario: Scenario, number: int) -> Array:
    """Routed experts of one rollout; the same on every call."""
    rng = np.random.default_rng(number)
    dtype = np.uint8 if scenario.experts <= 256 else np.uint16
    shape = scenario.tokens, scenario.layers, scenario.top_k
    return rng.integers(0, scenario.experts, shape, dtype)


def mask_of(scenario: Scenario, number: int) -> Ragged:
    """A sampling mask with half of its rows of 1 or 2 entries, and 1% of 82 or more."""
    rng = np.random.default_rng(number)
    counts = np.exp(rng.normal(np.log(2), 1.596, scenario.tokens))  # ln(82 / 2) = 2.326 x 1.596
    counts = np.clip(np.round(counts), 1, 512).astype(np.int64)
    return Ragged.from_counts(rng.integers(0, 150_000, int(counts.sum())).astype(np.int32), counts)


def digest_of(results: list[Any], *, wide: bool, dtype: str) -> str:
    """One digest of arrays or masks, whether or not they were widened or padded."""
    hasher = xxhash.xxh3_128()
    for one in results:
        for part in _parts(one, wide, dtype):
            flat = np.ascontiguousarray(part)
            hasher.update(f"{flat.dtype.name}{flat.shape}".encode())
            hasher.update(flat.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def _parts(one: Any, wide: bool, dtype: str) -> list[Array]:
    if isinstance(one, Ragged):
        if wide:
            raise SystemExit("a mask was to be padded and is not")
        return [one.offsets, one.values]
    found = np.asarray(one)
    if found.dtype != (np.int32 if wide else np.dtype(dtype)):
        raise SystemExit(f"rows are {found.dtype}")
    if not wide:
        return [found]
    if found.ndim == 2:  # a padded mask
        kept = found >= 0
        counts = kept.sum(axis=1)
        if not np.array_equal(kept, np.arange(found.shape[1]) < counts[:, None]):
            raise SystemExit("padding stands before entries")
        return [np.concatenate([[0], np.cumsum(counts)]), found[kept]]
    narrow = found.astype(dtype)
    if not np.array_equal(narrow, found):
        raise SystemExit("widened rows have values the dtype written cannot hold")
    return [narrow]


def dtype_of(scenario: Scenario) -> str:
    """Dtype of the rows as written."""
    if not scenario.experts:
        return "int32"
    return "uint8" if scenario.experts <= 256 else "uint16"


def lay(scenario: Scenario, root: str, *, inline: bool = True) -> Laid:
    """Write a scenario beneath `root`, files synced so that their pages can be dropped."""
    base = f"{root}/{scenario.name}-{uuid.uuid4().hex[:8]}"
    os.makedirs(f"{base}/v0")
    os.makedirs(f"{base}/messages")
    writer = Writer(base, durable=True)
    takers = [way for way in scenario.ways if inline or way.kind != "inline"]
    forms = {way.message: None for way in takers if way.message}
    laid = Laid(
        scenario,
        base,
        [],
        "",
        0,
        {form: [] for form in forms},
        dict.fromkeys(forms, 0),
        {".npy": []},
    )
    hasher = xxhash.xxh3_128()
    for number in range(scenario.rollouts):
        segments: list[Segment] = []
        paths: dict[str, list[str]] = {form: [] for form in forms}
        twins = []
        whole: Any = rows_of(scenario, number) if scenario.experts else mask_of(scenario, number)
        for part in _parts(whole, wide=False, dtype=dtype_of(scenario)):
            hasher.update(f"{part.dtype.name}{part.shape}".encode())
            hasher.update(part.reshape(-1).view(np.uint8).data)
            laid.nbytes += part.nbytes
        ends = np.linspace(0, scenario.tokens, scenario.turns + 1).astype(int).tolist()
        field = "routed_experts" if scenario.experts else "sampling_mask"
        for start, stop in itertools.pairwise(ends):
            [segment] = writer.write({field: (start, whole[start:stop])})
            segments.append(segment)
            if scenario.experts:
                twins.append(f"{base}/v0/{uuid.uuid4().hex}.npy")
                with open(twins[-1], "wb") as file:
                    np.save(file, whole[start:stop])
                    file.flush()
                    os.fsync(file.fileno())
            for form in paths:
                raw = message_of(form, field, segment, whole[start:stop])
                path = f"{base}/messages/{uuid.uuid4().hex}.{form}"
                Path(path).write_bytes(raw)
                laid.message_bytes[form] += len(raw)
                paths[form].append(path)
        laid.segments.append(segments)
        for form, found in paths.items():
            laid.messages[form].append(found)
        laid.twins[".npy"].append(twins)
    laid.digest = hasher.hexdigest()
    return laid


def message_of(form: str, field: str, segment: Segment, rows: Any) -> bytes:
    """What carries the rows of one turn, or tells where they are."""
    if form == "handle":
        return msgspec.json.encode({"payload": encode_segments([segment])})
    if form == "lists":
        return msgspec.json.encode({field: [row.tolist() for row in rows]})
    encode = msgspec.msgpack.encode if form == "msgpack" else msgspec.json.encode

    def packed(array: Array) -> dict[str, Any]:
        data: Any = array.tobytes()
        if form == "json":
            data = base64.b64encode(data).decode()
        return {
            "data": data,
            "shape": list(array.shape),
            "start": segment.pos,
            "dtype": array.dtype.name,
        }

    if isinstance(rows, Ragged):
        counts = rows.counts.astype(np.int32)
        parts: Any = {"ids": packed(np.asarray(rows.values)), "counts": packed(counts)}
        if form == "msgpack":
            parts = {key: value["data"] for key, value in parts.items()}
            parts = {key: {"data": value} for key, value in parts.items()}
        return encode({field: parts})
    return encode({field: packed(rows)})
