"""What a window costs beside upstream's way and bare system calls: ``python -m bench.window``.

The rival does what prime-rl's reader does: one pread a segment on 32 threads, bytes, frombuffer,
widened to int32. The floor is a loop of open, preadv and close into one array. Medians of
interleaved rounds in one process, results compared first. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import os
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import Figure, main, medians, scratch
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


def write(root: str, files: int, rows: int) -> list[Segment]:
    data = np.random.default_rng(0).integers(0, 128, (rows, *ROW), np.uint8)
    os.makedirs(f"{root}/v3", exist_ok=True)
    segments = []
    for index in range(files):
        path = f"{root}/v3/{uuid.uuid4().hex}.bin"
        Path(path).write_bytes((data + np.uint8(index % 128)).tobytes())
        segments.append(Segment("routed_experts", path, 0, index * rows, rows, "uint8", ROW))
    return segments


def many_files(
    resolver: Resolver, root: str, files: int, rows: int, over: float, near: float, rounds: int
) -> list[Figure]:
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
        rounds=rounds,
    )
    found = [
        Figure(f"{name}: upstream's way / native window", native, rival, "ms", rival / native, f">= {over}"),
        Figure(f"{name}: window into an array / bare loop into it", into, floor, "ms", into / floor, f"<= {near}"),
        Figure(f"{name}: upstream's way / window as int32", same, rival, "ms", rival / same, ">= 1.5"),
        Figure(f"{name}: quarter window / whole", quarter, native, "ms", quarter / native, "<= 0.35"),
    ]  # fmt: skip
    return found if rows > 16 else found[:2]


def one_segment(resolver: Resolver, root: str, rounds: int) -> list[Figure]:
    [segment] = write(root, 1, 30_000)
    rival, ours = medians(
        lambda: upstream([segment], 0, 30_000),
        lambda: [resolver.window([segment], "routed_experts", 0, 30_000) for _ in range(100)],
        rounds=rounds,
    )
    ours /= 100
    name = "one segment of 11.5 MB: upstream's way / window"
    return [Figure(name, ours, rival, "ms", rival / ours, ">= 1000")]


def turns(root: str, rounds: int) -> list[Figure]:
    segments = write(root, 50, 1000)
    [whole] = write(root, 1, 50_000)
    with Resolver(root, mode="copy") as resolver:
        many, one = medians(
            lambda: resolver.window(segments, "routed_experts", 0, 50_000),
            lambda: resolver.window([whole], "routed_experts", 0, 50_000),
            rounds=rounds,
        )
    name = "50 turns of 1,000 tokens / the same in one segment"
    return [Figure(name, many, one, "ms", many / one, "<= 2")]


def figures(quick: bool) -> list[Figure]:
    rounds = 3 if quick else ROUNDS
    found: list[Figure] = []
    with scratch() as root:
        with Resolver(root) as resolver:
            found += many_files(resolver, root, 640, 512, 3.5, 1.25, rounds)
            found += many_files(resolver, root, 2000, 16, 3.0, 1.6, rounds)
            found += one_segment(resolver, root, rounds)
        found += turns(root, rounds)
    POOL.shutdown()
    return found


if __name__ == "__main__":
    sys.exit(main(figures, __doc__))
