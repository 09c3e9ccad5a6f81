"""Steps that might make reading faster, each measured beside how it is: ``python -m bench.tried``.

Nothing here is a target. CHANGELOG.md says what was expected, what came, and what was done about it.
"""

from __future__ import annotations

import mmap
import os
import sys
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import Figure, descriptors, huge_root, main, medians, scratch
from payload import Resolver, Segment

FILES = 1_000


def put(root: str, files: int, nbytes: int) -> list[str]:
    paths = [f"{root}/{uuid.uuid4().hex}.bin" for _ in range(files)]
    block = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).tobytes()
    for path in paths:
        Path(path).write_bytes(block)
    return paths


def maps_without_descriptor(root: str, rounds: int) -> list[Figure]:
    """Python 3.13 can map without keeping a duplicate of the descriptor."""
    if not hasattr(os, "process_cpu_count"):  # 3.13; mypy knows versions too well
        print("maps without a descriptor are not measured: they need Python 3.13")
        return []
    paths = put(root, FILES, 4096)
    held: dict[bool, int] = {}
    map_file: Any = mmap.mmap

    def run(tracked: bool) -> None:
        before, kept = descriptors(), []
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            kept.append(map_file(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ, trackfd=tracked))
            os.close(fd)
        held[tracked] = descriptors() - before

    without, tracked = medians(partial(run, False), partial(run, True), rounds=rounds)
    name = f"map {FILES} files, no descriptor kept ({held[False]}) / kept ({held[True]})"
    return [Figure(name, without, tracked, "ms", without / tracked)]


def small_reads(root: str, rounds: int) -> list[Figure]:
    """Many small ranges of one file: a pread each, or one over the gaps between them as well."""
    [path] = put(root, 1, 64 << 20)
    found = []
    for nbytes, gap in ((6_144, 0), (6_144, 1_024), (6_144, 16_384), (6_144, 65_536), (768, 768)):
        step = nbytes + gap
        count = min(500, (64 << 20) // step)
        out = np.zeros(count * nbytes, np.uint8)
        flat = out.data
        spare = memoryview(bytearray(gap))

        def each(
            path: str = path,
            count: int = count,
            step: int = step,
            n: int = nbytes,
            flat: Any = flat,
        ) -> None:
            fd = os.open(path, os.O_RDONLY)
            for index in range(count):
                os.preadv(fd, [flat[index * n : (index + 1) * n]], index * step)
            os.close(fd)

        def over(
            path: str = path, count: int = count, step: int = step, n: int = nbytes, flat: Any = flat,
            spare: memoryview = spare,
        ) -> None:  # fmt: skip
            fd = os.open(path, os.O_RDONLY)
            for first in range(0, count, 500):
                parts: list[Any] = []
                for index in range(first, min(count, first + 500)):
                    parts += [flat[index * n : (index + 1) * n], spare]
                os.preadv(fd, parts, first * step)
            os.close(fd)

        each()
        want = out.copy()
        out[:] = 0
        over()
        assert np.array_equal(out, want)
        apart, together = medians(each, over, rounds=rounds)
        name = f"{count} ranges of {nbytes:,} bytes, {gap:,} apart: one preadv over gaps / one each"
        found.append(Figure(name, together, apart, "ms", together / apart))
    with Resolver(root) as resolver:  # what we do where ranges adjoin
        segments = [
            Segment("routed_experts", path, 6_144 * i, 16 * i, 16, "uint8", (48, 8))
            for i in range(500)
        ]
        [whole] = [Segment("routed_experts", path, 0, 0, 8_000, "uint8", (48, 8))]
        into = np.zeros((8_000, 48, 8), np.uint8)
        many, one = medians(
            lambda: resolver.window(segments, "routed_experts", 0, 8_000, out=into),
            lambda: resolver.window([whole], "routed_experts", 0, 8_000, out=into),
            rounds=rounds,
        )
        name = "window over 500 adjoining segments of 6,144 bytes / over one of the same rows"
        found.append(Figure(name, many, one, "ms", many / one))
    return found


def threads(root: str, rounds: int) -> list[Figure]:
    """Reading files on one thread, and on as many as there are cores."""
    found, cores = [], len(os.sched_getaffinity(0))
    for nbytes, files in (
        (4_096, 2_000),
        (16_384, 1_000),
        (65_536, 500),
        (262_144, 200),
        (1 << 20, 64),
        (11 << 20, 8),
    ):
        directory = f"{root}/{nbytes}"
        os.mkdir(directory)
        rows = nbytes // 384
        segments = [
            Segment("routed_experts", path, 0, index * rows, rows, "uint8", (48, 8))
            for index, path in enumerate(put(directory, files, nbytes))
        ]
        out = np.zeros((files * rows, 48, 8), np.uint8)

        def run(
            resolver: Resolver, segments: list[Segment] = segments, out: Any = out
        ) -> Callable[[], Any]:
            return lambda: resolver.window(segments, "routed_experts", 0, len(out), out=out)

        with Resolver(directory) as one, Resolver(directory) as many:
            # How many threads help is the library's own choice; here it is made for it.
            one._files.helpers = lambda *_: 1  # type: ignore[method-assign]
            many._files.helpers = lambda *_: cores  # type: ignore[method-assign]
            single, several = medians(run(one), run(many), rounds=rounds)
        name = f"{files} files of {nbytes:,} bytes: {cores} threads / one"
        found.append(Figure(name, several, single, "ms", several / single))
    return found


def huge_pages(roots: dict[str, str], rounds: int) -> list[Figure]:
    """The same rows on tmpfs with huge pages and without."""
    if len(roots) < 2:
        return []
    rows, found = 300_000, []
    sources: dict[str, Segment] = {}
    for kind, root in roots.items():
        [path] = put(root, 1, rows * 384)
        sources[kind] = Segment("routed_experts", path, 0, 0, rows, "uint8", (48, 8))
    out = np.ones((rows, 48, 8), np.uint8)

    def viewed(kind: str) -> None:
        with Resolver(roots[kind]) as resolver:
            np.copyto(out, resolver.view(sources[kind]))

    def gathered(kind: str) -> None:
        with Resolver(roots[kind], mode="copy") as resolver:
            resolver.window([sources[kind]], "routed_experts", 0, rows, out=out)

    ways = {"a view mapped, all touched": viewed, "a window read into an array": gathered}
    for name, run in ways.items():
        huge, small = medians(partial(run, "huge"), partial(run, "small"), rounds=rounds)
        found.append(Figure(f"115 MB, {name}: huge pages / 4 KiB", huge, small, "ms", huge / small))
    return found


def memory_of(huge: str) -> list[Figure]:
    """Memory that small files take on a tmpfs with huge pages."""
    with huge_root(huge) as mounted:
        if not mounted.root:
            return []
        put(mounted.root, 100, 200_000)
        used = os.statvfs(mounted.root)
        taken, size = (used.f_blocks - used.f_bfree) * used.f_bsize / 1e6, 20.0
    return [
        Figure(
            f"100 files of 200 KB on huge={huge}: memory / size", taken, size, "MB", taken / size
        )
    ]


def figures(quick: bool) -> list[Figure]:
    rounds = 5 if quick else 15
    with scratch() as root, huge_root() as huge:
        roots = {"small": root} | ({"huge": huge.root} if huge.root else {})
        if not huge.root:
            print(f"huge pages are not measured: {huge.reason}")
        found = huge_pages(roots, rounds) + memory_of("within_size") + memory_of("always")
        for measure in (maps_without_descriptor, small_reads, threads):
            with scratch() as one:
                found += measure(one, rounds)
    return found


if __name__ == "__main__":
    sys.exit(main(figures, __doc__))
