"""A trainer's DataLoader by handle and inline: ``python -m bench.dataloader`` (needs torch).

The larger form of the README's recipe: a step's micro batches with routing, sampling masks and their
logprobs, a validity mask, and the windows of inputs and of labels. Workers are spawned; every tensor of
the first epoch is compared with the naive reference, and what payload bytes the workers hold in private
memory is read from the kernel meanwhile.

The rival is the same loader over inline messages: rows as bytes in msgpack, one message a micro batch,
in files on the same tmpfs; the worker reads and decodes its message, ``frombuffer``, and widens to int32
as upstream does. Its messages are not sent through the main process, which would only slow it down.
Both loaders run in turns in one program; medians of their epochs. Exit status 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader

import payload.torch as pt
from payload import MicroBatch, Ragged, Resolver, Sample, Segment, Writer, cp_window, gaps, pack

Array = np.ndarray[Any, Any]
ROW = (48, 8)
TURNS = 2
ROLLOUTS = 4
PREFETCH = 2  # micro batches a worker reads ahead
ROUNDS = 3
EXPERTS, MASK, LOGPROBS = "routed_experts", "sampling_mask", "sampling_mask_logprobs"


class Step(NamedTuple):
    """What a context-parallel rank trains on, of one micro batch."""

    number: int
    experts: torch.Tensor  # [inputs, layers, top_k], ids as written, or int32
    valid: torch.Tensor  # [inputs] bool: the rest have no routing
    mask: torch.Tensor  # kept ids of all labels
    mask_offsets: torch.Tensor  # [labels + 1]
    logprobs: torch.Tensor  # of the kept ids


# --- by handle


def read(resolver: Resolver, dtype: torch.dtype | None, item: bytes) -> Step:
    """The rows of a micro batch, for a rank that has all of it."""
    number, batch = msgspec.msgpack.decode(item, type=tuple[int, MicroBatch])
    whole = (0, batch.num_tokens)
    [(lo, hi)] = cp_window(batch.num_tokens, 0, 1, "inputs")
    where = batch.segments, EXPERTS, lo, hi
    rows = pt.window(resolver, *where, fill=0, holes=batch.holes, extent=whole, dtype=dtype)
    valid = torch.ones(hi - lo, dtype=torch.bool)
    for start, stop in gaps(*where):
        valid[start - lo : stop - lo] = False
    [(lo, hi)] = cp_window(batch.num_tokens, 0, 1, "labels")
    mask = resolver.ragged(batch.segments, MASK, lo, hi)
    logprobs = resolver.ragged(batch.segments, LOGPROBS, lo, hi)
    assert rows is not None
    assert mask is not None
    assert logprobs is not None
    kept, offsets = pt.as_tensor(mask.values), pt.as_tensor(mask.offsets)
    return Step(number, rows, valid, kept, offsets, pt.as_tensor(logprobs.values))


# --- inline


def read_inline(path: str) -> Step:
    """The same rows, out of a message that has them as bytes, widened as upstream does."""
    message = msgspec.msgpack.decode(Path(path).read_bytes())
    experts = np.frombuffer(message["experts"], np.uint8).reshape(-1, *ROW)
    valid = np.frombuffer(message["valid"], np.bool_)
    offsets = np.frombuffer(message["offsets"], np.int64)
    return Step(
        message["number"],
        torch.from_numpy(experts.astype(np.int32)),
        torch.from_numpy(valid.copy()),
        torch.from_numpy(np.frombuffer(message["mask"], np.int32).copy()),
        torch.from_numpy(offsets.copy()),
        torch.from_numpy(np.frombuffer(message["logprobs"], np.float32).copy()),
    )


# --- what is trained on


class Source:
    """Rows of every micro batch, made again when they are asked for: the naive reference."""

    def __init__(self, tokens: int) -> None:
        rng = np.random.default_rng(0)
        self.lengths = [tokens // (ROLLOUTS * TURNS)] * (ROLLOUTS * TURNS)
        self.lengths[-1] += tokens - sum(self.lengths)
        self.tokens = tokens
        self.experts = rng.integers(0, 256, (tokens, *ROW), np.uint8)
        self.counts = rng.choice([1, 2, 3, 12], tokens, p=[0.4, 0.4, 0.15, 0.05])
        self.kept = rng.integers(0, 150_000, int(self.counts.sum())).astype(np.int32)
        self.logprobs = -rng.exponential(2, len(self.kept)).astype(np.float32)

    def rollouts(
        self, number: int
    ) -> Iterator[tuple[int, list[tuple[int, Array, Ragged, Ragged]]]]:
        """Tokens of each rollout, and its turns: position of the first row, and the side arrays."""
        ends = np.cumsum(self.lengths)
        starts = ends - self.lengths
        offsets = np.concatenate([[0], np.cumsum(self.counts)])
        for first in range(0, len(ends), TURNS):
            base, turns = int(starts[first]), []
            for turn in range(first, first + TURNS):
                lo, hi = int(starts[turn]), int(ends[turn])
                last = turn == first + TURNS - 1  # the last token was never forwarded
                values = slice(offsets[lo], offsets[hi])
                mask = Ragged.from_counts(self.kept[values] ^ number, self.counts[lo:hi])
                logprobs = mask.with_values(self.logprobs[values] - np.float32(number))
                rows = self.experts[lo : hi - last] + np.uint8(number)
                turns.append((lo - base, rows, mask, logprobs))
            yield int(ends[first + TURNS - 1]) - base, turns

    def step(self, number: int) -> dict[str, Array]:
        """All of a micro batch."""
        experts, valid = self.experts + np.uint8(number), np.ones(self.tokens, bool)
        for end in np.cumsum(self.lengths)[TURNS - 1 :: TURNS]:
            experts[end - 1], valid[end - 1] = 0, False
        counts = self.counts[1:]  # labels are one position further
        values = slice(int(self.counts[0]), None)
        return {
            "experts": experts,
            "valid": valid,
            "mask": self.kept[values] ^ number,
            "mask_offsets": np.concatenate([[0], np.cumsum(counts)]),
            "logprobs": self.logprobs[values] - np.float32(number),
        }


def write(root: str, source: Source, count: int) -> list[bytes]:
    """One file a turn, as responses leave them; the micro batches as what travels."""
    writer, items = Writer(root), []
    for number in range(count):
        samples = []
        for tokens, turns in source.rollouts(number):
            segments: list[Segment] = []
            for pos, rows, mask, logprobs in turns:
                arrays: dict[str, tuple[int, Array | Ragged]] = {EXPERTS: (pos, rows)}
                arrays |= {MASK: (pos, mask), LOGPROBS: (pos, logprobs)}
                segments += writer.write(arrays, payload_dir=f"v{number // 50}")
            samples.append(Sample(tokens, segments))
        items.append(msgspec.msgpack.encode((number, pack(samples))))
    return items


def write_inline(root: str, source: Source, count: int) -> list[str]:
    os.makedirs(f"{root}/inline")
    paths = []
    for number in range(count):
        step = source.step(number)
        message = {
            "number": number,
            "experts": step["experts"].tobytes(),
            "valid": step["valid"].tobytes(),
            "mask": step["mask"].tobytes(),
            "offsets": step["mask_offsets"].astype(np.int64).tobytes(),
            "logprobs": step["logprobs"].tobytes(),
        }
        paths.append(f"{root}/inline/{number}")
        Path(paths[-1]).write_bytes(msgspec.msgpack.encode(message))
    return paths


def check(source: Source, step: Step) -> None:
    """Compare every tensor with the naive reference; then write into each, as a trainer may."""
    for name, want in source.step(step.number).items():
        got: torch.Tensor = getattr(step, name)
        if not np.array_equal(got.numpy(), want):
            raise SystemExit(f"micro batch {step.number}: {name} differs from the reference")
        got.zero_()


# --- what workers hold


class Watch:
    """Largest private memory of some processes, all together, looked at all the time."""

    def __init__(self, pids: list[int]) -> None:
        self.pids, self.most, self.looks = pids, 0, 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self.ended.wait(0.005):
            self.most = max(self.most, sum(private_of(pid) for pid in self.pids))
            self.looks += 1

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


def private_of(pid: int) -> int:
    """Private bytes of a process; a tensor nobody else has mapped yet counts."""
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        return sum(1024 * int(line.split()[1]) for line in rollup if line.startswith("Private_"))


def loader_of(items: list[Any], read: Any, workers: int) -> DataLoader[Any]:
    dataset: Any = items  # a list has all that is needed
    return DataLoader(
        dataset,
        batch_size=None,
        collate_fn=read,
        num_workers=workers,
        multiprocessing_context="spawn",
        persistent_workers=True,
        prefetch_factor=PREFETCH,
    )


def pids_of(loader: DataLoader[Any]) -> list[int]:
    """Start the workers, and give their process ids."""
    for _ in loader:
        pass
    iterator: Any = loader._iterator
    return [worker.pid for worker in iterator._workers]


def epoch(loader: DataLoader[Any], nbytes: int) -> float:
    """Payload megabytes a second, counted as they are in the files, over one epoch."""
    began = time.perf_counter()
    for step in loader:
        assert len(step.experts)
    return nbytes / (time.perf_counter() - began) / 1e6


def plain_read(root: str) -> float:
    """Time of a window of 200 MB into a buffer, over that of the bare read that fills it."""
    rows = 200_000_000 // (ROW[0] * ROW[1])
    Path(f"{root}/large").write_bytes(bytes(rows * ROW[0] * ROW[1]))
    segment = Segment(EXPERTS, f"{root}/large", 0, 0, rows, "uint8", ROW)
    out = torch.ones((rows, *ROW), dtype=torch.uint8)
    flat = out.numpy().reshape(-1).data

    def bare() -> None:
        fd = os.open(segment.file, os.O_RDONLY)
        os.preadv(fd, [flat], 0)
        os.close(fd)

    with Resolver(root) as resolver:
        ways: list[Callable[[], object]] = [
            bare,
            lambda: pt.window(resolver, [segment], EXPERTS, 0, rows, out=out),
        ]
        times: list[list[float]] = [[], []]
        for turn in range(22):
            began = time.perf_counter()
            ways[turn % 2]()
            times[turn % 2].append(time.perf_counter() - began)
    os.unlink(segment.file)
    return statistics.median(times[1]) / statistics.median(times[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=20, help="of routing, a micro batch")
    parser.add_argument("--workers", type=int, default=4)
    asked = parser.parse_args()
    # torch finds more workers than cores worth a warning; here they are asked for.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    tokens = asked.megabytes * 1_000_000 // (ROW[0] * ROW[1])
    source = Source(tokens)
    rivals = min(asked.batches, 50)
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="byhandle-bench-", dir=shared) as root:
        items = write(root, source, asked.batches)
        paths = write_inline(root, source, rivals)
        tiny = [write(root, Source(16), 1)[0]] * asked.workers * 4
        print(
            f"{asked.batches} micro batches of {tokens} tokens, {ROLLOUTS} rollouts of {TURNS} turns, "
            f"{asked.workers} spawned workers, {os.cpu_count()} cores, root {root}"
        )
        print(f"an item: {len(items[0])} bytes by handle, {os.path.getsize(paths[0])} inline")
        resolver = Resolver(root)
        read_into = plain_read(root)
        bytes_of = tokens * ROW[0] * ROW[1]

        # What a worker holds without payloads of note, then with them, every tensor compared.
        with_handles = partial(read, resolver, None)
        loader = loader_of(tiny, with_handles, asked.workers)
        with Watch(pids_of(loader)) as idle:
            for _ in range(5):
                sum(1 for _ in loader)
        del loader
        loader = loader_of(items, with_handles, asked.workers)
        pids = pids_of(loader)
        compared = 0
        with Watch(pids) as busy:
            for step in loader:
                check(source, step)
                compared += 1
        whole = sum(value.nbytes for value in source.step(0).values())
        flight = asked.workers * PREFETCH * whole
        held = busy.most - idle.most
        again = Resolver(root, verify="checksum")
        for number in (0, asked.batches - 1):  # what was written into tensors is in no file
            check(source, read(again, None, items[number]))

        inline = loader_of(paths, read_inline, asked.workers)
        wide = loader_of(items[:rivals], partial(read, resolver, torch.int32), asked.workers)
        for one in (inline, wide):
            for step in one:
                check(source, step)
                compared += 1
        rates: dict[str, list[float]] = {"handle": [], "int32": [], "inline": []}
        for _ in range(ROUNDS):
            rates["handle"].append(epoch(loader, bytes_of * asked.batches))
            rates["int32"].append(epoch(wide, bytes_of * rivals))
            rates["inline"].append(epoch(inline, bytes_of * rivals))
        rate = {way: statistics.median(found) for way, found in rates.items()}
        del loader, inline, wide
    print(f"{compared} steps equal to the reference in every tensor; files unchanged after writes")
    print(f"{'':<62}{'MB/s':>8}{'ratio':>8}  target")
    print(f"{'inline msgpack bytes, widened to int32':<62}{rate['inline']:>8.0f}")
    rows = [
        ("by handle", rate["handle"], rate["handle"] / rate["inline"], ">= 3.0"),
        ("by handle, asked for as int32", rate["int32"], rate["int32"] / rate["inline"], ""),
        ("window of 200 MB into a buffer / bare read into it", None, read_into, "<= 1.1"),
        (
            f"private payload memory {held / 1e6:.0f} MB / {flight / 1e6:.0f} MB in flight"
            f" ({busy.looks} looks)",
            None,
            held / flight,
            "<= 1.0",
        ),
    ]
    missed = 0
    for name, speed, ratio, target in rows:
        print(f"{name:<62}{'' if speed is None else f'{speed:.0f}':>8}{ratio:>8.2f}  {target}")
        if target:
            sign, bound = target.split()
            missed += ratio > float(bound) if sign == "<=" else ratio < float(bound)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
