"""``python -m payload``: look into files, verify them, test a mount, remove old versions.

``inspect FILE`` shows what a file holds, ``verify FILE|DIR...`` judges files, ``doctor ROOT`` tests
whether a directory can be shared, ``gc ROOT --keep-from K`` sweeps. Only what is named on the
command line is opened. What files and file systems do comes as one line on stderr, never as a
traceback.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

import msgspec

from ._doctor import MARKER, findings, said_of
from ._examine import Contents, SideArray, examine, metadata_of, reader
from ._files import Files
from ._paths import Roots, absolute
from .errors import PathError, PayloadError, PayloadMissingError
from .format import FORMAT
from .retention import sweep


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name. Default: those of the process.

    Returns
    -------
    int
        0 all is well; 1 a file is bad, a test failed, or the system refused; 2 the command line is
        wrong or a path is missing; 3 something is left for the next sweep.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
    except PayloadMissingError as error:
        return _complain(str(error), 2)
    except PayloadError as error:
        return _complain(str(error), 1)
    except BrokenPipeError:  # of `| head`; what is left in the buffer must not fail again at exit
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(str(error), 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_complain(f"{message} (see {self.prog} --help)", 2))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m payload", description="Payload files and the roots they lie in."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        return made

    inspect = command("inspect", _inspect, "Show the side arrays and the metadata of a file.")
    inspect.add_argument("file", metavar="FILE")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    verify = command("verify", _verify, "Check structure, tables and checksums of files.")
    verify.add_argument(
        "paths", nargs="+", metavar="FILE|DIR", help="directories with all beneath them"
    )
    doctor = command("doctor", _doctor, "Test whether a directory can be shared by payload files.")
    doctor.add_argument("root", metavar="ROOT")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.add_argument(
        "--no-marker", action="store_true", help="read the root's marker file, do not create it"
    )
    gc = command("gc", _gc, "Remove the version directories below a version.")
    gc.add_argument("root", metavar="ROOT")
    gc.add_argument(
        "--keep-from", type=_version, required=True, metavar="K", help="lowest version to keep"
    )
    gc.add_argument("--dry-run", action="store_true", help="say what would be removed")
    return parser


def _version(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise argparse.ArgumentTypeError(f"{text!r} is no version: needs 0 or more")
    return int(text)


# --- what is printed


def _say(text: str, stream: TextIO | None = None) -> None:
    stream = stream or sys.stdout
    coding = stream.encoding or "utf-8"  # names need not be text, nor a terminal know all of it
    stream.write(text.encode(coding, "backslashreplace").decode(coding) + "\n")


def _complain(text: str, status: int) -> int:
    _say(f"byhandle: {' '.join(text.splitlines())}", sys.stderr)
    return status


def _say_json(value: Any) -> None:
    _say(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _shown(text: str) -> str:
    """Text from outside without what would move a terminal's cursor."""
    return text if text.isprintable() else repr(text)[1:-1]


def _columns(rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> Iterator[str]:
    """Lay out rows, the first of them names; columns in `right` are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, rows[0], strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _reason(error: PayloadError, path: str) -> str:
    """What an error says, for a line that begins with the path."""
    return str(error).replace(f" of {path!r}", "").replace(f" {path!r}", "")


# --- inspect


def _inspect(arguments: argparse.Namespace) -> int:
    path = absolute(arguments.file)
    files = reader(os.path.dirname(path))
    try:
        found = examine(files, path)
    finally:
        files.close()
    if arguments.json:
        _say_json(_as_json(found))
        return 0
    header = found.header
    if header is None:
        _say(f"{_shown(path)}: {found.nbytes:,} bytes, no header")
        return 0
    _say(f"{_shown(path)}: {found.nbytes:,} bytes, {FORMAT}, data from byte {header.data_start}")
    names = (
        "field", "kind", "dtype", "row shape", "rows", "positions", "byte range", "bytes", "values",
        "longest row", "checksum",
    )  # fmt: skip
    rows = [names, *(_row_of(array) for array in found.arrays)]
    for line in _columns(rows, right=("rows", "bytes", "values", "longest row")):
        _say(line)
    for key, value in metadata_of(header).items():
        _say(f"metadata {_shown(key)}: {_shown(value)}")
    for problem in found.problems:
        _say(f"problem: {_shown(problem)}")
    return 0


def _row_of(array: SideArray) -> tuple[str, ...]:
    ragged = array.kind == "ragged"
    return (
        _shown(array.field),
        array.kind,
        array.dtype,
        "-" if ragged else str(list(array.shape)),
        f"{array.rows:,}",
        "?" if array.pos is None else f"[{array.pos}, {array.end})",
        f"[{array.start}, {array.stop})",
        f"{array.nbytes:,}",
        ("?" if array.values is None else f"{array.values:,}") if ragged else "-",
        ("?" if array.longest_row is None else f"{array.longest_row:,}") if ragged else "-",
        array.checksum,
    )


def _as_json(found: Contents) -> dict[str, Any]:
    header = found.header
    return {
        "file": found.path.encode(errors="backslashreplace").decode(),
        "nbytes": found.nbytes,
        "format": None if header is None else FORMAT,
        "data_start": None if header is None else header.data_start,
        "arrays": [
            {**msgspec.structs.asdict(array), "end": array.end, "nbytes": array.nbytes}
            for array in found.arrays
        ],
        "metadata": {} if header is None else metadata_of(header),
        "problems": found.problems,
    }


# --- verify


class _Tally(msgspec.Struct):
    """What `verify` has seen so far."""

    files: int = 0
    bad: int = 0
    suspicious: int = 0
    without_header: int = 0
    nbytes: int = 0
    shown: float = 0.0  # when progress was last


def _is_missing(path: str) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:  # not known; opening it will say why
        return False
    return False


def _verify(arguments: argparse.Namespace) -> int:
    paths = [absolute(path) for path in arguments.paths]
    missing = [path for path in paths if _is_missing(path)]
    if missing:
        return _complain(f"path {missing[0]!r} is not there", 2)
    tally = _Tally()
    for path in paths:
        whole = os.path.isdir(path)
        files = reader(path if whole else os.path.dirname(path))
        try:
            for file in _beneath(files.roots, path, tally) if whole else (path,):
                _judge(files, file, tally, listed=whole)
        finally:
            files.close()
    _progress(tally, done=True)
    _say(
        f"{tally.files} files, {tally.bad} bad, {tally.suspicious} suspicious, "
        f"{tally.without_header} without header"
    )
    return 1 if tally.bad else 0


def _beneath(roots: Roots, root: str, tally: _Tally) -> Iterator[str]:
    """Yield the regular files beneath a directory, in order, without what begins with a dot."""
    left = [""]
    while left:
        beneath = left.pop()
        here = f"{root.rstrip('/')}/{beneath}".rstrip("/") or "/"
        names: list[str] = []
        directories: list[str] = []
        try:
            with os.scandir(roots.directory((root, beneath), here).fd) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(f"{beneath}/{entry.name}".lstrip("/"))
                    elif entry.is_file(follow_symlinks=False):
                        names.append(entry.name)
        except PathError:
            continue  # a link by now
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):  # swept meanwhile
                tally.bad += 1
                _line("bad", here, f"directory cannot be listed: {said_of(error)}")
            continue
        left += sorted(directories, reverse=True)
        for name in sorted(names):
            yield f"{here.rstrip('/')}/{name}"


def _judge(files: Files, path: str, tally: _Tally, listed: bool) -> None:
    tally.files += 1
    try:
        found = examine(files, path)
    except PayloadError as error:
        if listed and isinstance(error, PayloadMissingError):
            tally.files -= 1  # swept since it was listed
            return
        tally.bad += 1
        _line("bad", path, _reason(error, path))
        return
    tally.nbytes += found.nbytes
    tally.without_header += found.header is None
    if found.problems:
        tally.bad += 1
        _line("bad", path, "; ".join(found.problems))
    if found.doubts:
        tally.suspicious += 1
        _line("suspicious", path, "; ".join(found.doubts))
    _progress(tally)


def _line(verdict: str, path: str, reason: str) -> None:
    _say(f"{verdict}: {_shown(path)}: {_shown(reason)}")


def _progress(tally: _Tally, done: bool = False) -> None:
    if not sys.stderr.isatty():
        return
    now = time.monotonic()
    if done or now - tally.shown > 0.2:
        tally.shown = now
        text = "" if done else f"{tally.files} files, {tally.nbytes >> 20} MiB"
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


# --- doctor


def _doctor(arguments: argparse.Namespace) -> int:
    root = absolute(arguments.root)
    found = findings(root, marker=not arguments.no_marker)
    failed = sum(finding.verdict == "fail" for finding in found)
    warned = sum(finding.verdict == "warn" for finding in found)
    if arguments.json:
        _say_json(
            {
                "root": root.encode(errors="backslashreplace").decode(),
                "host": socket.gethostname(),
                "ok": not failed,
                "findings": found,
            }
        )
        return 1 if failed else 0
    _say(f"{_shown(root)} on {socket.gethostname()}")
    rows = [("property", "value", "verdict", "")]
    rows += [(one.property, _shown(one.value), one.verdict, _shown(one.note)) for one in found]
    for line in _columns(rows):
        _say(line)
    _say(f"{len(found)} properties, {warned} to look at, {failed} failed")
    return 1 if failed else 0


# --- gc


def _gc(arguments: argparse.Namespace) -> int:
    lowest = arguments.keep_from
    report = sweep(arguments.root, keep_from=lowest, dry_run=arguments.dry_run)
    done = "would remove" if report.dry_run else "removed"
    for path in report.removed:
        _say(f"{done} {_shown(path)}: older than v{lowest}")
    for path, names in report.pending.items():
        left = [_shown(name) for name in names[:10]]
        if len(names) > 10:
            left.append(f"and {len(names) - 10} more")
        why = f": kept by {', '.join(left)}" if left else ""
        said = f" - {report.errors[path]}" if path in report.errors else ""
        _say(f"pending {_shown(path)}{why}{said}")
    for name in report.ignored:
        if name != MARKER:
            _say(f"ignored {_shown(name)}: no version directory")
    _say(
        f"{done} {_count(len(report.removed), 'version')}, {_count(report.files, 'file')}, "
        f"{_count(report.nbytes, 'byte')}; {len(report.pending)} pending, {report.kept} kept"
    )
    return 3 if report.pending else 0


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
