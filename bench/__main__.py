"""What by handle costs here, and what the alternatives cost: ``python -m bench``.

Lays rollouts of the field's shapes on tmpfs, on tmpfs with huge pages, on disk and on a root of yours,
runs each way to arrays in a fresh process, compares what it gives with what was written, and only then
takes times. Then the figures that have a target. Prints tables as it goes; leaves report.json, report.md
and plots in the directory of --out.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import fullpath, measure
from bench.measure import Figure
from bench.one import MARK, Phases, Task, Timed
from bench.report import LEGEND, Held, Place, Report, cells, markdown, plots, slower, table, total
from bench.rivals import Way
from bench.scenarios import Laid, Scenario, lay, scenarios
from payload._mounts import access_of, filesystem_type

HERE = Path(__file__).parent.parent
PROGRAMS = ("startup", "view", "window", "writer", "client", "dataloader", "tried")
CURVES = (
    "by handle", "by handle, int32", "json, base64", "msgspec, SIMD base64", "msgpack bytes",
    "32 preads, widened", "np.memmap", "floor: preadv",
)  # fmt: skip
CROWD = ("by handle", "msgspec, SIMD base64", "msgpack bytes", "32 preads, widened")
WHERE = (*CURVES[:6], "np.load(mmap_mode)", "np.memmap", "safetensors safe_open")


class Bench:
    """One run."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.quick: bool = asked.quick
        self.scale: float = asked.scale
        self.began = time.monotonic()
        command = " ".join(["python -m bench", *sys.argv[1:]])
        self.report = Report(command, measure.machine())

    def say(self, text: str = "") -> None:
        print(text, flush=True)

    def head(self, text: str) -> None:
        self.say(f"\n[{time.monotonic() - self.began:4.0f} s] {text}")

    # --- one way in a process

    def run(self, laid: Laid, way: Way, task: Task) -> bytes:
        path = f"{laid.root}/laid.json"
        if not os.path.exists(path):
            Path(path).write_bytes(msgspec.json.encode(laid))
        code, out, errors = measure.program(
            "bench.one", path, way.name, msgspec.json.encode(task).decode()
        )
        if code:
            raise SystemExit(f"{laid.scenario.name}, {way.name}: {errors}")
        return out.encode()

    def timed(self, laid: Laid, way: Way, place: Place, task: Task) -> Timed:
        found = msgspec.json.decode(self.run(laid, way, task), type=Timed)
        found.root, found.cache, found.about = place.name, place.cache, laid.scenario.about
        return found

    def counts(self, scenario: Scenario, way: Way) -> bool:
        """Whether system calls of this way are counted."""
        few = scenario.name == "rollout" and way.kind != "inline"
        return shutil.which("strace") is not None and (few or not self.quick)

    def calls(self, laid: Laid, way: Way) -> dict[str, int]:
        """System calls between two marks, by name."""
        with tempfile.NamedTemporaryFile("r") as trace:
            task = msgspec.json.encode(Task("calls")).decode()
            command = [sys.executable, "-m", "bench.one", f"{laid.root}/laid.json", way.name, task]
            subprocess.run(["strace", "-f", "-o", trace.name, *command], check=True)
            return counted(trace.read())

    # --- the parts

    def scenario(self, scenario: Scenario, places: Sequence[Place]) -> None:
        for number, place in enumerate(places):
            self.head(
                f"{scenario.name}: {scenario.about}; {place.name} ({place.kind}), cache {place.cache}"
            )
            laid = lay(scenario, place.directory, inline=not number)
            found = []
            for way in scenario.ways:
                if (number and way.kind == "inline") or (way.name == "floor: memcpy" and number):
                    continue  # they do not know of roots
                cold = place.cache == "cold"
                if cold and way.name == "by handle, mapped before":
                    continue  # a page that is mapped is not dropped
                if way.name.removeprefix("by handle, mode=") == access_of(place.kind):
                    continue  # what "by handle" does there
                task = Task(
                    "time", 7 if self.quick else 11, 0.3 if self.quick or number else 0.6, cold
                )
                found.append(self.timed(laid, way, place, task))
                if found[-1].evicted is False:
                    raise SystemExit(
                        f"{place.name}: the page cache keeps the files: run without cold"
                    )
                if not number and self.counts(scenario, way):
                    found[-1].calls = self.calls(laid, way)
            self.report.timed += found
            for line in table([cells(found, one) for one in found]):
                self.say(line)
            if not number and scenario.name in ("rollout", "agentic"):
                for way in scenario.ways:
                    if way.name in WHERE:
                        out = self.run(laid, way, Task("phases", 7, 0.5))
                        self.report.phases.append(msgspec.json.decode(out, type=Phases))
            shutil.rmtree(laid.root)

    def curve(self, cases: Sequence[Scenario], place: Place) -> list[Timed]:
        found = []
        for scenario in cases:
            laid = lay(scenario, place.directory)
            mine = [
                self.timed(laid, way, place, Task("time", 7, 0.2 if self.quick else 0.4))
                for way in scenario.ways
                if way.name in CURVES
            ]
            self.say(
                f"{scenario.name:>16}: " + ", ".join(f"{one.way} {total(one):.3g}" for one in mine)
            )
            found += mine
            shutil.rmtree(laid.root)
        return found

    def crowd(self, place: Place) -> None:
        """Several processes read the same rollouts at once."""
        scenario = Scenario("crowd", "", 2 if self.quick else 8, 1, 30_000)
        laid = lay(scenario, place.directory)
        Path(f"{laid.root}/laid.json").write_bytes(msgspec.json.encode(laid))
        for way in scenario.ways:
            if way.name not in CROWD:
                continue
            for count in (1, 4) if self.quick else (1, 2, 4, 8):
                command = [sys.executable, "-m", "bench.one", f"{laid.root}/laid.json", way.name]
                task = msgspec.json.encode(Task("hold")).decode()
                children = [
                    subprocess.Popen([*command, task], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                     process_group=0)  # ends with its input, not with Ctrl-C
                    for _ in range(count)
                ]  # fmt: skip
                try:
                    for step in ("before", "load"):
                        together(children, step)
                    began = time.perf_counter()
                    together(children, "go")
                    took = 1e3 * (time.perf_counter() - began)
                    held = together(children, "held")
                finally:
                    for child in children:
                        child.communicate()
                pss, private = (sum(one[key] for one in held) for key in ("pss", "private"))
                one = Held(way.name, count, took, pss, private, laid.nbytes)
                self.report.processes.append(one)
                self.say(
                    f"{one.way:<24}{count:>3} processes {one.ms:>9.1f} ms {one.pss / 1e6:>8.0f} MB PSS "
                    f"{one.private / 1e6:>8.0f} MB private"
                )
        shutil.rmtree(laid.root)

    def figures(self, names: Sequence[str]) -> None:
        for name in names:
            python = sys.executable
            if name == "dataloader":
                found = with_torch()
                if found is None:
                    self.note("dataloader: torch is not here; `make torch-test` installs it")
                    continue
                python = found
            self.head(f"figures of bench.{name}")
            with tempfile.NamedTemporaryFile("rb") as file:
                more = ["--quick"] if self.quick else []
                if name == "dataloader":
                    more = ["--batches", "30", "--others", "1", "2", "8"]
                command = [python, "-m", f"bench.{name}", "--json", file.name, *more]
                code = measure.ended(subprocess.Popen(command))
                raw = file.read()
            if not raw:
                raise SystemExit(f"bench.{name} ended with {code} and no figures")
            self.report.figures[name] = msgspec.json.decode(raw, type=list[Figure])

    def note(self, text: str) -> None:
        self.report.notes.append(text)
        self.say(f"note: {text}")

    def all(self, places: list[Place]) -> None:
        first = places[0]
        if self.quick:
            self.note(
                "quick: without step, wide, client, dataloader and tried; roots beside the first are "
                "measured with the rollout alone, and of them only cold ones and --root"
            )
        for scenario in scenarios(self.scale, self.quick):
            if self.quick and scenario.name in ("step", "wide"):
                continue
            every = places
            if self.quick:
                more = [
                    place for place in places if place.cache == "cold" or place.name == "--root"
                ]
                every = places[:1] + (more if scenario.name == "rollout" else [])
            self.report.places = [
                one for one in places if one in every or one in self.report.places
            ]
            self.scenario(scenario, every)
        self.head("one rollout, by size (median, ms)")
        sizes = (3_000, 30_000) if self.quick else (300, 3_000, 30_000, 300_000)
        self.report.sizes = self.curve(
            [Scenario(f"{tokens:,} tokens", "", 1, 1, tokens) for tokens in sizes], first
        )
        self.head("one window, by number of files (median, ms)")
        tokens, counts = (24_000, (1, 128)) if self.quick else (120_000, (1, 8, 64, 512, 2_048))
        self.report.files = self.curve(
            [Scenario(f"files {count:,}", "", 1, count, tokens) for count in counts], first
        )
        self.head("several processes read the same rollouts")
        self.crowd(first)
        self.head("from HTTP to arrays")
        with measure.scratch(first.directory) as root:
            for one in fullpath.measured(root, self.quick, measure.program):
                self.report.http.append(one)
                self.say(
                    f"{one.scenario:<12} {one.way:<32}{one.message_bytes:>12,} bytes "
                    f"{total(one):>9.2f} ms"
                )
        self.figures(
            [
                name
                for name in PROGRAMS
                if not (self.quick and name in ("client", "dataloader", "tried"))
            ]
        )


def counted(trace: str) -> dict[str, int]:
    """System calls between the two marks in what strace wrote, by name."""
    _, within, _ = trace.split(f'"{MARK}"')
    found = collections.Counter(re.findall(r"^\d+ +(\w+)\(", within, re.MULTILINE))
    found["access"] -= 1  # of the second mark
    return dict(+found)


def together(children: Sequence[subprocess.Popen[str]], line: str) -> list[dict[str, Any]]:
    """Tell all children a line, then hear each one's answer."""
    for child in children:
        assert child.stdin is not None
        child.stdin.write(f"{line}\n")
        child.stdin.flush()
    answers = []
    for child in children:
        assert child.stdout is not None
        answer = child.stdout.readline()
        if not answer:
            raise SystemExit(f"a process ended at {line!r}")
        answers.append(msgspec.json.decode(answer))
    return answers


def with_torch() -> str | None:
    """A Python that has torch."""
    for python in (sys.executable, f"{HERE}/.venv-torch/bin/python"):
        with contextlib.suppress(OSError):
            code = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
            if not subprocess.run([python, "-c", code], check=False).returncode:
                return python
    return None


def kind_of(directory: str) -> str:
    """File system type of a directory."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return filesystem_type(fd) or "unknown"
    finally:
        os.close(fd)


@contextlib.contextmanager
def roots(bench: Bench, own: str | None) -> Iterator[list[Place]]:
    """Directories to measure on, gone afterwards."""
    with contextlib.ExitStack() as stack:
        places: list[Place] = []

        def add(name: str, base: str, *caches: str) -> None:
            directory = stack.enter_context(measure.scratch(base))
            kind = kind_of(directory)
            places.extend(Place(name, directory, kind, cache) for cache in caches)

        # Before anything else: the mount namespace is this process's and its children's.
        huge = stack.enter_context(measure.huge_root())
        if os.access(measure.SHARED, os.W_OK):
            add("tmpfs", measure.SHARED, "warm")
        else:
            bench.note(f"no tmpfs: {measure.SHARED} cannot be written")
        if huge.root:
            add("tmpfs, huge pages", huge.root, "warm")
        else:
            bench.note(f"no tmpfs with huge pages: {huge.reason}")
        for name, base in (("disk", os.getcwd()), ("--root", own)):
            if base is None:
                continue
            if not os.access(base, os.W_OK | os.X_OK):
                bench.note(f"no {name}: {base} cannot be written")
                continue
            if kind_of(base) in ("tmpfs", "ramfs"):
                if name == "disk":
                    bench.note(f"no disk: {base} is in memory")
                else:
                    add(name, base, "warm")
                continue
            caches = ("warm", "cold") if drops(base) else ("warm",)
            add(name, base, *caches)
            if len(caches) < 2:
                bench.note(f"{name}: pages cannot be dropped with posix_fadvise: nothing is cold")
            else:
                bench.note(
                    f"{name}: cold means synced and dropped with posix_fadvise, seen with mincore"
                )
        yield places


def drops(base: str) -> bool:
    """Whether this process can drop a file from the page cache there."""
    with measure.scratch(base) as root:
        path = f"{root}/probe"
        with open(path, "wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(OSError):
            measure.evict([path])
            return not measure.cached(path)
    return False


def scale_of(text: str) -> float:
    """A factor; what is not above 0 would be a step of nothing."""
    scale = float(text)
    if not 0 < scale <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1000")
    return scale


def check(asked: argparse.Namespace) -> None:
    """Refuse what would fail only when everything has been measured."""
    for option, directory in (("--root", asked.root), ("--out", asked.out)):
        if directory is None:
            continue
        try:
            if option == "--out":
                os.makedirs(directory, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise SystemExit(f"{option} {directory}: {error.strerror}") from None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--root", metavar="DIR", help="a directory to measure on as well, such as a mount"
    )
    parser.add_argument("--quick", action="store_true", help="90 seconds instead of 10 minutes")
    parser.add_argument(
        "--scale",
        type=scale_of,
        default=1.0,
        help="times the tokens of the scenario step, 1,000 a rollout (which --quick leaves out)",
    )
    parser.add_argument(
        "--out", metavar="DIR", default="bench-report", help="where the report goes"
    )
    asked = parser.parse_args()
    check(asked)
    measure.raise_descriptors()
    measure.tidy()
    bench = Bench(asked)
    out = Path(asked.out)
    machine = bench.report.machine
    bench.say(
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux "
        f"{machine['kernel']}, Python {machine['python']}, load {machine['load'][0]}"
    )
    if shutil.which("strace") is None:
        bench.note("system calls are not counted: strace is not installed")
    with roots(bench, asked.root) as places:
        if not places:
            raise SystemExit("no directory to measure on: give --root")
        bench.all(places)
    report = bench.report
    report.seconds = time.monotonic() - bench.began
    drawn = plots(report, out)
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    (out / "report.md").write_text(markdown(report))
    bench.head("where by handle is not the fastest:")
    for line in slower(report.compared) or ["nowhere"]:
        bench.say(f"- {line}")
    missed = [one for figures in report.figures.values() for one in figures if not one.met]
    bench.say(
        f"\n{sum(map(len, report.figures.values()))} figures, {len(missed)} missed their target"
    )
    for one in missed:
        bench.say(f"- {one.name}: {one.ratio:.3g}, {one.target} asked")
    bench.say(f"\n{LEGEND}\n")
    bench.say(f"{out}/report.md, report.json and {len(drawn)} plots; {report.seconds:.0f} s")
    if missed:
        bench.say("exit status 1, as targets were missed: the report is whole all the same")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
