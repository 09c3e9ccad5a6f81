"""Whether a directory can be shared by payload files: a self-test of its mount."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from ._files import default_max_maps
from ._mounts import MEMORY_TYPES, Access, access_of, filesystem_type
from ._paths import Roots
from .retention import unreadable

Verdict = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """One property of a root: its value, the verdict, and what to do or know."""

    property: str
    value: str
    verdict: Verdict = "ok"
    note: str = ""


MARKER: Final = ".byhandle-root"
_PROBE: Final = 1 << 20  # bytes; more than the kernel maps around one fault
_PATIENCE: Final = 60.0  # s another process gets, waiting for a late name included

# Runs in another process: it sees the file by name only, and a signal ends it and not the doctor.
_CHILD: Final = """
import importlib, os, sys
where, package, path = sys.argv[1:]
sys.path.append(where)
import numpy as np
payload = importlib.import_module(package)

def tell(step, value):
    sys.stdout.write(f"{step}\\t{value}\\n")
    sys.stdout.flush()

try:
    nbytes = os.stat(path).st_size
    expected = np.resize(np.arange(256, dtype=np.uint8), nbytes)
    segment = payload.Segment("probe", path, 0, 0, nbytes, "uint8", ())
    with payload.Resolver(os.path.dirname(path), mode="copy") as resolver:
        tell("reopen", "ok" if (resolver.view(segment) == expected).all() else "other bytes")
    with payload.Resolver(os.path.dirname(path), mode="map") as resolver:
        view = resolver.view(segment)
        refused = ", ".join(resolver.stats().fallbacks)
        tell("map", refused or ("ok" if (view[:4096] == expected[:4096]).all() else "other bytes"))
        os.unlink(path)
        if not refused:
            tell("unlink", "ok" if (view == expected).all() else "other bytes")
except (payload.PayloadError, OSError) as error:
    tell("error", " ".join(str(error).splitlines()))
"""


def findings(root: str, *, marker: bool) -> list[Finding]:
    """Test the mount of a root, in a scratch directory that is removed again.

    Parameters
    ----------
    root : str
        Absolute path of a directory.
    marker : bool
        Whether to make the marker file two nodes compare, if it is not there.

    Returns
    -------
    list of Finding

    Raises
    ------
    PayloadError
        When the root cannot be opened.
    """
    roots = Roots(root)
    try:
        fd = roots.directory((root, ""), root).fd
    except OSError as error:
        raise unreadable(root, error) from None
    kind = filesystem_type(fd)
    access = access_of(kind)
    return [
        *_mount_findings(fd, kind, access),
        *_scratch_findings(root, access),
        *_room_findings(root),
        *_limit_findings(),
        *_identity_findings(root, create=marker),
    ]


_HOW: Final[dict[Access, str]] = {
    "map": "maps",
    "through": "reads once, then maps",
    "copy": "reads into memory",
}


def _mount_findings(fd: int, kind: str, access: Access) -> Iterator[Finding]:
    if kind:
        yield Finding("file system", kind)
    else:
        advice = (
            "not found in /proc/self/mountinfo: mount /proc, or give Resolver a root with 'type'"
        )
        yield Finding("file system", "unknown", "warn", advice)
    if access == "copy":
        advice = "a mapped page can vanish here with the file's name: use tmpfs, NFSv4 or Lustre"
        yield Finding("access (auto)", _HOW[access], "warn", advice)
    else:
        yield Finding("access (auto)", _HOW[access])
    if kind in MEMORY_TYPES:
        options = _mount_options(fd).split(",")
        huge = next((one for one in options if one.startswith("huge=")), "huge=never (default)")
        yield Finding("huge pages", huge)


def _mount_options(fd: int) -> str:
    """Options of the file system an open descriptor is on, by mount id; "" if unknown."""
    with contextlib.suppress(OSError, StopIteration, IndexError):
        with open(f"/proc/self/fdinfo/{fd}") as info:
            mount = next(line.split()[1] for line in info if line.startswith("mnt_id:"))
        with open("/proc/self/mountinfo") as mounts:
            for line in mounts:
                if line.split(" ", 1)[0] == mount:
                    return line.rpartition(" - ")[2].split()[2]
    return ""


def _scratch_findings(root: str, access: Access) -> Iterator[Finding]:
    scratch = f"{root.rstrip('/')}/.byhandle-doctor-{secrets.token_hex(4)}"
    try:
        os.mkdir(scratch, 0o755)
    except OSError as error:
        advice = "servers must be able to; for a node that only reads this is as it should be"
        yield Finding("create", said_of(error), "fail", advice)
        return
    try:
        yield from _file_findings(scratch, access)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if os.path.lexists(scratch):
        yield Finding("remove", "left behind", "fail", f"remove {scratch!r} by hand")
    else:
        yield Finding("remove", "scratch directory is gone")


def _file_findings(scratch: str, access: Access) -> Iterator[Finding]:
    temporary, final = f"{scratch}/.probe.tmp", f"{scratch}/probe.bin"
    content = bytes(range(256)) * (_PROBE // 256)
    began = time.time()
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o644)
        status = os.stat(temporary)
    except OSError as error:
        yield Finding("create", said_of(error), "fail", "payload files cannot be written here")
        return
    ended = time.time()
    yield Finding("create", f"{_PROBE:,} bytes, with O_EXCL")
    yield _owner_finding(status)
    yield _clock_finding(status.st_mtime, began, ended)
    try:
        os.rename(temporary, final)
        with contextlib.suppress(FileExistsError):
            open(final, "xb").close()
            yield Finding(
                "exclusive create", "took a name in use", "fail", "this is no POSIX file system"
            )
    except OSError as error:
        yield Finding("rename", said_of(error), "fail", "files cannot be published here")
        return
    if os.path.lexists(temporary):
        advice = "rename copies here: readers can see half a file; use another file system"
        yield Finding("rename", "left the old name behind", "fail", advice)
    else:
        yield Finding("rename", "new name there, old name gone")
    yield from _child_findings(final, access)


def _owner_finding(status: os.stat_result) -> Finding:
    mode = stat.S_IMODE(status.st_mode)
    value = f"{mode:04o}, user {status.st_uid}"
    if status.st_uid != os.geteuid():
        advice = (
            f"user {os.geteuid()} wrote it: users are mapped here, give files a mode all can read"
        )
        return Finding("mode and owner", value, "warn", advice)
    if mode != 0o644:
        return Finding(
            "mode and owner", value, "warn", "0644 was asked for: modes are not kept here"
        )
    return Finding("mode and owner", value)


def _clock_finding(mtime: float, began: float, ended: float) -> Finding:
    skew = min(0.0, mtime - began) or max(0.0, mtime - ended)
    value = f"{skew:+.3f} s against this machine"
    if abs(skew) > 2:
        advice = "clocks differ: synchronise them; never remove payload files by their age"
        return Finding("clock", value, "warn", advice)
    return Finding("clock", value)


def _child_findings(path: str, access: Access) -> Iterator[Finding]:
    """Open by name, map and unlink in another process."""
    package = __package__ or "payload"
    where = os.path.dirname(os.path.abspath(__file__))
    for _ in package.split("."):
        where = os.path.dirname(where)
    ended = ""
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", _CHILD, where, package, path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=_PATIENCE,
            check=False,
        )
        output = child.stdout
        if child.returncode < 0:
            ended = f"died of {signal.Signals(-child.returncode).name}"
        elif child.returncode:
            ended = f"ended with status {child.returncode}: {child.stderr.strip()[-200:]}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        ended = f"no answer in {_PATIENCE:.0f} s"
    except OSError as error:
        output, ended = "", said_of(error)
    told = dict(line.partition("\t")[::2] for line in output.splitlines())
    broken = told.get("error") or ended or "no answer"
    # Where `auto` copies, nobody maps.
    refusal: Verdict = "warn" if access == "copy" else "fail"
    steps: tuple[tuple[str, str, Verdict, str], ...] = (
        ("reopen", "reopen elsewhere", "fail", "another process does not see what was written"),
        ("map", "map", refusal, 'use mode="copy"'),
        ("unlink", "unlink while mapped", refusal, 'use mode="copy": a sweep would end views'),
    )
    for step, name, verdict, advice in steps:
        if told.get(step) != "ok":
            yield Finding(name, told.get(step) or broken, verdict, advice)
            return
        yield Finding(name, "same bytes")


def _room_findings(root: str) -> Iterator[Finding]:
    room = os.statvfs(root)
    free, whole = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    value = f"{free:,} of {whole:,}"
    if not whole:
        yield Finding("bytes free", "not told")
    elif free < max(1 << 30, whole // 20):
        advice = "less than 1 GiB or a twentieth: sweep old versions, or enlarge the file system"
        yield Finding("bytes free", value, "warn" if free else "fail", advice)
    else:
        yield Finding("bytes free", value)
    if not room.f_files:
        yield Finding("inodes free", "no limit")
    elif room.f_favail < 10_000:
        advice = "one file a response: sweep old versions, or mount with more inodes"
        verdict: Verdict = "warn" if room.f_favail else "fail"
        yield Finding("inodes free", f"{room.f_favail:,} of {room.f_files:,}", verdict, advice)
    else:
        yield Finding("inodes free", f"{room.f_favail:,} of {room.f_files:,}")


def _limit_findings() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"{_limit(soft)}, {_limit(hard)} if raised"
    if sys.version_info < (3, 13) and soft != resource.RLIM_INFINITY and soft < 4096:
        advice = "each map holds one before Python 3.13: `ulimit -n 65536`"
        yield Finding("descriptors", value, "warn", advice)
    else:
        yield Finding("descriptors", value)
    maps = default_max_maps()
    yield Finding("max_maps", f"{maps:,}")
    try:
        with open("/proc/sys/vm/max_map_count") as file:
            count = int(file.read())
    except (OSError, ValueError):
        yield Finding("vm.max_map_count", "not told", "warn", "mount /proc")
        return
    if count < maps + 16_384:
        advice = (
            "libraries need maps too: `sysctl vm.max_map_count=65530` or more, or lower max_maps"
        )
        yield Finding("vm.max_map_count", f"{count:,}", "warn", advice)
    else:
        yield Finding("vm.max_map_count", f"{count:,}")


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else f"{value:,}"


def _identity_findings(root: str, create: bool) -> Iterator[Finding]:
    """What two nodes compare to know that they see the same root."""
    yield _marker_finding(f"{root.rstrip('/')}/{MARKER}", create)
    device = os.stat(root).st_dev
    yield Finding("device", f"{os.major(device)}:{os.minor(device)}")
    yield Finding("f_fsid", f"{os.statvfs(root).f_fsid:#x}")


def _marker_finding(path: str, create: bool) -> Finding:
    note = "the other node must show the same"
    refused = ""
    try:
        if create and _create_marker(path):
            note = f"created {path!r} now; {note}"
    except OSError as error:
        refused = f" and cannot be created: {said_of(error)}"
    try:
        text = _read_marker(path)
    except FileNotFoundError:
        advice = "run doctor without --no-marker on a node that may write"
        return Finding("marker", f"not there{refused}", "warn", advice)
    except OSError as error:
        return Finding(
            "marker", said_of(error), "warn", f"{path!r} must be a file all users can read"
        )
    try:
        return Finding("marker", str(uuid.UUID(text)), "ok", note)
    except ValueError:
        return Finding("marker", repr(text[:40]), "fail", f"no uuid: remove {path!r} and run again")


def _create_marker(path: str) -> bool:
    try:
        with open(path, "x") as file:
            try:
                os.fchmod(file.fileno(), 0o644)  # past the umask: trainers run as other users
                file.write(f"{uuid.uuid4()}\n")
                file.flush()
            except OSError:
                os.unlink(path)
                raise
    except FileExistsError:
        return False
    return True


def _read_marker(path: str) -> str:
    for _ in range(20):
        if not stat.S_ISREG(os.lstat(path).st_mode):  # before it is opened: a FIFO would block
            raise OSError(errno.EINVAL, "not a regular file")
        with open(path, errors="replace") as file:
            text = file.read(100).strip()
        if text:
            break
        time.sleep(0.05)  # another node is just making it
    return text


def said_of(error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0, "unknown")
    return f"{error.strerror or error} ({code})"
