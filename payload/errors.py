"""What can go wrong, one class per kind of cause.

Every error of this package is a `PayloadError` and also the builtin a caller would expect
(``except FileNotFoundError`` works). What a server or a file system did is always one of these;
a mistake of the caller (``lo > hi``, a fill that does not fit) is a plain `ValueError` or `TypeError`.
"""

from __future__ import annotations

import errno as _errno
from collections.abc import Sequence
from typing import Any

_NAMED = 10  # errors that the message of one which tells of others names


class PayloadError(Exception):
    """Base of every error this package raises for what came from outside.

    Attributes that do not apply are None. Instances pickle, so they cross process boundaries whole,
    but that of many `errors` only those go along which the message names.

    Attributes
    ----------
    reason : str
        Stable code of the cause, for programs: ``"out_of_range"``, ``"outside_roots"``, ...
    retryable : bool
        Whether the same call can succeed later without anybody changing the payload.
    index : int or None
        Place of the segment in the payload it came in.
    field : str or None
        Side array the segment belongs to.
    path : str or None
        File as the segment names it.
    offset : int or None
        Byte offset in the file.
    expected, actual : object
        What was needed and what was found; bytes unless the message says otherwise.

    Examples
    --------
    >>> import pickle
    >>> error = PayloadTruncatedError("file is short", path="/p/x", expected=24, actual=23)
    >>> pickle.loads(pickle.dumps(error)).expected
    24
    """

    reason: str = "payload"
    retryable: bool = False
    index: int | None = None
    field: str | None = None
    path: str | None = None
    offset: int | None = None
    expected: Any = None
    actual: Any = None
    _others: tuple[PayloadError, ...] = ()

    @property
    def errors(self) -> tuple[PayloadError, ...]:
        """One error for each segment that cannot be read, in their order; empty if it is one."""
        if not self._others:
            return ()
        return tuple(sorted((self, *self._others), key=lambda error: error.index or 0))

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(message)
        for name, value in attributes.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException.__reduce__ would replay args only and lose the attributes of OSError children.
        attributes = dict(self.__dict__)
        if self._others:  # some hundred, each with a message; how many there are stands in ours
            named = self.errors[:_NAMED]
            attributes["_others"] = tuple(error for error in named if error is not self)
        if isinstance(self, OSError):
            attributes["errno"] = self.errno
        return _restore, (type(self), self.args[0], attributes)


def telling_of_all(
    error: PayloadError, others: Sequence[PayloadError], segments: int, unseen: int = 0
) -> PayloadError:
    """Return `error`, which ended a call over `segments` segments, telling of `others` too.

    `unseen` segments were not looked at: time had run out.
    """
    if others or unseen:
        error._others = tuple(other.with_traceback(None) for other in others)
        every = error.errors or (error,)
        places = ", ".join(str(one.index) for one in every[:_NAMED])
        more = ", ..." if len(every) > _NAMED else ""
        more += f"; {unseen} were not looked at" if unseen else ""
        error.args = (
            f"{error} - {len(every)} of {segments} segments cannot be read: {places}{more}",
        )
    return error


def _restore(cls: type[PayloadError], message: str, attributes: dict[str, Any]) -> PayloadError:
    return cls(message, **attributes)


class SegmentError(PayloadError, ValueError):
    """A segment, as it was sent or built, is illegal. Raised before any file is opened."""

    reason = "segment"


class PathError(SegmentError):
    """A path leads outside every root, through a symbolic link, or to something not a regular file."""

    reason = "path"


class PayloadMissingError(PayloadError, FileNotFoundError):
    """The file is not there: it never was, or it is gone; `actual` is the seconds waited."""

    reason = "missing"

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(message, **attributes)
        self.errno = _errno.ENOENT


class PayloadTruncatedError(PayloadError, EOFError):
    """The file is shorter than its segment says; `expected` and `actual` are file sizes in bytes."""

    reason = "truncated"


class PayloadCorruptError(PayloadError, ValueError):
    """The bytes are not what a table, header or checksum says, or do not fit the dtype asked for."""

    reason = "corrupt"


class InlineError(PayloadError, ValueError):
    """A side array that came inside the response body is malformed."""

    reason = "inline"


class CoverageError(PayloadError, LookupError):
    """The window has rows that no segment covers; `actual` lists the gaps as (lo, hi) pairs."""

    reason = "coverage"


class PayloadWriteError(PayloadError, OSError):
    """The write did not happen and nothing was left behind.

    ``errno`` is the system's code, None where a limit of the writer refused.
    """

    reason = "write"


class ResolverClosedError(PayloadError, RuntimeError):
    """The resolver was closed; views taken from it before stay valid."""

    reason = "closed"
