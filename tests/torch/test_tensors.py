"""Tensors of segments and windows: the right rows, safe to write into, copied no more than needed."""

import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import payload.torch as pt
from payload import (
    CoverageError,
    PayloadCorruptError,
    PayloadMissingError,
    Ragged,
    Resolver,
    ResolverClosedError,
    Segment,
    SegmentError,
    Writer,
)
from payload.dtypes import DTYPES
from payload.testing import model, strategies

NAME = "routed_experts"
ROWS = np.arange(60, dtype=np.uint8).reshape(10, 3, 2)


def put(root: Path, array: np.ndarray, pos: int = 0, pad: int = 0, field: str = NAME) -> Segment:
    path = root / f"{len(list(root.iterdir()))}.bin"
    path.write_bytes(bytes(pad) + array.tobytes())
    return Segment(field, str(path), pad, pos, len(array), array.dtype.name, array.shape[1:])


def equal(tensor: torch.Tensor, array: np.ndarray) -> None:
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor.numpy(), array, strict=True)


def test_the_public_names_are_these_and_documented() -> None:
    assert sorted(pt.__all__) == "as_index as_nested as_padded as_tensor view window".split()
    assert all(getattr(pt, name).__doc__ for name in pt.__all__)


@pytest.mark.parametrize("pad", [0, 4096, 4104, 100_000])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_view_is_zero_copy_in_every_dtype_and_at_every_offset(
    dtype: str, pad: int, tmp_path: Path
) -> None:
    array = (np.arange(24).reshape(4, 3, 2) % 2).astype(dtype)
    segment = put(tmp_path, array, pad=pad)
    with Resolver(tmp_path) as resolver:
        tensor = pt.view(resolver, segment)
        equal(tensor, array)
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert resolver.stats().bytes_copied == resolver.stats().bytes_read == 0


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_an_in_place_write_stays_in_its_tensor(mode: str, tmp_path: Path) -> None:
    segment = put(tmp_path, ROWS, pad=64)
    with Resolver(tmp_path, mode=mode) as resolver:
        one, two = pt.view(resolver, segment), pt.view(resolver, segment)
        seen = resolver.view(segment)
        one.add_(1)
        one[3:5].zero_()
        equal(two, ROWS)
        two.fill_(9)
        window = pt.window(resolver, [segment], NAME, 2, 6)
        window.mul_(0)
        np.testing.assert_array_equal(seen, ROWS)
        equal(pt.view(resolver, segment), ROWS)
    assert Path(segment.file).read_bytes()[64:] == ROWS.tobytes()
    assert one[0].tolist() == (ROWS[0] + 1).tolist()


def copied_of(path: str) -> int:
    """Bytes of the maps of a file that this process has copied on writing."""
    total, mine = 0, False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                mine = line.rstrip().endswith(path)
            elif mine and line.startswith("Anonymous:"):
                total += 1024 * int(line.split()[1])
    return total


def test_only_pages_that_are_written_to_take_memory(tmp_path: Path) -> None:
    segment = put(tmp_path, np.ones((2**16, 64, 8), np.uint8))
    path = str(Path(segment.file).resolve())
    with Resolver(tmp_path) as resolver:
        tensor = pt.view(resolver, segment)
        assert int(tensor.sum()) == 2**25
        assert copied_of(path) < 2**20
        tensor[: 2**13].zero_()
        assert 2**22 <= copied_of(path) < 2**22 + 2**20


def everything(resolver: Resolver, segments: list[Segment]) -> list[torch.Tensor]:
    """Every way to get a tensor, of two turns with a mask each."""
    fixed = [s for s in segments if s.field == NAME]
    mask = resolver.ragged(segments, "sampling_mask", 0, 20)
    one_mask = resolver.ragged(segments[:2], "sampling_mask", 2, 8)
    choice: dict[str, Any] = {"num_layers": 3}
    resolved = resolver.resolve(segments)
    return [
        pt.view(resolver, fixed[0]),
        pt.view(resolver, fixed[1])[2:5],
        pt.window(resolver, segments, NAME, 1, 9),
        pt.window(resolver, segments, NAME, 1, 19),
        pt.window(resolver, segments, NAME, 1, 19, dtype=torch.int64),
        pt.window(resolver, segments, NAME, 1, 9, layers=[1, 2], **choice),
        pt.window(resolver, segments, NAME, 1, 9, layers=[2, 0], **choice),
        pt.window(resolver, segments, NAME, 1, 9, pin_memory=True),
        pt.window(resolver, segments, NAME, 1, 9, out=torch.zeros(8, 3, 2, dtype=torch.uint8)),
        pt.window(resolver, segments, "sampling_mask", 0, 20),
        pt.as_tensor(resolver.window(segments, NAME, 1, 9)),
        pt.as_tensor(resolver.window(segments, NAME, 1, 9, layers=[1], **choice)),
        pt.as_tensor(resolver.window(segments, NAME, 1, 19)),
        pt.as_tensor(resolver.view(fixed[1])),
        pt.as_tensor(resolved[NAME][0]),
        pt.as_tensor(resolved["sampling_mask"][1].values),
        pt.as_tensor(mask.values),
        pt.as_tensor(mask.offsets),
        pt.as_tensor(one_mask.values),
        pt.as_nested(mask).values(),
        pt.as_nested(one_mask).values(),
        pt.as_padded(one_mask, -1),
        pt.as_index(pt.view(resolver, fixed[0])),
    ]


@pytest.mark.parametrize("how", ["ext4", "nfs4", "nfs", "map", "copy", "checksum"])
@pytest.mark.parametrize("worker", [False, True])
def test_an_in_place_write_into_anything_handed_out_changes_no_file(
    how: str, worker: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, segments = Writer(tmp_path), []
    for at in (0, 10):
        mask = Ragged.from_lists([[i, i + 1] for i in range(at, at + 10)])
        segments += writer.write({NAME: (at, ROWS), "sampling_mask": (at, mask)})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    options: dict[str, Any] = {"directory": str(tmp_path), "type": how}
    if how in ("map", "copy", "checksum"):
        options = {"directory": str(tmp_path), "mode": "copy" if how == "copy" else "map"}
    if worker:
        monkeypatch.setattr(pt, "get_worker_info", object)
    verify = "checksum" if how == "checksum" else "size"
    with Resolver({str(tmp_path): options}, verify=verify) as resolver:
        found = everything(resolver, segments)
        again = everything(resolver, segments)
        wanted = [tensor.tolist() for tensor in again]
        assert all(tensor.numel() for tensor in found)
        for tensor in found:
            tensor.zero_()
            tensor.add_(1)
        assert [tensor.tolist() for tensor in again] == wanted
        assert [tensor.tolist() for tensor in everything(resolver, segments)] == wanted
        assert np.array_equal(resolver.window(segments, NAME, 0, 10), ROWS)
    assert {path: path.read_bytes() for path in before} == before


@given(strategies.fixed(), st.tuples(st.integers(-3, 32), st.integers(-3, 32)).map(sorted))
def test_a_window_is_what_the_model_says(drawn, bounds) -> None:
    files, segments = drawn
    lo, hi = bounds
    want = model.window(files, segments, NAME, lo, hi, fill=1)
    with tempfile.TemporaryDirectory() as root:
        for path, content in files.items():
            local = Path(root + path.removeprefix(strategies.PREFIX))
            local.parent.mkdir(parents=True, exist_ok=True)
            local.write_bytes(content)
        with Resolver({strategies.PREFIX: root}) as resolver:
            got = pt.window(resolver, segments, NAME, lo, hi, fill=1, holes="any")
            equal(got, want)
            out = torch.zeros(want.shape, dtype=got.dtype)
            pt.window(resolver, segments, NAME, lo, hi, fill=1, holes="any", out=out)
            equal(out, want)
            with pytest.MonkeyPatch.context() as patch:  # as in a worker
                patch.setattr(pt, "get_worker_info", object)
                shared = pt.window(resolver, segments, NAME, lo, hi, fill=1, holes="any")
                assert shared.is_shared()
                equal(shared, want)


def test_a_view_outlives_the_resolver_and_the_file_and_is_unmapped_with_its_tensor(
    tmp_path: Path,
) -> None:
    segment = put(tmp_path, ROWS)
    resolver = Resolver(tmp_path)
    tensor = pt.view(resolver, segment)
    row = tensor[7]
    resolver.close()
    Path(segment.file).unlink()
    equal(tensor, ROWS)
    with pytest.raises(ResolverClosedError):
        pt.view(resolver, segment)
    assert resolver.stats().live_maps == 1
    del tensor
    equal(row, ROWS[7])
    assert resolver.stats().live_maps == 1
    del row
    assert resolver.stats().live_maps == 0


@pytest.mark.parametrize("where", ["empty file", "at 0", "at the end", "at a page"])
def test_a_segment_of_no_rows_is_an_empty_tensor_and_opens_no_file(
    where: str, tmp_path: Path
) -> None:
    size = {"empty file": 0, "at 0": 9, "at the end": 100, "at a page": 4096}[where]
    (tmp_path / "a.bin").write_bytes(bytes(size))
    offset = size if where in ("at the end", "at a page") else 0
    segment = Segment(NAME, f"{tmp_path}/a.bin", offset, 0, 0, "uint8", (4, 2))
    with Resolver(tmp_path) as resolver:
        equal(pt.view(resolver, segment), np.empty((0, 4, 2), np.uint8))
        equal(pt.window(resolver, [segment], NAME, 0, 0), np.empty((0, 4, 2), np.uint8))
        assert resolver.stats().opens == 0
        assert pt.window(resolver, [segment], "other", 0, 3) is None


def test_an_unaligned_element_is_copied_and_counted(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.int32).reshape(3, 2)
    segment = put(tmp_path, array, pad=1)
    with Resolver(tmp_path) as resolver:
        tensor = pt.view(resolver, segment)
        equal(tensor, array)
        assert tensor.data_ptr() % 4 == 0
        assert resolver.stats().bytes_copied == 24
        tensor.zero_()
        equal(pt.window(resolver, [segment], NAME, 0, 3), array)


def test_a_window_of_one_segment_is_a_view_and_of_many_one_copy(tmp_path: Path) -> None:
    a, b = put(tmp_path, ROWS), put(tmp_path, ROWS, 10)
    with Resolver(tmp_path) as resolver:
        equal(pt.window(resolver, [a, b], NAME, 2, 9), ROWS[2:9])
        assert resolver.stats().bytes_copied == 0
        both = pt.window(resolver, [a, b], NAME, 5, 15)
        equal(both, np.concatenate([ROWS[5:], ROWS[:5]]))
        assert resolver.stats().bytes_copied == resolver.stats().bytes_read == both.nbytes
        both.zero_()
        wide = pt.window(resolver, [a], NAME, 0, 11, dtype=torch.int64, fill=-1, holes=[(10, 11)])
        equal(wide, np.concatenate([ROWS, np.full((1, 3, 2), -1)]).astype(np.int64))
        with pytest.raises(CoverageError):
            pt.window(resolver, [a], NAME, 0, 11, fill=0)
        equal(pt.window(resolver, [a], NAME, 0, 2, dtype="field"), ROWS[:2].astype(np.int32))


def test_out_takes_the_rows_and_only_where_it_fits(tmp_path: Path) -> None:
    a = put(tmp_path, ROWS)
    with Resolver(tmp_path) as resolver:
        out = torch.zeros(4, 3, 2, dtype=torch.uint8)
        assert pt.window(resolver, [a], NAME, 1, 5, out=out) is out
        equal(out, ROWS[1:5])
        assert pt.window(resolver, [a], "other", 1, 5, out=out) is None
        wide = torch.zeros(4, 3, 2, dtype=torch.int32)
        assert pt.window(resolver, [a], NAME, 1, 5, out=wide, dtype=torch.int32) is wide
        equal(wide, ROWS[1:5].astype(np.int32))
        grads = torch.zeros(4, 3, 2, requires_grad=True)
        assert pt.window(resolver, [a], NAME, 1, 5, out=grads, dtype=torch.float32) is grads
        for wrong in (out[:3], wide, torch.zeros(2, 3, 4, dtype=torch.uint8).permute(2, 1, 0)):
            with pytest.raises(ValueError, match="out is"):
                pt.window(resolver, [a], NAME, 1, 5, out=wrong)
        with pytest.raises(ValueError, match="on the CPU"):
            pt.window(resolver, [a], NAME, 1, 5, out=out.to("meta"))
        with pytest.raises(TypeError, match="needs a tensor"):
            pt.window(resolver, [a], NAME, 1, 5, out=np.zeros(3))


def test_a_dtype_that_cannot_hold_a_value_or_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    a = put(tmp_path, np.full((4, 2), 511, np.uint16))
    with Resolver(tmp_path) as resolver:
        with pytest.raises(PayloadCorruptError, match="511"):
            pt.window(resolver, [a], NAME, 0, 4, dtype=torch.uint8)
        with pytest.raises(TypeError, match="bfloat16"):
            pt.window(resolver, [a], NAME, 0, 4, dtype=torch.bfloat16)
        equal(pt.window(resolver, [a], NAME, 0, 4, dtype=torch.int16), np.full((4, 2), 511, "i2"))


def test_a_ragged_field_comes_padded_or_nested(tmp_path: Path) -> None:
    mask = Ragged.from_lists([[7], [8, 9], [], [1, 2, 3]])
    segments = Writer(tmp_path).write({"sampling_mask": (2, mask)})
    with Resolver(tmp_path) as resolver:
        padded = pt.window(resolver, segments, "sampling_mask", 1, 6)
        assert padded.tolist() == [[-1] * 3, [7, -1, -1], [8, 9, -1], [-1] * 3, [1, 2, 3]]
        rows = resolver.ragged(segments, "sampling_mask", 2, 6)
        nested = pt.as_nested(rows)
        assert nested.layout == torch.jagged
        assert [row.tolist() for row in nested.unbind()] == [[7], [8, 9], [], [1, 2, 3]]
        assert nested.dtype == torch.int32
        nested.values().zero_()
        equal(pt.as_padded(rows, -1, 4)[:, :3], padded[1:].numpy())
        empty = pt.as_nested(Ragged.from_lists([[], []]))
        assert [row.tolist() for row in empty.unbind()] == [[], []]
        assert pt.as_nested(Ragged.from_lists([])).size(0) == 0
        with pytest.raises(SegmentError, match="ragged"):
            pt.view(resolver, segments[0])


def test_as_tensor_shares_what_is_writable_and_copies_what_is_not(tmp_path: Path) -> None:
    mine = ROWS.copy()
    assert pt.as_tensor(mine).data_ptr() == mine.ctypes.data
    for array in (mine[::-1], np.broadcast_to(mine[0], (4, 3, 2)), mine[0, 0, 0:0]):
        equal(pt.as_tensor(array), array)
    backwards = pt.as_tensor(mine[::-1])
    backwards.zero_()
    assert mine.tolist() == ROWS.tolist()
    segment = put(tmp_path, ROWS)
    with Resolver(tmp_path) as resolver:
        tensor = pt.as_tensor(resolver.view(segment))
        equal(tensor, ROWS)
        tensor.zero_()
        np.testing.assert_array_equal(resolver.view(segment), ROWS)
    with pytest.raises(TypeError, match="numpy"):
        pt.as_tensor([1, 2])


def test_a_uint8_index_is_a_mask_in_torch_and_as_index_is_not() -> None:
    rows = torch.arange(30).reshape(3, 10)
    ids = torch.tensor([2, 0, 1], dtype=torch.uint8)
    with pytest.warns(UserWarning, match=r"torch\.uint8 is now deprecated"):
        assert rows[ids].shape == (2, 10)  # what is silently wrong without as_index
    assert rows[pt.as_index(ids)].tolist() == rows[[2, 0, 1]].tolist()


@pytest.mark.parametrize("target", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", [name for name, d in DTYPES.items() if d.kind in "iu"])
def test_as_index_keeps_every_value_or_refuses(name: str, target: torch.dtype) -> None:
    source = np.iinfo(name)
    most = torch.iinfo(target).max
    for value in {0, 1, 127, source.max, source.min, min(source.max, most)}:
        tensor = torch.from_numpy(np.array([[0, value]], name))
        if 0 <= value <= most:
            assert pt.as_index(tensor, target).tolist() == [[0, value]]
            assert pt.as_index(tensor, target).dtype == target
        else:
            with pytest.raises(ValueError, match=rf"has {value} at \[0, 1\]"):
                pt.as_index(tensor, target)
    assert pt.as_index(torch.from_numpy(np.empty((0, 4), name)), target).shape == (0, 4)


def test_as_index_refuses_what_is_no_integer_and_returns_what_is_ready() -> None:
    ready = torch.arange(3)
    assert pt.as_index(ready) is ready
    for wrong in (torch.ones(3), torch.ones(3, dtype=torch.bool)):
        with pytest.raises(TypeError, match="needs integers"):
            pt.as_index(wrong)
    with pytest.raises(TypeError, match=r"needs torch\.int64"):
        pt.as_index(ready, torch.int16)


def test_what_torch_lacks_for_uint16_works_after_a_checked_conversion(tmp_path: Path) -> None:
    segment = put(tmp_path, np.arange(8, dtype=np.uint16).reshape(4, 2) + 500)
    with Resolver(tmp_path) as resolver:
        raw = pt.view(resolver, segment)
        with pytest.raises(RuntimeError, match="UInt16"):
            raw.max()
        ids = pt.window(resolver, [segment], NAME, 0, 4, dtype=torch.int32)
        assert int(ids.max()) == 507
        counts = torch.bincount(pt.as_index(raw).flatten(), minlength=512)
        assert counts[500:].sum() == 8
        assert torch.stack([raw, raw]).shape == (2, 4, 2)


def test_errors_come_as_from_the_resolver(tmp_path: Path) -> None:
    gone = Segment(NAME, f"{tmp_path}/gone.bin", 0, 0, 3, "uint8", (2,))
    with Resolver(tmp_path) as resolver:
        for call in (
            lambda: pt.view(resolver, gone),
            lambda: pt.window(resolver, [gone], NAME, 0, 3),
            lambda: pt.window(resolver, [gone], NAME, 0, 3, dtype=torch.int32),
        ):
            with pytest.raises(PayloadMissingError) as caught:
                call()
            assert caught.value.path == gone.file
            assert caught.value.field == NAME


def test_the_size_and_the_checksum_are_judged_before_a_private_map(tmp_path: Path) -> None:
    [segment] = Writer(tmp_path).write({NAME: (0, ROWS)})
    content = bytearray(Path(segment.file).read_bytes())
    content[segment.offset] ^= 1
    Path(segment.file).write_bytes(content)
    with (
        Resolver(tmp_path, verify="checksum") as resolver,
        pytest.raises(PayloadCorruptError, match="checksum"),
    ):
        pt.view(resolver, segment)
    with Resolver(tmp_path) as resolver:
        Path(segment.file).write_bytes(content[:-1])
        with pytest.raises(EOFError) as caught:
            pt.view(resolver, segment)
        assert caught.value.actual == len(content) - 1


def test_a_private_map_is_refused_like_any_other_when_descriptors_are_few(tmp_path: Path) -> None:
    """In a process of its own, as the limit stays."""
    code = f"""
        import resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
        import payload.torch as pt
        from payload import Resolver, Segment
        segment = Segment("routed_experts", {str(tmp_path / "a.bin")!r}, 0, 0, 10, "uint8", (3, 2))
        resolver = Resolver({str(tmp_path)!r})
        views = [pt.view(resolver, segment) for _ in range(300)]
        for i, view in enumerate(views):
            view.fill_(i % 256)
        assert all(int(view.min()) == int(view.max()) == i % 256 for i, view in enumerate(views))
        stats = resolver.stats()
        print(sum(stats.fallbacks.values()), stats.bytes_copied // 60, stats.live_maps)
    """
    (tmp_path / "a.bin").write_bytes(ROWS.tobytes())
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    fallbacks, copied, live = map(int, done.stdout.split())
    assert fallbacks == copied == 300 - live
    assert live == 300 if sys.version_info >= (3, 13) else 20 < live < 96
    assert (tmp_path / "a.bin").read_bytes() == ROWS.tobytes()
