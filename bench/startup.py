"""What importing `payload` costs beside what it needs anyway: ``python -m bench.startup``.

Each import in a fresh interpreter that reads no environment, taken in turns; medians.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from bench.measure import Figure, main

TIMED = "import time; began = time.perf_counter(); import {0}; print(time.perf_counter() - began)"


def milliseconds(modules: str) -> float:
    command = [sys.executable, "-I", "-c", TIMED.format(modules)]
    return 1e3 * float(subprocess.run(command, capture_output=True, check=True).stdout)


def figures(quick: bool) -> list[Figure]:
    times: dict[str, list[float]] = {"payload": [], "numpy, msgspec, xxhash": []}
    for turn in range(5 if quick else 15):
        for modules, kept in times.items():
            took = milliseconds(modules)
            if turn:  # the first one writes and reads compiled files
                kept.append(took)
    ours, needed = (statistics.median(kept) for kept in times.values())
    name = "import payload / import numpy, msgspec and xxhash"
    return [Figure(name, ours, needed, "ms", ours / needed, "<= 1.3")]


if __name__ == "__main__":
    sys.exit(main(figures, __doc__))
