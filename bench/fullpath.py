"""From a request over HTTP to arrays: ``python -m bench.fullpath URL WAY TASK``, in a fresh process.

`measured` starts a server (the test double, in a process of its own) and a client for each way.
"""

from __future__ import annotations

import asyncio
import base64
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import numpy as np

from bench import measure
from bench.one import Timed, use
from bench.scenarios import digest_of
from client import generate
from payload import Resolver, Writer, decode_routed_experts
from payload.testing.server import Completion, app

COMPLETION = 1_000  # tokens of the completion; the prompt has the rest
WAYS = {
    "by handle": "ours",
    "inline, this client": "inline",
    "inline, renderers, SIMD base64": "inline",
    "inline, renderers, base64": "inline",
}


class Task(msgspec.Struct, frozen=True):
    """One way to call for a rollout of so many tokens."""

    url: str
    root: str
    way: str
    tokens: int
    rounds: int


class Renderer:
    """What renderers' client needs of a renderer."""

    supports_tools = True
    supports_process_multimodal = True

    def get_stop_token_ids(self) -> list[int]:
        return []

    def parse_response(self, ids: list[int], **_: Any) -> Any:
        return SimpleNamespace(
            content="", reasoning_content=None, tool_calls=[], reasoning_complete=True
        )


def rows_of(tokens: int) -> Any:
    return np.random.default_rng(0).integers(0, 128, (tokens - 1, 48, 8), np.uint8)


def serve(listener: socket.socket, root: str, sizes: list[int]) -> None:
    import uvicorn

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever began it ends it
    completions = {
        str(tokens): Completion(
            token_ids=[index * 37 % 50_000 for index in range(min(COMPLETION, tokens // 2))],
            arrays={"routed_experts": (0, rows_of(tokens))},
        )
        for tokens in sizes
    }
    double = app(lambda request: [completions[request["model"]]], Writer(root), inline="packed")
    config = uvicorn.Config(double, log_level="warning", access_log=False, ws="none")
    uvicorn.Server(config).run(sockets=[listener])


async def call(task: Task) -> Timed:
    found = Timed(f"http {task.tokens:,}", task.way, WAYS[task.way], wide=False)
    bodies: list[int] = []

    async def note(response: Any) -> None:
        bodies.append(len(await response.aread()))

    theirs = "renderers" in task.way
    http: Any = httpx2.AsyncClient(base_url=task.url, timeout=600, event_hooks={"response": [note]})
    if theirs:  # imported here: a way by handle needs none of it
        import openai
        import pybase64
        import renderers.client

        http = openai.AsyncOpenAI(base_url=f"{task.url}/v1", api_key="none", http_client=http)
    resolver = Resolver(task.root)
    prompt = [1] * (task.tokens - min(COMPLETION, task.tokens // 2))
    extra = {"payload_dir": f"{task.root}/v1"} if task.way == "by handle" else {}
    arguments = {
        "client": http, "model": str(task.tokens), "prompt_ids": prompt,
        "sampling_params": {"extra_args": extra}, "max_prompt_len": 10**6,
    }  # fmt: skip

    async def get() -> list[Any]:
        if theirs:
            result = await renderers.client.generate(
                renderer=Renderer(),
                messages=[],
                **arguments,
            )
            value: Any = result["routed_experts"]
            decode = pybase64.b64decode if "SIMD" in task.way else base64.b64decode
            data = decode(value["data"])
            return [np.frombuffer(data, value["dtype"]).reshape(value["shape"])]
        result = await generate(**arguments)
        if extra:
            return list(resolver.resolve(result["payload"])["routed_experts"])
        return [decode_routed_experts(result["routed_experts"])]

    want = rows_of(task.tokens)
    digest, found.nbytes = digest_of([want], wide=False, dtype="uint8"), want.nbytes
    buffer = np.ones(want.nbytes, np.uint8)
    del want
    held = measure.rollup()
    measure.forget_peak()
    resident, faults = measure.status("VmRSS"), measure.minor_faults()
    results = await get()
    use(results, buffer)
    found.faults = measure.minor_faults() - faults
    found.peak = measure.status("VmHWM") - resident
    now = measure.rollup()
    found.pss, found.private = now["Pss"] - held["Pss"], now["Anonymous"] - held["Anonymous"]
    if digest_of(results, wide=False, dtype="uint8") != digest:
        raise SystemExit(f"{task.way}: arrays differ from what the server has")
    found.message_bytes = bodies[-1]
    for _ in range(task.rounds):
        results = []
        began = time.perf_counter()
        results = await get()
        between = time.perf_counter()
        use(results, buffer)
        found.use.append(1e3 * (time.perf_counter() - between))
        found.get.append(1e3 * (between - began))
    found.copied = resolver.stats().bytes_copied
    return found


def measured(
    root: str, quick: bool, program: Callable[..., tuple[int, str, str]]
) -> Iterator[Timed]:
    """Each way over each size, on a server that all of them ask."""
    sizes = [1_000, 30_000] if quick else [1_000, 10_000, 30_000]
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    # asyncio does so for sockets it made. Without it a body of less than a segment waits for the
    # client's delayed acknowledgement of the head: 40 ms, on the short answers by handle only.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=serve, args=(listener, root, sizes), daemon=True)
    server.start()
    listener.close()
    try:
        for tokens in sizes:
            for way in WAYS:
                task = Task(url, root, way, tokens, 5 if quick else 15)
                code, out, errors = program("bench.fullpath", msgspec.json.encode(task).decode())
                if code:
                    raise SystemExit(errors or f"{way} ended with {code}")
                yield msgspec.json.decode(out, type=Timed)
                for directory in os.scandir(root):
                    shutil.rmtree(directory.path)
    finally:
        server.terminate()
        server.join()


def main() -> int:
    measure.tidy()
    task = msgspec.json.decode(sys.argv[1], type=Task)
    print(msgspec.json.encode(asyncio.run(call(task))).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
