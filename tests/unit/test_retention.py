import gc
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload import PayloadError, PayloadMissingError, PayloadWriteError, Resolver, Writer
from payload.retention import Report, sweep

ROWS = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
HEX = "0123456789abcdef" * 2
LEFTOVER = f".{HEX}.safetensors.node-1.example.org.4711.0a1b2c3d"


def versions(root: Path, *names: str) -> list[Path]:
    """Make version directories, each with one file of ours of 10 bytes."""
    made = []
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / f"{HEX}.safetensors").write_bytes(b"0123456789")
        made.append(root / name)
    return made


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_versions_below_keep_from_go_and_the_others_stay(tmp_path: Path) -> None:
    versions(tmp_path, "v0", "v2", "v10", "v007", "v8", "v9")
    report = sweep(tmp_path, keep_from=9)
    assert report == Report(
        removed=[f"{tmp_path}/{name}" for name in ("v0", "v2", "v007", "v8")],
        files=4,
        nbytes=40,
        pending={},
        errors={},
        kept=2,
        ignored=[],
        dry_run=False,
    )
    assert sorted(os.listdir(tmp_path)) == ["v10", "v9"]


def test_keep_from_zero_removes_nothing(tmp_path: Path) -> None:
    versions(tmp_path, "v0", "v1")
    report = sweep(tmp_path, keep_from=0)
    assert (report.removed, report.kept) == ([], 2)
    assert sorted(os.listdir(tmp_path)) == ["v0", "v1"]


def test_a_dry_run_says_the_same_and_removes_nothing(tmp_path: Path) -> None:
    for directory in versions(tmp_path, "v0", "v1", "v2"):
        (directory / LEFTOVER).write_bytes(b"abc")
    (tmp_path / "v1" / "notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    before = tree(tmp_path)
    said = sweep(tmp_path, keep_from=2, dry_run=True)
    assert tree(tmp_path) == before
    did = sweep(str(tmp_path), keep_from=np.int64(2))
    assert (said.dry_run, did.dry_run) == (True, False)
    assert said.removed == did.removed == [f"{tmp_path}/v0"]
    assert said.pending == did.pending == {f"{tmp_path}/v1": ["notes.txt"]}
    assert (said.files, said.nbytes) == (did.files, did.nbytes) == (4, 26)
    assert (said.kept, said.ignored) == (did.kept, did.ignored) == (1, ["other"])


def test_only_names_that_are_exactly_a_version_are_looked_at(tmp_path: Path) -> None:
    names = ["v", "v1x", "V1", "xv1", "v-1", "v1.bak", "1", "v 1", "v\u0661", "v1\n", ".v1", "run"]
    versions(tmp_path, *names)
    (tmp_path / "v2").write_text("a file")
    os.mkfifo(tmp_path / "v3")
    before = tree(tmp_path)
    report = sweep(tmp_path, keep_from=99)
    assert report.ignored == sorted([*names, "v2", "v3"])
    assert (report.removed, report.pending, report.kept) == ([], {}, 0)
    assert tree(tmp_path) == before


def test_versions_in_subdirectories_are_not_looked_for(tmp_path: Path) -> None:
    versions(tmp_path / "run", "v0")
    assert sweep(tmp_path, keep_from=9).ignored == ["run"]
    assert (tmp_path / "run" / "v0" / f"{HEX}.safetensors").exists()


def test_only_files_as_writers_name_them_are_removed(tmp_path: Path) -> None:
    [old] = versions(tmp_path, "v0")
    ours = [f"{HEX}.bin", "anything.bin", LEFTOVER, f".{HEX}.safetensors..1.00000000"]
    others = [
        "model.safetensors", f"{HEX}.safetensors.bak", f"{HEX}.json", f"{HEX.upper()}.safetensors",
        f"{HEX}0.safetensors", ".hidden.bin", ".bin", f".{HEX}.safetensors", ".nfs0001",
        f".{HEX}.safetensors.host.12.XYZ", "bin",
    ]  # fmt: skip
    for name in ours + others:
        (old / name).write_bytes(b"x")
    report = sweep(tmp_path, keep_from=1)
    assert report.removed == []
    assert report.pending == {str(old): sorted(others)}
    assert (report.files, report.nbytes) == (5, 14)
    assert sorted(os.listdir(old)) == sorted(others)


def test_what_has_our_name_and_is_no_regular_file_stays(tmp_path: Path) -> None:
    [old] = versions(tmp_path, "v0")
    outside = tmp_path / "outside.bin"
    outside.write_bytes(b"not ours")
    (old / "link.bin").symlink_to(outside)
    (old / "sub.bin").mkdir()
    (old / "sub.bin" / "deep.bin").write_bytes(b"deep")
    os.mkfifo(old / "pipe.bin")
    report = sweep(tmp_path, keep_from=1)
    assert report.pending == {str(old): ["link.bin", "pipe.bin", "sub.bin"]}
    assert outside.read_bytes() == b"not ours"
    assert (old / "sub.bin" / "deep.bin").read_bytes() == b"deep"


def test_a_linked_version_directory_is_not_followed(tmp_path: Path) -> None:
    [elsewhere] = versions(tmp_path / "elsewhere", "v0")
    root = tmp_path / "root"
    root.mkdir()
    (root / "v0").symlink_to(elsewhere)
    report = sweep(root, keep_from=9)
    assert (report.removed, report.ignored) == ([], ["v0"])
    assert (root / "v0").is_symlink()
    assert os.listdir(elsewhere) == [f"{HEX}.safetensors"]


def test_a_version_directory_swapped_for_a_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swap comes after the root was listed and before the version is opened."""
    from payload._paths import Roots

    [elsewhere] = versions(tmp_path / "elsewhere", "v0")
    root = tmp_path / "root"
    [old] = versions(root, "v0")
    opened = Roots.directory

    def swapped(self: Roots, place: tuple[str, str], path: str, make: int | None = None) -> Any:
        if place[1] == "v0" and not old.is_symlink():
            shutil.rmtree(old)
            old.symlink_to(elsewhere)
        return opened(self, place, path, make)

    monkeypatch.setattr(Roots, "directory", swapped)
    report = sweep(root, keep_from=9)
    assert (report.removed, report.ignored, report.files) == ([], ["v0"], 0)
    assert os.listdir(elsewhere) == [f"{HEX}.safetensors"]


def test_a_link_as_the_root_is_followed(tmp_path: Path) -> None:
    versions(tmp_path / "real", "v0")
    (tmp_path / "root").symlink_to(tmp_path / "real")
    report = sweep(tmp_path / "root", keep_from=1)
    assert report.removed == [f"{tmp_path}/root/v0"]
    assert os.listdir(tmp_path / "real") == []


def test_what_was_left_is_tried_again(tmp_path: Path) -> None:
    [old] = versions(tmp_path, "v0")
    (old / ".nfs0001").write_bytes(b"")
    assert sweep(tmp_path, keep_from=1).pending == {str(old): [".nfs0001"]}
    (old / ".nfs0001").unlink()  # as the client does once the view is gone
    report = sweep(tmp_path, keep_from=1)
    assert (report.removed, report.pending, report.files) == ([str(old)], {}, 0)


def test_a_view_mapped_before_stays_valid(tmp_path: Path) -> None:
    segments = Writer(tmp_path).write({"routed_experts": (0, ROWS)}, "v0")
    with Resolver(tmp_path, mode="map") as resolver:
        view = resolver.view(segments[0])
    assert sweep(tmp_path, keep_from=1).removed == [f"{tmp_path}/v0"]
    gc.collect()
    np.testing.assert_array_equal(view, ROWS)
    with Resolver(tmp_path) as resolver, pytest.raises(PayloadMissingError):
        resolver.view(segments[0])


def test_a_writer_goes_on_beside_a_sweep(tmp_path: Path) -> None:
    """In a kept version as before; in a swept one the directory is made anew."""
    writer = Writer(tmp_path)
    for version in ("v0", "v1"):
        writer.write({"routed_experts": (0, ROWS)}, version)
    (tmp_path / "v1" / LEFTOVER).write_bytes(b"being written")
    sweep(tmp_path, keep_from=1)
    assert (tmp_path / "v1" / LEFTOVER).read_bytes() == b"being written"
    for version in ("v0", "v1"):
        [segment] = writer.write({"routed_experts": (0, ROWS)}, version)
        with Resolver(tmp_path) as resolver:
            np.testing.assert_array_equal(resolver.view(segment), ROWS)


def test_a_write_into_a_version_swept_meanwhile_fails_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = os.rename

    def rename(*args: Any, **kwargs: Any) -> None:
        assert sweep(tmp_path, keep_from=1).files == 1  # the dot-file that is being written
        renamed(*args, **kwargs)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(PayloadWriteError) as caught:
        Writer(tmp_path).write({"routed_experts": (0, ROWS)}, "v0")
    assert caught.value.retryable
    assert tree(tmp_path) == []


def test_directories_and_files_that_vanish_meanwhile_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = versions(tmp_path, "v0", "v1")

    def unlink(name: str, *, dir_fd: int) -> None:
        monkeypatch.undo()
        for directory in directories:  # another sweep was faster
            shutil.rmtree(directory)
        os.unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    report = sweep(tmp_path, keep_from=9)
    assert (report.removed, report.files, report.pending, report.errors) == ([], 0, {}, {})


def test_what_the_system_refuses_is_said_and_the_rest_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [first, second] = versions(tmp_path, "v0", "v1")
    (first / "stuck.bin").write_bytes(b"x")
    unlinked = os.unlink

    def unlink(name: str, *, dir_fd: int) -> None:
        if name == "stuck.bin":
            raise PermissionError(13, "Permission denied")
        unlinked(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    report = sweep(tmp_path, keep_from=9)
    assert report.removed == [str(second)]
    assert report.pending == {str(first): ["stuck.bin"]}
    assert report.errors == {str(first): "'stuck.bin': Permission denied (EACCES)"}
    assert (report.files, report.nbytes) == (2, 20)


def test_hundreds_of_versions_need_few_descriptors(tmp_path: Path) -> None:
    for version in range(400):
        (tmp_path / f"v{version}").mkdir()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    assert len(sweep(tmp_path, keep_from=399).removed) == 399
    assert len(os.listdir("/proc/self/fd")) <= before
    assert os.listdir(tmp_path) == ["v399"]


def test_a_root_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(PayloadMissingError, match="mount it, or make it") as caught:
        sweep(tmp_path / "none", keep_from=1)
    assert (caught.value.reason, caught.value.path) == ("missing", f"{tmp_path}/none")
    (tmp_path / "file").write_text("")
    with pytest.raises(PayloadError, match="ENOTDIR") as other:
        sweep(tmp_path / "file", keep_from=1)
    assert (other.value.reason, other.value.path) == ("not_directory", f"{tmp_path}/file")


@pytest.mark.parametrize("keep_from", [-1, np.int64(-3)])
def test_a_negative_version_is_the_callers_mistake(keep_from: Any, tmp_path: Path) -> None:
    versions(tmp_path, "v0")
    with pytest.raises(ValueError, match="in the first steps max"):
        sweep(tmp_path, keep_from=keep_from)
    assert os.listdir(tmp_path) == ["v0"]


@pytest.mark.parametrize("keep_from", [1.0, "1", None, True])
def test_what_is_no_integer_is_the_callers_mistake(keep_from: Any, tmp_path: Path) -> None:
    versions(tmp_path, "v0")
    with pytest.raises(TypeError, match="needs an integer"):
        sweep(tmp_path, keep_from=keep_from)
    assert os.listdir(tmp_path) == ["v0"]
