"""Opens and maps, counted by the interpreter's audit events and not by us, in a child process."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from payload import Writer, encode_segments

pytestmark = pytest.mark.process

CHILD = """
    import json, sys
    from payload import Resolver, decode_segments

    counted = {"open": 0, "mmap.__new__": 0}

    def count(event, arguments):
        if event in counted:
            counted[event] += 1

    def taken():
        found = [counted["open"], counted["mmap.__new__"]]
        counted.update(dict.fromkeys(counted, 0))
        return found

    root, segments = sys.argv[1], decode_segments(sys.stdin.buffer.read())
    files, rows = len(segments), segments[-1].end
    with Resolver(root) as resolver:
        resolver.view(segments[0])  # the root and the directory are open from now on
        sys.addaudithook(count)
        out = {}
        views = [resolver.view(segment) for segment in segments]
        out["new views"] = taken()
        again = [resolver.view(segment) for segment in segments]
        out["the same again"] = taken()
        before = resolver.stats()
        window = resolver.window(segments, "routed_experts", 0, rows)
        after = resolver.stats()
        out["window"] = taken()
        out["window's reads and bytes"] = [
            after.reads - before.reads, after.bytes_read - before.bytes_read,
            after.bytes_copied - before.bytes_copied,
        ]
        part = resolver.window(segments, "routed_experts", 0, rows // 4)
        out["a quarter"] = taken()
        one = resolver.window(segments, "routed_experts", 0, segments[0].rows)
        out["a window in one segment"] = taken()
    print(json.dumps(out))
"""


def test_each_file_is_opened_once_and_mapped_once_or_read_once(tmp_path: Path) -> None:
    writer, segments = Writer(tmp_path), []
    for index in range(40):
        rows = np.full((10, 48, 8), index, np.uint8)
        segments += writer.write({"routed_experts": (10 * index, rows)})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)],
        input=json.dumps(encode_segments(segments)).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout) == {
        "new views": [39, 39],
        "the same again": [0, 0],
        "window": [40, 0],
        "window's reads and bytes": [40, 40 * 3840, 40 * 3840],
        "a quarter": [10, 0],
        "a window in one segment": [0, 0],
    }


def test_importing_payload_brings_in_no_event_loop_and_nothing_heavy() -> None:
    code = "import sys, payload; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True)
    found = set(done.stdout.decode().split())
    assert {"payload", "payload.writer", "numpy", "msgspec", "xxhash"} <= found
    heavy = {"asyncio", "ssl", "torch", "httpx2", "httpx", "hypothesis", "client", "bench"}
    assert not heavy & found
