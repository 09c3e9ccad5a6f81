"""One generation over HTTP: tokens out, tokens and handles back."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from . import _http
from ._response import kind, malformed, sampled, token_ids
from ._turns import turn, worked
from .errors import OverlongPromptError


async def generate(
    *,
    client: Any,
    renderer: Any = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    model: str | None = None,
    prompt_ids: Sequence[int] | None = None,
    multi_modal_data: Any = None,
    prompt_attribution: Any = None,
    tools: Sequence[Any] | None = None,
    sampling_params: Mapping[str, Any] | None = None,
    cache_salt: str | None = None,
    priority: int | None = None,
    extra_headers: Mapping[str, str] | None = None,
    max_prompt_len: int | None = None,
    process_multimodal: bool = True,
) -> dict[str, Any]:
    """Sample one completion from ``/inference/v1/generate``.

    Parameters
    ----------
    client : AsyncOpenAI, httpx2.AsyncClient, or str
        An AsyncOpenAI client (of openai 2 or 3) or anything with its ``base_url``, ``get`` and
        ``post``; a plain client of httpx2 or httpx with its ``base_url`` set; or the server's URL,
        for which a connection is made that waits 10 s for the server and as long as it takes for
        the answer. Timeouts and retries are the client's. A cancelled call closes its request.
    renderer : object, optional
        Has ``render``, ``get_stop_token_ids`` and ``parse_response``, as those of the `renderers`
        package. Without one, give `prompt_ids`; the completion is then not parsed.
    messages : sequence of message, optional
        Rendered into the prompt unless `prompt_ids` is given.
    model : str, optional
        Name the server knows the model by. Default: the server's own choice.
    prompt_ids : sequence of int, optional
        A prompt that was rendered before.
    multi_modal_data, prompt_attribution : object, optional
        What rendering gave beside `prompt_ids`; handed back in the result. Media are encoded as the
        `renderers` package does, unless they are a mapping: the ``features`` to send.
    tools : sequence, optional
        Tools the renderer renders and parses.
    sampling_params : mapping, optional
        Sent as they are, except that ``logprobs`` is 1, ``stop_token_ids`` the renderer's, and
        ``skip_special_tokens`` False unless given. Of several completions (``n``) the first is
        returned. ``extra_args={"payload_dir": ...}`` asks for side arrays by handle.
    cache_salt, priority : optional
        Sent when given.
    extra_headers : mapping, optional
        HTTP headers of this request.
    max_prompt_len : int, optional
        Tokens the engine takes. Default: what ``GET /models`` says, asked once per server and
        model; if it does not say, or does not answer, nothing is checked from then on.
    process_multimodal : bool
        False leaves media to the server: they are sent as content parts and the server answers
        with the expanded prompt.

    Returns
    -------
    dict
        ``request_id``, ``usage``, ``prompt_ids``, ``renderer_prompt_ids``, ``mm_placeholders``,
        ``completion_ids``, ``completion_logprobs``, ``content``, ``reasoning_content``,
        ``tool_calls``, ``finish_reason``, ``reasoning_complete``, ``routed_experts``,
        ``sampling_mask``, ``sampling_mask_logprobs``, ``payload``, ``multi_modal_data``,
        ``prompt_attribution``. `payload` and `sampling_mask_logprobs` are exactly what the server
        sent, None when it sent none; inline `routed_experts` and `sampling_mask` are not decoded,
        see `parse_generate_response`: a memoryview among them keeps the whole body.

    Raises
    ------
    OverlongPromptError
        When the prompt is longer than the engine takes; nothing was sent.
    MalformedGenerateResponseError
        When the response is not what the endpoint promises.
    ValueError, NotImplementedError
        When the arguments do not go together, or ask for a stream: by-handle answers are not
        streamed.
    Exception
        What the client raises for a 4xx or 5xx, unchanged.
    """
    arguments = locals()
    del arguments["client"]
    steps = _steps(**arguments)
    async with _http.opened(client) as http:
        answer = None
        while True:
            await turn()
            began = time.perf_counter()
            try:
                step = steps.send(answer)
            except StopIteration as done:
                result: dict[str, Any] = done.value
                return result
            finally:
                worked(time.perf_counter() - began)
            answer = await _http.perform(http, step)


def generate_sync(
    *,
    client: Any,
    renderer: Any = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    model: str | None = None,
    prompt_ids: Sequence[int] | None = None,
    multi_modal_data: Any = None,
    prompt_attribution: Any = None,
    tools: Sequence[Any] | None = None,
    sampling_params: Mapping[str, Any] | None = None,
    cache_salt: str | None = None,
    priority: int | None = None,
    extra_headers: Mapping[str, str] | None = None,
    max_prompt_len: int | None = None,
    process_multimodal: bool = True,
) -> dict[str, Any]:
    """Sample one completion without an event loop, or in a notebook that runs one.

    Parameters and result are those of `generate`; `client` is an OpenAI client, a
    ``httpx2.Client``, or the server's URL.
    """
    arguments = locals()
    del arguments["client"]
    steps = _steps(**arguments)
    with _http.opened_sync(client) as http:
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as done:
                result: dict[str, Any] = done.value
                return result
            answer = _http.perform_sync(http, step)


def _steps(
    *,
    renderer: Any,
    messages: Sequence[Mapping[str, Any]] | None,
    model: str | None,
    prompt_ids: Sequence[int] | None,
    multi_modal_data: Any,
    prompt_attribution: Any,
    tools: Sequence[Any] | None,
    sampling_params: Mapping[str, Any] | None,
    cache_salt: str | None,
    priority: int | None,
    extra_headers: Mapping[str, str] | None,
    max_prompt_len: int | None,
    process_multimodal: bool,
) -> Generator[_http.Step, Any, dict[str, Any]]:
    """Generate without I/O: yields what to ask the server, gets its answers, returns the result."""
    if tools and renderer is not None and not getattr(renderer, "supports_tools", True):
        raise ValueError(f"{type(renderer).__name__} does not support tools")
    params = dict(sampling_params or {})
    if params.get("stream"):
        raise ValueError("sampling_params asks for a stream: by-handle answers are not streamed")
    if not process_multimodal and not getattr(renderer, "supports_process_multimodal", False):
        given = (
            "no renderer is given" if renderer is None else f"{type(renderer).__name__} does not"
        )
        raise NotImplementedError(
            f"process_multimodal=False needs a renderer that supports it: {given}"
        )
    if prompt_ids is not None:
        prompt = prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else list(prompt_ids)
    elif renderer is None or messages is None:
        raise ValueError("no prompt: give prompt_ids, or a renderer and messages")
    else:
        more = {} if process_multimodal else {"process_multimodal": False}
        rendered = renderer.render(messages, tools=tools, add_generation_prompt=True, **more)
        prompt = rendered.token_ids
        multi_modal_data, prompt_attribution = rendered.multi_modal_data, rendered

    if process_multimodal:  # otherwise only the server knows the expanded length
        if max_prompt_len is None:
            max_prompt_len = yield _http.ContextLength(model)
        if max_prompt_len is not None and len(prompt) > max_prompt_len:
            raise OverlongPromptError(prompt_len=len(prompt), max_prompt_len=max_prompt_len)

    if renderer is not None:
        params["stop_token_ids"] = renderer.get_stop_token_ids()
    params["logprobs"] = 1
    params.setdefault("skip_special_tokens", False)
    body: dict[str, Any] = {"token_ids": prompt, "sampling_params": params}
    if model is not None:
        body = {"model": model} | body
    parts = None if process_multimodal else _content_parts(messages or [])
    if parts:
        body |= {"content_parts": parts, "return_token_ids": True}
    if process_multimodal and multi_modal_data:
        if isinstance(multi_modal_data, Mapping):
            body["features"] = multi_modal_data
        elif not multi_modal_data.is_empty():
            body["features"] = _features(renderer, multi_modal_data)
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    if priority is not None:
        body["priority"] = priority

    data, choice, ids, logprobs = sampled((yield _http.Generate(body, extra_headers)))
    expanded = data.get("prompt_token_ids")
    if parts or expanded is not None:
        expanded = token_ids(expanded, "$.prompt_token_ids")
    placeholders = data.get("mm_placeholders")
    if parts and not isinstance(placeholders, dict):
        raise malformed("$.mm_placeholders", f"is {kind(placeholders)}: needs an object")
    effective = list(expanded or prompt)
    finish_reason = choice.get("finish_reason")
    parsed = None
    if renderer is not None:
        parsed = renderer.parse_response(ids, prompt_ids=list(effective), tools=tools)
        # The endpoint knows no tool calls; agent loops go on after a turn that made one.
        if finish_reason == "stop" and any(_is_ok(call) for call in parsed.tool_calls):
            finish_reason = "tool_calls"
    return {
        "request_id": data.get("request_id") or "",
        "usage": data.get("usage"),
        "prompt_ids": effective,
        "renderer_prompt_ids": list(prompt) if parts else None,
        "mm_placeholders": placeholders,
        "completion_ids": list(ids),
        "completion_logprobs": logprobs,
        "content": parsed.content if parsed else None,
        "reasoning_content": parsed.reasoning_content if parsed else None,
        "tool_calls": parsed.tool_calls if parsed else [],
        "finish_reason": finish_reason,
        "reasoning_complete": parsed.reasoning_complete if parsed else None,
        "routed_experts": choice.get("routed_experts"),
        "sampling_mask": choice.get("sampling_mask"),
        "sampling_mask_logprobs": choice.get("sampling_mask_logprobs"),
        "payload": choice.get("payload"),
        "multi_modal_data": multi_modal_data,
        "prompt_attribution": prompt_attribution,
    }


def _is_ok(call: Any) -> bool:
    """Whether the renderer parsed a tool call cleanly; its status is an enum with a member OK."""
    return str(getattr(call.status, "name", call.status)).upper() == "OK"


# In the order in which a part without a type is looked at.
_MEDIA = {
    name: f"{medium}_url"
    for medium in ("image", "audio", "video")
    for name in (medium, f"{medium}_url")
}


def _content_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """List the media of all messages in prompt order, as the endpoint takes them."""
    parts = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping):
                continue
            name = part.get("type")
            if name is None:
                name = next((key for key in _MEDIA if part.get(key)), None)
            if not isinstance(name, str) or name not in _MEDIA:
                continue
            media, source = _MEDIA[name], part.get(name)
            if source is None:
                source = part.get(media) or part.get("url")
            url = source.get("url") if isinstance(source, Mapping) else source
            if not isinstance(url, str) or not url:
                raise ValueError(f"{name} content part has no URL")
            parts.append({"type": media, "url": url})
    return parts


def _features(renderer: Any, multi_modal_data: Any) -> Any:
    """Encode processed media as the engine takes them; what is encoded depends on the model."""
    try:
        from renderers.client import _build_mm_features
    except ImportError as error:
        raise NotImplementedError(
            "multi_modal_data needs the renderers package, which knows the model's encoding: install "
            "it, or pass process_multimodal=False"
        ) from error
    return _build_mm_features(renderer, multi_modal_data)
