"""Path policy: which file a name on the wire may open. One policy for reader, writer, sweep and CLI.

A root is followed wherever it leads; beneath it no symbolic link is followed, by opening one
component at a time relative to the directory before it. There is nothing to race: the descriptor
that was checked is the one that is read.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from ._mounts import Access
from .errors import PathError

PATH_MAX = 4096  # Linux; a longer name fails in the kernel anyway, without saying which
UNPUBLISHED = frozenset({"", "."})  # what no name of a published file begins with
MAX_DIRECTORIES = 256  # kept open at a time: the versions that are still fresh are far fewer

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_BENEATH = _DIRECTORY | os.O_NOFOLLOW


def why_illegal(path: str) -> str | None:
    """Say what is wrong with `path` as a name on the wire, or None if it is legal.

    Legal is: absolute, no empty, ``.`` or ``..`` component, no NUL, encodable, at most 4,096 bytes.

    Examples
    --------
    >>> why_illegal("/shared/v3/a.bin") is None
    True
    >>> why_illegal("/shared/../etc/passwd")
    "has a '..' component"
    """
    if not path.startswith("/"):
        return "is not absolute"
    if "\0" in path:
        return "has a NUL byte"
    try:
        size = len(path) if path.isascii() else len(path.encode())
    except UnicodeEncodeError:
        return "is not valid text"
    if size >= PATH_MAX:
        return f"has {size} bytes, {PATH_MAX - 1} are allowed"
    if "//" in path or path.endswith("/"):
        return "has an empty component"
    if "/." in path:
        for part in path.split("/"):
            if part in (".", ".."):
                return f"has a {part!r} component"
    return None


Place = tuple[str, str]  # a root's directory, and a directory beneath it ("" for the root itself)


class Directory:
    """An open directory. Closed when its last user is gone, so eviction never closes under one."""

    __slots__ = ("__weakref__", "access", "device", "fd", "root")

    def __init__(self, fd: int, root: str) -> None:
        self.fd = fd
        self.root = root
        self.access: Access | None = None  # how files in it are viewed, once found out
        self.device = os.fstat(fd).st_dev

    def __del__(self) -> None:
        os.close(self.fd)


class Roots:
    """The directories a resolver or writer may reach, and the names other nodes give them.

    Parameters
    ----------
    roots : path, sequence of paths, or mapping of prefix to path or options
        With a mapping, a name on the wire must begin with one of the prefixes (whole components,
        the longest wins) and is looked up beneath that prefix's directory. Options are a mapping
        with the key ``"directory"`` and, if wanted, ``"mode"`` and ``"type"``.
    """

    def __init__(self, roots: Any) -> None:
        if isinstance(roots, Mapping):
            given = {_prefix(key): _options(value) for key, value in roots.items()}
        elif isinstance(roots, (str, os.PathLike)):
            given = {absolute(roots): _options(roots)}
        elif isinstance(roots, Sequence):
            given = {absolute(root): _options(root) for root in roots}
        else:
            raise TypeError(f"roots is {type(roots).__name__}: needs a path, paths, or a mapping")
        if not given:
            raise ValueError("roots is empty: needs at least one directory")
        # Longest prefix first: the first that matches wins.
        self.prefixes = dict(sorted(given.items(), key=lambda item: -len(item[0])))
        self.options: dict[str, dict[str, Any]] = {}  # by directory
        for options in given.values():
            known = self.options.setdefault(options["directory"], options)
            if known != options:
                raise ValueError(f"root {options['directory']!r} has two sets of options")
        self.located: dict[str, Place] = {}  # by directory as named
        self.kept: OrderedDict[Place, Directory] = OrderedDict()
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # And never more than an eighth of the descriptors there are.
        self._most = MAX_DIRECTORIES if soft < 0 else max(4, min(MAX_DIRECTORIES, soft // 8))
        self._lock = threading.Lock()
        _all_roots.add(self)

    def __repr__(self) -> str:
        return f"Roots({list(self.prefixes)!r})"

    def locate(self, path: str) -> tuple[Place, str]:
        """Split a legal `path` into the place of its directory and the file name.

        Raises
        ------
        PathError
            When `path` lies beneath no root, names a root itself, or its file name begins with a
            dot (a file that is still being written).
        """
        head, _, name = path.rpartition("/")
        where = self.located.get(head)
        if where is None:
            where = self._locate(path, head)
            if len(self.located) >= 4 * MAX_DIRECTORIES:
                self.located.clear()
            self.located[head] = where
        if name.startswith("."):
            raise PathError(
                f"path {path!r} names a file that is still being written: names beginning with a dot "
                "are never published",
                reason="unpublished",
                path=path,
            )
        return where, name

    def _locate(self, path: str, head: str) -> Place:
        for prefix, options in self.prefixes.items():
            if head == prefix or head.startswith(prefix + "/") or prefix == "/":
                return options["directory"], head[len(prefix.rstrip("/")) + 1 :]
        known = ", ".join(repr(prefix) for prefix in self.prefixes)
        raise PathError(
            f"path {path!r} is outside every root ({known}): map the server's prefix to a local "
            "directory with Resolver({prefix: directory})",
            reason="outside_roots",
            path=path,
        )

    def directory(self, place: Place, path: str, make: int | None = None) -> Directory:
        """Return the kept descriptor of a directory, opening it component by component if new.

        `path` is named in errors. With `make`, missing directories beneath the root are made with
        those permission bits.
        """
        kept = self.kept.get(place)
        if kept is not None:
            return kept
        root, beneath = place
        found = self._keep((root, ""), None, root, path, None)
        walked = ""
        for name in beneath.split("/") if beneath else ():
            walked = f"{walked}/{name}" if walked else name
            found = self._keep((root, walked), found, name, path, make)
        return found

    def _keep(
        self, place: Place, parent: Directory | None, name: str, path: str, make: int | None
    ) -> Directory:
        kept = self.kept.get(place)
        if kept is not None:
            return kept
        if parent is None:
            found = Directory(os.open(name, _DIRECTORY), place[0])
        else:
            made = make is not None and _make_directory(name, parent.fd)
            try:
                found = Directory(os.open(name, _BENEATH, dir_fd=parent.fd), place[0])
            except OSError as error:
                refuse_link(path, name, parent.fd, error)
                raise
            if made and make is not None:
                os.fchmod(found.fd, make)  # past the umask: trainers run as other users
        with self._lock:
            self.kept[place] = found
            while len(self.kept) > self._most:
                self.kept.popitem(last=False)
        return found

    def forget(self, place: Place) -> bool:
        """Drop the kept descriptors of a directory and all above it; True if there were any.

        Roots get wiped and recreated under live processes: a kept descriptor then leads to a
        directory that no longer has a name.
        """
        root, beneath = place
        with self._lock:
            dropped = self.kept.pop(place, None) is not None
            while beneath:
                beneath = beneath.rpartition("/")[0]
                dropped |= self.kept.pop((root, beneath), None) is not None
        return dropped

    def close(self) -> None:
        """Drop every kept descriptor; they reopen at next use."""
        with self._lock:
            self.kept.clear()


# A lock another thread holds at fork would never be released in the child.
_all_roots: weakref.WeakSet[Roots] = weakref.WeakSet()


def _renew_locks() -> None:
    for roots in list(_all_roots):
        roots._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def _prefix(prefix: Any) -> str:
    text: str = os.fspath(prefix)
    if text == "/":
        return text
    text = text[:-1] if text.endswith("/") else text
    wrong = why_illegal(text)
    if wrong:
        raise ValueError(f"root prefix {text!r} {wrong}")
    return text


_OPTIONS = {"directory", "mode", "type"}


def _options(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {"directory": absolute(value)}
    if "directory" not in value or not set(value) <= _OPTIONS:
        raise ValueError(
            f"root options are {dict(value)!r}: needs 'directory', may have 'mode', 'type'"
        )
    return {**value, "directory": absolute(value["directory"])}


def absolute(directory: Any) -> str:
    """Return a local directory as an absolute path."""
    text = os.path.abspath(os.fspath(directory))
    if isinstance(text, bytes):
        raise TypeError(f"root {text!r} is bytes: needs a str or path")
    return "/" + str(text).lstrip("/")  # POSIX lets two leading slashes mean something else


def _make_directory(name: str, parent_fd: int) -> bool:
    try:
        os.mkdir(name, 0o700, dir_fd=parent_fd)
    except FileExistsError:
        return False
    return True


def refuse_link(path: str, name: str, parent_fd: int, error: OSError) -> None:
    """Turn the kernel's refusal into a `PathError` where the cause is what `name` is."""
    if error.errno in (errno.ENOENT, errno.ESTALE, errno.EMFILE, errno.ENFILE):
        return  # nothing there to look at: no request to a server for it
    try:
        mode = os.lstat(name, dir_fd=parent_fd).st_mode
    except OSError:
        return
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return
    if stat.S_ISLNK(mode):
        raise PathError(
            f"path {path!r} has a symbolic link at {name!r}: beneath a root none is followed",
            reason="symlink",
            path=path,
        ) from None
    raise PathError(
        f"path {path!r} is a {kind_of(mode)}, not a regular file", reason="not_regular", path=path
    ) from None


def kind_of(mode: int) -> str:
    for test, kind in (
        (stat.S_ISDIR, "directory"),
        (stat.S_ISFIFO, "fifo"),
        (stat.S_ISCHR, "character device"),
        (stat.S_ISBLK, "block device"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISLNK, "symbolic link"),
    ):
        if test(mode):
            return kind
    return "special file"
