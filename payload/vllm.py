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
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from itertools import takewhile
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from ._gather import Array
from .errors import InlineError, PathError, PayloadError
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

# Seconds a file may take before its rows go inline: a hung mount must not hold generations.
_PATIENCE: Final = 30.0
# Seconds between two warnings for the same reason.
_QUIET: Final = 10.0

_counts: Counter[str] = Counter()
_inline: Counter[str] = Counter()
_said: dict[str, float] = {}


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
            When ``BYHANDLE_ROOT`` is not set or cannot be written to, the endpoint is switched off,
            or the engine is not one whose shape is known.
        """
        if not (getattr(args, "enable_scale_out", True) or getattr(args, "tokens_only", False)):
            raise RuntimeError(
                "/inference/v1/generate is switched off, so nothing can be asked by handle: start the "
                "server with --enable-scale-out, or take byhandle out of VLLM_PLUGINS"
            )
        writer = _writer_from_environment()
        attach(getattr(state, "serving_tokens", None), writer)
        recording = any(getattr(args, flag, True) for flag in _FLAGS)
        if not (recording or getattr(args, "aux_output_config", None)):
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
                _judge(payload_dir, writer)
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
        taken: list[_Taken] = []
        last: Any = None

        async def results() -> AsyncIterator[Any]:
            nonlocal last
            async for last in result_generator:
                yield last
            # The engine has the same object and encodes it once this ends.
            if last is not None:
                await _take(last, request, writer, payload_dir, taken)

        async def again() -> AsyncIterator[Any]:
            yield last

        try:
            response = await base.serve_tokens_full_generator(
                self, request, results(), *args, **kwargs
            )
        except BaseException:
            _give_back(taken, writer)
            raise
        if not taken:
            return response
        if not hasattr(response, "choices"):
            _give_back(taken, writer)
            if hasattr(response, "error") or (isinstance(response, dict) and response.get("error")):
                return response  # nobody would learn of the files
            error: Exception = TypeError(f"{type(response).__name__} has no choices")
        else:
            try:
                wider = _with_payloads(response, taken)
            except Exception as caught:
                _give_back(taken, writer)
                error = caught
            else:
                _count(taken)
                return wider
        # What the engine made of the outputs has lost the arrays: let it encode them once more.
        _leave_inline("response", "answer of %r stays inline: %s", last.request_id, error)
        return await base.serve_tokens_full_generator(self, request, again(), *args, **kwargs)

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
    if not os.path.isabs(root):
        raise RuntimeError(f"BYHANDLE_ROOT is {root!r}: needs an absolute path")
    try:
        writer = Writer(root, prefix=os.environ.get("BYHANDLE_PREFIX") or None)
        os.makedirs(writer.root, exist_ok=True)
        with tempfile.TemporaryFile(dir=writer.root):
            pass
    except (OSError, ValueError) as error:
        raise RuntimeError(f"BYHANDLE_ROOT {root!r} cannot be written to: {error}") from error
    return writer


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
            f"{'; '.join(wrong)}. vLLM 0.30.0 and 0.32.0 are known; without byhandle in VLLM_PLUGINS the "
            "server answers inline"
        )


def _judge(payload_dir: Any, writer: Writer) -> None:
    """Refuse a directory no file may go into, before anything is generated."""
    writer.check(payload_dir)
    if str(payload_dir).rstrip("/") in ("", writer.prefix.rstrip("/")):
        raise PathError(
            f"payload_dir {payload_dir!r} is the root itself, where no version is ever removed: needs "
            f"a directory beneath, such as {writer.prefix.rstrip('/')}/v3",
            reason="outside_roots",
            path=str(payload_dir),
        )


def _asked(request: Any) -> Any:
    """Return the request's ``payload_dir``, None if it did not ask by handle."""
    extra = getattr(getattr(request, "sampling_params", None), "extra_args", None)
    return extra.get("payload_dir") if isinstance(extra, Mapping) else None


class _Taken(NamedTuple):
    """What was taken off one output, and where it went."""

    output: Any
    arrays: dict[str, Any]
    segments: list[Segment]


async def _take(
    result: Any, request: Any, writer: Writer, payload_dir: Any, taken: list[_Taken]
) -> None:
    """Write the side arrays of a finished request and take them off its outputs."""
    # The engine fails the whole request for one output that ended so.
    if any(getattr(output, "finish_reason", None) == "error" for output in result.outputs):
        return
    await asyncio.gather(
        *(_take_one(one, result, request, writer, payload_dir, taken) for one in result.outputs)
    )


async def _take_one(
    output: Any,
    result: Any,
    request: Any,
    writer: Writer,
    payload_dir: Any,
    taken: list[_Taken],
) -> None:
    """Write the side arrays of one choice and take them off it, or leave it as it is."""
    try:
        prompt = len(result.prompt_token_ids)
        start = getattr(request.sampling_params, "routed_experts_prompt_start", None)
        async with asyncio.timeout(_PATIENCE):
            # On a thread: a mask comes as lists, one a token.
            arrays = await asyncio.to_thread(_arrays, output, prompt, start)
            metadata = _metadata(output, result)
            segments = await writer.awrite(arrays, payload_dir, metadata)
    except Exception as error:  # the tokens are worth more than the way the arrays travel
        reason = getattr(error, "reason", None) or type(error).__name__
        if isinstance(error, TimeoutError):
            reason = "timeout"
            error = TimeoutError(f"the file was not written in {_PATIENCE:g} s")
        index, name = getattr(output, "index", None), getattr(result, "request_id", None)
        _leave_inline(reason, "choice %s of %r stays inline: %s", index, name, error)
        return
    taken.append(_Taken(output, {name: getattr(output, name) for name in arrays}, segments))
    for name in arrays:
        setattr(output, name, None)


def _give_back(taken: list[_Taken], writer: Writer) -> None:
    """Put arrays back where they were, and remove their files: nobody will be told of them."""
    for output, arrays, segments in taken:
        for name, value in arrays.items():
            setattr(output, name, value)
        writer.forget(segments)


def _count(taken: list[_Taken]) -> None:
    for _, _, segments in taken:
        _counts["files" if segments else "empty"] += 1
        _counts["bytes"] += sum(segment.nbytes or 0 for segment in segments)


def _leave_inline(reason: str, message: str, *arguments: Any) -> None:
    """Count what stays inline; say so once in a while, not once a choice of a full disk."""
    _inline[reason] += 1
    now = time.monotonic()
    if now - _said.get(reason, -_QUIET) >= _QUIET:
        _said[reason] = now
        _log.warning(f"{message} (%d for this reason so far)", *arguments, _inline[reason])


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


def _with_payloads(response: Any, taken: list[_Taken]) -> Any:
    """Return the response with ``payload`` on its choices: of a subclass of its own class."""
    payloads = {one.output.index: encode_segments(one.segments) for one in taken}
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
