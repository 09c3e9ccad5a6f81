"""What processes of a test do: the product, called by name. Answers are JSON."""

import asyncio
import contextlib
import mmap
import os
import random
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import numpy as np
import xxhash

import payload.writer
from client import generate
from payload import PayloadError, Ragged, Resolver, Writer, encode_segments, sweep
from payload.testing.server import Completion, app

Array = np.ndarray[Any, Any]
HELD: dict[str, Any] = {}  # by this process, from one call to the next


def call(name: str, arguments: dict[str, Any], mount: str | None = None) -> dict[str, Any]:
    """Call a function of this module; with `mount` count the requests it sends there."""
    before = requests(mount) if mount else {}
    began = time.monotonic()
    answer: dict[str, Any] = {}
    try:
        with _as_user():
            answer["value"] = globals()[name](**arguments)
    except PayloadError as error:
        answer |= {"error": type(error).__name__, "reason": error.reason, "message": str(error)}
    except BaseException:
        answer["fault"] = traceback.format_exc()
    answer["seconds"] = time.monotonic() - began
    answer["at"] = time.time()
    if mount:
        after = requests(mount)
        answer["requests"] = {op: n - before[op] for op, n in after.items() if n != before[op]}
    return answer


def requests(mount: str) -> dict[str, int]:
    """Requests sent so far for a mount, by operation, as the kernel counts them."""
    counts, mine, listed = {}, False, False
    with open("/proc/self/mountstats") as file:
        for line in file:
            if line.startswith("device "):
                mine, listed = f" mounted on {mount} with " in line, False
            elif mine and "per-op statistics" in line:
                listed = True
            elif mine and listed and ":" in line:
                op, _, numbers = line.partition(":")
                counts[op.strip()] = int(numbers.split()[0])
    return counts


def run(code: str) -> Any:
    """Run statements; what they assign to `answer` is returned."""
    names: dict[str, Any] = dict(globals())
    exec(code, names)
    return names.get("answer")


def bench(root: str) -> dict[str, tuple[bool, int]]:
    """Take every way to the arrays of a small rollout as ``python -m bench`` does, with a cold cache.

    Whether the cache was cold, and how often a time was taken; it ends if an array differs.
    """
    from bench.one import Task, timed
    from bench.scenarios import Scenario, lay

    laid = lay(Scenario("nfs", "", 1, 2, 2_000), root, inline=False)
    found = {}
    for way in laid.scenario.ways:
        if way.kind != "inline" and way.name not in ("by handle, mapped before", "floor: memcpy"):
            one = timed(laid, way, Task("time", 3, 0.1, cold=True))
            found[way.name] = bool(one.evicted), len(one.get)
    return found


# --- arrays both sides can make


def rows(seed: int, count: int, shape: tuple[int, ...] = (48, 8), dtype: str = "uint8") -> Array:
    made = np.random.default_rng(seed).integers(1, 256, (count, *shape), np.uint8)
    return made.astype(dtype)


def lists(seed: int, count: int) -> Ragged:
    chance = random.Random(seed)
    return Ragged.from_lists(
        [[chance.randrange(1, 150_000) for _ in range(chance.randrange(5))] for _ in range(count)]
    )


def digest(array: Array | Ragged | None) -> Any:
    """Dtype, shape and hash of every byte."""
    if array is None:
        return None
    if isinstance(array, Ragged):
        return [digest(array.offsets - array.offsets[0]), digest(array.values)]
    array = np.ascontiguousarray(array)
    return [array.dtype.name, list(array.shape), xxhash.xxh3_64_hexdigest(array)]


# --- the inference side


def write(
    root: str,
    seed: int,
    count: int,
    pos: int = 0,
    mask: bool = False,
    payload_dir: str | None = None,
    **options: Any,
) -> list[Any]:
    """Write rows (and masks) that their seed tells; return the segments."""
    arrays: dict[str, Any] = {"routed_experts": (pos, rows(seed, count))}
    if mask:
        arrays["sampling_mask"] = (pos, lists(seed, count))
    return encode_segments(Writer(root, **options).write(arrays, payload_dir=payload_dir), "array")


def write_many(
    root: str, seed: int, files: int, count: int, pos: int = 0, **more: Any
) -> list[list[Any]]:
    return [write(root, seed + i, count, pos=pos + i * count, **more)[0] for i in range(files)]


def write_later(root: str, name: str, seed: int, count: int, after: float) -> float:
    """Write a file under a name that is known before; return when its name was there."""
    time.sleep(after)
    there: list[float] = []
    rename = os.rename

    def renamed(*args: Any, **kwargs: Any) -> None:
        rename(*args, **kwargs)
        there.append(time.time())

    uuid4 = payload.writer.uuid.uuid4
    payload.writer.uuid.uuid4 = lambda: uuid.UUID(hex=name)
    os.rename = renamed
    try:
        write(root, seed, count)
    finally:
        os.rename, payload.writer.uuid.uuid4 = rename, uuid4
    return there[0]


def serve(root: str, host: str, count: int, prefix: str | None = None) -> int:
    """Serve the test double on a thread; completions are told by the prompt's first token."""
    import uvicorn

    def replay(request: dict[str, Any]) -> list[Completion]:
        prompt = request["token_ids"]
        seed, first = prompt[0], len(prompt)
        arrays: dict[str, tuple[int, Any]] = {
            "routed_experts": (0, rows(seed, first + count - 1)),
            "sampling_mask": (first, lists(seed, count)),
        }
        return [Completion(token_ids=list(range(count)), arrays=arrays)]

    config = uvicorn.Config(
        app(replay, Writer(root, prefix=prefix)), host=host, port=0, log_level="warning", ws="none"
    )
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return int(server.servers[0].sockets[0].getsockname()[1])


def remove_before(root: str, keep_from: int) -> dict[str, Any]:
    report = sweep(root, keep_from=keep_from)
    return {"removed": report.removed, "pending": report.pending, "errors": report.errors}


# --- the trainer side


def resolver(roots: Any, **options: Any) -> None:
    HELD["resolver"] = Resolver(roots, **options)


def view(segments: list[Any], touch: bool = True) -> list[Any] | None:
    """View segments, hold the views, and with `touch` read them."""
    HELD["views"] = [HELD["resolver"].view(segment) for segment in _decoded(segments)]
    return look() if touch else None


def look() -> list[Any]:
    """Read the views held."""
    return [digest(one) for one in HELD["views"]]


def resolve(segments: list[Any]) -> dict[str, list[Any]]:
    found = HELD["resolver"].resolve(segments)
    HELD["views"] = [one for several in found.values() for one in several]
    return {field: [digest(one) for one in several] for field, several in found.items()}


def window(segments: list[Any], field: str, lo: int, hi: int, **more: Any) -> Any:
    return digest(HELD["resolver"].window(segments, field, lo, hi, **more))


def read_into(segments: list[Any], field: str, lo: int, hi: int, shape: list[int]) -> Any:
    out = np.full(shape, 255, np.uint8)
    return digest(HELD["resolver"].read_into(segments, field, lo, hi, out))


def ragged(segments: list[Any], field: str, lo: int, hi: int) -> Any:
    return digest(HELD["resolver"].ragged(segments, field, lo, hi))


def beside(blocked: list[Any], segments: list[Any], seconds: float) -> dict[str, Any]:
    """View `segments` over and over for a while, as another thread views what blocks."""
    resolver = HELD["resolver"]
    other = threading.Thread(target=lambda: resolver.view(_decoded(blocked)[0]), daemon=True)
    other.start()
    end, reads, found = time.monotonic() + seconds, 0, []
    while time.monotonic() < end:
        found = [
            digest(resolver.window([one], one.field, 0, one.rows)) for one in _decoded(segments)
        ]
        reads += 1
        time.sleep(0.05)
    return {"reads": reads, "rows": found, "still_blocked": other.is_alive()}


def stats() -> dict[str, Any]:
    found = HELD["resolver"].stats()
    return {name: getattr(found, name) for name in found.__struct_fields__}


def ask(url: str, model: str, prompt_ids: list[int], payload_dir: str) -> dict[str, Any]:
    """Generate over HTTP; return what came with it and how large the body was."""
    sizes: list[int] = []

    async def keep(response: httpx2.Response) -> None:
        sizes.append(len(await response.aread()))

    async def go() -> dict[str, Any]:
        hooks = {"response": [keep]}
        async with httpx2.AsyncClient(base_url=url, timeout=30, event_hooks=hooks) as http:
            return await generate(
                client=http,
                model=model,
                prompt_ids=prompt_ids,
                sampling_params={"extra_args": {"payload_dir": payload_dir}},
            )

    result = asyncio.run(go())
    return {
        "payload": result["payload"],
        "completion_ids": result["completion_ids"],
        "body": sizes[-1],
    }


def _decoded(segments: list[Any]) -> list[Any]:
    return payload.decode_segments(segments)


# --- rivals, for the table of requests


def page_faults(path: str, offset: int, nbytes: int) -> list[Any]:
    """Map and touch."""
    fd = os.open(path, os.O_RDONLY)
    mapped = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    os.close(fd)
    return digest(np.frombuffer(mapped, np.uint8, nbytes, offset))


def pread_and_widen(reads: list[tuple[str, int, int]]) -> list[list[Any]]:
    """One pread a segment on 32 threads, widened to int32: the reader trainers have today."""
    from concurrent.futures import ThreadPoolExecutor

    def one(read: tuple[str, int, int]) -> Array:
        path, offset, nbytes = read
        fd = os.open(path, os.O_RDONLY)
        try:
            data = os.pread(fd, nbytes, offset)
        finally:
            os.close(fd)
        return np.frombuffer(data, np.uint8).astype(np.int32)

    with ThreadPoolExecutor(32) as pool:
        return [digest(array) for array in pool.map(one, reads)]


# --- what others do to the files


def rewrite(path: str, content: bytes | None = None, *, seed: int = 0) -> None:
    """Write new bytes over a file, in place and of the same size."""
    size = os.stat(path).st_size
    with open(path, "r+b") as file:
        file.write(np.random.default_rng(seed).integers(1, 256, size, np.uint8).tobytes())


def drop_caches() -> None:
    with open("/proc/sys/vm/drop_caches", "w") as file:
        file.write("3\n")


def watch(directory: str, files: int, nbytes: int, timeout: float) -> dict[str, Any]:
    """Look at every name that shows in a directory until `files` are published."""
    seen: dict[str, int] = {}
    temporary: set[str] = set()
    looks = 0
    deadline = time.monotonic() + timeout
    while len(seen) < files and time.monotonic() < deadline:
        looks += 1
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(directory):
                if name.startswith("."):
                    temporary.add(name)
                elif name not in seen:
                    with open(f"{directory}/{name}", "rb") as file:
                        seen[name] = os.fstat(file.fileno()).st_size
                        filled = np.frombuffer(file.read(), np.uint8)[512:].all()
                    assert seen[name] == nbytes, f"{name} has {seen[name]} bytes at first sight"
                    assert filled, f"{name} has zeros at first sight"
    return {"seen": sorted(seen), "temporary": sorted(temporary), "looks": looks}


def nothing() -> None:
    """For its answer's time."""


def as_user(user: int) -> None:
    """Make later calls as another user."""
    HELD["user"] = user


@contextlib.contextmanager
def _as_user() -> Iterator[None]:
    user = HELD.get("user")
    if user is None:
        yield
        return
    os.setegid(user)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


# --- a run at scale: messages go through a directory beside the file system under test


def infer(root: str, queue: str, seed: int, trainers: int) -> dict[str, int]:
    """Write responses for the version that is now, and send their segments, until told to stop."""
    writer, chance, sent, nbytes = Writer(root), random.Random(seed), 0, 0
    while (now := _now(queue)) is not None:
        seed += 1
        count = chance.randrange(50, 800)
        arrays: dict[str, Any] = {
            "routed_experts": (0, rows(seed, count)),
            "sampling_mask": (count // 2, lists(seed, count - count // 2)),
        }
        path = f"{queue}/{seed % trainers}/v{now}-{seed}"
        with open(path + ".part", "wb") as file:  # its version is not swept from now on
            segments = writer.write(arrays, payload_dir=f"{root}/v{now}")
            message = [seed, count, encode_segments(segments, "array")]
            file.write(msgspec.json.encode(message))
        os.rename(path + ".part", path + ".json")
        sent += 1
        nbytes += sum(one.nbytes or 0 for one in segments)
        while len(os.listdir(f"{queue}/{seed % trainers}")) > 20 and _now(queue) is not None:
            time.sleep(0.05)  # trainers are behind
    return {"sent": sent, "bytes": nbytes}


def train(roots: Any, queue: str, me: int, batch: int) -> dict[str, Any]:
    """Read what is sent, as views and as windows, and compare every byte, until all is read."""
    read, wrong = 0, []
    with Resolver(roots) as resolver:
        while True:
            last = _now(queue) is None
            names = [n for n in sorted(os.listdir(f"{queue}/{me}")) if n.endswith(".json")][:batch]
            for name in names:
                with open(f"{queue}/{me}/{name}", "rb") as file:
                    seed, count, segments = msgspec.json.decode(file.read())
                want, mask = rows(seed, count), lists(seed, count - count // 2)
                try:
                    found = resolver.resolve(segments)
                    half = resolver.window(segments, "routed_experts", 0, count // 2)
                    masks = resolver.ragged(segments, "sampling_mask", count // 2, count)
                    right = (
                        (found["routed_experts"][0] == want).all()
                        and (half == want[: count // 2]).all()
                        and digest(found["sampling_mask"][0]) == digest(mask) == digest(masks)
                    )
                except PayloadError as error:
                    wrong.append(f"{name}: {error}")
                else:
                    if not right:
                        wrong.append(f"{name}: other rows")
                read += 1
                os.unlink(f"{queue}/{me}/{name}")  # from now on its version may go
            if not names:
                if last and not os.path.exists(f"{queue}/writing"):
                    break
                time.sleep(0.02)
        stats = {n: getattr(resolver.stats(), n) for n in ("opens", "maps", "reads", "waits")}
    return {"read": read, "wrong": wrong[:5], **stats}


def _now(queue: str) -> int | None:
    """The version that is trained now; None at the end."""
    for name in os.listdir(queue):
        if name.startswith("now-"):
            return int(name[4:])
    return None
