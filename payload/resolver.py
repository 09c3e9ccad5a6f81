"""The trainer side: segments in, arrays out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, SupportsIndex

import msgspec
import numpy as np

from . import _csr, _gather, _plan, _rows
from ._cast import NUMPY, New, allocate, common_dtype, exact_fill, known_dtype
from ._files import Deadline, Files, Mode
from ._gather import Array, bytes_of
from ._naming import GRACE, Naming
from .errors import PathError, PayloadError, ResolverClosedError, SegmentError, telling_of_all
from .fields import FIELDS, Field
from .ragged import Ragged
from .segment import Segment, decode_segments, is_legal, uncovered, window

_ndarray = np.ndarray  # a global is one look-up less than an attribute, in the path of every view


class Stats(msgspec.Struct, frozen=True):
    """Counters of one resolver since it was made, in this process.

    Attributes
    ----------
    opens : int
        Files opened.
    maps, map_hits, live_maps : int
        Files mapped; times a map was found kept; maps now alive, views of evicted ones included.
    bytes_mapped, bytes_read_through, bytes_read, bytes_copied : int
        Size of what was mapped; bytes read before they were viewed through a map; all bytes read,
        those, tables and checksums included; bytes of rows copied into arrays.
    reads : int
        Read calls.
    bytes_prefetched : int
        Bytes that `prefetch` has brought in.
    waits : int
        Times a directory was looked into again for files not there yet or too short.
    fallbacks : dict of str to int
        Files read because they could not be mapped, by reason.
    access : dict of str to {"map", "through", "copy"}
        How files were viewed so far, by root.
    """

    opens: int
    maps: int
    map_hits: int
    live_maps: int
    bytes_mapped: int
    bytes_read_through: int
    bytes_read: int
    bytes_copied: int
    reads: int
    bytes_prefetched: int
    waits: int
    fallbacks: dict[str, int]
    access: dict[str, str]


class _Rows(NamedTuple):
    """How to view the rows of segments with one (field, dtype, shape)."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    itemsize: int


class _Place(NamedTuple):
    """Where the rows of a window go: into `out`, else into what `new` makes, or they are viewed."""

    out: Array | None = None
    new: New = np.empty
    view: Literal["shared", "private", "never"] = "never"


_VIEWED = _Place(view="shared")


class Resolver:
    """Gives the arrays that payload segments stand for.

    Parameters
    ----------
    roots : path, sequence of paths, or mapping of prefix to path or options
        Where payload files may lie; nothing outside is ever opened. With a mapping the keys are
        the prefixes as the server writes them, the values the directories here, or mappings with
        ``"directory"`` and, if wanted, ``"mode"`` and ``"type"`` (the file system type to go by) for
        this root alone.
    mode : {"auto", "map", "copy"}
        ``"auto"`` maps files on local file systems; on NFSv4, Lustre, CephFS, GPFS, BeeGFS and
        WekaFS it reads what is viewed through once and then maps; on all others it reads into
        memory. ``"map"`` maps and ``"copy"`` reads everywhere.
    wait : float, optional
        Seconds one call waits for files not there yet or too short, all together. Default 0 on
        local file systems, 5 on others.
    verify : {"size", "checksum"}
        ``"size"`` checks file sizes and tables; ``"checksum"`` also the checksum of each side
        array, at its first use per map. Files without one (upstream's) are read as they are.
    fields : mapping of str to Field
        What is known of each side array.
    max_maps : int, optional
        Maps kept open. Default: half of the descriptors the process may open, at most 8,192; on
        Python 3.13, where a map needs none, 32,768.
    max_bytes : int, optional
        Largest array to make. Default: the memory of this machine.

    Notes
    -----
    Thread-safe. Pickles as its parameters, and reopens files in the process it arrives in.

    Examples
    --------
    >>> import tempfile
    >>> from payload import Writer
    >>> with tempfile.TemporaryDirectory() as root:
    ...     rows = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    ...     segments = Writer(root).write({"routed_experts": (2, rows)})
    ...     with Resolver(root) as resolver:
    ...         view = resolver.view(segments[0])
    >>> view.shape, view.flags.writeable, bool((view == rows).all())
    ((4, 2, 3), False, True)
    """

    def __init__(
        self,
        roots: Any,
        *,
        mode: Mode = "auto",
        wait: float | None = None,
        verify: Literal["size", "checksum"] = "size",
        fields: Mapping[str, Field] = FIELDS,
        max_maps: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        if verify not in ("size", "checksum"):
            raise ValueError(f"verify is {verify!r}: needs 'size' or 'checksum'")
        for name, field in fields.items():
            if field.dtype is not None and field.dtype not in NUMPY:
                raise ValueError(
                    f"field {name!r} has dtype {field.dtype!r}: needs one of {', '.join(NUMPY)}"
                )
            if field.ragged and NUMPY[field.dtype or "int32"].itemsize != 4:
                raise ValueError(
                    f"field {name!r} is ragged with dtype {field.dtype}: needs 4 bytes"
                )
        self._parameters: dict[str, Any] = {
            "roots": None,
            "mode": mode,
            "wait": wait,
            "verify": verify,
            "fields": dict(fields),
            "max_maps": max_maps,
            "max_bytes": max_bytes,
        }
        self._fields = dict(fields)
        self._files = Files(roots, mode, wait, verify == "checksum", max_maps, max_bytes)
        self._parameters["roots"] = dict(self._files.roots.prefixes)  # absolute: it pickles along
        self._maps = self._files.maps
        self._rows: dict[tuple[str, str, tuple[int, ...]], _Rows] = {}
        self._checked: tuple[Segment, ...] = ()
        self._closed = False

    def view(self, segment: Segment) -> Array:
        """Return the rows of one segment of a fixed side array.

        Parameters
        ----------
        segment : Segment

        Returns
        -------
        ndarray
            ``[rows, *shape]`` in the segment's dtype, read-only. On local file systems it shares
            the file's pages: nothing is read until it is touched. It stays valid after the
            resolver is closed and the file deleted, and keeps the whole map alive: take
            ``.copy()`` of what is kept past the step. An element that is not aligned, and a file
            that is not mapped, give an aligned copy, counted in `stats`.

        Raises
        ------
        SegmentError
            When the segment is illegal, or ragged (use `ragged`).
        PayloadMissingError, PayloadTruncatedError
            When the file is not there or too short.
        PayloadError
            When the file system refuses.

        Examples
        --------
        See `Resolver`.
        """
        # What is legal and mapped returns here; every other case, and every error, is in _view.
        try:
            found = self._maps.get(segment.file)
            known = self._rows.get((segment.field, segment.dtype, segment.shape))
            offset = segment.offset
            pos = segment.pos
            rows = segment.rows
            length = segment.length
        except (TypeError, AttributeError):  # not hashable, not a segment
            return self._view(segment)
        if known is None:
            return self._view(segment)
        dtype, shape, row_nbytes, itemsize = known
        if (
            type(offset) is type(pos) is type(rows) is int
            and (length is None or (type(length) is int and length == rows * row_nbytes))
            and not (offset | pos | rows | pos + rows) >> 63
            and rows > 0
            and not offset % itemsize
        ):
            for size in segment.shape:
                if type(size) is not int:  # True and 1.0 equal 1 as a key
                    return self._view(segment)
            if found is None:
                if type(segment) is not Segment or type(segment.field) is not str:
                    return self._view(segment)
                found = self._files.map_new(segment.file, offset + rows * row_nbytes)
                if found is not None:
                    return _ndarray((rows, *shape), dtype, found, offset)
            elif offset + rows * row_nbytes <= found.nbytes:
                found.hits += 1
                return _ndarray((rows, *shape), dtype, found, offset)
        return self._view(segment)

    def _view(
        self, segment: Segment, deadline: Deadline | None = None, private: bool = False
    ) -> Array:
        """As `view`; a private one has a copy-on-write map of its own, and is writable.

        With a deadline it is part of a call, which has checked the segment.
        """
        self._check_open()
        if deadline is None and not is_legal(segment):
            [segment] = decode_segments([segment])
        known = self._rows.get((segment.field, segment.dtype, segment.shape)) or self._learn(
            segment
        )
        shape = (segment.rows, *known.shape)
        offset = segment.offset
        nbytes = segment.rows * known.nbytes
        if not nbytes:
            empty = np.empty(shape, known.dtype)
            return empty if private else _read_only(empty)
        try:
            rows = self._mapped(segment, known, deadline, private)
            if rows is not None:
                return rows
            out = allocate(shape, known.dtype, self._files.max_bytes, f"field {segment.field!r}")
            reads = [(segment.file, offset, nbytes, 0)]
            _gather.run(self._files, reads, bytes_of(out), nbytes, deadline=deadline)
        except PayloadError as error:
            error.field = segment.field
            error.path = segment.file
            error.offset = offset if error.offset is None else error.offset
            raise
        self._files.counts["bytes_copied"] += nbytes
        return out if private else _read_only(out)

    def _mapped(
        self, segment: Segment, known: _Rows, deadline: Deadline | None, private: bool
    ) -> Array | None:
        """The rows of a segment that has some, in a map; None where they must be read."""
        offset = segment.offset
        shape = (segment.rows, *known.shape)
        nbytes = segment.rows * known.nbytes
        if offset % known.itemsize:
            return None
        if private:
            mine = self._files.map_private(segment.file, offset, nbytes, deadline)
            if mine is None:
                return None
            return _ndarray(shape, known.dtype, mine, len(mine) - nbytes)
        found = self._files.map(segment.file, offset, nbytes, deadline)
        return None if found is None else _ndarray(shape, known.dtype, found, offset)

    def _learn(self, segment: Segment) -> _Rows:
        """Note how to view segments like this checked one; a payload has one or two kinds."""
        if _plan.layout_of(segment, _plan.field_of(segment.field, self._fields)) == "csr":
            raise SegmentError(
                f"segment of {segment.field!r} is ragged and has no view: use Resolver.ragged",
                reason="ragged",
                field=segment.field,
                path=segment.file,
            )
        dtype = NUMPY[segment.dtype]
        known = _Rows(dtype, segment.shape, segment.row_nbytes, dtype.itemsize)
        if known.nbytes:  # rows of no bytes are not for the short cut in view()
            if len(self._rows) >= 1024:
                self._rows.clear()
            self._rows[segment.field, segment.dtype, segment.shape] = known
        return known

    def resolve(self, payload: Any) -> dict[str, list[Array | Ragged]]:
        """Return a view of every segment of a payload, grouped by field.

        Parameters
        ----------
        payload : object
            What `decode_segments` takes: the ``payload`` of a response as it came.

        Returns
        -------
        dict of str to list
            One ndarray per segment in order (see `view`), or a `Ragged` for a ragged field.

        Raises
        ------
        PayloadError
            As for `view`; segments are all checked before any file is opened.
        """
        self._check_open()
        segments = self._decode(payload)
        layouts = []
        new: dict[str, list[int]] = {}
        for index, segment in enumerate(segments):
            if segment.file not in self._maps:
                new.setdefault(segment.file, []).append(index)
            try:
                layouts.append(
                    _plan.layout_of(segment, _plan.field_of(segment.field, self._fields))
                )
            except SegmentError as error:
                error.index = index
                raise
        deadline = Deadline()
        made: dict[int, Any] = {}
        failed: dict[int, PayloadError] = {}

        def make(indexes: Sequence[int]) -> None:
            for index in indexes:
                if failed and deadline.passed() > GRACE:
                    return
                try:
                    made[index] = self._one(segments[index], layouts[index], deadline)
                except PayloadError as error:
                    error.index, error.field = index, segments[index].field
                    failed[index] = error.with_traceback(None)  # which holds this frame

        self._make_all(segments, new, make)
        resolved: dict[str, list[Any]] = {}
        for index, segment in enumerate(segments):
            if index in made:
                resolved.setdefault(segment.field, []).append(made[index])
        errors = [failed[index] for index in sorted(failed)]
        unseen = len(segments) - len(made) - len(errors)
        if errors:
            # Nothing this call mapped stays, not even through the traceback.
            resolved.clear()
            made.clear()
            failed.clear()
            self._files.drop(list(new))
            try:
                raise telling_of_all(errors[0], errors[1:], len(segments), unseen) from None
            finally:
                del errors  # it holds the error, and that this frame
        return resolved

    def _make_all(
        self,
        segments: Sequence[Segment],
        new: Mapping[str, Sequence[int]],
        make: Callable[[Sequence[int]], None],
    ) -> None:
        """Make the arrays of all segments: in order, or, where `new` files wait for a server, on threads."""
        # Asked as for files of no bytes: local ones are mapped, which a second thread only slows.
        threads = self._files.helpers(len(new), segments[0].file, 0) if len(new) > 1 else 1
        if threads < 2:
            make(range(len(segments)))
            return
        tasks = [partial(make, indexes) for indexes in new.values()]
        tasks.append(partial(make, [i for i, one in enumerate(segments) if one.file not in new]))
        _gather.spread(self._files, tasks, threads)

    def _one(
        self, segment: Segment, layout: _plan.Layout, deadline: Deadline
    ) -> Array | Ragged | None:
        if layout == "csr":
            window = segment.pos, segment.end
            return self._ragged([segment], segment.field, *window, "any", None, deadline)
        found = self._maps.get(segment.file)
        if found is None or not found.nbytes:
            return self._view(segment, deadline)
        return self.view(segment)

    def window(
        self,
        segments: Any,
        field: str,
        lo: SupportsIndex,
        hi: SupportsIndex,
        *,
        fill: float | Literal["field"] | None = None,
        holes: _plan.Holes | None = None,
        extent: tuple[int, int] | None = None,
        dtype: Any = None,
        layers: Iterable[SupportsIndex] | None = None,
        num_layers: SupportsIndex | None = None,
        out: Array | None = None,
    ) -> Array | None:
        """Return the rows of the token positions [lo, hi).

        Parameters
        ----------
        segments : list of Segment, or what `decode_segments` takes
            A later segment resets the rows it covers and wins. Other fields are ignored.
        field : str
            Side array to read.
        lo, hi : int
            Window of token positions.
        fill : number or "field", optional
            Value of uncovered positions, and of what rows narrower than the widest one lack; a
            number the dtype can hold, or the field table's. Ragged fields are padded with the
            table's unless it is given.
        holes : {"none", "any"} or list of (lo, hi), optional
            Which positions may be uncovered. Default ``"none"``; ``"any"`` for sparse fields.
        extent : (lo, hi), optional
            Positions judged for holes; default the window. With the micro batch as extent, every
            rank comes to the same verdict.
        dtype : dtype or "field", optional
            Dtype of the result. Default: the widest of the segments, zero-row ones and those
            outside the window included, so that ranks agree; for ragged fields the table's.
            ``"field"`` is the table's. A value that would change is refused.
        layers : list of int, optional
            Layers to return, in this order, by their numbers in the model, dense layers included:
            row ``[layers, ...]`` becomes ``[len(layers), ...]``. Needs `num_layers`. Rows that are
            gathered are read whole, which is faster, unless more than 32 KiB a row, on network
            roots 1 MiB, is left out for each run of neighbouring layers: then these alone are read.
        num_layers : int, optional
            Layers of the model, dense ones included. Every segment must have a slot for each of
            them, at axis 0 of its rows, which have two axes or more: an array of the MoE layers
            alone, or with those of a draft model, is refused, as its slots are other layers than
            their numbers say.
        out : ndarray, optional
            Where to put the rows; C-contiguous, of exactly the result's shape and dtype. Its
            content is undefined after an error.

        Returns
        -------
        ndarray or None
            ``[hi - lo, *row shape]``. A read-only view (see `view`) if one segment covers the
            window and nothing must change, else a fresh writable array, or `out`. With layers that
            are neighbours and ascend, the view is one of rows with gaps between them. A ragged field
            comes padded, ``[hi - lo, width]`` with the width of the longest row of all given
            segments, at least 1. None when no segment carries the field.

        Raises
        ------
        CoverageError
            When positions are uncovered that must not be.
        SegmentError
            When a segment is illegal, or has not `num_layers` layers; ``expected`` and ``actual``
            are the two numbers.
        PayloadError
            As for `view`; `PayloadCorruptError` also for a table that does not fit its file and
            for values that do not fit `dtype`.
        ValueError, TypeError
            The caller's mistake: lo > hi, a fill that does not fit or is needed, a wrong `out`,
            a layer that the model does not have.

        Examples
        --------
        >>> import tempfile
        >>> from payload import Writer
        >>> with tempfile.TemporaryDirectory() as root, Resolver(root) as resolver:
        ...     segments = Writer(root).write({"routed_experts": (2, np.full((2, 1, 2), 7, np.uint8))})
        ...     rows = resolver.window(segments, "routed_experts", 1, 4, fill=0, holes=[(1, 2)])
        >>> rows[:, 0].tolist()
        [[0, 0], [7, 7], [7, 7]]
        """
        place = _VIEWED if out is None else _Place(out)
        return self._placed(
            segments, field, lo, hi, fill, holes, extent, dtype, layers, num_layers, place
        )

    def _placed(
        self,
        segments: Any,
        field: str,
        lo: SupportsIndex,
        hi: SupportsIndex,
        fill: float | Literal["field"] | None,
        holes: _plan.Holes | None,
        extent: tuple[int, int] | None,
        dtype: Any,
        layers: Iterable[SupportsIndex] | None,
        num_layers: SupportsIndex | None,
        place: _Place,
    ) -> Array | None:
        """As `window`, with the rows where `place` says."""
        self._check_open()
        decoded = self._decode(segments)
        lo, hi = window(lo, hi)
        ids = slots = None
        if layers is not None or num_layers is not None:
            ids, slots = _plan.layers_of(layers, num_layers)
        with Naming(self._files, decoded, field):
            return self._window(
                decoded, field, lo, hi, fill, holes, extent, dtype, ids, slots, place, Deadline()
            )

    def _window(
        self,
        segments: Sequence[Segment],
        field: str,
        lo: int,
        hi: int,
        fill: float | Literal["field"] | None,
        holes: _plan.Holes | None,
        extent: tuple[int, int] | None,
        dtype: Any,
        layers: tuple[int, ...] | None,
        num_layers: int | None,
        place: _Place,
        deadline: Deadline,
    ) -> Array | None:
        wanted = [segment for segment in segments if segment.field == field]
        if not wanted:
            return None
        known = _plan.field_of(field, self._fields)
        if (
            len(wanted) == 1
            and wanted[0].pos <= lo < hi <= wanted[0].end
            and place is _VIEWED
            and not known.ragged
            and fill is None and holes is None and extent is None
            and dtype is None and num_layers is None
        ):  # fmt: skip
            return self.view(_plan.cut(wanted[0], lo, hi))  # nothing to plan, as mostly
        layouts = _plan.layouts_of(wanted, known)
        if num_layers is not None:
            if known.ragged:
                raise ValueError(f"field {field!r} is ragged: its rows have no layers")
            _plan.check_layers(field, layouts, num_layers)
        changes = dtype is not None or layers is not None
        if known.ragged or (changes and len(wanted) > 1):
            wanted = _plan.joined(wanted)  # fewer to convert; native reads are joined where read
        found = _plan.pieces(wanted, lo, hi)
        holes_left = self._uncovered(wanted, found, known, lo, hi, holes, extent)
        if known.ragged:
            return self._padded(wanted, layouts, found, known, lo, hi, fill, dtype, place, deadline)
        kinds = list(layouts)
        shape = _plan.widest(field, kinds)
        target = _target(field, kinds, known, dtype)
        narrower = any(other != shape for _, other in kinds)
        filling = self._fill(field, known, fill, target, needed=holes_left or narrower)
        if place.view != "never" and len(found) == 1 and found[0][1:] == (lo, hi):
            segment = wanted[found[0][0]]
            if segment.shape == shape and NUMPY[segment.dtype] == target:
                private = place.view == "private"
                part = _plan.cut(segment, lo, hi)
                if layers is None:  # of one file, so that nothing was waited for before
                    return self._view(part, deadline, private) if private else self.view(part)
                runs = _plan.runs(layers)
                # Where files are read, before they are viewed too, other layers would be as well.
                if len(runs) == 1 and part.nbytes and self._files.maps_unread(part.file):
                    kind = self._rows.get((field, part.dtype, shape)) or self._learn(part)
                    rows = self._mapped(part, kind, deadline, private)
                    if rows is not None:
                        return rows[:, _rows.slice_of(runs[0])]
        if layers is not None:
            shape = (len(layers), *shape[1:])
        result = self._result(field, (hi - lo, *shape), target, place)
        if result.size:
            _rows.gather(self._files, wanted, kinds, found, lo, result, layers, deadline)
            if filling is not None:
                _rows.fill_gaps(wanted, found, lo, hi, result, filling)
        return result

    def read_into(
        self,
        segments: Any,
        field: str,
        lo: SupportsIndex,
        hi: SupportsIndex,
        out: Array,
        *,
        fill: float | Literal["field"] | None = None,
        holes: _plan.Holes | None = None,
        extent: tuple[int, int] | None = None,
        layers: Iterable[SupportsIndex] | None = None,
        num_layers: SupportsIndex | None = None,
    ) -> Array | None:
        """Read the rows of [lo, hi) straight into `out`, such as a pinned buffer: one copy.

        As `window` with ``dtype=out.dtype, out=out``: each byte goes from the file system to `out`
        by one read, without page faults.

        Returns
        -------
        ndarray or None
            `out`; None, and `out` untouched, when no segment carries the field.

        Raises
        ------
        PayloadError, ValueError, TypeError
            As for `window`.
        """
        if not isinstance(out, np.ndarray):
            raise TypeError(f"out is {type(out).__name__}: needs a numpy array")
        place = _Place(out)
        return self._placed(
            segments, field, lo, hi, fill, holes, extent, out.dtype, layers, num_layers, place
        )

    def ragged(
        self,
        segments: Any,
        field: str,
        lo: SupportsIndex,
        hi: SupportsIndex,
        *,
        holes: _plan.Holes | None = None,
        extent: tuple[int, int] | None = None,
    ) -> Ragged | None:
        """Return the rows of the token positions [lo, hi) of a ragged field.

        Parameters
        ----------
        segments : list of Segment, or what `decode_segments` takes
            CSR and padded ones may stand in one list; a later one wins.
        field, lo, hi, holes, extent
            As for `window`.

        Returns
        -------
        Ragged or None
            ``hi - lo`` rows, values in the field table's dtype; an uncovered position is an empty
            row (`gaps` tells it from a recorded empty one). The values are a read-only view when
            one CSR segment covers the window. None when no segment carries the field.

        Raises
        ------
        SegmentError
            When the field is not known as ragged, or a segment is illegal.
        CoverageError, PayloadError, ValueError
            As for `window`.
        """
        self._check_open()
        decoded = self._decode(segments)
        lo, hi = window(lo, hi)
        with Naming(self._files, decoded, field):
            return self._ragged(decoded, field, lo, hi, holes, extent, Deadline())

    def _ragged(
        self,
        segments: Sequence[Segment],
        field: str,
        lo: int,
        hi: int,
        holes: _plan.Holes | None,
        extent: tuple[int, int] | None,
        deadline: Deadline,
    ) -> Ragged | None:
        wanted = [segment for segment in segments if segment.field == field]
        if not wanted:
            return None
        known = _plan.field_of(field, self._fields)
        if not known.ragged:
            raise SegmentError(
                f"field {field!r} is not known as ragged: use window, or pass fields=",
                reason="not_ragged",
                field=field,
            )
        layouts = _plan.layouts_of(wanted, known)
        wanted = _plan.joined(wanted)
        found = _plan.pieces(wanted, lo, hi)
        self._uncovered(wanted, found, known, lo, hi, holes, extent)
        value = NUMPY[known.dtype or "int32"]
        parts = _csr.parts_of(self._files, wanted, layouts, found, deadline)
        offsets = _csr.offsets_of(self._files, parts, lo, hi, known.fill, deadline)
        whole = _csr.whole(parts, hi - lo)
        if whole is not None:
            segment, start, nbytes = whole
            mapped = self._files.map(segment.file, start, nbytes, deadline)
            if mapped is not None and not start % value.itemsize:
                values = np.ndarray((nbytes // value.itemsize,), value, mapped, start)
                return Ragged._of(values, offsets)
        values = _csr.gather(self._files, parts, lo, offsets, value, known.fill, deadline)
        return Ragged._of(values, offsets)

    def prefetch(self, segments: Any) -> None:
        """Start bringing the pages of `segments` in, and return at once.

        What cannot be prefetched is not reported here: the call that uses it says so.

        Raises
        ------
        SegmentError
            When a segment is illegal.
        """
        self._check_open()
        self._files.prefetch(
            [
                (s.file, s.offset, s.nbytes, s.rows)
                for s in self._decode(segments)
                if s.nbytes != 0 and s.rows
            ]
        )

    def stats(self) -> Stats:
        """Return the counters of this resolver, see `Stats`."""
        counts = self._files.counts
        return Stats(
            opens=counts["opens"],
            maps=counts["maps"],
            map_hits=self._files.map_hits(),
            live_maps=self._files.live_maps(),
            bytes_mapped=counts["bytes_mapped"],
            bytes_read_through=counts["bytes_read_through"],
            bytes_read=counts["bytes_read"],
            bytes_copied=counts["bytes_copied"],
            reads=counts["reads"],
            bytes_prefetched=counts["bytes_prefetched"],
            waits=counts["waits"],
            fallbacks=dict(self._files.fallbacks),
            access={root: str(access) for root, access in self._files.access().items()},
        )

    def close(self) -> None:
        """Give up all maps and descriptors; views taken before stay valid. Idempotent."""
        self._closed = True
        self._checked = ()
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self._parameters,)

    def __repr__(self) -> str:
        return f"Resolver({self._parameters['roots']!r}, mode={self._parameters['mode']!r})"

    def _check_open(self) -> None:
        if self._closed:
            raise ResolverClosedError("resolver is closed: make a new one")

    def _decode(self, segments: Any) -> list[Segment]:
        """As `decode_segments`, once for a list that is asked for one field after the other."""
        checked = self._checked
        if (
            type(segments) is list
            and len(segments) == len(checked)
            and all(map(operator.is_, segments, checked))
        ):
            return segments  # frozen, so as legal as the last time
        decoded = decode_segments(segments)
        locate = self._files.roots.locate
        for index, segment in enumerate(decoded):
            try:
                locate(segment.file)
            except PathError as error:
                error.args = (f"{error} - at $.payload[{index}].file",)
                error.index, error.field = index, segment.field
                raise
        self._checked = tuple(decoded)
        return decoded

    def _uncovered(
        self,
        wanted: Sequence[Segment],
        found: Sequence[_plan.Piece],
        known: Field,
        lo: int,
        hi: int,
        holes: _plan.Holes | None,
        extent: tuple[int, int] | None,
    ) -> bool:
        """Whether positions are uncovered; refuses those that must not be."""
        allowed = _plan.holes_allowed(holes, known)
        first, last = window(*extent) if extent is not None else (lo, hi)
        if first > lo or last < hi:
            raise ValueError(f"extent [{first}, {last}) does not contain the window [{lo}, {hi})")
        if (first, last) == (lo, hi):
            missing = _plan.holes_of(found, lo, hi)
        else:
            missing = uncovered([(s.pos, s.end) for s in wanted if s.rows], first, last)
        if missing and allowed is not None:
            _plan.check_coverage(missing, wanted[0].field, allowed, first, last)
        return bool(missing)

    def _fill(
        self, field: str, known: Field, fill: Any, target: np.dtype[Any], *, needed: bool
    ) -> Any:
        if isinstance(fill, str) and fill != "field":
            raise ValueError(f"fill is {fill!r}: needs a number or 'field'")
        value = known.fill if fill == "field" else fill
        if value is None:
            if needed or fill == "field":
                raise ValueError(
                    f"field {field!r} has uncovered positions or narrower rows and no fill: pass fill="
                )
            return None
        return exact_fill(value, target)

    def _result(
        self, field: str, shape: tuple[int, ...], target: np.dtype[Any], place: _Place
    ) -> Array:
        out = place.out
        if out is None:
            return allocate(shape, target, self._files.max_bytes, f"field {field!r}", place.new)
        if not isinstance(out, np.ndarray):
            raise TypeError(f"out is {type(out).__name__}: needs a numpy array")
        if out.shape != shape or out.dtype != target:
            raise ValueError(
                f"out is {out.dtype} of shape {out.shape}: needs {target} of shape {shape}"
            )
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("out is not a writable C-contiguous array")
        return out

    def _padded(
        self,
        wanted: Sequence[Segment],
        layouts: Mapping[_plan.Kind, _plan.Layout],
        found: Sequence[_plan.Piece],
        known: Field,
        lo: int,
        hi: int,
        fill: Any,
        dtype: Any,
        place: _Place,
        deadline: Deadline,
    ) -> Array:
        field = wanted[0].field
        value = NUMPY[known.dtype or "int32"]
        target = value if dtype is None or dtype == "field" else known_dtype(dtype)
        filling = self._fill(field, known, "field" if fill is None else fill, target, needed=True)
        parts, width = _csr.parts_and_width(self._files, wanted, layouts, found, deadline)
        result = self._result(field, (hi - lo, width), target, place)
        result[...] = filling
        _csr.scatter(self._files, parts, lo, result, value, known.fill, deadline)
        return result


def _target(field: str, kinds: Sequence[_plan.Kind], known: Field, dtype: Any) -> np.dtype[Any]:
    """Dtype of a window over fixed segments."""
    if dtype is None:
        try:
            return common_dtype(name for name, _ in kinds)
        except ValueError as error:
            raise SegmentError(
                f"segments of {field!r} cannot stand in one array: {error}; pass dtype=",
                reason="dtypes",
                field=field,
            ) from None
    if isinstance(dtype, str) and dtype == "field":
        if known.dtype is None:
            raise ValueError(f"field {field!r} has no dtype in the field table: pass dtype=")
        return NUMPY[known.dtype]
    return known_dtype(dtype)


def _open(parameters: dict[str, Any]) -> Resolver:
    return Resolver(**parameters)


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array
