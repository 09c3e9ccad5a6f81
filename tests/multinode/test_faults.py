"""Faults that only a server or a client of its own has: power cuts, squashed users, dropped caches."""

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.multinode import jobs
from tests.multinode.cluster import Place, rows
from tests.multinode.conftest import ALL_SQUASH, ROOT_SQUASH, Cluster
from tests.multinode.lab.nfslab import SERVER

pytestmark = [pytest.mark.multinode, pytest.mark.slow, pytest.mark.timeout(200)]
both_versions = pytest.mark.parametrize("mount", ["v4", "v3"])

FIELD = "routed_experts"
COUNT = 500
FILES = 200
FORCED = "/run/lab/forced"
WAIT, GRACE = 0.5, 4.0  # s; what a call may take beyond `wait`: about one, and these nodes are slow
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


@pytest.fixture(scope="module")
def outage(cluster: Cluster) -> Iterator[dict[Any, Any]]:
    """One power cut for several tests: what was begun before it, asked meanwhile, and came after."""
    places = {mount: cluster.place(mount) for mount in ("v4", "v3")}
    try:
        yield cut(cluster, places)
    finally:
        if not cluster.lab.alive(SERVER):
            cluster.power_up()
        cluster.clear(list(places.values()))


def cut(cluster: Cluster, places: dict[str, Place]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    batches, both, views, pending = {}, {}, {}, {}
    for mount, place in places.items():
        writer = place.writer()
        written = writer.ask("write_many", root=place.root, seed=1, files=FILES, count=64)
        reader = place.reader(wait=1.0)
        reader.ask("run", code=SLOWLY.replace("0.02", "0.2"))
        batches[mount] = reader, written
        # One resolver with a root of this node besides, read by another thread while one blocks.
        process = place.trainer.start()
        process.ask("run", code="os.makedirs('/run/tmp/local', exist_ok=True)")
        mine = process.ask("write", root="/run/tmp/local", seed=7, count=COUNT)
        process.ask("resolver", roots=[place.seen, "/run/tmp/local"], wait=1.0)
        both[mount] = process, [as_seen(place, written[-1])], mine
        # Half of the rows of a file that will be unlinked, of one renamed over, of one that stays.
        files = [writer.ask("write", root=place.root, seed=i, count=COUNT)[0] for i in range(4)]
        halves = [[*one[:4], COUNT // 2, *one[5:]] for one in files[:3]]
        reader = place.reader(wait=WAIT)
        reader.tell("view", segments=halves, touch=False).right(None)
        gone, over, _, other = (f"f'{{root}}/v0/{name_of(one)}'" for one in files)
        # Synced: done before the cut, not only said.
        place.meddle(f"os.unlink({gone}); os.replace({other}, {over}); os.sync()")
        views[mount] = reader, files
    cluster.lab.mount("trainer", FORCED, "4.2", "nosharecache")
    roots = {places["v4"].root: {"directory": places["v4"].root.replace("/run/lab/v4", FORCED)}}
    forced = places["v4"].trainer.start()
    forced.ask("resolver", roots=roots, wait=1.0)

    for mount, (reader, written) in batches.items():
        window = {"segments": written, "field": FIELD, "lo": 0, "hi": 64 * FILES}
        pending["batch", mount] = reader.begin("window", **window)
    time.sleep(0.5)
    found["early"] = [one.done() for one in pending.values()]
    cluster.cut_power()
    began = time.monotonic()
    for mount, place in places.items():
        pending["write", mount] = place.writer().begin(
            "write", root=place.root, seed=900, count=COUNT
        )
    looking = forced.begin("view", segments=batches["v4"][1][:1])
    for mount, (process, blocked, mine) in both.items():
        found["beside", mount] = process.ask("beside", blocked=blocked, segments=mine, seconds=2.0)
    found["still"] = [one.done() for one in [*pending.values(), looking]]
    cluster.lab.run("trainer", ["umount", "-f", FORCED], timeout=30)  # says that it is busy
    found["forced"] = looking.wait(20)
    forced.kill()
    cluster.lab.run("trainer", ["umount", "-l", FORCED], timeout=30)
    cluster.power_up()

    for key, one in pending.items():
        found[key] = one.wait(RECOVERY)
    print(f"\nall went on {time.monotonic() - began:.1f} s after the cut")
    for mount, place in places.items():
        segments = found["write", mount].value
        found["written", mount] = place.reader().tell("view", segments=segments)
        reader, files = views[mount]
        found["look", mount] = reader.tell("look", timeout=RECOVERY)
        found["files", mount] = [reader.tell("view", segments=[one]) for one in files[:3]]
    return found


def as_seen(place: Place, segment: list[Any]) -> list[Any]:
    there = [*segment]
    there[1] = place.seen + segment[1][len(place.root) :]
    return there


@both_versions
def test_a_power_cut_in_the_middle_of_a_batch_blocks_and_then_all_is_right(
    mount: str, outage: dict[Any, Any]
) -> None:
    """A hard mount blocks in the kernel, longer than `wait`."""
    assert not any(outage["early"]), "the batch was over before the cut"
    assert not any(outage["still"]), "nothing blocked: the server was not down"
    want = jobs.np.concatenate([jobs.rows(1 + i, 64) for i in range(FILES)])
    outage["batch", mount].right(jobs.digest(want))
    assert outage["batch", mount].seconds > 2.0


@both_versions
def test_files_of_other_roots_are_read_while_a_hard_mount_blocks(
    mount: str, outage: dict[Any, Any]
) -> None:
    beside = outage["beside", mount]
    print(f"\n{mount}: {beside['reads']} reads in 2 s")
    assert beside["still_blocked"]
    assert beside["rows"] == [rows(7, COUNT)]
    assert beside["reads"] >= 5


@both_versions
def test_a_file_written_during_a_power_cut_is_whole_afterwards(
    mount: str, outage: dict[Any, Any]
) -> None:
    assert outage["write", mount].error is None, outage["write", mount].message
    outage["written", mount].right([rows(900, COUNT)])


@both_versions
def test_files_unlinked_or_renamed_over_before_a_power_cut_end_no_process(
    mount: str, outage: dict[Any, Any]
) -> None:
    """What was viewed was read once, so it comes from the cache or is a copy; the rest is missing."""
    outage["look", mount].right([rows(i, COUNT, 0, COUNT // 2) for i in range(3)])
    unlinked, replaced, kept = outage["files", mount]
    unlinked.refused("PayloadMissingError", "missing", WAIT + GRACE)
    replaced.right([rows(3, COUNT)])
    kept.right([rows(2, COUNT)])


def test_a_forced_umount_ends_what_blocks_with_a_typed_error(outage: dict[Any, Any]) -> None:
    answer = outage["forced"]
    print(f"\n{answer.message}")
    assert answer.ended is None
    assert (answer.error, answer.reason) == ("PayloadError", "io")


@both_versions
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
        answer.refused("PayloadMissingError", "missing", WAIT + GRACE)


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
        assert answer.seconds < WAIT + GRACE
    print(f"\n{outcomes}")
    assert outcomes["v3", "truncate"] == outcomes["v3", "unlink"] == "SIGBUS"
    assert outcomes["v4", "unlink"] == "right"
    assert outcomes["v4", "truncate"] in ("SIGBUS", "zeros in silence")


@both_versions
@pytest.mark.parametrize("flags", [ROOT_SQUASH, ALL_SQUASH])
def test_a_squashed_user_is_told_which_permission_is_missing(
    flags: int, mount: str, cluster: Cluster, on: Callable[..., Place]
) -> None:
    place = on(mount)
    private = place.writer().ask("write", root=place.root, seed=1, count=COUNT, mode=0o600)
    cluster.export(flags)
    try:
        answer = place.reader(wait=WAIT).tell("view", segments=private)
        answer.refused("PayloadError", "permission", GRACE)
        answer = place.writer().tell("write", root=place.root, seed=2, count=COUNT)
        answer.refused("PayloadWriteError", "write", GRACE)
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
