import errno
import gc
import mmap
import os
import pickle
import socket
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from payload import (
    FIELDS,
    CoverageError,
    Field,
    PathError,
    PayloadCorruptError,
    PayloadError,
    PayloadMissingError,
    PayloadTruncatedError,
    Ragged,
    Resolver,
    ResolverClosedError,
    Segment,
    SegmentError,
    Writer,
    clip,
    decode_segments,
    encode_segments,
)
from tests import conftest

ROWS = np.arange(240, dtype=np.uint8).reshape(10, 4, 6)


@pytest.fixture
def written(tmp_path: Path) -> Segment:
    [segment] = Writer(tmp_path).write({"routed_experts": (5, ROWS)})
    return segment


def base(array: np.ndarray) -> Any:
    """The end of the chain of owners."""
    owner: Any = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return owner


def test_a_view_has_the_rows_is_read_only_and_ends_in_the_map(
    written: Segment, tmp_path: Path
) -> None:
    with Resolver(tmp_path) as resolver:
        for _ in range(2):  # the file is new, then known
            view = resolver.view(written)
            np.testing.assert_array_equal(view, ROWS, strict=True)
            assert isinstance(base(view), mmap.mmap)
            assert not view.flags.writeable
            assert view.flags.aligned
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True
        assert resolver.stats().bytes_copied == 0


def test_views_of_one_file_share_memory_and_one_map(written: Segment, tmp_path: Path) -> None:
    with Resolver(tmp_path) as resolver:
        first, second = resolver.view(written), resolver.view(written)
        assert np.shares_memory(first, second)
        assert base(first) is base(second)
        stats = resolver.stats()
        assert (stats.opens, stats.maps, stats.map_hits, stats.live_maps) == (1, 1, 1, 1)
        assert stats.bytes_mapped == os.path.getsize(written.file)


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int16", "uint32", "int64", "float16", "float64"]
)
@pytest.mark.parametrize("offset", [0, 1, 2, 100, 4095, 4096, 4097])
def test_any_offset_gives_what_a_plain_read_gives(
    dtype: str, offset: int, mode: str, tmp_path: Path
) -> None:
    content = np.random.default_rng(0).integers(0, 2, 9000, np.uint8).tobytes()
    path = tmp_path / "v1" / "a.bin"
    path.parent.mkdir()
    path.write_bytes(content)
    itemsize = np.dtype(dtype).itemsize
    with Resolver(tmp_path, mode=mode) as resolver:
        view = resolver.view(Segment("f", str(path), offset, 0, 3, dtype, (7, 2)))
        copied = resolver.stats().bytes_copied
    want = np.frombuffer(content, dtype, 42, offset).reshape(3, 7, 2)
    np.testing.assert_array_equal(view, want, strict=True)
    assert view.flags.aligned
    assert not view.flags.writeable
    assert copied == (42 * itemsize if mode == "copy" or offset % itemsize else 0)


@pytest.mark.parametrize("shape", [(0,), (4, 0), ()])
@pytest.mark.parametrize("rows", [0, 3])
def test_no_bytes_open_no_file(shape: tuple[int, ...], rows: int, tmp_path: Path) -> None:
    if rows and 0 not in shape:
        rows = 0
    segment = Segment("f", f"{tmp_path}/absent", 2**40, 7, rows, "uint16", shape)
    with Resolver(tmp_path) as resolver:
        view = resolver.view(segment)
        assert resolver.stats().opens == 0
    assert (view.shape, view.dtype) == ((rows, *shape), np.uint16)
    assert not view.flags.writeable


def test_resolve_groups_views_by_field_in_order(tmp_path: Path) -> None:
    mask = Ragged.from_lists([[7], [8, 9, 10], []])
    writer = Writer(tmp_path)
    arrays = {"routed_experts": (2, ROWS), "sampling_mask": (4, mask), "mine": (0, ROWS[:, 0, 0])}
    segments = writer.write(arrays) + writer.write({"routed_experts": (12, ROWS[:2])})
    with Resolver(tmp_path) as resolver:
        resolved = resolver.resolve(encode_segments(segments))
        assert resolver.resolve(None) == {}
        assert resolver.stats().bytes_copied == 0
    assert list(resolved) == ["routed_experts", "sampling_mask", "mine"]
    first, second = resolved["routed_experts"]
    np.testing.assert_array_equal(first, ROWS, strict=True)
    np.testing.assert_array_equal(second, ROWS[:2], strict=True)
    [ragged] = resolved["sampling_mask"]
    assert [row.tolist() for row in ragged] == [[7], [8, 9, 10], []]
    assert isinstance(base(ragged.values), mmap.mmap)


def test_views_outlive_close_eviction_and_unlink(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    segments = [writer.write({"f": (0, np.full(5000, i, np.uint8))})[0] for i in range(4)]
    with Resolver(tmp_path, max_maps=1) as resolver:
        views = [resolver.view(segment) for segment in segments]
        assert resolver.stats().live_maps == 4
        del views[0]
        gc.collect()
        assert resolver.stats().live_maps == 3
    for segment in segments:
        os.unlink(segment.file)
    assert [int(view[4999]) for view in views] == [1, 2, 3]


def test_a_map_is_gone_with_its_last_view(written: Segment, tmp_path: Path) -> None:
    resolver = Resolver(tmp_path)
    view = resolver.view(written)[3:4]
    watch = weakref.ref(base(view))
    resolver.close()
    resolver.close()
    assert watch() is not None
    del view
    gc.collect()
    assert watch() is None


def test_a_closed_resolver_says_so(written: Segment, tmp_path: Path) -> None:
    resolver = Resolver(tmp_path)
    resolver.view(written)
    resolver.close()
    for call in (
        lambda: resolver.view(written),
        lambda: resolver.resolve([written]),
        lambda: resolver.window([written], "routed_experts", 5, 6),
        lambda: resolver.ragged([written], "routed_experts", 5, 6),
        lambda: resolver.prefetch([written]),
    ):
        with pytest.raises(ResolverClosedError, match="resolver is closed"):
            call()


def test_a_resolver_pickles_as_its_parameters(written: Segment, tmp_path: Path) -> None:
    fields = FIELDS | {"mine": Field(fill=7)}
    with Resolver({"/server": tmp_path}, mode="copy", fields=fields, max_maps=3) as resolver:
        segment = decode_segments([written])[0]
        moved = Segment(*[*[getattr(segment, f) for f in segment.__struct_fields__][:7]])
        moved = Segment("mine", moved.file.replace(str(tmp_path), "/server"), *[
            moved.offset, moved.pos, moved.rows, moved.dtype, moved.shape])  # fmt: skip
        resolver.view(moved)
        packed = pickle.dumps(resolver)
    assert len(packed) < 1024
    with pickle.loads(packed) as twin:
        got = twin.window([moved], "mine", 4, 6, fill="field", holes="any")
    assert got[0, 0, 0] == 7
    np.testing.assert_array_equal(got[1], ROWS[0])


def legal(path: str, **changes: Any) -> dict[str, Any]:
    known = {
        "field": "f",
        "file": path,
        "offset": 0,
        "pos": 0,
        "rows": 1,
        "dtype": "uint8",
        "shape": [4],
    }
    return known | changes


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "{root}x/a", "{parent}/a", "{root}", "{root}/../a", "/a", "{root}/.a", "{root}/v1/.b.tmp"],
)  # fmt: skip
def test_a_path_outside_the_roots_is_refused_before_any_file_is_opened(
    path: str, mode: str, tmp_path: Path
) -> None:
    root = tmp_path / "run1"
    root.mkdir()
    path = path.format(root=root, parent=tmp_path)
    with Resolver(root, mode=mode) as resolver:
        for call in (
            lambda: resolver.view(Segment("f", path, 0, 0, 1, "uint8", (4,))),
            lambda: resolver.resolve([legal(path)]),
            lambda: resolver.window([legal(path)], "f", 0, 1),
            lambda: resolver.window([legal(path), legal(path, pos=1)], "f", 0, 2),
        ):
            with pytest.raises(PathError) as caught:
                call()
            assert caught.value.path == path
            assert repr(path) in str(caught.value)
        assert resolver.stats().opens == 0


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize("what", ["leaf", "middle", "fifo", "directory", "socket", "device"])
def test_what_is_not_a_regular_file_beneath_the_root_is_refused(
    what: str, mode: str, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    (root / "v1").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a").write_bytes(b"secret")
    path = root / "v1" / "a"
    listener = None
    if what == "leaf":
        path.symlink_to(tmp_path / "outside" / "a")
    elif what == "middle":
        (root / "v2").symlink_to(tmp_path / "outside")
        path = root / "v2" / "a"
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    elif what == "device":
        if os.geteuid():
            pytest.skip("making a device node needs root")
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(os.path.relpath(path))
    with Resolver(root, mode=mode) as resolver:
        with pytest.raises(
            PathError, match="symbolic link|not a regular file|cannot be read"
        ) as caught:
            resolver.view(Segment("f", str(path), 0, 0, 1, "uint8", (4,)))
        assert caught.value.path == str(path)
    if listener:
        listener.close()


def test_a_root_that_is_itself_a_link_is_followed(written: Segment, tmp_path: Path) -> None:
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    try:
        with Resolver({str(tmp_path): link}) as resolver:
            np.testing.assert_array_equal(resolver.view(written), ROWS)
    finally:
        link.unlink()


def test_the_longest_prefix_wins_and_only_whole_components_match(tmp_path: Path) -> None:
    for name in ("short", "long"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_bytes(name.encode())
    (tmp_path / "short" / "run").mkdir()
    (tmp_path / "short" / "runs").mkdir()
    (tmp_path / "short" / "runs" / "a").write_bytes(b"runs!")
    roots = {"/srv": tmp_path / "short", "/srv/run/": tmp_path / "long"}
    with Resolver(roots) as resolver:

        def read(path: str) -> bytes:
            return resolver.view(Segment("f", path, 0, 0, 4, "uint8", ())).tobytes()

        assert read("/srv/a") == b"shor"
        assert read("/srv/run/a") == b"long"
        assert read("/srv/runs/a") == b"runs"
        with pytest.raises(PathError, match=r"'/srv/run', '/srv'"):
            read(f"{tmp_path}/short/a")


def test_a_missing_file_says_what_its_directory_shows(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "b").touch()
    with Resolver(tmp_path) as resolver:
        with pytest.raises(PayloadMissingError) as caught:
            resolver.view(Segment("f", f"{tmp_path}/v1/a", 0, 0, 1, "uint8", (4,)))
        assert f"did not wait; its directory '{tmp_path}/v1' on " in str(caught.value)
        assert " has 1 entries): not written yet" in str(caught.value)
        assert caught.value.retryable
        with pytest.raises(PayloadMissingError, match="does not open: No such file"):
            resolver.view(Segment("f", f"{tmp_path}/v2/a", 0, 0, 1, "uint8", (4,)))
    with (
        Resolver(tmp_path / "absent") as resolver,
        pytest.raises(FileNotFoundError, match="absent' is no directory here.*: mount it, or map"),
    ):
        resolver.view(Segment("f", f"{tmp_path}/absent/v2/a", 0, 0, 1, "uint8", (4,)))


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_a_short_file_says_needed_and_found_in_bytes(mode: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(23))
    (tmp_path / "empty").touch()
    with Resolver(tmp_path, mode=mode) as resolver:
        for name, size in (("a", 23), ("empty", 0)):
            with pytest.raises(PayloadTruncatedError) as caught:
                resolver.view(Segment("f", f"{tmp_path}/{name}", 8, 0, 4, "uint8", (4,)))
            assert (caught.value.expected, caught.value.actual) == (24, size)
            assert f"has {size} bytes, its segment needs 24" in str(caught.value)
        (tmp_path / "a").write_bytes(bytes(24))  # the short one was not kept
        assert resolver.view(Segment("f", f"{tmp_path}/a", 8, 0, 4, "uint8", (4,))).nbytes == 16


def test_a_mapped_file_is_not_trusted_past_its_end(written: Segment, tmp_path: Path) -> None:
    size = os.path.getsize(written.file)
    with Resolver(tmp_path) as resolver:
        resolver.view(written)
        resolver.view(Segment("f", written.file, size - 4, 0, 1, "uint8", (4,)))
        for offset, rows in ((size - 3, 1), (size, 1), (0, size // 4 + 1), (2**62, 1)):
            with pytest.raises(PayloadTruncatedError):
                resolver.view(Segment("f", written.file, offset, 0, rows, "uint8", (4,)))


def test_a_wait_ends_when_the_file_comes(tmp_path: Path) -> None:
    import threading
    import time

    def late() -> None:
        time.sleep(0.1)
        (tmp_path / "v9").mkdir()
        (tmp_path / "v9" / "t").write_bytes(bytes(4))
        (tmp_path / "v9" / "t").rename(tmp_path / "v9" / "a")

    thread = threading.Thread(target=late)
    with Resolver(tmp_path, wait=10) as resolver:
        thread.start()
        view = resolver.view(Segment("f", f"{tmp_path}/v9/a", 0, 0, 1, "uint8", (4,)))
        assert view.nbytes == 4
        assert resolver.stats().waits > 0
    thread.join()
    with Resolver(tmp_path, wait=0.05) as resolver:
        began = time.monotonic()
        with pytest.raises(PayloadMissingError, match=r"waited 0\.05"):
            resolver.view(Segment("f", f"{tmp_path}/v9/b", 0, 0, 1, "uint8", (4,)))
        assert 0.05 <= time.monotonic() - began < 2


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_a_root_wiped_and_made_again_is_found_again(mode: str, tmp_path: Path) -> None:
    import shutil

    root = tmp_path / "root"
    writer = Writer(root)
    with Resolver(root, mode=mode) as resolver:
        for value in range(3):
            [segment] = writer.write({"f": (0, np.full(9, value, np.uint8))}, payload_dir="v3")
            assert resolver.view(segment).tolist() == [value] * 9
            shutil.rmtree(root)
            if value:
                root.mkdir()


def test_a_hand_built_segment_meets_the_check_when_the_file_is_already_mapped(
    written: Segment, tmp_path: Path
) -> None:
    import msgspec

    bad = [
        {"offset": -8}, {"offset": True}, {"offset": 8.0}, {"offset": 2**63}, {"offset": "8"},
        {"pos": -1}, {"pos": 1.0}, {"pos": 2**63 - 1}, {"rows": -1}, {"rows": True}, {"rows": 2**62},
        {"dtype": "u1"}, {"dtype": None}, {"shape": (4, True)}, {"shape": (4, 6.0)}, {"shape": (-4, -6)},
        {"shape": (4, "6")}, {"shape": None}, {"shape": "46"}, {"length": 239}, {"length": 240.0},
        {"file": ["x"]}, {"field": ["x"]}, {"file": None}, {"field": None},
    ]  # fmt: skip
    with Resolver(tmp_path) as resolver:
        resolver.view(msgspec.structs.replace(written, shape=(1, 6), rows=1))
        np.testing.assert_array_equal(
            resolver.view(msgspec.structs.replace(written, shape=[4, 6])), ROWS, strict=True
        )
        for change in bad:
            with pytest.raises(SegmentError):
                resolver.view(msgspec.structs.replace(written, **change))
        for junk in (None, 7, "x", {}, [], b"x"):
            with pytest.raises(SegmentError):
                resolver.view(junk)
        assert resolver.view(msgspec.structs.replace(written, length=240)).shape == ROWS.shape


def test_a_new_file_meets_the_check_when_its_kind_and_directory_are_known(
    written: Segment, tmp_path: Path
) -> None:
    import msgspec

    data = Path(written.file).read_bytes()
    directory = Path(written.file).parent
    names = ["new", "ü", "x" * 255]
    for name in names:
        (directory / name).write_bytes(data)
    (directory / "short").write_bytes(data[:-1])
    (directory / "link").symlink_to(written.file)
    (directory / ".hidden").write_bytes(data)
    os.mkfifo(directory / "fifo")
    bad: dict[Any, type[PayloadError]] = {
        "": PathError, ".hidden": PathError, ".": PathError, "..": PathError, "new\0": PathError,
        "\udc80": PathError, "x" * 256: PayloadError, "../new": PathError, "link": PathError,
        "fifo": PathError, "short": PayloadTruncatedError, "none": PayloadMissingError,
    }  # fmt: skip
    with Resolver(tmp_path) as resolver:
        resolver.view(written)
        for name, error in bad.items():
            segment = msgspec.structs.replace(written, file=f"{directory}/{name}")
            for call in (resolver.view, lambda s: resolver.resolve([s])):
                with pytest.raises(error) as caught:
                    call(segment)
                assert caught.value.path == segment.file
        for file in (None, 7, b"new", type("Text", (str,), {})(f"{directory}/new")):
            with pytest.raises(SegmentError):
                resolver.view(msgspec.structs.replace(written, file=file))
        for number in (-1, True, 1.0, 2**63):
            for key in ("offset", "pos", "rows", "length"):
                new = msgspec.structs.replace(written, file=f"{directory}/new", **{key: number})
                with pytest.raises(SegmentError):
                    resolver.view(new)
        opens = resolver.stats().opens
        for name in names:
            new = msgspec.structs.replace(written, file=f"{directory}/{name}")
            np.testing.assert_array_equal(resolver.view(new), ROWS, strict=True)
        assert resolver.stats().opens == opens + len(names)
        assert resolver.stats().maps == 1 + len(names)


def test_what_is_no_segment_is_refused_whether_or_not_its_file_is_mapped(
    written: Segment, tmp_path: Path
) -> None:
    import msgspec

    new = f"{tmp_path}/new"
    Path(new).write_bytes(Path(written.file).read_bytes())
    fields = msgspec.structs.asdict(written)
    upstream = {key: value for key, value in fields.items() if key != "length"}
    text = type("Text", (str,), {})(written.field)
    with Resolver(tmp_path) as resolver:
        resolver.view(written)
        for bad in (
            SimpleNamespace(**(upstream | {"file": new})),
            SimpleNamespace(**upstream),
            SimpleNamespace(**(fields | {"file": new})),
            msgspec.structs.replace(written, file=new, field=text),
        ):
            with pytest.raises(SegmentError) as caught:
                resolver.view(bad)  # type: ignore[arg-type]
            assert caught.value.reason == "wrong_type"
        assert resolver.stats().maps == 1


def test_resolve_does_not_look_at_every_map_that_is_kept(written: Segment, tmp_path: Path) -> None:
    class Maps(dict[str, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("all maps are looked at")

        keys = values = items = __iter__  # type: ignore[assignment]

    with Resolver(tmp_path) as resolver:
        resolver._maps = resolver._files.maps = Maps()
        [rows] = resolver.resolve([written])["routed_experts"]
        np.testing.assert_array_equal(rows, ROWS, strict=True)
        resolver._maps = resolver._files.maps = {}


def test_a_table_is_not_data(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(64))
    table = Segment("mine", f"{tmp_path}/a", 0, 0, 2, "uint32", ())
    mask = Segment("sampling_mask", f"{tmp_path}/a", 0, 0, 2, "uint32", ())
    odd = Segment("sampling_mask", f"{tmp_path}/a", 0, 0, 2, "int32", (1, 2))
    with Resolver(tmp_path) as resolver:
        with pytest.raises(SegmentError, match=r"not known as ragged: pass fields="):
            resolver.view(table)
        with pytest.raises(SegmentError, match=r"has no view: use Resolver.ragged"):
            resolver.view(mask)
        for call in (resolver.view, lambda s: resolver.window([s], s.field, 0, 2)):
            with pytest.raises(SegmentError, match="a ragged field needs row shape"):
                call(odd)
        with pytest.raises(SegmentError, match="is not known as ragged: use window"):
            resolver.ragged([Segment("mine", f"{tmp_path}/a", 0, 0, 2, "uint8", ())], "mine", 0, 2)


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_a_checksum_finds_one_flipped_bit_and_lost_pages(mode: str, tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    weights = np.linspace(0, 1, 50_000, dtype=np.float32).reshape(-1, 5)
    segments = writer.write({"routed_experts": (0, ROWS), "routed_expert_weights": (0, weights)})
    experts, scores = segments
    with Resolver(tmp_path, mode=mode, verify="checksum") as resolver:
        for _ in range(2):
            np.testing.assert_array_equal(resolver.view(experts), ROWS)
            np.testing.assert_array_equal(resolver.view(scores), weights)
    with open(experts.file, "r+b") as file:
        file.seek(experts.offset + 100)
        file.write(b"\xff")
    with Resolver(tmp_path, mode=mode, verify="checksum") as resolver:
        np.testing.assert_array_equal(resolver.view(scores), weights)  # the other one is whole
        with pytest.raises(PayloadCorruptError, match="the file was changed") as caught:
            resolver.view(experts)
        assert (caught.value.reason, caught.value.offset) == ("checksum", experts.offset)
        with pytest.raises(PayloadCorruptError):
            resolver.window([experts], "routed_experts", 3, 4, dtype="int32")
    with Resolver(tmp_path, mode=mode) as resolver:
        assert resolver.view(experts)[4, 0, 4] == 255
    with open(experts.file, "r+b") as file:
        file.seek(scores.offset)
        file.write(bytes(4096))
    with (
        Resolver(tmp_path, mode=mode, verify="checksum") as resolver,
        pytest.raises(PayloadCorruptError, match="lost"),
    ):
        resolver.view(scores)


def test_a_headerless_file_is_read_without_a_checksum(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(ROWS.tobytes())
    with Resolver(tmp_path, verify="checksum") as resolver:
        view = resolver.view(
            Segment("routed_experts", f"{tmp_path}/a.bin", 0, 0, 10, "uint8", (4, 6))
        )
        np.testing.assert_array_equal(view, ROWS)


def test_a_result_larger_than_max_bytes_is_refused(written: Segment, tmp_path: Path) -> None:
    with Resolver(tmp_path, max_bytes=239, mode="copy") as resolver:
        for call in (
            lambda: resolver.view(written),
            lambda: resolver.window([written], "routed_experts", 5, 15, dtype="uint16"),
        ):
            with pytest.raises(PayloadError, match="max_bytes is 239"):
                call()
        assert resolver.window([written], "routed_experts", 5, 14).nbytes == 216


@pytest.mark.parametrize(
    "bad",
    [
        {"mode": "mmap"}, {"wait": -1}, {"wait": float("nan")}, {"verify": "sha"}, {"max_maps": 0},
        {"fields": {"x": Field(ragged=True, dtype="int64")}},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_option_is_a_plain_value_error(bad: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs") as caught:
        Resolver(tmp_path, **bad)
    assert not isinstance(caught.value, PayloadError)


def test_roots_that_make_no_sense_are_refused() -> None:
    for roots, kind in (
        ([], ValueError), ({}, ValueError), (7, TypeError), ({"relative": "/a"}, ValueError),
        ({"/a/../b": "/a"}, ValueError), (b"/a", TypeError),
    ):  # fmt: skip
        with pytest.raises(kind):
            Resolver(roots)


def test_an_uncovered_position_is_an_error_that_lists_the_gaps(
    written: Segment, tmp_path: Path
) -> None:
    with Resolver(tmp_path) as resolver:
        with pytest.raises(CoverageError) as caught:
            resolver.window([written], "routed_experts", 3, 17)
        assert caught.value.actual == [(3, 5), (15, 17)]
        assert "4 of 14 rows uncovered in [3, 17): [3, 5), [15, 17)" in str(caught.value)


@pytest.mark.parametrize("kind", ["nfs4", "nfs"])
def test_resolve_asks_a_network_root_for_many_files_at_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path)
    arrays = [np.full((4, 2, 3), i, np.uint8) for i in range(8)]
    segments = [writer.write({"routed_experts": (0, one)})[0] for one in arrays]
    halves = [half for one in segments for half in (clip([one], 0, 2) + clip([one], 2, 4))]
    barrier = threading.Barrier(8, timeout=10)
    preadv = os.preadv

    def read(*args: object) -> int:
        barrier.wait()  # until all eight files are being read
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", read)
    with Resolver({str(tmp_path): {"directory": tmp_path, "type": kind}}) as resolver:
        views = resolver.resolve(halves)["routed_experts"]
        missing = [conftest.segment(file=f"{tmp_path}/v0/{i}.bin") for i in range(5)]
    assert [view.tolist() for view in views] == [
        half.tolist() for one in arrays for half in (one[:2], one[2:])
    ]
    began = time.monotonic()
    with (
        Resolver({str(tmp_path): {"directory": tmp_path, "type": kind}}, wait=0.3) as resolver,
        pytest.raises(PayloadMissingError, match="5 of 5") as caught,
    ):
        resolver.resolve(missing)
    assert caught.value.index == 0
    assert time.monotonic() - began < 2


def test_a_name_that_a_client_takes_for_missing_until_it_lists_is_seen(
    written: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an NFS client does where the name came in the same tick of the server's clock as the look."""
    listed: list[Any] = []
    real_open, real_scandir = os.open, os.scandir

    def open_(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(".safetensors") and not listed:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return real_open(path, *args, **kwargs)

    def scandir(directory: Any) -> Any:
        listed.append(directory)
        return real_scandir(directory)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "scandir", scandir)
    with Resolver({str(tmp_path): {"directory": tmp_path, "type": "nfs"}}) as resolver:
        began = time.monotonic()
        np.testing.assert_array_equal(resolver.view(written), ROWS)
        assert time.monotonic() - began < 2
        assert len(listed) == 1  # once while the directory stands still
        assert resolver.stats().waits > 1  # and not at the first look
