"""What an answer costs the server, in the engine's own serving code, from tokens to body."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi.responses import JSONResponse

from payload import Writer, vllm

from .compare import Tally
from .engine import MASKS

LAYERS, TOP_K = 48, 8
MEGABYTES = (4, 16, 64)
ROUNDS = 5


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory on tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def serving() -> Any:
    """The engine's serving object, without an engine behind it."""
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    made = ServingTokens.__new__(ServingTokens)
    made.enable_prompt_tokens_details = made.enable_log_outputs = False
    made.request_logger = None
    return made


def finished(rows: np.ndarray, completion: int) -> Any:
    """What the engine hands its serving object at the end of a request."""
    from vllm.outputs import CompletionOutput, RequestOutput, SamplingMask

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 150_000, completion).tolist()
    mask = [rng.integers(0, 150_000, 1 + i % 8).tolist() for i in range(completion)]
    one = CompletionOutput(
        0, "", tokens, None, None, routed_experts=rows, finish_reason="length",
        sampling_mask=SamplingMask(token_ids=mask) if MASKS else None,
    )  # fmt: skip
    prompt = list(range(len(rows) + 1 - completion))
    return RequestOutput("r", None, prompt, None, [one], True)


async def answer(served: Any, result: Any, payload_dir: str | None) -> bytes:
    """Let the serving object answer, and encode its answer as the router does."""

    async def results() -> AsyncIterator[Any]:
        yield result

    extra = None if payload_dir is None else {"payload_dir": payload_dir}
    params = SimpleNamespace(n=1, logprobs=None, extra_args=extra, routed_experts_prompt_start=0)
    request = SimpleNamespace(
        sampling_params=params, return_token_ids=False, output_mode="tokens",
        _response_mm_placeholders=None,
    )  # fmt: skip
    response = await served.serve_tokens_full_generator(
        request, results(), "r", "tiny", SimpleNamespace()
    )
    return bytes(JSONResponse(content=response.model_dump()).body)


async def timed(served: Any, rows: np.ndarray, payload_dir: str | None) -> tuple[float, float, int]:
    """Seconds an answer takes, the longest the event loop stood still, and the body's size."""
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.perf_counter())
            await asyncio.sleep(0.001)

    result = finished(rows, 1000)
    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0.005)
    began = time.perf_counter()
    body = await answer(served, result, payload_dir)
    took = time.perf_counter() - began
    await asyncio.sleep(0.002)
    ticker.cancel()
    return took, max(np.diff(ticks)), len(body)


def test_an_answer_by_handle_costs_the_server_no_more_than_inline(
    shared: Path, tally: Tally
) -> None:
    plain, attached = serving(), vllm.attach(serving(), Writer(shared))
    for megabytes in MEGABYTES:
        rows = np.random.default_rng(1).integers(
            0, 128, (megabytes * 1_000_000 // (LAYERS * TOP_K) + 1, LAYERS, TOP_K), np.uint8
        )
        inline, handle = [], []
        for _ in range(ROUNDS):
            inline.append(asyncio.run(timed(plain, rows, None)))
            handle.append(asyncio.run(timed(attached, rows, "v1")))
        times = [statistics.median(one[0] for one in way) for way in (inline, handle)]
        stalls = [statistics.median(one[1] for one in way) for way in (inline, handle)]
        tally.note(
            f"{megabytes} MB of routing: server's time inline {times[0] * 1e3:.1f} ms, by handle "
            f"{times[1] * 1e3:.1f} ms ({times[1] / times[0]:.2f}); event loop stands still "
            f"{stalls[0] * 1e3:.1f} ms, {stalls[1] * 1e3:.1f} ms; body {inline[0][2]} and "
            f"{handle[0][2]} bytes"
        )
        assert times[1] <= times[0]
        assert stalls[1] <= stalls[0]
    assert vllm.stats()["inline"] == {}
    assert vllm.stats()["files"] == ROUNDS * len(MEGABYTES)
