"""The README's DataLoader recipe, in a program of its own, and what goes between its processes."""

import json
import pickle
import re
import subprocess
import sys
import textwrap
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import payload.torch as pt
from payload import (
    PayloadMissingError,
    PayloadTruncatedError,
    Ragged,
    Resolver,
    Sample,
    Segment,
    Writer,
    pack,
)
from payload import decode_segments as decode

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]  # each worker imports torch

README = (Path(__file__).parent.parent.parent / "README.md").read_text()
SECTION = README.split("\n## Dataloader\n")[1].split("\n## ")[0]
RECIPE, USE = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
NAME = "routed_experts"


def write_batches(root: Path, count: int, tokens: int = 0) -> tuple[list[bytes], list[np.ndarray]]:
    """Micro batches of three rollouts of two turns, and what naive reading makes of each."""
    rng = np.random.default_rng(0)
    writer, items, wanted = Writer(root), [], []
    for _ in range(count):
        samples, rows = [], []
        for lengths, cut in (((3, 4), None), ((2, 6), 5), ((4, 3 + tokens), None)):
            total = sum(lengths)
            mine = rng.integers(0, 256, (total, 3, 2), np.uint8)
            mine[-1] = 0  # never forwarded: no row
            segments = writer.write({NAME: (0, mine[: lengths[0]])})
            segments += writer.write({NAME: (lengths[0], mine[lengths[0] : -1])})
            samples.append(Sample(total, segments, cut))
            rows.append(mine[:cut])
        batch = pack(samples, pad_to=-(-sum(map(len, rows)) // 8) * 8)
        items.append(msgspec.msgpack.encode(batch))
        padding = np.zeros((batch.num_tokens - sum(map(len, rows)), 3, 2), np.uint8)
        wanted.append(np.concatenate([*rows, padding]))
    return items, wanted


def run(folder: Path, code: str, *arguments: str, functions: str = "") -> Any:
    """Run the recipe with some lines behind it as a program; gives the JSON it prints."""
    main = "\nif __name__ == '__main__':\n" + textwrap.indent(textwrap.dedent(code), "    ")
    recipe = "from pathlib import Path\n" + RECIPE.replace("/shared/payload", str(folder / "root"))
    program = folder / "train.py"
    program.write_text(recipe + textwrap.dedent(functions) + main)
    warnings = ["-W", "error"]
    if sys.version_info >= (3, 12):  # torch has threads; fork is what the test is about
        warnings += ["-W", "ignore:This process:DeprecationWarning"]
    done = subprocess.run(
        [sys.executable, *warnings, str(program), *arguments],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # At exit the tracker, a process of its own, may find names gone that it was to remove.
    said = re.sub(r".*resource_tracker: '/mp-\w+': \[Errno 2\].*", "", done.stderr)
    assert "Warning" not in said
    return json.loads(done.stdout)


def test_the_recipe_has_twenty_lines() -> None:
    assert len([line for line in RECIPE.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("context", ["", "spawn", "fork", "forkserver"])
def test_the_recipe_gives_every_rank_its_rows(context: str, tmp_path: Path) -> None:
    items, wanted = write_batches(tmp_path / "root", 6)
    (tmp_path / "items").write_bytes(msgspec.msgpack.encode(items))
    np.save(tmp_path / "wanted.npy", np.stack(wanted))
    before = {path: path.read_bytes() for path in (tmp_path / "root").rglob("*.safetensors")}
    code = """
        import json, sys
        import numpy as np

        items = msgspec.msgpack.decode(Path("items").read_bytes())
        wanted = torch.from_numpy(np.load("wanted.npy"))
        workers = {}
        if sys.argv[1:] != [""]:
            workers = {"num_workers": 2, "multiprocessing_context": sys.argv[1]}
            workers |= {"persistent_workers": True, "prefetch_factor": 4}
        seen = 0
        for rank in range(2):
            loader = loader_of(items, rank, 2, **workers)
            loader.collate_fn(items[0])  # files and threads are open here before a fork
            size = wanted.shape[1] // 2
            mine = slice(rank * size, (rank + 1) * size)
            for epoch in range(2):
                for want, (rows, valid) in zip(wanted[:, mine], loader, strict=True):
                    assert rows.dtype == torch.uint8
                    assert torch.equal(rows, want)
                    assert not valid.all() and not rows[~valid].any()
                    assert rows[valid].any(dim=(1, 2)).all()
                    rows.add_(1)  # the trainer's to write into
                    seen += 1
        print(json.dumps(seen))
    """
    assert run(tmp_path, code, context) == 24
    assert {path: path.read_bytes() for path in before} == before


def test_the_lines_that_use_the_recipe_run_as_they_stand(tmp_path: Path) -> None:
    items, wanted = write_batches(tmp_path / "root", 2)
    (tmp_path / "items").write_bytes(msgspec.msgpack.encode(items))
    code = f"""
        import json
        items = msgspec.msgpack.decode(Path("items").read_bytes())
        steps = []
        def train_step(ids, valid):
            steps.append((str(ids.dtype), ids.tolist()))
{textwrap.indent(USE, "        ")}
        print(json.dumps(steps))
    """
    assert run(tmp_path, code) == [["torch.int64", rows.tolist()] for rows in wanted]


def test_a_workers_window_is_the_memory_the_main_process_gets(tmp_path: Path) -> None:
    """Counted by the kernel: one page of memory, mapped in both, is no copy."""
    items, wanted = write_batches(tmp_path / "root", 3, tokens=5000)
    (tmp_path / "items").write_bytes(msgspec.msgpack.encode(items))
    functions = """
        import json, sys

        def backing(tensor):
            '''Device and inode of the memory behind a tensor.'''
            with open("/proc/self/maps") as maps:
                for line in maps:
                    bounds, _, _, device, inode = line.split()[:5]
                    first, last = (int(bound, 16) for bound in bounds.split("-"))
                    if first <= tensor.data_ptr() < last:
                        return f"{device} {inode}"

        def read(resolver, item):
            batch = msgspec.msgpack.decode(item, type=MicroBatch)
            where = batch.segments, "routed_experts"
            whole = 0, batch.num_tokens
            options = {"fill": 0, "holes": batch.holes}
            one = payload.torch.window(resolver, *where, *whole, **options)
            pinned = payload.torch.window(resolver, *where, *whole, **options, pin_memory=True)
            wide = payload.torch.window(resolver, *where, *whole, **options, dtype=torch.int32)
            single = payload.torch.window(resolver, *where, 0, 3)
            copied = resolver.stats().bytes_copied
            tensors = [one, pinned, wide, single]
            assert all(tensor.is_shared() for tensor in tensors)
            return tensors, [backing(tensor) for tensor in tensors], copied
    """
    code = """
        items = msgspec.msgpack.decode(Path("items").read_bytes())
        bound = partial(read, Resolver(sys.argv[1]))
        loader = DataLoader(
            items, batch_size=None, collate_fn=bound, num_workers=1, multiprocessing_context="spawn"
        )
        found = []
        for tensors, inodes, copied in loader:
            assert [backing(tensor) for tensor in tensors] == inodes, inodes
            assert len(set(inodes)) == 4 and not any(inode.endswith(" 0") for inode in inodes)
            found.append((sum(t.numel() for t in tensors), copied, tensors[0].tolist()))
        print(json.dumps(found))
    """
    found = run(tmp_path, code, str(tmp_path / "root"), functions=functions)
    total = 0
    for (values, copied, rows), want in zip(found, wanted, strict=True):
        assert rows == want.tolist()
        holes = 3 * 6 * sum(not row.any() for row in want)
        total += values - holes
        assert copied == total  # each byte once, by the read


def test_in_the_main_process_nothing_is_copied_besides(tmp_path: Path) -> None:
    [segment] = Writer(tmp_path).write({NAME: (0, np.ones((50, 3, 2), np.uint8))})
    with Resolver(tmp_path) as resolver:
        loader = DataLoader(
            [(0, 20), (20, 50)],
            batch_size=None,
            collate_fn=lambda where: pt.window(resolver, [segment], NAME, *where),
        )
        assert [tuple(rows.shape) for rows in loader] == [(20, 3, 2), (30, 3, 2)]
        assert resolver.stats().bytes_copied == resolver.stats().bytes_read == 0


def test_pinned_memory_is_read_into_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for an accelerator: it shows which memory is asked for and filled, not that it pins."""
    [a] = Writer(tmp_path).write({NAME: (0, np.ones((50, 3, 2), np.uint8))})
    [b] = Writer(tmp_path).write({NAME: (50, np.full((50, 3, 2), 2, np.uint8))})
    asked = []

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = plain(*size, **options)
        asked.append((pin_memory, made.data_ptr(), tuple(made.shape), made.dtype))
        return made

    plain = torch.empty
    with Resolver(tmp_path) as resolver:
        not_there = pt.window(resolver, [a], NAME, 0, 50, pin_memory=True)
        assert not_there.float().mean() == 1
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch, "empty", empty)
        for segments, hi, dtype in (
            ([a], 50, None),
            ([a, b], 90, None),
            ([a], 50, torch.int32),
            ([a, b], 0, None),
        ):
            asked.clear()
            before = resolver.stats()
            rows = pt.window(resolver, segments, NAME, 0, hi, dtype=dtype, pin_memory=True)
            assert asked == [(True, rows.data_ptr(), (hi, 3, 2), dtype or torch.uint8)]
            after = resolver.stats()
            nbytes = hi * 6
            assert after.bytes_copied - before.bytes_copied == nbytes
            assert after.bytes_read - before.bytes_read == nbytes
            assert rows[:50].eq(1).all()
            assert rows[50:].eq(2).all()
        asked.clear()
        monkeypatch.setattr(pt, "get_worker_info", object)
        rows = pt.window(resolver, [a, b], NAME, 0, 90, pin_memory=True)
        assert rows.is_shared()  # a worker must not touch the device
        assert not any(pinned for pinned, *_ in asked)
        assert int(rows.sum()) == 6 * (50 + 80)


def test_a_loader_that_pins_copies_nothing_that_was_read_into_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same stand-in; as the real one, its `pin_memory` returns what is pinned and copies the rest."""
    segments = Writer(tmp_path).write({NAME: (0, np.ones((50, 3, 2), np.uint8))})
    pinned, copied = [], []

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = plain(*size, **options)
        if pin_memory:
            pinned.append(made)
        return made

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        if any(tensor.data_ptr() == known.data_ptr() for known in pinned):
            return tensor
        copied.append(tensor.nbytes)
        return tensor.clone()

    plain = torch.empty
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    for asked, more in ((True, 0), (False, 300)):
        copied.clear()
        with Resolver(tmp_path) as resolver:
            read = partial(pt.window, resolver, segments, NAME, pin_memory=asked)
            loader = DataLoader(
                [(0, 20), (20, 50)],
                batch_size=None,
                collate_fn=lambda where, read=read: read(*where),
                pin_memory=True,
            )
            assert [int(rows.sum()) for rows in loader] == [120, 180]
            assert sum(copied) == more
            assert resolver.stats().bytes_copied == (300 if asked else 0)


def test_ragged_rows_go_through_a_loader_jagged_and_padded(tmp_path: Path) -> None:
    mask = Ragged.from_lists([[7, 8], [9], [], [1, 2, 3]])
    [segment] = Writer(tmp_path / "root").write({"sampling_mask": (2, mask)})
    (tmp_path / "items").write_bytes(msgspec.msgpack.encode([[segment]] * 2))
    functions = """
        def read(resolver, segments):
            rows = resolver.ragged(segments, "sampling_mask", 1, 6)
            return payload.torch.as_nested(rows), payload.torch.as_padded(rows, -1)
    """
    code = """
        import json
        items = msgspec.msgpack.decode(Path("items").read_bytes())
        bound = partial(read, Resolver("root"))
        workers = {"num_workers": 1, "multiprocessing_context": "spawn"}
        found = []
        for nested, padded in DataLoader(items, batch_size=None, collate_fn=bound, **workers):
            found.append(([row.tolist() for row in nested.unbind()], padded.tolist()))
            nested.values().zero_()
            padded.zero_()
        print(json.dumps(found))
    """
    found = run(tmp_path, code, functions=functions)
    rows = [[], [7, 8], [9], [], [1, 2, 3]]
    assert found == [[rows, [(row + [-1] * 3)[:3] for row in rows]]] * 2


@pytest.mark.parametrize("context", ["spawn", "fork"])
def test_an_error_in_a_worker_keeps_its_class_and_text(context: str, tmp_path: Path) -> None:
    items, _ = write_batches(tmp_path / "root", 1)
    for path in (tmp_path / "root").rglob("*.safetensors"):
        path.unlink()
    (tmp_path / "items").write_bytes(msgspec.msgpack.encode(items))
    code = """
        import json, sys
        items = msgspec.msgpack.decode(Path("items").read_bytes())
        try:
            list(loader_of(items, 0, 1, num_workers=1, multiprocessing_context=sys.argv[1]))
        except FileNotFoundError as error:
            print(json.dumps([type(error).__name__, str(error)]))
    """
    name, text = run(tmp_path, code, context)
    assert name == "PayloadMissingError"
    assert "is not there" in text
    assert "6 of 6 segments cannot be read" in text


def test_what_idles_in_a_queue_is_small(tmp_path: Path) -> None:
    """Handles of 1 GB of rows, resolvers with open files, and errors."""
    path = tmp_path / "a.bin"
    with open(path, "wb") as file:
        file.truncate(2**30)
    segment = Segment(NAME, str(path), 0, 0, 2**30 // 384, "uint8", (48, 8))
    with Resolver(tmp_path) as resolver:
        pt.view(resolver, segment)
        resolver.view(segment)
        assert len(pickle.dumps(resolver)) < 1024
        assert len(pickle.dumps(segment)) < 1024
        again = pickle.loads(pickle.dumps(resolver))
        assert pt.view(again, pickle.loads(pickle.dumps(segment))).shape == (2796202, 48, 8)
        assert again.stats().bytes_read == 0
        again.close()
        short = msgspec.structs.replace(segment, rows=segment.rows + 1000)
        with pytest.raises(PayloadTruncatedError) as caught:
            pt.view(resolver, short)
        assert len(pickle.dumps(caught.value)) < 1024
        path.unlink()
        resolver.close()
    with Resolver(tmp_path) as resolver, pytest.raises(PayloadMissingError) as missing:
        pt.view(resolver, segment)
    assert len(pickle.dumps(missing.value)) < 2048
    wire = msgspec.json.encode([segment] * 10_000)
    tracemalloc.start()
    held = decode(wire)
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert nbytes / len(held) < 1024
