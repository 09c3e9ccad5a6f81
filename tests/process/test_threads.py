"""One resolver for many threads: right rows, no deadlock, bounded maps."""

import random
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from payload import Resolver, Writer

pytestmark = pytest.mark.process


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize("verify", ["size", "checksum"])
def test_eight_threads_read_the_right_rows(mode: str, verify: str, tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    rows = [np.full((400, 48, 8), i, np.uint8) for i in range(24)]
    segments = [writer.write({"f": (400 * i, one)})[0] for i, one in enumerate(rows)]
    errors: list[BaseException] = []
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # many switches find races sooner
    try:
        with Resolver(tmp_path, mode=mode, verify=verify, max_maps=5) as resolver:

            def read(seed: int) -> None:
                draw = random.Random(seed)
                try:
                    for _ in range(60):
                        i = draw.randrange(24)
                        assert (resolver.view(segments[i]) == i).all()
                        lo = draw.randrange(9000)
                        got = resolver.window(segments, "f", lo, lo + 500, dtype="int16")
                        want = np.arange(lo, lo + 500) // 400
                        assert (got == want[:, None, None]).all()
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
            assert not errors
            assert resolver.stats().live_maps <= 5
    finally:
        sys.setswitchinterval(switch)
