"""The train client of `verifiers`, with our `generate` and `OverlongPromptError` in place of theirs.

Its environment also holds openai 2, which is built on httpx: `make verifiers-test`.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import renderers.client
from renderers.base import ParsedResponse
from verifiers.v1.clients import train
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.types import SamplingConfig

import client
from client import payload_status
from payload import Ragged, Resolver, Writer, decode_routed_experts
from payload.testing.server import Completion, app

ROWS = np.arange(36, dtype=np.uint8).reshape(6, 2, 3)
MASK = Ragged.from_lists([[5], [6, 7]])


class Renderer:
    """Renders every conversation into the same five tokens."""

    supports_tools = True

    def render(self, messages: Any, **options: Any) -> Any:
        return SimpleNamespace(
            token_ids=[1] * 5, multi_modal_data=None, is_content=[True] * 5,
            message_token_spans=lambda: [(0, 5)],
        )  # fmt: skip

    def get_stop_token_ids(self) -> list[int]:
        return [2]

    def parse_response(self, ids: list[int], **options: Any) -> ParsedResponse:
        return ParsedResponse(content=" ".join(map(str, ids)))


def completions(request: dict[str, Any]) -> list[Completion]:
    arrays = {"routed_experts": (0, ROWS), "sampling_mask": (5, MASK)}
    return [Completion(token_ids=[5, 6], arrays=arrays)]


@pytest.fixture
def turn(
    serve: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """One turn of the train client; gives its response and what our `generate` returned."""
    results: list[dict[str, Any]] = []

    async def generate(**arguments: Any) -> dict[str, Any]:
        results.append(await client.generate(**arguments))
        return results[-1]

    monkeypatch.setattr(renderers.client, "generate", generate)
    monkeypatch.setattr(train, "OverlongPromptError", client.OverlongPromptError)
    monkeypatch.setattr(train.ElasticRendererPool, "_renderers", {})
    url = serve(app(completions, Writer(tmp_path), inline="packed", max_model_len=8))

    def take(model: str = "m", **sampling: Any) -> tuple[Any, dict[str, Any]]:
        pool = train.ElasticRendererPool(model, None, multiplex=256)
        pool.renderers.append(train.RendererSlot(Renderer()))

        async def run() -> Any:
            trainer = train.TrainClient(
                TrainClientConfig(base_url=f"{url}/v1", api_key_var="NO_SUCH_VARIABLE")
            )
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
            try:
                return await trainer.get_response(ChatDialect(), body, SamplingConfig(**sampling))
            finally:
                await trainer.close()

        return asyncio.run(run()), results[-1]

    return take


def test_a_turn_inline_carries_what_it_carried_with_their_client(
    turn: Callable[..., tuple[Any, dict[str, Any]]],
) -> None:
    response, result = turn(temperature=1.0)
    assert response.message.content == "5 6"
    assert response.tokens.completion_ids == [5, 6]
    assert response.tokens.completion_logprobs == [-1.0, -1.0]
    np.testing.assert_array_equal(
        decode_routed_experts(response.tokens.routed_experts), ROWS, strict=True
    )
    assert response.tokens.sampling_mask.ids.tolist() == MASK.values.tolist()
    assert payload_status(result, {"temperature": 1.0}).state == "not_asked"


def test_a_turn_by_handle_brings_segments_a_trainer_resolves(
    turn: Callable[..., tuple[Any, dict[str, Any]]], tmp_path: Path
) -> None:
    extra = {"extra_args": {"payload_dir": f"{tmp_path}/v3"}}
    response, result = turn(extra_body=extra)
    assert response.tokens.routed_experts is None
    assert payload_status(result, extra).state == "by_handle"
    with Resolver(tmp_path) as resolver:
        resolved = resolver.resolve(result["payload"])
    np.testing.assert_array_equal(resolved["routed_experts"][0], ROWS, strict=True)


def test_an_overlong_prompt_is_the_deterministic_refusal_they_expect(
    serve: Callable[..., str],
    turn: Callable[..., tuple[Any, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Renderer, "render", lambda *_, **__: SimpleNamespace(token_ids=[1] * 9))
    with pytest.raises(ProviderError, match="9 tokens") as caught:
        turn("test-double")
    assert isinstance(caught.value.__cause__, client.OverlongPromptError)


def test_openai_here_is_built_on_httpx() -> None:
    assert openai.__version__.startswith("2.")
    assert isinstance(openai.AsyncOpenAI(api_key="none")._client, httpx.AsyncClient)
