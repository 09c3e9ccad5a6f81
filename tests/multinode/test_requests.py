"""Requests a trainer's node sends, as its kernel counts them in /proc/self/mountstats."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.multinode import jobs
from tests.multinode.cluster import Answer, Place, Process, rows
from tests.multinode.conftest import Cluster

pytestmark = [pytest.mark.multinode, pytest.mark.slow]

FIELD = "routed_experts"
BIG = (40 << 20) // 384 + 1  # rows of 40 MiB
SMALL, FEW = 640, 64  # files, and their rows: 24 KB each
COUNTED = ("OPEN", "LOOKUP", "ACCESS", "GETATTR", "READ", "CLOSE")


def opens(answer: Answer) -> int:
    return sum(answer.requests.get(name, 0) for name in ("OPEN", "OPEN_NOATTR"))


def show(what: str, answer: Answer) -> None:
    counts = {name: answer.requests.get(name, 0) for name in COUNTED} | {"OPEN": opens(answer)}
    print(f"{what:44} {answer.seconds:7.2f} s  {counts}")


def drop_caches(place: Place, *holding: Process) -> None:
    """Make the trainer's node cold; what processes have mapped would stay."""
    for process in holding:
        process.end()
    process = place.trainer.start()
    process.ask("drop_caches")
    process.end()


def local(place: Place, segments: list[Any]) -> list[tuple[str, int, int]]:
    """Files on the trainer's node, with the first byte and the bytes of each segment."""
    return [
        (place.seen + path[len(place.root) :], offset, 384 * count)
        for _, path, offset, _, count, *_ in segments
    ]


@pytest.mark.parametrize("mount", ["v4", "v3"])
def test_a_cold_segment_of_40_mib_costs_one_open_and_48_reads_and_its_first_touch_none(
    mount: str, on: Callable[..., Place]
) -> None:
    place = on(mount)
    big = place.writer().ask("write", root=place.root, seed=1, count=BIG)
    want = [rows(1, BIG)]
    counted = {"mount": place.mount}
    print()
    reader = place.reader()
    cold = reader.tell("view", **counted, segments=big, touch=False)
    show(f"{mount}: view of 40 MiB, cold", cold)
    assert cold.requests["READ"] <= 48
    assert opens(cold) == (1 if mount == "v4" else 0)  # NFSv3 has no such request
    touched = reader.tell("look", **counted)
    show(f"{mount}: its first touch", touched)
    touched.right(want)
    assert touched.requests == {}
    again = reader.tell("view", **counted, segments=big)
    show(f"{mount}: the same view again", again)
    if mount == "v4":
        assert again.requests == {}
    assert "READ" not in again.requests
    other = place.reader()
    second = other.tell("view", **counted, segments=big)
    show(f"{mount}: a second resolver on the node", second)
    second.right(want)
    assert "READ" not in second.requests
    if mount == "v4":
        # Of the file one of either; the rest are its two directories, opened for the first time.
        assert opens(second) <= 1
        assert opens(second) + second.requests.get("GETATTR", 0) <= 1 + 2
    drop_caches(place, reader, other)
    [(path, offset, nbytes)] = local(place, big)
    faulting = place.trainer.start()
    faults = faulting.tell("page_faults", **counted, path=path, offset=offset, nbytes=nbytes)
    show(f"{mount}: mapped and touched", faults)
    faults.right(jobs.digest(jobs.rows(1, BIG).reshape(-1)))
    assert faults.requests["READ"] > 4 * cold.requests["READ"]
    drop_caches(place, faulting)
    pread = place.trainer.start().tell("pread_and_widen", **counted, reads=local(place, big))
    show(f"{mount}: pread and widen", pread)
    pread.right([jobs.digest(jobs.rows(1, BIG).reshape(-1).astype("int32"))])


@pytest.fixture
def far(cluster: Cluster) -> Iterator[None]:
    """2 ms to the server, so that requests meet in flight."""
    tc = ["tc", "qdisc", "{}", "dev", "eth0", "root", "netem", "delay", "2ms"]
    done = cluster.lab.run("trainer", [word.format("add") for word in tc])
    assert done.rc == 0, done.err
    yield
    done = cluster.lab.run("trainer", [word.format("del") for word in tc])
    assert done.rc == 0, done.err


# Counts how many threads are inside a read at once.
COUNT = """
import threading
lock, preadv = threading.Lock(), os.preadv
HELD['now'] = HELD['most'] = 0
def counted(*args):
    with lock:
        HELD['now'] += 1
        HELD['most'] = max(HELD['most'], HELD['now'])
    try:
        return preadv(*args)
    finally:
        with lock:
            HELD['now'] -= 1
os.preadv = counted
"""


@pytest.mark.parametrize("mount", ["v4", "v3"])
def test_640_small_files_cost_one_open_and_one_read_each_with_32_in_flight(
    mount: str, on: Callable[..., Place], far: None
) -> None:
    place = on(mount)
    writing = [
        place.writer().begin(
            "write_many", root=place.root, seed=1 + at, files=SMALL // 8, count=FEW, pos=at * FEW
        )
        for at in range(0, SMALL, SMALL // 8)
    ]
    small = [segment for one in writing for segment in one.wait().value]
    whole = jobs.np.concatenate([jobs.rows(1 + i, FEW) for i in range(SMALL)])
    window = {"segments": small, "field": FIELD, "lo": 0, "hi": SMALL * FEW}
    want = {
        "window": jobs.digest(whole),
        "resolve": {FIELD: [rows(1 + i, FEW) for i in range(SMALL)]},
    }
    print()
    for call, arguments in (("window", window), ("resolve", {"segments": small})):
        reader, second = place.reader(), place.reader()
        drop_caches(place)
        reader.ask("run", code=COUNT)
        cold = reader.tell(call, mount=place.mount, **arguments)
        show(f"{mount}: {call} of 640 files, cold, 2 ms away", cold)
        cold.right(want[call])
        assert cold.requests["READ"] == SMALL
        assert opens(cold) == (SMALL if mount == "v4" else 0)
        most = reader.ask("run", code="answer = HELD['most']")
        print(f"{most} reads were in flight")
        assert 16 <= most <= 32
        warm = second.tell(call, mount=place.mount, **arguments)
        show(f"{mount}: {call} of a second resolver on the node", warm)
        warm.right(want[call])
        assert "READ" not in warm.requests
        if mount == "v4":
            # One of either a file. The rest are its two directories, which threads open at once.
            assert opens(warm) + warm.requests.get("GETATTR", 0) <= SMALL + 2 * 32
        drop_caches(place, reader, second)
    pread = place.trainer.start().tell(
        "pread_and_widen", mount=place.mount, reads=local(place, small)
    )
    show(f"{mount}: pread and widen on 32 threads, cold", pread)


@pytest.mark.parametrize("mount", ["v4", "v3"])
def test_a_look_for_a_late_name_costs_a_few_requests(mount: str, on: Callable[..., Place]) -> None:
    """Plain open, retried, asks nobody: it is answered from the cache of names for seconds."""
    place = on(mount)
    [known] = place.writer().ask("write", root=place.root, seed=1, count=FEW)
    name = "0" * 32
    late = [*known]
    late[1] = f"{place.root}/v0/{name}.safetensors"
    reader = place.reader(wait=20)
    reader.tell("view", segments=[known]).right([rows(1, FEW)])
    plain = place.trainer.start()
    path = place.seen + late[1][len(place.root) :]
    assert plain.ask("run", code=f"answer = os.path.exists({path!r})") is False
    looking = reader.begin("view", segments=[late], mount=place.mount)
    assert not looking.done()
    place.writer().ask("write_later", root=place.root, name=name, seed=2, count=FEW, after=1.0)
    answer = looking.wait()
    answer.right([rows(2, FEW)])
    looks = reader.ask("stats")["waits"]
    print(f"\n{mount}: {looks} looks, {answer.requests}")
    assert sum(answer.requests.values()) <= 6 * looks + 20


def test_a_plain_open_keeps_missing_a_name_that_the_resolver_sees(on: Callable[..., Place]) -> None:
    """The scenario is real: the same name, at the same time, on the same node."""
    place = on("v4")
    [known] = place.writer().ask("write", root=place.root, seed=1, count=FEW)
    name = "1" * 32
    path = f"{place.seen}/v0/{name}.safetensors"
    plain, reader = place.trainer.start(), place.reader()
    assert plain.ask("run", code=f"answer = os.path.exists({path!r})") is False
    place.writer().ask("write_later", root=place.root, name=name, seed=3, count=FEW, after=0)
    retry = f"""
end, answer = time.monotonic() + 1, False
while time.monotonic() < end and not answer:
    try:
        os.close(os.open({path!r}, os.O_RDONLY))
        answer = True
    except FileNotFoundError:
        time.sleep(0.02)
"""
    assert plain.ask("run", code=retry) is False
    late = [*known]
    late[1] = f"{place.root}/v0/{name}.safetensors"
    answer = reader.tell("view", segments=[late])
    answer.right([rows(3, FEW)])
    print(
        f"\nplain open missed it for 1 s, the resolver saw it after {1e3 * answer.seconds:.1f} ms"
    )


# A file comes in the tick in which the directory changed, and then nothing changes any more.
SAME_TICK = """
import shutil
shutil.copy(f'{root}/v0/KNOWN', f'{root}/v0/.late')
end = time.monotonic() + 0.1
while time.monotonic() < end:
    open(f'{root}/v0/.scratch', 'w').close()
    os.unlink(f'{root}/v0/.scratch')
os.rename(f'{root}/v0/.late', f'{root}/v0/LATE')
answer = None
"""


@pytest.mark.parametrize("mount", ["v4", "v3"])
def test_a_name_that_came_in_the_tick_of_a_look_is_not_missing_for_good(
    mount: str, on: Callable[[str], Place]
) -> None:
    """To an NFSv3 client the directory is unchanged then, however often it asks: it has to list."""
    place = on(mount)
    [known] = place.writer().ask("write", root=place.root, seed=1, count=FEW)
    reader = place.reader(wait=3)
    times = []
    for i in range(20):
        name = f"{i:032x}.safetensors"
        late = [*known]
        late[1] = f"{place.root}/v0/{name}"
        looking = reader.begin("view", segments=[late])
        place.meddle(SAME_TICK.replace("KNOWN", known[1].rpartition("/")[2]).replace("LATE", name))
        answer = looking.wait()
        answer.right([rows(1, FEW)])
        times.append(answer.seconds)
    print(f"\n{mount}: calls took up to {max(times):.2f} s, the name came after about 0.1 s")
    assert max(times) < 1.5
