"""The published `renderers` client and ours, asked the same of the same server."""

import asyncio
import base64
import inspect
import io
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
import renderers.client as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.base import MultiModalData, ParsedResponse, ParsedToolCall, ToolCallParseStatus

import client as ours

CAPTURED = sorted((Path(__file__).parent.parent / "data" / "vllm").glob("*.response.json"))
NEW = ("sampling_mask_logprobs", "payload")


class Server:
    """Replays an answer by the number in a header of the request, and keeps what was sent."""

    def __init__(self) -> None:
        self.answers: dict[bytes, tuple[int, bytes]] = {}
        self.sent: list[tuple[Any, dict[bytes, bytes]]] = []
        self.numbers = itertools.count()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            event = await receive()
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        if scope["path"] == "/v1/models":
            cards = [{"id": "short", "max_model_len": 6}, {"id": "silent"}]
            status, content = 200, json.dumps({"data": cards}).encode()
        else:
            headers = dict(scope["headers"])
            self.sent.append((json.loads(body), headers))
            status, content = self.answers[headers[b"x-case"]]
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": content})


class Renderer:
    """What both clients need of a renderer; tokens over 90 are tool calls."""

    supports_tools = True
    supports_process_multimodal = True

    def render(self, messages: Any, **options: Any) -> Any:
        return SimpleNamespace(token_ids=[7, 8, 9], multi_modal_data=None, options=options)

    def get_stop_token_ids(self) -> list[int]:
        return [2]

    def parse_response(self, ids: list[int], *, prompt_ids: Any, tools: Any) -> ParsedResponse:
        statuses = [ToolCallParseStatus.OK, ToolCallParseStatus.INVALID_JSON]
        calls = [
            ParsedToolCall(raw=str(token), name="f", arguments={}, status=statuses[token % 2])
            for token in ids
            if token > 90
        ]
        return ParsedResponse(f"{ids} after {prompt_ids}", "because", calls, len(ids) % 2 == 0)


class Toolless(Renderer):
    supports_tools = False
    supports_process_multimodal = False


@pytest.fixture(scope="module")
def both() -> Iterator[Any]:
    """Call both with the same arguments and answer; gives (theirs, ours), results or errors."""
    import uvicorn

    server = Server()
    config = uvicorn.Config(server, port=0, log_level="warning", ws="none", lifespan="off")
    listener = config.bind_socket()
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    loop = asyncio.new_event_loop()
    http = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)

    async def outcome(generate: Any, arguments: dict[str, Any]) -> Any:
        try:
            return await generate(client=http, **arguments)
        except Exception as error:
            return error

    def call(answer: bytes, *, status: int = 200, **arguments: Any) -> tuple[Any, Any]:
        case = str(next(server.numbers))
        server.answers[case.encode()] = (status, answer)
        known: dict[str, Any] = {"renderer": Renderer(), "messages": [], "model": "silent"}
        arguments = known | arguments
        arguments["extra_headers"] = {"x-case": case} | arguments.get("extra_headers", {})
        server.sent.clear()
        outcomes = [
            loop.run_until_complete(outcome(generate, arguments))
            for generate in (theirs.generate, ours.generate)
        ]
        assert len(server.sent) in (0, 2)
        if server.sent:  # to the byte of the JSON value; of the headers, all but what a client adds
            (body, headers), (our_body, our_headers) = server.sent
            assert list(body) == list(our_body)
            assert body == our_body
            assert headers == our_headers
        return outcomes[0], outcomes[1]

    call.server = server  # type: ignore[attr-defined]
    yield call
    loop.run_until_complete(http.close())
    loop.close()
    running.should_exit = True
    thread.join(10)


def assert_alike(theirs_: Any, ours_: Any, answer: bytes) -> None:
    if isinstance(theirs_, Exception):
        assert type(ours_).__name__ == type(theirs_).__name__, (theirs_, ours_)
        if isinstance(theirs_, openai.APIStatusError):
            assert str(ours_) == str(theirs_)
        if isinstance(theirs_, theirs.OverlongPromptError):
            assert vars(ours_) == vars(theirs_)
        return
    assert not isinstance(ours_, Exception), ours_
    choice = json.loads(answer)["choices"][0]
    assert [key for key in ours_ if key not in NEW] == list(theirs_)
    for key, value in theirs_.items():
        if key == "prompt_attribution" and value is not None:
            assert ours_[key] is value or vars(ours_[key]) == vars(value)
        else:
            assert ours_[key] == value, key
            assert repr(ours_[key]) == repr(value) or key == "routed_experts"  # types as well
    for key in NEW:
        assert ours_[key] == choice.get(key)


@pytest.mark.parametrize("file", CAPTURED, ids=lambda file: file.name)
def test_captured_bodies_of_a_real_engine_give_the_same(both: Any, file: Path) -> None:
    body = file.read_bytes()
    decoded = json.loads(body)
    entries = (decoded.get("choices") or [{}])[0].get("logprobs") or {}
    newer = "token_id" in (entries.get("content") or [{}])[0]
    prompt = json.loads(Path(str(file).replace(".response.", ".request.")).read_text())["token_ids"]
    their, our = both(body, prompt_ids=prompt)
    if newer:  # entries as written from 0.31 on: they refuse what we read
        assert isinstance(their, theirs.MalformedGenerateResponseError)
        older = {"choices": decoded["choices"]} | decoded
        for entry in older["choices"][0]["logprobs"]["content"]:
            entry["token"] = f"token_id:{entry.pop('token_id')}"
        their, _ = both(json.dumps(older).encode(), prompt_ids=prompt)
        assert len(our["completion_logprobs"]) == len(our["completion_ids"]) > 0
    assert_alike(their, our, body)


def npy(rows: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


@st.composite
def routed(draw: st.DrawFn) -> Any:
    rows = np.arange(draw(st.integers(0, 40)), dtype=np.uint8).reshape(-1, 1, 1)
    data = base64.b64encode(rows.tobytes()).decode()
    packed = {"data": data, "shape": list(rows.shape), "start": 0, "dtype": "uint8"}
    keys = draw(st.permutations(list(packed)))
    return draw(
        st.sampled_from([None, npy(rows), packed, {key: packed[key] for key in keys}, data])
    )


ids = st.integers(0, 99)
finite = st.floats(-50, 0, allow_nan=False).map(lambda x: round(x, 6)) | st.integers(-50, 0)


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    tokens = draw(st.lists(ids, max_size=6))
    values: list[Any] = draw(st.lists(finite, min_size=len(tokens), max_size=len(tokens)))
    entries: list[Any] = [
        {"token": f"token_id:{token}", "logprob": value, "bytes": [1], "top_logprobs": []}
        for token, value in zip(tokens, values, strict=True)
    ]
    fault = draw(st.sampled_from(["none"] * 12 + ["value", "token", "count", "entry", "null"]))
    if entries and fault == "value":
        wrong = [-9999.0, -9999, None, "x", True, 10**400, float("nan"), float("-inf")]
        draw(st.sampled_from(entries))["logprob"] = draw(st.sampled_from(wrong))
    elif entries and fault == "token":
        draw(st.sampled_from(entries))["token"] = draw(st.sampled_from(["token_id:-1", "x", None]))
    elif fault == "count":
        entries = [*entries, {"token": "token_id:1", "logprob": -1.0}]
    elif entries and fault == "entry":
        entries[-1] = draw(st.sampled_from([None, 1, []]))
    logprobs: Any = {"content": entries}
    if fault == "null" and tokens:
        logprobs = draw(st.sampled_from([None, [], {}, {"content": None}, {"content": {}}, 1]))
    choice: dict[str, Any] = {
        "index": 0, "token_ids": tokens, "logprobs": logprobs,
        "finish_reason": draw(st.sampled_from(["stop", "length", "abort", None])),
    }  # fmt: skip
    if draw(st.booleans()):
        choice["routed_experts"] = draw(routed())
    if draw(st.booleans()):
        packed = {"data": "AQAAAA==", "shape": [1], "dtype": "int32"}
        mask = [[1, 2]] * len(tokens)
        choice["sampling_mask"] = draw(
            st.sampled_from([None, [], mask, {"ids": packed, "counts": packed}])
        )
    for key in NEW:
        if draw(st.booleans()):
            choice[key] = draw(json_values)
    order = draw(st.permutations(list(choice)))
    return {key: choice[key] for key in order}


json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(-1e9, 1e9) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    body = {
        "request_id": draw(st.sampled_from(["r", "", None])),
        "choices": draw(st.lists(choices(), min_size=1, max_size=3)),
        "usage": draw(st.sampled_from([None, {"prompt_tokens": 3}])),
    }
    if draw(st.booleans()):
        body["prompt_token_ids"] = draw(st.sampled_from([None, [7, 7, 7, 9]]))
        body["mm_placeholders"] = draw(
            st.sampled_from([None, {"image": [{"offset": 1, "length": 2}]}])
        )
    separators = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    return json.dumps(body, separators=separators).encode()


sources: Any = st.sampled_from(
    [None, "", 0, {}, "data:a", "data:b", {"url": "data:c"}, {"url": ""}]
)
parts = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from([None, "", "text", "image", "image_url", "audio", "video_url", 5]),
        **dict.fromkeys(("image", "image_url", "audio", "audio_url", "video", "url"), sources),
    },
)
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:a"}}]}
MEDIA = parts.map(lambda part: [{"role": "user", "content": [part]}])
arguments = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["silent", "short", "unknown"]),
        "prompt_ids": st.none() | st.lists(ids, max_size=9),
        "messages": st.sampled_from([[], [{"role": "user", "content": "hi"}], [IMAGE]]) | MEDIA,
        "renderer": st.sampled_from([Renderer(), Renderer(), Toolless()]),
        "tools": st.sampled_from([None, [], [{"name": "f"}]]),
        "sampling_params": st.none()
        | st.dictionaries(
            st.sampled_from(["temperature", "logprobs", "skip_special_tokens", "extra_args", "n"]),
            json_values,
        ),
        "cache_salt": st.none() | st.text(max_size=3),
        "priority": st.none() | st.integers(-3, 3),
        "extra_headers": st.sampled_from([{}, {"x-more": "1"}]),
        "max_prompt_len": st.none() | st.integers(0, 9),
        "process_multimodal": st.booleans(),
        "multi_modal_data": st.sampled_from([None, MultiModalData()]),
        "prompt_attribution": st.sampled_from([None, SimpleNamespace(token_ids=[1])]),
    },
)


@settings(max_examples=400, deadline=None)
@given(body=bodies(), more=arguments)
def test_generated_requests_and_bodies_give_the_same(
    both: Any, body: bytes, more: dict[str, Any]
) -> None:
    their, our = both(body, **more)
    if isinstance(their, (TypeError, KeyError)):
        # They put the first compact text into choice 0, which is not the one it came from.
        assert b'"routed_experts":{"data":"' in body
        assert not isinstance(our, (TypeError, KeyError)), our
    elif not isinstance(their, Exception) and misplaced(body):
        assert bytes(their["routed_experts"]["data"]).decode() != text_of(our["routed_experts"])
    else:
        assert_alike(their, our, body)
    if not isinstance(our, Exception):
        given_ = json.loads(body)["choices"][0].get("routed_experts")
        assert text_of(our["routed_experts"]) == text_of(given_)


def text_of(value: Any) -> Any:
    if isinstance(value, dict):
        data = value["data"]
        return {**value, "data": bytes(data).decode()} if isinstance(data, memoryview) else value
    return value


def misplaced(body: bytes) -> bool:
    """Whether their splice puts the text of another choice into choice 0."""
    parsed = theirs.parse_generate_response(body)
    first = parsed["choices"][0].get("routed_experts")
    return text_of(first) != json.loads(body)["choices"][0].get("routed_experts")


@pytest.mark.parametrize("status", [400, 404, 429, 500])
def test_a_refusal_of_the_engine_passes_unchanged(both: Any, status: int) -> None:
    answer = json.dumps({"error": {"message": "no", "code": status}}).encode()
    their, our = both(answer, status=status, prompt_ids=[1])
    assert isinstance(their, openai.APIStatusError)
    assert (type(our), our.status_code, our.body) == (type(their), status, their.body)


def test_an_overlong_prompt_is_refused_by_both_before_it_is_sent(both: Any) -> None:
    their, our = both(b"", model="short", prompt_ids=[1] * 7)
    assert (
        (our.prompt_len, our.max_prompt_len) == (their.prompt_len, their.max_prompt_len) == (7, 6)
    )
    assert both.server.sent == []


def test_media_both_cannot_encode_here_end_in_the_same_error(both: Any) -> None:
    media = MultiModalData(mm_hashes={"image": ["h"]}, mm_items={"image": [{}]})
    their, our = both(b"", prompt_ids=[1], multi_modal_data=media)
    assert type(our) is type(their) is NotImplementedError
    assert str(our) == str(their)


PACKED = {"data": "AAAAvwAAgL4=", "shape": [2], "dtype": "float32"}
ENTRIES = [{"token": f"token_id:{token}", "logprob": -0.5} for token in (5, 6)]
GOOD = {"token_ids": [5, 6], "finish_reason": "stop", "logprobs": {"content": ENTRIES}}
EXPERTS = {"data": "AAEC", "shape": [3, 1, 1], "start": 0, "dtype": "uint8"}


@pytest.mark.parametrize(
    ("body", "key", "value"),
    [
        pytest.param(
            {"choices": [GOOD | {"logprobs": None, "completion_logprobs": PACKED}]},
            "completion_logprobs", [-0.5, -0.25], id="a packed server",
        ),
        pytest.param(
            {"choices": [GOOD | {"logprobs": {"content": [
                {"token_id": token, "logprob": -0.5, "rank": 1} for token in (5, 6)]}}]},
            "completion_logprobs", [-0.5, -0.5], id="logprobs of vLLM from 0.31 on",
        ),
        pytest.param(
            {"choices": [GOOD | {"token_ids": [], "logprobs": None, "finish_reason": "abort"}]},
            "completion_logprobs", [], id="aborted before the first token",
        ),
        pytest.param(
            {"choices": [GOOD, GOOD | {"routed_experts": EXPERTS}]},
            "routed_experts", None, id="only the second choice has routed experts",
        ),
        pytest.param(
            {"choices": [GOOD | {"routed_experts": "AAEC"}, GOOD | {"routed_experts": EXPERTS}]},
            "routed_experts", "AAEC", id="choices of two forms",
        ),
    ],
)  # fmt: skip
def test_where_they_fail_ours_works(both: Any, body: Any, key: str, value: Any) -> None:
    their, our = both(json.dumps(body, separators=(",", ":")).encode(), prompt_ids=[1])
    assert isinstance(their, Exception)
    assert our[key] == value


def test_where_they_put_the_experts_of_another_choice_ours_does_not(both: Any) -> None:
    spaced = {key: EXPERTS[key] for key in ("shape", "start", "dtype", "data")}
    other = EXPERTS | {"data": "CQkJ"}
    body = {"choices": [GOOD | {"routed_experts": spaced}, GOOD | {"routed_experts": other}]}
    their, our = both(json.dumps(body, separators=(",", ":")).encode(), prompt_ids=[1])
    assert bytes(their["routed_experts"]["data"]) == b"CQkJ"
    assert our["routed_experts"] == spaced


def test_without_token_ids_they_invent_an_empty_completion_and_ours_refuses(both: Any) -> None:
    body = {"choices": [{"finish_reason": "stop", "logprobs": {"content": []}}]}
    their, our = both(json.dumps(body).encode(), prompt_ids=[1])
    assert their["completion_ids"] == []
    assert isinstance(our, ours.MalformedGenerateResponseError)


def test_a_stream_they_ask_for_and_cannot_read_is_refused_by_ours(both: Any) -> None:
    stream = (CAPTURED[0].parent / "stream.response.sse.txt").read_bytes()
    their, our = both(stream, prompt_ids=[1])
    assert isinstance(their, json.JSONDecodeError)
    assert isinstance(our, ours.MalformedGenerateResponseError)
    assert "is a stream of events" in str(our)


def test_two_imported_names_are_the_whole_migration() -> None:
    their = inspect.signature(theirs.generate).parameters
    our = inspect.signature(ours.generate).parameters
    assert list(our) == list(their)
    assert [p.kind for p in our.values()] == [p.kind for p in their.values()]
    optional = {name for name, p in their.items() if p.default is not p.empty}
    assert optional <= {name for name, p in our.items() if p.default is not p.empty}
    error = ours.OverlongPromptError(prompt_len=3, max_prompt_len=2)
    assert vars(error) == vars(theirs.OverlongPromptError(prompt_len=3, max_prompt_len=2))
