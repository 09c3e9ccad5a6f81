"""Views: of files mapped before, of new ones, and of whole payloads."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from payload import Resolver, Segment, Writer, encode_segments

ROWS = np.random.default_rng(0).integers(0, 128, (30_000, 48, 8), np.uint8)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[str]:
    """In memory where there is /dev/shm: a disk's noise is not ours."""
    if not os.access("/dev/shm", os.W_OK):
        yield str(tmp_path)
        return
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="byhandle-bench-", dir="/dev/shm") as directory:
        yield directory


def test_a_view_of_a_mapped_file(benchmark: Any, root: str) -> None:
    [segment] = Writer(root).write({"routed_experts": (0, ROWS)})
    with Resolver(root) as resolver:
        resolver.view(segment)
        view = benchmark(resolver.view, segment)
        benchmark.extra_info |= {"bytes": ROWS.nbytes, "segments": 1, "cache": "warm"}
        np.testing.assert_array_equal(view, ROWS)
        assert resolver.stats().maps == resolver.stats().opens == 1


def test_views_of_a_hundred_new_files(benchmark: Any, root: str) -> None:
    writer = Writer(root)
    segments = [
        writer.write({"routed_experts": (0, ROWS[at : at + 10])})[0] for at in range(0, 1000, 10)
    ]

    def new() -> tuple[tuple[Resolver], dict[str, Any]]:
        return (Resolver(root),), {}

    def views(resolver: Resolver) -> list[Any]:
        return [resolver.view(segment) for segment in segments]

    found = benchmark.pedantic(views, setup=new, rounds=30)
    benchmark.extra_info |= {"bytes": 384_000, "segments": 100, "cache": "warm"}
    np.testing.assert_array_equal(np.concatenate(found), ROWS[:1000])


@pytest.mark.parametrize("form", ["object", "array"])
def test_resolve_a_payload_as_it_came(benchmark: Any, root: str, form: Any) -> None:
    segments: list[Segment] = []
    for at in range(0, 500, 10):
        segments += Writer(root).write({"routed_experts": (at, ROWS[at : at + 10])})
    raw = msgspec.json.encode(encode_segments(segments, form))
    with Resolver(root) as resolver:
        resolver.resolve(raw)
        views = benchmark(resolver.resolve, raw)["routed_experts"]
        benchmark.extra_info |= {"bytes": 192_000, "segments": 50, "cache": "warm"}
        np.testing.assert_array_equal(np.concatenate(views), ROWS[:500])
