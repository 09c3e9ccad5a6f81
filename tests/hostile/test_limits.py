"""Descriptors, maps and memory run out: what can be read still is, with the reason counted."""

import errno
import json
import logging
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from payload import PayloadError, Resolver, Segment, _files


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def put(root: Path, count: int) -> list[Segment]:
    segments = []
    for i in range(count):
        (root / f"v{i % 3}").mkdir(exist_ok=True)
        path = root / f"v{i % 3}" / f"{i}.bin"
        path.write_bytes(np.full(5000, i % 251, np.uint8).tobytes())
        segments.append(Segment("f", str(path), 0, 0, 5000, "uint8", ()))
    return segments


def test_ten_thousand_segments_in_twenty_files_within_64_descriptors(
    few_descriptors: None, tmp_path: Path
) -> None:
    segments = put(tmp_path, 20)
    with Resolver(tmp_path) as resolver:
        for n in range(10_000):
            i = n * 7 % 20
            part = Segment("f", segments[i].file, n % 4000, 0, 100, "uint8", ())
            assert resolver.view(part)[99] == i
        stats = resolver.stats()
    assert (stats.maps, stats.opens, stats.fallbacks) == (20, 20, {})


def test_views_held_beyond_the_limit_are_read_instead(
    few_descriptors: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segments = put(tmp_path, 100)
    with Resolver(tmp_path) as resolver, caplog.at_level(logging.WARNING, "payload"):
        views = [resolver.view(segment) for segment in segments]
        stats = resolver.stats()
    assert [int(view[4999]) for view in views] == [i % 251 for i in range(100)]
    if stats.fallbacks:  # before Python 3.13 a map holds a descriptor
        assert set(stats.fallbacks) == {"EMFILE"}
        assert stats.live_maps + stats.fallbacks["EMFILE"] == 100
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "are read instead of mapped" in caplog.text
        assert "limited to 64" in caplog.text
    else:
        assert stats.live_maps == 100


@pytest.mark.parametrize("others", [0, 10, 20, 30, 36])
def test_views_held_are_read_at_last_whatever_else_the_process_has_open(
    others: int, tmp_path: Path
) -> None:
    paths = [segment.file for segment in put(tmp_path, 100)]
    code = """
import json, os, resource, sys
from payload import Resolver, Segment
root, others, paths = json.loads(sys.argv[1])
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(others)]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with Resolver(root) as resolver:
    views = [resolver.view(Segment("f", path, 0, 0, 5000, "uint8", ())) for path in paths]
print([int(view[4999]) for view in views])
"""
    # A process of its own: the tests' has more descriptors open, and holes between them.
    job = json.dumps([str(tmp_path), others, paths])
    done = subprocess.run(
        [sys.executable, "-c", code, job], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [i % 251 for i in range(100)]


def test_without_any_descriptor_the_limit_is_named(few_descriptors: None, tmp_path: Path) -> None:
    [segment] = put(tmp_path, 1)
    held = []
    with Resolver(tmp_path) as resolver:
        while len(held) < 100:
            try:
                held.append(open("/dev/null"))  # noqa: SIM115 - closed below
            except OSError:
                break
        assert len(held) < 64
        try:
            with pytest.raises(
                PayloadError, match="64 descriptors are allowed and 0 maps are kept"
            ) as caught:
                resolver.view(segment)
            assert (caught.value.reason, caught.value.retryable) == ("descriptors", True)
        finally:
            for one in held:
                one.close()
        assert resolver.view(segment)[0] == 0  # the moment is over


@pytest.mark.parametrize("code", ["ENOMEM", "ENODEV", "ENFILE", "EMFILE", "EPERM"])
def test_a_map_the_system_refuses_is_read_and_counted_with_one_warning_a_root(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError(getattr(errno, code), code)

    monkeypatch.setattr(_files, "_map", refuse)
    segments = put(tmp_path, 5)
    with Resolver(tmp_path) as resolver, caplog.at_level(logging.WARNING, "payload"):
        for i, segment in enumerate(segments):
            assert resolver.view(segment)[4999] == i
        stats = resolver.stats()
    assert stats.fallbacks == {code: 5}
    assert (stats.maps, stats.bytes_copied) == (0, 25_000)
    assert len(caplog.records) == 1
    assert "vm.max_map_count" in caplog.text


def test_a_map_refused_for_want_of_room_gets_the_room_of_maps_nobody_views(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = _files._map, 3

    def small(fd: int, size: int) -> _files.Map:
        if resolver.stats().live_maps >= room:
            raise OSError(errno.ENOMEM, "no room")
        return real(fd, size)

    monkeypatch.setattr(_files, "_map", small)
    segments = put(tmp_path, 12)
    with Resolver(tmp_path) as resolver:
        for i, segment in enumerate(segments):
            assert resolver.view(segment)[4999] == i
        assert resolver.stats().fallbacks == {}


def test_a_file_that_shrinks_between_stat_and_map_is_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [segment] = put(tmp_path, 1)
    real = _files._map

    def shrink(fd: int, size: int) -> _files.Map:
        Path(segment.file).write_bytes(b"short")
        return real(fd, size)

    monkeypatch.setattr(_files, "_map", shrink)
    with Resolver(tmp_path) as resolver, pytest.raises(EOFError, match="has 5 bytes"):
        resolver.view(segment)
