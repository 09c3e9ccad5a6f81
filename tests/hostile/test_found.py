"""Faults that were found by attacking the library, each kept as its smallest case."""

import asyncio
import gc
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload import (
    Field,
    PathError,
    PayloadCorruptError,
    PayloadError,
    PayloadMissingError,
    PayloadWriteError,
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
from payload._threads import Threads
from payload.format import decode_header, encode_header

BYTES = np.arange(200, dtype=np.uint8)


@pytest.fixture
def written(tmp_path: Path) -> Segment:
    [segment] = Writer(tmp_path).write({"f": (0, BYTES)})
    return segment


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize("damage", ["all", "length", "first", "brace", "format"])
def test_a_damaged_header_does_not_switch_checksums_off(
    damage: str, mode: str, written: Segment, tmp_path: Path
) -> None:
    content = bytearray(Path(written.file).read_bytes())
    if damage == "all":
        content = bytearray(len(content))
    elif damage == "length":
        content[0] = 0
    elif damage == "first":
        content[8:40] = bytes(32)
    elif damage == "brace":
        content[9] = 0
    else:
        content = bytearray(bytes(content).replace(b"byhandle/1", b"byhandle/2"))
    Path(written.file).write_bytes(content)
    with Resolver(tmp_path, mode=mode, verify="checksum") as resolver:
        for call in (resolver.view, lambda s: resolver.window([s], "f", 0, 9, dtype="int16")):
            with pytest.raises(PayloadCorruptError, match="header") as caught:
                call(written)
            assert caught.value.reason == "header"


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize("bad", ["/etc/passwd", "{root}x/a", "{root}/v0/.a"])
def test_a_bad_path_among_good_ones_is_refused_before_any_is_opened(
    bad: str, mode: str, written: Segment, tmp_path: Path
) -> None:
    bad = bad.format(root=tmp_path)
    for rows in (0, 5):
        segments = [written, Segment("f", bad, 0, 200, rows, "uint8", ())]
        with Resolver(tmp_path, mode=mode) as resolver:
            for call in (
                lambda r, s: r.resolve(s),
                lambda r, s: r.window(s, "f", 0, 205),
                lambda r, s: r.window(s, "f", 0, 10),
                lambda r, s: r.prefetch(s),
            ):
                with pytest.raises(PathError) as caught:
                    call(resolver, segments)
                assert str(caught.value).endswith("- at $.payload[1].file")
                assert (caught.value.index, caught.value.path) == (1, bad)
            assert resolver.stats().opens == 0


def test_bytes_no_side_array_has_are_not_read_with_checksums(
    written: Segment, tmp_path: Path
) -> None:
    with Resolver(tmp_path, verify="checksum") as resolver:
        for offset in (0, written.offset - 1):
            with pytest.raises(PayloadCorruptError, match="belong to no side array"):
                resolver.view(Segment("f", written.file, offset, 0, 10, "uint8", ()))
        part = Segment("f", written.file, written.offset + 5, 0, 10, "uint8", ())
        assert resolver.view(part).tolist() == list(range(5, 15))


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_a_file_mapped_again_is_compared_again(mode: str, written: Segment, tmp_path: Path) -> None:
    """Lost pages do not move the modification time."""
    [other] = Writer(tmp_path).write({"f": (0, BYTES)})
    with Resolver(tmp_path, mode=mode, verify="checksum", max_maps=1) as resolver:
        resolver.view(written)
        resolver.view(other)
        status = os.stat(written.file)
        with open(written.file, "r+b") as file:
            file.seek(written.offset)
            file.write(bytes(50))
        os.utime(written.file, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(PayloadCorruptError, match="checksum"):
            resolver.view(written)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' + "[" * 100_000,
        '{"a":' + "[" * 5000 + "]" * 5000 + ',"__metadata__":{"format":"byhandle/1"}}',
        '{"__metadata__":' + "[" * 5000 + "]" * 5000 + "}",
        '{"__metadata__":{"format":"byhandle/1"},"f":{"dtype":"U8","shape":[5],"data_offsets":[0,4]}}',
        '{"__metadata__":{"format":"byhandle/1"},"f":{"dtype":"U8","shape":[-5],"data_offsets":[0,5]}}',
        '{"__metadata__":{"format":"byhandle/1"},"f":{"dtype":"U7","shape":[5],"data_offsets":[0,5]}}',
        '{"__metadata__":{"format":"byhandle/1"},"f":{"dtype":"U8","shape":[5],"data_offsets":[1,6]}}',
        '{"__metadata__":{"format":"byhandle/1"},"f":7}',
        '{"__metadata__":{"format":"byhandle/1","g.xxh3_64":"0"},"f":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}',
        '{"__metadata__":{"format":"byhandle/1"},"f":{"dtype":"U8","shape":[4611686018427387904,8],"data_offsets":[0,5]}}',
    ],
    ids=range(10),
)  # fmt: skip
def test_a_crafted_header_is_corrupt_and_nothing_else(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + b"12345")
    segment = Segment("f", str(path), 8 + len(text), 0, 5, "uint8", ())
    with Resolver(tmp_path, verify="checksum") as resolver, pytest.raises(PayloadCorruptError):
        resolver.view(segment)
    good = '{"__metadata__":{"format":"byhandle/1","f.xxh3_64":"%s"},"f":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}'
    text = good % __import__("xxhash").xxh3_64_hexdigest(b"12345")
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + b"12345")
    segment = Segment("f", str(path), 8 + len(text), 0, 5, "uint8", ())
    with Resolver(tmp_path, verify="checksum") as resolver:
        assert resolver.view(segment).tobytes() == b"12345"


@pytest.mark.parametrize(
    "metadata", [{"x": "y" * (1 << 20)}, {"policy.xxh3_64": "abc"}, {"other.pos": "1"}]
)
def test_metadata_that_would_make_a_file_unreadable_is_refused(
    metadata: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="metadata"):
        Writer(tmp_path).write({"f": (0, BYTES)}, metadata=metadata)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64", "int8"])
def test_a_float16_infinity_does_not_become_an_integer(dtype: str, tmp_path: Path) -> None:
    np.array([1, -np.inf, np.inf], np.float16).tofile(tmp_path / "a")
    for count, at in ((1, 1), (1, 2)):
        segment = Segment("f", f"{tmp_path}/a", 2 * at, 0, count, "float16", ())
        with (
            Resolver(tmp_path) as resolver,
            pytest.raises(PayloadCorruptError, match="is not an integer of"),
        ):
            resolver.window([segment], "f", 0, 1, dtype=dtype)
    one = Segment("f", f"{tmp_path}/a", 0, 0, 1, "float16", ())
    with Resolver(tmp_path) as resolver:
        assert resolver.window([one], "f", 0, 1, dtype=dtype).tolist() == [1]


@pytest.mark.parametrize(
    ("field", "array"),
    [
        ("sampling_mask", np.zeros(4, np.int32)), ("sampling_mask", np.zeros(4, np.int64)),
        ("sampling_mask", np.zeros((4, 2, 2), np.int32)), ("ids", np.zeros(4, np.uint32)),
        ("f", np.ma.masked_array([1, 2], [0, 1])),
    ],
)  # fmt: skip
def test_what_a_reader_would_take_for_something_else_is_not_written(
    field: str, array: np.ndarray, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, TypeError), match=field):
        Writer(tmp_path).write({field: (0, array)})
    assert not list(tmp_path.rglob("*.*"))


def test_the_wires_padding_does_not_show_beside_another_fill(tmp_path: Path) -> None:
    np.array([[5, -1, -1]], np.int32).tofile(tmp_path / "p")
    segments = [
        Segment("sampling_mask", f"{tmp_path}/p", 0, 0, 1, "int32", (3,)),
        *Writer(tmp_path).write({"sampling_mask": (1, Ragged.from_lists([[7]]))}),
    ]
    with Resolver(tmp_path) as resolver:
        got = resolver.window(segments, "sampling_mask", 0, 2, fill=65535, dtype="uint16")
        assert got.tolist() == [[5, 65535, 65535], [7, 65535, 65535]]


@pytest.mark.parametrize(
    ("rows", "dtype", "error"),
    [
        ([[2**53 + 1], [2**63]], "uint64", None), ([[-1], [2**63]], "int64", "does not fit"),
        ([[2**64]], "uint64", "does not fit"), ([[2**53 + 1], [0.5]], "float64", "not exact beside floats"),
        ([[1.5]], "int32", "not an integer"), ([["a"]], "int32", "needs numbers"), ([[True], [2]], "uint8", None),
    ],
)  # fmt: skip
def test_lists_of_numbers_are_never_rounded(rows, dtype: str, error: str | None) -> None:
    if error:
        with pytest.raises((ValueError, TypeError), match=error):
            Ragged.from_lists(rows, dtype)
    else:
        assert [r.tolist() for r in Ragged.from_lists(rows, dtype)] == rows


def test_a_directory_that_became_a_link_is_not_listed(tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    root.mkdir()
    secret.mkdir()
    for i in range(38):
        (secret / f"{i}").touch()
    (root / "v1").symlink_to(secret)
    with Resolver(root) as resolver, pytest.raises(PathError) as caught:
        resolver.view(Segment("f", f"{root}/v1/a", 0, 0, 1, "uint8", ()))
    assert "entries" not in str(caught.value)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads is the point
def test_a_child_forked_while_others_write_and_read_can_do_both(tmp_path: Path) -> None:
    writer, stop = Writer(tmp_path), threading.Event()
    with Resolver(tmp_path) as resolver:

        def busy(n: int) -> None:
            while not stop.is_set():
                segments = writer.write(
                    {"f": (0, BYTES)}, payload_dir=f"v{n}/{time.monotonic_ns()}"
                )
                resolver.view(segments[0])
                resolver.window(segments, "f", 0, 9, dtype="int16")

        threads = [threading.Thread(target=busy, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(25):
                child = os.fork()
                if not child:
                    status = 1
                    try:
                        segments = writer.write({"f": (0, BYTES)})
                        ok = (resolver.window(segments * 2, "f", 0, 200) == BYTES).all()
                        resolver.prefetch(segments)
                        status = 0 if ok else 2
                    finally:
                        os._exit(status)
                deadline = time.monotonic() + 20
                while True:
                    pid, status = os.waitpid(child, os.WNOHANG)
                    if pid:
                        break
                    if time.monotonic() > deadline:
                        os.kill(child, 9)
                        os.waitpid(child, 0)
                        pytest.fail("the child hangs")
                    time.sleep(0.002)
                assert status == 0
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_a_hole_for_every_second_row_costs_linear_time(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(40_000))
    n = 20_000
    segments = [Segment("f", f"{tmp_path}/a", i, 2 * i, 1, "uint8", ()) for i in range(n)]
    holes = [(2 * i + 1, 2 * i + 2) for i in range(n)]
    with Resolver(tmp_path) as resolver:
        began = time.monotonic()
        assert resolver.window(segments, "f", 0, 2 * n, fill=0, holes=holes).sum() == 0
        assert time.monotonic() - began < 5  # it was a minute


HUGE = [
    ("resolve", ["sampling_mask", 0, 0, 2**40, "uint32", []]),
    ("resolve", ["sampling_mask", 0, 0, 2**60, "uint32", []]),
    ("window", ["sampling_mask", 0, 0, 2**40, "uint32", []]),
    ("ragged", ["sampling_mask", 0, 0, 1, "int32", [2**42]]),
    ("window", ["sampling_mask", 0, 0, 1, "int32", [2**42]]),
    ("window", ["f", 0, 0, 1, "float64", [2**32]]),
    ("window", ["f", 0, 0, 1, "uint8", [2**62, 0]]),
    ("view", ["f", 0, 0, 1, "uint8", [2**50]]),
    ("view", ["f", 0, 0, 2**60, "uint8", []]),
]


@pytest.mark.parametrize("mode", ["map", "copy"])
@pytest.mark.parametrize(("call", "wire"), HUGE, ids=str)
def test_a_claim_of_terabytes_takes_no_memory(
    call: str, wire: list, mode: str, tmp_path: Path
) -> None:
    (tmp_path / "p").write_bytes(bytes(64))
    segment = decode_segments([[wire[0], f"{tmp_path}/p", *wire[1:]]])[0]
    with Resolver(tmp_path, mode=mode) as resolver:
        calls: dict[str, Any] = {
            "resolve": lambda: resolver.resolve([segment]),
            "window": lambda: resolver.window(
                [segment], wire[0], 0, 4, dtype="uint8", fill=0, holes="any"
            ),
            "ragged": lambda: resolver.ragged([segment], wire[0], 0, 4),
            "view": lambda: resolver.view(segment),
        }
        with pytest.raises(PayloadError):
            calls[call]()


def test_a_window_of_the_callers_own_that_is_too_large_is_refused(tmp_path: Path) -> None:
    empty = Segment("sampling_mask", f"{tmp_path}/p", 0, 0, 0, "uint32", ())
    with Resolver(tmp_path) as resolver:
        for call in (resolver.ragged, resolver.window):
            with pytest.raises(PayloadError, match="max_bytes is"):
                call([empty], "sampling_mask", 0, 2**45)


@pytest.mark.parametrize(
    "wire",
    [
        b"\x91\x97\xa1f" + b"\x91" * 990 + b"\x01" + b"\x00\x00\x01\xa5uint8\x91\x01",
        [["f", "/" + "a" * 1100 + "\ud800", 0, 0, 1, "uint8", [1]]],
        [["f", [10**5000], 0, 0, 1, "uint8", [1]]],
        [["f", "/a", 0, 0, 1, {"x": 10**5000}, [1]]],
        memoryview(b"[x[x]x]x")[::2],
    ],
    ids=range(5),
)
def test_what_cannot_even_be_shown_is_still_a_segment_error(wire: Any) -> None:
    with pytest.raises(SegmentError):
        decode_segments(wire)


def test_the_short_cut_of_view_does_not_skip_a_bound(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(bytes(64))
    with Resolver(tmp_path) as resolver:
        resolver.view(Segment("f", f"{tmp_path}/p", 0, 0, 1, "uint8", (1,)))
        resolver.view(Segment("f", f"{tmp_path}/p", 0, 0, 1, "uint64", (0,)))
        with pytest.raises(SegmentError, match="at most"):
            resolver.view(Segment("f", f"{tmp_path}/p", 0, 0, 2**62, "uint64", (0,)))


def test_values_that_are_not_contiguous_are_written(tmp_path: Path) -> None:
    mask = Ragged(np.arange(8, dtype=np.int32)[::2], [0, 1, 4])
    segments = Writer(tmp_path).write({"sampling_mask": (0, mask)})
    with Resolver(tmp_path) as resolver:
        assert resolver.ragged(segments, "sampling_mask", 0, 2).values.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda r, s: r.window([s], "f", 0, 9, out=[1]), TypeError),
        (lambda r, s: r.read_into([s], "f", 0, 9, [1]), TypeError),
        (lambda r, s: r.window([s], "f", 0, 9, dtype="i4,,"), TypeError),
        (lambda r, s: Resolver("/tmp", fields={"x": Field(dtype="int")}), ValueError),
        (lambda r, s: Resolver("/tmp", max_bytes=0), ValueError),
        (lambda r, s: r.window([s], "f", 0, 9, holes=np.array([[4, 5, 6]])), ValueError),
    ],
)
def test_a_callers_mistake_is_a_plain_error_that_names_it(
    call: Any, error: type, written: Segment, tmp_path: Path
) -> None:
    with Resolver(tmp_path) as resolver, pytest.raises(error, match="needs") as caught:
        call(resolver, written)
    assert not isinstance(caught.value, PayloadError)


@pytest.mark.parametrize("arrays", [{5: (0, BYTES)}, [("f", (0, BYTES))], {"f": BYTES}])
def test_a_writers_callers_mistake_names_it(arrays: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="needs"):
        Writer(tmp_path).write(arrays)
    segments = Writer(tmp_path).write({"f": (0, BYTES)}, payload_dir=tmp_path / "v7")
    assert "/v7/" in segments[0].file
    with pytest.raises(TypeError, match="payload_dir is 3"):
        Writer(tmp_path).write({"f": (0, BYTES)}, payload_dir=3)


def test_holes_may_be_an_array(written: Segment, tmp_path: Path) -> None:
    with Resolver(tmp_path) as resolver:
        got = resolver.window([written], "f", 199, 202, fill=0, holes=np.array([[200, 300]]))
        assert got.tolist() == [199, 0, 0]


def test_a_view_taken_while_the_resolver_closes_does_not_reopen_it(
    written: Segment, tmp_path: Path
) -> None:
    for _ in range(50):
        resolver = Resolver(tmp_path)
        barrier = threading.Barrier(3)

        def view(resolver: Resolver = resolver, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            for _ in range(20):
                try:
                    resolver.view(written)
                except ResolverClosedError:
                    return

        threads = [threading.Thread(target=view) for _ in range(2)]
        for thread in threads:
            thread.start()
        barrier.wait()
        resolver.close()
        for thread in threads:
            thread.join()
        assert resolver.stats().live_maps == 0
        with pytest.raises(ResolverClosedError):
            resolver.view(written)


def test_a_moment_without_descriptors_does_not_end_mapping(
    written: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from payload import _files

    with Resolver(tmp_path) as resolver:
        with monkeypatch.context() as patch:
            patch.setattr(_files, "filesystem_type", lambda fd: "")
            resolver.view(written)
            assert resolver.stats().maps == 0
        resolver.view(written)
        assert resolver.stats().maps == 1


def test_a_stat_that_fails_leaves_no_descriptor_open(
    written: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Resolver(tmp_path, wait=0) as resolver:
        resolver.view(written)
        before = len(os.listdir("/proc/self/fd"))
        real = os.fstat

        def stale(fd: int) -> os.stat_result:
            if os.readlink(f"/proc/self/fd/{fd}") == written.file:
                raise OSError(116, "Stale file handle")
            return real(fd)

        resolver._files.maps.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", stale)
            for _ in range(20):
                with pytest.raises(PayloadError):
                    resolver.view(written)
        gc.collect()  # tracebacks hold directories
        assert len(os.listdir("/proc/self/fd")) <= before


def test_a_relative_root_stays_the_same_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    [segment] = Writer("sub").write({"f": (0, BYTES)})
    packed = pickle.dumps(Resolver("sub"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    with pickle.loads(packed) as resolver:
        np.testing.assert_array_equal(resolver.view(segment), BYTES)


def test_two_leading_slashes_of_a_root_mean_one(written: Segment, tmp_path: Path) -> None:
    with Resolver(f"/{tmp_path}") as resolver:
        np.testing.assert_array_equal(resolver.view(written), BYTES)
    assert Writer(f"/{tmp_path}").write({"f": (0, BYTES)})[0].file.startswith(f"{tmp_path}/v0/")


def test_a_root_the_writer_makes_can_be_entered_by_others(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        Writer(tmp_path / "a" / "root").write({"f": (0, BYTES)})
    finally:
        os.umask(old)
    assert os.stat(tmp_path / "a" / "root").st_mode & 0o777 == 0o755


def test_a_root_moved_away_is_not_written_into(tmp_path: Path) -> None:
    root = tmp_path / "root"
    writer = Writer(root)
    writer.write({"f": (0, BYTES)}, "v1")
    root.rename(tmp_path / "old")
    [segment] = writer.write({"f": (0, BYTES)}, "v1")
    assert Path(segment.file).exists()
    (root / "v1").rename(tmp_path / "v1")
    [segment] = writer.write({"f": (0, BYTES)}, "v1")
    assert Path(segment.file).exists()


def test_clip_far_out_stays_legal() -> None:
    [kept] = clip([Segment("f", "/p", 0, 0, 1, "uint8", ())], 2**63, 2**64)
    assert decode_segments([kept]) == [kept]


def test_prefetch_brings_in_a_mask_with_its_values_and_all_of_a_large_segment(
    tmp_path: Path,
) -> None:
    mask = Ragged.from_lists([[7], [8, 9]])
    large = np.zeros(20 << 20, np.uint8)
    segments = Writer(tmp_path).write({"sampling_mask": (0, mask), "f": (0, large)})
    segments.append(Segment("f", segments[0].file, 0, 0, 4, "uint8", (0,)))
    # Declared to be on a network, where it is read whatever the directory is on.
    roots = {str(tmp_path): {"directory": tmp_path, "type": "nfs4"}}
    with Resolver(roots) as resolver:
        resolver.prefetch(encode_segments(segments))
        done = threading.Event()
        resolver._files.threads.later(done.set)
        assert done.wait(20)
        stats = resolver.stats()
    assert stats.bytes_prefetched == 24 + (20 << 20)
    assert stats.opens == 2


def test_without_a_thread_to_be_had_the_caller_does_all_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    large = np.arange(1 << 21, dtype=np.uint32).view(np.uint8)  # hashed beside, read by two
    writer = Writer(tmp_path)
    segments = [
        Segment("f", segment.file, segment.offset, at * len(large), len(large), "uint8", ())
        for at in range(3)
        for segment in writer.write({"f": (0, large)})
    ]
    roots = {str(tmp_path): {"directory": tmp_path, "type": "nfs4"}}
    with Resolver(roots) as resolver:
        resolver.prefetch(segments)
        window = resolver.window(segments, "f", 0, 3 * len(large))
        assert window is not None
        np.testing.assert_array_equal(window.reshape(3, -1), [large] * 3)
    assert asyncio.run(writer.awrite({"f": (0, BYTES)}))[0].rows == len(BYTES)


def test_work_a_pool_kept_after_it_refused_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, go, done = Threads(4), threading.Event(), []
    first = threads.submit(lambda: go.wait(20))

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert threads.submit(lambda: done.append("once")).result(0) is None
    threads.run(lambda: done.append("here"), 3)
    go.set()
    assert first.result(20)
    monkeypatch.undo()
    threads.submit(lambda: None).result(20)
    threads.close()
    assert done == ["once", "here"]


@pytest.mark.parametrize("depth", ["", "a/b/c"])
def test_a_root_made_under_a_narrow_umask_is_open_to_readers_at_every_level(
    depth: str, tmp_path: Path
) -> None:
    root = tmp_path / "root" / depth
    before = os.umask(0o077)
    try:
        [segment] = Writer(root).write({"f": (0, BYTES)}, "v1/x")
    finally:
        os.umask(before)
    above = Path(segment.file).parent
    while above != tmp_path:
        assert above.stat().st_mode & 0o777 == 0o755, above
        above = above.parent


def test_a_caller_s_mistake_with_the_writer_is_a_plain_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="metadata is list: needs a mapping"):
        Writer(tmp_path).write({"f": (0, BYTES)}, metadata=[("a", "b")])  # type: ignore[arg-type]
    for min_free in (-1, (0, -1)):
        with pytest.raises(ValueError, match="min_free is .*: needs bytes and inodes, 0 or more"):
            Writer(tmp_path, min_free=min_free)


def test_a_write_that_is_refused_for_space_makes_no_directory(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "root", min_free=1 << 62)
    with pytest.raises(PayloadWriteError, match="while 4611686018427387904 must stay free"):
        writer.write({"f": (0, BYTES)}, "v1")
    assert list((tmp_path / "root").iterdir()) == []


def test_a_header_of_dtypes_unknown_or_too_many_dimensions_says_so(written: Segment) -> None:
    content = Path(written.file).read_bytes()
    assert decode_header(content, "p", len(content)) is not None
    other = content.replace(b'"U8"', b'"X8"')
    with pytest.raises(PayloadCorruptError, match="tensor 'f' has dtype 'X8'"):
        decode_header(other, "p", len(other))
    many = encode_header({"f": ("uint8", (1,) * 40 + (200,), 200)}, {}) + bytes(200)
    with pytest.raises(PayloadCorruptError, match="tensor 'f' has 41 dimensions"):
        decode_header(many, "p", len(many))


@pytest.mark.parametrize("call", ["resolve", "window"])
def test_a_file_in_a_directory_made_anew_is_not_listed_with_the_missing_ones(
    call: str, tmp_path: Path
) -> None:
    writer = Writer(tmp_path)
    [gone] = writer.write({"f": (0, BYTES)}, "v1")
    [old] = writer.write({"f": (200, BYTES)}, "v2")
    with Resolver(tmp_path, mode="copy", wait=0) as resolver:
        resolver.resolve([gone, old])  # both directories are kept open
        Path(gone.file).unlink()
        (tmp_path / "v2").rename(tmp_path / "old")
        [made] = Writer(tmp_path).write({"f": (200, BYTES)}, "v2")
        window = () if call == "resolve" else ("f", 0, 400)
        with pytest.raises(PayloadMissingError) as caught:
            getattr(resolver, call)([gone, made], *window)
    assert caught.value.path == gone.file
    assert caught.value.errors == ()  # there are no others
    assert "cannot be read" not in str(caught.value)
