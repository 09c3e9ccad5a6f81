"""What a file system refused, as errors that say what, how long, how much, and what to do."""

from __future__ import annotations

import errno
import itertools
import os
import resource

from ._paths import Place, Roots
from .errors import PathError, PayloadError, PayloadMissingError, PayloadTruncatedError


def name_of(code: int | None) -> str:
    """Name of an errno, such as ``"ENOSPC"``."""
    return errno.errorcode.get(code or 0, "unknown")


def refused(path: str, error: OSError, maps: int) -> PayloadError:
    """Turn what the system said of `path` into an error of ours; `maps` are kept at the moment."""
    said = f"path {path!r} cannot be read: {os.strerror(error.errno or 0)} ({name_of(error.errno)})"
    if error.errno == errno.ESTALE:
        return PayloadMissingError(
            f"file {path!r} went away while it was read: {os.strerror(errno.ESTALE)} (ESTALE); it was "
            "removed or replaced on the server",
            reason="stale",
            path=path,
            retryable=True,
        )
    if error.errno in (errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
        return PathError(said, reason="path", path=path)
    if error.errno in (errno.EACCES, errno.EPERM):
        return PayloadError(
            f"{said} for user {os.geteuid()}: the writer's mode and the directories above must let this "
            "user read",
            reason="permission",
            path=path,
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return PayloadError(
            f"{said}: {limit} descriptors are allowed and {maps} maps are kept; raise the limit or lower "
            "max_maps",
            reason="descriptors",
            retryable=True,
            path=path,
            expected=limit,
            actual=maps,
        )
    return PayloadError(said, reason="io", path=path)


def missing(
    roots: Roots, path: str, place: Place, waited: float, kind: str, *, look: bool = True
) -> PayloadMissingError:
    """Say that a file is not there and, with `look`, what its directory shows."""
    root, beneath = place
    directory = f"{root}/{beneath}" if beneath else root
    on = f" on {kind}" if kind else ""
    cure = "not written yet, already swept, or on another node's file system"
    if not look:
        shows = f"its directory {directory!r}{on} was looked into for another file"
    else:
        try:
            # Listed by descriptor: by name it could be a link by now.
            with os.scandir(roots.directory(place, path).fd) as entries:
                count = sum(1 for _ in itertools.islice(entries, 1000))
            many = count if count < 1000 else "1000 or more"
            shows = f"its directory {directory!r}{on} has {many} entries"
        except OSError as error:
            shows = (
                f"its directory {directory!r}{on} does not open: {os.strerror(error.errno or 0)}"
            )
            if not os.path.isdir(root):
                shows = f"the root {root!r} is no directory here"
                cure = "mount it, or map the server's prefix to where it is mounted"
    return PayloadMissingError(
        f"file {path!r} is not there ({_tried(waited)}; {shows}): {cure}",
        reason="missing",
        path=path,
        retryable=True,
        actual=waited,
    )


def truncated(path: str, need: int, size: int, waited: float, kind: str) -> PayloadTruncatedError:
    """Say that a file is shorter than its segment needs."""
    on = f" on {kind}" if kind else ""
    return PayloadTruncatedError(
        f"file {path!r}{on} has {size} bytes, its segment needs {need} ({_tried(waited)})",
        path=path,
        retryable=True,
        expected=need,
        actual=size,
    )


def _tried(waited: float) -> str:
    return f"waited {waited:.3f} s" if waited >= 0.001 else "did not wait"
