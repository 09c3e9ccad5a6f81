"""What a window costs beside upstream's way and bare system calls: ``python -m bench.window``.

The rival does what prime-rl's reader does: one pread a segment on 32 threads, bytes, frombuffer,
widened to int32. The floor is a loop of open, preadv and close into one array. Medians of
interleaved rounds in one process, results compared first. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from payload import Resolver, Segment

Array = np.ndarray[Any, Any]
ROUNDS = 11
ROW = (48, 8)
POOL = ThreadPoolExecutor(32)


def upstream(segments: list[Segment], lo: int, hi: int) -> Array:
    """Rows of [lo, hi) as upstream's reader makes them."""
    out = np.full((hi - lo, *ROW), 0, np.int32)

    def fetch(segment: Segment) -> tuple[Segment, int, int, bytes]:
        start, stop = max(segment.pos, lo), min(segment.end, hi)
        fd = os.open(segment.file, os.O_RDONLY)
        try:
            nbytes = segment.row_nbytes * (stop - start)
            offset = segment.offset + (start - segment.pos) * segment.row_nbytes
            return segment, start, stop, os.pread(fd, nbytes, offset)
        finally:
            os.close(fd)

    wanted = [s for s in segments if s.pos < hi and s.end > lo]
    for segment, start, stop, data in POOL.map(fetch, wanted):
        rows = np.frombuffer(data, segment.dtype).reshape(stop - start, *segment.shape)
        out[start - lo : stop - lo] = rows
    return out


def bare(segments: list[Segment], out: Array) -> Array:
    """All rows of adjoining segments by a loop of open, preadv and close."""
    flat = out.reshape(-1).data
    at = 0
    for segment in segments:
        nbytes = segment.rows * segment.row_nbytes
        fd = os.open(segment.file, os.O_RDONLY)
        os.preadv(fd, [flat[at : at + nbytes]], segment.offset)
        os.close(fd)
        at += nbytes
    return out


def medians(*runs: Callable[[], object]) -> list[float]:
    """Median milliseconds of each, in interleaved rounds: all meet the same noise."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(ROUNDS):
        for run, kept in zip(runs, times, strict=True):
            began = time.perf_counter()
            run()
            kept.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(kept) for kept in times]


def write(root: str, files: int, rows: int) -> list[Segment]:
    data = np.random.default_rng(0).integers(0, 128, (rows, *ROW), np.uint8)
    os.makedirs(f"{root}/v3", exist_ok=True)
    segments = []
    for index in range(files):
        path = f"{root}/v3/{uuid.uuid4().hex}.bin"
        Path(path).write_bytes((data + np.uint8(index % 128)).tobytes())
        segments.append(Segment("routed_experts", path, 0, index * rows, rows, "uint8", ROW))
    return segments


Row = tuple[str, float, float, float, str]


def many_files(
    resolver: Resolver, root: str, files: int, rows: int, over: float, near: float
) -> list[Row]:
    segments = write(root, files, rows)
    hi = files * rows
    name = f"{files} files x {rows * 384 // 1000} KB"
    out = np.zeros((hi, *ROW), np.uint8)

    def window(stop: int = hi, **options: Any) -> Array | None:
        return resolver.window(segments, "routed_experts", 0, stop, **options)

    want = upstream(segments, 0, hi)
    got = window()
    assert got is not None
    assert np.array_equal(got, want)
    assert np.array_equal(bare(segments, out), want)
    native, rival, into, floor, same, quarter = medians(
        window,
        lambda: upstream(segments, 0, hi),
        lambda: window(out=out),
        lambda: bare(segments, out),
        lambda: window(dtype="field"),
        lambda: window(hi // 4),
    )
    found: list[Row] = [
        (f"{name}: upstream's way / native window", rival, native, rival / native, f">= {over}"),
        (
            f"{name}: window into an array / bare loop into it",
            into,
            floor,
            into / floor,
            f"<= {near}",
        ),
        (f"{name}: upstream's way / window as int32", rival, same, rival / same, ">= 1.5"),
        (f"{name}: quarter window / whole", quarter, native, quarter / native, "<= 0.35"),
    ]
    return found if rows > 16 else found[:2]


def one_segment(resolver: Resolver, root: str) -> list[Row]:
    [segment] = write(root, 1, 30_000)
    rival, ours = medians(
        lambda: upstream([segment], 0, 30_000),
        lambda: [resolver.window([segment], "routed_experts", 0, 30_000) for _ in range(100)],
    )
    ours /= 100
    return [
        ("one segment of 11.5 MB: upstream's way / window", rival, ours, rival / ours, ">= 1000")
    ]


def turns(root: str) -> list[Row]:
    segments = write(root, 50, 1000)
    [whole] = write(root, 1, 50_000)
    with Resolver(root, mode="copy") as resolver:
        many, one = medians(
            lambda: resolver.window(segments, "routed_experts", 0, 50_000),
            lambda: resolver.window([whole], "routed_experts", 0, 50_000),
        )
    return [("50 turns of 1,000 tokens / the same in one segment", many, one, many / one, "<= 2.0")]


def main() -> int:
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="byhandle-bench-", dir=shared) as root:
        with Resolver(root) as resolver:
            rows += many_files(resolver, root, 640, 512, 3.5, 1.25)
            rows += many_files(resolver, root, 2000, 16, 3.0, 1.6)
            rows += one_segment(resolver, root)
        rows += turns(root)
    missed = 0
    print(f"{'':<60}{'ms':>9}{'ms':>9}{'ratio':>9}  target")
    for name, first, second, ratio, target in rows:
        sign, bound = target.split()
        missed += ratio > float(bound) if sign == "<=" else ratio < float(bound)
        print(f"{name:<60}{first:>9.2f}{second:>9.3f}{ratio:>9.2f}  {target}")
    POOL.shutdown()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
