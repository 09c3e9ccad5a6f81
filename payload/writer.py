"""The server side: one file a response, whole or not there."""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import secrets
import socket
import stat
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import xxhash

from ._cast import narrow
from ._gather import Array, bytes_of
from ._paths import Directory, Place, Roots, absolute, why_illegal
from .dtypes import DTYPES
from .errors import PathError, PayloadWriteError
from .fields import FIELDS
from .format import MAX_HEADER, SUFFIX, encode_header, why_illegal_field
from .ragged import Ragged
from .segment import Segment, check

MAX_TABLE_OFFSET = 2**32 - 1  # bytes; tables are uint32
_WRITEV_BYTES = 1 << 30  # Linux takes at most 2 GiB a call; less keeps the loop simple


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
    min_free : int
        Bytes that must stay free on the file system.

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
        min_free: int = 0,
    ) -> None:
        local = absolute(root)
        self._roots = Roots({local if prefix is None else prefix: local})
        [(self.prefix, options)] = self._roots.prefixes.items()
        self.root = str(options["directory"])
        self._durable = durable
        self._mode = mode
        self._max_bytes = max_bytes
        self._min_free = min_free

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
        placed = [_place(field, value) for field, value in arrays.items()]
        if not placed:
            return []
        path, place, name = self._new_name(payload_dir)
        chunks, places = _layout(placed, metadata or {})
        segments = [item.segment(path, places[item.field]) for item in placed]
        for segment in segments:
            check(segment)
        self._publish(path, place, name, chunks)
        return segments

    def _new_name(self, payload_dir: str | os.PathLike[str] | None) -> tuple[str, Place, str]:
        """Choose a name that was never used; return it as on the wire, its place, and the file."""
        if not isinstance(payload_dir, (str, os.PathLike, type(None))):
            raise TypeError(f"payload_dir is {payload_dir!r}: needs a path")
        wanted = "v0" if payload_dir is None else str(os.fspath(payload_dir))
        if not wanted.startswith("/"):
            wanted = f"{self.prefix.rstrip('/')}/{wanted}"
        wanted = wanted.rstrip("/") or "/"
        wrong = why_illegal(wanted) if wanted != "/" else None
        if wrong:
            raise PathError(f"payload_dir {wanted!r} {wrong}", reason="illegal_path", path=wanted)
        path = f"{wanted.rstrip('/')}/{uuid.uuid4().hex}{SUFFIX}"
        try:
            return path, *self._roots.locate(path)
        except PathError:
            raise PathError(
                f"payload_dir {wanted!r} is outside the writer's root: it must lie beneath {self.prefix!r}",
                reason="outside_roots",
                path=wanted,
            ) from None

    def _publish(self, path: str, place: Place, name: str, chunks: list[memoryview]) -> None:
        needed = sum(len(chunk) for chunk in chunks)
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
            directory = self._directory(place, path)
            self._refuse_full(path, needed, directory)
            self._write_and_rename(directory.fd, name, chunks)
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
        if not os.path.isdir(self.root):
            os.makedirs(self.root, exist_ok=True)
            os.chmod(self.root, mode)  # past the umask: trainers run as other users

    def _directory_mode(self) -> int:
        return self._mode | (self._mode & 0o444) >> 2 | stat.S_IRWXU

    def _write_and_rename(self, directory: int, name: str, chunks: list[memoryview]) -> None:
        temporary = f".{name}.{socket.gethostname()[:64]}.{os.getpid()}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=directory)
        left = temporary
        try:
            try:
                _write_all(fd, chunks)
                os.fchmod(fd, self._mode)
                if self._durable:
                    os.fsync(fd)
            finally:
                os.close(fd)  # NFS reports a full quota here
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            left = name
            if self._durable:
                os.fsync(directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(left, dir_fd=directory)
            raise

    def _refuse_full(self, path: str, needed: int, directory: Directory) -> None:
        room = os.fstatvfs(directory.fd)
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
        if directory is not None:
            status = os.fstatvfs(directory.fd)
            free = status.f_bavail * status.f_frsize
        code = errno.errorcode.get(error.errno or 0, "unknown")
        room = f" beneath {self.root!r}"
        if free is not None:
            room = f"; needed {needed} bytes, {free} are free{room}"
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


def _layout(
    placed: list[_Placed], metadata: Mapping[str, str]
) -> tuple[list[memoryview], dict[str, int]]:
    """Return what to write, header first, and where in the file each side array begins."""
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
        notes[f"{item.field}.xxh3_64"] = "0" * 16
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"metadata {key!r} is {type(value).__name__}: needs text")
        if key == "format" or key.endswith((".pos", ".xxh3_64")):
            raise ValueError(f"metadata {key!r} is a key the file format uses itself")
    # Tables hold absolute offsets, so the header's size comes before their checksums.
    at = len(encode_header(tensors, notes | dict(metadata)))
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
    chunks: list[memoryview] = []
    for item in ordered:
        parts = item.chunks(places[item.field])
        state = xxhash.xxh3_64()
        for part in parts:
            state.update(part)
        notes[f"{item.field}.xxh3_64"] = state.hexdigest()
        chunks += parts
    header = encode_header(tensors, notes | dict(metadata))
    return [memoryview(header), *chunks], places


def _write_all(fd: int, chunks: list[memoryview]) -> None:
    """Write every byte; a full file system shortens a write before it fails one."""
    left = [
        chunk[at : at + _WRITEV_BYTES]
        for chunk in chunks
        for at in range(0, len(chunk), _WRITEV_BYTES)
    ]
    while left:
        batch, size = [], 0
        for chunk in left[:1024]:
            if size + len(chunk) > _WRITEV_BYTES:
                break
            batch.append(chunk)
            size += len(chunk)
        done = os.writev(fd, batch)
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if done:
            left[0] = left[0][done:]
