"""What a write costs beside the bare system calls: ``python -m bench.writer``.

11.5 MB of routed experts, checksum included, against a write and rename of the same bytes; durable
against write, fsync, rename and fsync of the directory. Medians of interleaved rounds in one process.
And what writing beside an event loop costs it. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable

import numpy as np

from bench.measure import SHARED, Figure, main, scratch
from payload import Writer

ROUNDS = 31
ROWS = np.random.default_rng(0).integers(0, 128, (30_000, 48, 8), np.uint8)


def bare(root: str, durable: bool) -> str:
    """Write the same bytes and rename them."""
    path = f"{root}/{uuid.uuid4().hex}"
    fd = os.open(f"{path}.part", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(fd, ROWS.data.cast("B"))
    if durable:
        os.fsync(fd)
    os.close(fd)
    os.rename(f"{path}.part", path)
    if durable:
        directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(directory)
        os.close(directory)
    return path


def compare(root: str, durable: bool, rounds: int) -> tuple[float, float]:
    """Median milliseconds of our write and of the bare one."""
    writer = Writer(root, durable=durable)
    runs: tuple[Callable[[], str], ...] = (
        lambda: writer.write({"routed_experts": (0, ROWS)})[0].file,
        lambda: bare(f"{root}/v0", durable),
    )
    times: list[list[float]] = [[], []]
    for run in runs:
        os.unlink(run())
    for _ in range(rounds if not durable else rounds // 3):
        for run, kept in zip(runs, times, strict=True):
            began = time.perf_counter()
            path = run()
            kept.append(1e3 * (time.perf_counter() - began))
            os.unlink(path)
    return statistics.median(times[0]), statistics.median(times[1])


async def lag(root: str) -> float:
    """99th percentile of how late a 10 ms ticker is, in ms, while 100 MB are written beside it."""
    writer, late = Writer(root), []

    async def tick() -> None:
        while True:
            due = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            late.append(1e3 * (time.perf_counter() - due))

    ticker = asyncio.create_task(tick())
    for _ in range(5):
        await asyncio.gather(*[writer.awrite({"routed_experts": (0, ROWS)}) for _ in range(9)])
    ticker.cancel()
    return statistics.quantiles(late, n=100)[-1]


def figures(quick: bool) -> list[Figure]:
    rounds, found = 9 if quick else ROUNDS, []
    places = [("tmpfs", SHARED), ("disk", os.getcwd())]
    places = [place for place in places if os.access(place[1], os.W_OK | os.X_OK)]
    for name, base in places or [("disk", tempfile.gettempdir())]:
        with scratch(base) as root:
            for durable in (False, True):
                ours, rival = compare(root, durable, rounds)
                what = f"{'durable write' if durable else 'write'} of 11.5 MB on {name} / bare"
                found.append(Figure(what, ours, rival, "ms", ours / rival, "<= 1.3"))
            if name == "tmpfs":
                late = asyncio.run(lag(root))
                what = "99% of ticks beside 5 x 100 MB of awrite: ms late"
                found.append(Figure(what, late, None, "ms", late, "<= 50"))
    return found


if __name__ == "__main__":
    sys.exit(main(figures, __doc__))
