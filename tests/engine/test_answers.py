"""The same request inline and by handle, to a real engine."""

import asyncio
import ctypes
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import pytest

from client import generate
from payload import Resolver, decode_routed_experts, gaps
from payload.segment import decode_segments

from .compare import Tally, body, both, by_handle, equal, post, salted
from .engine import MASKS, Engine, stats


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 512), k=tokens)


def files(engine: Engine) -> set[Path]:
    return {path for path in engine.root.rglob("*") if path.is_file()}


def test_a_short_request(tiny: Engine, tally: Tally) -> None:
    inline, handle = both(tiny, body(list(range(5, 13)), max_tokens=8), tally)
    [segment, *_] = handle["choices"][0]["payload"]
    assert (segment["rows"], segment["dtype"], segment["shape"]) == (15, "uint8", [3, 4])
    assert "payload" not in inline["choices"][0]


def test_a_long_request(tiny: Engine, tally: Tally) -> None:
    both(tiny, body(prompt(1500), max_tokens=500), tally)


def test_the_smallest_request_is_one_row(tiny: Engine, tally: Tally) -> None:
    _, handle = both(tiny, body([7], max_tokens=1), tally)
    assert handle["choices"][0]["payload"][0]["rows"] == 1


def test_two_choices_have_a_file_each(tiny: Engine, tally: Tally) -> None:
    _, handle = both(tiny, body(list(range(5, 13)), max_tokens=6, n=2), tally)
    first, second = handle["choices"]
    assert first["payload"][0]["file"] != second["payload"][0]["file"]
    assert first["token_ids"] != second["token_ids"]


@pytest.mark.parametrize("start", [0, 150, 299, 300])
def test_rows_before_the_start_are_left_out(start: int, tiny: Engine, tally: Tally) -> None:
    request = body(prompt(300), max_tokens=6, routed_experts_prompt_start=start)
    _, handle = both(tiny, request, tally)
    assert handle["choices"][0]["payload"][0]["pos"] == start


def test_no_row_at_all_is_a_segment_of_no_rows(tiny: Engine, tally: Tally) -> None:
    request = body(prompt(20), max_tokens=1, routed_experts_prompt_start=20)
    inline = post(tiny, request)["choices"][0]["routed_experts"]
    [segment, *_] = post(tiny, salted(by_handle(request, "v3")))["choices"][0]["payload"]
    assert (segment["pos"], segment["rows"], segment["shape"]) == (20, 0, [3, 4])
    assert inline is None or len(decode_routed_experts(inline)) == 0


def test_cached_tokens_have_the_same_rows(tiny: Engine, tally: Tally) -> None:
    """A prefix hit by handle against the same hit inline, and against the cold rows."""
    request = body(prompt(300, seed=1), max_tokens=4)
    cold = post(tiny, request)
    inline, handle = post(tiny, request), post(tiny, by_handle(request, "v3"))
    assert handle["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    equal(inline, handle, request, tiny, tally)
    rows = [decode_routed_experts(one["choices"][0]["routed_experts"]) for one in (cold, inline)]
    np.testing.assert_array_equal(rows[0][:299], rows[1][:299])


def test_two_turns_make_one_window(tiny: Engine, tally: Tally) -> None:
    first = body(prompt(224, seed=2), max_tokens=6)
    _, one = both(tiny, first, tally)
    path = first["token_ids"] + one["choices"][0]["token_ids"]
    second = body(path + prompt(5, seed=3), max_tokens=7, routed_experts_prompt_start=len(path) - 1)
    _, two = both(tiny, second, tally)
    end = len(second["token_ids"]) + 7 - 1
    segments = [
        segment
        for answer in (one, two)
        for segment in decode_segments(answer["choices"][0]["payload"])
    ]
    # The row of turn 1's last token, which turn 1 never forwarded, is turn 2's first.
    assert gaps(segments, "routed_experts", 0, end) == []
    assert gaps(segments, "routed_experts", 0, end + 1) == [(end, end + 1)]
    whole = post(tiny, second | {"sampling_params": second["sampling_params"] | {
        "routed_experts_prompt_start": 0}})  # fmt: skip
    expected = decode_routed_experts(whole["choices"][0]["routed_experts"])
    with Resolver(tiny.root) as resolver:
        window = resolver.window(segments, "routed_experts", 0, end)
    assert window is not None
    assert window.shape == expected.shape
    # Turn 1's rows as turn 1 had them, turn 2's as turn 2 had them.
    np.testing.assert_array_equal(window[len(path) - 1 :], expected[len(path) - 1 :])
    alike = (np.sort(window, -1) == np.sort(expected, -1)).all(-1).mean()
    assert alike > 0.99


def test_the_client_and_the_resolver_read_it(tiny: Engine) -> None:
    async def roll_out() -> dict[str, object]:
        async with httpx2.AsyncClient(base_url=tiny.url, timeout=300) as http:
            return await generate(
                client=http, model="tiny", prompt_ids=prompt(40), sampling_params={
                    "temperature": 1.0, "top_k": 20, "seed": 3, "max_tokens": 9,
                    "extra_args": {"payload_dir": str(tiny.root / "v4")},
                },
            )  # fmt: skip

    result = asyncio.run(roll_out())
    with Resolver(tiny.root) as resolver:
        [rows] = resolver.resolve(result["payload"])["routed_experts"]
    tokens = len(result["completion_ids"])  # type: ignore[arg-type]
    assert rows.shape == (40 + tokens - 1, 3, 4)
    assert len(result["completion_logprobs"]) == tokens  # type: ignore[arg-type]
    assert result["routed_experts"] is None


def test_sixteen_at_a_time(tiny: Engine, tally: Tally) -> None:
    """Numerics depend on what shares a batch, so a few rows may differ; those of others would all."""
    requests = [body(prompt(30 + i, seed=i), max_tokens=6, seed=i) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        inline = list(pool.map(lambda one: post(tiny, one), requests))
        asked = [salted(by_handle(one, "v5")) for one in requests]
        handle = list(pool.map(lambda one: post(tiny, one), asked))
    written, same = set(), 0
    with Resolver(tiny.root, verify="checksum") as resolver:
        for one, other in zip(inline, handle, strict=True):
            [choice] = other["choices"]
            expected = decode_routed_experts(one["choices"][0]["routed_experts"])
            [rows] = resolver.resolve(choice["payload"])["routed_experts"]
            assert rows.shape == expected.shape
            assert (rows == expected).mean() > 0.9
            same += np.array_equal(rows, expected)
            written.add(choice["payload"][0]["file"])
    assert len(written) == 16
    assert same >= 12
    tally.note(f"16 at a time: {same} with the very rows of their inline answer")


def test_an_aborted_request_keeps_its_rows(tiny: Engine) -> None:
    request = body(prompt(50, seed=4), max_tokens=3000)
    asked = by_handle(request, "v6") | {"request_id": "to-abort"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, tiny, asked)
        time.sleep(2)
        httpx2.post(
            f"{tiny.url}/abort_requests", json={"request_ids": ["generate-tokens-to-abort"]}
        )
        [choice] = answer.result(60)["choices"]
    assert choice["finish_reason"] == "abort"
    tokens = len(choice["token_ids"])
    assert 0 < tokens < 3000
    whole = post(tiny, request | {"sampling_params": request["sampling_params"] | {
        "max_tokens": tokens}})["choices"][0]  # fmt: skip
    assert whole["token_ids"] == choice["token_ids"]
    with Resolver(tiny.root) as resolver:
        [rows] = resolver.resolve(choice["payload"])["routed_experts"]
    assert choice["payload"][0]["rows"] == 50 + tokens - 1
    np.testing.assert_array_equal(rows, decode_routed_experts(whole["routed_experts"]))


def test_a_client_that_goes_away_harms_nobody(tiny: Engine, tally: Tally) -> None:
    before = files(tiny)
    with pytest.raises(httpx2.TimeoutException):
        httpx2.post(
            f"{tiny.url}/inference/v1/generate",
            json=by_handle(body(prompt(50), max_tokens=3000), "v7"),
            timeout=1,
        )
    both(tiny, body(prompt(10), max_tokens=3), tally, "v8")
    assert len(files(tiny) - before) == 1


@pytest.mark.parametrize(
    "payload_dir",
    ["/etc", "..", "v3/../../x", "/", "{root}x/v3", "{root}/../x", "v3//x", "v3/./x", "\0", 7, ["v3"], {}],
    ids=str,
)  # fmt: skip
def test_a_directory_outside_the_root_is_refused(payload_dir: object, tiny: Engine) -> None:
    if isinstance(payload_dir, str):
        payload_dir = payload_dir.replace("{root}", str(tiny.root))
    before, refused = files(tiny), stats(tiny.url)["refused"]
    beside = set(tiny.root.parent.iterdir())
    for stream in (False, True):
        request = by_handle(body(prompt(8), max_tokens=3000, stream=stream), payload_dir)
        began = time.monotonic()
        answer = httpx2.post(f"{tiny.url}/inference/v1/generate", json=request, timeout=60)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
        assert "payload_dir" in error["message"]
        assert time.monotonic() - began < 2, "it was generated first"
    assert stats(tiny.url)["refused"] == refused + 2
    assert files(tiny) == before
    assert set(tiny.root.parent.iterdir()) == beside


def test_a_link_out_of_the_root_is_not_followed(tiny: Engine, tmp_path: Path) -> None:
    (tiny.root / "out").symlink_to(tmp_path)
    request = body(prompt(8), max_tokens=4)
    inline = post(tiny, request)["choices"]
    assert post(tiny, salted(by_handle(request, "out")))["choices"] == inline
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def full(tiny: Engine) -> Iterator[Path]:
    """A directory beneath the root without a free byte."""
    directory = tiny.root / "full"
    directory.mkdir(parents=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", bytes(directory), b"tmpfs", 0, b"size=64k"):
        raise OSError(ctypes.get_errno(), "mount of a tmpfs, which needs root")
    try:
        (directory / "filler").write_bytes(b"x" * 65536)
        yield directory
    finally:
        libc.umount2(bytes(directory), 2)


def test_a_full_root_falls_back_to_the_inline_answer(tiny: Engine, full: Path) -> None:
    request = body(prompt(60), max_tokens=4, n=2)
    inline = post(tiny, request)["choices"]
    before = stats(tiny.url)
    assert post(tiny, salted(by_handle(request, str(full))))["choices"] == inline
    after = stats(tiny.url)
    assert sum(after["inline"].values()) == sum(before["inline"].values()) + 2
    assert after["files"] == before["files"]
    assert [path.name for path in full.iterdir()] == ["filler"]
    assert "stays inline: file" in tiny.log.read_text()


def test_a_streamed_answer_stays_inline(tiny: Engine) -> None:
    before, count = files(tiny), stats(tiny.url)["inline"].get("stream", 0)
    request = by_handle(body(prompt(8), max_tokens=4, stream=True), "v3")
    answer = httpx2.post(f"{tiny.url}/inference/v1/generate", json=request, timeout=60)
    chunks = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    last = [chunk["choices"][0]["routed_experts"] for chunk in chunks if chunk["choices"]][-1]
    assert decode_routed_experts(last).shape == (8 + 4 - 1, 3, 4)
    assert "payload" not in answer.text
    assert files(tiny) == before
    assert stats(tiny.url)["inline"]["stream"] == count + 1


def test_files_name_their_request(tiny: Engine) -> None:
    request = by_handle(body(prompt(8), max_tokens=4), "v9") | {"request_id": "named"}
    [segment, *_] = post(tiny, request)["choices"][0]["payload"]
    command = [sys.executable, "-m", "payload", "inspect", segment["file"]]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "generate-tokens-named" in shown
    assert ("weight_versions" in shown) == MASKS  # since 0.31


def test_wide_ids_and_a_dense_layer(wide: Engine, tally: Tally) -> None:
    inline, handle = both(wide, body(prompt(100), max_tokens=12), tally)
    [segment, *_] = handle["choices"][0]["payload"]
    assert (segment["dtype"], segment["shape"]) == ("uint16", [4, 8])
    rows = decode_routed_experts(inline["choices"][0]["routed_experts"])
    assert rows.max() > 255
    assert (rows[:, 0] == 0).all()  # the dense layer keeps its slot


def test_two_server_processes_share_a_root(wide: Engine, tally: Tally) -> None:
    request = body(prompt(20), max_tokens=2)
    inline = post(wide, request)
    processes: dict[int, int] = {}
    lock = threading.Lock()

    def ask(_: int) -> None:
        handle = post(wide, salted(by_handle(request, "v3")))
        with lock:
            equal(inline, handle, request, wide, tally)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(24)))
    for _ in range(200):
        one = stats(wide.url)
        processes[one["pid"]] = one["files"]
        if len(processes) == 2:
            break
    assert len(processes) == 2
    assert all(processes.values()), processes
    assert sum(processes.values()) == len(files(wide))
