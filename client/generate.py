"""One generation over HTTP: tokens out, tokens and handles back."""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import msgspec

from ._response import completion_logprobs, kind, malformed, parse_generate_response, token_ids
from .errors import OverlongPromptError


async def generate(
    *,
    client: Any,
    renderer: Any = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    model: str,
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
    client : AsyncOpenAI, httpx2.AsyncClient, or alike
        Anything with ``base_url`` and an async ``post(url, cast_to=, body=, options=)``, or a
        plain httpx client with its ``base_url`` set.
    renderer : object, optional
        Has ``render``, ``get_stop_token_ids`` and ``parse_response``, as those of the `renderers`
        package. Without one, give `prompt_ids`; the completion is then not parsed.
    messages : sequence of message, optional
        Rendered into the prompt unless `prompt_ids` is given.
    model : str
        Name the server knows the model by.
    prompt_ids : sequence of int, optional
        A prompt that was rendered before.
    multi_modal_data, prompt_attribution : object, optional
        What rendering gave beside `prompt_ids`; handed back in the result.
    tools : sequence, optional
        Tools the renderer renders and parses.
    sampling_params : mapping, optional
        Sent as they are, except that ``logprobs`` is 1, ``stop_token_ids`` the renderer's, and
        ``skip_special_tokens`` False unless given. Of several completions (``n``) the first is
        returned.
        ``extra_args={"payload_dir": ...}`` asks for side arrays by handle.
    cache_salt, priority : optional
        Sent when given.
    extra_headers : mapping, optional
        HTTP headers of this request.
    max_prompt_len : int, optional
        Tokens the engine takes. Default: what ``GET /models`` says, asked once per server and
        model; unknown if it does not say.
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
        sent, None when it sent none; inline `routed_experts` and `sampling_mask` are not decoded.

    Raises
    ------
    OverlongPromptError
        When the prompt is longer than the engine takes; nothing was sent.
    MalformedGenerateResponseError
        When the response is not what the endpoint promises.
    ValueError, NotImplementedError
        When the arguments do not go together.
    Exception
        What the client raises for a 4xx or 5xx, unchanged.
    """
    if tools and renderer is not None and not getattr(renderer, "supports_tools", True):
        raise ValueError(f"{type(renderer).__name__} does not support tools")
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
            max_prompt_len = await _context_length(client, model)
        if max_prompt_len is not None and len(prompt) > max_prompt_len:
            raise OverlongPromptError(prompt_len=len(prompt), max_prompt_len=max_prompt_len)

    params = dict(sampling_params or {})
    if renderer is not None:
        params["stop_token_ids"] = renderer.get_stop_token_ids()
    params["logprobs"] = 1
    params.setdefault("skip_special_tokens", False)
    body: dict[str, Any] = {"model": model, "token_ids": prompt, "sampling_params": params}
    parts = None if process_multimodal else _content_parts(messages or [])
    if parts:
        body |= {"content_parts": parts, "return_token_ids": True}
    if process_multimodal and multi_modal_data and not multi_modal_data.is_empty():
        body["features"] = _features(renderer, multi_modal_data)
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    if priority is not None:
        body["priority"] = priority

    data = parse_generate_response(await _post(client, body, extra_headers))
    choice: dict[str, Any] = data["choices"][0]
    ids = token_ids(choice.get("token_ids"), "$.choices[0].token_ids")
    expanded = data.get("prompt_token_ids")
    if parts or expanded is not None:
        expanded = token_ids(expanded, "$.prompt_token_ids")
    placeholders = data.get("mm_placeholders")
    if parts and not isinstance(placeholders, dict):
        raise malformed("$.mm_placeholders", f"is {kind(placeholders)}: needs an object")
    logprobs = completion_logprobs(choice, ids)
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


def _root(client: Any) -> str:
    """URL of the server; the endpoint is mounted beside ``/v1``, not under it."""
    return str(client.base_url).rstrip("/").removesuffix("/v1")


def _http_library(client: Any) -> str | None:
    """Name the httpx a plain client belongs to: it goes by two names, alike for us."""
    for cls in type(client).__mro__:
        library = cls.__module__.partition(".")[0]
        if library in ("httpx", "httpx2"):
            if cls.__name__ == "Client":
                raise TypeError(f"client is {library}.Client: needs {library}.AsyncClient")
            if cls.__name__ == "AsyncClient":
                return library
    return None


async def _post(client: Any, body: dict[str, Any], headers: Mapping[str, str] | None) -> bytes:
    url = f"{_root(client)}/inference/v1/generate"
    if _http_library(client):
        response = await client.post(
            url,
            content=msgspec.json.encode(body),
            headers={"content-type": "application/json", **(headers or {})},
        )
        if response.is_error:
            try:
                response.raise_for_status()
            except Exception as error:
                error.add_note(response.text[:2000])  # what the engine says of it
                raise
    else:
        # The response class must come from the library the client is built on.
        library = sys.modules.get(_http_library(getattr(client, "_client", None)) or "", httpx2)
        options = {"options": {"headers": dict(headers)}} if headers else {}
        response = await client.post(url, cast_to=library.Response, body=body, **options)
    content: bytes = response.content
    return content


_context_lengths: dict[tuple[str, str], int | None] = {}
# One per event loop: a lock belongs to the loop it first waited in.
_locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
    weakref.WeakKeyDictionary()
)


async def _context_length(client: Any, model: str) -> int | None:
    """Tokens the engine takes, from ``GET /models``; None, and not asked again, if unknown."""
    key = (str(getattr(client, "base_url", "")), model)
    if key not in _context_lengths:
        async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if key not in _context_lengths:
                try:
                    _context_lengths[key] = _length_of(await _models(client), model)
                except Exception:  # whatever fails here, the engine still refuses by itself
                    _context_lengths[key] = None
    return _context_lengths[key]


async def _models(client: Any) -> Any:
    if not _http_library(client):
        return await client.get("/models", cast_to=dict[str, Any])
    response = await client.get(f"{_root(client)}/v1/models")
    response.raise_for_status()
    return msgspec.json.decode(response.content)


def _length_of(models: Any, model: str) -> int | None:
    for card in models.get("data") or []:
        if isinstance(card, Mapping) and card.get("id") == model:
            length = card.get("max_model_len")
            return length if isinstance(length, int) and length > 0 else None
    return None


def _is_ok(call: Any) -> bool:
    """Whether the renderer parsed a tool call cleanly; its status is an enum with a member OK."""
    return bool(getattr(call.status, "name", call.status) == "OK")


_MEDIA = {
    name: url
    for url in ("image_url", "audio_url", "video_url")
    for name in (url, url[: -len("_url")])
}


def _content_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """List the media of all messages in prompt order, as the endpoint takes them."""
    parts = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping):
                continue
            name = part.get("type") or next((key for key in _MEDIA if part.get(key)), None)
            if name not in _MEDIA:
                continue
            media = _MEDIA[name]
            source = part.get(name) or part.get(media) or part.get("url")
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
