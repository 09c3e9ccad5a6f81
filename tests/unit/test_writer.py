import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file

from payload import (
    PathError,
    PayloadError,
    PayloadWriteError,
    Ragged,
    Resolver,
    Segment,
    Writer,
    expert_dtype,
)

ROWS = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
MASK = Ragged.from_lists([[7], [8, 9, 10], []])


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir())


def test_the_bytes_of_a_file_are_these(tmp_path: Path) -> None:
    """Golden bytes: the layout of byhandle/1 cannot change unseen."""
    segments = Writer(tmp_path).write(
        {"routed_experts": (2, ROWS), "sampling_mask": (4, MASK)}, metadata={"weights": "7"}
    )
    content = Path(segments[0].file).read_bytes()
    header = (
        '{"__metadata__":{"format":"byhandle/1","sampling_mask.pos":"4",'
        '"sampling_mask.xxh3_64":"MASKHASH","routed_experts.pos":"2",'
        '"routed_experts.xxh3_64":"ROWSHASH","weights":"7"},'
        '"sampling_mask.offsets":{"dtype":"U32","shape":[4],"data_offsets":[0,16]},'
        '"sampling_mask.values":{"dtype":"I32","shape":[4],"data_offsets":[16,32]},'
        '"routed_experts":{"dtype":"U8","shape":[4,2,3],"data_offsets":[32,56]}}'
    )
    table = np.array([464, 468, 480, 480], "<u4").tobytes()
    values = np.array([7, 8, 9, 10], "<i4").tobytes()
    header = header.replace("MASKHASH", xxhash.xxh3_64_hexdigest(table + values))
    header = header.replace("ROWSHASH", xxhash.xxh3_64_hexdigest(ROWS.tobytes()))
    padded = header.encode().ljust(440)
    assert content == (440).to_bytes(8, "little") + padded + table + values + ROWS.tobytes()
    assert segments == [
        Segment("routed_experts", segments[0].file, 480, 2, 4, "uint8", (2, 3)),
        Segment("sampling_mask", segments[0].file, 448, 4, 3, "uint32", (), 32),
    ]


def test_a_real_safetensors_library_reads_the_file(tmp_path: Path) -> None:
    arrays = {
        f"a_{name}": (i, np.arange(6).astype(name).reshape(3, 2))
        for i, name in enumerate(
            "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64".split()
        )
    }
    arrays["sampling_mask"] = (0, MASK)
    arrays["none"] = (0, np.zeros((0, 4), np.uint16))
    segments = Writer(tmp_path).write(arrays)
    tensors = load_file(segments[0].file)
    for field, (_, array) in arrays.items():
        if field == "sampling_mask":
            np.testing.assert_array_equal(tensors["sampling_mask.values"], MASK.values)
            table = tensors["sampling_mask.offsets"].astype(int)
            np.testing.assert_array_equal((table - table[0]) // 4, MASK.offsets)
        else:
            np.testing.assert_array_equal(tensors[field], array, strict=True)
    assert [segment.field for segment in segments] == list(arrays)
    for segment in segments:
        assert (
            segment.offset % (4 if segment.dtype == "uint32" else segment.row_nbytes // 2 or 1) == 0
        )
    with open(segments[0].file, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        assert json.loads(file.read(size))["__metadata__"]["format"] == "byhandle/1"
        assert (8 + size) % 64 == 0


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for array in (
        rng.integers(0, 99, (5, 3, 2)).astype(">u2"),
        rng.random((4, 6)).astype(np.float64)[::2, ::3],
        np.asfortranarray(rng.integers(0, 9, (4, 5))),
        rng.random(7).astype(np.float16),
    ):
        [segment] = Writer(tmp_path).write({"x": (1, array)})
        with Resolver(tmp_path, verify="checksum") as resolver:
            view = resolver.view(segment)
        np.testing.assert_array_equal(view, array)
        assert view.dtype.name == array.dtype.name


def test_no_arrays_make_no_file(tmp_path: Path) -> None:
    assert Writer(tmp_path).write({}) == []
    assert files(tmp_path) == []


def test_the_directory_is_beneath_the_prefix_as_the_request_names_it(tmp_path: Path) -> None:
    writer = Writer(tmp_path, prefix="/shared/payload")
    for payload_dir, beneath in (
        (None, "v0"), ("/shared/payload/v3", "v3"), ("v4", "v4"), ("/shared/payload/a/v5/", "a/v5"),
        ("/shared/payload", ""), ("x/y", "x/y"),
    ):  # fmt: skip
        [segment] = writer.write({"f": (0, ROWS)}, payload_dir=payload_dir)
        local = tmp_path / os.path.relpath(segment.file, "/shared/payload")
        assert local.parent == tmp_path / beneath
        assert local.read_bytes().endswith(ROWS.tobytes())
        with Resolver({"/shared/payload": tmp_path}) as resolver:
            np.testing.assert_array_equal(resolver.view(segment), ROWS)


@pytest.mark.parametrize(
    "payload_dir",
    ["/etc", "/shared/payloads/v3", "/shared", "..", "a/../../b", "/shared/payload/../x", "a//b", "a/./b", "\0"],
)  # fmt: skip
def test_a_directory_outside_the_prefix_is_refused(payload_dir: str, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with pytest.raises(PathError):
        Writer(tmp_path / "root", prefix="/shared/payload").write({"f": (0, ROWS)}, payload_dir)
    assert files(tmp_path) == []


def test_a_directory_can_be_judged_before_there_is_anything_to_write(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "root", prefix="/shared/payload")
    for allowed in (None, "v3", "/shared/payload/v3", "/shared/payload/v3/"):
        writer.check(allowed)
    for outside in ("/etc", "/shared/payloads/v3", "..", "a//b", "\0", "/" + "x" * 5000):
        with pytest.raises(PathError):
            writer.check(outside)
    with pytest.raises(TypeError, match="payload_dir is 7: needs a path"):
        writer.check(7)  # type: ignore[arg-type]
    assert files(tmp_path) == []


def test_a_link_beneath_the_root_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "v3").symlink_to(tmp_path / "outside")
    with pytest.raises(PathError, match="symbolic link"):
        Writer(tmp_path / "root").write({"f": (0, ROWS)}, "v3")
    assert files(tmp_path / "outside") == []


def test_the_mode_is_as_asked_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        [segment] = Writer(tmp_path / "r", mode=0o640).write({"f": (0, ROWS)}, "v1")
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(segment.file).st_mode) == 0o640
    assert stat.S_IMODE(os.stat(tmp_path / "r" / "v1").st_mode) == 0o750


@pytest.mark.parametrize(
    ("arrays", "error"),
    [
        ({"": (0, ROWS)}, "field '' is empty"),
        ({"__metadata__": (0, ROWS)}, "uses itself"),
        ({"x.offsets": (0, ROWS)}, "uses itself"),
        ({"x": (-1, ROWS)}, "pos -1"),
        ({"x": (1.5, ROWS)}, "pos 1.5: needs an integer"),
        ({"x": ROWS}, "needs \\(pos, array\\)"),
        ({"x": (ROWS, 0)}, "needs an integer"),
        ([("x", (0, ROWS))], "arrays is list"),
        ({"sampling_mask": (0, ROWS)}, "needs Ragged, or padded"),
        ({"x": (0, np.array(["a"]))}, "dtype <U1"),
        ({"x": (0, np.array([None]))}, "dtype object"),
        ({"x": (0, np.zeros(2, complex))}, "dtype complex128"),
        ({"x": (0, np.uint8(3))}, "needs a numpy array"),
        ({"x": (0, np.array(3))}, "has no axis"),
        ({"x": (0, [[1, 2]])}, "is list"),
        ({"x": (0, MASK)}, "only fields known as ragged"),
        (
            {"sampling_mask": (0, Ragged(np.array([2**31]), [0, 1]))},
            "value 2147483648 does not fit",
        ),
    ],
    ids=lambda v: str(v)[:30],
)
def test_what_cannot_be_a_side_array_is_the_callers_mistake(
    arrays: Any, error: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, TypeError), match=error) as caught:
        Writer(tmp_path).write(arrays)
    assert not isinstance(caught.value, PayloadError)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "metadata", [{"format": "x"}, {"f.pos": "x"}, {"f.xxh3_64": "x"}, {"a": 1}, {1: "a"}]
)
def test_metadata_that_would_hide_ours_is_refused(metadata: Any, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match="metadata"):
        Writer(tmp_path).write({"f": (0, ROWS)}, metadata=metadata)
    assert files(tmp_path) == []


def test_limits_refuse_before_a_byte_is_written(tmp_path: Path) -> None:
    with pytest.raises(PayloadWriteError, match="the writer's max_bytes is 64") as caught:
        Writer(tmp_path, max_bytes=64).write({"f": (0, ROWS)})
    assert caught.value.expected == 64
    with pytest.raises(PayloadWriteError, match="must stay free") as caught:
        Writer(tmp_path, min_free=2**60).write({"f": (0, ROWS)})
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.actual < 2**60 < caught.value.expected
    assert files(tmp_path) == []


@pytest.mark.parametrize("call", ["pwrite", "fchmod", "close", "rename", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_call_that_fails_leaves_nothing_and_says_needed_and_free(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path, durable=True)
    writer.write({"f": (0, ROWS)})
    real = getattr(os, call)
    before = files(tmp_path)

    def fail(*args: Any, **kwargs: Any) -> None:
        if call == "close":
            regular = stat.S_ISREG(os.fstat(args[0]).st_mode)
            real(*args)
            if not regular:
                return
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(PayloadWriteError) as caught:
            writer.write({"f": (0, ROWS)})
    error = caught.value
    assert (error.errno, error.retryable) == (code, code != errno.EIO)
    assert f"needed {error.expected} bytes, {error.actual} are free" in str(error)
    assert error.actual > 0
    assert files(tmp_path) == before
    assert writer.write({"f": (0, ROWS)})


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(data[:7]), at))
    [segment] = Writer(tmp_path).write({"f": (0, ROWS)})
    assert Path(segment.file).read_bytes().endswith(ROWS.tobytes())
    with Resolver(tmp_path, verify="checksum") as resolver:
        np.testing.assert_array_equal(resolver.view(segment), ROWS)


def test_a_name_appears_only_when_the_file_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = os.rename

    def watch(src: str, dst: str, **kwargs: Any) -> None:
        seen.extend(files(tmp_path))
        real(src, dst, **kwargs)

    monkeypatch.setattr(os, "rename", watch)
    [segment] = Writer(tmp_path).write({"f": (0, ROWS)}, "v1")
    [temporary] = seen
    assert temporary.startswith("v1/.")
    assert files(tmp_path) == [os.path.relpath(segment.file, tmp_path)]


def test_a_table_past_4_gib_is_refused(tmp_path: Path) -> None:
    wide = np.zeros(2**29, np.float64)  # never touched, so no page of it exists
    with pytest.raises(PayloadWriteError, match="tables hold offsets up to 4294967295") as caught:
        Writer(tmp_path).write({"wide": (0, wide), "sampling_mask": (0, MASK)})
    assert (caught.value.reason, caught.value.field) == ("table_limit", "sampling_mask")
    assert caught.value.actual > 2**32
    assert files(tmp_path) == []


def test_a_directory_that_cannot_be_synced_takes_the_file_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fail(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "x")
        real(fd)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(PayloadWriteError, match="EIO"):
        Writer(tmp_path, durable=True).write({"f": (0, ROWS)})
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("experts", "name"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16")]
)
def test_expert_dtype_is_the_smallest_that_fits(experts: int, name: str) -> None:
    assert expert_dtype(experts) == name
    assert np.iinfo(expert_dtype(experts)).max >= experts - 1


@pytest.mark.parametrize("experts", [0, -1, 65537])
def test_expert_dtype_refuses_what_no_dtype_holds(experts: int) -> None:
    with pytest.raises(ValueError, match=f"num_experts is {experts}"):
        expert_dtype(experts)


def test_a_tower_of_directories_is_refused_before_one_is_made(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    deepest = "/".join("abcdefgh")
    assert writer.write({"f": (0, ROWS)}, payload_dir=deepest)
    for deeper in (f"{deepest}/i", f"{tmp_path}/" + "d/" * 1900 + "x"):
        with pytest.raises(PathError, match="directories beneath .*: needs at most 8") as caught:
            writer.write({"f": (0, ROWS)}, payload_dir=deeper)
        assert (caught.value.reason, caught.value.expected) == ("depth", 8)
        assert len(str(caught.value)) < 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
