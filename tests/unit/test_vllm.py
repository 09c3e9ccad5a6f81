"""The plug-in in engines of two known shapes, made here; `tests/engine` runs the real ones."""

import asyncio
import dataclasses
import importlib.metadata
import logging
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel
from safetensors import safe_open

from payload import Resolver, Writer, decode_sampling_mask, vllm

PROMPT = list(range(5, 13))
TOKENS = [80, 43, 366, 503]
ROWS = np.arange(11 * 3 * 4, dtype=np.uint8).reshape(11, 3, 4)  # 8 + 4 - 1
MASK = [[80, 7], [43], [1, 366, 2], [503]]


class Choice30(BaseModel):
    index: int
    finish_reason: str | None = "stop"
    token_ids: list[int] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None


class Response30(BaseModel):
    request_id: str
    choices: list[Choice30]
    usage: dict[str, int] | None = None


class Choice32(Choice30):
    weight_versions: list[Any] | None = None


class Response32(BaseModel):
    request_id: str
    output_mode: str = "tokens"
    choices: list[Choice32]


def output(**changes: Any) -> SimpleNamespace:
    """A completion as the engine hands it to its serving object."""
    mask = SimpleNamespace(token_ids=[list(row) for row in MASK])
    known = {
        "index": 0, "token_ids": TOKENS, "finish_reason": "length",
        "routed_experts": ROWS.copy(), "sampling_mask": mask,
    }  # fmt: skip
    return SimpleNamespace(**known | changes)


def request(payload_dir: Any = None, **changes: Any) -> SimpleNamespace:
    extra = None if payload_dir is None else {"payload_dir": payload_dir}
    params = {"extra_args": extra, "routed_experts_prompt_start": 0}
    stream = changes.pop("stream", False)
    return SimpleNamespace(sampling_params=SimpleNamespace(**params | changes), stream=stream)


class Serving30:
    """Serves what it is given; encodes what it finds on the outputs, as 0.30 does."""

    response, choice = Response30, Choice30

    def __init__(self, *outputs: Any) -> None:
        self.outputs = outputs
        self.generated = 0

    def create_error_response(self, message: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": "BadRequestError", "code": 400}}

    async def generate(self) -> AsyncIterator[Any]:
        self.generated += 1
        result = SimpleNamespace(request_id="r-1", prompt_token_ids=PROMPT, outputs=self.outputs)
        yield result

    async def serve_tokens(self, request: Any, raw_request: Any = None) -> Any:
        if request.stream:
            return [result async for result in self.generate()][-1].outputs
        return await self.serve_tokens_full_generator(request, self.generate(), "r-1", "tiny", None)

    async def serve_tokens_full_generator(
        self, request: Any, result_generator: Any, request_id: str, model_name: str, metadata: Any
    ) -> Any:
        try:
            async for result in result_generator:
                final = result
        except asyncio.CancelledError:
            return self.create_error_response("Client disconnected")
        choices = []
        for one in final.outputs:
            if one.finish_reason == "error":
                raise RuntimeError("Internal server error")
            experts = getattr(one, "routed_experts", None)
            mask = getattr(one, "sampling_mask", None)
            choices.append(
                self.choice(
                    index=one.index,
                    finish_reason=one.finish_reason,
                    token_ids=one.token_ids,
                    routed_experts=None if experts is None else experts.tobytes().hex(),
                    sampling_mask=None if mask is None else mask.token_ids,
                )
            )
        return self.response(request_id=request_id, choices=choices)


class Serving32(Serving30):
    """0.32 names its classes otherwise; 0.33 adds an argument."""

    response, choice = Response32, Choice32

    async def serve_tokens_full_generator(  # type: ignore[override]
        self, request: Any, result_generator: Any, request_id: str, model_name: str,
        metadata: Any, derender_request: Any = None,
    ) -> Any:  # fmt: skip
        return await super().serve_tokens_full_generator(
            request, result_generator, request_id, model_name, metadata
        )


@pytest.fixture(autouse=True)
def counts() -> None:
    vllm._counts.clear()
    vllm._inline.clear()
    vllm._said.clear()


@pytest.fixture(params=[Serving30, Serving32])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def soon_no_files(root: Path) -> bool:
    """Files are removed on a thread."""
    for _ in range(200):
        if not files(root):
            return True
        time.sleep(0.01)
    return False


def ask(serving: Any, asked: Any) -> Any:
    return asyncio.run(serving.serve_tokens(asked, None))


def test_a_request_by_handle_gets_segments_of_the_very_rows(engine: Any, tmp_path: Path) -> None:
    inline = ask(engine(output()), request()).model_dump()
    serving = vllm.attach(engine(output()), Writer(tmp_path))
    body = ask(serving, request(str(tmp_path / "v3"))).model_dump()
    [choice] = body["choices"]
    assert (choice.pop("routed_experts"), choice.pop("sampling_mask")) == (None, None)
    with Resolver(tmp_path) as resolver:
        payload = choice.pop("payload")
        found = resolver.resolve(payload)
    np.testing.assert_array_equal(found["routed_experts"][0], ROWS)
    assert found["routed_experts"][0].dtype == np.uint8
    assert [row.tolist() for row in found["sampling_mask"][0]] == MASK
    assert [(s["field"], s["pos"], s["rows"]) for s in payload] == [
        ("routed_experts", 0, 11),
        ("sampling_mask", 8, 4),
    ]
    assert Path(payload[0]["file"]).parent == tmp_path / "v3"
    # Nothing else of the answer changes.
    for key in ("routed_experts", "sampling_mask"):
        del inline["choices"][0][key]
    assert body == inline
    assert vllm.stats() | {"pid": 0} == {
        "pid": 0, "files": 1, "empty": 0, "refused": 0, "inline": {},
        "bytes": ROWS.nbytes + 4 * 5 + 4 * 7,
    }  # fmt: skip


def test_a_request_that_does_not_ask_gets_what_it_got_before(engine: Any, tmp_path: Path) -> None:
    before = ask(engine(output()), request())
    after = ask(vllm.attach(engine(output()), Writer(tmp_path)), request())
    assert after == before
    assert type(after) is type(before)
    assert list(tmp_path.iterdir()) == []


def test_the_answer_is_of_a_subclass_of_the_engines_own(engine: Any, tmp_path: Path) -> None:
    serving = vllm.attach(engine(output()), Writer(tmp_path))
    assert isinstance(serving, engine)
    response = ask(serving, request("v3"))
    assert isinstance(response, engine.response)
    assert isinstance(response.choices[0], engine.choice)
    assert type(ask(serving, request("v3"))) is type(response)


@pytest.mark.parametrize("start", [0, 3, 8])
def test_rows_are_anchored_at_the_end(start: int, tmp_path: Path) -> None:
    serving = vllm.attach(Serving30(output(routed_experts=ROWS[start:])), Writer(tmp_path))
    asked = request("v3", routed_experts_prompt_start=start)
    [segment, _] = ask(serving, asked).choices[0].payload
    assert (segment["pos"], segment["rows"]) == (start, 11 - start)
    with Resolver(tmp_path) as resolver:
        np.testing.assert_array_equal(resolver.view(vllm.Segment(**segment)), ROWS[start:])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"routed_experts": ROWS[:-1]}, "position"),  # begins one late
        (
            {"routed_experts": np.concatenate([ROWS, ROWS])},
            "position",
        ),  # more than there are tokens
        ({"routed_experts": ROWS.reshape(11, 12)}, "form"),
        ({"routed_experts": ROWS.tolist()}, "form"),
        ({"routed_experts": ROWS.astype(object)}, "TypeError"),
        ({"sampling_mask": SimpleNamespace(token_ids=MASK[:-1])}, "counts"),
        ({"sampling_mask": SimpleNamespace(token_ids=[[1 << 40]] * 4)}, "ids"),
        ({"sampling_mask": SimpleNamespace(rows=MASK)}, "AttributeError"),
        ({"sampling_mask_logprobs": [[0.0]] * 4}, "counts"),
    ],
)
def test_what_does_not_fit_stays_inline_and_is_counted(
    changes: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = output(**changes)
    held = dict(vars(one))
    taken: list[Any] = []
    result = SimpleNamespace(request_id="r-1\nforged", prompt_token_ids=PROMPT, outputs=[one])
    with caplog.at_level(logging.WARNING):
        asyncio.run(vllm._take(result, request("v3"), Writer(tmp_path), "v3", taken))
    assert taken == []
    assert all(getattr(one, name) is value for name, value in held.items())
    assert vllm.stats()["inline"] == {reason: 1}
    assert "choice 0 of 'r-1\\nforged' stays inline: " in caplog.text
    assert files(tmp_path) == []


def test_outputs_of_an_engine_nobody_knows_stay_inline(tmp_path: Path) -> None:
    one = SimpleNamespace(index=0, token_ids=TOKENS, finish_reason="stop", routing=ROWS)
    response = ask(vllm.attach(Serving30(one), Writer(tmp_path)), request("v3"))
    assert type(response) is Response30
    assert vllm.stats()["inline"] == {"form": 1}


def test_each_choice_has_a_file_of_its_own_and_falls_back_alone(tmp_path: Path) -> None:
    outputs = output(), output(index=1, routed_experts=ROWS[:-1]), output(index=2)
    response = ask(vllm.attach(Serving30(*outputs), Writer(tmp_path)), request("v3"))
    first, second, third = response.model_dump()["choices"]
    assert second["payload"] is None
    assert bytes.fromhex(second["routed_experts"]) == ROWS[:-1].tobytes()
    assert second["sampling_mask"] == MASK
    assert first["payload"][0]["file"] != third["payload"][0]["file"]
    assert (first["routed_experts"], third["routed_experts"]) == (None, None)
    assert vllm.stats()["files"] == 2


def test_a_directory_outside_the_root_is_refused_before_generation(
    engine: Any, tmp_path: Path
) -> None:
    for bad in (
        "/etc",
        "..",
        "a/../../b",
        str(tmp_path),
        str(tmp_path / "root"),
        f"{tmp_path}/root/",
        "",
        "d/" * 1900 + "x",
        ["x" * 1000] * 3000,
        "x" * 5_000_000,
        f"{tmp_path}x/v3",
        "a//b",
        "\0",
        7,
        ["v3"],
    ):
        serving = vllm.attach(engine(output()), Writer(tmp_path / "root"))
        answer = ask(serving, request(bad))
        assert answer["error"]["code"] == 400
        assert "payload_dir" in answer["error"]["message"]
        assert len(answer["error"]["message"]) < 1000
        assert serving.generated == 0
    assert vllm.stats()["refused"] == 15
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_does_not_fail_the_generation(
    engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "v3").symlink_to("/")
    (tmp_path / "v4").write_text("a file stands here")
    full = Writer(tmp_path, min_free=1 << 60)
    for writer, directory in ((full, "v2"), (Writer(tmp_path), "v3"), (Writer(tmp_path), "v4")):
        response = ask(vllm.attach(engine(output()), writer), request(directory))
        assert type(response) is engine.response
        assert bytes.fromhex(response.choices[0].routed_experts) == ROWS.tobytes()
        assert response.choices[0].sampling_mask == MASK
    assert sum(vllm.stats()["inline"].values()) == 3
    assert vllm.stats()["files"] == 0
    reasons = vllm.stats()["inline"]
    assert caplog.text.count("stays inline") == len(reasons)
    for _ in range(50):
        ask(vllm.attach(engine(output()), full), request("v2"))
    assert caplog.text.count("stays inline") == len(reasons)  # not a line a choice


def test_nothing_to_write_is_an_empty_payload_and_no_file(engine: Any, tmp_path: Path) -> None:
    """The flags are off, or the request was aborted before it ran."""
    one = output(routed_experts=None, sampling_mask=None, token_ids=[], finish_reason="abort")
    response = ask(vllm.attach(engine(one), Writer(tmp_path)), request("v3"))
    assert response.model_dump()["choices"][0]["payload"] == []
    assert list(tmp_path.iterdir()) == []
    assert vllm.stats()["empty"] == 1


def test_an_aborted_request_keeps_the_rows_it_has(tmp_path: Path) -> None:
    one = output(
        routed_experts=ROWS[:9], sampling_mask=SimpleNamespace(token_ids=MASK[:2]),
        token_ids=TOKENS[:2], finish_reason="abort",
    )  # fmt: skip
    response = ask(vllm.attach(Serving30(one), Writer(tmp_path)), request("v3"))
    assert [(s["pos"], s["rows"]) for s in response.choices[0].payload] == [(0, 9), (8, 2)]


def test_zero_rows_are_a_segment_of_zero_rows(tmp_path: Path) -> None:
    one = output(routed_experts=ROWS[:0], token_ids=[80], sampling_mask=None)
    asked = request("v3", routed_experts_prompt_start=8)
    [segment] = ask(vllm.attach(Serving30(one), Writer(tmp_path)), asked).choices[0].payload
    assert (segment["pos"], segment["rows"], segment["shape"]) == (8, 0, [3, 4])


def test_logprobs_of_the_mask_travel_beside_it_where_the_engine_has_them(tmp_path: Path) -> None:
    logprobs = [[-0.5, -1.0], [0.0], [-1.0, -2.0, float("-inf")], [0.0]]
    one = output(sampling_mask_logprobs=logprobs)
    response = ask(vllm.attach(Serving30(one), Writer(tmp_path)), request("v3"))
    with Resolver(tmp_path) as resolver:
        found = resolver.resolve(response.choices[0].payload)
    mask = decode_sampling_mask(MASK)
    positions = {s["field"]: s["pos"] for s in response.choices[0].payload}
    assert positions == {
        "routed_experts": 0, "sampling_mask": 8, "sampling_mask_logprobs": 8,
    }  # fmt: skip
    assert found["sampling_mask_logprobs"][0].offsets.tolist() == mask.offsets.tolist()
    assert [row.tolist() for row in found["sampling_mask_logprobs"][0]] == logprobs
    assert one.sampling_mask_logprobs is None


def test_an_output_that_failed_fails_as_before_and_leaves_no_file(tmp_path: Path) -> None:
    outputs = output(), output(index=1, finish_reason="error")
    with pytest.raises(RuntimeError, match="Internal server error"):
        ask(vllm.attach(Serving30(*outputs), Writer(tmp_path)), request("v3"))
    assert list(tmp_path.iterdir()) == []


def test_a_streamed_answer_stays_inline_and_is_counted(tmp_path: Path) -> None:
    serving = vllm.attach(Serving30(output()), Writer(tmp_path))
    [streamed] = ask(serving, request("v3", stream=True))
    np.testing.assert_array_equal(streamed.routed_experts, ROWS)
    assert vllm.stats()["inline"] == {"stream": 1}
    assert list(tmp_path.iterdir()) == []


def test_a_client_that_goes_away_leaves_no_file(tmp_path: Path) -> None:
    async def go_away() -> Any:
        serving = vllm.attach(Serving30(output()), Slow(tmp_path))
        task = asyncio.create_task(serving.serve_tokens(request("v3"), None))
        await asyncio.to_thread(writing.acquire)
        task.cancel()
        return await task

    writing = threading.Semaphore(0)

    class Slow(Writer):
        def write(self, *args: Any, **kwargs: Any) -> Any:
            segments = super().write(*args, **kwargs)
            writing.release()
            threading.Event().wait(0.05)
            return segments

    answer = asyncio.run(go_away())
    assert answer["error"]["message"] == "Client disconnected"
    assert soon_no_files(tmp_path)


def test_a_client_that_goes_away_leaves_no_file_of_a_choice_that_was_done(tmp_path: Path) -> None:
    second = threading.Event()

    class Slow(Writer):
        def write(self, arrays: Any, *more: Any, **kwargs: Any) -> Any:
            segments = super().write(arrays, *more, **kwargs)
            if len(arrays["routed_experts"][1]) == 10:
                second.set()
                time.sleep(0.1)
            return segments

    async def go_away() -> Any:
        one = output(index=1, routed_experts=ROWS[:10], token_ids=TOKENS[:3], sampling_mask=None)
        serving = vllm.attach(Serving30(output(), one), Slow(tmp_path))
        task = asyncio.create_task(serving.serve_tokens(request("v3"), None))
        await asyncio.to_thread(second.wait)
        await asyncio.sleep(0.05)
        task.cancel()
        return await task

    assert asyncio.run(go_away())["error"]["message"] == "Client disconnected"
    assert soon_no_files(tmp_path)
    assert vllm.stats()["files"] == 0


def test_a_file_that_takes_too_long_leaves_the_choice_inline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "_PATIENCE", 0.1)
    hung = threading.Event()

    class Hung(Writer):
        def _publish(self, path: str, *more: Any) -> None:
            if "/v3/" in path:
                hung.wait(10)
            super()._publish(path, *more)

    async def run() -> list[Any]:
        writer = Hung(tmp_path)
        asked = ["v3"] * 20 + ["v4"]
        calls = [vllm.attach(Serving30(output()), writer).serve_tokens(request(d)) for d in asked]
        try:
            return await asyncio.wait_for(asyncio.gather(*calls), 5)
        finally:
            hung.set()

    responses = asyncio.run(run())
    for response in responses[:20]:
        assert bytes.fromhex(response.choices[0].routed_experts) == ROWS.tobytes()
    assert vllm.stats()["inline"]["timeout"] >= 20
    assert soon_no_files(tmp_path / "v3")


@dataclasses.dataclass
class PlainChoice:
    index: int
    routed_experts: Any


@dataclasses.dataclass
class PlainResponse:
    choices: list[PlainChoice]


@pytest.mark.parametrize("form", ["dataclass", "dict", "dict without error"])
def test_an_answer_of_a_form_nobody_knows_is_made_once_more_inline(
    form: str, tmp_path: Path
) -> None:
    class Own(Serving30):
        async def serve_tokens_full_generator(
            self, request: Any, result_generator: Any, *_: Any
        ) -> Any:
            async for result in result_generator:
                final = result
            choices = [PlainChoice(one.index, one.routed_experts) for one in final.outputs]
            response = PlainResponse(choices)
            if form == "dataclass":
                return response
            return dataclasses.asdict(response) | ({"error": None} if "without" in form else {})

    outputs = output(), output(index=1)
    for one in outputs:
        del one.finish_reason
    response = ask(vllm.attach(Own(*outputs), Writer(tmp_path)), request("v3"))
    choices = response.choices if form == "dataclass" else response["choices"]
    for choice in choices:
        rows = choice.routed_experts if form == "dataclass" else choice["routed_experts"]
        np.testing.assert_array_equal(rows, ROWS)
    assert vllm.stats()["inline"] == {"response": 1}
    assert vllm.stats()["files"] == 0
    assert soon_no_files(tmp_path)


def test_an_engine_that_fails_after_the_files_are_written_leaves_none(tmp_path: Path) -> None:
    class Failing(Serving30):
        async def serve_tokens_full_generator(self, *args: Any, **kwargs: Any) -> Any:
            await super().serve_tokens_full_generator(*args, **kwargs)
            raise RuntimeError("after all")

    one = output()
    with pytest.raises(RuntimeError, match="after all"):
        ask(vllm.attach(Failing(one), Writer(tmp_path)), request("v3"))
    assert soon_no_files(tmp_path)
    np.testing.assert_array_equal(one.routed_experts, ROWS)


def test_arrays_are_made_and_written_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    made = vllm._arrays

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return made(*args)

    monkeypatch.setattr(vllm, "_arrays", noted)
    ask(vllm.attach(Serving30(output()), Writer(tmp_path)), request("v3"))
    assert threads
    assert threading.main_thread() not in threads


def test_the_file_says_which_request_and_weights_it_is_of(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class VersionSpan:
        version: str
        start: int
        end: int

    one = output(weight_versions=[VersionSpan("7", 0, 3), VersionSpan("8", 3, 4)])
    assert len(vllm._metadata(one, SimpleNamespace(request_id="r" * 10**6))["request_id"]) == 200
    response = ask(vllm.attach(Serving30(one), Writer(tmp_path)), request("v3"))
    with safe_open(response.choices[0].payload[0]["file"], "numpy") as file:
        metadata = file.metadata()
    assert metadata["request_id"] == "r-1"
    assert metadata["index"] == "0"
    assert metadata["weight_versions"] == (
        '[{"version":"7","start":0,"end":3},{"version":"8","start":3,"end":4}]'
    )


def test_attach_twice_is_attach_once(tmp_path: Path) -> None:
    serving = vllm.attach(Serving30(output()), Writer(tmp_path))
    once = type(serving)
    assert type(vllm.attach(serving, Writer(tmp_path))) is once


def test_a_copied_dict_does_not_carry_the_plug_in_and_attach_brings_it_back(tmp_path: Path) -> None:
    """As prime-rl's server does after the plug-in ran."""

    class Own(Serving30):
        async def serve_tokens_full_generator(self, *args: Any, **kwargs: Any) -> Any:
            response = await super().serve_tokens_full_generator(*args, **kwargs)
            return response.model_copy(update={"request_id": "own"})

    serving = vllm.attach(Serving30(output()), Writer(tmp_path))
    own = Own.__new__(Own)
    own.__dict__ = serving.__dict__.copy()
    assert ask(own, request("v3")).request_id == "own"
    assert list(tmp_path.iterdir()) == []
    response = ask(vllm.attach(own, Writer(tmp_path)), request("v3"))
    assert response.request_id == "own"
    assert response.choices[0].payload[0]["rows"] == 11


def start(state: Any, **args: Any) -> None:
    asyncio.run(vllm.Plugin().init_state(None, state, SimpleNamespace(**args)))


def test_the_server_starts_with_a_root_and_not_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = SimpleNamespace(serving_tokens=Serving30(output()))
    monkeypatch.delenv("BYHANDLE_ROOT", raising=False)
    with pytest.raises(RuntimeError, match="BYHANDLE_ROOT is not set"):
        start(state)
    assert type(state.serving_tokens) is Serving30
    monkeypatch.setenv("BYHANDLE_ROOT", str(tmp_path))
    monkeypatch.setenv("BYHANDLE_PREFIX", "/shared/payload")
    with pytest.raises(RuntimeError, match="--enable-scale-out"):
        start(state, enable_scale_out=False)
    with caplog.at_level(logging.INFO, "vllm.byhandle"):
        start(
            state,
            enable_scale_out=True,
            enable_return_routed_experts=False,
            return_sampling_mask=False,
        )
    assert "--enable-return-routed-experts" in caplog.text
    [segment, _] = ask(state.serving_tokens, request("/shared/payload/v3")).choices[0].payload
    assert segment["file"].startswith("/shared/payload/v3/")
    assert (tmp_path / "v3" / Path(segment["file"]).name).is_file()


def test_a_server_that_serves_tokens_only_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BYHANDLE_ROOT", str(tmp_path))
    for recording in (
        {"enable_return_routed_experts": False, "return_sampling_mask": True},
        {"enable_return_routed_experts": True, "return_sampling_mask": False},
        {
            "enable_return_routed_experts": False, "return_sampling_mask": False,
            "aux_output_config": '{"enable_return_routed_experts": true}',
        },
    ):  # fmt: skip
        state = SimpleNamespace(serving_tokens=Serving30(output()))
        start(state, enable_scale_out=False, tokens_only=True, **recording)
        assert state.serving_tokens.answers_by_handle
    assert "records no side arrays" not in caplog.text


@pytest.mark.parametrize("bad", ["a file", "/proc/nope", "relative"])
def test_a_root_that_cannot_be_used_stops_the_start(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.chdir(tmp_path)
    root = f"{tmp_path}/a file" if bad == "a file" else bad
    monkeypatch.setenv("BYHANDLE_ROOT", root)
    with pytest.raises(RuntimeError, match=r"BYHANDLE_ROOT .*(cannot be written to|absolute)"):
        start(SimpleNamespace(serving_tokens=Serving30(output())))
    assert not (tmp_path / "relative").exists()


def test_an_engine_of_another_shape_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Renamed(Serving30):
        serve_tokens_full_generator = None  # type: ignore[assignment]

    class Reordered(Serving30):
        async def serve_tokens_full_generator(self, results: Any, request: Any) -> Any: ...  # type: ignore[override]

    class Blocking(Serving30):
        def serve_tokens(self, request: Any, raw_request: Any = None) -> Any: ...

    class Mute(Serving30):
        create_error_response = None  # type: ignore[assignment]

    monkeypatch.setenv("BYHANDLE_ROOT", str(tmp_path))
    for serving, what in (
        (None, "NoneType"),
        (Renamed(), "no coroutine serve_tokens_full_generator"),
        (
            Reordered(),
            r"serve_tokens_full_generator\(self, results, request, \.\.\.\), needs \(self, request",
        ),
        (Blocking(), "no coroutine serve_tokens"),
        (Mute(), "no create_error_response"),
    ):
        with pytest.raises(RuntimeError, match=what):
            start(SimpleNamespace(serving_tokens=serving))


def test_the_router_shows_what_was_counted() -> None:
    routes: dict[str, Any] = {}

    class App:
        def add_api_route(self, path: str, route: Any, methods: list[str]) -> None:
            routes[path] = route
            assert methods == ["GET"]

    vllm.Plugin().attach_router(App())
    vllm._counts["files"] += 2
    assert asyncio.run(routes["/byhandle/stats"]())["files"] == 2


def test_the_entry_point_leads_to_the_plug_in() -> None:
    [point] = [
        point
        for point in importlib.metadata.entry_points(group="vllm.endpoint_plugins")
        if point.name == "byhandle"
    ]
    assert point.load() is vllm.Plugin
    plugin = vllm.Plugin()
    assert (plugin.name, plugin.required_tasks) == ("byhandle", ("generate",))


def test_importing_the_plug_in_imports_no_engine() -> None:
    program = "import sys, payload.vllm; print({'vllm', 'torch', 'pydantic', 'fastapi'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
