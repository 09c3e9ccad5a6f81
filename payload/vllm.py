"""The engine side: a plug-in that lets vLLM answer by handle.

It takes the side arrays off a finished request before the engine encodes them, writes them with
`Writer` off the event loop, and adds ``payload`` to the answer. Whatever goes wrong, the arrays stay
where they were and the engine sends them inline, as it would without the plug-in.

Nothing of the engine is imported and none of its classes is known by name: they are taken from the
objects at hand, so one plug-in fits engines that name them differently. What it needs of the serving
object is checked when the server starts.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from itertools import takewhile
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from ._gather import Array
from .errors import InlineError, PayloadError
from .inline import anchored, decode_sampling_mask, decode_sampling_mask_logprobs
from .ragged import Ragged
from .segment import Segment, encode_segments
from .writer import Writer

__all__ = ["Plugin", "attach", "stats"]

# Beneath "vllm", where the engine's own handlers and levels apply.
_log = logging.getLogger("vllm.byhandle")
_Serving = TypeVar("_Serving")
# Methods of the serving object that are replaced, and what their parameters begin with.
_METHODS: Final = {
    "serve_tokens": ["self", "request"],
    "serve_tokens_full_generator": ["self", "request", "result_generator"],
}
# Arguments of the engine, any of which makes it record side arrays.
_FLAGS: Final = ("enable_return_routed_experts", "return_sampling_mask")
_SIDE_ARRAYS: Final = ("routed_experts", "sampling_mask", "sampling_mask_logprobs")

_counts: Counter[str] = Counter()
_inline: Counter[str] = Counter()


class Plugin:
    """The endpoint plug-in: entry point ``byhandle`` of ``vllm.endpoint_plugins``.

    vLLM loads it where ``VLLM_PLUGINS`` names ``byhandle``. ``BYHANDLE_ROOT`` is the directory that
    is shared with the trainers, ``BYHANDLE_PREFIX`` how other nodes spell it, if not alike.
    """

    name = "byhandle"
    required_tasks: tuple[str, ...] | None = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Add ``GET /byhandle/stats``: see `stats`."""

        async def byhandle_stats() -> dict[str, Any]:
            return stats()

        app.add_api_route("/byhandle/stats", byhandle_stats, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Let the server's serving object answer by handle; the server does not start otherwise.

        Raises
        ------
        RuntimeError
            When ``BYHANDLE_ROOT`` is not set, the endpoint is switched off, or the engine is not one
            whose shape is known.
        """
        if not (getattr(args, "enable_scale_out", True) or getattr(args, "tokens_only", False)):
            raise RuntimeError(
                "/inference/v1/generate is switched off, so nothing can be asked by handle: start the "
                "server with --enable-scale-out, or take byhandle out of VLLM_PLUGINS"
            )
        writer = _writer_from_environment()
        attach(getattr(state, "serving_tokens", None), writer)
        if not any(getattr(args, flag, True) for flag in _FLAGS):
            _log.warning(
                "the engine records no side arrays, so payloads will be empty: start it with %s",
                " or ".join(f"--{flag.replace('_', '-')}" for flag in _FLAGS),
            )


def attach(serving: _Serving, writer: Writer | None = None) -> _Serving:
    """Let a serving object answer by handle: the way in for servers that make their own.

    A server that replaces ``app.state.serving_tokens`` after the plug-in ran, as prime-rl's does by
    copying ``__dict__`` into a class of its own, loses what the plug-in did; it calls this on the
    object it serves with.

    Parameters
    ----------
    serving : object
        What answers ``/inference/v1/generate``: has the coroutines ``serve_tokens(request, ...)``
        and ``serve_tokens_full_generator(request, result_generator, ...)`` and
        ``create_error_response``. Its class is replaced by a subclass; a second call does nothing.
    writer : Writer, optional
        Default: made from ``BYHANDLE_ROOT`` and ``BYHANDLE_PREFIX``.

    Returns
    -------
    object
        `serving` itself.

    Raises
    ------
    RuntimeError
        When the object has not these methods, or no root is known.
    """
    base: Any = type(serving)
    if getattr(base, "answers_by_handle", False):
        return serving
    _refuse_unknown(serving)
    writer = _writer_from_environment() if writer is None else writer

    async def serve_tokens(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        payload_dir = _asked(request)
        if payload_dir is not None:
            try:
                writer.check(payload_dir)
            except (PayloadError, TypeError) as error:
                _counts["refused"] += 1
                return self.create_error_response(str(error))
            if getattr(request, "stream", False):
                _inline["stream"] += 1
        return await base.serve_tokens(self, request, *args, **kwargs)

    async def serve_tokens_full_generator(
        self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        payload_dir = _asked(request)
        if payload_dir is None:
            return await base.serve_tokens_full_generator(
                self, request, result_generator, *args, **kwargs
            )
        payloads: dict[int, list[Any]] = {}

        async def results() -> AsyncIterator[Any]:
            last = None
            async for last in result_generator:
                yield last
            # The engine has the same object and encodes it once this ends.
            if last is not None:
                payloads.update(await _spill(last, request, writer, payload_dir))

        response = await base.serve_tokens_full_generator(self, request, results(), *args, **kwargs)
        return _with_payloads(response, payloads) if payloads else response

    # A class, not attributes of the object: who copies its __dict__ into a class of his own gets his
    # own methods, not ours bound to the wrong object.
    made = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "answers_by_handle": True,
        "serve_tokens": serve_tokens,
        "serve_tokens_full_generator": serve_tokens_full_generator,
    }
    serving.__class__ = type(base.__name__, (base,), made)
    _log.info("side arrays go beneath %s, in answers %s", writer.root, writer.prefix)
    return serving


def stats() -> dict[str, Any]:
    """Return what this server process did so far.

    Returns
    -------
    dict
        ``files`` and ``bytes`` written, choices answered with an ``empty`` payload, requests
        ``refused`` for their ``payload_dir``, and by reason the choices (``stream``: requests) that
        asked by handle and were left ``inline``; ``pid``, as there may be several processes.

    Examples
    --------
    >>> sorted(stats())
    ['bytes', 'empty', 'files', 'inline', 'pid', 'refused']
    """
    return {
        "pid": os.getpid(),
        **{name: _counts[name] for name in ("files", "bytes", "empty", "refused")},
        "inline": dict(_inline),
    }


def _writer_from_environment() -> Writer:
    root = os.environ.get("BYHANDLE_ROOT")
    if not root:
        raise RuntimeError(
            "BYHANDLE_ROOT is not set: it must name the directory that is shared with the trainers, or "
            "take byhandle out of VLLM_PLUGINS"
        )
    return Writer(root, prefix=os.environ.get("BYHANDLE_PREFIX") or None)


def _refuse_unknown(serving: Any) -> None:
    cls = type(serving)
    known = callable(getattr(cls, "create_error_response", None))
    wrong = [] if known else ["no create_error_response"]
    for name, needed in _METHODS.items():
        method = getattr(cls, name, None)
        if not inspect.iscoroutinefunction(method):
            wrong.append(f"no coroutine {name}")
            continue
        parameters = inspect.signature(method).parameters.values()
        fixed = list(
            takewhile(lambda parameter: parameter.kind != parameter.VAR_POSITIONAL, parameters)
        )
        found = [parameter.name for parameter in fixed][: len(needed)]
        # A wrapper that takes *args passes on what it does not name.
        if found != needed[: len(found) if len(fixed) < len(parameters) else None]:
            wrong.append(f"{name}({', '.join(found)}, ...), needs ({', '.join(needed)}, ...)")
    if wrong:
        raise RuntimeError(
            f"serving object is {cls.__module__}.{cls.__qualname__}, which byhandle does not know: it has "
            f"{'; '.join(wrong)}. vLLM 0.30 to 0.32 are known; without byhandle in VLLM_PLUGINS the "
            "server answers inline"
        )


def _asked(request: Any) -> Any:
    """Return the request's ``payload_dir``, None if it did not ask by handle."""
    extra = getattr(getattr(request, "sampling_params", None), "extra_args", None)
    return extra.get("payload_dir") if isinstance(extra, Mapping) else None


async def _spill(
    result: Any, request: Any, writer: Writer, payload_dir: Any
) -> dict[int, list[Any]]:
    """Write the side arrays of a finished request; by index of the choice, what went into files."""
    # The engine fails the whole request for one output that ended so.
    if any(output.finish_reason == "error" for output in result.outputs):
        return {}
    done = await asyncio.gather(
        *(_spill_one(output, result, request, writer, payload_dir) for output in result.outputs)
    )
    return {index: payload for index, payload in done if payload is not None}


async def _spill_one(
    output: Any, result: Any, request: Any, writer: Writer, payload_dir: Any
) -> tuple[int, list[Any] | None]:
    """Write the side arrays of one choice and take them off it, or leave it as it is."""
    try:
        prompt = len(result.prompt_token_ids)
        start = getattr(request.sampling_params, "routed_experts_prompt_start", None)
        # On a thread: a mask comes as lists, one a token.
        arrays = await asyncio.to_thread(_arrays, output, prompt, start)
        metadata = _metadata(output, result)
        segments: list[Segment] = await writer.awrite(arrays, payload_dir, metadata)
    except Exception as error:  # the tokens are worth more than the way the arrays travel
        reason = getattr(error, "reason", None) or type(error).__name__
        _inline[reason] += 1
        _log.warning("choice %s of %s stays inline: %s", output.index, result.request_id, error)
        return output.index, None
    for name in arrays:
        setattr(output, name, None)
    _counts["files" if segments else "empty"] += 1
    _counts["bytes"] += sum(segment.nbytes or 0 for segment in segments)
    return output.index, encode_segments(segments)


def _arrays(output: Any, prompt: int, start: int | None) -> dict[str, tuple[int, Array | Ragged]]:
    """Return what an output carries, as `Writer` takes it, each with the position of its first row."""
    if not any(hasattr(output, name) for name in _SIDE_ARRAYS):
        raise InlineError(
            f"output is {type(output).__name__}, which has none of {', '.join(_SIDE_ARRAYS)}: this "
            "engine is not known",
            reason="form",
        )
    experts, mask, logprobs = (getattr(output, name, None) for name in _SIDE_ARRAYS)
    tokens = len(output.token_ids)
    arrays: dict[str, tuple[int, Array | Ragged]] = {}
    if experts is not None:
        if not isinstance(experts, np.ndarray) or experts.ndim != 3:
            raise InlineError(
                f"routed_experts is {type(experts).__name__} of shape "
                f"{getattr(experts, 'shape', None)}: needs an array [rows, layers, top_k]",
                reason="form",
                field="routed_experts",
            )
        pos = anchored(len(experts), prompt, tokens, {"$.routed_experts_prompt_start": start})
        arrays["routed_experts"] = pos, experts
    if mask is not None:
        rows = decode_sampling_mask(mask.token_ids)
        if len(rows) != tokens:
            raise InlineError(
                f"sampling_mask has {len(rows)} rows: needs {tokens}, one a completion token",
                reason="counts",
                field="sampling_mask",
                expected=tokens,
                actual=len(rows),
            )
        arrays["sampling_mask"] = prompt, rows
        if logprobs is not None:
            values = decode_sampling_mask_logprobs(logprobs, rows)
            arrays["sampling_mask_logprobs"] = prompt, values
    return arrays


def _metadata(output: Any, result: Any) -> dict[str, str]:
    """Return what `inspect` shall say of the file: from which request and which weights it is."""
    found = {"request_id": str(result.request_id)[:200], "index": str(output.index)}
    spans = getattr(output, "weight_versions", None)
    if spans:
        found["weight_versions"] = msgspec.json.encode(spans).decode()
    return found


def _with_payloads(response: Any, payloads: Mapping[int, list[Any]]) -> Any:
    """Return the response with ``payload`` on its choices: of a subclass of its own class."""
    if not hasattr(response, "choices"):
        if not hasattr(response, "error"):
            _log.error(
                "%s has no choices, so nobody learns of the payload", type(response).__name__
            )
        return response
    classes: list[Any] = [type(response), type(response.choices[0])]
    wider, wider_choice = _wider(*classes)
    choices = []
    for choice in response.choices:
        known = {**dict(choice), "payload": payloads.get(choice.index)}
        choices.append(wider_choice.model_construct(**known))
    return wider.model_construct(**{**dict(response), "choices": choices})


@lru_cache
def _wider(response: Any, choice: Any) -> tuple[Any, Any]:
    """Make subclasses that have `payload`: the engine's drop a key they do not declare."""
    from pydantic import create_model

    payload: Any = list[dict[str, Any]] | None
    wider: Any = create_model(choice.__name__, __base__=choice, payload=(payload, None))
    return create_model(response.__name__, __base__=response, choices=(list[wider], ...)), wider
