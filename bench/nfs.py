"""The harness on real NFS without a second machine: ``python -m bench.nfs [what bench takes]``.

Boots two nodes, each a kernel of its own, with NFS 4.2 between them, and runs ``python -m bench --quick``
on the trainer's. Needs root and what `make multinode-test` installs. Their system calls are dear, so times
compare ways with each other and not with those of this machine. The report goes to bench-report/nfs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.multinode.conftest import why_not
from tests.multinode.lab.nfslab import Lab

HERE = Path(__file__).parent.parent
MOUNT = "/run/lab/v4"
LIMIT = 1200  # seconds


def main(more: list[str]) -> int:
    reason = why_not()
    if reason:
        raise SystemExit(reason)
    print("booting two nodes; what they say comes at the end, in about five minutes", flush=True)
    out = HERE / "bench-report" / "nfs"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as state:
        lab = Lab(  # type: ignore[no-untyped-call]
            state, clients=("trainer",), mem="6G", server_mem="2G", export="tmpfs",
            export_size="1500M", mounts={"v4": ("4.2", "")},
        )  # fmt: skip
        with lab:
            shared = Path(lab.state, "sync")
            command = [sys.executable, "-m", "bench", "--quick", "--root", MOUNT, *more]
            job = lab.start(  # type: ignore[no-untyped-call]
                "trainer",
                [*command, "--out", "/run/lab/ctl/sync/report"],
                timeout=LIMIT,
                env={"PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1"},
            )
            done = job.wait()
            print(done.out, done.err, sep="\n")
            for file in shared.glob("report/*"):
                (out / file.name).write_bytes(file.read_bytes())
    print(f"the report is in {out}")
    return int(done.rc)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
