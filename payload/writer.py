"""The server side: one file a response, whole or not there."""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import reprlib
import stat
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from ._cast import narrow
from ._gather import Array, bytes_of
from ._paths import Directory, Place, Roots, absolute, why_illegal
from ._threads import Threads
from .dtypes import DTYPES
from .errors import PathError, PayloadWriteError
from .fields import FIELDS
from .format import MAX_HEADER, SUFFIX, encode_header, why_illegal_field
from .ragged import Ragged
from .segment import Segment, check

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

WRITERS = 2  # threads; more would only fight for the same disk
QUEUED = 16  # calls of `awrite` that write or wait at a time
MAX_DEPTH = 8  # directories beneath the root that a payload_dir may name
MAX_TABLE_OFFSET = 2**32 - 1  # bytes; tables are uint32
HASHED_BESIDE = 1 << 20  # bytes from which on another thread makes the checksum during the write


def expert_dtype(num_experts: int) -> np.dtype[Any]:
    """Return the smallest dtype that holds the expert ids ``0 .. num_experts - 1``.

    Parameters
    ----------
    num_experts : int
        From 1 to 65,536.

    Returns
    -------
    numpy.dtype
        uint8 up to 256 experts, else uint16.

    Examples
    --------
    >>> expert_dtype(256).name, expert_dtype(257).name
    ('uint8', 'uint16')
    """
    if not 1 <= num_experts <= 65_536:
        raise ValueError(f"num_experts is {num_experts}: needs 1 to 65536")
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


class _Placed(msgspec.Struct, frozen=True):
    """A side array on its way into a file; `offsets` counts values, for a ragged one."""

    field: str
    pos: int
    data: Array
    offsets: Array | None = None

    @property
    def rows(self) -> int:
        return len(self.data if self.offsets is None else self.offsets[1:])

    @property
    def table_nbytes(self) -> int:
        return 0 if self.offsets is None else 4 * len(self.offsets)

    @property
    def nbytes(self) -> int:
        return self.table_nbytes + self.data.nbytes

    def segment(self, path: str, at: int) -> Segment:
        """Return the segment for the side array at byte `at` of the file `path`."""
        if self.offsets is not None:
            return Segment(self.field, path, at, self.pos, self.rows, "uint32", (), self.nbytes)
        data = self.data
        return Segment(self.field, path, at, self.pos, len(data), data.dtype.name, data.shape[1:])

    def chunks(self, at: int) -> list[memoryview]:
        """Return what to write at byte `at`: the values, or the table of absolute offsets and them."""
        if self.offsets is None:
            return [bytes_of(self.data)]
        table = (at + self.table_nbytes + 4 * self.offsets).astype("<u4")
        return [bytes_of(table), bytes_of(self.data)]


class Writer:
    """Writes the side arrays of a response into one file under a root.

    Parameters
    ----------
    root : path
        Directory shared with the trainers, as this node mounts it. Made if it does not exist.
    prefix : str, optional
        The root as other nodes spell it: what `Segment.file` begins with and what a request's
        ``payload_dir`` must lie beneath. Default: `root`.
    durable : bool
        Also sync the file and its directory to disk before returning. Rollouts can be made again,
        so the default leaves that to the kernel.
    mode : int
        Permission bits of the file, whatever the umask; directories get the search bits besides.
    max_bytes : int, optional
        Largest file to write.
    min_free : int or (int, int)
        Bytes, or bytes and inodes, that must stay free on the file system.

    Notes
    -----
    Thread-safe. `write` blocks until the file is closed: an async server calls it on a thread. The
    values of a `Ragged` are written in the field's dtype; one that would change is refused, except
    that float64 rounds to float32.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     [segment] = Writer(root).write({"routed_experts": (2, np.zeros((4, 2, 3), np.uint8))})
    >>> segment.pos, segment.rows, segment.dtype, segment.shape
    (2, 4, 'uint8', (2, 3))
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        prefix: str | None = None,
        durable: bool = False,
        mode: int = 0o644,
        max_bytes: int | None = None,
        min_free: int | tuple[int, int] = 0,
    ) -> None:
        local = absolute(root)
        self._roots = Roots({local if prefix is None else prefix: local})
        [(self.prefix, options)] = self._roots.prefixes.items()
        self.root = str(options["directory"])
        self._durable = durable
        self._mode = mode
        self._max_bytes = max_bytes
        self._min_free, self._min_inodes = (
            min_free if isinstance(min_free, tuple) else (min_free, 0)
        )
        if self._min_free < 0 or self._min_inodes < 0:
            raise ValueError(f"min_free is {min_free}: needs bytes and inodes, 0 or more")
        self._synced: set[Place] = set()
        self._threads = Threads(WRITERS + 1)
        self._hashers = Threads(WRITERS + 1)  # their own: a writing thread waits for one
        # One for each event loop: a semaphore belongs to the loop it first waited in.
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def write(
        self,
        arrays: Mapping[str, tuple[int, Array | Ragged]],
        payload_dir: str | os.PathLike[str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> list[Segment]:
        """Write side arrays into one new file and return their segments.

        The file is complete and closed before this returns; otherwise nothing is left behind.

        Parameters
        ----------
        arrays : mapping of field to (pos, ndarray or Ragged)
            `pos` is the token position of row 0; axis 0 of an array counts rows.
        payload_dir : path, optional
            Directory for the file: beneath `prefix`, or relative to it. Default ``v0``.
        metadata : mapping of str to str, optional
            Kept in the file's header: weights version, request id, ...

        Returns
        -------
        list of Segment
            One per array, in their order; empty, and no file, for no arrays.

        Raises
        ------
        PathError
            When `payload_dir` leads outside `prefix` or through a symbolic link.
        PayloadWriteError
            When the file system or a limit refuses; it says how many bytes were needed and free.
        ValueError, TypeError
            When an array cannot be a side array.
        """
        if not isinstance(arrays, Mapping):
            raise TypeError(
                f"arrays is {type(arrays).__name__}: needs a mapping of field to (pos, array)"
            )
        if not isinstance(metadata, (Mapping, type(None))):
            raise TypeError(
                f"metadata is {type(metadata).__name__}: needs a mapping of text to text"
            )
        placed = [_place(field, value) for field, value in arrays.items()]
        if not placed:
            return []
        path, place, name = self._new_name(payload_dir)
        plan = _layout(placed, metadata or {})
        segments = [item.segment(path, plan.places[item.field]) for item in placed]
        for segment in segments:
            check(segment)
        self._publish(path, place, name, plan)
        return segments

    async def awrite(
        self,
        arrays: Mapping[str, tuple[int, Array | Ragged]],
        payload_dir: str | os.PathLike[str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> list[Segment]:
        """As `write`, on a thread: the event loop goes on meanwhile.

        At most 2 files are written at a time, and 16 calls write or have their arrays waiting; a
        further call waits for its turn, so a slow
        disk slows its callers and fills no memory. A call that is cancelled takes its file back.

        Returns
        -------
        list of Segment
            See `write`.

        Raises
        ------
        PathError, PayloadWriteError, ValueError, TypeError
            As for `write`.
        """
        import asyncio  # here: a fifth of the time to import payload, and trainers never need it

        loop = asyncio.get_running_loop()
        slots = self._slots.setdefault(loop, asyncio.Semaphore(QUEUED))
        await slots.acquire()
        try:
            future = self._threads.submit(partial(self.write, arrays, payload_dir, metadata))
        except BaseException:
            slots.release()
            raise
        done = asyncio.wrap_future(future, loop=loop)
        # The place in the queue is held until the thread is through, cancelled or not.
        future.add_done_callback(lambda _: _tell(loop, slots.release))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            done.cancel()
            future.add_done_callback(self._take_back)
            raise

    def check(self, payload_dir: str | os.PathLike[str] | None) -> None:
        """Judge a `payload_dir` by its name, as `write` would: before the work of making arrays.

        Raises
        ------
        PathError, TypeError
            When it leads outside `prefix` or is no path. A symbolic link is only seen by `write`.

        Examples
        --------
        >>> Writer("/shared/payload").check("/shared/payload/v3")
        """
        self._new_name(payload_dir)

    def forget(self, segments: Sequence[Segment]) -> None:
        """Remove the file of one `write` whose segments nobody was given; on a thread, not at once."""
        if segments:
            self._threads.submit(partial(self._remove, segments))

    def _take_back(self, future: Future[list[Segment]]) -> None:
        """Remove the file of a call nobody waits for any more."""
        if not future.cancelled() and not future.exception():
            self._remove(future.result())

    def _remove(self, segments: Sequence[Segment]) -> None:
        """Remove the file of one `write`, of which nobody was told."""
        for file in {segment.file for segment in segments}:
            with contextlib.suppress(OSError, PathError):
                place, name = self._roots.locate(file)
                os.unlink(name, dir_fd=self._roots.directory(place, name).fd)

    def _new_name(self, payload_dir: str | os.PathLike[str] | None) -> tuple[str, Place, str]:
        """Choose a name that was never used; return it as on the wire, its place, and the file."""
        if not isinstance(payload_dir, (str, os.PathLike, type(None))):
            raise TypeError(f"payload_dir is {_shown(payload_dir)}: needs a path")
        wanted = "v0" if payload_dir is None else str(os.fspath(payload_dir))
        if not wanted.startswith("/"):
            wanted = f"{self.prefix.rstrip('/')}/{wanted}"
        wanted = wanted.rstrip("/") or "/"
        wrong = why_illegal(wanted) if wanted != "/" else None
        if wrong:
            raise PathError(
                f"payload_dir {_shown(wanted)} {wrong}", reason="illegal_path", path=wanted
            )
        path = f"{wanted.rstrip('/')}/{uuid.uuid4().hex}{SUFFIX}"
        try:
            place, name = self._roots.locate(path)
        except PathError:
            raise PathError(
                f"payload_dir {_shown(wanted)} is outside the writer's root: it must lie beneath "
                f"{self.prefix!r}",
                reason="outside_roots",
                path=wanted,
            ) from None
        depth = len(place[1].split("/")) if place[1] else 0
        if depth > MAX_DEPTH:  # a tower of directories stops those who walk it
            raise PathError(
                f"payload_dir {_shown(wanted)} is {depth} directories beneath {self.prefix!r}: needs at "
                f"most {MAX_DEPTH}",
                reason="depth",
                path=wanted,
                expected=MAX_DEPTH,
                actual=depth,
            )
        return path, place, name

    def _publish(self, path: str, place: Place, name: str, plan: _Plan) -> None:
        needed = plan.nbytes
        if self._max_bytes is not None and needed > self._max_bytes:
            raise PayloadWriteError(
                f"file {path!r} needs {needed} bytes, the writer's max_bytes is {self._max_bytes}: raise it, "
                "or send this response inline",
                reason="max_bytes",
                path=path,
                expected=self._max_bytes,
                actual=needed,
            )
        directory = None
        try:
            # Refused before anything is made: a full file system is left as it is.
            directory = self._directory((place[0], ""), path)
            self._refuse_full(path, needed, directory)
            directory = self._directory(place, path)
            self._write_and_rename(directory, place, path, name, plan)
        except OSError as error:
            if isinstance(error, PayloadWriteError):
                raise
            raise self._failed(path, needed, directory, error) from None

    def _directory(self, place: Place, path: str) -> Directory:
        """Open the directory for a new file; made if missing, opened anew if its name was moved."""
        mode = self._directory_mode()
        for _ in range(2):
            try:
                found = self._roots.directory(place, path, make=mode)
                # The root may have been wiped or moved away under the descriptor that is kept.
                named = os.stat("/".join(filter(None, place)), follow_symlinks=not place[1])
                kept = os.fstat(found.fd)
                if (named.st_dev, named.st_ino) == (kept.st_dev, kept.st_ino):
                    return found
            except FileNotFoundError:
                self._make_root(mode)
            self._roots.forget(place)
        return self._roots.directory(place, path, make=mode)

    def _make_root(self, mode: int) -> None:
        missing, above = [], self.root
        while not os.path.lexists(above):
            missing.append(above)
            above = os.path.dirname(above)
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another writer was faster
                os.mkdir(directory)
                os.chmod(directory, mode)  # past the umask: trainers run as other users

    def _directory_mode(self) -> int:
        return self._mode | (self._mode & 0o444) >> 2 | stat.S_IRWXU

    def _sync_above(self, place: Place, path: str) -> None:
        """Sync the directories up to the root, once: any of them may be new."""
        root, beneath = place
        while beneath and (root, beneath) not in self._synced:
            self._synced.add((root, beneath))
            beneath = beneath.rpartition("/")[0]
            os.fsync(self._roots.directory((root, beneath), path).fd)

    def _write_and_rename(
        self, directory: Directory, place: Place, path: str, name: str, plan: _Plan
    ) -> None:
        temporary = f".{name}.{os.uname().nodename[:64]}.{os.getpid()}.{os.urandom(4).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=directory.fd)
        left = temporary
        try:
            try:
                _write(fd, plan, self._hashers)
                os.fchmod(fd, self._mode)
                if self._durable:
                    os.fsync(fd)
            finally:
                os.close(fd)  # NFS reports a full quota here
            os.rename(temporary, name, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
            left = name
            if self._durable:
                os.fsync(directory.fd)
                self._sync_above(place, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(left, dir_fd=directory.fd)
            raise

    def _refuse_full(self, path: str, needed: int, directory: Directory) -> None:
        room = os.fstatvfs(directory.fd)
        if room.f_files and room.f_favail < 1 + self._min_inodes:
            raise PayloadWriteError(
                f"file {path!r} needs an inode, {room.f_favail} are free beneath {self.root!r} while "
                f"{self._min_inodes} must stay free: remove old versions",
                reason="full",
                retryable=True,
                path=path,
                expected=1 + self._min_inodes,
                actual=room.f_favail,
                errno=errno.ENOSPC,
            )
        free = room.f_bavail * room.f_frsize
        if room.f_blocks and free < needed + self._min_free:
            keeping = f" while {self._min_free} must stay free" if self._min_free else ""
            raise PayloadWriteError(
                f"payload needs {needed} bytes, {free} are free beneath {self.root!r}{keeping}: "
                "remove old versions or enlarge the file system",
                reason="full",
                retryable=True,
                path=path,
                expected=needed + self._min_free,
                actual=free,
                errno=errno.ENOSPC,
            )

    def _failed(
        self, path: str, needed: int, directory: Directory | None, error: OSError
    ) -> PayloadWriteError:
        free: int | None = None
        room = f" beneath {self.root!r}"
        if directory is not None:
            with contextlib.suppress(OSError):  # what failed is worth more than the numbers
                status = os.fstatvfs(directory.fd)
                free = status.f_bavail * status.f_frsize
                inodes = f" ({status.f_favail} inodes)" if status.f_files else ""
                room = f"; needed {needed} bytes, {free} are free{room}{inodes}"
        code = errno.errorcode.get(error.errno or 0, "unknown")
        return PayloadWriteError(
            f"file {path!r} was not written: {os.strerror(error.errno or 0)} ({code}){room}",
            reason="write",
            path=path,
            expected=needed,
            actual=free,
            errno=error.errno,
            retryable=error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.ESTALE),
        )


def _place(field: str, value: Any) -> _Placed:
    if not isinstance(field, str):
        raise TypeError(f"field is {field!r}: needs a name")
    wrong = why_illegal_field(field)
    if wrong:
        raise ValueError(f"field {field!r} {wrong}")
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"field {field!r} is {type(value).__name__}: needs (pos, array)")
    pos, data = value
    try:
        pos = operator.index(pos)
    except TypeError:
        raise TypeError(f"field {field!r} has pos {pos!r}: needs an integer") from None
    if pos < 0:
        raise ValueError(f"field {field!r} has pos {pos}: needs a token position, 0 or more")
    known = FIELDS.get(field)
    if isinstance(data, Ragged):
        if known is None or not known.ragged:
            raise TypeError(f"field {field!r} is Ragged: only fields known as ragged can be")
        values = np.asarray(narrow(data.values, known.dtype or "int32"), order="C")
        return _Placed(field, pos, values, data.offsets)
    if not isinstance(data, np.ndarray) or isinstance(data, np.ma.MaskedArray):
        raise TypeError(f"field {field!r} is {type(data).__name__}: needs a numpy array or Ragged")
    if data.dtype.name not in DTYPES:
        raise TypeError(f"field {field!r} has dtype {data.dtype}: needs one of {', '.join(DTYPES)}")
    if not data.ndim:
        raise ValueError(f"field {field!r} has no axis: needs one that counts rows")
    dtype, shape = data.dtype.name, data.shape[1:]
    if known is not None and known.ragged and len(shape) != 1:
        raise ValueError(f"field {field!r} is ragged: needs Ragged, or padded [rows, width]")
    if (dtype, shape) == ("uint32", ()):
        raise ValueError(
            f"field {field!r} has uint32 numbers for rows: a reader takes that for a table"
        )
    # Little-endian and C order are what the format means by a dtype and a shape.
    return _Placed(field, pos, np.asarray(data, data.dtype.newbyteorder("<"), order="C"))


class _Plan(msgspec.Struct, frozen=True):
    """Where everything of a file goes; checksums are made while it is written."""

    ordered: list[_Placed]
    places: dict[str, int]
    tensors: dict[str, tuple[str, tuple[int, ...], int]]
    notes: dict[str, str]
    nbytes: int


def _layout(placed: list[_Placed], metadata: Mapping[str, str]) -> _Plan:
    """Plan a file, header first, refusing what would not fit its format."""
    # Falling item size aligns every element without a gap, which safetensors forbids; tables come
    # early, where their 4 GiB limit is not met.
    ordered = sorted(placed, key=lambda item: (-item.data.itemsize, item.offsets is None))
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    notes: dict[str, str] = {}
    for item in ordered:
        name = item.field
        if item.offsets is not None:
            tensors[f"{name}.offsets"] = ("uint32", item.offsets.shape, item.table_nbytes)
            name = f"{name}.values"
        tensors[name] = (item.data.dtype.name, item.data.shape, item.data.nbytes)
        notes[f"{item.field}.pos"] = str(item.pos)
        notes[f"{item.field}.xxh3_64"] = "0" * 16  # as long as what will stand there
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata {key!r} is {type(value).__name__}: needs text")
        if key == "format" or key.endswith((".pos", ".xxh3_64")):
            raise ValueError(f"metadata {key!r} is a key the file format uses itself")
    notes |= metadata
    at = len(encode_header(tensors, notes))
    if at > MAX_HEADER:
        raise ValueError(f"metadata makes a header of {at} bytes: at most {MAX_HEADER} are allowed")
    places: dict[str, int] = {}
    for item in ordered:
        places[item.field] = at
        at += item.nbytes
        if item.offsets is not None and at > MAX_TABLE_OFFSET:
            raise PayloadWriteError(
                f"field {item.field!r} would end at byte {at}: tables hold offsets up to "
                f"{MAX_TABLE_OFFSET}; write it into a file of its own",
                reason="table_limit",
                field=item.field,
                expected=MAX_TABLE_OFFSET,
                actual=at,
            )
    return _Plan(ordered, places, tensors, notes, at)


def _write(fd: int, plan: _Plan, hashers: Threads) -> None:
    """Write a planned file: the side arrays, then, with their checksums, the header before them."""
    digests: dict[str, Future[str]] = {}
    notes = dict(plan.notes)
    for item in plan.ordered:
        at = plan.places[item.field]
        parts = item.chunks(at)
        if item.nbytes >= HASHED_BESIDE:
            digests[item.field] = hashers.submit(partial(_digest, parts))
        else:
            notes[f"{item.field}.xxh3_64"] = _digest(parts)
        for part in parts:
            _write_all(fd, part, at)
            at += len(part)
    for field, digest in digests.items():
        notes[f"{field}.xxh3_64"] = digest.result()
    _write_all(fd, memoryview(encode_header(plan.tensors, notes)), 0)


def _digest(parts: list[memoryview]) -> str:
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def _write_all(fd: int, block: memoryview, at: int) -> None:
    """Write every byte; a full file system shortens a write before it fails one."""
    done = os.pwrite(fd, block, at)
    while done < len(block):
        done += os.pwrite(fd, block[done:], at + done)


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    """Call something in an event loop, from a thread, unless the loop has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what)


def _shown(value: object) -> str:
    """Return what a client sent, as far as an error needs it."""
    if not isinstance(value, str):
        return reprlib.repr(value)
    return repr(value) if len(value) <= 300 else f"{value[:300]!r}... ({len(value):,} characters)"
