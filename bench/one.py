"""One way over one scenario, in a process of its own: ``python -m bench.one LAID WAY TASK``.

The task is JSON. Prints JSON lines. The first call is measured by the kernel's counters and compared
with the reference; if it is equal, further calls are timed.
"""

from __future__ import annotations

import concurrent.futures
import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench import measure
from bench.rivals import Given, Way
from bench.scenarios import Laid, digest_of, dtype_of
from payload import Ragged

MARK = "/byhandle-bench-mark"  # a name looked for before and after what strace counts


class Task(msgspec.Struct, frozen=True):
    """What to do with the way."""

    do: str = "time"  # "time", "phases", "calls" or "hold"
    rounds: int = 11
    seconds: float = 2.0  # after which no further round begins
    cold: bool = False  # drop the page cache of the files before each call


class Timed(msgspec.Struct):
    """One way over one scenario on one root."""

    scenario: str
    way: str
    kind: str
    wide: bool
    root: str = ""
    cache: str = ""
    about: str = ""
    nbytes: int = 0  # of the side arrays as written
    message_bytes: int = 0
    get: list[float] = []  # ms to arrays
    use: list[float] = []  # ms to copy them out once, as to a device
    copied: int = 0  # bytes, by the way's own count
    read: int = 0  # bytes got from read calls
    peak: int = 0  # growth of resident memory, at most
    pss: int = 0  # growth of proportional memory while the arrays are held
    private: int = 0  # of it anonymous
    faults: int = 0
    descriptors: int = 0  # open while the arrays are held
    calls: dict[str, int] | None = None  # system calls of one call, by name; None: not counted
    evicted: bool | None = None  # cold: whether the files were out of the page cache


class Phases(msgspec.Struct):
    """Where the time of one way goes, ms."""

    scenario: str
    way: str
    ms: dict[str, float]


def given_of(laid: Laid, way: Way, *, load: bool = True) -> Given:
    given = Given(laid.root, laid.segments, [], laid.twins.get(way.twin, []))
    if load:
        fill(given, laid, way)
    return given


def fill(given: Given, laid: Laid, way: Way) -> None:
    """Bring the messages into memory, as a socket would."""
    if way.message:
        paths = laid.messages[way.message]
        given.messages = [[Path(path).read_bytes() for path in turns] for turns in paths]


def buffer_for(results: list[Any]) -> Any:
    """Memory that is there, as large as the largest array."""
    most = max(part.nbytes for one in results for part in parts(one))
    return np.ones(most, np.uint8)


def parts(one: Any) -> list[Any]:
    return [one.values, one.offsets] if isinstance(one, Ragged) else [one]


def use(results: list[Any], buffer: Any) -> None:
    """Copy every array out once, as to pinned memory: each byte is read."""
    for one in results:
        for part in parts(one):
            np.copyto(buffer[: part.nbytes].view(part.dtype).reshape(part.shape), part)


def files_of(laid: Laid, way: Way) -> list[str]:
    if way.twin:
        return [path for turns in laid.twins[way.twin] for path in turns]
    return [segment.file for turns in laid.segments for segment in turns]


def timed(laid: Laid, way: Way, task: Task) -> Timed:
    given = given_of(laid, way)
    get = way.make(given)
    files = files_of(laid, way) if task.cold else []
    # As large as the result will be, whichever dtype; made now so that its pages are not counted.
    largest = max(sum(s.rows for s in turns) for turns in laid.segments)
    shape = laid.scenario
    width = shape.layers * shape.top_k * 4 if shape.experts else 4 * 513
    buffer = np.ones(min(largest * width, 2**31), np.uint8)
    found = Timed(laid.scenario.name, way.name, way.kind, way.wide, nbytes=laid.nbytes)
    found.message_bytes = laid.message_bytes.get(way.message, 0)
    measure.evict(files)
    if task.cold:
        found.evicted = not any(measure.cached(path) for path in files[:64])
    gc.collect()
    open_before = measure.descriptors()
    held = measure.rollup()
    measure.forget_peak()
    resident = measure.status("VmRSS")
    overhead = -measure.read_bytes() + measure.read_bytes()
    given.copied = 0
    read, faults = measure.read_bytes(), measure.minor_faults()
    results = get()
    found.read = measure.read_bytes() - read - overhead
    found.descriptors = measure.descriptors() - open_before
    use(results, buffer)
    found.faults = measure.minor_faults() - faults
    found.peak = measure.status("VmHWM") - resident
    now = measure.rollup()
    found.pss = now["Pss"] - held["Pss"]
    found.private = now["Anonymous"] - held["Anonymous"]
    found.copied = given.copied
    digest = digest_of(results, wide=way.wide, dtype=dtype_of(laid.scenario))
    if digest != laid.digest:
        raise SystemExit(f"{way.name}: arrays differ from what was written")
    clock = time.perf_counter
    results = []
    given.close()
    end = clock() + task.seconds
    for turn in range(task.rounds):
        if turn >= 3 and clock() > end:
            break
        if files:
            measure.evict(files)
        began = clock()
        results = get()
        between = clock()
        use(results, buffer)
        found.use.append(1e3 * (clock() - between))
        found.get.append(1e3 * (between - began))
        results = []
        given.close()
    return found


# --- where time goes


class Watch:
    """Adds up the time of wrapped functions by phase: the outermost, on the main thread."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self.inside = False
        self.main = threading.get_ident()

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if self.inside or threading.get_ident() != self.main:
                return function(*arguments, **options)
            self.inside = True
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.ms[phase] = self.ms.get(phase, 0.0) + 1e3 * (time.perf_counter() - began)
                self.inside = False

        return wrapped


# Module, attribute, phase. Which calls take the time of a way; the rest is checks and copies.
WATCHED = (
    ("json", "loads", "decode"),
    ("orjson", "loads", "decode"),
    ("msgspec.json", "decode", "decode"),
    ("msgspec.msgpack", "decode", "decode"),
    ("base64", "b64decode", "decode"),
    ("pybase64", "b64decode", "decode"),
    ("payload.resolver", "decode_segments", "decode"),
    ("os", "open", "open"),
    ("os", "fstat", "open"),
    ("os", "close", "open"),
    ("builtins", "open", "open"),
    ("safetensors", "safe_open", "open"),
    ("mmap", "mmap", "map"),
    ("payload._files", "_map", "map"),
    ("os", "pread", "read"),
    ("os", "preadv", "read"),
    ("concurrent.futures._base", "_result_or_cancel", "read"),
)


@contextmanager
def watching() -> Iterator[Watch]:
    watch, before = Watch(), []
    for name, attribute, phase in WATCHED:
        module = importlib.import_module(name)
        function = getattr(module, attribute)
        before.append((module, attribute, function))
        setattr(module, attribute, watch.wrap(phase, function))
    try:
        yield watch
    finally:
        for module, attribute, function in before:
            setattr(module, attribute, function)


def phases(laid: Laid, way: Way, task: Task) -> Phases:
    given = given_of(laid, way)
    get = way.make(given)
    results = get()
    buffer = buffer_for(results)
    results = []
    given.close()
    clock = time.perf_counter
    taken: list[dict[str, float]] = []
    end = clock() + task.seconds
    for turn in range(task.rounds):
        if turn >= 3 and clock() > end:
            break
        with watching() as watch:
            began = clock()
            results = get()
            whole = 1e3 * (clock() - began)
        began = clock()
        use(results, buffer)
        first = 1e3 * (clock() - began)
        began = clock()
        use(results, buffer)
        again = 1e3 * (clock() - began)
        results = []
        given.close()
        watch.ms["check, copy"] = whole - sum(watch.ms.values())
        watch.ms |= {"fault": max(0.0, first - again), "copy out": again}
        taken.append(watch.ms)
    names = dict.fromkeys(name for one in taken for name in one)
    middle = {name: float(np.median([one.get(name, 0.0) for one in taken])) for name in names}
    return Phases(laid.scenario.name, way.name, middle)


# --- under strace, and among other processes


def calls(laid: Laid, way: Way) -> None:
    given = given_of(laid, way)
    get = way.make(given)
    get()
    given.close()
    os.access(MARK, os.F_OK)
    results = get()
    os.access(MARK, os.F_OK)
    del results


def hold(laid: Laid, way: Way) -> None:
    """Answer a line for each line of the standard input, so that several processes keep step."""
    given = given_of(laid, way, load=False)
    get = way.make(given)
    results: list[Any] = []
    buffer = np.ones(laid.nbytes // laid.scenario.rollouts * 4, np.uint8)
    before: dict[str, int] = {}
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        match line.strip():
            case "before":
                gc.collect()
                before = measure.rollup()
            case "load":
                fill(given, laid, way)
            case "go":
                began = time.perf_counter()
                results = get()
                use(results, buffer)
                answer["ms"] = 1e3 * (time.perf_counter() - began)
                given.messages = []
            case "held":
                gc.collect()
                now = measure.rollup()
                answer["pss"] = now["Pss"] - before["Pss"]
                answer["private"] = now["Anonymous"] - before["Anonymous"]
                digest = digest_of(results, wide=way.wide, dtype=dtype_of(laid.scenario))
                if digest != laid.digest:
                    raise SystemExit(f"{way.name}: arrays differ from what was written")
        print(msgspec.json.encode(answer).decode(), flush=True)


def main() -> int:
    measure.tidy()
    laid = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Laid)
    way = next(way for way in laid.scenario.ways if way.name == sys.argv[2])
    task = msgspec.json.decode(sys.argv[3], type=Task)
    if way.needs:
        importlib.import_module(way.needs)
    assert concurrent.futures  # imported before what it takes is measured
    if task.do == "calls":
        calls(laid, way)
    elif task.do == "hold":
        hold(laid, way)
    else:
        found: Any = phases(laid, way, task) if task.do == "phases" else timed(laid, way, task)
        print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
