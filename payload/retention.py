"""Removing what no trainer needs any more: version directories below a version.

Whoever trains owns the root and calls `sweep` after each policy update. Nothing is counted and no
clock is read: which versions are still needed follows from the step alone.
"""

from __future__ import annotations

import errno
import operator
import os
import re
from typing import Final, NamedTuple, SupportsIndex

import msgspec

from ._paths import Roots, absolute
from .errors import PathError, PayloadError, PayloadMissingError
from .format import SUFFIX

_VERSION: Final = re.compile(r"v([0-9]+)")
# What writers leave: published files, upstream's, and the dot-file of a writer that was killed
# (its final name, host, pid, random). Everything else is somebody else's and stays.
_OURS: Final = re.compile(
    rf"[0-9a-f]{{32}}{re.escape(SUFFIX)}"
    r"|[^.].*\.bin"
    rf"|\.[0-9a-f]{{32}}{re.escape(SUFFIX)}\..*\.[0-9]+\.[0-9a-f]{{8}}",
    re.DOTALL,
)
_GONE: Final = (errno.ENOENT, errno.ESTALE)  # somebody else was first, on this node or another


class Report(msgspec.Struct, frozen=True):
    """What a sweep did, or with ``dry_run`` would do.

    Attributes
    ----------
    removed : list of str
        Version directories that are gone, lowest version first.
    files, nbytes : int
        Files removed and their bytes, those in directories that stayed included.
    pending : dict of str to list of str
        Version directories that should be gone and are not, each with the names that keep it:
        files of others, subdirectories, ``.nfs*`` files of views that live. Tried again next time.
    errors : dict of str to str
        Of the directories in `pending`, what the system refused first, if it refused anything.
    kept : int
        Version directories not below `keep_from`.
    ignored : list of str
        Names in the root that are no version directory.
    dry_run : bool
        Whether nothing was removed.
    """

    removed: list[str]
    files: int
    nbytes: int
    pending: dict[str, list[str]]
    errors: dict[str, str]
    kept: int
    ignored: list[str]
    dry_run: bool


def sweep(
    root: str | os.PathLike[str], *, keep_from: SupportsIndex, dry_run: bool = False
) -> Report:
    """Remove the version directories ``v<k>`` directly beneath `root` with ``k < keep_from``.

    In them only files named as writers name them are removed: ``<32 hex>.safetensors``, ``*.bin``,
    and the dot-files of killed writers. A directory in which something else is left stays. Links
    beneath the root are not followed, nor are subdirectories entered.

    Parameters
    ----------
    root : path
        Directory shared by writers and trainers, as this node mounts it.
    keep_from : int
        Lowest version to keep.
    dry_run : bool
        Say what would be removed, and remove nothing.

    Returns
    -------
    Report

    Raises
    ------
    PayloadError
        When the root cannot be read. What is refused beneath it is in `Report.errors`.
    ValueError, TypeError
        When `keep_from` is negative or no integer.

    Notes
    -----
    Views that are mapped stay valid on local file systems and NFSv4 (see "How long a view lives" in
    the README). A response still being written for a version that is swept fails there with a
    `PayloadWriteError`; nothing would have read it.

    Examples
    --------
    prime-rl keeps what is at most ``max_off_policy_steps`` behind the step whose weights were
    applied:

    >>> import os, tempfile
    >>> step, max_off_policy_steps = 10, 8
    >>> with tempfile.TemporaryDirectory() as root:
    ...     for version in range(step + 1):
    ...         os.mkdir(f"{root}/v{version}")
    ...     report = sweep(root, keep_from=max(step - max_off_policy_steps, 0))
    ...     left = sorted(os.listdir(root))
    >>> [os.path.basename(path) for path in report.removed], report.kept
    (['v0', 'v1'], 9)
    >>> left[:3]
    ['v10', 'v2', 'v3']
    """
    lowest = _lowest(keep_from)
    local = absolute(root)
    roots = Roots(local)
    versions: list[tuple[int, str]] = []
    ignored: list[str] = []
    kept = 0
    try:
        with os.scandir(roots.directory((local, ""), local).fd) as entries:
            for entry in entries:
                match = _VERSION.fullmatch(entry.name)
                if match is None or not entry.is_dir(follow_symlinks=False):
                    ignored.append(entry.name)
                elif int(match[1]) < lowest:
                    versions.append((int(match[1]), entry.name))
                else:
                    kept += 1
    except OSError as error:
        raise unreadable(local, error) from None
    removed: list[str] = []
    pending: dict[str, list[str]] = {}
    errors: dict[str, str] = {}
    files = nbytes = 0
    for _, name in sorted(versions):
        path = f"{local.rstrip('/')}/{name}"
        try:
            swept = _sweep_version(roots, local, name, path, dry_run)
        except PathError:
            ignored.append(name)  # a link by now
            continue
        except OSError as error:
            if error.errno not in _GONE:
                pending[path], errors[path] = [], _said(name, error)
            continue
        files += swept.files
        nbytes += swept.nbytes
        if swept.gone:
            removed.append(path)
        elif swept.keepers or swept.error:
            pending[path] = swept.keepers
            if swept.error:
                errors[path] = swept.error
    return Report(removed, files, nbytes, pending, errors, kept, sorted(ignored), dry_run)


def _lowest(keep_from: SupportsIndex) -> int:
    if isinstance(keep_from, bool):
        raise TypeError(f"keep_from is {keep_from}: needs an integer")
    try:
        lowest = operator.index(keep_from)
    except TypeError:
        raise TypeError(f"keep_from is {keep_from!r}: needs an integer") from None
    if lowest < 0:
        raise ValueError(
            f"keep_from is {lowest}: needs a version, 0 or more; in the first steps max(..., 0)"
        )
    return lowest


class _Swept(NamedTuple):
    """What became of one version directory."""

    gone: bool
    files: int
    nbytes: int
    keepers: list[str]
    error: str | None


def _sweep_version(roots: Roots, local: str, name: str, path: str, dry_run: bool) -> _Swept:
    directory = roots.directory((local, name), path)
    ours: list[tuple[str, int]] = []
    keepers: list[str] = []
    with os.scandir(directory.fd) as entries:
        for entry in entries:
            try:
                if _OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    ours.append((entry.name, entry.stat(follow_symlinks=False).st_size))
                else:
                    keepers.append(entry.name)
            except FileNotFoundError:
                continue
    if dry_run:
        nbytes = sum(size for _, size in ours)
        return _Swept(not keepers, len(ours), nbytes, sorted(keepers), None)
    files = nbytes = 0
    failed: str | None = None
    for file, size in ours:
        try:
            os.unlink(file, dir_fd=directory.fd)
        except OSError as error:
            if error.errno not in _GONE:
                failed = failed or _said(file, error)
            continue
        files += 1
        nbytes += size
    # Listed again: an NFS client renames what it still has open instead of removing it.
    keepers = _names(directory.fd)
    gone = False
    if not keepers:
        try:
            os.rmdir(name, dir_fd=roots.directory((local, ""), local).fd)
            gone = True
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                keepers = _names(directory.fd)
            elif error.errno not in _GONE:
                failed = failed or _said(name, error)
    return _Swept(gone, files, nbytes, keepers, failed)


def _names(fd: int) -> list[str]:
    try:
        return sorted(os.listdir(fd))
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise


def _said(name: str, error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0, "unknown")
    return f"{name!r}: {os.strerror(error.errno or 0)} ({code})"


_REASONS: Final = {
    errno.ENOENT: "missing",
    errno.ESTALE: "missing",
    errno.ENOTDIR: "not_directory",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
}


def unreadable(root: str, error: OSError) -> PayloadError:
    """Say that a root cannot be read, and what to do."""
    reason = _REASONS.get(error.errno or 0, "io")
    cure = {
        "missing": ": mount it, or make it",
        "not_directory": ": name the directory that holds the version directories",
        "permission": f" for user {os.geteuid()}: run as the user who owns it",
    }.get(reason, "")
    kind = PayloadMissingError if reason == "missing" else PayloadError
    return kind(f"root cannot be read: {_said(root, error)}{cure}", reason=reason, path=root)
