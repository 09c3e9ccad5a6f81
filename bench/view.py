"""What a view costs beside bare numpy and bare system calls: ``python -m bench.view``.

Medians of interleaved rounds in one process. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.measure import Figure, main, scratch
from payload import Resolver, Segment

SEGMENTS = 2_000
ROUNDS = 25
SHAPE = (2, 48, 8)


def per_call(run: Callable[[int], object], count: int = SEGMENTS) -> float:
    """Median nanoseconds of one call, over calls 0 .. count - 1."""
    clock = time.perf_counter_ns
    times = []
    for index in range(count):
        began = clock()
        run(index)
        times.append(clock() - began)
    return statistics.median(times)


def per_loop(run: Callable[[], object]) -> float:
    """Nanoseconds of one call in a loop that makes all of them."""
    began = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - began) / SEGMENTS


def compare(
    ours: Callable[[], float], rival: Callable[[], float], rounds: int
) -> tuple[float, float]:
    """Medians of interleaved rounds: both meet the same noise."""
    a, b = [], []
    gc.collect()
    for _ in range(rounds):
        a.append(ours())
        b.append(rival())
    return statistics.median(a), statistics.median(b)


def warm(root: str, rounds: int) -> tuple[float, float]:
    path = f"{root}/warm"
    nbytes = int(np.prod(SHAPE))
    Path(path).write_bytes(bytes(SEGMENTS * nbytes))
    offsets = [index * nbytes for index in range(SEGMENTS)]
    segments = [
        Segment("routed_experts", path, offset, 2 * i, 2, "uint8", SHAPE[1:])
        for i, offset in enumerate(offsets)
    ]
    dtype = np.dtype("uint8")
    with open(path, "rb") as file, Resolver(root) as resolver:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        view = resolver.view

        def ours() -> None:
            for segment in segments:
                view(segment)

        def bare() -> None:
            for offset in offsets:
                np.ndarray(SHAPE, dtype, buffer=mapped, offset=offset)

        ours()
        return compare(lambda: per_loop(ours), lambda: per_loop(bare), rounds)


def by_size(root: str, rounds: int) -> tuple[float, float]:
    path = f"{root}/large"
    with open(path, "wb") as file:
        file.truncate(2**30)
    small = Segment("routed_experts", path, 0, 0, 1, "uint8", (1024,))
    large = Segment("routed_experts", path, 0, 0, 2**20, "uint8", (1024,))
    with Resolver(root) as resolver:
        resolver.view(small)
        return compare(
            lambda: per_call(lambda _: resolver.view(large)),
            lambda: per_call(lambda _: resolver.view(small)),
            rounds,
        )


def cold(root: str, rounds: int) -> tuple[float, float]:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    count = SEGMENTS if limit == resource.RLIM_INFINITY else min(SEGMENTS, limit // 4)
    paths = [f"{root}/cold{index}" for index in range(count)]
    for path in paths:
        with open(path, "wb") as file:
            file.write(bytes(4096))
    segments = [Segment("routed_experts", p, 0, 0, 10, "uint8", SHAPE[1:]) for p in paths]

    def ours() -> float:
        with Resolver(root) as resolver:
            return per_call(lambda index: resolver.view(segments[index]), count)

    def bare() -> float:
        kept = []

        def one(index: int) -> None:
            fd = os.open(paths[index], os.O_RDONLY)
            kept.append(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))
            os.close(fd)

        return per_call(one, count)

    return compare(ours, bare, rounds)


def figures(quick: bool) -> list[Figure]:
    measures = (
        ("view of a mapped file / bare np.ndarray over a map", warm, "<= 4"),
        ("view of a new file / bare open, fstat, mmap, close", cold, "<= 2"),
        ("view of 1 GiB / view of 1 KiB", by_size, "<= 1.2"),
    )
    found = []
    for name, measure, target in measures:
        with scratch() as root:
            ours, rival = measure(root, 9 if quick else ROUNDS)
        found.append(Figure(name, ours, rival, "ns", ours / rival, target))
    return found


if __name__ == "__main__":
    sys.exit(main(figures, __doc__))
