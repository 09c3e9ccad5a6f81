"""Nodes, the processes a test starts on them, and the file systems they share."""

import itertools
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.multinode import jobs

POLL = 0.003
HERE = Path(__file__).parent


class Answer(msgspec.Struct, frozen=True):
    """What a call came to: a value, a PayloadError, or the end of its process."""

    value: Any = None
    error: str | None = None
    reason: str | None = None
    message: str = ""
    fault: str | None = None
    seconds: float = 0.0
    at: float = 0.0  # by the node's clock
    requests: dict[str, int] = {}
    ended: int | None = None  # exit code; -7 is SIGBUS

    def right(self, want: Any) -> None:
        assert self.error is None, f"{self.error}: {self.message}"
        assert self.ended is None, f"the process ended with {self.ended}"
        assert self.value == want

    def refused(self, error: str, reason: str, within: float) -> None:
        assert (self.error, self.reason) == (error, reason), self
        assert self.seconds < within, f"took {self.seconds:.1f} s, {within} are allowed"


class Pending:
    """A call that may still be running."""

    def __init__(self, process: "Process", base: Path) -> None:
        self.process, self.base = process, base

    def done(self) -> bool:
        return self.base.with_suffix(".done").exists() or self.process.ended() is not None

    def wait(self, timeout: float = 60) -> Answer:
        deadline = time.monotonic() + timeout
        done = self.base.with_suffix(".done")
        while not done.exists():
            ended = self.process.ended()
            if ended is not None and not done.exists():
                return Answer(ended=ended)
            assert time.monotonic() < deadline, f"no answer after {timeout} s: a call hangs"
            time.sleep(POLL)
        answer = msgspec.json.decode(done.read_bytes(), type=Answer)
        done.unlink()
        assert answer.fault is None, answer.fault
        return answer


class Process:
    """A process on a node; it carries out one call after the other and keeps what it holds."""

    def __init__(self, node: "Node", directory: Path) -> None:
        self.node, self.directory = node, directory
        self._numbers = itertools.count()

    def begin(self, name: str, /, *, mount: str | None = None, **arguments: Any) -> Pending:
        assert hasattr(jobs, name)
        base = self.directory / f"{next(self._numbers):06d}"
        part = base.with_suffix(".part")
        part.write_bytes(msgspec.json.encode([name, arguments, mount]))
        part.rename(base.with_suffix(".call"))
        return Pending(self, base)

    def tell(self, name: str, /, *, timeout: float = 60, **arguments: Any) -> Answer:
        """Call, and return whatever comes of it."""
        return self.begin(name, **arguments).wait(timeout)

    def ask(self, name: str, /, **arguments: Any) -> Any:
        """Call, and return its value: anything else fails the test."""
        answer = self.tell(name, **arguments)
        assert answer.error is None, f"{answer.error}: {answer.message}"
        assert answer.ended is None, f"the process ended with {answer.ended}"
        return answer.value

    def ended(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        try:
            return int(self.directory.with_suffix(".exit").read_bytes())
        except FileNotFoundError:
            self.node.check()
            return None

    def kill(self) -> None:
        self.directory.with_suffix(".kill").touch()

    def end(self) -> None:
        """Kill it, and wait until what it held is free."""
        self.kill()
        deadline = time.monotonic() + 20
        while self.ended() is None:
            assert time.monotonic() < deadline, "a process does not end"
            time.sleep(POLL)


class Node:
    """Where processes of a test start; `alive` says why it no longer answers, or nothing."""

    def __init__(
        self, directory: Path, alive: Callable[[], str | None], host: str = "127.0.0.1"
    ) -> None:
        self.directory, self.alive, self.host = directory, alive, host
        self._mine: list[Process] = []

    def check(self) -> None:
        wrong = self.alive()
        if wrong:
            pytest.fail(wrong)

    def wait_ready(self, timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while not (self.directory / "ready").exists():
            self.check()
            assert time.monotonic() < deadline, f"{self.directory.name} does not start"
            time.sleep(POLL)

    def start(self) -> Process:
        directory = self.directory / uuid.uuid4().hex
        directory.mkdir()
        directory.with_suffix(".start").touch()
        self._mine.append(Process(self, directory))
        return self._mine[-1]

    @cached_property
    def clock(self) -> float:
        """Seconds its clock is ahead of this machine's, to a few milliseconds; it stays so."""
        process, least, most = self.start(), -1e9, 1e9
        for _ in range(40):
            before = time.time()
            at = process.tell("nothing").at
            least, most = max(least, at - time.time()), min(most, at - before)
        print(f"\n{self.directory.name}: clock {1e3 * least:+.1f} to {1e3 * most:+.1f} ms")
        return (least + most) / 2

    def end_all(self) -> None:
        for process in self._mine:
            if not process.directory.with_suffix(".exit").exists():
                process.kill()
        self._mine.clear()


class Place(msgspec.Struct, kw_only=True):
    """A directory that an inference node and a trainer node share."""

    name: str
    infer: Node
    trainer: Node
    meddler: Callable[[], Process]  # of others; it names the directory `meddled`
    root: str  # as the inference node mounts it
    seen: str  # as the trainer node does
    meddled: str
    mount: str | None = None  # whose requests are counted, on the trainer node
    access: str = "map"

    @property
    def network(self) -> bool:
        return self.access != "map"

    @property
    def held(self) -> bool:
        """Whether a file that is open lives on when it has lost its name."""
        return self.access != "copy"

    def roots(self, **options: Any) -> dict[str, dict[str, Any]]:
        return {self.root: {"directory": self.seen, **options}}

    def writer(self) -> Process:
        return self.infer.start()

    def reader(self, mode: str | None = None, **options: Any) -> Process:
        process = self.trainer.start()
        process.ask("resolver", roots=self.roots(**({"mode": mode} if mode else {})), **options)
        return process

    def meddle(self, code: str) -> Any:
        """Run code on the node of others, where `root` names the directory."""
        return self.meddler().ask("run", code=f"root = {self.meddled!r}\n{code}")


def rows(seed: int, count: int, start: int = 0, stop: int | None = None) -> Any:
    """Digest of the rows a seed tells."""
    return jobs.digest(jobs.rows(seed, count)[start:stop])


@contextmanager
def printed_times(what: str) -> Iterator[list[float]]:
    times: list[float] = []
    yield times
    middle = sorted(times)[len(times) // 2]
    print(f"\n{what}: median {1e3 * middle:.1f} ms of {[round(1e3 * t, 1) for t in times]}")


def python_path() -> dict[str, str]:
    return {"PYTHONPATH": os.fspath(HERE.parent.parent), "PYTHONDONTWRITEBYTECODE": "1"}
