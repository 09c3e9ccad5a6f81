"""Opening, waiting for, mapping and reading payload files. The only room that opens them.

A map is shared by all segments of its file and kept while there is room; eviction drops the
reference and never closes, so a view keeps its map alive. Nothing here touches mapped bytes.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import resource
import stat
import sys
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

import xxhash

from ._paths import Directory, Place, Roots, kind_of, refuse_link
from .errors import (
    PathError,
    PayloadCorruptError,
    PayloadError,
    PayloadMissingError,
    PayloadTruncatedError,
    ResolverClosedError,
)
from .format import FORMAT, MAX_HEADER, SUFFIX, checksums, decode_header

Mode = Literal["auto", "map", "copy"]

# Page faults on these fail only with the machine; elsewhere a fault can be SIGBUS or hang.
LOCAL_TYPES = frozenset(
    {"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "f2fs", "bcachefs"}
)
# O_NONBLOCK: opening a FIFO returns at once instead of waiting for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_FORMAT = stat.S_IFMT(0xFFFF)  # the bits of a mode that say what it is
NETWORK_WAIT = 5.0  # s; a client's caches show a new name within milliseconds once revalidated
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.025  # s

MAX_THREADS = 8
_CPUS = len(os.sched_getaffinity(0))
THREADED_FILE = 65_536  # bytes a file; below, one thread is as fast: opening holds the others up
_BLOCK = 1 << 20  # bytes; where a larger pread is no faster


def default_max_maps() -> int:
    """How many maps to keep: half of the descriptors, or of the 65,530 maps Linux gives a process.

    Before Python 3.13 each map holds a descriptor.
    """
    if sys.version_info >= (3, 13):
        return 32_768
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 8_192 if soft == resource.RLIM_INFINITY else max(1, min(8_192, soft // 2))


def filesystem_type(fd: int) -> str:
    """Type of the file system an open descriptor is on, as the kernel names it; "" if unknown."""
    try:
        with open(f"/proc/self/fdinfo/{fd}") as info:
            mount = next(line.split()[1] for line in info if line.startswith("mnt_id:"))
        with open("/proc/self/mountinfo") as mounts:
            for line in mounts:
                left, _, right = line.partition(" - ")
                if left.split(" ", 1)[0] == mount:
                    return right.split(" ", 1)[0]
    except (OSError, StopIteration):
        pass
    return ""


class Map(mmap.mmap):
    """A mapped file, and how often it was found in the cache."""

    __slots__ = ("hits", "nbytes", "seen", "verified")

    hits: int
    nbytes: int
    seen: int  # hits when eviction last looked
    verified: list[tuple[int, int]]  # bytes whose checksums were compared


def _map(fd: int, size: int, verified: list[tuple[int, int]]) -> Map:
    if sys.version_info >= (3, 13):
        made = Map(fd, size, mmap.MAP_SHARED, mmap.PROT_READ, trackfd=False)
    else:
        made = Map(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    made.nbytes = size
    made.hits = made.seen = 0
    made.verified = verified
    return made


_COUNTED = ("opens", "maps", "hits", "bytes_mapped", "bytes_read", "bytes_copied", "reads", "waits")


class Files:
    """The payload files beneath some roots, opened when first needed."""

    def __init__(
        self,
        roots: Any,
        mode: Mode,
        wait: float | None,
        verify: bool,
        max_maps: int | None,
        max_bytes: int | None,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode is {mode!r}: needs one of {', '.join(get_args(Mode))}")
        if wait is not None and not wait >= 0:
            raise ValueError(f"wait is {wait!r}: needs seconds, 0 or more")
        if max_maps is not None and max_maps < 1:
            raise ValueError(f"max_maps is {max_maps}: needs at least 1")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}: needs at least 1")
        self.roots = Roots(roots)
        self.maps: OrderedDict[str, Map] = OrderedDict()
        self.max_bytes = max_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        # How to open for reading; what is mapped is compared where it is mapped.
        self.open_read = self._open_verified if verify else self.open
        self.counts = dict.fromkeys(_COUNTED, 0)
        self.fallbacks: Counter[str] = Counter()
        self._mode = mode
        self._wait = wait
        self._max_maps = max_maps or default_max_maps()
        self.verify = verify
        self._types: dict[int, str] = {}
        self._maps_on: dict[int, bool] = {}  # device -> whether its files are mapped
        self._dropped_alive = 0
        self._dropped: list[weakref.ref[Map]] = []  # maps that only views may still hold
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._prefetcher: ThreadPoolExecutor | None = None
        self._closed = False
        _all_files.add(self)

    def map(self, path: str, start: int, nbytes: int) -> Map | None:
        """Return the map of a file that has bytes [start, start + nbytes); None to read it instead.

        Raises
        ------
        PayloadError
            `PathError`, `PayloadMissingError`, `PayloadTruncatedError`, or what the system refused.
        """
        if self._mode == "copy":
            return None
        stop = start + nbytes
        found = self.maps.get(path)
        if (
            found is not None
            and found.nbytes >= stop
            and (not self.verify or any(a <= start and stop <= b for a, b in found.verified))
        ):
            found.hits += 1
            return found
        fd, size, directory = self.open(path, start, stop)
        try:
            if not (self._maps_on.get(directory.device) or self._maps_beneath(directory)):
                return None
            # Compared through the descriptor that is mapped, so of the same file.
            made = _map(fd, size, self._compare(fd, path, size, start, stop))
        except (OSError, ValueError) as error:
            if isinstance(error, PayloadError):
                raise
            # ValueError: the file shrank since fstat. Reading it says by how much.
            self.fallbacks[_reason(error)] += 1
            return None
        finally:
            os.close(fd)
        with self._lock:
            if self._closed:
                raise ResolverClosedError("resolver was closed meanwhile: make a new one")
            self.counts["maps"] += 1
            self.counts["bytes_mapped"] += size
            if found is not None:
                self._drop(found)
            self.maps[path] = made
            if len(self.maps) > self._max_maps:
                self._evict(keep=path)
        return made

    def _maps_beneath(self, directory: Directory) -> bool:
        """Whether files in `directory` are mapped, rather than read."""
        if self._mode != "auto":
            maps = self._mode == "map"
        else:
            kind = self._type(directory)
            maps = kind in LOCAL_TYPES
            if not kind:
                return False  # could not be found out; perhaps the next time
        self._maps_on[directory.device] = maps
        return maps

    def fill(self, fd: int, path: str, offset: int, *out: memoryview) -> None:
        """Fill `out`, one buffer after the other, from an open descriptor."""
        try:
            if os.preadv(fd, out, offset) == sum(map(len, out)):
                return
            # Linux reads at most 2 GiB at a time; a signal or a shrinking file ends one early.
            for part in out:
                done = 0
                while done < len(part):
                    got = os.preadv(fd, (part[done:],), offset + done)
                    if not got:
                        size = os.fstat(fd).st_size
                        raise _truncated(path, offset + len(part), size, 0.0)
                    done += got
                offset += len(part)
        except OSError as error:
            raise self.refused(path, error) from None

    def threads(self, tasks: int, nbytes: int) -> int:
        """How many threads pay for `tasks` files of `nbytes` in all."""
        return min(tasks, MAX_THREADS, _CPUS) if nbytes >= tasks * THREADED_FILE else 1

    def on_threads(self, work: Callable[[], None], threads: int) -> None:
        """Run `work` on as many threads at once, this one among them."""
        if threads < 2:
            work()
            return
        with self._lock:
            if self._closed:
                raise ResolverClosedError("resolver was closed meanwhile: make a new one")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(MAX_THREADS - 1, "payload")
            futures = [self._pool.submit(work) for _ in range(threads - 1)]
        try:
            work()
        finally:
            # What did not start has nothing left to do; what did is waited for: it writes to `out`.
            left = [future for future in futures if not future.cancel()]
            errors = [error for future in left if (error := future.exception())]
        if errors:
            raise errors[0]

    def open(self, path: str, start: int, stop: int) -> tuple[int, int, Directory]:
        """Open a file once it is there with all of bytes [start, stop); return (fd, size, directory).

        Only a name that is not there yet, a stale handle and a short size are waited for; each
        try opens the directories anew from the root's name, which revalidates a client's cache.
        """
        try:
            fd, status, directory = self.try_open(path)
        except OSError as error:
            return self._await(path, start, stop, error)
        self.counts["opens"] += 1
        if status.st_size < stop:
            os.close(fd)
            return self._await(path, start, stop, status.st_size)
        return fd, status.st_size, directory

    def _open_verified(self, path: str, start: int, stop: int) -> tuple[int, int, Directory]:
        """As `open`, with the checksums of all side arrays in bytes [start, stop) compared."""
        fd, size, directory = self.open(path, start, stop)
        try:
            self._compare(fd, path, size, start, stop)
        except BaseException:
            os.close(fd)
            raise
        return fd, size, directory

    def try_open(self, path: str) -> tuple[int, os.stat_result, Directory]:
        """Open a regular file beneath a root: one open relative to its directory, which is kept.

        Raises
        ------
        PathError
            When it is not a regular file, or not beneath a root.
        OSError
            As the system says: not waited for, not named.
        """
        roots = self.roots
        head, _, name = path.rpartition("/")
        place = roots.located.get(head)
        if place is None or name[0] == ".":
            place, name = roots.locate(path)
        directory = roots.kept.get(place) or roots.directory(place, path)
        try:
            fd = os.open(name, _FILE, dir_fd=directory.fd)
        except OSError:
            refuse_link(path, name, directory.fd)
            raise
        try:
            status = os.fstat(fd)
        except BaseException:
            os.close(fd)
            raise
        mode = status.st_mode
        if mode & _FORMAT != stat.S_IFREG:
            os.close(fd)
            raise PathError(
                f"path {path!r} is a {kind_of(mode)}, not a regular file",
                reason="not_regular",
                path=path,
            )
        return fd, status, directory

    def _await(
        self, path: str, start: int, stop: int, failed: OSError | int
    ) -> tuple[int, int, Directory]:
        """Try again until the deadline after a first try that failed, or found a file too short."""
        place, _ = self.roots.locate(path)
        began = time.monotonic()
        pause = _FIRST_PAUSE
        # The kept directory may have lost its name: then once more at once, from the root's.
        at_once = self.roots.forget(place) and not isinstance(failed, int)
        while True:
            if not isinstance(failed, int) and failed.errno not in (errno.ENOENT, errno.ESTALE):
                raise self.refused(path, failed) from None
            if not at_once:
                waited = time.monotonic() - began
                left = self._patience(place) - waited
                if left <= 0:
                    if isinstance(failed, int):
                        raise _truncated(path, stop, failed, waited)
                    raise _missing(self.roots, path, place, waited)
                self.counts["waits"] += 1
                time.sleep(min(pause, left))
                pause = min(pause * 2, _LAST_PAUSE)
            at_once = False
            self.roots.forget(place)
            try:
                fd, status, directory = self.try_open(path)
            except OSError as error:
                failed = error
                continue
            self.counts["opens"] += 1
            if status.st_size >= stop:
                return fd, status.st_size, directory
            os.close(fd)
            failed = status.st_size

    def live_maps(self) -> int:
        """Maps not yet unmapped: those kept, and those only views still hold."""
        return len(self.maps) + sum(ref() is not None for ref in self._dropped)

    def map_hits(self) -> int:
        """How often a map was found in the cache."""
        return self.counts["hits"] + sum(found.hits for found in list(self.maps.values()))

    def close(self) -> None:
        """Drop every map and kept directory; views keep theirs."""
        with self._lock:
            self._closed = True
            for pool in (self._pool, self._prefetcher):
                if pool is not None:
                    pool.shutdown(wait=False, cancel_futures=True)
            self._pool = self._prefetcher = None
            for found in self.maps.values():
                self._drop(found)
            self.maps.clear()
        self.roots.close()

    def prefetch(self, ranges: Sequence[tuple[str, int, int | None, int]]) -> None:
        """Ask for (path, start, bytes, rows) to be brought in, on a thread; bytes None: a table."""
        with self._lock:
            if self._prefetcher is None:
                self._prefetcher = ThreadPoolExecutor(1, "payload-prefetch")
            self._prefetcher.submit(self._prefetch, ranges)

    def _prefetch(self, ranges: Sequence[tuple[str, int, int | None, int]]) -> None:
        scratch = memoryview(bytearray(_BLOCK))
        for path, start, nbytes, rows in ranges:
            # The call that uses the file will meet the same error, where it can be reported.
            with contextlib.suppress(PayloadError, OSError):
                table = 4 * (rows + 1)
                fd, size, directory = self.open(
                    path, start, start + (table if nbytes is None else nbytes)
                )
                try:
                    if nbytes is None:
                        last = os.pread(fd, 4, start + table - 4)
                        nbytes = min(int.from_bytes(last, "little"), size) - start
                    if self._type(directory) in LOCAL_TYPES:
                        os.posix_fadvise(fd, start, max(nbytes, 1), os.POSIX_FADV_WILLNEED)
                        continue
                    # A network client reads ahead only what is read.
                    for at in range(start, start + nbytes, _BLOCK):
                        os.preadv(fd, [scratch[: min(_BLOCK, start + nbytes - at)]], at)
                finally:
                    os.close(fd)

    def _compare(
        self, fd: int, path: str, size: int, start: int, stop: int
    ) -> list[tuple[int, int]]:
        """Compare the checksums of the side arrays in bytes [start, stop); return what was compared.

        A file of upstream's has no checksums; one of ours must have them, for every byte asked for.
        """
        if not self.verify:
            return []
        arrays = self._checksums(fd, path, size)
        if arrays is None:
            return [(0, size)]
        scratch = memoryview(bytearray(min(_BLOCK, size)))
        reached, compared = start, []
        for begin, end, digest in arrays:
            if begin >= stop or end <= start:
                continue
            state = xxhash.xxh3_64()
            for at in range(begin, end, _BLOCK):
                block = scratch[: min(_BLOCK, end - at)]
                self.fill(fd, path, at, block)
                state.update(block)
            if state.hexdigest() != digest:
                raise PayloadCorruptError(
                    f"bytes [{begin}, {end}) of {path!r} have checksum {state.hexdigest()}, the "
                    f"writer's was {digest}: the file was changed, or its pages were lost",
                    reason="checksum",
                    path=path,
                    offset=begin,
                    expected=digest,
                    actual=state.hexdigest(),
                )
            if begin <= reached:
                reached = max(reached, end)
            compared.append((begin, end))
        if reached < stop:
            raise PayloadCorruptError(
                f"bytes [{reached}, {stop}) of {path!r} belong to no side array its header lists",
                reason="header",
                path=path,
                offset=reached,
            )
        return compared

    def _checksums(self, fd: int, path: str, size: int) -> list[tuple[int, int, str]] | None:
        """The side arrays of a file as (start, stop, checksum), ascending; None if it has no header."""
        head = bytearray(min(size, 8))
        self.fill(fd, path, 0, memoryview(head))
        data = bytearray(min(size, 8 + int.from_bytes(head, "little"), 8 + MAX_HEADER))
        self.fill(fd, path, 0, memoryview(data))
        header = decode_header(bytes(data), path, size)
        if header is not None:
            return sorted(checksums(header, path))
        if path.endswith(SUFFIX):
            raise PayloadCorruptError(
                f"file {path!r} has no header of {FORMAT!r}: it was damaged, or saved by another tool",
                reason="header",
                path=path,
            )
        return None

    def _evict(self, keep: str) -> None:
        """Drop maps down to the limit: oldest first, but one used since the last look stays.

        This second chance makes a cache hit one addition, without a lock or a move in a list.
        """
        while len(self.maps) > self._max_maps:
            path, found = self.maps.popitem(last=False)
            if path == keep or found.hits != found.seen:
                found.seen = found.hits
                self.maps[path] = found
            else:
                self._drop(found)

    def _drop(self, found: Map) -> None:
        self.counts["hits"] += found.hits
        self._dropped.append(weakref.ref(found))
        if len(self._dropped) >= 2 * self._dropped_alive + 1024:
            self._dropped = [ref for ref in self._dropped if ref() is not None]
            self._dropped_alive = len(self._dropped)

    def _patience(self, place: Place) -> float:
        if self._wait is not None:
            return self._wait
        try:
            kind = self._type(self.roots.directory((place[0], ""), place[0]))
        except OSError:
            return 0.0  # no root, nothing to wait for
        return 0.0 if kind in LOCAL_TYPES else NETWORK_WAIT

    def _type(self, directory: Directory) -> str:
        kind = self._types.get(directory.device)
        if not kind:
            kind = self._types[directory.device] = filesystem_type(directory.fd)
        return kind

    def refused(self, path: str, error: OSError) -> PayloadError:
        """What the system said, as one of our errors."""
        code = errno.errorcode.get(error.errno or 0, "unknown")
        said = f"path {path!r} cannot be read: {os.strerror(error.errno or 0)} ({code})"
        if error.errno in (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            return PathError(said, reason="path", path=path)
        if error.errno in (errno.EACCES, errno.EPERM):
            return PayloadError(
                f"{said} for user {os.geteuid()}: the writer's mode and the directories above must "
                "let this user read",
                reason="permission",
                path=path,
            )
        if error.errno in (errno.EMFILE, errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return PayloadError(
                f"{said}: {limit} descriptors are allowed and {len(self.maps)} maps are kept; raise "
                "the limit or lower max_maps",
                reason="descriptors",
                path=path,
                expected=limit,
            )
        return PayloadError(said, reason="io", path=path, retryable=error.errno == errno.EINTR)


# A lock held by another thread at fork would never be released in the child.
_all_files: weakref.WeakSet[Files] = weakref.WeakSet()


def _renew_locks() -> None:
    for files in list(_all_files):
        files._lock = threading.Lock()
        files._pool = files._prefetcher = None  # their threads stayed with the parent


os.register_at_fork(after_in_child=_renew_locks)


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return errno.errorcode.get(error.errno or 0, "unknown")
    return "shrank"


def _missing(roots: Roots, path: str, place: Place, waited: float) -> PayloadMissingError:
    root, beneath = place
    directory = f"{root}/{beneath}" if beneath else root
    cure = "not written yet, already swept, or on another node's file system"
    try:
        # Listed by descriptor: by name it could be a link by now.
        with os.scandir(roots.directory(place, path).fd) as entries:
            count = sum(1 for _ in itertools.islice(entries, 1000))
        shows = (
            f"its directory {directory!r} has {count if count < 1000 else '1000 or more'} entries"
        )
    except OSError as error:
        shows = f"its directory {directory!r} does not open: {os.strerror(error.errno or 0)}"
        if not os.path.isdir(root):
            shows = f"the root {root!r} is no directory here"
            cure = "mount it, or map the server's prefix to where it is mounted"
    tried = f"waited {waited:.3f} s" if waited >= 0.001 else "did not wait"
    return PayloadMissingError(
        f"file {path!r} is not there ({tried}; {shows}): {cure}",
        reason="missing",
        path=path,
        retryable=True,
        actual=waited,
    )


def _truncated(path: str, need: int, size: int, waited: float) -> PayloadTruncatedError:
    tried = f"waited {waited:.3f} s" if waited >= 0.001 else "did not wait"
    return PayloadTruncatedError(
        f"file {path!r} has {size} bytes, its segment needs {need} ({tried})",
        path=path,
        retryable=True,
        expected=need,
        actual=size,
    )
