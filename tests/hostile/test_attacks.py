"""The attacks that take a process of their own: floods, races, soaks. Each short here, long in
`make hostile`."""

import ctypes
import json
import os
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from payload import PathError, PayloadError, PayloadWriteError, Resolver, Segment, Writer

pytestmark = pytest.mark.process
HERE = Path(__file__).parent


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A directory on tmpfs, if there is one: these write many small files."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(tmp_path)
    directory = Path(tempfile.mkdtemp(prefix="byhandle-hostile-", dir=shared))
    yield directory
    shutil.rmtree(directory)


class Canary:
    """Tells from outside whether anybody opened what lies in a directory (inotify)."""

    def __init__(self, directory: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.inotify_init1(os.O_NONBLOCK)
        opened = 0x20
        assert libc.inotify_add_watch(self.fd, bytes(directory), opened) >= 0

    def opened(self) -> list[str]:
        names = []
        while select.select([self.fd], [], [], 0)[0]:
            data = os.read(self.fd, 1 << 16)
            at = 0
            while at < len(data):
                _, _, _, size = struct.unpack_from("iIII", data, at)
                names.append(data[at + 16 : at + 16 + size].rstrip(b"\0").decode())
                at += 16 + size
        return names


def run(script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [*prefix, sys.executable, str(HERE / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(HERE.parent.parent)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "count", [10_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_malformed_descriptors_are_refused_and_open_nothing_outside(count: int, fast: Path) -> None:
    (fast / "outside").mkdir()
    (fast / "outside" / "passwd").write_text("canary")
    canary = Canary(fast / "outside")
    (fast / "outside" / "passwd").read_text()
    assert canary.opened() == ["passwd"]  # it sings
    root, log = fast / "root", fast / "strace.log"
    strace = shutil.which("strace")
    traced = ("strace", "-f", "-qq", "-e", "trace=open,openat,openat2,creat", "-o", str(log))
    found = json.loads(run("malformed.py", count, count, root, prefix=traced if strace else ()))
    assert found["descriptors"] == count
    assert sum(found["met"].values()) == count
    assert set(found["met"]) >= {
        "wrong_type", "out_of_range", "unknown_dtype", "missing_key", "illegal_path", "outside_roots",
        "length_mismatch", "too_many_dimensions", "truncated", "missing", "symlink", "not_regular",
        "unpublished",
    }  # fmt: skip
    assert found["live_maps"] == 1
    assert canary.opened() == []
    if strace:
        _, _, after = log.read_text().partition(f"{root}/marker")
        opens = re.findall(r'open(?:at2?)?\((\S+), "((?:[^"\\]|\\.)*)"', after)
        outside = [
            path
            for directory, path in opens
            if not (path + "/").startswith(
                (f"{root}/", "/proc/self/fdinfo/", "/proc/self/mountinfo/", "/proc/sys/vm/")
            )
            and (directory == "AT_FDCWD" or "/" in path or path in ("..", "."))
        ]
        assert len(opens) > count / 100  # it was looked at
        assert outside == []
    print(f"{count} malformed descriptors: {found['met']}")


@pytest.mark.parametrize(
    ("segments", "files"),
    [
        (20_000, 1_000),
        pytest.param(1_000_000, 20_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_a_soak_holds_descriptors_and_memory(segments: int, files: int, fast: Path) -> None:
    found = json.loads(run("soak.py", segments, files, fast / "root"))
    early, late = found["descriptors"]
    assert late <= max(early, 200)
    early, late = found["resident"]
    assert late < early + 4 * 2**20
    assert found["live_maps"] <= 128
    assert found["fallbacks"] == {}
    print(found)


@pytest.mark.parametrize(
    "seconds", [1, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(120)])]
)
def test_a_component_flipped_between_directory_and_link_leaks_nothing(
    seconds: int, fast: Path
) -> None:
    """Resolve-then-open can be raced; opening beneath a descriptor without following cannot."""
    root, secret = fast / "root", fast / "secret"
    for directory in (root, secret):
        (directory / "flip" if directory == root else directory).mkdir(parents=True)
    (root / "flip" / "a").write_bytes(b"good" * 16)
    (secret / "a").write_bytes(b"evil" * 16)
    canary = Canary(secret)
    flip = f"""
import os, shutil, time
flip, away = {str(root / "flip")!r}, {str(root / "away")!r}
def put(make):
    while True:
        try:
            return make()
        except FileExistsError:
            shutil.rmtree(flip, ignore_errors=True)  # the writer made it again
        except OSError as error:
            if error.errno != 39:
                raise
            shutil.rmtree(flip, ignore_errors=True)
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    os.rename(flip, away)
    put(lambda: os.symlink({str(secret)!r}, flip))
    os.unlink(flip)
    put(lambda: os.rename(away, flip))
"""
    flipper = subprocess.Popen([sys.executable, "-c", flip])
    segment = Segment("f", f"{root}/flip/a", 0, 0, 64, "uint8", ())
    good = np.frombuffer(b"good" * 16, np.uint8)
    met = {"good": 0, "refused": 0, "missing": 0, "written": 0}
    writer = Writer(root)
    while flipper.poll() is None:
        with Resolver(root, mode="copy") as resolver:  # anew: no directory is kept
            for _ in range(3):
                resolver._files.roots.close()
                try:
                    np.testing.assert_array_equal(resolver.view(segment), good)
                    met["good"] += 1
                except PathError:
                    met["refused"] += 1
                except PayloadError:
                    met["missing"] += 1
        writer._roots.close()
        try:
            writer.write({"f": (0, good)}, "flip")
            met["written"] += 1
        except (PathError, PayloadWriteError):
            pass
    assert flipper.returncode == 0
    assert canary.opened() == []
    assert sorted(os.listdir(secret)) == ["a"]
    assert min(met["good"], met["refused"]) > 0  # the race was run
    print(met)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_sixty_seconds_of_fuzzing_find_nothing(fast: Path) -> None:
    pytest.importorskip("atheris", reason="make hostile installs it")
    root = fast / "root"
    root.mkdir()
    out = run("fuzz.py", 60, root)
    runs, arrays = map(int, re.findall(r"(\d+) inputs, (\d+) arrays", out)[-1])
    assert runs > 10_000
    assert arrays > 100
    print(f"{runs} inputs, {arrays} arrays equal to the model's")


def test_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    done = threading.Event()
    segment = Segment("f", f"{tmp_path}/a", 0, 0, 1, "uint8", (4,))

    def read() -> None:
        for mode in ("map", "copy"):
            with (
                Resolver(tmp_path, mode=mode, wait=5) as resolver,
                pytest.raises(PathError) as caught,
            ):
                resolver.view(segment)
            assert "is a fifo, not a regular file" in str(caught.value)
        done.set()

    began = time.monotonic()
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert done.wait(5)
    assert time.monotonic() - began < 1


@pytest.mark.skipif(os.geteuid() != 0, reason="making a device node needs root")
@pytest.mark.parametrize("kind", ["block", "character"])
def test_a_device_is_not_read(kind: str, tmp_path: Path) -> None:
    number, mode = ((7, 0), 0o060600) if kind == "block" else ((1, 5), 0o020600)
    os.mknod(tmp_path / "a", mode, os.makedev(*number))
    segment = Segment("f", f"{tmp_path}/a", 0, 0, 1, "uint8", (4,))
    for way in ("map", "copy"):
        with Resolver(tmp_path, mode=way) as resolver, pytest.raises(PayloadError) as caught:
            resolver.window([segment], "f", 0, 1, dtype="int16")
        assert caught.value.reason in ("not_regular", "io", "permission")
        assert "device" in str(caught.value)
