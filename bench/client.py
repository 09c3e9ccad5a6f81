"""What the client costs beside its rivals: ``python -m bench.client``.

Decoding a response with 11.5 MB of inline routed experts beside `renderers` and msgspec; the side array
alone, from its value in the body to an array, by handle (files never opened before, eight in a row, and
one alone while the processor's caches are full of other work) and inline; and how late 256 calls at
once make the event loop. Medians of interleaved rounds; exit status 1 if a target is missed.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import mmap
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx2
import msgspec
import numpy as np
import openai
import pybase64
import renderers.client
import uvicorn

from bench.measure import Figure, main, medians, scratch
from client import generate, parse_generate_response
from payload import Resolver, Writer, encode_segments
from payload.testing.server import Completion, app

ROUNDS = 21
SHAPE = (30_000, 48, 8)
ROWS = np.random.default_rng(0).integers(0, 128, SHAPE, np.uint8)
TEXT = base64.b64encode(ROWS.tobytes()).decode()
ORDERS = {
    "data first": ("data", "shape", "start", "dtype"),
    "data last": ("shape", "start", "dtype", "data"),
}
CALLS = 256
ROW = 8


def choice(tokens: int, **more: Any) -> dict[str, Any]:
    """A choice as vLLM 0.30 writes it, with some more fields."""
    ids = [index * 37 % 50_000 for index in range(tokens)]
    entries = [
        {"token": f"token_id:{token}", "logprob": -0.53219, "bytes": [1, 2], "top_logprobs": []}
        for token in ids
    ]
    return {"token_ids": ids, "logprobs": {"content": entries}, "finish_reason": "stop"} | more


def experts(order: Sequence[str]) -> dict[str, Any]:
    packed = {"data": TEXT, "shape": list(SHAPE), "start": 0, "dtype": "uint8"}
    return {key: packed[key] for key in order}


def plain(data: Any) -> Any:
    """The decoded body with text in place of views."""
    for one in data["choices"]:
        value = one["routed_experts"]
        if isinstance(value, dict) and isinstance(value["data"], memoryview):
            value["data"] = str(value["data"], "ascii")
    return data


def decoding(rounds: int) -> list[Figure]:
    rows = []
    for tokens in (1_000, 10_000):
        for n, order, keys in [(n, *item) for n in (1, 2) for item in ORDERS.items()]:
            choices = [choice(tokens, routed_experts=experts(keys)) for _ in range(n)]
            raw = msgspec.json.encode({"request_id": "r", "choices": choices, "usage": None})
            if plain(parse_generate_response(raw)) != json.loads(raw):
                raise SystemExit(f"n = {n}, {order}: decoded differently")
            known = n == 1 and order == "data first"
            rival = renderers.client.parse_generate_response if known else msgspec.json.decode
            ours, theirs = medians(
                partial(parse_generate_response, raw), partial[Any](rival, raw), rounds=rounds
            )
            name = f"decode {tokens:,} tokens, n = {n}, {order}"
            against = "renderers" if known else "msgspec"
            target = "<= 2" if known else "<= 1"
            rows.append(Figure(f"{name} / {against}", ours, theirs, "ms", ours / theirs, target))
    return rows


def side_array(root: str, rounds: int) -> list[Figure]:
    writer = Writer(root)
    values = iter(
        [
            msgspec.json.encode(encode_segments(writer.write({"routed_experts": (0, ROWS)})))
            for _ in range(rounds + 2 + ROW * (7 + 1))  # compared; once without a time, then timed
        ]
    )
    segments = iter([writer.write({"routed_experts": (0, ROWS)})[0] for _ in range(rounds + 2)])
    resolver = Resolver(root)
    inline = msgspec.json.encode(experts(ORDERS["data first"]))
    begin = inline.index(b'"data":"') + len(b'"data":"')

    def by_handle() -> Any:
        return resolver.resolve(next(values))["routed_experts"][0]

    def bare() -> Any:
        segment = next(segments)
        fd = os.open(segment.file, os.O_RDONLY)
        mapped = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
        os.close(fd)
        return np.ndarray(SHAPE, np.uint8, mapped, segment.offset)

    def simd() -> Any:
        end = inline.index(b'"', begin)
        rest = json.loads(inline[:begin] + inline[end:])
        data = pybase64.b64decode(memoryview(inline)[begin:end], validate=False)
        return np.frombuffer(data, rest["dtype"]).reshape(rest["shape"])

    def stdlib() -> Any:
        value = json.loads(inline)
        data = base64.b64decode(value["data"])
        return np.frombuffer(data, value["dtype"]).reshape(value["shape"])

    for run in (by_handle, bare, simd, stdlib):
        if not np.array_equal(run(), ROWS):
            raise SystemExit(f"{run.__name__} gave other rows")
    # A trainer meets a step's payloads one after the other. One alone after a rival finds the
    # processor's caches full of what that decoded, and so does the bare floor.
    some, fast, slow = medians(lambda: [by_handle() for _ in range(ROW)], simd, stdlib, rounds=7)
    name, each = "side array alone", some / ROW
    rows = [
        Figure(f"{name}: splice + SIMD base64 / handle", each, fast, "ms", fast / each, ">= 50"),
        Figure(f"{name}: json + base64 / handle", each, slow, "ms", slow / each, ">= 500"),
    ]
    floor, fast, handle, slow = medians(bare, simd, by_handle, stdlib, rounds=rounds)
    name = "side array alone, caches cold"
    rows += [
        Figure(f"{name}: splice + SIMD base64 / handle", handle, fast, "ms", fast / handle),
        Figure(f"{name}: json + base64 / handle", handle, slow, "ms", slow / handle),
        Figure(f"{name}: handle / bare open, fstat, mmap", handle, floor, "ms", handle / floor),
    ]
    for tokens in (1_000, 10_000):
        [segment] = writer.write({"routed_experts": (0, ROWS)})
        short = choice(tokens, payload=encode_segments([segment]))
        bodies = [
            msgspec.json.encode({"choices": [one]})
            for one in (short, choice(tokens, routed_experts=experts(ORDERS["data first"])))
        ]

        def whole_by_handle(raw: bytes = bodies[0]) -> Any:
            return resolver.resolve(parse_generate_response(raw)["choices"][0]["payload"])

        def whole_inline(raw: bytes = bodies[1]) -> Any:
            value = renderers.client.parse_generate_response(raw)["choices"][0]["routed_experts"]
            data = pybase64.b64decode(value["data"])
            return np.frombuffer(data, value["dtype"]).reshape(value["shape"])

        ours, theirs = medians(whole_by_handle, whole_inline, rounds=rounds)
        name = f"whole body, {tokens:,} tokens: renderers + SIMD / handle"
        rows.append(Figure(name, ours, theirs, "ms", theirs / ours))
    return rows


def serve(listener: socket.socket, root: str) -> None:
    completion = Completion(
        token_ids=list(range(1000)), arrays={"routed_experts": (0, ROWS[:2000])}
    )
    double = app(lambda request: [completion], Writer(root), inline="packed")
    config = uvicorn.Config(double, log_level="warning", access_log=False, ws="none", backlog=1024)
    uvicorn.Server(config).run(sockets=[listener])


async def lag(http: Any, extra_args: dict[str, str], times: int) -> float:
    """99th percentile of how late a 10 ms ticker is, in ms, beside 256 calls at once, some times.

    What was imported is frozen first, as long-running programs do: collecting it takes 50 ms a time.
    """
    late = []

    async def tick() -> None:
        while True:
            due = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            late.append(1e3 * (time.perf_counter() - due))

    async with http:
        params = {"extra_args": extra_args}

        async def call() -> None:
            # Each looks at its own result and lets go of it: 256 at once take 10 ms to be freed.
            result = await generate(
                client=http, model="m", prompt_ids=[1] * 1001, sampling_params=params
            )
            if (result["payload"] is None) is bool(extra_args):
                raise SystemExit(f"payload is {result['payload']!r} when asked {extra_args}")

        await call()
        gc.collect()
        gc.freeze()
        ticker = asyncio.create_task(tick())
        for _ in range(times):
            await asyncio.gather(*(call() for _ in range(CALLS)))
        ticker.cancel()
        gc.unfreeze()
    return statistics.quantiles(late, n=100)[-1]


def loop_lag(root: str, times: int) -> list[Figure]:
    rows = []
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    # asyncio sets it only on sockets of its own; without it answers wait 40 ms for each other.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(listener, root))
    server.start()
    listener.close()
    try:
        for library in ("httpx2", "openai"):
            late = []
            for extra_args in ({"payload_dir": f"{root}/v1"}, {}):
                http: Any = httpx2.AsyncClient(base_url=url, timeout=600)
                if library == "openai":
                    http = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
                late.append(asyncio.run(lag(http, extra_args, times)))
                for directory in os.scandir(root):
                    shutil.rmtree(directory.path)
            name = f"{CALLS} calls at once ({library}): 99% of ticks, ms late; inline"
            rows.append(Figure(name, late[0], late[1], "ms", late[0], "<= 20"))
    finally:
        server.terminate()
        server.join()
    return rows


def figures(quick: bool) -> list[Figure]:
    rounds = 7 if quick else ROUNDS
    with scratch() as root:
        return decoding(rounds) + side_array(root, rounds) + loop_lag(root, 1 if quick else 5)


if __name__ == "__main__":
    sys.exit(main(figures, __doc__))
