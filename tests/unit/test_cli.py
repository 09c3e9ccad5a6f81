import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from payload import Ragged, Writer, _doctor
from payload.cli import main

ROWS = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
MASK = Ragged.from_lists([[7], [8, 9, 10], []])
HEX = "0123456789abcdef" * 2
LEFTOVER = f".{HEX}.safetensors.node-1.4711.0a1b2c3d"


def write(root: Path, version: str = "v0", **arrays: Any) -> Path:
    """Write a file with a fixed and a ragged side array, or with those given."""
    content = arrays or {"routed_experts": (2, ROWS), "sampling_mask": (4, MASK)}
    segments = Writer(root).write(content, version, metadata={"weights_version": "7"})
    return Path(segments[0].file)


def save_anew(file: Path, to: Path, keep_metadata: bool) -> Path:
    """Load and save a file as any safetensors tool does; returns the copy."""
    metadata = None
    if keep_metadata:
        with safe_open(file, "numpy") as opened:
            metadata = opened.metadata()
    save_file(load_file(file), to, metadata=metadata)
    return to


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def run(*args: object) -> int:
    return main([str(arg) for arg in args])


# --- inspect


def test_inspect_shows_side_arrays_and_metadata(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path)
    assert run("inspect", file) == 0
    first, names, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{file}: 504 bytes, byhandle/1, data from byte 448"
    assert re.split(r"  +", names) == [
        "field", "kind", "dtype", "row shape", "rows", "positions", "byte range", "bytes", "values",
        "longest row", "checksum",
    ]  # fmt: skip
    assert [re.split(r"  +", line) for line in lines] == [
        ["sampling_mask", "ragged", "int32", "-", "3", "[4, 7)", "[448, 480)", "32", "4", "3", "ok"],
        ["routed_experts", "fixed", "uint8", "[2, 3]", "4", "[2, 6)", "[480, 504)", "24", "-", "-", "ok"],
        ["metadata weights_version: 7"],
    ]  # fmt: skip


def test_inspect_as_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path)
    assert run("inspect", "--json", file) == 0
    assert json.loads(capsys.readouterr().out) == {
        "file": str(file),
        "nbytes": 504,
        "format": "byhandle/1",
        "data_start": 448,
        "arrays": [
            {
                "field": "sampling_mask", "kind": "ragged", "dtype": "int32", "shape": [], "rows": 3,
                "pos": 4, "end": 7, "start": 448, "stop": 480, "nbytes": 32, "values": 4,
                "longest_row": 3, "checksum": "ok",
            },
            {
                "field": "routed_experts", "kind": "fixed", "dtype": "uint8", "shape": [2, 3],
                "rows": 4, "pos": 2, "end": 6, "start": 480, "stop": 504, "nbytes": 24,
                "values": None, "longest_row": None, "checksum": "ok",
            },
        ],
        "metadata": {"weights_version": "7"},
        "problems": [],
    }  # fmt: skip


def test_inspect_of_an_upstream_file_gives_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"{HEX}.bin"
    file.write_bytes(bytes(1234))
    assert run("inspect", file) == 0
    assert capsys.readouterr().out == f"{file}: 1,234 bytes, no header\n"
    assert run("inspect", file, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["nbytes"], found["format"], found["arrays"]) == (1234, None, [])


def test_inspect_says_which_checksum_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path)
    flip(file, 500)
    assert run("inspect", "--json", file) == 0
    found = json.loads(capsys.readouterr().out)
    assert [array["checksum"] for array in found["arrays"]] == ["ok", "differs"]
    assert len(found["problems"]) == 1
    assert "field 'routed_experts' has checksum" in found["problems"][0]


def test_inspect_of_a_file_without_checksums_says_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.safetensors"
    save_file({"x": ROWS}, file, metadata={"format": "byhandle/1", "x.pos": "3"})
    assert run("inspect", "--json", file) == 0
    [array] = json.loads(capsys.readouterr().out)["arrays"]
    assert (array["checksum"], array["pos"], array["end"]) == ("none", 3, 7)


def test_names_from_outside_do_not_move_the_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    segments = Writer(tmp_path).write({"a\x1b[2J\nb": (0, ROWS)}, metadata={"k\n": "\x1b[31m"})
    assert run("inspect", segments[0].file) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 4
    assert "metadata k\\n: \\x1b[31m" in out


def test_names_that_are_not_text_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = os.fsencode(tmp_path) + b"/\xff.bin"
    Path(os.fsdecode(file)).write_bytes(b"x")
    for command in (["inspect"], ["inspect", "--json"], ["verify"]):
        assert main([*command, os.fsdecode(file)]) == 0
    assert capsys.readouterr().out.count("udcff") == 2


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--json"], ["verify"]])
def test_a_fifo_is_refused_within_a_second(command: list[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.bin")
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", "import sys; from payload.cli import main; b = __import__('time').monotonic();"
         "s = main(sys.argv[1:]); assert __import__('time').monotonic() - b < 1; sys.exit(s)",
         *command, str(tmp_path / "pipe.bin")],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert time.monotonic() - began < 20
    assert ended.returncode == 1
    said = ended.stdout if command == ["verify"] else ended.stderr
    assert "is a fifo, not a regular file" in said
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("kind", ["missing", "directory", "link", "unpublished", "damaged"])
def test_what_cannot_be_inspected_is_one_line_on_stderr(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path)
    path, status, said = {
        "missing": (tmp_path / "v0" / "none.bin", 2, "is not there"),
        "directory": (tmp_path, 1, "is a directory, not a regular file"),
        "link": (tmp_path / "link.bin", 1, "has a symbolic link"),
        "unpublished": (tmp_path / LEFTOVER, 1, "still being written"),
        "damaged": (tmp_path / "short.safetensors", 1, "does not fit the file"),
    }[kind]
    (tmp_path / "link.bin").symlink_to(good)
    (tmp_path / LEFTOVER).write_bytes(b"")
    (tmp_path / "short.safetensors").write_bytes(good.read_bytes()[:-1])
    assert run("inspect", path) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("byhandle: ")
    assert said in err
    assert repr(str(path)) in err
    assert len(err.splitlines()) == 1


# --- verify


def test_good_files_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "v0")
    write(tmp_path, "v1")
    write(tmp_path, "v1", sampling_mask=(0, Ragged.from_lists([])), x=(0, np.zeros((0, 4))))
    write(tmp_path, "v1", sampling_mask=(0, Ragged.from_lists([[], []])))
    (tmp_path / "v1" / f"{HEX}.bin").write_bytes(ROWS.tobytes())
    assert run("verify", tmp_path) == 0
    assert capsys.readouterr().out == "5 files, 0 bad, 0 suspicious, 1 without header\n"


def test_a_flipped_bit_anywhere_in_the_data_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path)
    content = good.read_bytes()
    copy = tmp_path / "v0" / f"{HEX}.safetensors"
    for at in range(448, 504):
        copy.write_bytes(content)
        flip(copy, at)
        assert run("verify", good, copy) == 1
        bad, summary = capsys.readouterr().out.splitlines()
        field = "sampling_mask" if at < 480 else "routed_experts"
        assert bad.startswith(f"bad: {copy}: field {field!r} has checksum ")
        assert summary == "2 files, 1 bad, 0 suspicious, 0 without header"


def test_a_flipped_bit_anywhere_in_the_header_ends_in_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path)
    content = file.read_bytes()
    text = content[:448].decode("latin-1")
    # A position and what the caller added can be anything.
    free = [m.span() for m in re.finditer(r'(?<=pos":")\d|"weights_version":"7"', text)]
    for at in range(448):
        file.write_bytes(content)
        flip(file, at)
        status = run("verify", file)
        out, err = capsys.readouterr()
        assert err == ""
        if not any(a <= at < b for a, b in free):
            assert (status, ", 1 bad," in out) == (1, True) or ", 1 suspicious," in out, text[at:]


def test_a_header_that_was_damaged_is_told_from_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path)
    content = file.read_bytes()
    overlap = content.replace(b'"data_offsets":[16,32]', b'"data_offsets":[12,28]')
    for name, damaged, said in (
        ("a", content[:-1], "header does not fit the file: tensors end at byte 504, the file at 503"),
        ("b", content + b"x", "header does not fit the file: tensors end at byte 504, the file at 505"),
        ("c", overlap, "header does not fit the file: bytes [460, 476): needs [464, 480)"),
        ("d", b"", "file has no header of 'byhandle/1': it was damaged, or saved by another tool"),
        ("e", bytes(600), "file has no header of 'byhandle/1'"),
        ("f", b"\xff" * 600, "file has no header of 'byhandle/1'"),
        ("g", content.replace(b'"routed_experts.pos":"2"', b'"routed_experts.pos":"x"'),
         "field 'routed_experts' has 'x' for a position"),
        ("h", content.replace(b'"routed_experts.pos"', b'"routed_expertz.pos"'),
         "header has 'routed_expertz.pos' and no such side array"),
        ("i", content.replace(b"mask.values", b"mask.valuez"), "'sampling_mask' has offsets and no values"),
        ("j", content.replace(b"mask.offsets", b"mask.offsetz"), "'sampling_mask' has values and no offsets"),
        ("k", content.replace(b'"U32"', b'"I32"'), "table of 'sampling_mask' is int32"),
        ("l", content.replace(b"[4,2,3]", b"[]     "), "does not fit the file"),
        ("m", content.replace(b'"I32","shape":[4]', b'"F64","shape":[2]'), "has float64 values of shape (2,)"),
    ):  # fmt: skip
        bad = tmp_path / f"{name}.safetensors"
        bad.write_bytes(damaged)
        assert run("verify", bad) == 1, name
        line, *_ = capsys.readouterr().out.splitlines()
        assert line.startswith(f"bad: {bad}: "), name
        assert said in line


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ([464, 468, 466, 480], "falls: from 468 to 466 at row 1"),
        ([464, 467, 480, 480], "cuts an element: from 464 to 467 at row 0"),
        ([464, 468, 480, 476], "falls: from 480 to 476 at row 2"),
        ([464, 468, 480, 484], "says its values are bytes [464, 484), the header says [464, 480)"),
        ([468, 468, 480, 480], "says its values are bytes [468, 480), the header says [464, 480)"),
        ([100, 104, 116, 116], "says its values are bytes [100, 116), they are [464, 480)"),
    ],
)
def test_a_table_that_does_not_fit_is_found_without_its_checksum(
    table: list[int], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path)
    content = file.read_bytes().replace(b'"sampling_mask.xxh3_64":', b'"another_one_xxh3_64":  ')
    file.write_bytes(content[:448] + np.array(table, "<u4").tobytes() + content[464:])
    assert run("verify", file) == 1
    line, doubt, _ = capsys.readouterr().out.splitlines()
    assert line.startswith(f"bad: {file}: table of 'sampling_mask' {said}")
    assert doubt.startswith(f"suspicious: {file}: field 'sampling_mask': no checksum")


def test_large_tables_are_checked_to_their_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More entries than one block holds; the last one is wrong."""
    rows = (1 << 18) + 10
    file = write(
        tmp_path, sampling_mask=(0, Ragged(np.arange(rows, dtype=np.int32), np.arange(rows + 1)))
    )
    assert run("verify", file) == 0
    assert run("inspect", "--json", file) == 0
    [array] = json.loads(capsys.readouterr().out.split("\n", 1)[1])["arrays"]
    assert (array["values"], array["longest_row"]) == (rows, 1)
    content = bytearray(file.read_bytes())
    at = array["start"] + 4 * (rows - 1)
    content[at : at + 4] = (0).to_bytes(4, "little")
    file.write_bytes(content)
    assert run("verify", file) == 1
    assert f"to 0 at row {rows - 2}" in capsys.readouterr().out


def test_a_file_saved_anew_by_another_tool_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path)
    kept = save_anew(good, tmp_path / "kept.safetensors", keep_metadata=True)
    lost = save_anew(good, tmp_path / "lost.safetensors", keep_metadata=False)
    assert run("verify", kept, lost) == 1
    first, second, summary = capsys.readouterr().out.splitlines()
    assert first.startswith(
        f"bad: {kept}: table of 'sampling_mask' says its values are bytes [464, 480), they are ["
    )
    assert "another tool saved the file and moved them" in first
    assert "(t - t[0]) // 4" in first
    assert "checksum" not in first  # the bytes are the writer's; only their place is not
    assert second == (
        f"bad: {lost}: file has no header of 'byhandle/1': it was damaged, or saved by another tool"
    )
    assert summary == "2 files, 2 bad, 0 suspicious, 0 without header"
    assert run("inspect", "--json", kept) == 0
    arrays = json.loads(capsys.readouterr().out)["arrays"]
    assert {a["field"]: (a["rows"], a["values"], a["longest_row"], a["checksum"]) for a in arrays} == {
        "sampling_mask": (3, 4, 3, "ok"),
        "routed_experts": (4, None, None, "ok"),
    }  # fmt: skip


def test_rows_that_look_lost_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = np.tile(np.arange(1, 7, dtype=np.int16), (5, 1))
    for arrays, said in (
        ({"x": (0, np.zeros((4, 2), np.uint8))}, "field 'x': every byte is zero"),
        ({"x": (0, same)}, "field 'x': all 5 rows are equal"),
        ({"sampling_mask": (0, Ragged.from_lists([[0], [0, 0]]))}, "field 'sampling_mask': every byte of its values is zero"),
        ({"sampling_mask": (0, Ragged.from_lists([[3, 4]] * 3))}, "field 'sampling_mask': all 3 rows are equal"),
    ):  # fmt: skip
        file = write(tmp_path, **arrays)
        assert run("verify", file) == 0
        assert capsys.readouterr().out.splitlines() == [
            f"suspicious: {file}: {said}",
            "1 files, 0 bad, 1 suspicious, 0 without header",
        ]


def test_rows_that_only_resemble_each_other_are_no_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = np.ones((5, 1 << 20), np.uint8)
    large[4, -1] = 2
    for array in (large, np.ones((1, 3)), np.array([[1, 1], [1, 1], [1, 2]])):
        assert run("verify", write(tmp_path, x=(0, array))) == 0
        assert capsys.readouterr().out == "1 files, 0 bad, 0 suspicious, 0 without header\n"


def test_a_directory_is_walked_without_links_dot_names_and_special_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    write(root, "run/v0")
    outside.mkdir()
    for directory in (outside, root / ".snapshot"):
        directory.mkdir(exist_ok=True)
        (directory / "bad.safetensors").write_bytes(b"bad")
    (root / "run" / LEFTOVER).write_bytes(b"half")
    (root / "linked").symlink_to(outside)
    (root / "linked.safetensors").symlink_to(outside / "bad.safetensors")
    os.mkfifo(root / "run" / "pipe.bin")
    assert run("verify", root) == 0
    assert capsys.readouterr().out == "1 files, 0 bad, 0 suspicious, 0 without header\n"
    (root / "run" / "bad.safetensors").write_bytes(b"bad")
    assert run("verify", root, root / "run" / "v0") == 1
    bad, summary = capsys.readouterr().out.splitlines()
    assert bad.startswith(f"bad: {root}/run/bad.safetensors: file has no header")
    assert summary == "3 files, 1 bad, 0 suspicious, 0 without header"


def test_a_missing_path_ends_verify_before_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", write(tmp_path), tmp_path / "none") == 2
    assert capsys.readouterr() == ("", f"byhandle: path '{tmp_path}/none' is not there\n")


def test_progress_is_for_terminals_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    assert run("verify", tmp_path) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run("verify", tmp_path) == 0
    assert capsys.readouterr().err == "\r\x1b[K1 files, 0 MiB\r\x1b[K"


# --- doctor


def doctor(root: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    status = run("doctor", "--json", *options, root)
    report = json.loads(capsys.readouterr().out)
    assert report["root"] == str(root)
    assert status == (0 if report["ok"] else 1)
    found = {one["property"]: one for one in report["findings"]}
    assert report["ok"] == all(one["verdict"] != "fail" for one in found.values())
    return found


def test_doctor_tests_a_directory_and_leaves_only_its_marker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = doctor(tmp_path, capsys)
    for name, value in (
        ("create", "1,048,576 bytes, with O_EXCL"),
        ("mode and owner", f"0644, user {os.geteuid()}"),
        ("rename", "new name there, old name gone"),
        ("reopen elsewhere", "same bytes"),
        ("map", "same bytes"),
        ("unlink while mapped", "same bytes"),
        ("remove", "scratch directory is gone"),
        ("device", f"{os.major(os.stat(tmp_path).st_dev)}:{os.minor(os.stat(tmp_path).st_dev)}"),
        ("f_fsid", f"{os.statvfs(tmp_path).f_fsid:#x}"),
    ):
        assert (found[name]["value"], found[name]["verdict"]) == (value, "ok")
    assert abs(float(found["clock"]["value"].split()[0])) < 2
    assert {"file system", "access (auto)", "bytes free", "inodes free", "descriptors", "max_maps",
            "vm.max_map_count", "marker"} <= set(found)  # fmt: skip
    assert os.listdir(tmp_path) == [".byhandle-root"]


def test_doctor_for_people_has_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("doctor", tmp_path) == 0
    first, names, *lines, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path} on ")
    assert names.split() == ["property", "value", "verdict"]
    assert [line for line in lines if re.match(r"rename +new name there, old name gone +ok$", line)]
    assert last.startswith(f"{len(lines)} properties, ")
    assert last.endswith(" 0 failed")


def test_the_marker_is_made_once_and_shown_ever_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / ".byhandle-root"
    found = doctor(tmp_path, capsys, "--no-marker")["marker"]
    assert (found["value"], found["verdict"]) == ("not there", "warn")
    assert os.listdir(tmp_path) == []
    old = os.umask(0o077)
    try:
        made = doctor(tmp_path, capsys)["marker"]
    finally:
        os.umask(old)
    assert uuid.UUID(made["value"]) == uuid.UUID(marker.read_text().strip())
    assert f"created '{marker}' now" in made["note"]
    assert marker.stat().st_mode & 0o777 == 0o644
    for options in ([], ["--no-marker"]):
        again = doctor(tmp_path, capsys, *options)["marker"]
        assert (again["value"], again["verdict"]) == (made["value"], "ok")
        assert again["note"] == "the other node must show the same"


def test_a_marker_that_is_none_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = tmp_path / ".byhandle-root"
    marker.write_text("not a uuid\n")
    found = doctor(tmp_path, capsys)["marker"]
    assert (found["value"], found["verdict"]) == ("'not a uuid'", "fail")
    assert marker.read_text() == "not a uuid\n"
    marker.unlink()
    os.mkfifo(marker)
    found = doctor(tmp_path, capsys)["marker"]
    assert (found["value"], found["verdict"]) == ("not a regular file (EINVAL)", "warn")


def test_a_clock_that_is_off_is_a_warning() -> None:
    for off, value, verdict in ((7200.0, "+7200", "warn"), (-3.5, "-3", "warn"), (0.5, "+0", "ok")):
        found = _doctor._clock_finding(1e9 + off, 1e9, 1e9)
        assert found.value.startswith(value)
        assert found.verdict == verdict


@pytest.mark.parametrize(
    ("code", "property", "value"),
    [
        ("import os; os.kill(os.getpid(), 7)", "reopen elsewhere", "died of SIGBUS"),
        ("print('reopen\\tok\\nmap\\tok', flush=True); import os; os.kill(os.getpid(), 7)", "unlink while mapped", "died of SIGBUS"),
        ("print('reopen\\tok\\nmap\\tENODEV')", "map", "ENODEV"),
        ("print('reopen\\tother bytes')", "reopen elsewhere", "other bytes"),
        ("print('error\\tfile is not there')", "reopen elsewhere", "file is not there"),
        ("import time; time.sleep(60)", "reopen elsewhere", "no answer in 1 s"),
    ],
)  # fmt: skip
def test_what_happens_to_the_other_process_is_a_verdict(
    code: str, property: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_doctor, "_CHILD", code)
    monkeypatch.setattr(_doctor, "_PATIENCE", 1.0)
    found = {one.property: one for one in _doctor._child_findings(str(tmp_path / "x"), "map")}
    assert (found[property].value, found[property].verdict) == (value, "fail")
    assert list(found)[-1] == property
    if property != "reopen elsewhere":  # where `auto` copies, nobody maps
        *_, last = _doctor._child_findings(str(tmp_path / "x"), "copy")
        assert last.verdict == "warn"


def test_a_root_that_takes_no_files_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(path: str, mode: int) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("payload._doctor.os.mkdir", mkdir)
    found = doctor(tmp_path, capsys, "--no-marker")["create"]
    assert (found["value"], found["verdict"]) == ("Read-only file system (EROFS)", "fail")


def test_doctor_of_what_is_no_directory_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run("doctor", tmp_path / "file") == 1
    assert "Not a directory (ENOTDIR)" in capsys.readouterr().err
    assert run("doctor", tmp_path / "none") == 2
    assert capsys.readouterr().err == (
        f"byhandle: root cannot be read: '{tmp_path}/none': No such file or directory (ENOENT): "
        "mount it, or make it\n"
    )


# --- gc


def test_gc_says_what_goes_what_stays_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    (outside / "x.bin").write_bytes(b"not ours")
    for version in ("v0", "v1", "v2", "v007", "v8"):
        (root / version).mkdir(parents=True)
        (root / version / f"{HEX}.bin").write_bytes(b"0123456789")
        (root / version / LEFTOVER).write_bytes(b"half")
    (root / "v1" / ".nfs0001").write_bytes(b"")
    (root / "v2" / "notes.txt").write_text("mine")
    (root / "v2" / "sub").mkdir()
    (root / "v3").symlink_to(outside)
    (root / "other").mkdir()
    (root / ".byhandle-root").write_text(str(uuid.uuid4()))
    before = sorted(root.rglob("*"))
    expected = [
        f"DONE {root}/v0: older than v8",
        f"DONE {root}/v007: older than v8",
        f"pending {root}/v1: kept by .nfs0001",
        f"pending {root}/v2: kept by notes.txt, sub",
        "ignored other: no version directory",
        "ignored v3: no version directory",
        "DONE 2 versions, 8 files, 56 bytes; 2 pending, 1 kept",
    ]
    assert run("gc", root, "--keep-from", 8, "--dry-run") == 3
    out = capsys.readouterr().out
    assert out.splitlines() == [line.replace("DONE", "would remove") for line in expected]
    assert sorted(root.rglob("*")) == before
    assert run("gc", root, "--keep-from", 8) == 3
    out = capsys.readouterr().out
    assert out.splitlines() == [line.replace("DONE", "removed") for line in expected]
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*")) == [
        ".byhandle-root", "other", "v1", "v1/.nfs0001", "v2", "v2/notes.txt", "v2/sub", "v3", "v8",
        f"v8/{LEFTOVER}", f"v8/{HEX}.bin",
    ]  # fmt: skip
    assert (outside / "x.bin").read_bytes() == b"not ours"
    (root / "v1" / ".nfs0001").unlink()
    for path in ("notes.txt", "sub"):
        os.rename(root / "v2" / path, root / "other" / path)
    assert run("gc", root, "--keep-from", 8) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "removed 2 versions, 0 files, 0 bytes; 0 pending, 1 kept"
    )


def test_gc_of_a_missing_root_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("gc", tmp_path / "none", "--keep-from", 1) == 2
    assert capsys.readouterr().err.startswith(f"byhandle: root cannot be read: '{tmp_path}/none'")


# --- the command line


@pytest.mark.parametrize(
    "args",
    [
        [], ["wipe"], ["inspect"], ["verify"], ["gc", "/tmp"], ["gc", "/tmp", "--keep-from", "-1"],
        ["gc", "/tmp", "--keep-from", "x"], ["gc", "/tmp", "--keep-from", "1.5"],
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_line_and_status_2(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith("byhandle: ")


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"    {name} " in out for name in ("inspect", "verify", "doctor", "gc"))


@pytest.mark.process
def test_the_module_runs_and_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    file = write(tmp_path)
    command = [sys.executable, "-m", "payload", "inspect", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "routed_experts" in ended.stdout
    reader, writer = os.pipe()
    os.close(reader)
    piped = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (piped.returncode, piped.stderr) == (1, "")


@pytest.mark.process
def test_a_name_the_terminal_cannot_show_is_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "größe.bin"
    file.write_bytes(b"x")
    command = [sys.executable, "-m", "payload", "inspect", str(file)]
    ended = subprocess.run(
        command, capture_output=True, timeout=60, check=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert ended.stdout.endswith(b"gr\\xf6\\xdfe.bin: 1 bytes, no header\n")
