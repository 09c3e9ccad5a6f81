"""Base commit and working tree in one job: ``python -m bench.compare [BASE]``.

Runs the suites ``bench/test_*.py`` of this tree over the base's library and over this one, in turns, and
compares the least of the medians. Exit status 1 if something takes a quarter longer than on the base.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from bench.measure import tidy

HERE = Path(__file__).parent.parent
TURNS = 3
WORSE = 1.25


def medians(library: Path, out: Path) -> dict[str, float]:
    """Median seconds of each benchmark over the packages in `library`."""
    suites = sorted(str(path) for path in (HERE / "bench").glob("test_*.py"))
    command = [
        sys.executable, "-m", "pytest", "-q", "-c", str(HERE / "pyproject.toml"), "-p", "no:cacheprovider",
        "-o", "addopts=--import-mode=importlib", "--benchmark-only", f"--benchmark-json={out}", *suites,
    ]  # fmt: skip
    # The directory it runs in comes before what is installed, so that this library is imported.
    done = subprocess.run(command, cwd=library, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{library}: {done.stdout}{done.stderr}")
    found = msgspec.json.decode(out.read_bytes())["benchmarks"]
    return {one["name"]: one["stats"]["median"] for one in found}


def base_of(asked: list[str]) -> str:
    """The commit to compare with: as asked, or where this branch left main, or the one before."""
    if asked:
        return asked[0]
    here = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    for main in ("origin/main", "main"):
        left = subprocess.run(
            ["git", "merge-base", "HEAD", main], capture_output=True, text=True, check=False
        )
        if not left.returncode and left.stdout != here.stdout:
            return left.stdout.strip()
    return "HEAD~1"


def slower(times: dict[str, dict[str, float]]) -> set[str]:
    """Tests that take a quarter longer on the head."""
    return {test for test, base in times["base"].items() if times["head"][test] > WORSE * base}


def main() -> int:
    tidy()
    base = base_of(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="byhandle-base-") as scratch:
        tree = Path(scratch) / "base"
        add = ["git", "worktree", "add", "-q", "--detach", str(tree), base]
        if subprocess.run(add, check=False).returncode:
            raise SystemExit(f"base {base!r} cannot be checked out: make bench-ci BASE=commit")
        try:
            times: dict[str, dict[str, float]] = {"base": {}, "head": {}}
            for turn in range(2 * TURNS):
                if turn >= TURNS and not slower(times):
                    break  # what seems slower is looked at as often again: it may have been noise
                both = [("base", tree), ("head", HERE)]
                for name, library in both if turn % 2 == 0 else both[::-1]:  # neither always first
                    print(
                        f"{turn + 1} of {TURNS if turn < TURNS else 2 * TURNS}: {name}",
                        file=sys.stderr,
                        flush=True,
                    )
                    for test, median in medians(library, Path(scratch) / "out.json").items():
                        times[name][test] = min(median, times[name].get(test, median))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], check=False)
    worse = slower(times)
    print(f"{'':<60}{'base us':>12}{'head us':>12}{'ratio':>8}   base is {base[:12]}")
    for test, before in times["base"].items():
        after = times["head"][test]
        mark = "  SLOWER" if test in worse else ""
        print(f"{test:<60}{1e6 * before:>12.1f}{1e6 * after:>12.1f}{after / before:>8.2f}{mark}")
    return 1 if worse else 0


if __name__ == "__main__":
    os.chdir(HERE)
    sys.exit(main())
