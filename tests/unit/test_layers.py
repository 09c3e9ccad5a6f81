"""Layers by their numbers in the model: the right ones or an error, and no more read than they need."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import payload.resolver
from payload import CoverageError, PayloadCorruptError, Resolver, Segment, SegmentError, Writer

NAME = "routed_experts"


def put(root: Path | str, name: str, array: np.ndarray, pos: int = 0) -> Segment:
    Path(root, name).write_bytes(array.tobytes())
    return Segment(NAME, f"{root}/{name}", 0, pos, len(array), array.dtype.name, array.shape[1:])


def model_of(layers: int, rows: int = 4, first: int = 0) -> np.ndarray:
    """Every id says which layer it is of."""
    return np.broadcast_to(
        np.arange(first, first + layers, dtype=np.uint8)[:, None], (rows, layers, 8)
    ).copy()


@given(st.data())
def test_layers_are_those_a_full_window_has_there(data) -> None:
    slots = data.draw(st.integers(1, 6))
    ids = data.draw(st.lists(st.integers(0, slots - 1), unique=True))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    dtypes = data.draw(st.lists(st.sampled_from(["uint8", "uint16"]), min_size=1, max_size=4))
    widths = data.draw(st.lists(st.integers(1, 3), min_size=4, max_size=4))
    options: dict[str, Any] = {"fill": 7, "holes": "any"}
    if data.draw(st.booleans()):
        options["dtype"] = np.int32
    skipped = data.draw(st.sampled_from([1, 10**9]))  # each layer read alone, or rows read whole
    lo, hi = sorted(data.draw(st.tuples(st.integers(0, 16), st.integers(0, 16))))
    with (
        tempfile.TemporaryDirectory() as root,
        Resolver(root, mode=data.draw(st.sampled_from(["map", "copy"]))) as resolver,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(payload._rows, "_SKIPPED", skipped)
        segments = [
            put(root, str(i), rng.integers(0, 200, (4, slots, width)).astype(dtype), 4 * i)
            for i, (dtype, width) in enumerate(zip(dtypes, widths, strict=False))
        ]
        want = resolver.window(segments, NAME, lo, hi, **options)[:, ids]
        options |= {"layers": ids, "num_layers": slots}
        got = resolver.window(segments, NAME, lo, hi, **options)
        np.testing.assert_array_equal(got, want, strict=True)
        out = np.full(want.shape, 99, want.dtype)
        options.pop("dtype", None)
        assert resolver.read_into(segments, NAME, lo, hi, out, **options) is out
        np.testing.assert_array_equal(out, want, strict=True)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_narrower_rows_of_layers_read_alone_land_in_the_leading_entries(
    dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two runs, one of them of two layers: the bytes of a narrower run are not in one piece."""
    monkeypatch.setattr(payload._rows, "_SKIPPED", 1)
    wide = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    narrow = 100 + np.arange(4 * 6 * 2, dtype=np.uint8).reshape(4, 6, 2)
    segments = [put(tmp_path, "a", wide), put(tmp_path, "b", narrow, 4)]
    padded = np.concatenate([narrow, np.full((4, 6, 1), 7, np.uint8)], axis=2)
    want = np.concatenate([wide, padded])[1:7, [1, 2, 5]]
    with Resolver(tmp_path) as resolver:
        got = resolver.window(
            segments, NAME, 1, 7, layers=[1, 2, 5], num_layers=6, fill=7, dtype=dtype
        )
        np.testing.assert_array_equal(got, want.astype(dtype or "uint8"), strict=True)
        assert resolver.stats().bytes_read == 3 * 3 * 3 + 3 * 3 * 2  # those layers alone


def test_sixty_one_slots_give_each_moe_layer_its_own_rows(tmp_path: Path) -> None:
    segment = put(tmp_path, "a", model_of(61))
    with Resolver(tmp_path) as resolver:
        got = resolver.window([segment], NAME, 0, 4, layers=range(3, 61), num_layers=61)
        assert got.shape == (4, 58, 8)
        assert got[0, :, 0].tolist() == list(range(3, 61))
        assert np.shares_memory(got, resolver.view(segment))
        assert resolver.stats().bytes_copied == resolver.stats().bytes_read == 0
        some = resolver.window([segment], NAME, 0, 4, layers=iter([60, 3, 40]), num_layers=61)
        assert some[1, :, 5].tolist() == [60, 3, 40]
        all_of_them = resolver.window([segment], NAME, 0, 4, num_layers=61)
        assert np.shares_memory(all_of_them, resolver.view(segment))


@pytest.mark.parametrize("slots", [58, 62])  # MoE layers alone; a draft model's layer behind
@pytest.mark.parametrize("layers", [range(3, 61), [3], [40, 57], [], None])
def test_another_number_of_slots_is_refused_with_both_numbers(
    slots: int, layers: Any, tmp_path: Path
) -> None:
    segment = put(tmp_path, "a", model_of(slots, first=3))
    with Resolver(tmp_path) as resolver:
        for call in (resolver.window, resolver.read_into):
            out = () if call == resolver.window else (np.zeros((4, 1, 8), np.uint8),)
            with pytest.raises(SegmentError, match=f"has {slots} layers .* has 61") as caught:
                call([segment], NAME, 0, 4, *out, layers=layers, num_layers=61)
            assert (caught.value.expected, caught.value.actual) == (61, slots)
            assert caught.value.reason == "layers"
            assert caught.value.field == NAME
        assert resolver.stats().opens == 0


def test_one_segment_with_another_number_of_slots_is_refused_on_every_rank(tmp_path: Path) -> None:
    segments = [put(tmp_path, "a", model_of(61)), put(tmp_path, "b", model_of(58), 4)]
    empty = Segment(NAME, f"{tmp_path}/c", 0, 8, 0, "uint8", (58, 8))
    with Resolver(tmp_path) as resolver:
        for some in (segments, [segments[0], empty]):
            for lo, hi in ((0, 4), (0, 0)):
                with pytest.raises(SegmentError, match="58 layers"):
                    resolver.window(some, NAME, lo, hi, num_layers=61, layers=[3])


def test_layers_that_the_model_does_not_have_are_the_callers_mistake(tmp_path: Path) -> None:
    segment = put(tmp_path, "a", model_of(61))
    with Resolver(tmp_path) as resolver:

        def window(**options: Any) -> Any:
            return resolver.window([segment], NAME, 0, 4, **options)

        with pytest.raises(ValueError, match="needs num_layers"):
            window(layers=[3])
        for wrong in (61, -1):
            with pytest.raises(ValueError, match=f"has {wrong}: needs ids from 0 to 60"):
                window(layers=[3, wrong], num_layers=61)
        with pytest.raises(ValueError, match="3 ids, 2 of them different: 4 twice"):
            window(layers=[4, 3, 4], num_layers=61)
        with pytest.raises(TypeError, match="booleans"):
            window(layers=[False, True], num_layers=2)
        with pytest.raises(TypeError, match="booleans"):
            window(layers=np.ones(61, bool), num_layers=61)
        with pytest.raises(ValueError, match="num_layers is 0"):
            window(num_layers=0)
        with pytest.raises(ValueError, match="no layers"):
            resolver.window(
                [Segment("sampling_mask", segment.file, 0, 0, 4, "uint32", ())],
                "sampling_mask", 0, 4, num_layers=61,
            )  # fmt: skip
        for shape in ((), (8,)):  # of one axis alone nobody can tell that it is not top_k
            flat = Segment("weights", segment.file, 0, 0, 4, "uint8", shape)
            for layers in ([0], None):
                with pytest.raises(SegmentError, match="no layers") as caught:
                    resolver.window([flat], "weights", 0, 4, layers=layers, num_layers=8)
                assert (caught.value.expected, caught.value.actual) == (8, 0)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_of_long_rows_only_the_chosen_layers_are_read(dtype: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    array = rng.integers(0, 99, (3, 8, 40_000), np.uint8).astype(np.float16)
    segments = [put(tmp_path, "a", array), put(tmp_path, "b", array[::-1], 3)]
    with Resolver(tmp_path, mode="copy") as resolver:
        got = resolver.window(
            segments, NAME, 1, 5, layers=[2, 3, 6], num_layers=8, dtype=dtype
        )  # fmt: skip
        want = np.concatenate([array, array[::-1]])[1:5, [2, 3, 6]]
        np.testing.assert_array_equal(got, want.astype(dtype or "float16"), strict=True)
        assert resolver.stats().bytes_read == resolver.stats().bytes_copied == want.nbytes


def test_where_files_are_read_a_window_of_layers_reads_no_whole_segment_first(
    tmp_path: Path,
) -> None:
    """Views of network roots are read through before they are mapped: all layers of them."""
    segment = put(tmp_path, "a", np.ones((4, 8, 200_000), np.uint8))
    options = {str(tmp_path): {"directory": str(tmp_path), "type": "nfs4"}}
    for resolver in (Resolver(options), Resolver(tmp_path, mode="copy")):
        with resolver:
            got = resolver.window([segment], NAME, 0, 4, layers=[5], num_layers=8)
            assert got.shape == (4, 1, 200_000)
            assert resolver.stats().bytes_read == 800_000


@pytest.mark.parametrize(("kind", "read"), [("tmpfs", 2 * 100_000), ("nfs4", 2 * 800_000)])
def test_on_network_roots_rows_are_read_whole_unless_a_megabyte_is_skipped(
    kind: str, read: int, tmp_path: Path
) -> None:
    segment = put(tmp_path, "a", np.ones((2, 8, 100_000), np.uint8))
    options = {"directory": str(tmp_path), "type": kind, "mode": "copy"}
    with Resolver({str(tmp_path): options}) as resolver:
        got = resolver.window([segment], NAME, 0, 2, layers=[5], num_layers=8)
        assert got.all()
        assert resolver.stats().bytes_read == read
        assert resolver.stats().bytes_copied == got.nbytes == 200_000


def test_neighbouring_layers_that_cannot_be_mapped_are_gathered(tmp_path: Path) -> None:
    """As a copy of all layers they would be read, and kept for as long as the chosen ones are."""
    array = np.arange(4 * 8 * 40_000, dtype=np.uint16).reshape(4, 8, 40_000)
    (tmp_path / "odd").write_bytes(b"\0" + array.tobytes())
    odd = Segment(NAME, f"{tmp_path}/odd", 1, 0, 4, "uint16", array.shape[1:])
    even = put(tmp_path, "even", array)
    with (
        Resolver(tmp_path) as unaligned,
        Resolver(tmp_path) as full,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(full._files, "_last_descriptor", 0)
        for resolver, segment in ((unaligned, odd), (full, even)):
            got = resolver.window([segment], NAME, 1, 3, layers=[4, 5], num_layers=8)
            np.testing.assert_array_equal(got, array[1:3, 4:6], strict=True)
            assert got.base is None
            assert got.flags.writeable
            assert resolver.stats().bytes_read == resolver.stats().bytes_copied == got.nbytes
        assert full.stats().fallbacks


def test_a_checksum_is_compared_once_for_all_windows_of_layers(tmp_path: Path) -> None:
    array = model_of(8, rows=1000)
    segments = Writer(tmp_path).write({NAME: (0, array)})
    with Resolver(tmp_path, verify="checksum") as resolver:
        for layer in range(8):
            got = resolver.window(segments, NAME, 0, 1000, layers=[layer], num_layers=8)
            assert (got == layer).all()
        assert array.nbytes <= resolver.stats().bytes_read < 1.1 * array.nbytes
        content = bytearray(Path(segments[0].file).read_bytes())
        content[-1] ^= 1  # of the last layer
    Path(segments[0].file).write_bytes(content)
    with (
        Resolver(tmp_path, verify="checksum") as resolver,
        pytest.raises(PayloadCorruptError, match="checksum"),
    ):
        resolver.window(segments, NAME, 0, 1000, layers=[0], num_layers=8)


def test_of_short_rows_other_layers_are_read_but_not_judged_or_kept(tmp_path: Path) -> None:
    array = model_of(61).astype(np.uint16)
    array[2, 10, 3] = 511
    segment = put(tmp_path, "a", array)
    with Resolver(tmp_path, mode="copy") as resolver, pytest.MonkeyPatch.context() as patch:
        options: dict[str, Any] = {"num_layers": 61, "dtype": "uint8"}
        got = resolver.window([segment], NAME, 0, 4, layers=range(20, 30), **options)
        assert got[2, :, 3].tolist() == list(range(20, 30))
        assert got.base is None
        assert resolver.stats().bytes_copied == 4 * 10 * 8 * 2
        with pytest.raises(PayloadCorruptError, match="511"):
            resolver.window([segment], NAME, 0, 4, layers=[10], **options)
        patch.setattr(payload._rows, "_SKIPPED", 1)  # of layers read alone the row is named too
        with pytest.raises(PayloadCorruptError, match=r"in rows \[1, 2\)"):
            resolver.window([segment], NAME, 1, 4, layers=[10], **options)


def test_holes_and_missing_files_are_judged_as_without_layers(tmp_path: Path) -> None:
    segment = put(tmp_path, "a", model_of(4))
    gone = Segment(NAME, f"{tmp_path}/gone", 0, 4, 2, "uint8", (4, 8))
    with Resolver(tmp_path) as resolver:
        options: dict[str, Any] = {"layers": [1, 3], "num_layers": 4}
        with pytest.raises(CoverageError):
            resolver.window([segment], NAME, 0, 5, **options)
        got = resolver.window([segment], NAME, 2, 5, fill=9, holes="any", **options)
        assert got[:, :, 0].tolist() == [[1, 3], [1, 3], [9, 9]]
        with pytest.raises(FileNotFoundError):
            resolver.window([gone], NAME, 4, 6, **options)
        with pytest.raises(FileNotFoundError):
            resolver.window([gone], NAME, 4, 6, layers=[1], num_layers=4)
        opens = resolver.stats().opens
        none = resolver.window([gone], NAME, 4, 6, layers=[], num_layers=4)
        assert none.shape == (2, 0, 8)
        narrow = Segment(NAME, gone.file, 0, 4, 2, "uint8", (4, 0))
        none = resolver.window([narrow], NAME, 4, 6, layers=[1], num_layers=4)
        assert none.shape == (2, 1, 0)
        assert resolver.stats().opens == opens
