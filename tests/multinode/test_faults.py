"""Faults that only a server or a client of its own has: power cuts, squashed users, dropped caches."""

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.multinode import jobs
from tests.multinode.cluster import Place, Process, rows
from tests.multinode.conftest import ALL_SQUASH, ROOT_SQUASH, Cluster

pytestmark = [pytest.mark.multinode, pytest.mark.slow]

FIELD = "routed_experts"
COUNT = 500
WAIT = 0.5
# A boot, and the grace period in which clients reclaim what they had open.
RECOVERY = 60

# Each read takes a little, so that something can happen in the middle of many.
SLOWLY = """
def slowly(*args, preadv=os.preadv):
    time.sleep(0.02)
    return preadv(*args)
os.preadv = slowly
"""


def name_of(segment: list[Any]) -> str:
    return segment[1].rpartition("/")[2]


@pytest.fixture
def powered(cluster: Cluster) -> Iterator[Cluster]:
    """Power that is back after the test, however it ends."""
    yield cluster
    if not cluster.lab.alive("server"):
        cluster.power_up()


def test_a_power_cut_in_the_middle_of_a_batch_blocks_and_then_all_is_right(
    powered: Cluster, on: Callable[..., Place]
) -> None:
    """A hard mount blocks in the kernel, beyond `wait`; other files' reads go on."""
    places = {mount: on(mount) for mount in ("v4", "v3")}
    files, batches, pending, blocked, readers = 200, {}, {}, {}, {}
    want = jobs.digest(jobs.np.concatenate([jobs.rows(1 + i, 64) for i in range(files)]))
    for mount, place in places.items():
        written = place.writer().ask("write_many", root=place.root, seed=1, files=files, count=64)
        window = {"segments": written, "field": FIELD, "lo": 0, "hi": 64 * files}
        reader = place.reader(wait=1.0)
        reader.ask("run", code=SLOWLY.replace("0.02", "0.2"))
        # One resolver with a root of this node besides, read by another thread while one blocks.
        both = place.trainer.start()
        both.ask("run", code="os.makedirs('/run/tmp/local', exist_ok=True)")
        mine = both.ask("write", root="/run/tmp/local", seed=7, count=COUNT)
        both.ask("resolver", roots=[place.seen, "/run/tmp/local"], wait=1.0)
        readers[mount] = both, mine, written
        batches[mount] = reader, window
    for mount, (reader, window) in batches.items():
        pending[mount] = reader.begin("window", **window)
    time.sleep(0.5)
    assert not any(one.done() for one in pending.values()), "the batch was over too early"
    powered.cut_power()
    down = time.monotonic()
    for mount, place in places.items():
        both, mine, written = readers[mount]
        blocked[mount] = place.writer().begin("write", root=place.root, seed=900, count=COUNT)
        answer = both.tell(
            "beside",
            blocked=[name_of_place(place, written[-1])],
            segments=mine,
            seconds=2.5,
        )
        assert answer.value["still_blocked"], "nothing blocked: the server was not down"
        assert answer.value["rows"] == [rows(7, COUNT)]
        print(f"\n{mount}: {answer.value['reads']} reads of another root while one blocked")
        assert answer.value["reads"] >= 10
    assert not any(one.done() for one in blocked.values())
    powered.power_up()
    for mount, place in places.items():
        pending[mount].wait(RECOVERY).right(want)
        answer = blocked[mount].wait(RECOVERY)
        assert answer.error is None, answer.message
        place.reader().tell("view", segments=answer.value, timeout=RECOVERY).right(
            [rows(900, COUNT)]
        )
    print(f"all went on {time.monotonic() - down:.1f} s after the cut")


def name_of_place(place: Place, segment: list[Any]) -> list[Any]:
    there = [*segment]
    there[1] = place.seen + segment[1][len(place.root) :]
    return there


def test_files_gone_over_a_power_cut_are_missing_and_what_was_viewed_stays(
    powered: Cluster, on: Callable[..., Place]
) -> None:
    places = {mount: on(mount) for mount in ("v4", "v3")}
    held: dict[str, tuple[Process, list[list[Any]]]] = {}
    for mount, place in places.items():
        segments = [
            place.writer().ask("write", root=place.root, seed=i, count=COUNT)[0] for i in range(4)
        ]
        reader = place.reader(wait=WAIT)
        first = [[*one] for one in segments[:3]]
        for one in first:
            one[4] = 250  # half of the rows
        reader.tell("view", segments=first, touch=False).right(None)
        place.meddle(
            f"os.unlink(f'{{root}}/v0/{name_of(segments[0])}')\n"
            f"os.replace(f'{{root}}/v0/{name_of(segments[3])}', f'{{root}}/v0/{name_of(segments[1])}')\n"
            "os.sync()  # done before the cut, not only said"
        )
        held[mount] = reader, segments
    powered.cut_power()
    powered.power_up()
    for mount, (reader, segments) in held.items():
        # Unlinked, replaced, and as it was: read once, so served from the cache or from a copy.
        reader.tell("look", timeout=RECOVERY).right([rows(i, COUNT, 0, 250) for i in range(3)])
        gone = reader.tell("view", segments=[segments[0]], timeout=RECOVERY)
        assert (gone.error, gone.reason) == ("PayloadMissingError", "missing"), gone
        gone = reader.tell("view", segments=[segments[0]])
        gone.refused("PayloadMissingError", "missing", WAIT + 1.5)
        reader.tell("view", segments=[segments[1]]).right([rows(3, COUNT)])
        reader.tell("view", segments=[segments[2]]).right([rows(2, COUNT)])
        print(f"\n{mount}: the first call took what the server needed to come back")


@pytest.mark.parametrize("mount", ["v4", "v3"])
def test_a_file_unlinked_in_the_middle_of_a_read_is_right_or_missing(
    mount: str, on: Callable[..., Place]
) -> None:
    place = on(mount)
    count = (24 << 20) // 384
    [segment] = place.writer().ask("write", root=place.root, seed=1, count=count)
    reader = place.reader(wait=WAIT)
    reader.ask("run", code=SLOWLY)
    looking = reader.begin("view", segments=[segment], touch=False)
    time.sleep(0.1)
    assert not looking.done()
    place.meddle(f"os.unlink(f'{{root}}/v0/{name_of(segment)}')")
    answer = looking.wait()
    print(f"\n{mount}: {answer.reason or 'right'} after {answer.seconds:.2f} s")
    if answer.error is None:
        reader.tell("look").right([rows(1, count)])
    else:
        answer.refused("PayloadMissingError", "missing", WAIT + 3)


def test_what_a_raw_view_still_risks_and_a_copy_and_checksums_do_not(
    on: Callable[..., Place],
) -> None:
    """Pages that were reclaimed, of a file that lost its bytes: each look is in a child."""
    outcomes = {}
    for mount, fault in (
        ("v4", "truncate"),
        ("v4", "unlink"),
        ("v3", "truncate"),
        ("v3", "unlink"),
    ):
        place = on(mount)
        [segment] = place.writer().ask("write", root=place.root, seed=1, count=COUNT)
        raw, copied = place.reader(mode="map" if mount == "v3" else None), place.reader(mode="copy")
        checking = place.reader(mode="map", verify="checksum", wait=WAIT)
        for reader in (raw, copied, checking):
            reader.tell("view", segments=[segment], touch=False).right(None)
        path = f"f'{{root}}/v0/{name_of(segment)}'"
        place.meddle(f"os.unlink({path})" if fault == "unlink" else f"os.truncate({path}, 600)")
        place.trainer.start().ask("drop_caches")
        answer = raw.tell("look")
        zeros = [["uint8", [COUNT, 48, 8], jobs.digest(jobs.np.zeros((COUNT, 48, 8), "u1"))[2]]]
        outcome = {
            answer.ended == -signal.SIGBUS: "SIGBUS",
            answer.value == [rows(1, COUNT)]: "right",
            answer.value is not None and answer.value != [rows(1, COUNT)]: "zeros in silence",
        }[True]
        outcomes[mount, fault] = outcome
        assert (
            answer.ended is not None
            or answer.value in ([rows(1, COUNT)], zeros)
            or (outcome == "zeros in silence")
        )
        copied.tell("look").right([rows(1, COUNT)])
        answer = checking.tell(
            "read_into", segments=[segment], field=FIELD, lo=0, hi=COUNT, shape=[COUNT, 48, 8]
        )
        assert answer.ended is None
        assert answer.error in (
            "PayloadTruncatedError",
            "PayloadMissingError",
            "PayloadCorruptError",
        )
        assert answer.seconds < WAIT + 1.5
    print(f"\n{outcomes}")
    assert outcomes["v3", "truncate"] == outcomes["v3", "unlink"] == "SIGBUS"
    assert outcomes["v4", "unlink"] == "right"
    assert outcomes["v4", "truncate"] in ("SIGBUS", "zeros in silence")


@pytest.mark.parametrize("mount", ["v4", "v3"])
@pytest.mark.parametrize("flags", [ROOT_SQUASH, ALL_SQUASH])
def test_a_squashed_user_is_told_which_permission_is_missing(
    flags: int, mount: str, cluster: Cluster, on: Callable[..., Place]
) -> None:
    place = on(mount)
    private = place.writer().ask("write", root=place.root, seed=1, count=COUNT, mode=0o600)
    cluster.export(flags)
    try:
        answer = place.reader(wait=WAIT).tell("view", segments=private)
        answer.refused("PayloadError", "permission", WAIT)
        answer = place.writer().tell("write", root=place.root, seed=2, count=COUNT)
        answer.refused("PayloadWriteError", "write", WAIT + 1)
        assert "(EACCES)" in answer.message or "(EPERM)" in answer.message
    finally:
        cluster.export()
    place.trainer.start().ask("drop_caches")  # a client remembers what it was refused
    place.reader().tell("view", segments=private).right([rows(1, COUNT)])


def test_a_sweep_on_the_node_that_views_is_pending_until_the_views_are_gone(
    on: Callable[..., Place],
) -> None:
    """An NFS client renames what it has open instead of removing it."""
    place = on("v4")
    written = place.writer().ask(
        "write_many", root=place.root, seed=1, files=4, count=64, payload_dir="v1"
    )
    reader, sweeper = place.reader(), place.trainer.start()
    reader.tell("view", segments=written, touch=False).right(None)
    report = sweeper.ask("remove_before", root=place.seen, keep_from=2)
    assert report["removed"] == []
    [(directory, keepers)] = report["pending"].items()
    assert directory == f"{place.seen}/v1"
    assert {name[:4] for name in keepers} == {".nfs"}
    reader.tell("look").right([rows(1 + i, 64) for i in range(4)])
    reader.end()
    report = sweeper.ask("remove_before", root=place.seen, keep_from=2)
    assert (report["removed"], report["pending"]) == ([f"{place.seen}/v1"], {})


def test_a_forced_umount_ends_what_blocks_with_a_typed_error(
    powered: Cluster, on: Callable[..., Place]
) -> None:
    place = on("v4")
    segments = place.writer().ask("write", root=place.root, seed=1, count=COUNT)
    lab, mounted = powered.lab, "/run/lab/forced"
    lab.mount("trainer", mounted, "4.2", "nosharecache")
    reader = place.trainer.start()
    directory = place.root.replace("/run/lab/v4", mounted)
    reader.ask("resolver", roots={place.root: {"directory": directory}}, wait=1.0)
    powered.cut_power()
    looking = reader.begin("view", segments=segments)
    time.sleep(2.5)
    assert not looking.done(), "a hard mount blocks while the server is away"
    forced = lab.run("trainer", ["umount", "-f", mounted], timeout=30)
    answer = looking.wait(20)
    print(f"\numount -f: {forced.rc} {forced.err.strip()!r}; the call: {answer}")
    assert answer.ended is None
    assert answer.error is not None
    lab.run("trainer", ["umount", "-l", mounted], timeout=30)
    reader.kill()
    powered.power_up()
    place.reader().tell("view", segments=segments, timeout=RECOVERY).right([rows(1, COUNT)])


def test_the_first_to_read_on_a_node_pays_for_the_pages(on: Callable[..., Place]) -> None:
    place = on("v4")
    count = (16 << 20) // 384
    segments = place.writer().ask("write", root=place.root, seed=1, count=count)
    place.trainer.start().ask("run", code=GROUPS)
    charged = []
    for group in ("first", "second"):
        reader = place.reader()
        reader.ask("run", code=f"{GROUPS}\nenter({group!r})")
        before = reader.ask("run", code=f"{GROUPS}\nanswer = used({group!r})")
        reader.tell("view", segments=segments, touch=False).right(None)
        after = reader.ask("run", code=f"{GROUPS}\nanswer = used({group!r})")
        charged.append((after - before) / (1 << 20))
    print(f"\nMiB charged for a view of 16 MiB: {charged}")
    assert charged[0] > 15
    assert charged[1] < 4


GROUPS = """
import subprocess
base = '/run/tmp/groups'
if not os.path.isdir(base):
    os.makedirs(base)
    subprocess.run(['mount', '-t', 'cgroup', '-o', 'memory', 'memory', base], check=True)
    for name in ('first', 'second'):
        os.makedirs(f'{base}/{name}')
def enter(name):
    open(f'{base}/{name}/cgroup.procs', 'w').write(str(os.getpid()))
def used(name):
    return int(open(f'{base}/{name}/memory.usage_in_bytes').read())
"""
