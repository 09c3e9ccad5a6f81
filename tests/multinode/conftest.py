import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.multinode.cluster import HERE, Node, Place, Process, python_path
from tests.multinode.lab.nfslab import PACKAGES, SERVER, Lab, missing_tools

# Programs of nodes; importing them starts things.
collect_ignore_glob = ["lab/*", "node.py"]

MOUNTS = {  # name: version, options
    "v4": ("4.2", ""),
    "v3": ("3", ""),
    "v4-noac": ("4.2", "noac"),
    "v4-actimeo": ("4.2", "actimeo=3"),
    "v4-elsewhere": ("4.2", "nosharecache"),  # the trainer's mount of what the writer calls v4
}
EXPORT = "/run/lab/disk/export"
CLIENTS = ("infer", "trainer", "trainer2")
# Flags of an export (include/uapi/linux/nfsd/export.h).
READ_ONLY, INSECURE, ROOT_SQUASH, ALL_SQUASH, NO_SUBTREE_CHECK, FSID = 1, 2, 4, 8, 0x400, 0x2000


class Cluster:
    """The lab, with a node program on each node."""

    def __init__(self, base: Path) -> None:
        self.lab = Lab(base / "lab", clients=CLIENTS, v3=True, mounts=MOUNTS, export_size="2G")
        self.nodes: dict[str, Node] = {}
        self._others: Process | None = None

    def up(self) -> None:
        began = time.monotonic()
        self.lab.up()
        for name in self.lab.nodes():
            self._start(name)
        for node in self.nodes.values():
            node.wait_ready()
        took = time.monotonic() - began
        print(f"\n{len(self.nodes)} nodes are up in {took:.1f} s")

    def _start(self, name: str) -> None:
        # In the folder that a node shares with this machine; a new one, as nodes are booted anew.
        directory = Path(self.lab.state) / "sync" / f"{name}-{time.monotonic_ns()}"
        directory.mkdir()
        inside = f"/run/lab/ctl/sync/{directory.name}"
        job = self.lab.start(
            name, [sys.executable, str(HERE / "node.py"), inside], timeout=3600, env=python_path()
        )

        def alive() -> str | None:
            if self.lab.alive(name) and not job.poll():
                return None
            return f"node {name} ended: {Path(job.base + '.err')} {self.lab.console(name)}"

        self.nodes[name] = Node(directory, alive, self.lab.ip(name))

    def others(self) -> Process:
        """A process on the server, for what is done to files there."""
        if self._others is None:
            self.nodes[SERVER].wait_ready()
            self._others = self.nodes[SERVER].start()
        return self._others

    def cut_power(self) -> None:
        """End the server as a power cut does; `power_up` boots it again."""
        self._others = None
        self.lab.crash(SERVER)

    def power_up(self) -> None:
        self.lab.boot(SERVER)
        self._start(SERVER)

    def export(self, flags: int = 0) -> None:
        """Export with other flags from now on."""
        flags |= INSECURE | NO_SUBTREE_CHECK | FSID
        line = f"lab {EXPORT} {2**31 - 1} {flags} 65534 65534 0\\n"
        channel = "/proc/net/rpc/nfsd.export/channel"
        code = f"fd = os.open('{channel}', os.O_WRONLY); os.write(fd, b'{line}'); os.close(fd)"
        self.others().ask("run", code=code)

    def place(self, mount: str) -> Place:
        """A fresh directory on a mount."""
        name = f"t{time.monotonic_ns()}"
        self.others().ask("run", code=f"os.mkdir('{EXPORT}/{name}')")
        written = "v4" if mount == "v4-elsewhere" else mount
        return Place(
            name=mount,
            infer=self.nodes["infer"],
            trainer=self.nodes["trainer"],
            meddler=self.others,
            root=f"/run/lab/{written}/{name}",
            seen=f"/run/lab/{mount}/{name}",
            meddled=f"{EXPORT}/{name}",
            mount=f"/run/lab/{mount}",
            access="copy" if mount == "v3" else "through",
        )

    def clear(self, places: Sequence[Place]) -> None:
        """End every process of a test, and remove its directories."""
        for node in self.nodes.values():
            node.end_all()
        self._others = None
        for place in places:
            self.others().ask("run", code=f"import shutil; shutil.rmtree({place.meddled!r})")

    def down(self) -> None:
        self.lab.down()


def why_not() -> str | None:
    """Why the lab cannot run here."""
    if os.geteuid() != 0:
        return "the lab needs root: it makes network namespaces and mounts"
    missing = missing_tools()
    if missing:
        return f"the lab needs {', '.join(missing)} (apt-get install {PACKAGES})"
    if not os.path.exists("/dev/net/tun"):
        return "the lab needs /dev/net/tun"
    if subprocess.run(["unshare", "--net", "--pid", "--fork", "true"]).returncode:
        return "the lab needs network and pid namespaces"
    return None


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = Cluster(tmp_path_factory.mktemp("nfs"))
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture
def on(cluster: Cluster) -> Iterator[Callable[[str], Place]]:
    """A fresh directory on a mount of the lab."""
    made: list[Place] = []

    def make(mount: str) -> Place:
        made.append(cluster.place(mount))
        return made[-1]

    yield make
    cluster.clear(made)


@pytest.fixture
def place(on: Callable[[str], Place], request: pytest.FixtureRequest) -> Place:
    return on(request.param)
