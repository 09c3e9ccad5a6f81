"""Threads of one resolver: made when first needed, never at import, never shared across fork."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from .errors import ResolverClosedError

if TYPE_CHECKING:
    # Else imported where threads are made: with logging, which it needs, a tenth of the time that
    # importing payload takes, and many a process makes none.
    from concurrent.futures import Future, ThreadPoolExecutor

T = TypeVar("T")


class Threads:
    """Threads that help one call, and one that prefetches."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._helpers: ThreadPoolExecutor | None = None
        self._prefetcher: ThreadPoolExecutor | None = None
        self._closed = False
        self._lock = threading.Lock()
        _all_threads.add(self)

    def run(self, work: Callable[[], None], threads: int) -> None:
        """Run `work` on as many threads at once, the calling one among them."""
        if threads < 2:
            work()
            return
        from concurrent.futures import wait

        futures = [self._start(work)[0] for _ in range(threads - 1)]
        try:
            work()
        finally:
            # What did not start has nothing left to do; what did is waited for: it writes to the
            # caller's array.
            left = [future for future in futures if not future.cancel()]
            wait(left)
        for future in left:
            if future.exception():
                try:
                    future.result()
                finally:
                    del future, futures, left  # they hold the error, and it this frame

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on a helping thread; on this one when there is none to be had."""
        future, started = self._start(work)
        if not started and future.cancel():
            future = type(future)()
            _carry_out([future], work)
        return future

    def _start(self, work: Callable[[], T]) -> tuple[Future[T], bool]:
        from concurrent.futures import Future, ThreadPoolExecutor

        # A future of our own: a pool that can start no thread raises, yet keeps what it was given
        # for the threads it has.
        future: Future[T] = Future()
        with self._lock:
            self._check_open()
            if self._helpers is None:
                self._helpers = ThreadPoolExecutor(self._most - 1, "payload")
            with contextlib.suppress(RuntimeError):
                self._helpers.submit(_carry_out, [future], work)
                return future, True
        return future, False

    def later(self, work: Callable[[], None]) -> None:
        """Run `work` after what was given before, on the prefetching thread, if that can start."""
        with self._lock:
            self._check_open()
            if self._prefetcher is None:
                from concurrent.futures import ThreadPoolExecutor

                self._prefetcher = ThreadPoolExecutor(1, "payload-prefetch")
            with contextlib.suppress(RuntimeError):
                self._prefetcher.submit(work)

    def close(self) -> None:
        """Let the threads end; what is running finishes."""
        with self._lock:
            self._closed = True
            for pool in (self._helpers, self._prefetcher):
                if pool is not None:
                    pool.shutdown(wait=False, cancel_futures=True)
            self._helpers = self._prefetcher = None

    def _check_open(self) -> None:
        if self._closed:
            raise ResolverClosedError("resolver was closed meanwhile: make a new one")


def _carry_out(only: list[Future[T]], work: Callable[[], T]) -> None:
    # Out of the pool's reach: the future holds an error, that its frames, and they the pool's item.
    future = only.pop()
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
            del future


_all_threads: weakref.WeakSet[Threads] = weakref.WeakSet()


def _forget() -> None:
    for threads in list(_all_threads):
        threads._lock = threading.Lock()
        threads._helpers = threads._prefetcher = None  # they stayed with the parent


os.register_at_fork(after_in_child=_forget)
