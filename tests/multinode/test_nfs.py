"""The shared half between nodes, each a kernel of its own, over the kernel's NFS: ``make multinode-test``."""

from collections.abc import Callable, Iterator

import pytest

from tests.multinode import shared
from tests.multinode.cluster import Place
from tests.multinode.conftest import READ_ONLY, Cluster
from tests.multinode.shared import *  # noqa: F403

pytestmark = [pytest.mark.multinode, pytest.mark.slow]

# All of it on the default mounts of both versions, and this on others too.
OTHER_MOUNTS = {
    shared.test_what_a_writer_returned_is_right_at_the_first_open: [
        "v4-noac",
        "v4-actimeo",
        "v4-elsewhere",
    ],
    shared.test_a_late_name_is_seen_in_under_50_ms: ["v4-noac", "v4-actimeo", "v4-elsewhere"],
    shared.test_a_name_others_renamed_over_is_new_when_opened_anew: ["v4-noac", "v4-actimeo"],
    shared.test_a_version_swept_while_views_live_leaves_them_right: ["v4-noac", "v4-actimeo"],
    shared.test_a_response_carries_segments_and_no_bytes: ["v4-elsewhere"],
}
FILL = """
fd = os.open(f'{root}/fill', os.O_CREAT | os.O_WRONLY)
room = os.fstatvfs(fd)
os.posix_fallocate(fd, 0, room.f_bavail * room.f_frsize - (1 << 20))
os.close(fd)
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "place" in metafunc.fixturenames:
        mounts = ["v4", "v3", *OTHER_MOUNTS.get(metafunc.function, [])]
        metafunc.parametrize("place", mounts, indirect=True)


@pytest.fixture
def full(place: Place) -> Iterator[Callable[[], None]]:
    yield lambda: place.meddle(FILL)
    place.meddle("os.unlink(f'{root}/fill')")


@pytest.fixture
def read_only(cluster: Cluster, place: Place) -> Iterator[Callable[[], None]]:
    yield lambda: cluster.export(READ_ONLY)
    cluster.export()


@pytest.fixture
def other_user() -> int:
    return 12345
