"""How each kind of client is asked: openai's, plain httpx, or a URL; with an event loop or without."""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, NamedTuple

import httpx2
import msgspec

# Generations take as long as they take; a server that is not there is told apart sooner.
_TIMEOUT: Final = httpx2.Timeout(None, connect=10)


class ContextLength(NamedTuple):
    """Ask how many tokens the engine takes; the answer is an int or None."""

    model: str


class Generate(NamedTuple):
    """Ask for a generation; the answer is the body of the response."""

    body: dict[str, Any]
    headers: Mapping[str, str] | None


Step = ContextLength | Generate


@asynccontextmanager
async def opened(client: Any) -> AsyncIterator[Any]:
    """Give an asynchronous client, made of a URL if need be."""
    if isinstance(client, str):
        async with httpx2.AsyncClient(base_url=client, timeout=_TIMEOUT) as http:
            yield http
    else:
        _check_kind(client, "Sync", "Client", "Async")
        yield client


@contextmanager
def opened_sync(client: Any) -> Iterator[Any]:
    """Give a synchronous client, made of a URL if need be."""
    if isinstance(client, str):
        with httpx2.Client(base_url=client, timeout=_TIMEOUT) as http:
            yield http
    else:
        _check_kind(client, "Async", "AsyncClient", "")
        yield client


async def perform(client: Any, step: Step) -> Any:
    """Ask the server, and return its answer to `step`."""
    if isinstance(step, Generate):
        await _turn()
        body = _body(await _post(client, step))
        await _turn()
        return body
    key = _key(client, step)
    if key not in _context_lengths:
        async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if key not in _context_lengths:
                try:
                    _context_lengths[key] = _length(await _get_models(client), step.model)
                except Exception:  # whatever fails here, the engine still refuses by itself
                    _context_lengths[key] = None
    return _context_lengths[key]


_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
    weakref.WeakKeyDictionary()
)


async def _turn() -> None:
    """Wait for a turn: of many calls that could go on, one does so between two looks at the rest."""
    async with _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        await asyncio.sleep(0)


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


# Tokens the engine takes, by server and model; None, and not asked again, if it does not say.
_context_lengths: dict[tuple[str, str], int | None] = {}
# One per event loop: a lock belongs to the loop it first waited in.
_locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
    weakref.WeakKeyDictionary()
)


def _key(client: Any, step: ContextLength) -> tuple[str, str]:
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


def _post(client: Any, step: Generate) -> Any:
    """Response to the request, to be awaited if the client is asynchronous."""
    url = f"{_root(client)}/inference/v1/generate"
    if _library(client):
        headers = {"content-type": "application/json", **(step.headers or {})}
        return client.post(url, content=msgspec.json.encode(step.body), headers=headers)
    # The response class must come from the library the client is built on.
    library = sys.modules.get(_library(getattr(client, "_client", None)) or "", httpx2)
    options = {"options": {"headers": dict(step.headers)}} if step.headers else {}
    return client.post(url, cast_to=library.Response, body=step.body, **options)


def _body(response: Any) -> bytes:
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
        return client.get(f"{_root(client)}/v1/models")
    return client.get("/models", cast_to=dict[str, Any])


def _length(models: Any, model: str) -> int | None:
    if not isinstance(models, Mapping):
        models = msgspec.json.decode(_body(models))
    for card in models.get("data") or []:
        if isinstance(card, Mapping) and card.get("id") == model:
            length = card.get("max_model_len")
            return length if isinstance(length, int) and length > 0 else None
    return None
