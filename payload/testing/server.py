"""A test double of an inference server: speaks the generate endpoint, computes nothing.

It replays side arrays a test gives it, inline or by handle as the request asks, in the forms real
servers use. Serve `app` with any ASGI server, on loopback.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from ..errors import PathError, PayloadWriteError
from ..ragged import Ragged
from ..segment import encode_segments
from ..writer import Writer

Array = np.ndarray[Any, Any]
Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to replay.

    Attributes
    ----------
    token_ids : list of int
        Completion tokens.
    arrays : dict of field to (pos, array)
        Side arrays and the token position of their first row.
    logprobs : list of float, optional
        One per completion token; default all -1.
    finish_reason : str
    """

    token_ids: list[int]
    arrays: dict[str, tuple[int, Any]] = {}
    logprobs: list[float] | None = None
    finish_reason: str = "stop"


Source = Callable[[dict[str, Any]], Sequence[Completion]]


def app(
    source: Source,
    writer: Writer | None = None,
    *,
    inline: Literal["npy", "packed"] = "npy",
    max_model_len: int = 1_000_000,
) -> App:
    """Make the test double.

    Parameters
    ----------
    source : callable
        Gets the decoded request, returns the completions to replay, one per choice.
    writer : Writer, optional
        Where side arrays go when ``sampling_params.extra_args.payload_dir`` asks for it. Without
        one they stay inline, as on a server that does not know the argument.
    inline : {"npy", "packed"}
        Form of inline routed experts: a base64 .npy file as stock vLLM sends, or the object with
        data, shape, start and dtype as prime-rl does.
    max_model_len : int
        Context length that ``GET /v1/models`` tells.

    Returns
    -------
    callable
        An ASGI application with ``/inference/v1/generate``, ``/v1/models`` and ``/health``.
    """

    async def serve(scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                event = await receive()
                await send({"type": f"{event['type']}.complete"})
                if event["type"] == "lifespan.shutdown":
                    return
        route = scope["method"], scope["path"]
        if route == ("POST", "/inference/v1/generate"):
            chunks = []
            while True:
                event = await receive()
                chunks.append(event.get("body", b""))
                if not event.get("more_body"):
                    break
            status, answer = _generate(b"".join(chunks), source, writer, inline)
        elif route == ("GET", "/v1/models"):
            cards = [{"id": "test-double", "object": "model", "max_model_len": max_model_len}]
            status, answer = 200, {"object": "list", "data": cards}
        elif route == ("GET", "/health"):
            status, answer = 200, {}
        else:
            status, answer = 404, _error(404, f"no route {scope['path']}")
        content = msgspec.json.encode(answer)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    return serve


def _generate(
    body: bytes, source: Source, writer: Writer | None, inline: Literal["npy", "packed"]
) -> tuple[int, dict[str, Any]]:
    try:
        request = msgspec.json.decode(body, type=dict[str, Any])
        prompt = request["token_ids"]
        params = request.get("sampling_params") or {}
    except (msgspec.DecodeError, KeyError) as error:
        return 400, _error(400, f"request is malformed: {error}")
    if request.get("stream"):
        return 400, _error(400, "the test double does not stream")
    payload_dir = (params.get("extra_args") or {}).get("payload_dir")
    choices = []
    completions = source(request)
    for index, completion in enumerate(completions):
        choice: dict[str, Any] = {
            "index": index,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "logprobs": _logprobs(completion),
            "routed_experts": None,
            "sampling_mask": None,
        }
        if payload_dir is not None and writer is not None:
            try:
                segments = writer.write(completion.arrays, payload_dir=payload_dir)
            except PathError as error:
                return 400, _error(400, str(error))
            except PayloadWriteError as error:
                return 500, _error(500, str(error))
            choice["payload"] = encode_segments(segments)
        else:
            choice |= {
                field: encode_inline(array, pos, inline)
                for field, (pos, array) in completion.arrays.items()
            }
        choices.append(choice)
    tokens = sum(len(completion.token_ids) for completion in completions)
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": tokens,
        "total_tokens": len(prompt) + tokens,
    }
    return 200, {"request_id": "test-double", "choices": choices, "usage": usage}


def _logprobs(completion: Completion) -> dict[str, Any]:
    values = completion.logprobs or [-1.0] * len(completion.token_ids)
    pairs = zip(completion.token_ids, values, strict=True)
    return {"content": [{"token": f"token_id:{token}", "logprob": value} for token, value in pairs]}


def encode_inline(array: Array | Ragged, pos: int, form: Literal["npy", "packed"] = "npy") -> Any:
    """Encode a side array as servers put it into the body.

    Examples
    --------
    >>> encode_inline(np.zeros((1, 2), np.uint8), 3, "packed")
    {'data': 'AAA=', 'shape': [1, 2], 'start': 3, 'dtype': 'uint8'}
    """
    if isinstance(array, Ragged):
        return [row.tolist() for row in array]
    if form == "packed":
        data = base64.b64encode(array.tobytes()).decode()
        return {"data": data, "shape": list(array.shape), "start": pos, "dtype": array.dtype.name}
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()


def _error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "TestDoubleError", "code": code}}
