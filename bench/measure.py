"""What all measurements share: figures with a target, interleaved rounds, the kernel's counters."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import mmap
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

SHARED = "/dev/shm"


class Figure(msgspec.Struct, frozen=True):
    """One comparison: ours, the rival of the same run, their ratio, and what it must be."""

    name: str
    ours: float
    rival: float | None
    unit: str
    ratio: float
    target: str = ""  # "<= 2" or ">= 50"; "" where nothing is asked

    @property
    def met(self) -> bool:
        """Whether the ratio is as asked."""
        if not self.target:
            return True
        sign, bound = self.target.split()
        return self.ratio <= float(bound) if sign == "<=" else self.ratio >= float(bound)


def lines(figures: Sequence[Figure]) -> list[str]:
    """The figures as a table, the heads first."""
    width = max(len(figure.name) for figure in figures)
    found = [f"{'':<{width}} {'ours':>9} {'rival':>9} {'':<4} {'ratio':>8}  target"]
    for one in figures:
        rival = "" if one.rival is None else f"{one.rival:.4g}"
        missed = "" if one.met else "  MISSED"
        found.append(
            f"{one.name:<{width}} {one.ours:>9.4g} {rival:>9} {one.unit:<4} {one.ratio:>8.3g}  "
            f"{one.target}{missed}"
        )
    return found


def raise_descriptors() -> None:
    """Allow this process and its children as many descriptors as they may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def tidy() -> None:
    """When told to end, or left by the terminal, end by way of every `finally` and without a traceback."""
    told = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

    def end(number: int, _: object) -> None:
        for each in told:
            signal.signal(each, signal.SIG_IGN)  # cleaning up is not interrupted
        sys.exit(128 + number)

    for number in told:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup asks
            signal.signal(number, end)


def ended(child: subprocess.Popen[bytes]) -> int:
    """Exit status of a program; told to end when this one is, and given time to clean up."""
    try:
        return child.wait()
    except BaseException:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)
        child.kill()
        child.wait()
        raise


def main(collect: Callable[[bool], list[Figure]], text: str | None) -> int:
    """Take figures, print them or keep them as JSON; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(text or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    asked = parser.parse_args()
    tidy()
    raise_descriptors()
    return tell(collect(asked.quick), asked.json)


def tell(figures: list[Figure], json: str | None) -> int:
    """Print figures, keep them as JSON if a file is named; 1 if a target is missed."""
    if json:
        Path(json).write_bytes(msgspec.json.encode(figures))
    print("\n".join(lines(figures)))
    return 1 if any(not figure.met for figure in figures) else 0


def medians(*runs: Callable[[], object], rounds: int) -> list[float]:
    """Median milliseconds of each, in interleaved rounds: all meet the same noise."""
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    gc.collect()
    for _ in range(rounds):
        for run, kept in zip(runs, times, strict=True):
            began = time.perf_counter()
            result = run()
            kept.append(1e3 * (time.perf_counter() - began))
            del result  # freed outside the time of whoever is next
    return [statistics.median(kept) for kept in times]


@contextlib.contextmanager
def scratch(base: str | None = None) -> Iterator[str]:
    """Give a directory that is gone afterwards, in memory where there is /dev/shm."""
    if base is None and os.access(SHARED, os.W_OK):
        base = SHARED
    root = tempfile.mkdtemp(prefix=".byhandle-bench-", dir=base)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


# --- what the kernel counts


def status(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(f"{key}:"))


def forget_peak() -> None:
    """Let the peak of resident memory begin anew."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def rollup() -> dict[str, int]:
    """Bytes of /proc/self/smaps_rollup by name."""
    with open("/proc/self/smaps_rollup") as file:
        next(file)
        return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in file}


def read_bytes() -> int:
    """Bytes this process got from read calls."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("rchar:"))


def minor_faults() -> int:
    """Page faults that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def descriptors() -> int:
    """Descriptors open now, without the one that lists them."""
    return len(os.listdir("/proc/self/fd")) - 1


# --- page cache


def evict(paths: Sequence[str]) -> None:
    """Drop the page cache of files, which must be clean and mapped by nobody."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached(path: str) -> bool:
    """Whether any page of a file of ours is in the page cache."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Writable, as ctypes asks for that; nothing is written, and nothing touched.
        mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    start = ctypes.c_char.from_buffer(mapped)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.byref(start), ctypes.c_size_t(size), pages):
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        del start
        mapped.close()
    return any(page & 1 for page in pages)


# --- the machine


def machine() -> dict[str, Any]:
    """What a reader needs to judge figures: processor, memory, versions, load."""
    model = "unknown"
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": os.uname().release,
        "python": sys.version.split()[0],
        "numpy": version("numpy"),
        "load": [round(one, 2) for one in os.getloadavg()],
    }


def version(name: str) -> str:
    """Version of an installed distribution."""
    from importlib.metadata import version

    return version(name)


def program(module: str, *arguments: str, timeout: float | None = None) -> tuple[int, str, str]:
    """Run a module of this directory in a fresh process; exit status, output, errors."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    return done.returncode, done.stdout, done.stderr


# --- a tmpfs with huge pages, seen by this process and its children only


class Huge(msgspec.Struct):
    """Where it is mounted, or why it is not."""

    root: str | None = None
    reason: str = ""


@contextlib.contextmanager
def huge_root(huge: str = "within_size") -> Iterator[Huge]:
    """Mount tmpfs with huge pages in a mount namespace of this process, which must be root's.

    Not ``huge=always``: there a file of 200 KB takes 2 MiB.
    """
    if os.geteuid():
        yield Huge(reason="only root may mount it")
        return
    directory = tempfile.mkdtemp(prefix="byhandle-huge-")
    new_mounts = 0x20000  # CLONE_NEWNS; os.unshare is there from Python 3.12 on
    try:
        failed = ctypes.CDLL(None, use_errno=True).unshare(new_mounts)
        if failed:
            yield Huge(reason=f"no mount namespace: {os.strerror(ctypes.get_errno())}")
            return
        for command in (
            ["mount", "--make-rprivate", "/"],
            ["mount", "-t", "tmpfs", "-o", f"huge={huge},size=50%", "tmpfs", directory],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                yield Huge(reason=f"{' '.join(command)}: {done.stderr.strip()}")
                return
        try:
            yield Huge(directory)
        finally:
            subprocess.run(["umount", "-l", directory], check=False)
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(directory)
