"""What windows and views cost in memory, measured by the kernel in child processes."""

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from payload import Ragged, Writer, encode_segments

pytestmark = pytest.mark.process

PEAK = """
    import json, resource, sys
    import numpy as np
    from payload import Resolver, decode_segments

    root, kind = sys.argv[1:3]
    segments = decode_segments(sys.stdin.buffer.read())

    def peak():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

    def reset():
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")

    with Resolver(root, mode="copy") as resolver:
        field = {"native": "routed_experts", "wide": "routed_experts", "half": "half", "exact": "exact"}
        field = field.get(kind, "sampling_mask")
        end = max(s.end for s in segments if s.field == field)
        run = {
            "native": lambda hi: resolver.window(segments, field, 0, hi),
            "wide": lambda hi: resolver.window(segments, field, 0, hi, dtype="int32"),
            "padded": lambda hi: resolver.window(segments, field, 0, hi),
            "ragged": lambda hi: resolver.ragged(segments, field, 0, hi),
            "skewed": lambda hi: resolver.window(segments, field, 0, hi),
            "half": lambda hi: resolver.window(segments, field, 0, hi, dtype="int32"),
            "exact": lambda hi: resolver.window(segments, field, 0, hi, dtype="float64"),
        }[kind]
        run(10)
        reset()
        before = peak()
        result = run(end)
        nbytes = result.values.nbytes + result.offsets.nbytes if kind == "ragged" else result.nbytes
        print(json.dumps([peak() - before, nbytes]))
"""


def run(code: str, *arguments: str, stdin: bytes = b"") -> bytes:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        input=stdin,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.mark.parametrize("kind", ["native", "wide", "padded", "ragged", "skewed", "half", "exact"])
def test_a_window_takes_its_result_and_a_scratch_buffer_a_thread(kind: str, tmp_path: Path) -> None:
    import json
    import os

    import msgspec

    rng = np.random.default_rng(0)
    writer, segments = Writer(tmp_path), []
    for i in range(40):
        counts = rng.integers(150, 200, 1000)
        mask = Ragged.from_counts(rng.integers(0, 9, counts.sum()).astype(np.int32), counts)
        experts = rng.integers(0, 9, (2000, 48, 8), np.uint8)
        segments += writer.write(
            {"routed_experts": (2000 * i, experts), "sampling_mask": (1000 * i, mask)}
        )
    if kind == "skewed":  # one row of 20,000 ids makes 4,000 short ones wide
        counts = np.ones(4000, int)
        counts[7] = 20_000
        mask = Ragged.from_counts(np.zeros(counts.sum(), np.int32), counts)
        segments = writer.write({"sampling_mask": (0, mask)})
    elif kind in ("half", "exact"):
        dtype = np.float16 if kind == "half" else np.int64
        value = 7 if kind == "half" else 2**53 + 2
        rows = np.full((400_000, 16), value, dtype)
        segments = writer.write({kind: (0, rows)})
    wire = msgspec.json.encode(encode_segments(segments, "array"))
    grown, nbytes = json.loads(run(PEAK, str(tmp_path), kind, stdin=wire))
    threads = min(8, len(os.sched_getaffinity(0)))
    # Besides what is promised: stacks and arenas of new threads, and row counts of a ragged field.
    allowed = (
        threads * 2**20
        + threads * 2**19
        + 2**21
        + (16 * 40_000 if kind in ("padded", "ragged") else 0)
    )
    assert nbytes > 20 * 2**20
    assert grown < nbytes + allowed, f"{grown - nbytes} bytes besides the result"


SHARE = """
    import re, sys
    from payload import Resolver, Segment

    path = sys.argv[1]
    rows = 256 * 2**20 // 384
    view = Resolver(path.rpartition("/")[0]).view(
        Segment("routed_experts", path, 0, 0, rows, "uint8", (48, 8))
    )
    assert int(view[:, ::24].max()) == 7 and int(view.reshape(-1)[::4096].sum()) > 0
    print("ready", flush=True)
    sys.stdin.readline()
    total, mine = 0, False
    for line in open("/proc/self/smaps"):
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mine = line.rstrip().endswith(path)
        elif mine and line.startswith("Pss:"):
            total += int(line.split()[1])
    print(total * 1024, flush=True)
    sys.stdin.readline()
"""


def test_eight_processes_share_the_pages_of_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with open(path, "wb", buffering=0) as file:
        for _ in range(16):
            file.write(b"\7" * 2**24)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SHARE), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n"
        held = 0
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
            held += int(child.stdout.readline())
    finally:
        for child in children:
            child.communicate("\n", timeout=30)
    assert 0.9 * 2**28 < held <= 1.1 * 2**28
