"""Four ranks over gloo: each reads its window and no more, and all come to one verdict."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import payload.torch as pt
from payload import CoverageError, Ragged, Resolver, Segment, Writer, cp_window, gaps

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

RANKS = 4
TOKENS = 100_000
ROW = (24, 8)
NAME = "routed_experts"


def expected(tokens: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (tokens, *ROW), np.uint8)


def read_by_this_process() -> int:
    """Bytes of all reads so far, as the kernel counts them."""
    with open("/proc/self/io") as counters:
        return int(counters.readline().split()[1])


def private_bytes() -> int:
    with open("/proc/self/smaps_rollup") as rollup:
        return sum(1024 * int(line.split()[1]) for line in rollup if line.startswith("Private_"))


def whole(part: torch.Tensor) -> torch.Tensor:
    """Parts of all ranks, in order; gloo sends no uint16, so bytes."""
    parts = [torch.empty_like(part) for _ in range(RANKS)]
    dist.all_gather(parts, part)
    return torch.cat(parts)


def votes(error: BaseException | None) -> list[Any]:
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, None if error is None else (type(error).__name__, error.actual))
    return found


def check_share(rank: int, root: str, segments: list[Segment], mode: str) -> None:
    [(lo, hi)] = cp_window(TOKENS, rank, RANKS, "inputs")
    [(first, last)] = cp_window(TOKENS, rank, RANKS, "labels")
    with Resolver(root, mode=mode) as resolver:
        pt.window(resolver, segments, NAME, lo, lo + 1)
        memory, before = private_bytes(), read_by_this_process()
        rows = pt.window(resolver, segments, NAME, lo, hi, extent=(0, TOKENS))
        total = read_by_this_process() - before
        grown = private_bytes() - memory
        share = TOKENS // RANKS * ROW[0] * ROW[1]
        assert rows.numel() == share
        assert share <= total <= 1.1 * share, (total, share)
        assert resolver.stats().bytes_read <= 1.1 * share
        assert grown <= 1.1 * share + 2**22, (grown, share)
        ids = whole(rows)
        assert np.array_equal(ids.numpy(), expected())
        mask = pt.window(resolver, segments, "sampling_mask", first, last)
        kept = torch.full((hi - lo, 3), -1, dtype=torch.int32)
        kept[: len(mask)] = mask
        got = whole(kept)[: TOKENS - 1]
        assert got.tolist() == [
            [p, p + 1, p + 2] if p % 2 else [p, -1, -1] for p in range(1, TOKENS)
        ]


def check_verdicts(rank: int, root: str, segments: list[Segment]) -> None:
    """A hole in the last rank's window is an error on every rank, or on none."""
    holed = [s for s in segments if s.field == NAME][:-1]
    extent = (0, TOKENS)
    hole = gaps(holed, NAME, *extent)
    assert hole == [(90_000, TOKENS)]
    [(lo, hi)] = cp_window(TOKENS, rank, RANKS, "inputs")
    with Resolver(root) as resolver:
        for holes, want in (
            ("none", [("CoverageError", hole)] * RANKS),
            (hole, [None] * RANKS),
            ([(90_000, TOKENS - 1)], [("CoverageError", [(TOKENS - 1, TOKENS)])] * RANKS),
            ("any", [None] * RANKS),
        ):
            error = rows = None
            try:
                rows = pt.window(
                    resolver, holed, NAME, lo, hi, fill=0, holes=holes, extent=extent
                )  # fmt: skip
            except CoverageError as caught:
                error = caught
            assert votes(error) == want
            if rows is not None:
                want_rows = expected()
                want_rows[90_000:] = 0
                assert np.array_equal(whole(rows).numpy(), want_rows)


def check_layers(rank: int, root: str, segments: list[Segment]) -> None:
    """Pipeline ranks: each its own layers of all tokens, by their numbers in the model."""
    layers = range(6 * rank, 6 * rank + 6)
    with Resolver(root) as resolver:
        rows = pt.window(
            resolver, segments, NAME, 0, 1000, layers=layers, num_layers=ROW[0]
        )  # fmt: skip
        got = whole(rows.transpose(0, 1).contiguous()).transpose(0, 1)
        assert np.array_equal(got.numpy(), expected()[:1000])
        error = None
        try:
            pt.window(resolver, segments, NAME, 0, 1000, layers=layers, num_layers=27)
        except ValueError as caught:
            error = caught
        assert votes(error) == [("SegmentError", 24)] * RANKS


def work(rank: int, root: str, rendezvous: str, segments: list[Segment]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=RANKS)
    try:
        for mode in ("auto", "copy"):
            check_share(rank, root, segments, mode)
        check_verdicts(rank, root, segments)
        check_layers(rank, root, segments)
        Path(f"{rendezvous}.{rank}").touch()  # it came to its end
    finally:
        dist.destroy_process_group()


def test_four_ranks_read_their_share_and_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    rows, writer, segments = expected(), Writer(tmp_path / "root"), []
    for at in range(0, TOKENS, 10_000):
        some = range(max(at, 1), at + 10_000)
        mask = Ragged.from_lists([[p, p + 1, p + 2] if p % 2 else [p] for p in some])
        segments += writer.write(
            {NAME: (at, rows[at : at + 10_000]), "sampling_mask": (some[0], mask)}
        )
    rendezvous = str(tmp_path / "rendezvous")
    mp.start_processes(
        work, (str(tmp_path / "root"), rendezvous, segments), RANKS, start_method="spawn"
    )
    assert all(os.path.exists(f"{rendezvous}.{rank}") for rank in range(RANKS))
