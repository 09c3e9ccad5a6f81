"""Faults of real kernels: each call in a child ends in the right array or a PayloadError."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload import (
    PayloadMissingError,
    PayloadWriteError,
    Ragged,
    Resolver,
    Segment,
    Writer,
    encode_segments,
)

pytestmark = pytest.mark.process
HERE = Path(__file__).parent
ROWS = np.arange(12 * 4096, dtype=np.uint16).astype(np.uint8).reshape(12, 4096)
MASK = [[7], [8, 9, 10], [], [11]]
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="mounting needs root and /dev/fuse"
)
# A FUSE mount as it is, declared to be NFSv4, and mapped on the caller's word.
WAYS = {"copy": {}, "through": {"type": "nfs4"}, "map": {"mode": "map"}}


class Child:
    """A process with a resolver; `ask` gives its answer, or fails if a signal ended it."""

    def __init__(self, roots: Any, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "probe.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.send({"roots": roots, "options": options})

    def send(self, job: dict[str, Any]) -> None:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def ask(self, call: str, segments: list[Segment], *window: Any, **more: Any) -> dict[str, Any]:
        job: dict[str, Any] = {"call": call, "segments": encode_segments(segments, "array")} | more
        if window:
            job |= dict(zip(("field", "lo", "hi"), window, strict=True))
        self.send(job)
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(f"the child ended with {self.process.wait()}")
        return json.loads(line)

    def do(self, statement: str) -> None:
        self.send({"do": statement})
        assert self.process.stdout.readline()

    def close(self) -> int:
        self.process.stdin.close()
        code = self.process.wait(30)
        self.process.stdout.close()
        return code


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(roots: Any, **options: Any) -> Child:
        children.append(Child(roots, **options))
        return children[-1]

    yield start
    for one in children:
        if one.process.poll() is None:
            assert one.close() == 0


class Mount:
    """A lying mount over a directory."""

    def __init__(self, base: Path) -> None:
        self.source, self.point, self.file = base / "source", base / "mount", base / "faults.json"
        for directory in (self.source / "v1", self.point):
            directory.mkdir(parents=True)
        self.lie({})
        self.server = subprocess.Popen(
            [
                sys.executable,
                str(HERE / "fusefs.py"),
                str(self.source),
                str(self.point),
                str(self.file),
            ]
        )
        deadline = time.monotonic() + 20
        while not os.path.ismount(self.point):
            assert self.server.poll() is None, "the file system did not start"
            assert time.monotonic() < deadline, "the file system was not mounted"
            time.sleep(0.01)

    def lie(self, faults: dict[str, Any]) -> None:
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(faults))
        part.rename(self.file)

    def put(self, name: str, array: np.ndarray, pos: int = 0) -> Segment:
        (self.source / "v1" / name).write_bytes(array.tobytes())
        path = f"{self.point}/v1/{name}"
        return Segment(
            "routed_experts", path, 0, pos, len(array), array.dtype.name, array.shape[1:]
        )

    def roots(self, way: str) -> dict[str, Any]:
        return {str(self.point): {"directory": str(self.point), **WAYS[way]}}

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.point)], check=True)
        self.server.kill()
        self.server.wait()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    mounted = Mount(tmp_path)
    yield mounted
    mounted.close()


def right(answer: dict[str, Any], want: Any = None) -> None:
    assert "error" not in answer, answer["message"]
    assert answer["result"] == (ROWS.tolist() if want is None else want)


@needs_root
@pytest.mark.parametrize("way", WAYS)
def test_a_mount_that_does_not_lie_is_read_in_its_way(way: str, mount: Mount, child) -> None:
    segment = mount.put("a", ROWS)
    other = mount.put("b", ROWS, 12)
    one = child(mount.roots(way))
    for _ in range(2):
        right(one.ask("view", [segment]), [ROWS.tolist()])
    answer = one.ask("window", [segment, other], "routed_experts", 6, 18)
    right(answer, np.roll(ROWS, -6, 0).tolist())
    stats = answer["stats"]
    assert stats["access"] == {str(mount.point): way}
    assert stats["maps"] == (0 if way == "copy" else 1)
    # One open a file and call; the first in a directory also finds out that it is not mapped.
    assert stats["opens"] == (1 + 2 + 2 if way == "copy" else 1 + 2)
    assert stats["bytes_read_through"] == (ROWS.nbytes if way == "through" else 0)
    part = Segment("routed_experts", segment.file, 4096, 0, 2, "uint8", (4096,))
    answer = one.ask("view", [part])
    right(answer, [ROWS[1:3].tolist()])
    assert answer["stats"]["bytes_read_through"] == stats["bytes_read_through"]  # read already


@needs_root
@pytest.mark.parametrize("way", WAYS)
def test_a_late_name_is_waited_for(way: str, mount: Mount, child) -> None:
    segment = mount.put("a", ROWS)
    mount.lie({"a": {"lookups": 5}})
    answer = child(mount.roots(way), wait=5).ask("view", [segment])
    right(answer, [ROWS.tolist()])
    assert answer["stats"]["waits"] >= 3
    assert answer["seconds"] < 2
    mount.lie({"b": {"lookups": 10**9}})
    gone = mount.put("b", ROWS)
    answer = child(mount.roots(way), wait=0.2).ask("view", [gone])
    assert (answer["error"], answer["reason"]) == ("PayloadMissingError", "missing")
    assert 0.2 <= answer["seconds"] < 1.5
    kind = "nfs4" if way == "through" else "fuse"
    assert "(waited 0.2" in answer["message"]
    assert f"'{mount.point}/v1' on {kind} has 2 entries" in answer["message"]


@needs_root
def test_a_network_root_waits_without_being_told(mount: Mount, child) -> None:
    segment = mount.put("a", ROWS)
    mount.lie({"a": {"lookups": 12}})
    right(child(mount.roots("through")).ask("view", [segment]), [ROWS.tolist()])


@needs_root
@pytest.mark.parametrize("way", WAYS)
def test_a_stale_size_is_waited_for_by_opening_anew(way: str, mount: Mount, child) -> None:
    segment = mount.put("a", ROWS)
    mount.lie({"a": {"opens": [4, 100]}})
    answer = child(mount.roots(way), wait=5).ask("view", [segment])
    right(answer, [ROWS.tolist()])
    mount.lie({"a": {"opens": [10**9, 100]}})
    answer = child(mount.roots(way), wait=0.2).ask("view", [segment])
    assert (answer["error"], answer["reason"]) == ("PayloadTruncatedError", "truncated")
    assert (answer["expected"], answer["actual"]) == (ROWS.nbytes, 100)
    assert answer["retryable"]
    assert "has 100 bytes, its segment needs 49152 (waited 0.2" in answer["message"]


@needs_root
@pytest.mark.parametrize("way", WAYS)
def test_short_reads_are_gone_on_with(way: str, mount: Mount, child) -> None:
    segment = mount.put("a", ROWS)
    mount.lie({"a": {"direct": True, "short": 1000}})
    one = child(mount.roots(way))
    right(one.ask("view", [segment]), [ROWS.tolist()])
    right(
        one.ask("window", [segment, segment], "routed_experts", 0, 12, options={"dtype": "int16"})
    )


@needs_root
@pytest.mark.parametrize("call", ["view", "window", "resolve"])
@pytest.mark.parametrize("way", ["copy", "through"])
@pytest.mark.parametrize("where", ["open", "read"])
def test_an_io_error_is_ours_and_says_where(
    where: str, way: str, call: str, mount: Mount, child
) -> None:
    good, bad = mount.put("good", ROWS), mount.put("bad", ROWS, 12)
    mount.lie({"bad": {"errno": {where: "EIO"}}})
    window = ("routed_experts", 0, 24) if call == "window" else ()
    answer = child(mount.roots(way), wait=5).ask(call, [good, bad], *window)
    assert (answer["error"], answer["reason"]) == ("PayloadError", "io")
    assert "Input/output error (EIO)" in answer["message"]
    assert (answer["path"], answer["retryable"]) == (bad.file, False)
    assert answer["index"] == (None if call == "view" else 1)
    assert answer["seconds"] < 2  # not waited for


@needs_root
@pytest.mark.parametrize("way", ["copy", "through"])
@pytest.mark.parametrize("where", ["lookup", "open", "read"])
def test_a_stale_handle_is_opened_anew_and_a_file_that_stays_stale_is_missing(
    where: str, way: str, mount: Mount, child
) -> None:
    segment = mount.put("a", ROWS)
    mount.lie({"a": {"errno": {where: ["ESTALE", 3]}}})
    one = child(mount.roots(way), wait=5)
    right(one.ask("view", [segment]), [ROWS.tolist()])
    mount.lie({"a": {"errno": {where: ["ESTALE", 6]}}})
    right(
        one.ask("window", [segment, segment], "routed_experts", 0, 12, options={"dtype": "int16"})
    )
    mount.lie({"b": {"errno": {where: "ESTALE"}}})
    answer = child(mount.roots(way), wait=0.2).ask("view", [mount.put("b", ROWS)])
    assert answer["error"] == "PayloadMissingError"
    assert answer["reason"] in ("missing", "stale")
    assert answer["retryable"]
    assert answer["seconds"] < 2


@needs_root
@pytest.mark.parametrize("way", ["through", "map"])
def test_a_file_that_cannot_be_mapped_is_read_and_that_is_counted(
    way: str, mount: Mount, child
) -> None:
    segment, other = mount.put("a", ROWS), mount.put("b", ROWS)
    mount.lie({name: {"direct": True} for name in "ab"})
    one = child(mount.roots(way))
    right(one.ask("view", [segment]), [ROWS.tolist()])
    answer = one.ask("view", [other])
    right(answer, [ROWS.tolist()])
    assert answer["stats"]["fallbacks"] == {"ENODEV": 2}
    assert answer["stats"]["bytes_copied"] == 2 * ROWS.nbytes


@needs_root
@pytest.mark.parametrize("way", ["copy", "through"])
def test_an_end_before_the_size_is_truncated(way: str, mount: Mount, child) -> None:
    segment = mount.put("a", ROWS)
    mount.lie({"a": {"direct": True, "end": 5000}})
    for call, window in (("view", ()), ("window", ("routed_experts", 0, 12))):
        answer = child(mount.roots(way), wait=0.1).ask(call, [segment] * 2, *window)
        assert answer["error"] == "PayloadTruncatedError"
        assert answer["expected"] == ROWS.nbytes


@needs_root
@pytest.mark.parametrize("way", WAYS)
def test_zeros_instead_of_bytes_are_found_by_the_checksum(way: str, mount: Mount, child) -> None:
    writer = Writer(mount.source, prefix=str(mount.point))
    segments = writer.write({"routed_experts": (0, ROWS)}, "v1")
    name = os.path.basename(segments[0].file)
    one = child(mount.roots(way), verify="checksum")
    right(one.ask("view", segments), [ROWS.tolist()])
    mount.lie({name: {"zeros": True}})
    one = child(mount.roots(way), verify="checksum")
    for call, window in (("view", ()), ("window", ("routed_experts", 1, 3))):
        answer = one.ask(call, segments, *window)
        assert answer["error"] == "PayloadCorruptError"


@needs_root
@pytest.mark.parametrize("way", ["copy", "through"])
def test_latency_is_paid_once_for_many_files(way: str, mount: Mount, child) -> None:
    segments = [mount.put(f"{i}", ROWS, 12 * i) for i in range(16)]
    mount.lie({"*": {"delay": 0.05}})
    answer = child(mount.roots(way)).ask("window", segments, "routed_experts", 0, 192)
    right(answer, np.concatenate([ROWS] * 16).tolist())
    # Look-up, attributes, open, read: one after the other 16 files would take over 3 s; the double
    # answers 8 requests at a time.
    assert answer["seconds"] < 2


@needs_root
@pytest.mark.parametrize("way", ["copy", "through"])
def test_all_missing_files_of_a_call_share_one_deadline(way: str, mount: Mount, child) -> None:
    good = mount.put("good", ROWS)
    gone = [
        Segment("routed_experts", f"{mount.point}/v1/gone{i}", 0, 12 + i, 1, "uint8", (4096,))
        for i in range(20)
    ]
    for call, window in (("resolve", ()), ("window", ("routed_experts", 0, 32))):
        one = child(mount.roots(way), wait=0.3)
        answer = one.ask(call, [good, *gone], *window)
        assert answer["error"] == "PayloadMissingError"
        assert answer["errors"] == list(range(1, 21))
        assert "20 of 21 segments cannot be read: 1, 2, 3" in answer["message"]
        assert answer["seconds"] < 2
        assert answer["stats"]["live_maps"] == 0


@pytest.mark.parametrize("end", [0, 1, 4095, 4096, 4097, 20000, 49151])
def test_a_local_file_truncated_anywhere_while_mapped_is_an_error_of_ours(
    end: int, tmp_path: Path, child
) -> None:
    path = tmp_path / "a"
    path.write_bytes(ROWS.tobytes())
    segment = Segment("routed_experts", str(path), 0, 0, 12, "uint8", (4096,))
    one = child(str(tmp_path))
    right(one.ask("view", [segment]), [ROWS.tolist()])
    os.truncate(path, end)
    assert one.ask("view", [segment], touch=False)["result"] == 1  # not touched
    later = Segment("routed_experts", str(path), 0, 12, 12, "uint8", (4096,))
    for options in ({"dtype": "int16"}, {}):
        answer = one.ask("window", [segment, later], "routed_experts", 0, 24, options=options)
        assert answer["error"] == "PayloadTruncatedError"
        assert (answer["expected"], answer["actual"]) == (ROWS.nbytes, end)


def test_touching_a_raw_view_of_a_truncated_file_is_what_remains_to_be_feared(
    tmp_path: Path,
) -> None:
    """The README says so, and what to use then: mode="copy"."""
    path = tmp_path / "a"
    path.write_bytes(ROWS.tobytes())
    segment = Segment("routed_experts", str(path), 0, 0, 12, "uint8", (4096,))
    raw, copy = Child(str(tmp_path)), Child(str(tmp_path), mode="copy")
    for one in (raw, copy):
        right(one.ask("view", [segment]), [ROWS.tolist()])
    os.truncate(path, 0)
    assert copy.ask("view", [segment])["error"] == "PayloadTruncatedError"
    assert copy.close() == 0
    raw.send({"call": "view", "segments": encode_segments([segment], "array")})
    assert raw.process.stdout.readline() == ""
    assert raw.process.wait() == -signal.SIGBUS
    raw.process.stdin.close()
    raw.process.stdout.close()


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_unlink_rename_over_and_rewrite_under_a_reader(mode: str, tmp_path: Path, child) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(ROWS.tobytes())
    segment = Segment("routed_experts", str(path), 0, 0, 12, "uint8", (4096,))
    one = child(str(tmp_path), mode=mode)
    one.ask("view", [segment])
    path.unlink()
    answer = one.ask("view", [segment])
    if mode == "map":
        right(answer, [ROWS.tolist()])  # the map is kept
    else:
        assert answer["error"] == "PayloadMissingError"
    other.write_bytes(ROWS[::-1].tobytes())
    other.rename(path)
    right(
        one.ask("window", [segment] * 2, "routed_experts", 0, 12, options={"dtype": "int16"}),
        ROWS[::-1].tolist(),
    )
    with open(path, "r+b") as file:  # in place: what a writer of ours never does
        file.write(bytes(4096))
    answer = one.ask("window", [segment] * 2, "routed_experts", 0, 2, options={"dtype": "int16"})
    assert answer["result"][0] == [0] * 4096


@needs_root
@pytest.mark.parametrize("call", ["resolve", "window"])
def test_many_missing_files_on_a_slow_mount_end_soon_after_the_deadline(
    call: str, mount: Mount, child
) -> None:
    here = mount.put("here", ROWS)
    one = child(mount.roots("through"), wait=0.3)
    right(one.ask("view", [here]), [ROWS.tolist()])
    mount.lie({"*": {"delay": 0.02}})
    gone = [
        Segment("routed_experts", f"{mount.point}/v1/gone{at}", 0, 12 * at, 12, "uint8", (4096,))
        for at in range(1000)
    ]
    window = () if call == "resolve" else ("routed_experts", 0, 12000)
    answer = one.ask(call, gone, *window)
    assert (answer["error"], answer["reason"]) == ("PayloadMissingError", "missing")
    found = re.search(
        r"(\d+) of 1000 segments cannot be read.*; (\d+) were not looked at", answer["message"]
    )
    assert found, answer["message"]
    assert int(found[1]) + int(found[2]) == 1000
    assert answer["seconds"] < 5  # looking at all would take 20 s


@needs_root
def test_a_mount_that_is_gone_is_not_written_any_more(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "none", str(tmp_path)], check=True)
    writer = Writer(tmp_path)
    try:
        writer.write({"f": (0, ROWS)}, "v1")
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with pytest.raises(PayloadWriteError, match="EROFS"):
            writer.write({"f": (0, ROWS)}, "v2")
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    for version in ("v1", "v2"):
        [segment] = writer.write({"f": (0, ROWS)}, version)
        assert os.path.getsize(segment.file) > ROWS.nbytes


@needs_root
def test_a_full_tmpfs_refuses_a_write_with_the_numbers_and_takes_the_next(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], check=True)
    try:
        writer = Writer(tmp_path)
        with pytest.raises(PayloadWriteError) as caught:
            writer.write({"f": (0, np.zeros(4 << 20, np.uint8))})
        error = caught.value
        assert error.errno == 28
        assert error.expected > 4 << 20 > 1 << 20 >= error.actual > 0
        assert f"needs {error.expected} bytes, {error.actual} are free" in str(error)
        assert not [p for p in tmp_path.rglob("*") if p.is_file()]
        [segment] = writer.write({"f": (0, ROWS)})
        with Resolver(tmp_path) as resolver:
            np.testing.assert_array_equal(resolver.view(segment), ROWS)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@needs_root
def test_a_read_only_mount_is_read_and_not_written(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "none", str(tmp_path)], check=True)
    try:
        [segment] = Writer(tmp_path).write({"f": (0, ROWS)})
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with Resolver(tmp_path) as resolver:
            np.testing.assert_array_equal(resolver.view(segment), ROWS)
        with pytest.raises(PayloadWriteError, match="Read-only file system \\(EROFS\\)"):
            Writer(tmp_path).write({"f": (0, ROWS)})
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@needs_root
def test_a_permission_that_is_missing_names_the_user_and_the_cure(tmp_path: Path) -> None:
    code = """
import os, sys
from payload import PayloadError, Resolver, Segment
os.setgid(65534); os.setuid(65534)
try:
    Resolver(sys.argv[1]).view(Segment("f", sys.argv[1] + "/v1/a", 0, 0, 1, "uint8", (4,)))
except PayloadError as error:
    print(error.reason, error)
"""
    # In a process that has loaded all it needs: an interpreter may be closed to others too.
    verify = """
import os, sys
from payload import _examine, cli
os.setgid(65534); os.setuid(65534)
sys.exit(cli.main(["verify", sys.argv[1]]))
"""
    # Not beneath tmp_path: its parents are closed to others.
    root = Path("/tmp") / f"byhandle-{os.getpid()}"
    (root / "v1").mkdir(parents=True)
    try:
        (root / "v1" / "a").write_bytes(bytes(4))
        for part, mode in ((root / "v1" / "a", 0o600), (root / "v1", 0o700)):
            part.chmod(mode)
            done = subprocess.run(
                [sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True,
                env={"PYTHONPATH": str(HERE.parent.parent), "PATH": os.environ["PATH"]},
            )  # fmt: skip
            assert "Permission denied (EACCES) for user 65534: the writer's mode" in done.stdout
            assert done.stdout.startswith("permission ")
            done = subprocess.run(
                [sys.executable, "-c", verify, str(root / "v1" / "a")], capture_output=True, text=True, check=False,
                env={"PYTHONPATH": str(HERE.parent.parent), "PATH": os.environ["PATH"]},
            )  # fmt: skip
            assert done.returncode == 1  # 2 would say that the path is not there
            assert "Permission denied (EACCES) for user 65534" in done.stdout
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)


def test_a_mask_in_a_truncated_file_is_an_error_of_ours(tmp_path: Path, child) -> None:
    segments = Writer(tmp_path).write({"sampling_mask": (0, Ragged.from_lists(MASK))})
    one = child(str(tmp_path))
    right(one.ask("ragged", segments, "sampling_mask", 0, 4), MASK)
    size = os.path.getsize(segments[0].file)
    for end in range(size - 1, segments[0].offset, -3):
        os.truncate(segments[0].file, end)
        for call in ("ragged", "window"):
            answer = one.ask(call, segments, "sampling_mask", 0, 4)
            assert answer["error"] == "PayloadTruncatedError"


def test_a_directory_wiped_while_threads_read_is_missing_and_nothing_else(tmp_path: Path) -> None:
    import shutil
    import threading

    writer, stop = Writer(tmp_path), threading.Event()
    errors: list[BaseException] = []
    segments = [writer.write({"f": (0, ROWS)}, "v1")[0] for _ in range(8)]
    with Resolver(tmp_path, mode="copy") as resolver:

        def read() -> None:
            while not stop.is_set():
                for segment in segments:
                    try:
                        np.testing.assert_array_equal(resolver.view(segment), ROWS)
                    except PayloadMissingError:
                        pass
                    except BaseException as error:
                        errors.append(error)
                        return

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(30):
            shutil.rmtree(tmp_path / "v1")
            segments[:] = [writer.write({"f": (0, ROWS)}, "v1")[0] for _ in range(8)]
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors
