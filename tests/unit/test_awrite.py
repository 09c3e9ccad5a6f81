import asyncio
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload import PathError, PayloadWriteError, Resolver, Writer
from payload.writer import QUEUED, WRITERS
from tests.hostile.test_filesystems import needs_root

ROWS = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_it_writes_what_write_writes(tmp_path: Path) -> None:
    async def run() -> list[Any]:
        writer = Writer(tmp_path)
        return await asyncio.gather(
            *[writer.awrite({"f": (i, ROWS + i)}, "v1", {"n": str(i)}) for i in range(50)]
        )

    written = asyncio.run(run())
    assert len(files(tmp_path)) == 50
    with Resolver(tmp_path, verify="checksum") as resolver:
        for i, [segment] in enumerate(written):
            assert segment.pos == i
            np.testing.assert_array_equal(resolver.view(segment), ROWS + i)


def test_errors_come_to_the_caller_and_the_queue_goes_on(tmp_path: Path) -> None:
    async def run() -> None:
        writer = Writer(tmp_path, max_bytes=10_000)
        for _ in range(3 * QUEUED):
            with pytest.raises(PathError):
                await writer.awrite({"f": (0, ROWS)}, "/etc")
            with pytest.raises(PayloadWriteError, match="max_bytes is 10000"):
                await writer.awrite({"f": (0, np.zeros(20_000, np.uint8))})
            with pytest.raises(TypeError):
                await writer.awrite({"f": ROWS})
        await writer.awrite({"f": (0, ROWS)})

    asyncio.run(run())
    assert len(files(tmp_path)) == 1


def test_the_queue_is_bounded_and_writes_leave_the_loop_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path)
    inside, most, threads = 0, 0, set()
    lock = threading.Lock()
    real = Writer.write

    def slow(self: Writer, *args: Any) -> Any:
        nonlocal inside, most
        threads.add(threading.current_thread().name)
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.005)
        with lock:
            inside -= 1
        return real(self, *args)

    monkeypatch.setattr(Writer, "write", slow)

    async def run() -> None:
        tasks = [asyncio.create_task(writer.awrite({"f": (0, ROWS)})) for _ in range(100)]
        await asyncio.sleep(0.02)
        queued = writer._threads._helpers._work_queue.qsize()
        assert queued <= QUEUED
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert most <= WRITERS
    assert all(name.startswith("payload") for name in threads)
    assert len(files(tmp_path)) == 100


def test_a_ticker_is_not_held_up_by_a_hundred_megabytes(tmp_path: Path) -> None:
    rows = np.zeros((26_000, 48, 8), np.uint8)  # 10 MB

    async def run() -> list[float]:
        late: list[float] = []

        async def tick() -> None:
            while True:
                due = time.perf_counter() + 0.01
                await asyncio.sleep(0.01)
                late.append(time.perf_counter() - due)

        ticker = asyncio.create_task(tick())
        writer = Writer(tmp_path)
        await asyncio.gather(*[writer.awrite({"f": (0, rows)}) for _ in range(10)])
        ticker.cancel()
        return late

    late = asyncio.run(run())
    assert late
    assert statistics.quantiles([*late, 0.0, 0.0], n=100)[-1] < 0.05


def test_a_cancelled_call_takes_its_file_back(tmp_path: Path) -> None:
    rows = np.zeros((26_000, 48, 8), np.uint8)

    async def run() -> None:
        writer = Writer(tmp_path)
        for wait in (0, 0, 0.001, 0.005, 0.02):
            task = asyncio.create_task(writer.awrite({"f": (0, rows)}))
            await asyncio.sleep(wait)
            task.cancel()
            done = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(done[0], asyncio.CancelledError):
                Path(done[0][0].file).unlink()  # it was through before
        [segment] = await writer.awrite({"f": (0, ROWS)})  # behind all of them
        for _ in range(100):
            if files(tmp_path) == [Path(segment.file)]:
                return
            await asyncio.sleep(0.02)
        pytest.fail(f"left behind: {files(tmp_path)}")

    asyncio.run(run())


def test_one_writer_serves_one_event_loop_after_another(tmp_path: Path) -> None:
    writer = Writer(tmp_path)

    async def run() -> None:
        await asyncio.gather(*[writer.awrite({"f": (0, ROWS)}) for _ in range(3 * QUEUED)])

    for _ in range(3):
        asyncio.run(run())
    assert len(files(tmp_path)) == 9 * QUEUED


@needs_root
def test_a_full_inode_table_refuses_early_with_the_numbers(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=6", "none", str(tmp_path)]
    subprocess.run(mount, check=True)
    try:
        writer = Writer(tmp_path)
        written = []
        error = None
        while error is None:
            try:
                written += writer.write({"f": (0, ROWS)})
            except PayloadWriteError as refused:
                error = refused
        assert (error.reason, error.expected, error.actual, error.errno) == ("full", 1, 0, 28)
        assert "needs an inode, 0 are free" in str(error)
        assert len(files(tmp_path)) == len(written)
        Path(written[0].file).unlink()
        assert writer.write({"f": (0, ROWS)})
        with pytest.raises(PayloadWriteError, match="while 3 must stay free"):
            Writer(tmp_path, min_free=(0, 3)).write({"f": (0, ROWS)})
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_durable_syncs_the_file_its_directory_and_new_directories_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))
    )
    Writer(tmp_path).write({"f": (0, ROWS)}, "a/b")
    assert synced == []
    writer = Writer(tmp_path, durable=True)
    [segment] = writer.write({"f": (0, ROWS)}, "a/b")
    names = [os.path.relpath(path, tmp_path) for path in synced]
    assert names[0].startswith("a/b/.")
    assert names[1:] == ["a/b", "a", "."]
    synced.clear()
    writer.write({"f": (0, ROWS)}, "a/b")
    assert len(synced) == 2
    assert segment.file.startswith(str(tmp_path))
