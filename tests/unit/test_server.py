from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from payload import Writer, decode_routed_experts
from payload.testing.server import Completion, app, encode_inline

ROWS = np.arange(12, dtype=np.uint16).reshape(2, 2, 3)
PATH = "/inference/v1/generate"


def completions(request: dict[str, Any]) -> list[Completion]:
    count = request.get("n", 1)
    arrays = {"routed_experts": (3, ROWS)}
    return [Completion(token_ids=[7], arrays=arrays, logprobs=[-0.25])] * count


def ask(url: str, payload_dir: str | None = None, **more: Any) -> httpx2.Response:
    params = {"extra_args": {"payload_dir": payload_dir}} if payload_dir else {}
    body = {"token_ids": [1, 2], "sampling_params": params} | more
    return httpx2.post(url + PATH, json=body)


def test_it_answers_inline_unless_asked_by_handle(
    serve: Callable[..., str], tmp_path: Path
) -> None:
    url = serve(app(completions, Writer(tmp_path), inline="packed"))
    inline = ask(url).json()
    assert inline["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    [choice] = inline["choices"]
    assert choice["routed_experts"] == encode_inline(ROWS, 3, "packed")
    assert "payload" not in choice
    by_handle = ask(url, f"{tmp_path}/v3", n=2).json()
    assert [choice["index"] for choice in by_handle["choices"]] == [0, 1]
    files = {choice["payload"][0]["file"] for choice in by_handle["choices"]}
    assert len(files) == len(list((tmp_path / "v3").iterdir())) == 2
    for choice in by_handle["choices"]:
        assert choice["routed_experts"] is choice["sampling_mask"] is None
        [segment] = choice["payload"]
        assert (segment["pos"], segment["rows"], segment["dtype"]) == (3, 2, "uint16")


def test_without_a_writer_it_does_not_know_the_argument(
    serve: Callable[..., str], tmp_path: Path
) -> None:
    choice = ask(serve(app(completions)), str(tmp_path)).json()["choices"][0]
    assert isinstance(choice["routed_experts"], str)


def test_it_refuses_what_a_server_refuses(serve: Callable[..., str], tmp_path: Path) -> None:
    url = serve(app(completions, Writer(tmp_path, max_bytes=10)))
    assert ask(url, "/etc").status_code == 400
    assert ask(url, f"{tmp_path}/v3").status_code == 500
    assert ask(url, stream=True).status_code == 400
    assert httpx2.post(url + PATH, content=b"{").status_code == 400
    assert httpx2.post(url + PATH, json={}).status_code == 400
    assert httpx2.get(url + "/nowhere").status_code == 404
    assert httpx2.get(url + "/health").status_code == 200
    models = httpx2.get(url + "/v1/models").json()
    assert models["data"][0]["max_model_len"] == 1_000_000


@pytest.mark.parametrize("form", ["npy", "packed"])
def test_inline_forms_are_what_servers_send(form: str) -> None:
    from bench.captured import captured

    if form == "npy":
        _, completion = captured("short")
        rows = completion.arrays["routed_experts"][1]
        np.testing.assert_array_equal(
            decode_routed_experts(encode_inline(rows, 0)), rows, strict=True
        )
    else:
        assert encode_inline(ROWS, 3, "packed")["shape"] == [2, 2, 3]
