"""Which segments of a list an error is about, where the file system told of a path."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ._files import Deadline, Files
from .errors import PayloadError, telling_of_all
from .segment import Segment

GRACE = 1.0  # s a call that failed still looks at files, to tell of all
_LISTED = 256  # files looked at for the list
_FILE_REASONS = {
    "missing",
    "stale",
    "truncated",
    "symlink",
    "not_regular",
    "permission",
    "path",
    "io",
}


class Naming:
    """Says in a `PayloadError` which segments of a list it is about, where paths tell."""

    __slots__ = ("field", "files", "segments")

    def __init__(self, files: Files, segments: Sequence[Segment], field: str) -> None:
        self.files = files
        self.segments = segments
        self.field = field

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, PayloadError):
            return
        error.field = error.field or self.field
        if error.path is None:
            return
        mine = [(i, s) for i, s in enumerate(self.segments) if s.field == self.field and s.rows]
        places = [(i, s) for i, s in mine if s.file == error.path]
        if error.offset is not None:
            places = [(i, s) for i, s in places if s.offset == error.offset] or places
        elif error.reason == "truncated":
            places = [(i, s) for i, s in places if _stop(s) > error.actual] or places
        if places:
            error.index, error.offset = places[0][0], places[0][1].offset
        if error.reason not in _FILE_REASONS:
            return
        # The call ends at the first file it meets; its caller wants to know of all.
        over = Deadline.over()  # the call has waited already
        others, seen, unseen = [], {error.path}, 0
        for index, segment in mine:
            if segment.file in seen:
                continue
            if len(seen) >= _LISTED or over.passed() > GRACE:
                unseen += 1
                continue
            seen.add(segment.file)
            other = self._error_of(segment, over)
            if other is not None:
                other.index, other.field = index, self.field
                others.append(other)
        telling_of_all(error, others, len(mine), unseen)

    def _error_of(self, segment: Segment, over: Deadline) -> PayloadError | None:
        try:
            os.close(self.files.open(segment.file, segment.offset, _stop(segment), over)[0])
        except PayloadError as error:
            return error
        return None


def _stop(segment: Segment) -> int:
    """First byte after the rows, or after the table of a ragged segment without length."""
    return segment.offset + (segment.nbytes or 4 * (segment.rows + 1))
