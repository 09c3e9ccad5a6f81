import asyncio
import gc
import itertools
import json
import re
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import httpx2
import msgspec
import numpy as np
import openai
import pytest

import client
from client import (
    MalformedGenerateResponseError,
    OverlongPromptError,
    _http,
    _turns,
    generate,
    generate_sync,
    payload_status,
)
from payload import Ragged, Resolver, Writer, spill
from payload.testing.server import Completion, app, encode_inline

KEYS = [
    "request_id", "usage", "prompt_ids", "renderer_prompt_ids", "mm_placeholders", "completion_ids",
    "completion_logprobs", "content", "reasoning_content", "tool_calls", "finish_reason",
    "reasoning_complete", "routed_experts", "sampling_mask", "sampling_mask_logprobs", "payload",
    "multi_modal_data", "prompt_attribution",
]  # fmt: skip
ROWS = np.arange(36, dtype=np.uint8).reshape(6, 2, 3)
CAPTURED = Path(__file__).parent.parent / "data" / "vllm"


class Client:
    """What an AsyncOpenAI client has, answering what it is told."""

    base_url = "http://127.0.0.1:1/v1/"

    def __init__(self, answer: dict[str, Any] | bytes, models: Any = None) -> None:
        self.answer = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.models = models
        self.sent: list[tuple[str, dict[str, Any]]] = []

    async def post(self, url: str, **more: Any) -> Any:
        self.sent.append((url, more))
        return SimpleNamespace(content=self.answer)

    async def get(self, url: str, **more: Any) -> Any:
        if self.models is None:
            raise RuntimeError("no models here")
        return self.models


class Renderer:
    """What `generate` needs of a renderer."""

    supports_tools = False
    supports_process_multimodal = True

    def __init__(self, *calls: str) -> None:
        self.calls = [SimpleNamespace(status=SimpleNamespace(name=call)) for call in calls]

    def render(self, messages: Any, **options: Any) -> Any:
        self.options = options
        return SimpleNamespace(token_ids=[1, 2, 3, 4], multi_modal_data=None)

    def get_stop_token_ids(self) -> list[int]:
        return [99]

    def parse_response(self, ids: list[int], **options: Any) -> Any:
        self.parsed = (ids, options)
        return SimpleNamespace(
            content="hi", reasoning_content="hm", tool_calls=self.calls, reasoning_complete=True
        )


def answer(**choice: Any) -> dict[str, Any]:
    known = {
        "token_ids": [5, 6],
        "finish_reason": "stop",
        "logprobs": {"content": [{"token": f"token_id:{t}", "logprob": -0.5} for t in (5, 6)]},
    }
    return {"request_id": "r", "usage": None, "choices": [known | choice]}


def call(server: Any, **arguments: Any) -> dict[str, Any]:
    known = {"client": server, "model": "m", "prompt_ids": [1, 2, 3]}
    return asyncio.run(generate(**(known | arguments)))


def test_the_result_has_exactly_the_eighteen_keys() -> None:
    result = call(Client(answer()))
    assert list(result) == KEYS
    assert result["completion_logprobs"] == [-0.5, -0.5]
    assert result["prompt_ids"] == [1, 2, 3]
    assert result["content"] is None


@pytest.mark.parametrize("name", ["payload", "sampling_mask_logprobs"])
def test_what_is_absent_or_null_is_none(name: str) -> None:
    assert call(Client(answer()))[name] is None
    assert call(Client(answer(**{name: None})))[name] is None


@pytest.mark.parametrize("name", ["payload", "sampling_mask_logprobs"])
@pytest.mark.parametrize(
    "value",
    [
        '[{"zeta":1,"field":"x","alpha":{"b":[1,{"c":null}],"a":2}}]',
        "[[123456789012345678901234567890,-18446744073709551617,9223372036854775808]]",
        '"text"', "0", "false", "[]", "{}", '[["x",-1,1.5,1e5,true]]', '[{"dtype":"no such"}]',
        '["\\ud800", NaN]',
    ],
)  # fmt: skip
def test_what_the_server_sends_passes_through_untouched(name: str, value: str) -> None:
    body = json.dumps(answer()).replace('"finish_reason"', f'"{name}":{value},"finish_reason"')
    result = call(Client(body.encode()))[name]
    assert repr(result) == repr(json.loads(value))  # order of keys and types of numbers too


def test_the_request_carries_the_sampling_parameters_as_they_are() -> None:
    server = Client(answer())
    params = {"temperature": 0.7, "logprobs": 5, "extra_args": {"payload_dir": "/p/v3", "x": [1]}}
    call(
        server, sampling_params=params, cache_salt="7", priority=0, extra_headers={"x-a": "b"},
        renderer=Renderer(),
    )  # fmt: skip
    [(url, sent)] = server.sent
    assert url == "http://127.0.0.1:1/inference/v1/generate"
    assert sent["cast_to"] is httpx2.Response
    assert sent["options"] == {"headers": {"x-a": "b"}}
    assert sent["body"] == {
        "model": "m",
        "token_ids": [1, 2, 3],
        "sampling_params": {
            "temperature": 0.7,
            "logprobs": 1,
            "extra_args": {"payload_dir": "/p/v3", "x": [1]},
            "stop_token_ids": [99],
            "skip_special_tokens": False,
        },
        "cache_salt": "7",
        "priority": 0,
    }
    assert params["logprobs"] == 5  # the caller's own are left alone


def test_without_headers_salt_or_priority_none_is_sent() -> None:
    server = Client(answer())
    call(server)
    [(_, sent)] = server.sent
    assert set(sent) == {"cast_to", "body"}
    assert set(sent["body"]) == {"model", "token_ids", "sampling_params"}
    assert "stop_token_ids" not in sent["body"]["sampling_params"]


def test_a_renderer_renders_and_parses() -> None:
    server, renderer = Client(answer(finish_reason="stop")), Renderer("OK", "INVALID_JSON")
    result = call(server, renderer=renderer, prompt_ids=None, messages=[{"role": "user"}])
    assert server.sent[0][1]["body"]["token_ids"] == [1, 2, 3, 4]
    assert renderer.options == {"tools": None, "add_generation_prompt": True}
    assert renderer.parsed == ([5, 6], {"prompt_ids": [1, 2, 3, 4], "tools": None})
    assert (result["content"], result["reasoning_content"]) == ("hi", "hm")
    assert result["finish_reason"] == "tool_calls"
    assert result["prompt_attribution"].token_ids == [1, 2, 3, 4]


@pytest.mark.parametrize(("status", "reason"), [("INVALID_JSON", "stop"), ("OK", "length")])
def test_only_a_clean_tool_call_of_a_stopped_turn_changes_the_reason(
    status: str, reason: str
) -> None:
    server = Client(answer(finish_reason=reason))
    assert call(server, renderer=Renderer(status))["finish_reason"] == reason


def test_a_prebuilt_prompt_passes_its_attribution_and_media_through() -> None:
    media = SimpleNamespace(is_empty=lambda: True)
    result = call(Client(answer()), multi_modal_data=media, prompt_attribution="attr")
    assert result["multi_modal_data"] is media
    assert result["prompt_attribution"] == "attr"


def test_arguments_that_do_not_go_together_are_refused_before_anything_is_sent() -> None:
    server = Client(answer())
    with pytest.raises(ValueError, match="Renderer does not support tools"):
        call(server, renderer=Renderer(), tools=[{}])
    with pytest.raises(
        NotImplementedError, match="needs a renderer that supports it: no renderer is given"
    ):
        call(server, process_multimodal=False)
    for arguments in ({"prompt_ids": None}, {"prompt_ids": None, "renderer": Renderer()}):
        with pytest.raises(ValueError, match="no prompt"):
            call(server, **arguments)
    assert server.sent == []


@pytest.mark.parametrize(
    ("kind", "needed"),
    [("httpx2", "httpx2.AsyncClient"), ("httpx", "httpx.AsyncClient"), ("openai", "AsyncOpenAI")],
)
def test_a_client_of_the_other_kind_is_refused_by_name(kind: str, needed: str) -> None:
    url = "http://127.0.0.1:1"
    with (
        opened_sync(kind, url) as http,
        pytest.raises(TypeError, match=f"needs {re.escape(needed)}, or a URL"),
    ):
        call(http)

    async def run() -> None:
        async with opened(kind, url) as http:
            generate_sync(client=http, model="m", prompt_ids=[1])

    with pytest.raises(TypeError, match=f"needs {re.escape(needed.replace('Async', ''))}, or a"):
        asyncio.run(run())


def test_a_stream_is_refused_before_anything_is_sent() -> None:
    server = Client(answer())
    with pytest.raises(ValueError, match="asks for a stream: by-handle answers are not streamed"):
        call(server, sampling_params={"stream": True})
    assert server.sent == []


def test_features_given_as_a_mapping_are_sent_as_they_are() -> None:
    server = Client(answer())
    features = {"mm_hashes": {"image": ["h"]}, "mm_placeholders": {}, "kwargs_data": None}
    result = call(server, multi_modal_data=features)
    assert server.sent[0][1]["body"]["features"] == features
    assert result["multi_modal_data"] is features


def test_a_prompt_may_be_an_array() -> None:
    server = Client(answer())
    assert call(server, prompt_ids=np.arange(3))["prompt_ids"] == [0, 1, 2]
    assert type(server.sent[0][1]["body"]["token_ids"][0]) is int


def test_media_left_to_the_server_go_as_content_parts_and_come_back_expanded() -> None:
    expanded = answer() | {"prompt_token_ids": [1, 7, 7, 2], "mm_placeholders": {"image": []}}
    messages = [
        {"content": "text"},
        {
            "content": [
                {"type": "text", "text": "x"},
                {"type": "image_url", "image_url": {"url": "data:a"}},
                {"image": "data:b"},
                {"type": "video", "url": "data:c"},
            ]
        },
    ]
    server, renderer = Client(expanded), Renderer()
    more = {"renderer": renderer, "messages": messages, "process_multimodal": False}
    result = call(server, prompt_ids=None, **more)
    assert renderer.options["process_multimodal"] is False
    body = server.sent[0][1]["body"]
    assert body["return_token_ids"] is True
    assert body["content_parts"] == [
        {"type": "image_url", "url": "data:a"},
        {"type": "image_url", "url": "data:b"},
        {"type": "video_url", "url": "data:c"},
    ]
    assert (result["prompt_ids"], result["renderer_prompt_ids"]) == ([1, 7, 7, 2], [1, 2, 3, 4])
    for missing in ("prompt_token_ids", "mm_placeholders"):
        less = {k: v for k, v in expanded.items() if k != missing}
        with pytest.raises(MalformedGenerateResponseError, match=rf"\$\.{missing}"):
            call(Client(less), prompt_ids=None, **more)


def test_an_overlong_prompt_is_refused_before_it_is_sent() -> None:
    models = {"data": [{"id": "other", "max_model_len": 1}, {"id": "m1", "max_model_len": 2}]}
    server = Client(answer(), models)
    server.base_url = "http://127.0.0.1:2/v1"
    with pytest.raises(OverlongPromptError) as caught:
        call(server, model="m1")
    assert (caught.value.prompt_len, caught.value.max_prompt_len) == (3, 2)
    assert server.sent == []
    server.models = None  # asked once
    with pytest.raises(OverlongPromptError):
        call(server, model="m1")
    with pytest.raises(OverlongPromptError):
        call(server, model="unknown", max_prompt_len=2)
    assert call(server, model="unknown", max_prompt_len=3)["request_id"] == "r"
    assert call(server, model="m2")["request_id"] == "r"  # the server does not say: not checked


@pytest.mark.parametrize(
    ("choice", "place"),
    [
        ({"token_ids": None}, "$.choices[0].token_ids"),
        ({"token_ids": "ab"}, "$.choices[0].token_ids"),
        ({"token_ids": [5, 1.5]}, "$.choices[0].token_ids[1]"),
        ({"token_ids": [True]}, "$.choices[0].token_ids[0]"),
        ({"logprobs": None}, "$.choices[0].logprobs"),
        ({"logprobs": []}, "$.choices[0].logprobs"),
        ({"logprobs": {}}, "$.choices[0].logprobs.content"),
        ({"logprobs": {"content": []}}, "$.choices[0].logprobs.content"),
        ({"token_ids": [5]}, "$.choices[0].logprobs.content"),
        ({"token_ids": [5, 7]}, "$.choices[0].logprobs.content[1]"),
        ({"logprobs": {"content": [1, 2]}}, "$.choices[0].logprobs.content[0]"),
        *[
            (
                {"token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": value}]}},
                "$.choices[0].logprobs.content[0]",
            )
            for value in (-9999.0, None, "x", True, float("nan"), float("inf"), 10**400)
        ],
        ({"completion_logprobs": {"data": "AAAAvw==", "shape": [1], "dtype": "float32"}},
         "$.choices[0].completion_logprobs"),
        ({"completion_logprobs": {"data": "AAAAvw=", "shape": [1], "dtype": "float32"}},
         "$.choices[0].completion_logprobs.data"),
        ({"completion_logprobs": {"data": "AAAAvwAAAL8=", "shape": [3], "dtype": "float32"}},
         "$.choices[0].completion_logprobs.shape"),
        ({"completion_logprobs": {"data": "", "shape": [0], "dtype": "float64"}},
         "$.choices[0].completion_logprobs.dtype"),
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_response_is_refused_with_the_place(choice: dict[str, Any], place: str) -> None:
    with pytest.raises(MalformedGenerateResponseError) as caught:
        call(Client(answer(**choice)))
    assert str(caught.value).endswith(f"- at {place}")


@pytest.mark.parametrize(
    ("body", "place"),
    [(b"", "$"), (b"[]", "$"), (b"<html>", "$"), (b'{"choices": {}}', "$.choices"), (b"null", "$"),
     (b"{}", "$.choices"), (b'{"choices": []}', "$.choices"),
     (b'{"choices": [1]}', "$.choices[0]"), (b"[" * 100_000, "$")],
)  # fmt: skip
def test_a_body_that_is_no_response_is_refused(body: bytes, place: str) -> None:
    with pytest.raises(MalformedGenerateResponseError) as caught:
        client.parse_generate_response(body)
    assert str(caught.value).endswith(f"- at {place}")


def test_both_spellings_of_logprobs_and_the_packed_form_are_read() -> None:
    packed = {"data": "AAAAvwAAgL4=", "shape": [2], "dtype": "float32"}
    assert call(Client(answer(logprobs=None, completion_logprobs=packed)))[
        "completion_logprobs"
    ] == [-0.5, -0.25]
    newer = {"content": [{"token_id": t, "logprob": -1, "rank": 3} for t in (5, 6)]}
    assert call(Client(answer(logprobs=newer)))["completion_logprobs"] == [-1.0, -1.0]


def test_an_aborted_generation_without_tokens_is_a_result() -> None:
    result = call(Client(answer(token_ids=[], logprobs=None, finish_reason="abort")))
    assert (result["completion_ids"], result["finish_reason"]) == ([], "abort")


@pytest.mark.parametrize("file", sorted(CAPTURED.glob("*.response.json")), ids=lambda f: f.name)
def test_captured_bodies_of_a_real_engine_are_read(file: Path) -> None:
    body = json.loads(file.read_text())
    if "error" in body:
        with pytest.raises(MalformedGenerateResponseError, match="the server said"):
            call(Client(file.read_bytes()))
        return
    choice = body["choices"][0]
    if choice.get("token_ids") and not choice.get("logprobs"):
        with pytest.raises(
            MalformedGenerateResponseError,
            match="is missing or null: needs an object - at .*logprobs",
        ):
            call(Client(file.read_bytes()))
        return
    result = call(Client(file.read_bytes()))
    assert result["completion_ids"] == choice["token_ids"]
    assert len(result["completion_logprobs"]) == len(result["completion_ids"])
    assert result["routed_experts"] == choice.get("routed_experts")
    assert result["sampling_mask"] == choice.get("sampling_mask")
    assert result["payload"] is None


@asynccontextmanager
async def opened(kind: str, url: str) -> AsyncIterator[Any]:
    """Each kind of client `generate` takes."""
    if kind == "url":
        yield url
    elif kind == "openai":
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as http:
            yield http
    else:
        async with {"httpx": httpx, "httpx2": httpx2}[kind].AsyncClient(base_url=url) as http:
            yield http


@contextmanager
def opened_sync(kind: str, url: str) -> Iterator[Any]:
    """Each kind of client `generate_sync` takes."""
    if kind == "url":
        yield url
    elif kind == "openai":
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as http:
            yield http
    else:
        with {"httpx": httpx, "httpx2": httpx2}[kind].Client(base_url=url) as http:
            yield http


def completions(request: dict[str, Any]) -> list[Completion]:
    mask = Ragged.from_lists([[5], [6, 7]])
    arrays = {"routed_experts": (0, ROWS), "sampling_mask": (5, mask)}
    return [Completion(token_ids=[5, 6], arrays=arrays)]


@pytest.mark.parametrize("kind", ["url", "httpx2", "httpx", "openai"])
def test_over_http_by_handle_with_a_plain_client_and_with_openai(
    kind: str, serve: Callable[..., str], tmp_path: Path
) -> None:
    url = serve(app(completions, Writer(tmp_path)))

    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        async with opened(kind, url) as http:
            by_handle = {"extra_args": {"payload_dir": f"{tmp_path}/v3"}}
            return (
                await generate(client=http, model="m", prompt_ids=[1] * 5),
                await generate(
                    client=http, model="m", prompt_ids=[1] * 5, sampling_params=by_handle
                ),
            )

    inline, handle = asyncio.run(run())
    assert inline["payload"] is None
    assert isinstance(inline["routed_experts"], str)
    assert inline["sampling_mask"] == [[5], [6, 7]]
    assert handle["routed_experts"] is None
    assert len(msgspec.json.encode(handle["payload"])) < 1024
    with Resolver(tmp_path) as resolver:
        resolved = resolver.resolve(handle["payload"])
    np.testing.assert_array_equal(resolved["routed_experts"][0], ROWS, strict=True)
    assert [row.tolist() for row in resolved["sampling_mask"][0]] == [[5], [6, 7]]


@pytest.mark.parametrize("kind", ["url", "httpx2", "httpx", "openai"])
def test_a_refusal_of_the_server_passes_unchanged(
    kind: str, serve: Callable[..., str], tmp_path: Path
) -> None:
    url = serve(app(completions, Writer(tmp_path)))

    async def run() -> None:
        async with opened(kind, url) as http:
            outside = {"extra_args": {"payload_dir": "/etc"}}
            await generate(client=http, model="m", prompt_ids=[1], sampling_params=outside)

    errors = {"openai": openai.BadRequestError, "httpx": httpx.HTTPStatusError}
    error = errors.get(kind, httpx2.HTTPStatusError)
    with pytest.raises(error) as caught:
        asyncio.run(run())
    assert "payload_dir '/etc' is outside the writer's root" in caught.value.response.text
    if kind != "openai":
        assert "outside the writer's root" in caught.value.__notes__[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["url", "httpx2", "httpx", "openai"])
def test_the_synchronous_twin_gives_the_same_result(
    kind: str, serve: Callable[..., str], tmp_path: Path
) -> None:
    url = serve(app(completions, Writer(tmp_path), max_model_len=7))
    known: dict[str, Any] = {"model": "test-double", "renderer": Renderer("OK")}

    async def run() -> dict[str, Any]:
        async with opened(kind, url) as http:
            return await generate(client=http, prompt_ids=[1] * 5, **known)

    with opened_sync(kind, url) as http:
        result = generate_sync(client=http, prompt_ids=[1] * 5, **known)
        assert result == asyncio.run(run())
        assert result["finish_reason"] == "tool_calls"
        with pytest.raises(OverlongPromptError, match="prompt has 8 tokens"):
            generate_sync(client=http, prompt_ids=[1] * 8, **known)
        by_handle = {"extra_args": {"payload_dir": f"{tmp_path}/v3"}}
        handle = generate_sync(client=http, prompt_ids=[1] * 5, sampling_params=by_handle, **known)
    with Resolver(tmp_path) as resolver:
        [view] = resolver.resolve(handle["payload"])["routed_experts"]
    np.testing.assert_array_equal(view, ROWS, strict=True)


def test_the_synchronous_twin_works_where_an_event_loop_runs(serve: Callable[..., str]) -> None:
    url = serve(app(completions))

    async def notebook() -> dict[str, Any]:
        return generate_sync(client=url, model="m", prompt_ids=[1])

    assert asyncio.run(notebook())["completion_ids"] == [5, 6]


@pytest.fixture
def silent() -> Iterator[tuple[str, threading.Event]]:
    """A server that takes requests and never answers; the event is set when its peer hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))
    gone = threading.Event()

    def run() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                request = b""
                while data := connection.recv(65536):
                    request += data
                    if request.startswith(b"GET"):  # /models: not known here
                        connection.sendall(b"HTTP/1.1 404 none\r\ncontent-length: 0\r\n\r\n")
                        request = b""
            if request.startswith(b"POST"):
                gone.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", gone
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


@pytest.mark.parametrize("kind", ["url", "httpx2", "httpx", "openai"])
def test_a_cancelled_call_closes_its_request(
    kind: str, silent: tuple[str, threading.Event]
) -> None:
    url, gone = silent

    async def run() -> None:
        async with opened(kind, url) as http:
            task = asyncio.create_task(generate(client=http, model="m", prompt_ids=[1]))
            await asyncio.sleep(0.3)
            assert not task.done()
            assert not gone.is_set()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # while the client lives on: it is this request that is closed, not the client
            assert await asyncio.to_thread(gone.wait, 5)

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["httpx2", "httpx", "openai"])
def test_the_timeout_is_the_clients(kind: str, silent: tuple[str, threading.Event]) -> None:
    url, gone = silent
    errors = {
        "openai": openai.APITimeoutError,
        "httpx": httpx.ReadTimeout,
        "httpx2": httpx2.ReadTimeout,
    }

    async def run() -> None:
        async with opened(kind, url) as http:
            http.timeout = 0.3
            with pytest.raises(errors[kind]):
                await generate(client=http, model="m", prompt_ids=[1])

    asyncio.run(run())
    assert gone.wait(5)
    with opened_sync(kind, url) as http:
        http.timeout = 0.3
        with pytest.raises(errors[kind]):
            generate_sync(client=http, model="m", prompt_ids=[1])


def test_a_server_that_is_not_there_is_the_clients_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(httpx2.ConnectError):
        generate_sync(client=url, model="m", prompt_ids=[1])


class Busy(Client):
    """Takes 2 ms of the event loop to send, and answers all at once when `together` have asked."""

    together = 60

    def __init__(self, size: int) -> None:
        super().__init__(answer(sampling_mask=[[1] * size]))
        self.all_asked = asyncio.Event()

    async def post(self, url: str, **more: Any) -> Any:
        burn(0.002)
        self.sent.append((url, more))
        if len(self.sent) == self.together:
            self.all_asked.set()
        await self.all_asked.wait()
        return SimpleNamespace(content=self.answer)


def burn(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@pytest.mark.parametrize("phase", ["sending", "decoding"])
def test_many_calls_at_once_leave_the_event_loop_to_others(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_http, "_SEND", 0.002)
    monkeypatch.setattr(_turns, "SHARE", 0.008)
    decode = client.generate.__globals__["sampled"]

    def slow(raw: bytes) -> Any:
        burn(0.002)
        return decode(raw)

    monkeypatch.setitem(client.generate.__globals__, "sampled", slow)
    most = {"sending": 0, "decoding": 0}
    done = 0

    async def run() -> None:
        nonlocal done
        server = Busy(10)

        async def one() -> None:
            nonlocal done
            await generate(client=server, model="m", prompt_ids=[1])
            done += 1

        calls = [asyncio.create_task(one()) for _ in range(Busy.together)]
        sent = decoded = 0
        while done < Busy.together:  # how many calls went on since this one was last seen to
            await asyncio.sleep(0)
            most["sending"] = max(most["sending"], len(server.sent) - sent)
            most["decoding"] = max(most["decoding"], done - decoded)
            sent, decoded = len(server.sent), done
        await asyncio.gather(*calls)

    asyncio.run(run())
    # 8 ms is the share of a round, so four or five calls of 2 ms go on in one, not all sixty.
    assert 1 <= most[phase] <= 6


def test_a_busy_neighbour_makes_no_call_wait_for_more_than_a_round_to_send() -> None:
    rounds = 0

    async def run() -> None:
        nonlocal rounds
        server = Busy(10)
        calls = [
            asyncio.create_task(generate(client=server, model="m", prompt_ids=[1]))
            for _ in range(Busy.together)
        ]
        while not all(call.done() for call in calls):
            burn(0.005)
            rounds += 1
            await asyncio.sleep(0)

    asyncio.run(run())
    assert rounds < 1.5 * Busy.together  # one to send, few more to decode them all


def test_calls_take_turns_in_the_order_in_which_they_came() -> None:
    order: list[int] = []

    async def one(number: int) -> None:
        await _turns.turn()
        order.append(number)
        _turns.worked(0.0009)  # three make a share

    async def run() -> list[int]:
        rounds = []
        calls = [asyncio.create_task(one(number)) for number in range(40)]
        calls[5].cancel()
        while not all(call.done() for call in calls):
            await asyncio.sleep(0)
            rounds.append(len(order))
            if len(order) >= 9 and not calls[20].done():
                calls[20].cancel()  # while it waits
        return rounds

    rounds = asyncio.run(run())
    assert order == [number for number in range(40) if number not in (5, 20)]
    assert max(b - a for a, b in itertools.pairwise([0, *rounds])) == 3
    assert len(rounds) <= 2 + 2 * len(order) // 3  # one round to be called, one to work


def test_no_call_that_waits_is_overtaken_by_calls_that_keep_coming() -> None:
    order: list[int] = []

    async def one(number: int) -> None:
        await _turns.turn()
        order.append(number)
        _turns.worked(_turns.SHARE)

    async def run() -> None:
        calls = [asyncio.create_task(one(number)) for number in range(3)]
        for number in range(3, 40):
            await asyncio.sleep(0)
            calls.append(asyncio.create_task(one(number)))
        await asyncio.wait_for(asyncio.gather(*calls), 10)

    asyncio.run(run())
    assert order == list(range(40))


def test_when_all_calls_that_were_called_are_cancelled_the_next_one_gets_its_turn() -> None:
    async def one() -> None:
        await _turns.turn()
        _turns.worked(_turns.SHARE)

    async def run() -> None:
        for rounds in range(6):
            calls = [asyncio.create_task(one()) for _ in range(5)]
            for _ in range(rounds):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.wait_for(one(), 10)
        for _ in range(3):
            await asyncio.sleep(0)
        turns = _turns._turns[asyncio.get_running_loop()]
        assert not turns.waiting
        assert not turns.turning  # an idle loop sleeps

    asyncio.run(run())


def test_a_loop_closed_while_calls_wait_is_forgotten_when_the_next_one_begins() -> None:
    async def one() -> None:
        await _turns.turn()
        _turns.worked(1.0)

    loop = asyncio.new_event_loop()
    calls = [loop.create_task(one()) for _ in range(20)]
    loop.run_until_complete(asyncio.sleep(0))
    assert _turns._turns[loop].waiting
    assert not calls[-1].done()
    loop.close()
    asyncio.run(one())
    assert loop not in _turns._turns


def test_event_loops_that_are_over_are_forgotten() -> None:
    loops = []

    async def run() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        server = Client(answer())
        calls = [generate(client=server, model=f"m{i}", prompt_ids=[1]) for i in range(3)]
        await asyncio.gather(*calls)

    for _ in range(5):
        asyncio.run(run())
    gc.collect()
    assert [loop() for loop in loops] == [None] * 5
    assert not _http._asking


class Lookup(Client):
    """Counts how often its models are asked for, and answers when told to."""

    def __init__(self, base_url: str, models: Any = None) -> None:
        super().__init__(answer(), models)
        self.base_url = base_url
        self.asked = 0
        self.told = asyncio.Event()

    async def get(self, url: str, **more: Any) -> Any:
        self.asked += 1
        await self.told.wait()
        return await super().get(url, **more)


def test_the_context_length_is_asked_for_once_by_calls_that_begin_together() -> None:
    async def run(models: Any) -> Lookup:
        server = Lookup(f"http://127.0.0.1:1/{models is None}/v1", models)
        calls = [
            asyncio.create_task(generate(client=server, model="m", prompt_ids=[1, 2]))
            for _ in range(8)
        ]
        await asyncio.sleep(0.01)
        calls[0].cancel()  # the one who asks: another takes over
        await asyncio.sleep(0.01)
        server.told.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        expected = OverlongPromptError if models else dict
        assert all(isinstance(result, expected) for result in results[1:])
        await asyncio.gather(generate(client=server, model="m", prompt_ids=[1]))  # not asked again
        return server

    for models in ({"data": [{"id": "m", "max_model_len": 1}]}, None):
        assert asyncio.run(run(models)).asked == 2


def test_a_server_that_does_not_tell_its_context_length_holds_up_no_other() -> None:
    async def run() -> dict[str, Any]:
        silent = Lookup("http://127.0.0.1:2/v1")
        task = asyncio.create_task(generate(client=silent, model="m", prompt_ids=[1]))
        await asyncio.sleep(0.01)
        other = Client(answer())
        result = await generate(client=other, model="other", prompt_ids=[1])
        task.cancel()
        return result

    assert asyncio.run(run())["request_id"] == "r"


@pytest.mark.parametrize("length", [0, -1, None, "9", 2.5])
def test_a_context_length_that_is_none_is_not_believed(length: Any) -> None:
    server = Client(answer(), {"data": [5, {"id": "m", "max_model_len": length}]})
    server.base_url = f"http://127.0.0.1:3/{length}/v1"
    assert call(server)["request_id"] == "r"


def test_without_a_model_the_server_chooses() -> None:
    server = Client(answer(), {"data": [{"id": "only", "max_model_len": 3}]})
    server.base_url = "http://127.0.0.1:4/v1"
    assert call(server, model=None)["request_id"] == "r"
    assert "model" not in server.sent[0][1]["body"]
    with pytest.raises(OverlongPromptError):
        call(server, model=None, prompt_ids=[1] * 4)


def test_a_url_waits_for_the_answer_as_long_as_it_takes() -> None:
    async def run() -> httpx2.Timeout:
        async with _http.opened("http://127.0.0.1:1") as http:
            assert isinstance(http.timeout, httpx2.Timeout)
            return http.timeout

    with _http.opened_sync("https://127.0.0.1:1") as http:
        assert http.timeout == asyncio.run(run()) == httpx2.Timeout(None, connect=10)


@pytest.mark.parametrize("wrong", ["127.0.0.1:80", "ftp://x", ""])
def test_a_url_of_no_web_server_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="needs a URL that begins with http://"):
        call(wrong)
    with pytest.raises(ValueError, match="needs a URL that begins with http://"):
        generate_sync(client=wrong, prompt_ids=[1])


def test_what_is_no_client_is_refused() -> None:
    with pytest.raises(TypeError, match=r"client is NoneType: needs AsyncOpenAI, httpx2\.Async"):
        call(None)
    with pytest.raises(TypeError, match="client is asynchronous: needs a synchronous one"):
        generate_sync(client=Client(answer()), prompt_ids=[1], max_prompt_len=9)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1}, b"x"])
def test_parameters_that_json_has_not_are_refused_not_sent_as_null(value: Any) -> None:
    async def run() -> None:
        async with httpx2.AsyncClient(base_url="http://127.0.0.1:1") as http:
            params = {"temperature": value}
            await generate(client=http, prompt_ids=[1], max_prompt_len=9, sampling_params=params)

    with pytest.raises((TypeError, ValueError), match="sampling_params cannot be sent as JSON"):
        asyncio.run(run())


def test_special_tokens_are_kept_unless_the_caller_says_otherwise() -> None:
    server = Client(answer())
    call(server, sampling_params={"skip_special_tokens": True})
    call(server)
    sent = [sent["body"]["sampling_params"] for _, sent in server.sent]
    assert [params["skip_special_tokens"] for params in sent] == [True, False]


def test_an_error_shows_of_what_it_found_only_so_much() -> None:
    with pytest.raises(MalformedGenerateResponseError) as caught:
        call(Client(answer(token_ids=["x" * 1_000_000])))
    assert len(str(caught.value)) < 500


def test_a_result_that_came_inline_can_be_spilled(tmp_path: Path) -> None:
    rows = encode_inline(ROWS, 0, "packed")
    result = call(Client(answer(routed_experts=rows)), prompt_ids=[1] * 5)
    spilled = spill(result, Writer(tmp_path), prompt_len=len(result["prompt_ids"]))
    assert payload_status(spilled, None).state == "by_handle"
    with Resolver(tmp_path) as resolver:
        [view] = resolver.resolve(spilled["payload"])["routed_experts"]
    np.testing.assert_array_equal(view, ROWS, strict=True)
