"""Opening, waiting for, mapping and reading payload files. The only room that opens them.

A map is shared by all segments of its file and kept while there is room; eviction drops the
reference and never closes, so a view keeps its map alive. Nothing here touches mapped bytes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import stat
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from . import _refusals
from ._mounts import LOCAL_TYPES, MEMORY_TYPES, Access, access_of, filesystem_type
from ._paths import UNPUBLISHED, Directory, Place, Roots, kind_of, refuse_link
from ._threads import Threads
from ._verify import compare
from .errors import (
    PathError,
    PayloadError,
    PayloadMissingError,
    PayloadTruncatedError,
    ResolverClosedError,
)

Mode = Literal["auto", "map", "copy"]

NETWORK_WAIT = 5.0  # s; a client's caches show a new name within milliseconds once revalidated
MAX_THREADS = 32  # requests a network file system is sent at a time
THREADED_FILE = 65_536  # bytes a local file; below, opening holds the other threads up
THREADED_PART = 4 << 20  # bytes of one local file; below, starting the other thread takes as long

_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.025  # s
_TICK = 0.02  # s; file servers stamp changes with a clock that ticks every 1 to 10 ms
_BLOCK = 1 << 20  # bytes; where a larger pread is no faster
_NOWHERE: Place = ("", "")
_CPUS = len(os.sched_getaffinity(0))
_FORMAT = stat.S_IFMT(0xFFFF)  # the bits of a mode that say what it is
# O_NONBLOCK: opening a FIFO returns at once instead of waiting for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_COUNTED = (
    "opens", "maps", "hits", "bytes_mapped", "bytes_read", "bytes_read_through", "bytes_copied",
    "bytes_prefetched", "reads", "waits",
)  # fmt: skip
_M = TypeVar("_M", bound=mmap.mmap)


def default_max_maps() -> int:
    """How many maps to keep: half of the descriptors, or of the 65,530 maps Linux gives a process.

    Before Python 3.13 each map holds a descriptor.
    """
    if sys.version_info >= (3, 13):
        return 32_768
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 8_192 if soft == resource.RLIM_INFINITY else max(1, min(8_192, soft // 2))


def last_descriptor() -> int:
    """Number from which on descriptors are left for reading and for the rest of the process.

    A new descriptor gets the lowest free number, so the number tells how many are in use. From
    Python 3.13 on maps need none.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if sys.version_info >= (3, 13) or soft == resource.RLIM_INFINITY:
        return sys.maxsize
    return int(soft - max(16, min(64, soft // 4)))


class Deadline:
    """How long one call still waits for files, all of them together; it starts with the first."""

    __slots__ = ("began", "end")

    def __init__(self) -> None:
        self.began = self.end = 0.0

    def left(self, patience: float) -> float:
        """Seconds left of `patience`."""
        now = time.monotonic()
        if not self.began:
            self.began, self.end = now, now + patience
        return self.end - now

    @classmethod
    def over(cls) -> Deadline:
        """A deadline that has passed: nothing is waited for."""
        made = cls()
        made.left(0.0)
        return made

    def passed(self) -> float:
        """Seconds since it passed; 0 while it has not, or has not begun."""
        return max(0.0, time.monotonic() - self.end) if self.began else 0.0

    def waited(self) -> float:
        """Seconds since the call began to wait."""
        return time.monotonic() - self.began if self.began else 0.0


class Map(mmap.mmap):
    """A mapped file, what of it may be viewed, and how often it was found in the cache."""

    __slots__ = ("hits", "identity", "nbytes", "ready", "seen", "whole")

    whole: int  # bytes of the file
    nbytes: int  # bytes that may be viewed without a look: all, or none where ranges are `ready`
    ready: tuple[tuple[int, int], ...]
    identity: tuple[int, int] | None  # device and inode, where ranges are added to `ready`
    hits: int
    seen: int  # hits when eviction last looked


def _map(fd: int, size: int) -> Map:
    if sys.version_info >= (3, 13):
        made = Map(fd, size, mmap.MAP_SHARED, mmap.PROT_READ, trackfd=False)
    else:
        made = Map(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    made.whole = made.nbytes = size
    made.hits = made.seen = 0
    made.identity, made.ready = None, ()
    return made


def _map_private(fd: int, start: int, stop: int) -> mmap.mmap:
    """Map bytes [start, stop) of a file, from the start of their page, copy-on-write."""
    first = start - start % mmap.ALLOCATIONGRANULARITY
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, stop - first, mmap.MAP_PRIVATE, writable, offset=first, trackfd=False)
    return mmap.mmap(fd, stop - first, mmap.MAP_PRIVATE, writable, offset=first)


class _Poller:
    """Lets one thread at a time look whether a directory has new names."""

    __slots__ = ("changed", "listed", "lock", "round", "since")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.round = 0
        self.changed: tuple[int, ...] = ()  # inode and times of the directory
        self.since = 0.0  # when they were first seen so
        self.listed = False  # since then


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
        if wait is not None and not wait >= 0:
            raise ValueError(f"wait is {wait!r}: needs seconds, 0 or more")
        if max_maps is not None and max_maps < 1:
            raise ValueError(f"max_maps is {max_maps}: needs at least 1")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes}: needs at least 1")
        self.roots = Roots(roots)
        self._modes = {
            root: options.get("mode", mode) for root, options in self.roots.options.items()
        }
        for one in (mode, *self._modes.values()):
            if one not in get_args(Mode):
                raise ValueError(f"mode is {one!r}: needs one of {', '.join(get_args(Mode))}")
        self._copied: set[str] = set()  # directories, as named, whose files are read
        self._only_copy = set(self._modes.values()) == {"copy"}
        self.maps: dict[str, Map] = {}
        self.max_bytes = max_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.counts = dict.fromkeys(_COUNTED, 0)
        self.fallbacks: Counter[str] = Counter()
        self.verify = verify
        self.threads = Threads(MAX_THREADS)
        self._wait = wait
        self._max_maps = max_maps or default_max_maps()
        self._last_descriptor = last_descriptor()
        self._few = False  # whether few descriptors were left when last looked
        self._types: dict[int, str] = {}  # by device
        # Of files mapped privately: (device, inode, size, change time), ranges compared or read.
        self._ready: dict[str, tuple[tuple[int, ...], tuple[tuple[int, int], ...]]] = {}
        self._access: dict[str, Access] = {}  # last found, by root
        self._warned: set[tuple[str, str]] = set()
        self._pollers: dict[Place, _Poller] = {}
        self._dropped_alive = 0
        self._dropped: list[weakref.ref[mmap.mmap]] = []  # maps that only views may still hold
        self._lock = threading.Lock()
        self._closed = False
        _all_files.add(self)

    # --- maps

    def map(
        self, path: str, start: int, nbytes: int, deadline: Deadline | None = None
    ) -> Map | None:
        """Return the map of a file that has bytes [start, start + nbytes); None to read it instead.

        Raises
        ------
        PayloadError
            `PathError`, `PayloadMissingError`, `PayloadTruncatedError`, `PayloadCorruptError`, or what
            the system refused.
        """
        stop = start + nbytes
        found = self.maps.get(path)
        if found is not None and (
            stop <= found.nbytes or any(a <= start and stop <= b for a, b in found.ready)
        ):
            found.hits += 1
            return found
        if self._only_copy or (self._copied and path.rpartition("/")[0] in self._copied):
            return None
        made = None
        if found is None and deadline is not None:  # a view, which has none, has tried it
            made = self.map_new(path, stop)
        if made is not None:
            return made
        fd, size, directory = self.open(path, start, stop, deadline)
        try:
            made = self._make_map(path, fd, size, directory, start, stop)
        except (PayloadMissingError, PayloadTruncatedError):
            made = self._make_map_anew(path, start, stop, deadline)
        except (OSError, ValueError) as error:
            if isinstance(error, PayloadError):
                raise
            made = self._once_relieved(directory, error, partial(_map, fd, size))
        finally:
            os.close(fd)
        if made is not None:
            self._keep(path, made)
        return made

    def map_new(self, path: str, stop: int) -> Map | None:
        """As `map` in the common case: a plain name in a known directory whose files are mapped.

        None for all else, illegal names among it; nothing is told, waited for or kept then.
        """
        if type(path) is not str:
            return None
        head, _, name = path.rpartition("/")
        directory = self.roots.kept.get(self.roots.located.get(head, _NOWHERE))
        if (
            directory is None
            or directory.access != "map"
            or self.verify
            or self._few
            or name[:1] in UNPUBLISHED
            or not name.isascii()
            or len(path) > 1000
            or len(self.maps) >= self._max_maps
        ):
            return None
        counts = self.counts
        try:
            fd = os.open(name, _FILE, dir_fd=directory.fd)
        except (OSError, ValueError):
            return None
        counts["opens"] += 1
        try:
            status = os.fstat(fd)
            size = status.st_size
            if status.st_mode & _FORMAT != stat.S_IFREG or size < stop:
                return None
            if not counts["maps"] & 7:
                self._refuse_last(fd)
            made = _map(fd, size)
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)
        # Two threads that map one file at once both do, and one map stays.
        self.maps[path] = made
        counts["maps"] += 1
        counts["bytes_mapped"] += size
        if self._closed:  # meanwhile
            self.drop([path])
            raise ResolverClosedError("resolver was closed meanwhile: make a new one")
        return made

    def map_private(
        self, path: str, start: int, nbytes: int, deadline: Deadline | None = None
    ) -> mmap.mmap | None:
        """Return a copy-on-write map of bytes [start, start + nbytes); None to read them instead.

        It begins at the start of their page. Nobody else gets it, and it is not kept here.

        Raises
        ------
        PayloadError
            As for `map`.
        """
        made: list[mmap.mmap | None] = []
        stop = start + nbytes

        def use(fd: int, size: int, directory: Directory) -> None:
            access = directory.access or self._find_access(directory)
            if access == "copy":
                made.append(None)
                return
            if self.verify or access == "through":
                self._make_ready(path, fd, size, start, stop)
            try:
                self._refuse_last(fd)
                made.append(_map_private(fd, start, stop))
            except (OSError, ValueError) as error:
                again = partial(_map_private, fd, start, stop)
                made.append(self._once_relieved(directory, error, again))

        self._reading(path, start, stop, use, deadline)
        if made[0] is not None:
            with self._lock:
                self.counts["maps"] += 1
                self.counts["bytes_mapped"] += nbytes
                self._note_dropped(made[0])
        return made[0]

    def _make_ready(self, path: str, fd: int, size: int, start: int, stop: int) -> None:
        """Compare or read bytes of a file, unless that was done since it last changed.

        No map is kept that would hold the inode, so that its number and size may be another file's
        by now; the time of its change tells.
        """
        try:
            status = os.fstat(fd)
        except OSError as error:
            raise self.refused(path, error) from None
        now = status.st_dev, status.st_ino, size, status.st_ctime_ns
        found, ranges = self._ready.get(path, (now, ()))
        if found != now:
            ranges = ()
        elif any(a <= start and stop <= b for a, b in ranges):
            return
        if self.verify:
            ranges += tuple(self._compare(fd, path, size, start, stop))
        else:
            self._read_through(fd, path, start, stop)
            ranges += ((start, stop),)
        if len(self._ready) >= 8192:
            self._ready.clear()
        self._ready[path] = now, ranges

    def _make_map_anew(
        self, path: str, start: int, stop: int, deadline: Deadline | None
    ) -> Map | None:
        made: list[Map | None] = []

        def use(fd: int, size: int, directory: Directory) -> None:
            made.append(self._make_map(path, fd, size, directory, start, stop))

        self._reading(path, start, stop, use, deadline)
        return made[0]

    def _make_map(
        self, path: str, fd: int, size: int, directory: Directory, start: int, stop: int
    ) -> Map | None:
        access = directory.access or self._find_access(directory)
        if access == "copy":
            if directory.access:  # not for the moment only
                if len(self._copied) >= 1024:
                    self._copied.clear()
                self._copied.add(path.rpartition("/")[0])
            return None
        ready = None
        if self.verify:
            ready = self._compare(fd, path, size, start, stop)
        elif access == "through":
            self._read_through(fd, path, start, stop)
            ready = [(start, stop)]
        identity = None
        if ready is not None:
            status = os.fstat(fd)
            identity = status.st_dev, status.st_ino
            known = self.maps.get(path)
            if known is not None and known.identity == identity and known.whole == size:
                known.ready += tuple(ready)
                return known
        self._refuse_last(fd)
        made = _map(fd, size)
        if ready is not None:
            made.identity, made.ready, made.nbytes = identity, tuple(ready), 0
        return made

    def _refuse_last(self, fd: int) -> None:
        """Refuse to map when a map would take one of the descriptors that are left for reading.

        The number of a duplicate tells, which is what a map would hold; `fd` itself is closed each
        time and gets the same low number. Asked for every eighth map, for all when few are left.
        """
        if self._last_descriptor < sys.maxsize:
            probe = os.dup(fd)
            os.close(probe)
            self._few = probe >= self._last_descriptor
        if self._few:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _once_relieved(
        self, directory: Directory, error: OSError | ValueError, make: Callable[[], _M]
    ) -> _M | None:
        """After a map that was refused: try once more without the maps nobody views, else read."""
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            self._relieve()
            with contextlib.suppress(OSError, ValueError):
                # Some must be left for the directories that were given up too.
                if len(os.listdir("/proc/self/fd")) + 8 < self._last_descriptor:
                    return make()
        # ValueError: the file shrank since fstat. Reading it says by how much.
        reason = _refusals.name_of(error.errno) if isinstance(error, OSError) else "shrank"
        self.fallbacks[reason] += 1
        if (directory.root, reason) not in self._warned:
            self._warned.add((directory.root, reason))
            import logging  # rarely needed, and dear to import

            logging.getLogger("payload").warning(
                "files beneath %r are read instead of mapped: %s; %d maps are alive, descriptors are "
                "limited to %d and maps by vm.max_map_count",
                directory.root, error, self.live_maps(), resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )  # fmt: skip
        return None

    def _keep(self, path: str, made: Map) -> None:
        with self._lock:
            if self._closed:
                raise ResolverClosedError("resolver was closed meanwhile: make a new one")
            known = self.maps.get(path)
            if known is made:
                return
            if known is not None:
                self._drop(known)
            self.counts["maps"] += 1
            self.counts["bytes_mapped"] += made.whole
            self.maps[path] = made
            if len(self.maps) > self._max_maps:
                self._evict(keep=path)

    def _evict(self, keep: str) -> None:
        """Drop maps down to the limit, and an eighth more so that it is not done for each new file.

        Oldest first, but one used since the last look stays: this second chance makes a cache hit one
        addition, without a lock or a move in a list.
        """
        most = self._max_maps - self._max_maps // 8
        while len(self.maps) > most:
            for path in list(self.maps):
                found = self.maps.pop(path)
                if path == keep or found.hits != found.seen:
                    found.seen = found.hits
                    self.maps[path] = found
                else:
                    self._drop(found)
                if len(self.maps) <= most:
                    break

    def _drop(self, found: Map) -> None:
        self.counts["hits"] += found.hits
        self._note_dropped(found)

    def _note_dropped(self, found: mmap.mmap) -> None:
        self._dropped.append(weakref.ref(found))
        if len(self._dropped) >= 2 * self._dropped_alive + 1024:
            self._dropped = [ref for ref in self._dropped if ref() is not None]
            self._dropped_alive = len(self._dropped)

    def drop(self, paths: Sequence[str]) -> None:
        """Give up the maps of some files."""
        with self._lock:
            for path in paths:
                found = self.maps.pop(path, None)
                if found is not None:
                    self._drop(found)

    def _relieve(self) -> None:
        """Give up every descriptor and map that nobody else holds."""
        self.drop(list(self.maps))
        self.roots.close()

    def live_maps(self) -> int:
        """Maps not yet unmapped: those kept, and those only views still hold."""
        return len(self.maps) + sum(ref() is not None for ref in self._dropped)

    def map_hits(self) -> int:
        """How often a map was found in the cache."""
        return self.counts["hits"] + sum(found.hits for found in list(self.maps.values()))

    # --- what kind of file system

    def access(self) -> dict[str, Access]:
        """How files were viewed so far, by root."""
        return dict(self._access)

    def maps_unread(self, path: str) -> bool:
        """Whether a file can be mapped without being read, but for a checksum that is asked for."""
        place, _ = self.roots.locate(path)
        try:
            directory = self.roots.directory(place, path)
        except OSError:
            return False  # reading it says why
        return (directory.access or self._find_access(directory)) == "map"

    def _find_access(self, directory: Directory) -> Access:
        mode = self._modes[directory.root]
        if mode != "auto":
            access: Access = mode
        else:
            kind = self._type(directory)
            access = access_of(kind)
            if not kind:
                return access  # could not be found out; perhaps the next time
        directory.access = access
        self._access[directory.root] = access
        return access

    def _type(self, directory: Directory) -> str:
        declared = self.roots.options[directory.root].get("type")
        if declared is not None:
            return str(declared)
        kind = self._types.get(directory.device)
        if not kind:
            kind = self._types[directory.device] = filesystem_type(directory.fd)
        return kind

    def _kind(self, place: Place) -> str:
        """Type of the file system of a root, "" if it is not there."""
        try:
            return self._type(self.roots.directory((place[0], ""), place[0]))
        except OSError:
            return ""

    # --- reading

    def is_local(self, path: str) -> bool:
        """Whether a read of this file waits for no server."""
        return self._kind(self.roots.locate(path)[0]) in LOCAL_TYPES

    def helpers(self, files: int, one: str, nbytes: int) -> int:
        """How many threads pay for reading `nbytes` from `files` files, `one` of them.

        Measured: on local file systems a second thread helps from 64 KiB a file on, or where it gets
        4 MiB of one file, as many as there are cores; elsewhere each request waits for the server, and
        up to 32 wait at once.
        """
        if files < 2:
            most = min(nbytes // THREADED_PART, _CPUS, MAX_THREADS)
            return most if most > 1 and self.is_local(one) else 1
        if not self.is_local(one):
            return min(files, MAX_THREADS)
        return min(files, _CPUS, MAX_THREADS) if nbytes >= files * THREADED_FILE else 1

    def fill(self, fd: int, path: str, offset: int, *out: memoryview) -> None:
        """Fill `out`, one buffer after the other, from an open descriptor."""
        wanted = sum(map(len, out))
        self.counts["reads"] += 1
        self.counts["bytes_read"] += wanted
        try:
            if os.preadv(fd, out, offset) == wanted:
                return
            # Linux reads at most 2 GiB at a time; a signal or a shrinking file ends one early.
            for part in out:
                done = 0
                while done < len(part):
                    got = os.preadv(fd, (part[done:],), offset + done)
                    if not got:
                        size = os.fstat(fd).st_size
                        raise _refusals.truncated(path, offset + len(part), size, 0.0, "")
                    done += got
                offset += len(part)
        except OSError as error:
            raise self.refused(path, error) from None

    def read(
        self, path: str, offset: int, *out: memoryview, deadline: Deadline | None = None
    ) -> int:
        """Open a file and fill `out` from `offset` on; return its size in bytes."""

        def use(fd: int, size: int, directory: Directory) -> None:
            if self.verify:
                self._compare(fd, path, size, offset, stop)
            self.fill(fd, path, offset, *out)

        stop = offset + sum(map(len, out))
        return self._reading(path, offset, stop, use, deadline)

    def read_open(
        self, fd: int, path: str, offset: int, *out: memoryview, deadline: Deadline | None = None
    ) -> None:
        """Fill `out` from an open descriptor; if it went stale or short, from the file opened anew."""
        try:
            self.fill(fd, path, offset, *out)
        except (PayloadMissingError, PayloadTruncatedError):
            self.read(path, offset, *out, deadline=deadline)

    def open_read(
        self, path: str, start: int, stop: int, deadline: Deadline | None = None
    ) -> tuple[int, int, Directory]:
        """As `open`, with checksums compared if they are asked for."""
        fd, size, directory = self.open(path, start, stop, deadline)
        if self.verify:
            try:
                self._compare(fd, path, size, start, stop)
            except BaseException:
                os.close(fd)
                raise
        return fd, size, directory

    def _reading(
        self,
        path: str,
        start: int,
        stop: int,
        use: Callable[[int, int, Directory], None],
        deadline: Deadline | None,
    ) -> int:
        """Open a file and use it; once more if it goes stale or short meanwhile, until the deadline."""
        deadline = deadline or Deadline()
        pause = 0.0
        while True:
            fd, size, directory = self.open(path, start, stop, deadline)
            try:
                use(fd, size, directory)
                return size
            except (PayloadMissingError, PayloadTruncatedError):
                place, _ = self.roots.locate(path)
                if pause and deadline.left(self._patience(place)) <= 0:
                    raise
            finally:
                os.close(fd)
            time.sleep(pause)
            pause = min(2 * pause or _FIRST_PAUSE, _LAST_PAUSE)
            self.roots.forget(place)

    def _read_through(self, fd: int, path: str, start: int, stop: int) -> None:
        """Read bytes into nowhere: errors come as errors, and views are served from the cache."""
        scratch = memoryview(bytearray(min(_BLOCK, stop - start)))
        for at in range(start, stop, _BLOCK):
            self.fill(fd, path, at, scratch[: min(_BLOCK, stop - at)])
        self.counts["bytes_read_through"] += stop - start
        try:
            size = os.fstat(fd).st_size
        except OSError as error:
            raise self.refused(path, error) from None
        if size < stop:
            raise _refusals.truncated(path, stop, size, 0.0, "")

    def _compare(
        self, fd: int, path: str, size: int, start: int, stop: int
    ) -> list[tuple[int, int]]:
        return compare(lambda at, out: self.fill(fd, path, at, out), path, size, start, stop)

    def prefetch(self, ranges: Sequence[tuple[str, int, int | None, int]]) -> None:
        """Ask for (path, start, bytes, rows) to be brought in, on a thread; bytes None: a table."""
        self.threads.later(lambda: self._prefetch(ranges))

    def _prefetch(self, ranges: Sequence[tuple[str, int, int | None, int]]) -> None:
        scratch = memoryview(bytearray(_BLOCK))
        over = Deadline.over()  # what is not there yet is not worth fetching yet
        for path, start, nbytes, rows in ranges:
            if self.closed():
                return
            # The call that uses the file will meet the same error, where it can be reported.
            with contextlib.suppress(PayloadError, OSError):
                table = 4 * (rows + 1)
                need = start + (table if nbytes is None else nbytes)
                fd, size, directory = self.open(path, start, need, over)
                try:
                    if self._type(directory) in MEMORY_TYPES:
                        continue
                    if nbytes is None:
                        last = os.pread(fd, 4, start + table - 4)
                        nbytes = min(int.from_bytes(last, "little"), size) - start
                    # Read, not advised: a disk's kernel takes little of a large advice, a network
                    # client none.
                    for at in range(start, start + nbytes, _BLOCK):
                        if self.closed():
                            return
                        os.preadv(fd, [scratch[: min(_BLOCK, start + nbytes - at)]], at)
                    self.counts["bytes_prefetched"] += nbytes
                finally:
                    os.close(fd)

    # --- opening

    def open(
        self, path: str, start: int, stop: int, deadline: Deadline | None = None
    ) -> tuple[int, int, Directory]:
        """Open a file once it is there with all of bytes [start, stop); return (fd, size, directory).

        Only a name that is not there yet, a stale handle and a short size are waited for; each
        try opens the directories anew from the root's name, which revalidates a client's cache.
        """
        try:
            fd, status, directory = self.try_open(path)
        except OSError as error:
            return self._await(path, stop, error, deadline or Deadline())
        self.counts["opens"] += 1
        if status.st_size < stop:
            os.close(fd)
            return self._await(path, stop, status.st_size, deadline or Deadline())
        return fd, status.st_size, directory

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
        if place is None or name[:1] in UNPUBLISHED:
            place, name = roots.locate(path)
        directory = roots.kept.get(place) or roots.directory(place, path)
        try:
            fd = os.open(name, _FILE, dir_fd=directory.fd)
        except OSError as error:
            refuse_link(path, name, directory.fd, error)
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
        self, path: str, stop: int, failed: OSError | int, deadline: Deadline
    ) -> tuple[int, int, Directory]:
        """Try again until the deadline after a first try that failed, or found a file too short."""
        place, _ = self.roots.locate(path)
        pause = _FIRST_PAUSE
        # Once more at once, whatever the deadline: a kept directory may have lost its name, and
        # maps nobody views may hold the descriptors that were missing.
        at_once = True
        while True:
            if not isinstance(failed, int):
                if at_once and failed.errno in (errno.EMFILE, errno.ENFILE):
                    self._relieve()
                elif failed.errno not in (errno.ENOENT, errno.ESTALE):
                    raise self.refused(path, failed) from None
            if at_once:
                at_once = False
                self.roots.forget(place)
            else:
                left = deadline.left(self._patience(place))
                if left <= 0:
                    kind = self._kind(place)
                    if isinstance(failed, int):
                        raise _refusals.truncated(path, stop, failed, deadline.waited(), kind)
                    look = deadline.passed() < 0.1  # of many missing files the first tell enough
                    raise _refusals.missing(
                        self.roots, path, place, deadline.waited(), kind, look=look
                    )
                self._pause(place, min(pause, left), left)
                pause = min(pause * 2, _LAST_PAUSE)
            try:
                fd, status, directory = self.try_open(path)
            except OSError as error:
                failed = error.with_traceback(None)  # which would hold this frame, and it that
                continue
            self.counts["opens"] += 1
            if status.st_size >= stop:
                return fd, status.st_size, directory
            os.close(fd)
            failed = status.st_size

    def _pause(self, place: Place, pause: float, left: float) -> None:
        """Wait, then revalidate a directory; of all threads that wait for its names one does it."""
        if len(self._pollers) >= 1024:
            self._pollers.clear()
        poller = self._pollers.setdefault(place, _Poller())
        seen = poller.round
        if not poller.lock.acquire(timeout=left):
            return
        try:
            if poller.round == seen:
                self.counts["waits"] += 1
                time.sleep(pause)
                self.roots.forget(place)
                self._revalidate(place, poller)
                poller.round += 1
        finally:
            poller.lock.release()

    def _revalidate(self, place: Place, poller: _Poller) -> None:
        """Open a directory anew, and once it has stood still, list it.

        A network client takes a name for missing as long as the directory's times are those of its
        look. A name that came later in the same tick of the server's clock would stay missing for
        good; the listing shows it. One made within that tick would be kept just as long.
        """
        if self._kind(place) in LOCAL_TYPES:
            return
        try:
            directory = self.roots.directory(place, place[0])
            status = os.fstat(directory.fd)
            changed = status.st_ino, status.st_mtime_ns, status.st_ctime_ns
            now = time.monotonic()
            if changed != poller.changed:
                poller.changed, poller.since, poller.listed = changed, now, False
            elif not poller.listed and now - poller.since >= _TICK:
                poller.listed = True
                with os.scandir(directory.fd) as entries:
                    for _ in entries:
                        pass
        except (OSError, PathError):
            pass  # the next try meets it too, and says so

    def _patience(self, place: Place) -> float:
        if self._wait is not None:
            return self._wait
        kind = self._kind(place)
        return 0.0 if not kind or kind in LOCAL_TYPES else NETWORK_WAIT

    def refused(self, path: str, error: OSError) -> PayloadError:
        """What the system said, as one of our errors."""
        return _refusals.refused(path, error, self.live_maps())

    def closed(self) -> bool:
        """Whether the resolver was closed, perhaps by another thread meanwhile."""
        return self._closed

    def close(self) -> None:
        """Drop every map and kept directory; views keep theirs."""
        with self._lock:
            self._closed = True
        self.threads.close()
        self._relieve()


# A lock held by another thread at fork would never be released in the child.
_all_files: weakref.WeakSet[Files] = weakref.WeakSet()


def _renew_locks() -> None:
    for files in list(_all_files):
        files._lock = threading.Lock()
        files._pollers.clear()


os.register_at_fork(after_in_child=_renew_locks)
