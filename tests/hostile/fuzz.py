"""Coverage-guided fuzzing: ``python fuzz.py SECONDS ROOT`` (needs atheris).

Any segment list over any file gives the right array or a PayloadError; the naive model says what is
right. A caller's own mistake is not drawn.
"""

import contextlib
import os
import sys

import atheris

with atheris.instrument_imports(include=["payload"]):
    import payload
    from payload.testing import model

import numpy as np

KNOWN = payload.FIELDS | {"mine": payload.Field()}
ROOT = ""
RUNS = 0
ARRAYS = 0


def number(data: atheris.FuzzedDataProvider, usual: int) -> int:
    """Mostly small, at times anything."""
    if data.ConsumeProbability() < 0.95:
        return data.ConsumeIntInRange(0, usual)
    return data.ConsumeInt(9)


def draw_segment(data: atheris.FuzzedDataProvider, size: int) -> payload.Segment:
    field = data.PickValueInList(
        ["routed_experts", "sampling_mask", "sampling_mask_logprobs", "mine"]
    )
    dtype = data.PickValueInList(
        ["uint8", "uint8", "uint16", "int32", "uint32", "float32", "bool", "float64"]
    )
    ragged = KNOWN[field].ragged
    if ragged and data.ConsumeBool():
        dtype, shape = "uint32", ()
    else:
        shape = tuple(number(data, 3) for _ in range(data.ConsumeIntInRange(0, 2)))
    return payload.Segment(
        field, f"{ROOT}/a.bin", number(data, size), number(data, 20), number(data, 6), dtype, shape
    )


def one_input(raw: bytes) -> None:
    global RUNS, ARRAYS
    RUNS += 1
    if RUNS % 5_000 == 0:
        print(f"{RUNS} inputs, {ARRAYS} arrays equal to the model's", flush=True)
    data = atheris.FuzzedDataProvider(raw)
    if data.ConsumeBool():  # descriptors as bytes from the network
        with contextlib.suppress(payload.PayloadError):
            payload.decode_segments(data.ConsumeBytes(data.remaining_bytes()))
        return
    segments = [draw_segment(data, 64) for _ in range(data.ConsumeIntInRange(1, 4))]
    field = segments[0].field
    lo = data.ConsumeIntInRange(0, 20)
    hi = lo + data.ConsumeIntInRange(0, 8)
    mode = data.PickValueInList(["map", "copy"])
    content = data.ConsumeBytes(data.remaining_bytes())
    path = f"{ROOT}/a.bin"
    with open(path, "wb") as file:
        file.write(content)
    with payload.Resolver(ROOT, mode=mode, fields=KNOWN, max_bytes=1 << 24) as resolver:
        fill = KNOWN[field].fill or 0
        try:
            got = resolver.window(segments, field, lo, hi, fill=fill, holes="any")
        except payload.PayloadError:
            got = None
        if got is not None:
            ARRAYS += 1
            with np.errstate(all="ignore"):
                want = model.window(
                    {path: content}, segments, field, lo, hi, fill=fill, fields=KNOWN
                )
            if (
                got.dtype != want.dtype
                or got.shape != want.shape
                or got.tobytes() != want.tobytes()
            ):
                raise AssertionError(f"{segments}: {got!r} instead of {want!r}")
        for call in (
            lambda: resolver.resolve(segments),
            lambda: resolver.ragged(segments, field, lo, hi),
            lambda: resolver.window(
                segments, field, lo, hi, fill=fill, holes="any", dtype="float64"
            ),
        ):
            with contextlib.suppress(payload.PayloadError):
                call()


def main() -> None:
    global ROOT
    seconds, ROOT = sys.argv[1:3]
    corpus = f"{ROOT}/corpus"
    os.makedirs(corpus)
    atheris.Setup(
        [
            sys.argv[0],
            f"-max_total_time={seconds}",
            "-seed=1",  # what is found can be found again
            "-max_len=512",
            "-timeout=20",
            f"-artifact_prefix={ROOT}/",
            corpus,
        ],
        one_input,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
