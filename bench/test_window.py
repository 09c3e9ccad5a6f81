"""Windows: gathered, widened, ragged and padded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload import Ragged, Resolver, Segment, Writer

RNG = np.random.default_rng(0)
TURNS, TOKENS = 50, 400
ROWS = RNG.integers(0, 128, (TURNS * TOKENS, 48, 8), np.uint8)
COUNTS = np.clip(np.exp(RNG.normal(np.log(2), 1.6, len(ROWS))).astype(np.int64), 1, 512)
MASK = Ragged.from_counts(RNG.integers(0, 150_000, COUNTS.sum()).astype(np.int32), COUNTS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def segments(root: Path) -> list[Segment]:
    """One file a turn, with both side arrays."""
    writer, found = Writer(root), []
    for at in range(0, len(ROWS), TOKENS):
        found += writer.write(
            {
                "routed_experts": (at, ROWS[at : at + TOKENS]),
                "sampling_mask": (at, MASK[at : at + TOKENS]),
            }
        )
    return found


@pytest.fixture
def resolver(root: Path) -> Iterator[Resolver]:
    with Resolver(root) as one:
        yield one


def note(benchmark: Any, nbytes: int) -> None:
    benchmark.extra_info |= {"bytes": nbytes, "segments": TURNS, "cache": "warm"}


@pytest.mark.parametrize("dtype", [None, "field"])
def test_a_window_of_fifty_turns(
    benchmark: Any, resolver: Resolver, segments: list[Segment], dtype: Any
) -> None:
    out = np.empty(ROWS.shape, np.int32 if dtype else np.uint8)
    got = benchmark(resolver.window, segments, "routed_experts", 0, len(ROWS), dtype=dtype, out=out)
    note(benchmark, ROWS.nbytes)
    np.testing.assert_array_equal(got, ROWS)


def test_the_quarter_of_a_context_parallel_rank(
    benchmark: Any, resolver: Resolver, segments: list[Segment]
) -> None:
    quarter = len(ROWS) // 4
    got = benchmark(resolver.window, segments, "routed_experts", quarter, 2 * quarter)
    note(benchmark, ROWS.nbytes // 4)
    np.testing.assert_array_equal(got, ROWS[quarter : 2 * quarter])


def test_a_ragged_window(benchmark: Any, resolver: Resolver, segments: list[Segment]) -> None:
    got = benchmark(resolver.ragged, segments, "sampling_mask", 0, len(ROWS))
    note(benchmark, MASK.values.nbytes)
    np.testing.assert_array_equal(got.values, MASK.values)
    np.testing.assert_array_equal(got.offsets, MASK.offsets)


def test_a_padded_window(benchmark: Any, resolver: Resolver, segments: list[Segment]) -> None:
    got = benchmark(resolver.window, segments, "sampling_mask", 0, len(ROWS))
    note(benchmark, got.nbytes)
    np.testing.assert_array_equal(got, MASK.to_padded(-1))
