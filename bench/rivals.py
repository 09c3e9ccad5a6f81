"""Ways from what reaches a trainer to arrays: by handle, its rivals, and floors nobody can go below.

A way is a function from `Given` to a callable that makes the arrays once more, beginning with nothing
open. It says what of payload size it copies: the bytes it reads or decodes into memory of its own.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from payload import Ragged, Resolver, Segment

Array = np.ndarray[Any, Any]
Get = Callable[[], list[Any]]
Kind = Literal["ours", "inline", "file", "floor"]


class Given:
    """What a way starts from: messages in memory, segments of files, and a note of what it copied.

    `rollouts` are the segments of each rollout's turns, which only floors may take; `messages` a message
    of each turn. What must be closed after each call goes to `closing`.
    """

    def __init__(
        self,
        root: str,
        rollouts: list[list[Segment]],
        messages: list[list[bytes]],
        twins: list[list[str]],
    ) -> None:
        self.root = root
        self.rollouts = rollouts
        self.messages = messages
        self.twins = twins  # the same rows in the rival's own file format, where it has one
        self.copied = 0
        self.closing: list[Callable[[], object]] = []

    def decoded(self) -> list[list[Segment]]:
        """The segments of each rollout out of the messages, taken as they are."""
        return [
            [Segment(**one) for raw in turns for one in msgspec.json.decode(raw)["payload"]]
            for turns in self.messages
        ]

    def close(self) -> None:
        while self.closing:
            self.closing.pop()()


class Way(NamedTuple):
    """One way, what it takes, and the dtype of what it gives."""

    name: str
    kind: Kind
    make: Callable[[Given], Get]
    message: str = ""  # which messages it takes
    wide: bool = False  # gives int32, as upstream does, not the dtype written
    twin: str = ""  # suffix of files of its own
    needs: str = ""  # module to import


def rows_of(segment: Segment, buffer: Any, offset: int = 0) -> Array:
    """The rows of a segment out of a buffer."""
    count = segment.rows * int(np.prod(segment.shape))
    flat = np.frombuffer(buffer, segment.dtype, count, offset)
    return flat.reshape(segment.rows, *segment.shape)


def joined(given: Given, turns: list[Array]) -> Array:
    """One array of the turns of a rollout."""
    if len(turns) == 1:
        return turns[0]
    whole = np.concatenate(turns)
    given.copied += whole.nbytes
    return whole


# --- by handle


def by_handle(given: Given, dtype: Any = None, mode: Any = "auto") -> Get:
    """A trainer's resolver, and files it never saw: what one more rollout costs."""
    resolver = Resolver(given.root, mode=mode)
    files = [segment.file for turns in given.rollouts for segment in turns]

    def get() -> list[Any]:
        given.closing.append(lambda: resolver._files.drop(files))  # as if they were new
        return windows(given, resolver, dtype)

    return get


def by_handle_anew(given: Given) -> Get:
    """A new resolver each time: nothing is open, not even the root."""

    def get() -> list[Any]:
        resolver = Resolver(given.root)
        given.closing.append(resolver.close)
        return windows(given, resolver, None)

    return get


def by_handle_again(given: Given) -> Get:
    """Files that are mapped already."""
    resolver = Resolver(given.root)
    return lambda: windows(given, resolver, None)


def windows(given: Given, resolver: Resolver, dtype: Any) -> list[Any]:
    found: list[Any] = []
    before = resolver.stats().bytes_copied
    for turns in given.messages:
        segments = [one for raw in turns for one in msgspec.json.decode(raw)["payload"]]
        hi = segments[-1]["pos"] + segments[-1]["rows"]
        found.append(resolver.window(segments, "routed_experts", 0, hi, dtype=dtype))
    given.copied += resolver.stats().bytes_copied - before
    return found


# --- inline


def inline(parse: Callable[[bytes], Any], decode: Callable[[str], bytes]) -> Callable[[Given], Get]:
    """base64 of the rows in JSON."""

    def make(given: Given) -> Get:
        def one(raw: bytes) -> Array:
            value = parse(raw)["routed_experts"]
            data = decode(value["data"])
            given.copied += len(value["data"]) + len(data)
            return np.frombuffer(data, value["dtype"]).reshape(value["shape"])

        return lambda: [joined(given, [one(raw) for raw in turns]) for turns in given.messages]

    return make


def orjson_loads(raw: bytes) -> Any:
    import orjson

    return orjson.loads(raw)


def simd(text: str) -> bytes:
    import pybase64

    return pybase64.b64decode(text)


def json_loads(raw: bytes) -> Any:
    return json.loads(raw)


def msgspec_json(raw: bytes) -> Any:
    return msgspec.json.decode(raw)


def b64decode(text: str) -> bytes:
    return base64.b64decode(text)


def msgpack_bytes(given: Given) -> Get:
    """Rows as a bytes object in msgpack."""

    def one(raw: bytes) -> Array:
        value = msgspec.msgpack.decode(raw)["routed_experts"]
        given.copied += len(value["data"])
        return np.frombuffer(value["data"], value["dtype"]).reshape(value["shape"])

    return lambda: [joined(given, [one(raw) for raw in turns]) for turns in given.messages]


# --- files


def upstream(given: Given) -> Get:
    """As prime-rl's reader: one pread a segment on 32 threads, bytes, frombuffer, widened to int32."""
    pool = ThreadPoolExecutor(32)

    def fetch(segment: Segment) -> tuple[Segment, bytes]:
        fd = os.open(segment.file, os.O_RDONLY)
        try:
            return segment, os.pread(fd, segment.rows * segment.row_nbytes, segment.offset)
        finally:
            os.close(fd)

    def get() -> list[Any]:
        found = []
        for turns in given.decoded():
            out = np.full((turns[-1].end, *turns[0].shape), 0, np.int32)
            for segment, data in pool.map(fetch, turns):
                given.copied += len(data) + 4 * len(data) // np.dtype(segment.dtype).itemsize
                out[segment.pos : segment.end] = rows_of(segment, data)
            found.append(out)
        return found

    return get


def npy(given: Given) -> Get:
    """np.load(mmap_mode="r") of .npy files."""

    def get() -> list[Any]:
        given.decoded()  # a message of the path alone would be shorter, not much
        return [
            joined(given, [np.load(path, mmap_mode="r") for path in turns]) for turns in given.twins
        ]

    return get


def memmap(given: Given) -> Get:
    """np.memmap of the rows in our files."""

    def one(segment: Segment) -> Array:
        shape = (segment.rows, *segment.shape)
        return np.memmap(segment.file, segment.dtype, "r", segment.offset, shape)

    return lambda: [joined(given, [one(s) for s in turns]) for turns in given.decoded()]


def safe(given: Given) -> Get:
    """safetensors' safe_open of our files."""
    from safetensors import safe_open

    def one(segment: Segment) -> Array:
        with safe_open(segment.file, "np") as file:
            tensor: Array = file.get_tensor(segment.field)
        given.copied += tensor.nbytes
        return tensor

    return lambda: [joined(given, [one(s) for s in turns]) for turns in given.decoded()]


# --- floors


def bare_map(given: Given) -> Get:
    """open, fstat, mmap, close and np.ndarray: no checks, no cache."""

    def one(segment: Segment) -> Array:
        fd = os.open(segment.file, os.O_RDONLY)
        mapped = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
        os.close(fd)
        shape = (segment.rows, *segment.shape)
        return np.ndarray(shape, np.dtype(segment.dtype), mapped, segment.offset)

    return lambda: [joined(given, [one(s) for s in turns]) for turns in given.rollouts]


def bare_preadv(given: Given) -> Get:
    """open, preadv and close into one array a rollout, one after the other."""

    def one(turns: list[Segment]) -> Array:
        out = np.empty((turns[-1].end, *turns[0].shape), turns[0].dtype)
        flat, at = out.reshape(-1).view(np.uint8).data, 0
        for segment in turns:
            nbytes = segment.rows * segment.row_nbytes
            fd = os.open(segment.file, os.O_RDONLY)
            os.preadv(fd, [flat[at : at + nbytes]], segment.offset)
            os.close(fd)
            at += nbytes
        given.copied += at
        return out

    return lambda: [one(turns) for turns in given.rollouts]


def memcpy(given: Given) -> Get:
    """A copy of rows that are in memory already."""
    sources = bare_preadv(given)()
    given.copied = 0

    def get() -> list[Any]:
        given.copied += sum(source.nbytes for source in sources)
        return [source.copy() for source in sources]

    return get


FIXED = (
    Way("by handle", "ours", by_handle, "handle"),
    Way("by handle, new resolver", "ours", by_handle_anew, "handle"),
    Way("by handle, mapped before", "ours", by_handle_again, "handle"),
    Way("by handle, mode=map", "ours", lambda given: by_handle(given, mode="map"), "handle"),
    Way("by handle, mode=copy", "ours", lambda given: by_handle(given, mode="copy"), "handle"),
    Way("by handle, int32", "ours", lambda given: by_handle(given, "field"), "handle", wide=True),
    Way("json, base64", "inline", inline(json_loads, b64decode), "json"),
    Way("orjson, base64", "inline", inline(orjson_loads, b64decode), "json", needs="orjson"),
    Way("msgspec, base64", "inline", inline(msgspec_json, b64decode), "json"),
    Way("msgspec, SIMD base64", "inline", inline(msgspec_json, simd), "json", needs="pybase64"),
    Way("msgpack bytes", "inline", msgpack_bytes, "msgpack"),
    Way("32 preads, widened", "file", upstream, "handle", wide=True),
    Way("np.load(mmap_mode)", "file", npy, "handle", twin=".npy"),
    Way("np.memmap", "file", memmap, "handle"),
    Way("safetensors safe_open", "file", safe, "handle", needs="safetensors"),
    Way("floor: map, np.ndarray", "floor", bare_map),
    Way("floor: preadv", "floor", bare_preadv),
    Way("floor: memcpy", "floor", memcpy),
)


# --- sampling masks: ragged rows


def mask_by_handle(*, padded: bool) -> Callable[[Given], Get]:
    """A trainer's resolver, and files it never saw."""

    def make(given: Given) -> Get:
        resolver = Resolver(given.root)
        read = resolver.window if padded else resolver.ragged
        files = [segment.file for turns in given.rollouts for segment in turns]

        def get() -> list[Any]:
            given.closing.append(lambda: resolver._files.drop(files))
            before = resolver.stats().bytes_copied
            found: list[Any] = []
            for [raw] in given.messages:
                segments = msgspec.json.decode(raw)["payload"]
                found.append(read(segments, "sampling_mask", 0, segments[-1]["rows"]))
            given.copied += resolver.stats().bytes_copied - before
            return found

        return get

    return make


def lists(parse: Callable[[bytes], Any]) -> Callable[[Given], Get]:
    """Lists of ids in JSON, as stock vLLM sends them."""

    def make(given: Given) -> Get:
        def one(raw: bytes) -> Ragged:
            rows = parse(raw)["sampling_mask"]
            counts = np.fromiter(map(len, rows), np.int64, len(rows))
            flat = np.fromiter((one for row in rows for one in row), np.int32, int(counts.sum()))
            given.copied += 2 * flat.nbytes
            return Ragged.from_counts(flat, counts)

        return lambda: [one(raw) for [raw] in given.messages]

    return make


def packed_mask(
    parse: Callable[[bytes], Any], decode: Callable[[Any], bytes]
) -> Callable[[Given], Get]:
    """Ids and counts, packed."""

    def make(given: Given) -> Get:
        def one(raw: bytes) -> Ragged:
            value = parse(raw)["sampling_mask"]
            ids, counts = (decode(value[key]["data"]) for key in ("ids", "counts"))
            given.copied += len(ids) + len(counts)
            return Ragged.from_counts(np.frombuffer(ids, np.int32), np.frombuffer(counts, np.int32))

        return lambda: [one(raw) for [raw] in given.messages]

    return make


def upstream_mask(given: Given) -> Get:
    """As prime-rl's reader: the table, then the values, then rows padded to the widest."""

    def one(segment: Segment) -> Array:
        fd = os.open(segment.file, os.O_RDONLY)
        try:
            table = np.frombuffer(os.pread(fd, 4 * (segment.rows + 1), segment.offset), np.uint32)
            data = os.pread(fd, int(table[-1] - table[0]), int(table[0]))
        finally:
            os.close(fd)
        counts = np.diff(table.astype(np.int64)) // 4
        out = np.full((segment.rows, max(1, int(counts.max()))), -1, np.int32)
        out[np.arange(out.shape[1]) < counts[:, None]] = np.frombuffer(data, np.int32)
        given.copied += len(data) + out.nbytes
        return out

    return lambda: [one(segment) for [segment] in given.decoded()]


def safe_mask(given: Given) -> Get:
    """safetensors' safe_open of our files: the table's byte offsets made row offsets."""
    from safetensors import safe_open

    def one(segment: Segment) -> Ragged:
        with safe_open(segment.file, "np") as file:
            table: Array = file.get_tensor("sampling_mask.offsets")
            values: Array = file.get_tensor("sampling_mask.values")
        given.copied += table.nbytes + values.nbytes
        return Ragged.from_counts(values, np.diff(table.astype(np.int64)) // 4)

    return lambda: [one(segment) for [segment] in given.decoded()]


def msgpack_mask(raw: bytes) -> Any:
    return msgspec.msgpack.decode(raw)


MASKS = (
    Way("by handle", "ours", mask_by_handle(padded=False), "handle"),
    Way("by handle, padded", "ours", mask_by_handle(padded=True), "handle", wide=True),
    Way("json, lists of ids", "inline", lists(json_loads), "lists"),
    Way("msgspec, lists of ids", "inline", lists(msgspec_json), "lists"),
    Way("orjson, lists of ids", "inline", lists(orjson_loads), "lists", needs="orjson"),
    Way(
        "msgspec, SIMD base64", "inline", packed_mask(msgspec_json, simd), "json", needs="pybase64"
    ),
    Way("msgpack bytes", "inline", packed_mask(msgpack_mask, bytes), "msgpack"),
    Way("pread, padded", "file", upstream_mask, "handle", wide=True),
    Way("safetensors safe_open", "file", safe_mask, "handle", needs="safetensors"),
)
