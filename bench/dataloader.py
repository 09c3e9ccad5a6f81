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
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.utils.data import DataLoader

import payload.torch as pt
from bench.measure import Figure, medians, scratch, tell, tidy
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


def plain_read(root: str) -> tuple[float, float]:
    """Milliseconds of a window of 200 MB into a buffer, and of the bare read that fills it."""
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
        ours, rival = medians(
            lambda: pt.window(resolver, [segment], EXPERTS, 0, rows, out=out), bare, rounds=11
        )
    os.unlink(segment.file)
    return ours, rival


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--megabytes", type=int, default=20, help="of routing, a micro batch")
    parser.add_argument(
        "--workers", type=int, default=4, help="of what is compared and has targets"
    )
    parser.add_argument(
        "--others", type=int, nargs="*", default=[], help="numbers of workers to time as well"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    asked = parser.parse_args()
    tidy()
    # torch finds more workers than cores worth a warning; here they are asked for.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    tokens = asked.megabytes * 1_000_000 // (ROW[0] * ROW[1])
    source = Source(tokens)
    rivals = min(asked.batches, 50)
    with scratch() as root:
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
        rates: list[list[float]] = [[], [], []]
        for _ in range(ROUNDS):
            rates[0].append(epoch(loader, bytes_of * asked.batches))
            rates[1].append(epoch(wide, bytes_of * rivals))
            rates[2].append(epoch(inline, bytes_of * rivals))
        handle, as_int32, rival = map(statistics.median, rates)
        del loader, inline, wide
        name, unit = f"DataLoader, {asked.workers} workers", "MB/s"
        figures = [
            Figure(
                f"{name}: by handle / inline msgpack bytes, widened",
                handle,
                rival,
                unit,
                handle / rival,
                ">= 3",
            ),
            Figure(f"{name}: by handle as int32 / inline", as_int32, rival, unit, as_int32 / rival),
            Figure(
                "window of 200 MB into a buffer / bare read into it",
                *read_into,
                "ms",
                read_into[0] / read_into[1],
                "<= 1.1",
            ),
            Figure(
                f"private payload memory of {asked.workers} workers / batches in flight",
                held / 1e6,
                flight / 1e6,
                "MB",
                held / flight,
                "<= 1",
            ),
        ]
        for workers in asked.others:
            loader = loader_of(items[:rivals], with_handles, workers)
            inline = loader_of(paths, read_inline, workers)
            both: list[list[float]] = [[], []]
            for turn in range(1 + ROUNDS):
                for one, kept in zip((loader, inline), both, strict=True):
                    rate = epoch(one, bytes_of * rivals)
                    if turn:  # the first one starts the workers
                        kept.append(rate)
            handle, rival = map(statistics.median, both)
            del loader, inline, one
            name = f"DataLoader, {workers} workers: by handle / inline msgpack bytes, widened"
            figures.append(Figure(name, handle, rival, unit, handle / rival))
    print(f"{compared} steps equal to the reference in every tensor; files unchanged after writes")
    print(f"{busy.looks} looks at private memory")
    return tell(figures, asked.json)


if __name__ == "__main__":
    sys.exit(main())
