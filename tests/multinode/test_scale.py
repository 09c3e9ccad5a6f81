"""Steps at scale: many writers and trainers, and retention beside them."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multinode.cluster import Place
from tests.multinode.conftest import Cluster

pytestmark = [pytest.mark.multinode, pytest.mark.slow, pytest.mark.timeout(300)]

SECONDS = float(os.environ.get("MULTINODE_SECONDS", "60"))
WRITERS, TRAINERS = 8, 4
STEP = 2.0  # s a version is trained
BEHIND = 2  # versions that writers may still write to


def test_8_writers_and_4_trainers_on_2_nodes_with_retention_lose_nothing_and_leave_nothing(
    cluster: Cluster, on: Callable[..., Place]
) -> None:
    place = on("v4")
    on_the_host = Path(cluster.lab.state) / "sync" / f"queue-{time.monotonic_ns()}"
    queue = f"/run/lab/ctl/sync/{on_the_host.name}"
    for one in range(TRAINERS):
        (on_the_host / str(one)).mkdir(parents=True)
    (on_the_host / "now-0").touch()
    (on_the_host / "writing").touch()
    sweeper = place.writer()
    trainers = []
    for one in range(TRAINERS):
        node = cluster.nodes["trainer" if one < 2 else "trainer2"]
        # On each node one over NFSv4 and one over NFSv3.
        directory = place.root if one % 2 else place.root.replace("/v4/", "/v3/")
        roots = {place.root: {"directory": directory}}
        trainers.append(node.start().begin("train", roots=roots, queue=queue, me=one, batch=8))
    writers = [
        place.writer().begin(
            "infer", root=place.root, queue=queue, seed=1_000_000 * (1 + i), trainers=TRAINERS
        )
        for i in range(WRITERS)
    ]
    began, version, swept = time.monotonic(), 0, 0
    while (passed := time.monotonic() - began) < SECONDS:
        if int(passed / STEP) > version:
            version += 1
            (on_the_host / f"now-{version - 1}").rename(on_the_host / f"now-{version}")
        unread = [  # or being written
            int(path.name.split("-")[0][1:]) for path in on_the_host.glob("*/v*")
        ]
        keep_from = max(0, min([version - BEHIND, *unread]))
        report = sweeper.ask("remove_before", root=place.root, keep_from=keep_from)
        swept += len(report["removed"])
        assert report["pending"] == {}
        assert not any(one.done() for one in writers + trainers), "one ended early"
        time.sleep(0.3)
    (on_the_host / f"now-{version}").unlink()
    written = [one.wait(60).value for one in writers]
    (on_the_host / "writing").unlink()
    trained = [one.wait(60).value for one in trainers]
    sent = sum(one["sent"] for one in written)
    nbytes = sum(one["bytes"] for one in written)
    print(f"\n{WRITERS} writers sent {sent} responses, {nbytes / 1e6:.0f} MB, in {SECONDS:.0f} s")
    print(f"{swept} of {version + 1} versions were swept beside them")
    for one in trained:
        print(one)
    assert sent > 10 * WRITERS
    assert swept > 0
    assert [one["wrong"] for one in trained] == [[]] * TRAINERS
    assert sum(one["read"] for one in trained) == sent
    report = sweeper.ask("remove_before", root=place.root, keep_from=version + 1)
    assert report["pending"] == {}
    assert place.meddle("answer = os.listdir(root)") == []
