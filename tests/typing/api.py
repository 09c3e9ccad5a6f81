"""Every public name, used as a caller would: mypy reads this, nothing runs it."""

from typing import assert_type

import httpx2
import numpy as np

import client
import payload
from payload import Ragged, Resolver, Segment, Writer


def use() -> None:
    segment = Segment("routed_experts", "/p/v3/a", 0, 0, 2, "uint8", (2, 3))
    assert_type(segment.end, int)
    assert_type(segment.row_nbytes, int)
    assert_type(segment.nbytes, int | None)
    segments = payload.decode_segments(b"null")
    assert_type(segments, list[Segment])
    assert_type(payload.clip(segments, 0, np.int64(9)), list[Segment])
    assert_type(payload.shift(segments, 3), list[Segment])
    assert_type(payload.gaps(segments, "routed_experts", 0, 9), list[tuple[int, int]])
    payload.encode_segments(segments, form="array")

    fields = payload.FIELDS | {"mine": payload.Field(fill=0, dtype="int16")}
    with Resolver(
        {"/srv": "/local"}, mode="copy", wait=1.0, verify="checksum", fields=fields
    ) as resolver:
        resolver.view(segment)
        resolver.resolve([{"file": "/p"}])
        window = resolver.window(
            segments, "routed_experts", 0, 9, fill=0, holes=[(8, 9)], extent=(0, 9)
        )
        assert window is None or window.shape == (9, 2, 3)
        resolver.window(segments, "routed_experts", 0, 9, layers=range(3, 61), num_layers=61)
        resolver.read_into(segments, "routed_experts", 0, 2, np.empty((2, 2, 3), np.uint8))
        assert_type(resolver.ragged(segments, "sampling_mask", 0, 9), Ragged | None)
        resolver.prefetch(segments)
        assert_type(resolver.stats(), payload.Stats)

    mask = Ragged.from_lists([[7], [8, 9]])
    assert_type(mask[0:1], Ragged)
    mask.with_values(np.zeros(3, np.float32)).to_padded(float("-inf"))
    writer = Writer("/local", prefix="/srv", durable=True, max_bytes=2**30, min_free=2**20)
    assert_type(
        writer.write({"sampling_mask": (4, mask)}, payload_dir="v3", metadata={"weights": "7"}),
        list[Segment],
    )
    payload.expert_dtype(512)
    try:
        raise payload.PayloadTruncatedError("x")
    except EOFError:
        pass


async def use_async() -> None:
    async with httpx2.AsyncClient(base_url="http://127.0.0.1:8000") as http:
        result = await client.generate(client=http, model="m", prompt_ids=[1, 2])
        payload.decode_segments(result["payload"])
    result = client.generate_sync(client="http://127.0.0.1:8000", model="m", prompt_ids=[1, 2])
    status = client.payload_status(result, {"extra_args": {"payload_dir": "/srv/v3"}})
    assert_type(status, client.PayloadStatus)
    assert_type(status.message, str)
    client.parse_generate_response(b"{}")["choices"]
