"""Random malformed descriptors against every entry point: ``python malformed.py COUNT SEED ROOT``.

Each descriptor has at least one thing wrong with it, so each call must raise a `PayloadError`; anything
else ends the process with a trace. Prints how many there were and which reasons they met. Run under
strace, with a marker file opened first, nothing outside ROOT may be opened.
"""

# payload imports the first and third when it first needs them: not to be taken for files that a
# descriptor made it open.
import concurrent.futures.thread  # noqa: F401
import json
import logging  # noqa: F401
import os
import random
import sys
from collections import Counter
from typing import Any

import msgspec

from payload import PayloadError, Resolver, Segment, Writer, clip, decode_segments, encode_segments

import numpy as np  # isort: skip

HUGE = (2**63, 2**64, 10**26, 10**400, -1, -8, -(2**63), -(2**70))
NOT_INTEGERS = (None, True, False, 1.0, 0.5, float("nan"), "1", b"1", [1], {"a": 1})
NOT_TEXT = (None, True, 7, 1.5, b"x", ["x"], {"x": 1})
DTYPES = ("", "O", "V8", "|O8", "<u2", ">u2", "uint8 ", "UINT8", "U2", "float", "S1000000000", "u1,O", "M8[ns]",
          "2000000000u1", "int", "object", "uint128", "\0", "uint8\0", "ü")  # fmt: skip
SHAPES = ((-1, 4), (2**32, 2**32), (2**63,), (0, 2**40, 2**40), (1.0,), (True,), ("2",), ([2],), (None,),
          (1,) * 65, (1,) * 32, (-(2**63),), (10**30, 0))  # fmt: skip


def path(draw: random.Random, root: str) -> str:
    return draw.choice([
        "/etc/passwd", "/", "", ".", "..", "a", "relative/a", f"{root}", f"{root}/", f"{root}/../etc/passwd",
        f"{root}//a", f"{root}/./a", f"{root}/a/..", f"{root}x/a", f"{root}/a\0b", f"/{root}/a", f"{root}/.hidden",
        f"{root}/v1/.a.safetensors.tmp", "/proc/self/environ", "/dev/zero", f"{root}/" + "a" * 5000,
        f"{root}/" + "a/" * 3000 + "a", f"{root}/\udc80", f"{root}/missing", f"{root}/v9/missing",
        f"{root}/fifo", f"{root}/link", f"{root}/linked/passwd", f"{root}/v1", f"{root}/loop/a",
        f"{root}/" + "n" * 255 + "/a", f"{root}/" + "n" * 256, f"{os.path.dirname(root)}/outside/passwd", f"{root}/../outside/passwd",
    ])  # fmt: skip


def malformed(draw: random.Random, good: list[Any], root: str) -> Any:
    """A legal descriptor with one to three things wrong with it, in one of the wire forms."""
    field, file, offset, pos, rows, dtype, shape = good
    one: dict[str, Any] = {
        "field": field, "file": file, "offset": offset, "pos": pos, "rows": rows, "dtype": dtype,
        "shape": list(shape), "length": None,
    }  # fmt: skip
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        key = draw.choice(
            ("field", "file", "offset", "pos", "rows", "dtype", "shape", "length", "past")
        )
        if key == "field":
            one["field"] = draw.choice(NOT_TEXT)
        elif key == "file":
            one["file"] = draw.choice(NOT_TEXT) if draw.random() < 0.2 else path(draw, root)
        elif key in ("offset", "pos", "rows"):
            wrong = draw.choice(HUGE) if draw.random() < 0.6 else draw.choice(NOT_INTEGERS)
            one[key] = wrong
        elif key == "dtype":
            one["dtype"] = draw.choice(DTYPES) if draw.random() < 0.8 else draw.choice(NOT_TEXT)
        elif key == "shape":
            one["shape"] = draw.choice((None, 7, "23", {"2": 3}, *map(list, SHAPES)))
        elif key == "length":
            one["length"] = draw.choice(
                (*HUGE, True, 1.5, "1", [1], rows * 7 + 1 if type(rows) is int else 1)
            )
        else:  # legal in itself, but past the end of its file
            one["offset"] = draw.randrange(2**20, 2**62)
    form = draw.randrange(4)
    if form == 0:
        return one
    if form == 1:
        return list(one.values())
    if form == 2:
        values = list(one.values())
        if isinstance(values[6], list):
            values[6] = tuple(values[6])
        return Segment(*values)
    del one[draw.choice(("field", "file", "offset", "pos", "rows", "dtype", "shape"))]
    return one if draw.random() < 0.5 else list(one.values())[:6]


def encodable(item: Any) -> Any:
    """Bytes of a payload with this descriptor, as JSON or msgpack; the object if neither takes it."""
    for encode in (msgspec.json.encode, msgspec.msgpack.encode):
        try:
            return encode([item])
        except (TypeError, ValueError, OverflowError, RecursionError, UnicodeEncodeError):
            continue
    return [item]


def main(count: int, seed: int, root: str) -> None:
    draw = random.Random(seed)
    os.makedirs(f"{root}/v1")
    os.mkfifo(f"{root}/fifo")
    outside = f"{os.path.dirname(root)}/outside"
    os.symlink(f"{outside}/passwd", f"{root}/link")
    os.symlink(outside, f"{root}/linked")
    os.symlink("loop", f"{root}/loop")
    rows = np.arange(60, dtype=np.uint8).reshape(5, 4, 3)
    [segment] = Writer(root).write({"routed_experts": (2, rows)}, "v1")
    good = encode_segments([segment], "array")[0]
    met: Counter[str] = Counter()
    with Resolver(root, mode="auto") as resolver:
        np.testing.assert_array_equal(resolver.view(segment), rows)
        calls = (
            lambda item: resolver.resolve([item]),
            lambda wire: resolver.resolve(wire),
            lambda item: resolver.window(
                [segment, item], "routed_experts", 0, 9, fill=0, holes="any"
            ),
            lambda item: resolver.view(item),
            lambda item: resolver.prefetch([item]) or resolver.resolve([item]),
            lambda item: encode_segments(clip([item], 0, 4)) and resolver.resolve([item]),
        )
        sys.stderr.flush()
        open(f"{root}/marker", "w").close()
        for number in range(count):
            item = malformed(draw, good, root)
            call = calls[number % len(calls)]
            if number % len(calls) == 1:
                item = encodable(item)
            try:
                call(item)
            except PayloadError as error:
                met[error.reason] += 1
                if not str(error) or len(str(error)) > 12_000:
                    raise AssertionError(f"message of {len(str(error))} characters") from error
            else:
                try:  # was it after all legal, and of another field or not read by this call?
                    decode_segments(item if number % len(calls) == 1 else [item])
                except PayloadError:
                    raise AssertionError(f"taken by call {number % len(calls)}: {item!r}") from None
                met["of no interest to the call"] += 1
        np.testing.assert_array_equal(resolver.view(segment), rows)
        stats = resolver.stats()
    print(
        json.dumps(
            {"descriptors": count, "met": dict(met.most_common()), "live_maps": stats.live_maps}
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
