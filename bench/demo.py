"""One response by handle, end to end: ``python -m bench.demo``.

Three processes, as in production: a server (a test double that replays captured rows), a client
that calls `generate` over HTTP once inline and once by handle, and a trainer that turns both bodies
into arrays and compares every byte. Exit status 1 if anything differs.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import uvicorn

from bench.captured import rollouts
from client import generate, parse_generate_response
from payload import (
    Ragged,
    Resolver,
    Writer,
    decode_routed_experts,
    decode_sampling_mask,
    decode_segments,
)
from payload.testing.server import app

SPAWN = multiprocessing.get_context("spawn")


def serve(listener: socket.socket, root: str) -> None:
    """Replay the rollouts; the request's model names one."""
    completions = {name: completion for name, (_, completion) in rollouts().items()}
    double = app(lambda request: [completions[request["model"]]], Writer(root))
    config = uvicorn.Config(double, log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


async def roll_out(url: str, root: str, bodies: Path) -> None:
    """Call `generate` twice for every rollout and keep the bodies for the trainer."""
    kept: list[bytes] = []

    async def keep(response: httpx2.Response) -> None:
        if response.url.path.endswith("/generate"):
            kept.append(await response.aread())

    hooks = {"response": [keep]}
    async with httpx2.AsyncClient(base_url=url, timeout=60, event_hooks=hooks) as http:
        await until_healthy(http)
        for name, (prompt, _) in rollouts().items():
            for way, extra_args in (("inline", {}), ("handle", {"payload_dir": f"{root}/v3"})):
                kept.clear()
                result = await generate(
                    client=http,
                    model=name,
                    prompt_ids=prompt,
                    sampling_params={"extra_args": extra_args},
                )
                if (result["payload"] is None) is (way == "handle"):
                    raise SystemExit(f"{name}: payload is {result['payload']!r} when asked {way}")
                (bodies / f"{name}.{way}").write_bytes(kept[-1])


async def until_healthy(http: httpx2.AsyncClient) -> None:
    for _ in range(300):
        try:
            if (await http.get("/health")).status_code == 200:
                return
        except httpx2.TransportError:
            await asyncio.sleep(0.1)
    raise SystemExit("the server did not come up in 30 s")


def train(root: str, bodies: Path, results: Any) -> None:
    """Turn both bodies of every rollout into arrays, timed, and compare them."""
    rows = []
    with Resolver(root) as resolver:
        for name in rollouts():
            inline_body = (bodies / f"{name}.inline").read_bytes()
            handle_body = (bodies / f"{name}.handle").read_bytes()
            began = time.perf_counter()
            inline = inline_arrays(inline_body)
            inline_ms = 1e3 * (time.perf_counter() - began)
            copied = resolver.stats().bytes_copied
            began = time.perf_counter()
            payload = parse_generate_response(handle_body)["choices"][0]["payload"]
            handle = {field: one for field, [one] in resolver.resolve(payload).items()}
            handle_ms = 1e3 * (time.perf_counter() - began)
            copied = resolver.stats().bytes_copied - copied
            files = {segment.file for segment in decode_segments(payload)}
            rows.append(
                {
                    "name": name,
                    "inline_bytes": len(inline_body),
                    "handle_bytes": len(handle_body),
                    "file_bytes": sum(os.path.getsize(file) for file in files),
                    "inline_ms": inline_ms,
                    "handle_ms": handle_ms,
                    "copied": copied,
                    "equal": same(inline, handle),
                }
            )
    results.send(rows)


def inline_arrays(body: bytes) -> dict[str, Any]:
    choice = parse_generate_response(body)["choices"][0]
    arrays: dict[str, Any] = {"routed_experts": decode_routed_experts(choice["routed_experts"])}
    if choice["sampling_mask"]:
        arrays["sampling_mask"] = decode_sampling_mask(choice["sampling_mask"])
    return arrays


def same(inline: dict[str, Any], handle: dict[str, Any]) -> bool:
    """Whether both ways gave the same side arrays, byte for byte."""
    if list(inline) != list(handle):
        return False
    for field, one in inline.items():
        pairs = [(one, handle[field])]
        if isinstance(one, Ragged):
            pairs = [(one.values, handle[field].values), (one.offsets, handle[field].offsets)]
        for a, b in pairs:
            if a.dtype != b.dtype or a.shape != b.shape or not np.array_equal(a, b):
                return False
    return True


def show(rows: list[dict[str, Any]]) -> None:
    heads = (
        ("rollout", 24), ("way", 7), ("HTTP body", 12), ("in file", 12),
        ("ms to array", 12), ("copied", 7), ("equal", 6),
    )  # fmt: skip
    print("".join(f"{head:<{w}}" if i < 2 else f"{head:>{w}}" for i, (head, w) in enumerate(heads)))
    for row in rows:
        equal = "yes" if row["equal"] else "NO"
        print(
            f"{row['name']:<24}{'inline':<7}{row['inline_bytes']:>12,}{'-':>12}"
            f"{row['inline_ms']:>12.2f}{'-':>7}\n"
            f"{'':<24}{'handle':<7}{row['handle_bytes']:>12,}{row['file_bytes']:>12,}"
            f"{row['handle_ms']:>12.2f}{row['copied']:>7}{equal:>6}"
        )


def main() -> int:
    # Also when it is told to end, nothing is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="byhandle-demo-", dir=shared) as scratch:
        root, bodies = f"{scratch}/payload", Path(scratch)
        os.mkdir(root)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            server = SPAWN.Process(target=serve, args=(listener, root), daemon=True)
            server.start()
        try:
            asyncio.run(roll_out(url, root, bodies))
        finally:
            server.terminate()
            server.join()
        receiver, sender = SPAWN.Pipe(duplex=False)
        trainer = SPAWN.Process(target=train, args=(root, bodies, sender))
        trainer.start()
        sender.close()
        try:
            rows = receiver.recv()
        except EOFError:
            rows = []
        trainer.join()
    show(rows)
    ok = bool(rows) and all(row["equal"] and row["copied"] == 0 for row in rows)
    print("\nevery byte equal, none copied by the reader" if ok else "\nDIFFERENT")
    return 0 if ok and trainer.exitcode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
