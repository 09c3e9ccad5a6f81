"""How each kind of client is asked: openai's, plain httpx, or a URL; with an event loop or without."""

from __future__ import annotations

import asyncio
import inspect
import json
import ssl
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import Any, Final, NamedTuple

import httpx2
import msgspec

from ._turns import turn, worked

# Generations take as long as they take; a server that is not there is told apart sooner.
TIMEOUT: Final = httpx2.Timeout(None, connect=10)
# Seconds a server may take to tell its context length, which we do without otherwise.
_LOOKUP: Final = 10.0
# What sending a request costs, over several waits, so it cannot be timed: seconds. As found with
# httpx2 and openai; one a round, then.
_SEND: Final = 0.002


class ContextLength(NamedTuple):
    """Ask how many tokens the engine takes; the answer is an int or None."""

    model: str | None


class Generate(NamedTuple):
    """Ask for a generation; the answer is the body of the response."""

    body: dict[str, Any]
    headers: Mapping[str, str] | None


Step = ContextLength | Generate


@asynccontextmanager
async def opened(client: Any) -> AsyncIterator[Any]:
    """Give an asynchronous client, made of a URL if need be."""
    if isinstance(client, str):
        async with httpx2.AsyncClient(
            base_url=client, timeout=TIMEOUT, verify=_verify(client)
        ) as http:
            yield http
    else:
        _check_kind(client, "Sync", "Client", "Async")
        yield client


@contextmanager
def opened_sync(client: Any) -> Iterator[Any]:
    """Give a synchronous client, made of a URL if need be."""
    if isinstance(client, str):
        with httpx2.Client(base_url=client, timeout=TIMEOUT, verify=_verify(client)) as http:
            yield http
    else:
        _check_kind(client, "Async", "AsyncClient", "")
        yield client


def _verify(url: str) -> ssl.SSLContext | bool:
    """Whom to trust: made once, as it takes longer than a call, and not at all without TLS."""
    scheme = url.partition("://")[0].lower()
    if scheme not in ("http", "https"):
        raise ValueError(
            f"client is {url[:100]!r}: needs a URL that begins with http:// or https://"
        )
    return scheme == "https" and _trusted()


@cache
def _trusted() -> ssl.SSLContext:
    return httpx2.create_ssl_context()


async def perform(client: Any, step: Step) -> Any:
    """Ask the server, and return its answer to `step`."""
    if isinstance(step, Generate):
        await turn()
        worked(_SEND)
        return _body(await _post(client, step))
    key = _key(client, step)
    loop = asyncio.get_running_loop()
    while key not in _context_lengths:
        if asked := _asking.get((loop, key)):
            await asked.wait()
            continue
        asked = _asking[loop, key] = asyncio.Event()
        try:
            _context_lengths[key] = _length(await _get_models(client), step.model)
        except Exception:  # whatever fails here, the engine still refuses by itself
            _context_lengths[key] = None
        finally:  # cancelled, another of those who wait asks
            del _asking[loop, key]
            asked.set()
    return _context_lengths[key]


def perform_sync(client: Any, step: Step) -> Any:
    """Ask the server, and return its answer to `step`."""
    if isinstance(step, Generate):
        return _body(_post(client, step))
    key = _key(client, step)
    if key not in _context_lengths:
        try:
            _context_lengths[key] = _length(_get_models(client), step.model)
        except Exception:
            _context_lengths[key] = None
    return _context_lengths[key]


_Key = tuple[str, str | None]
# Tokens the engine takes, by server and model; None, and not asked again, if it does not say.
_context_lengths: dict[_Key, int | None] = {}
_asking: dict[tuple[asyncio.AbstractEventLoop, _Key], asyncio.Event] = {}


def _key(client: Any, step: ContextLength) -> _Key:
    return str(getattr(client, "base_url", "")), step.model


def _root(client: Any) -> str:
    """URL of the server; the endpoint is mounted beside ``/v1``, not under it."""
    return str(client.base_url).rstrip("/").removesuffix("/v1")


def _library(client: Any) -> str | None:
    """Name the httpx a plain client belongs to: it goes by two names, alike for us."""
    for cls in type(client).__mro__:
        library = cls.__module__.partition(".")[0]
        if library in ("httpx", "httpx2") and cls.__name__ in ("AsyncClient", "Client"):
            return library
    return None


def _check_kind(client: Any, wrong: str, plain: str, right: str) -> None:
    """Refuse a client of the other kind before anything is sent with it."""
    for cls in type(client).__mro__:
        library = cls.__module__.partition(".")[0]
        names = {"httpx": plain, "httpx2": plain, "openai": f"{wrong}APIClient"}
        if cls.__name__ == names.get(library):
            needed = f"{right}OpenAI" if library == "openai" else f"{library}.{right}Client"
            raise TypeError(f"client is {type(client).__name__}: needs {needed}, or a URL")
    if not hasattr(client, "base_url"):
        raise TypeError(
            f"client is {type(client).__name__}: needs {right}OpenAI, httpx2.{right}Client, or a URL"
        )


def _post(client: Any, step: Generate) -> Any:
    """Response to the request, to be awaited if the client is asynchronous."""
    url = f"{_root(client)}/inference/v1/generate"
    if _library(client):
        given = {name.lower(): value for name, value in (step.headers or {}).items()}
        headers = {"content-type": "application/json"} | given
        return client.post(url, content=_encoded(step.body), headers=headers)
    # The response class must come from the library the client is built on.
    library = sys.modules.get(_library(getattr(client, "_client", None)) or "", httpx2)
    options = {"options": {"headers": dict(step.headers)}} if step.headers else {}
    return client.post(url, cast_to=library.Response, body=step.body, **options)


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        params = json.dumps(body["sampling_params"], allow_nan=False)
    except (TypeError, ValueError) as error:  # msgspec would send null for what is not finite
        raise type(error)(f"sampling_params cannot be sent as JSON: {error}") from None
    return msgspec.json.encode(body | {"sampling_params": msgspec.Raw(params.encode())})


def _body(response: Any) -> bytes:
    if inspect.iscoroutine(response):
        response.close()
        raise TypeError("client is asynchronous: needs a synchronous one, or a URL")
    if not getattr(response, "is_success", True):  # openai's clients have raised by now
        try:
            response.raise_for_status()
        except Exception as error:
            error.add_note(response.text[:2000])  # what the engine says of it
            raise
    content: bytes = response.content
    return content


def _get_models(client: Any) -> Any:
    if _library(client):
        return client.get(f"{_root(client)}/v1/models", timeout=_LOOKUP)
    return client.get("/models", cast_to=dict[str, Any])


def _length(models: Any, model: str | None) -> int | None:
    if not isinstance(models, Mapping):
        models = msgspec.json.decode(_body(models))
    cards = models.get("data") or []
    for card in cards:
        if not isinstance(card, Mapping):
            continue
        if card.get("id") == model or (model is None and len(cards) == 1):
            length = card.get("max_model_len")
            return length if isinstance(length, int) and length > 0 else None
    return None
