"""The shared half in ordinary processes: tmpfs, and ext4 in an image; no lab.

As root each node is a mount namespace, in which the trainer has the file system at another place and
not at the writer's. Otherwise both are ordinary processes in /dev/shm, and a link is the other place.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multinode.cluster import HERE, Node, Place, Process, python_path
from tests.multinode.shared import *  # noqa: F403

pytestmark = pytest.mark.process

SIZE = 256 << 20
ROOT = (
    os.geteuid() == 0
    and not subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode
)

# In a namespace of its own: the file system for the writer, and for the trainer the same elsewhere.
NODES = """
set -e
mount --make-rprivate /
case $KIND in
  tmpfs) mount -t tmpfs -o size=$SIZE tmpfs "$BASE/shared" ;;
  ext4) mount -o loop "$BASE/image" "$BASE/shared" ;;
esac
chmod 1777 "$BASE/shared"
unshare --mount sh -ec 'mount --bind "$BASE/shared" "$BASE/elsewhere"; umount "$BASE/shared"
  exec "$@" "$BASE/trainer"' sh "$@" &
exec "$@" "$BASE/infer"
"""


class Pair:
    """Two nodes that share one file system, for all tests of a kind."""

    def __init__(self, kind: str, base: Path) -> None:
        self.base, self.kind = base, kind
        for name in ("shared", "elsewhere", "infer", "trainer"):
            (base / name).mkdir()
        argv = [sys.executable, str(HERE / "node.py")]
        environment = os.environ | python_path()
        self.started: list[subprocess.Popen[bytes]] = []
        if ROOT:
            if kind == "ext4":
                with open(base / "image", "wb") as image:
                    image.truncate(SIZE)
                subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", base / "image"], check=True)
            environment |= {"KIND": kind, "SIZE": str(SIZE), "BASE": str(base)}
            command = ["unshare", "--mount", "sh", "-c", NODES, "sh", *argv]
            self._start(command, environment)
        else:
            (base / "elsewhere").rmdir()
            (base / "elsewhere").symlink_to(base / "shared")
            for name in ("infer", "trainer"):
                self._start([*argv, str(base / name)], environment)
        self.nodes = [Node(base / name, self._alive) for name in ("infer", "trainer")]
        for node in self.nodes:
            node.wait_ready()
        self.others = self.nodes[0].start()

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        with open(self.base / "log", "ab") as log:
            self.started.append(
                subprocess.Popen(command, env=environment, stderr=log, start_new_session=True)
            )

    def _alive(self) -> str | None:
        if all(process.poll() is None for process in self.started):
            return None
        return "a node ended: " + (self.base / "log").read_text()

    def close(self) -> None:
        for process in self.started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for name in ("infer", "trainer"):  # both in the group, unless one had died before
            deadline = time.monotonic() + 10
            while _lives(self.base / name / "ready") and time.monotonic() < deadline:
                time.sleep(0.01)


def _lives(ready: Path) -> bool:
    try:
        os.kill(int(ready.read_bytes()), 0)
    except (OSError, ValueError):
        return False
    return True


@pytest.fixture(scope="module", params=["tmpfs", "ext4"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param == "ext4":
        if not ROOT:
            pytest.skip("mounting an image needs root")
        if not shutil.which("mkfs.ext4"):
            pytest.skip("needs mkfs.ext4 (apt-get install e2fsprogs)")
        if not os.path.exists("/dev/loop-control"):
            pytest.skip("mounting an image needs /dev/loop-control")
    base = Path(tempfile.mkdtemp(prefix="byhandle-", dir=None if ROOT else "/dev/shm"))
    base.chmod(0o755)  # another user must come through
    made = None
    try:
        made = Pair(request.param, base)
        yield made
    finally:
        if made is not None:
            made.close()
        shutil.rmtree(base)


@pytest.fixture
def place(pair: Pair, request: pytest.FixtureRequest) -> Iterator[Place]:
    directory = f"t{time.monotonic_ns()}"
    pair.others.ask("run", code=f"os.makedirs('{pair.base}/shared/{directory}')")

    def others() -> Process:
        return pair.others

    yield Place(
        name=pair.kind,
        infer=pair.nodes[0],
        trainer=pair.nodes[1],
        meddler=others,
        root=f"{pair.base}/shared/{directory}",
        seen=f"{pair.base}/elsewhere/{directory}",
        meddled=f"{pair.base}/shared/{directory}",
    )
    for node in pair.nodes:
        node.end_all()
    pair.others = pair.nodes[0].start()
    pair.others.ask("run", code=f"import shutil; shutil.rmtree('{pair.base}/shared/{directory}')")


@pytest.fixture
def full(place: Place) -> Iterator[Callable[[], None]]:
    if not ROOT:
        pytest.skip("the machine's own /dev/shm is not filled: as root a small one is mounted")
    yield lambda: place.meddle(FILL)
    place.meddle("os.unlink(f'{root}/fill')")


FILL = """
fd = os.open(f'{root}/fill', os.O_CREAT | os.O_WRONLY)
room = os.fstatvfs(fd)
os.posix_fallocate(fd, 0, room.f_bavail * room.f_frsize - (1 << 20))
os.close(fd)
"""


@pytest.fixture
def read_only(pair: Pair, place: Place) -> Iterator[Callable[[], None]]:
    if not ROOT:
        pytest.skip("mounting read-only needs root")
    change = (
        "import subprocess; subprocess.run(['mount', '-o', 'remount,{}', '{}/shared'], check=True)"
    )
    yield lambda: pair.nodes[0].start().ask("run", code=change.format("ro", pair.base))
    pair.nodes[0].start().ask("run", code=change.format("rw", pair.base))


@pytest.fixture
def other_user() -> int:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    return 12345


def test_a_raw_view_of_a_truncated_file_ends_its_process_and_a_copy_does_not(place: Place) -> None:
    [segment] = place.writer().ask("write", root=place.root, seed=1, count=500)
    raw, copied = place.reader(), place.reader(mode="copy")
    for reader in (raw, copied):
        reader.tell("view", segments=[segment], touch=False).right(None)
    place.meddle(f"os.truncate(f'{{root}}/v0/{segment[1].rpartition('/')[2]}', 0)")
    assert raw.tell("look").ended == -signal.SIGBUS
    copied.tell("look").right([rows(1, 500)])  # noqa: F405
