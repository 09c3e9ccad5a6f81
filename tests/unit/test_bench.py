"""The benchmarks measure what they say: every way gives the same arrays, and a wrong one is refused."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bench import measure
from bench.__main__ import counted, kind_of
from bench.measure import Figure
from bench.one import Phases, Task, Timed, given_of, phases, timed
from bench.report import Held, Place, Report, by_root, markdown, plots, slower
from bench.rivals import FIXED, MASKS, Way
from bench.scenarios import Laid, Scenario, digest_of, dtype_of, lay, mask_of, scenarios
from payload._mounts import MEMORY_TYPES

SMALL = (
    Scenario("rollout", "", 1, 1, 300),
    Scenario("agentic", "", 2, 5, 101),
    Scenario("wide", "", 1, 1, 50, experts=512),
    Scenario("masks", "", 1, 1, 400, experts=0),
)
CASES = [(scenario, way) for scenario in SMALL for way in scenario.ways]


@pytest.fixture(scope="module")
def laid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Laid]:
    root = str(tmp_path_factory.mktemp("root"))
    return {scenario.name: lay(scenario, root) for scenario in SMALL}


def read(laid: Laid, way: Way) -> list[Any]:
    given = given_of(laid, way)
    get = way.make(given)
    get()
    given.close()
    return get()  # once more, as when it is timed


@pytest.mark.parametrize(
    ("scenario", "way"), CASES, ids=[f"{scenario.name}, {way.name}" for scenario, way in CASES]
)
def test_every_way_gives_the_arrays_that_were_written(
    scenario: Scenario, way: Way, laid: dict[str, Laid]
) -> None:
    results = read(laid[scenario.name], way)
    digest = digest_of(results, wide=way.wide, dtype=dtype_of(scenario))
    assert digest == laid[scenario.name].digest
    assert len(results) == scenario.rollouts


def test_each_kind_of_way_is_among_them() -> None:
    for ways in (FIXED, MASKS):
        assert len({way.name for way in ways}) == len(ways)
        assert {"ours", "inline", "file"} <= {way.kind for way in ways}
        for wide in (False, True):  # what gives int32 is compared with what gives int32
            assert any(way.kind == "ours" for way in ways if way.wide is wide)


def test_one_wrong_byte_is_refused_before_any_time_is_taken(tmp_path: Path) -> None:
    laid = lay(SMALL[1], str(tmp_path))
    [segment] = laid.segments[1][3:4]
    raw = bytearray(Path(segment.file).read_bytes())
    raw[-1] ^= 1
    Path(segment.file).write_bytes(raw)
    for way in FIXED:
        if way.kind != "inline" and not way.twin:
            with pytest.raises(SystemExit, match="arrays differ from what was written"):
                timed(laid, way, Task(rounds=0))


def test_a_timed_way_tells_what_the_kernel_counted(laid: dict[str, Laid]) -> None:
    one = laid["rollout"]
    ways = {way.name: way for way in FIXED}
    handle, pread, inline = (
        timed(one, ways[name], Task(rounds=4, seconds=0.0))
        for name in ("by handle", "32 preads, widened", "json, base64")
    )
    assert one.nbytes == 300 * 384 == handle.nbytes
    assert (handle.copied, pread.copied) == (0, 5 * one.nbytes)
    assert (pread.read, inline.read) == (one.nbytes, 0)
    assert inline.copied == one.nbytes * 4 // 3 + one.nbytes
    assert inline.message_bytes > one.nbytes > 100 * handle.message_bytes
    assert len(handle.get) == len(handle.use) == 3  # at least that many, however little time
    assert handle.faults > 0


def test_a_way_that_copies_says_so(laid: dict[str, Laid]) -> None:
    for name in ("agentic", "rollout"):
        one = laid[name]
        for way in one.scenario.ways:
            given = given_of(one, way)
            get = way.make(given)
            given.copied = 0
            results = get()
            maps = way.name.startswith(("np.", "floor: map")) or way.name in (
                "by handle",
                "by handle, new resolver",
                "by handle, mapped before",
                "by handle, mode=map",
            )
            view = maps and name == "rollout"
            assert (given.copied == 0) is view, way.name
            assert all(isinstance(result, np.ndarray) for result in results)
            given.close()


def test_phases_add_up_to_the_whole(laid: dict[str, Laid]) -> None:
    ways = {way.name: way for way in FIXED}
    taken = phases(laid["agentic"], ways["by handle"], Task(rounds=3)).ms
    assert {"decode", "open", "read", "check, copy", "copy out"} <= set(taken)
    taken = phases(laid["agentic"], ways["json, base64"], Task(rounds=3)).ms
    assert taken["decode"] > taken["check, copy"] > 0
    assert "open" not in taken


def test_system_calls_between_the_marks_are_counted() -> None:
    trace = """
7 openat(AT_FDCWD, "/x", O_RDONLY) = 3
7 access("/byhandle-bench-mark", F_OK) = -1 ENOENT (No such file or directory)
7 openat(4, "a", O_RDONLY) = 5
8 pread64(5,  <unfinished ...>
7 mmap(NULL, 4096, PROT_READ, MAP_SHARED, 5, 0) = 0x7f
8 <... pread64 resumed>"", 8, 0) = 8
7 access("/byhandle-bench-mark", F_OK) = -1 ENOENT (No such file or directory)
7 close(5) = 0
"""
    assert counted(trace) == {"openat": 1, "pread64": 1, "mmap": 1}


def test_the_sampling_mask_has_the_fields_quantiles() -> None:
    [scenario] = [one for one in scenarios(1.0, quick=False) if one.name == "masks"]
    counts = mask_of(scenario, 0).counts
    assert np.median(counts) == 2
    assert 70 <= np.quantile(counts, 0.99) <= 94


def test_a_figure_is_met_or_missed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures = [
        Figure("a", 1.0, 2.0, "ms", 2.0, ">= 2"),
        Figure("b", 1.0, None, "ms", 1.31, "<= 1.3"),
        Figure("c", 1.0, 2.0, "ms", 9.0),
    ]
    assert [figure.met for figure in figures] == [True, False, True]
    sys.argv, argv = ["bench.x", "--json", str(tmp_path / "out")], sys.argv
    try:
        assert measure.main(lambda quick: figures, "Text.") == 1
        assert measure.main(lambda quick: figures[::2], "Text.") == 0
    finally:
        sys.argv = argv
    printed = capsys.readouterr().out.splitlines()
    assert [line.endswith("MISSED") for line in printed[1:4]] == [False, True, False]
    kept = msgspec.json.decode((tmp_path / "out").read_bytes(), type=list[Figure])
    assert kept == figures[::2]


def one(way: str, kind: str, ms: float, *, wide: bool = False, scenario: str = "rollout") -> Timed:
    return Timed(
        scenario, way, kind, wide, "tmpfs", "warm", "one rollout", 11_520_000, 213,
        get=[ms] * 5, use=[1.0] * 5,
    )  # fmt: skip


def report() -> Report:
    timed = [
        one("by handle", "ours", 1.0), one("by handle, int32", "ours", 9.0, wide=True),
        one("np.memmap", "file", 0.5), one("json, base64", "inline", 90.0),
        one("32 preads, widened", "file", 11.0, wide=True), one("floor: preadv", "floor", 0.1),
    ]  # fmt: skip
    ways = (
        "by handle",
        "inline, this client",
        "inline, renderers, SIMD base64",
        "inline, renderers, base64",
    )
    return Report(
        "python -m bench", measure.machine(),
        [Place("tmpfs", "/dev/shm/x", "tmpfs", "warm")], timed,
        sizes=[*timed[:2], *timed[3:]],
        files=[one("by handle", "ours", 2.0, scenario=f"files {n}") for n in ("1", "2,048")],
        http=[one(way, "ours" if way == "by handle" else "inline", 5.0, scenario="http 1,000") for way in ways],
        processes=[Held("by handle", n, 3.0 * n, 10**7, 0, 10**7) for n in (1, 4)],
        phases=[Phases("rollout", "by handle", {"decode": 0.1, "map": 0.2})],
        figures={"view": [Figure("a view", 1.0, 2.0, "ns", 0.5, "<= 4")]},
        notes=["something was not there"],
    )  # fmt: skip


def test_the_report_says_where_by_handle_is_not_the_fastest_and_why() -> None:
    [told] = slower(report().timed)
    assert told.startswith("np.memmap: it maps as we do and checks nothing")
    assert told.endswith("Where: rollout, tmpfs, warm (1.5 ms against 2)")
    text = markdown(report())
    assert "| json, base64 | 91 | 0 | 90 | 1 | 45.50 |" in text
    assert "| 32 preads, widened | 12 | 0 | 11 | 1 | 1.20 |" in text
    for part in (
        "something was not there",
        told,
        "a view",
        "| by handle | 4 | 12 |",
        "decode | map",
    ):
        assert part in text


def test_roots_stand_side_by_side_with_the_modes_of_the_resolver() -> None:
    found = report()
    assert by_root(found) == []  # of one root the summary has all
    for way, ms in (("by handle", 3.0), ("by handle, mode=copy", 7.0)):
        other = one(way, "ours", ms)
        other.root, other.cache = "--root", "cold"
        found.timed.append(other)
    text = markdown(found)
    assert "| | tmpfs, warm | --root, cold |" in text
    assert "| by handle, ms | 2 | 4 |" in text
    assert "| by handle, mode=copy | - | 2x |" in text


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--root", "/nowhere"], "--root /nowhere: No such file or directory"),
        (["--root", __file__], f"--root {__file__}: Not a directory"),
        (["--out", f"{__file__}/x"], f"--out {__file__}/x: Not a directory"),
        (["--scale", "-1"], "argument --scale: -1 is not above 0"),
        (["--scale", "nan"], "argument --scale: nan is not above 0"),
    ],
)
def test_what_cannot_be_measured_or_kept_is_refused_at_once(
    more: list[str], told: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "bench", "--out", str(tmp_path), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""  # nothing was measured


CLEANS = """
import sys, time
from bench import measure
measure.tidy()
with measure.scratch(sys.argv[1]):
    print("here", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_benchmark_that_is_told_to_end_leaves_nothing(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLEANS, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        assert len(list(tmp_path.iterdir())) == 1
        child.send_signal(number)
        _, errors = child.communicate(timeout=30)
    assert (child.returncode, errors) == (128 + number, "")
    assert list(tmp_path.iterdir()) == []


def test_a_program_cleans_up_when_its_parent_is_told_to_end(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CLEANS, str(tmp_path)], stdout=subprocess.PIPE)

    def told(*_: object) -> None:
        raise SystemExit

    before = signal.signal(signal.SIGALRM, told)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"here\n"
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with child.stdout, pytest.raises(SystemExit):
            measure.ended(child)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert child.returncode == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_drawn_and_kept(tmp_path: Path) -> None:
    drawn = plots(report(), tmp_path)
    assert [path.stem for path in drawn] == ["size", "files", "processes", "http", "where"]
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert 5_000 < path.stat().st_size < 100_000
    again = msgspec.json.decode(msgspec.json.encode(report()), type=Report)
    assert again.timed == report().timed


def test_no_peak_is_missed_and_no_descriptor() -> None:
    measure.forget_peak()
    before, open_before = measure.status("VmHWM"), measure.descriptors()
    held = np.ones(50_000_000, np.uint8)
    with open("/proc/self/status") as _:
        assert measure.descriptors() == open_before + 1
    del held
    assert 49_000_000 < measure.status("VmHWM") - before < 70_000_000


def test_a_file_that_was_dropped_from_the_page_cache_is_seen_to_be_cold(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with path.open("wb") as file:
        file.write(bytes(3 * 4096 + 1))
        file.flush()
        os.fsync(file.fileno())
    assert measure.cached(str(path))
    if kind_of(str(tmp_path)) in MEMORY_TYPES:
        return  # there it cannot be dropped
    measure.evict([str(path)])
    assert not measure.cached(str(path))
    with path.open("rb") as file:
        file.read(1)
    assert measure.cached(str(path))
