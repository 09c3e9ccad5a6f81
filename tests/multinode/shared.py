"""What holds on every shared file system, whichever it is; `place` says which.

Each ends in the right array or a PayloadError within its time.
"""

import time
import uuid
from collections.abc import Callable

from payload import Segment, decode_segments, encode_segments
from tests.multinode import jobs
from tests.multinode.cluster import Place, printed_times, rows

COUNT = 500  # rows of 384 bytes
WAIT = 0.5  # s, where a file is known not to come
GRACE = 4.0  # s a call may take beyond `wait`: about one, and these nodes are slow
FIELD = "routed_experts"
LISTED = "answer = sorted(os.listdir(f'{root}/v1')) if os.path.isdir(f'{root}/v1') else []"


def test_what_a_writer_returned_is_right_at_the_first_open(place: Place) -> None:
    writer, reader = place.writer(), place.reader()
    with printed_times(f"{place.name}: resolve of a new file of 192 KB") as times:
        for seed in range(10):
            segments = writer.ask("write", root=place.root, seed=seed, count=COUNT, mask=True)
            answer = reader.tell("resolve", segments=segments)
            answer.right({FIELD: [rows(seed, COUNT)], "sampling_mask": [mask(seed)]})
            times.append(answer.seconds)
    stats = reader.ask("stats")
    assert stats["waits"] == 0, "a file was not there, or too short, at the first open"
    assert stats["access"] == {place.seen: place.access}
    assert stats["fallbacks"] == {}


def test_every_way_to_read_gives_the_same_rows(place: Place) -> None:
    writer, reader = place.writer(), place.reader()
    segments = [
        segment
        for seed in range(6)
        for segment in writer.ask("write", root=place.root, seed=seed, count=64, pos=64 * seed)
    ]
    want = jobs.np.concatenate([jobs.rows(seed, 64) for seed in range(6)])
    for lo, hi in ((0, 384), (10, 20), (60, 70), (63, 65)):
        cut = {"segments": segments, "field": FIELD, "lo": lo, "hi": hi}
        reader.tell("window", **cut).right(jobs.digest(want[lo:hi]))
        reader.tell("window", **cut, dtype="field").right(jobs.digest(want[lo:hi].astype("int32")))
        reader.tell("read_into", **cut, shape=[hi - lo, 48, 8]).right(jobs.digest(want[lo:hi]))
    reader.tell("view", segments=segments).right([rows(seed, 64) for seed in range(6)])


def test_a_late_name_is_seen_in_under_50_ms(place: Place) -> None:
    writer, reader = place.writer(), place.reader(wait=20)
    [known] = decode_segments(writer.ask("write", root=place.root, seed=0, count=COUNT))
    reader.ask("view", segments=encode_segments([known], "array"))  # what a first call costs
    ahead = place.trainer.clock - place.infer.clock
    with printed_times(f"{place.name}: a late name") as times:
        for seed in range(1, 8):
            name = uuid.uuid4().hex
            wanted = named(known, f"{place.root}/v0/{name}.safetensors")
            segments = encode_segments([wanted], "array")
            looking = reader.begin("view", segments=segments, touch=False)
            writing = writer.begin(
                "write_later", root=place.root, name=name, seed=seed, count=COUNT, after=0.2
            )
            there = writing.wait().value
            answer = looking.wait()
            answer.right(None)
            reader.tell("look").right([rows(seed, COUNT)])
            times.append(answer.at - ahead - there)
    assert reader.ask("stats")["waits"] >= 7, "no name was late"
    assert sorted(times)[len(times) // 2] < 0.05


def test_a_name_that_never_comes_ends_at_the_deadline(place: Place) -> None:
    writer, reader = place.writer(), place.reader(wait=WAIT)
    [known] = decode_segments(writer.ask("write", root=place.root, seed=0, count=COUNT))
    for directory in ("v0", "v7"):  # a directory that is there, and one that is not
        wanted = named(known, f"{place.root}/{directory}/{uuid.uuid4().hex}.safetensors")
        answer = reader.tell("view", segments=encode_segments([wanted], "array"))
        answer.refused("PayloadMissingError", "missing", WAIT + GRACE)
        assert answer.seconds >= WAIT
        assert WAIT <= float(answer.message.split("(waited ")[1].split(" s")[0]) < WAIT + GRACE


def test_temporary_and_half_written_names_are_never_visible(place: Place) -> None:
    writer, watcher = place.writer(), place.trainer.start()
    [one] = writer.ask("write", root=place.root, seed=9, count=5000, payload_dir="v1")
    nbytes = one[2] + 5000 * 384
    watching = watcher.begin(
        "watch", directory=f"{place.seen}/v1", files=9, nbytes=nbytes, timeout=60
    )
    written = writer.ask(
        "write_many", root=place.root, seed=1, files=8, count=5000, payload_dir="v1"
    )
    found = watching.wait().value
    assert found["seen"] == sorted(each[1].rpartition("/")[2] for each in [one, *written])
    print(f"\n{place.name}: {len(found['temporary'])} temporary names in {found['looks']} looks")
    name = found["temporary"][0] if found["temporary"] else ".a.safetensors.host.1.2"
    [known] = decode_segments([written[0]])
    hidden = encode_segments([named(known, f"{place.root}/v1/{name}")], "array")
    reader = place.reader(wait=WAIT)
    reader.tell("view", segments=hidden).refused("PathError", "unpublished", GRACE)


def test_a_file_others_write_in_place_is_never_taken_for_whole(place: Place) -> None:
    [segment] = place.writer().ask("write", root=place.root, seed=3, count=COUNT)
    name = segment[1].rpartition("/")[2]
    late = [*segment]
    late[1] = segment[1].replace(name, "0" * 32 + ".safetensors")
    into = f"path = f'{{root}}/v0/{'0' * 32}.safetensors'"
    content = f"{into}; content = open(f'{{root}}/v0/{name}', 'rb').read(); size = len(content)"
    stages = (
        "open(path, 'wb').write(content[:1000])",  # grows
        "os.truncate(path, 0); os.truncate(path, size)",  # full size at once, zeros inside
        "f = open(path, 'r+b'); f.write(content[:1000]); f.close()",  # a header before its bytes
        "f = open(path, 'r+b'); f.write(content[:size // 2]); f.close()",
        "f = open(path, 'r+b'); f.write(content); f.close()",
    )
    seen = []
    for stage in stages:
        place.meddle(f"{content}\n{stage}")
        reader = place.reader(wait=WAIT, verify="checksum")
        for answer in (
            reader.tell("view", segments=[late]),
            reader.tell("read_into", **all_of(late), shape=[COUNT, 48, 8]),
        ):
            assert answer.ended is None
            assert answer.seconds < WAIT + GRACE
            if answer.error is None:
                assert stage == stages[-1], "a file that is not whole was read"
                assert answer.value in ([rows(3, COUNT)], rows(3, COUNT))
            else:
                assert (answer.error, answer.reason) in (
                    ("PayloadTruncatedError", "truncated"),
                    ("PayloadCorruptError", "header"),
                    ("PayloadCorruptError", "checksum"),
                )
            seen.append(answer.reason or "right")
    print(f"\n{place.name}: {seen}")
    assert seen[0] == "truncated"
    if not place.network:
        assert seen[-2:] == ["right", "right"]


def test_a_file_others_rewrite_is_old_or_new_or_an_error(place: Place) -> None:
    """In place and of the same size: a client may show old bytes for seconds; never half of each."""
    writer, seen = place.writer(), []
    for round_ in range(3):
        old, new = 100 + round_, 200 + round_
        [segment] = writer.ask("write", root=place.root, seed=old, count=COUNT)
        [other] = writer.ask("write", root=place.root, seed=new, count=COUNT)
        reader = place.reader(verify="checksum", wait=WAIT)
        reader.tell("view", segments=[segment]).right([rows(old, COUNT)])
        names = [one[1].rpartition("/")[2] for one in (segment, other)]
        place.meddle(
            f"content = open(f'{{root}}/v0/{names[1]}', 'rb').read()\n"
            f"f = open(f'{{root}}/v0/{names[0]}', 'r+b'); f.write(content); f.close()"
        )
        for process in (reader, place.reader(verify="checksum", wait=WAIT)):
            answer = process.tell("read_into", **all_of(segment), shape=[COUNT, 48, 8])
            assert answer.ended is None
            if answer.error:
                answer.refused("PayloadCorruptError", "checksum", WAIT + GRACE)
            else:
                assert answer.value in (rows(old, COUNT), rows(new, COUNT))
            what = {rows(old, COUNT)[2]: "old", rows(new, COUNT)[2]: "new"}
            seen.append(what[answer.value[2]] if answer.value else answer.reason)
    print(f"\n{place.name}: {seen}")
    if not place.network:
        assert set(seen) == {"new"}


def test_a_name_others_renamed_over_is_new_when_opened_anew(place: Place) -> None:
    writer = place.writer()
    for round_ in range(3):
        old, new = 300 + round_, 400 + round_
        [segment] = writer.ask("write", root=place.root, seed=old, count=COUNT)
        [other] = writer.ask("write", root=place.root, seed=new, count=COUNT)
        first = place.reader()
        first.tell("view", segments=[segment], touch=False).right(None)
        names = [one[1].rpartition("/")[2] for one in (segment, other)]
        place.meddle(f"os.replace(f'{{root}}/v0/{names[1]}', f'{{root}}/v0/{names[0]}')")
        # What was viewed stays what it was; who opens the name anew has the new file.
        first.tell("look").right([rows(old, COUNT)])
        first.tell("read_into", **all_of(segment), shape=[COUNT, 48, 8]).right(rows(new, COUNT))
        place.reader().tell("view", segments=[segment]).right([rows(new, COUNT)])


def test_a_file_others_unlinked_stays_as_it_was_in_views(place: Place) -> None:
    [segment] = place.writer().ask("write", root=place.root, seed=5, count=COUNT)
    reader = place.reader(wait=WAIT)
    reader.tell("view", segments=[segment], touch=False).right(None)
    place.meddle(f"os.unlink(f'{{root}}/v0/{segment[1].rpartition('/')[2]}')")
    reader.tell("look").right([rows(5, COUNT)])
    for process in (reader, place.reader(wait=WAIT)):
        answer = process.tell("read_into", **all_of(segment), shape=[COUNT, 48, 8])
        answer.refused("PayloadMissingError", "missing", WAIT + GRACE)
    reader.tell("look").right([rows(5, COUNT)])


def test_a_file_others_truncated_is_an_error_where_it_is_read(place: Place) -> None:
    [segment] = place.writer().ask("write", root=place.root, seed=6, count=COUNT)
    reader = place.reader(wait=WAIT)
    reader.tell("view", segments=[segment], touch=False).right(None)
    place.meddle(f"os.truncate(f'{{root}}/v0/{segment[1].rpartition('/')[2]}', 5000)")
    if place.network:
        reader.tell("look").right([rows(6, COUNT)])  # from the cache, or its own memory
    for options in ({}, {"verify": "checksum"}):
        other = place.reader(wait=WAIT, **options)
        for name, more in (
            ("view", {"segments": [segment]}),
            ("read_into", {**all_of(segment), "shape": [COUNT, 48, 8]}),
        ):
            answer = other.tell(name, **more)
            answer.refused("PayloadTruncatedError", "truncated", WAIT + GRACE)
    answer = reader.tell("read_into", **all_of(segment), shape=[COUNT, 48, 8])
    answer.refused("PayloadTruncatedError", "truncated", WAIT + GRACE)
    # The rows that are still there are read; a raw view of the others may end its process.
    part = [*segment]
    part[4] = 10
    reader.tell("view", segments=[part]).right([rows(6, COUNT, 0, 10)])


def test_a_version_swept_while_views_live_leaves_them_right(place: Place) -> None:
    writer, reader = place.writer(), place.reader(wait=WAIT)
    old = writer.ask("write_many", root=place.root, seed=10, files=6, count=64, payload_dir="v1")
    kept = writer.ask("write_many", root=place.root, seed=20, files=6, count=64, payload_dir="v2")
    reader.tell("view", segments=old, touch=False).right(None)
    report = writer.ask("remove_before", root=place.root, keep_from=2)
    assert report == {"removed": [f"{place.root}/v1"], "pending": {}, "errors": {}}
    reader.tell("look").right([rows(10 + i, 64) for i in range(6)])
    answer = reader.tell("window", segments=old, field=FIELD, lo=0, hi=384)
    answer.refused("PayloadMissingError", "missing", WAIT + GRACE)
    assert "6 of 6" in answer.message, "not all missing files are listed"
    reader.tell("view", segments=kept).right([rows(20 + i, 64) for i in range(6)])
    # A directory made anew under the old name is found, by resolvers that had the old one open.
    again = writer.ask("write_many", root=place.root, seed=30, files=2, count=64, payload_dir="v1")
    reader.tell("view", segments=again).right([rows(30, 64), rows(31, 64)])


def test_a_root_wiped_and_made_anew_is_found_by_live_resolvers(place: Place) -> None:
    writer, reader = place.writer(), place.reader(wait=WAIT)
    before = writer.ask("write_many", root=f"{place.root}", seed=40, files=2, count=64)
    reader.tell("view", segments=before).right([rows(40, 64), rows(41, 64)])
    place.meddle("import shutil; shutil.rmtree(f'{root}/v0')")
    after = writer.ask("write_many", root=place.root, seed=50, files=2, count=64)
    answer = reader.tell("view", segments=after)
    answer.right([rows(50, 64), rows(51, 64)])
    assert answer.seconds < GRACE


def test_two_trainers_on_a_node_read_the_same(place: Place) -> None:
    written = place.writer().ask("write_many", root=place.root, seed=60, files=8, count=64)
    readers = [place.reader(), place.reader()]
    looking = [reader.begin("view", segments=written) for reader in readers]
    for one in looking:
        one.wait().right([rows(60 + i, 64) for i in range(8)])


def test_a_killed_writer_leaves_whole_files_or_none(place: Place) -> None:
    place.writer().ask("write", root=place.root, seed=0, count=1, payload_dir="v2")
    for round_ in range(3):
        writer = place.writer()
        writing = writer.begin(
            "write_many", root=place.root, seed=70, files=1000, count=20_000, payload_dir="v1"
        )
        before, deadline = place.meddle(LISTED), time.monotonic() + 20
        while place.meddle(LISTED) == before:  # until it is in the middle of a file
            assert time.monotonic() < deadline
        time.sleep(0.03 * round_)
        writer.kill()
        assert writing.wait().ended == -9
    reader = place.reader(verify="checksum", wait=WAIT)
    [known] = decode_segments(
        place.writer().ask("write", root=place.root, seed=70, count=20_000, payload_dir="v2")
    )
    names = place.meddle(LISTED)
    assert names
    whole = [name for name in names if not name.startswith(".")]
    print(f"\n{place.name}: {len(whole)} whole files, {len(names) - len(whole)} leftovers")
    for name in whole:
        one = encode_segments([named(known, f"{place.root}/v1/{name}")], "array")
        assert reader.ask("view", segments=one, touch=False) is None
    report = place.writer().ask("remove_before", root=place.root, keep_from=2)
    assert report["pending"] == {}


def test_a_response_carries_segments_and_no_bytes(place: Place) -> None:
    server, trainer = place.writer(), place.reader()
    port = server.ask("serve", root=place.root, host=place.infer.host, count=20)
    for seed, prompt in ((1, 40), (2, 4000)):
        result = trainer.ask(
            "ask",
            url=f"http://{place.infer.host}:{port}",
            model="test-double",
            prompt_ids=[seed] * prompt,
            payload_dir=f"{place.root}/v3",
        )
        assert result["completion_ids"] == list(range(20))
        assert result["body"] < 4096
        assert {one["file"].startswith(f"{place.root}/v3/") for one in result["payload"]} == {True}
        trainer.tell("resolve", segments=result["payload"]).right(
            {FIELD: [rows(seed, prompt + 19)], "sampling_mask": [jobs.digest(jobs.lists(seed, 20))]}
        )


def test_a_full_file_system_is_a_typed_error_and_nothing_stays(
    place: Place, full: Callable[[], None]
) -> None:
    writer = place.writer()
    kept = writer.ask("write", root=place.root, seed=80, count=COUNT)
    full()
    before = place.meddle("answer = sorted(os.listdir(f'{root}/v0'))")
    answer = writer.tell("write", root=place.root, seed=81, count=20_000)
    answer.refused("PayloadWriteError", "full", GRACE)
    # The room may go after it was looked at: then the file system itself says so.
    writer.ask("run", code="Writer._refuse_full = lambda *args: None")
    answer = writer.tell("write", root=place.root, seed=81, count=20_000)
    answer.refused("PayloadWriteError", "write", 20)
    assert "(ENOSPC)" in answer.message
    assert place.meddle("answer = sorted(os.listdir(f'{root}/v0'))") == before
    place.reader().tell("view", segments=kept).right([rows(80, COUNT)])


def test_a_read_only_file_system_is_a_typed_error_for_writers_alone(
    place: Place, read_only: Callable[[], None]
) -> None:
    writer = place.writer()
    kept = writer.ask("write", root=place.root, seed=85, count=COUNT)
    read_only()
    answer = writer.tell("write", root=place.root, seed=86, count=COUNT)
    answer.refused("PayloadWriteError", "write", GRACE)
    assert "(EROFS)" in answer.message
    report = writer.ask("remove_before", root=place.root, keep_from=1)
    assert report["removed"] == []
    assert "(EROFS)" in report["errors"][f"{place.root}/v0"]
    place.reader().tell("view", segments=kept).right([rows(85, COUNT)])


def test_a_file_another_user_may_not_read_says_so(place: Place, other_user: int) -> None:
    writer, reader = place.writer(), place.trainer.start()
    writer.ask("run", code="os.umask(0o077)")
    private = writer.ask(
        "write", root=place.root, seed=90, count=COUNT, mode=0o600, payload_dir="p"
    )
    public = writer.ask("write", root=place.root, seed=91, count=COUNT)
    reader.ask("as_user", user=other_user)
    reader.ask("resolver", roots=place.roots(), wait=WAIT)
    reader.tell("view", segments=public).right([rows(91, COUNT)])
    answer = reader.tell("view", segments=private)
    answer.refused("PayloadError", "permission", GRACE)
    assert f"for user {other_user}" in answer.message


def named(segment: Segment, path: str) -> Segment:
    return Segment(
        segment.field, path, segment.offset, 0, segment.rows, segment.dtype, segment.shape
    )


def all_of(segment: list) -> dict[str, object]:
    return {"segments": [segment], "field": FIELD, "lo": segment[3], "hi": segment[3] + segment[4]}


def mask(seed: int) -> object:
    return jobs.digest(jobs.lists(seed, COUNT))
