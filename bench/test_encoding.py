"""What is done without a file: decoding segments, packing, inline forms; and the write of a file."""

import base64
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from payload import (
    Sample,
    Segment,
    Writer,
    decode_routed_experts,
    decode_segments,
    encode_segments,
    pack,
)

ROWS = np.random.default_rng(0).integers(0, 128, (30_000, 48, 8), np.uint8)
SEGMENTS = [
    Segment("routed_experts", f"/shared/v3/{at}.bin", 0, 20 * at, 20, "uint8", (48, 8))
    for at in range(200)
]


@pytest.mark.parametrize("form", ["object", "array"])
def test_decode_two_hundred_segments(benchmark: Any, form: Any) -> None:
    raw = msgspec.json.encode(encode_segments(SEGMENTS, form))
    assert benchmark(decode_segments, raw) == SEGMENTS
    benchmark.extra_info |= {"bytes": len(raw), "segments": 200}


def test_pack_ten_rollouts_of_twenty_turns(benchmark: Any) -> None:
    samples = [Sample(401, SEGMENTS[:20]) for _ in range(10)]
    batch = benchmark(pack, samples)
    assert batch.num_tokens == 4_010
    assert [segment.pos for segment in batch.segments[:40:20]] == [0, 401]
    benchmark.extra_info |= {"segments": 200}


def test_decode_inline_routed_experts(benchmark: Any) -> None:
    data = base64.b64encode(ROWS.tobytes()).decode()
    value = {"data": data, "shape": list(ROWS.shape), "start": 0, "dtype": "uint8"}
    np.testing.assert_array_equal(benchmark(decode_routed_experts, value), ROWS)
    benchmark.extra_info |= {"bytes": ROWS.nbytes}


def test_write_a_file(benchmark: Any) -> None:
    # Not on disk: what earlier rounds left dirty is written while later ones run. Nothing of bench is
    # imported here: it would be the base's.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=".byhandle-bench-", dir=memory) as root:
        writer = Writer(root)
        [segment] = benchmark(writer.write, {"routed_experts": (0, ROWS)})
        benchmark.extra_info |= {"bytes": ROWS.nbytes, "segments": 1}
        raw = Path(segment.file).read_bytes()
        assert raw[segment.offset :] == ROWS.tobytes()
