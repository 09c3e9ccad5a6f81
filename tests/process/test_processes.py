"""Every way to start a process, with threads in it: right bytes, no deadlock."""

import multiprocessing
import threading
from pathlib import Path

import numpy as np
import pytest

from payload import Resolver, Segment, Writer

pytestmark = pytest.mark.process
FILES, ROWS = 12, 300


def read(resolver: Resolver, segments: list[Segment], threads: int) -> list[str]:
    """What went wrong in `threads` threads that read everything."""
    wrong: list[str] = []

    def work(seed: int) -> None:
        try:
            for n in range(2 * FILES):
                i = (seed + n) % FILES
                if not (resolver.view(segments[i]) == i).all():
                    wrong.append(f"view {i}")
            got = resolver.window(segments, "f", 0, FILES * ROWS, dtype="int16")
            if not (got[:, 0, 0] == np.arange(FILES * ROWS) // ROWS).all():
                wrong.append("window")
            resolver.prefetch(segments)
        except BaseException as error:
            wrong.append(repr(error))

    running = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return wrong


def child(resolver: Resolver, segments: list[Segment], results: object) -> None:
    results.send(read(resolver, segments, 8))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads is the point
@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_eight_threads_in_each_of_four_processes(method: str, mode: str, tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    segments = [
        writer.write({"f": (ROWS * i, np.full((ROWS, 48, 8), i, np.uint8))})[0]
        for i in range(FILES)
    ]
    context = multiprocessing.get_context(method)
    with Resolver(tmp_path, mode=mode, max_maps=5) as resolver:
        stop = threading.Event()

        def busy() -> None:
            while not stop.is_set():
                read(resolver, segments, 1)

        assert read(resolver, segments, 2) == []  # has threads, maps and directories of its own
        parents = [threading.Thread(target=busy) for _ in range(2)]
        for thread in parents:
            thread.start()
        try:
            children = []
            for _ in range(4):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=child, args=(resolver, segments, sender))
                process.start()
                sender.close()
                children.append((process, receiver))
            for process, receiver in children:
                assert receiver.poll(60), "a child hangs"
                assert receiver.recv() == []
                process.join(20)
                assert process.exitcode == 0
        finally:
            stop.set()
            for thread in parents:
                thread.join()
