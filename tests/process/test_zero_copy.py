"""Nothing is read before it is touched: measured by the kernel, in a child process."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

CHILD = """
    import os, re, sys
    import numpy as np
    from payload import Resolver, Segment

    GIB = 2**30

    def resident():
        with open("/proc/self/smaps_rollup") as rollup:
            return int(re.search(r"Rss:\\s+(\\d+) kB", rollup.read()).group(1)) * 1024

    path = sys.argv[1]
    segment = Segment("routed_experts", path, 0, 0, GIB // 384, "uint8", (48, 8))
    with Resolver(os.path.dirname(path)) as resolver:
        before = resident()
        [view] = resolver.resolve([segment])["routed_experts"]
        window = resolver.window([segment], "routed_experts", 1000, 2_000_000)
        after = resident()
        assert view.nbytes > GIB - 384, view.nbytes
        assert np.shares_memory(view, window)
        assert after - before < 2**20, f"{after - before} bytes became resident"
        assert view[::4096].max() == 3  # one page in 384, so about 2.7 MiB
        rows = view[:100_000].sum()
        assert rows == 100_000 * 384 * 3
        assert resident() - after > 30 * 2**20, "touching pages was not seen: the measure is blind"
        assert resolver.stats().bytes_copied == resolver.stats().bytes_read == 0
"""


def run(path: Path) -> None:
    code = textwrap.dedent(CHILD)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_view_of_a_gibibyte_makes_nothing_resident_until_it_is_touched(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    directory = shared if os.access(shared, os.W_OK) else tmp_path
    path = directory / f"byhandle-test-{os.getpid()}.bin"
    try:
        block = b"\3" * 2**24
        with open(path, "wb", buffering=0) as file:  # written, not sparse
            for _ in range(64):
                file.write(block)
        assert os.stat(path).st_blocks * 512 >= 2**30
        run(path)
    finally:
        path.unlink(missing_ok=True)
