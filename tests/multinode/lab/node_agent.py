"""Runs jobs on a node.  Jobs come and results go through files in a hostfs
folder (the host's own file system), so that control never touches the NFS
mounts or the test network.

  <id>.job   {"argv": [...], "env": {...}, "cwd": ..., "timeout": seconds}
  <id>.out / <id>.err   written while the job runs
  <id>.rc    {"rc": int, "timed_out": bool, "wall": seconds}   (last)
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

POLL = 0.02


def publish(path, obj):
    with open(path + ".tmp", "w") as f:
        json.dump(obj, f)
        f.flush()
        os.fsync(f.fileno())
    os.rename(path + ".tmp", path)


def main():
    node_dir = sys.argv[1]
    jobs = os.path.join(node_dir, "jobs")
    running = {}
    with open("/proc/uptime") as f:
        uptime = float(f.read().split()[0])
    publish(os.path.join(node_dir, "ready"), {"uptime": uptime, "release": os.uname().release})
    while True:
        names = os.listdir(jobs)
        if "poweroff" in names:
            for proc, *_ in running.values():
                proc.kill()
            return
        for name in sorted(n for n in names if n.endswith(".job")):
            job_id = name[:-4]
            path = os.path.join(jobs, name)
            with open(path) as f:
                spec = json.load(f)
            os.unlink(path)
            base = os.path.join(jobs, job_id)
            # Closed when the job has ended.
            out = open(base + ".out", "wb")  # noqa: SIM115
            err = open(base + ".err", "wb")  # noqa: SIM115
            env = dict(os.environ, **spec.get("env", {}))
            try:
                proc = subprocess.Popen(
                    spec["argv"],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=env,
                    cwd=spec.get("cwd") or "/run/tmp",
                    start_new_session=True,
                )
            except OSError as e:
                err.write(f"cannot start: {e}\n".encode())
                err.close(), out.close()
                publish(base + ".rc", {"rc": 127, "timed_out": False, "wall": 0.0})
                continue
            now = time.monotonic()
            running[job_id] = (proc, out, err, now, now + spec["timeout"])
        for job_id, (proc, out, err, t0, deadline) in list(running.items()):
            timed_out = False
            if proc.poll() is None:
                if time.monotonic() < deadline:
                    continue
                timed_out = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(proc.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    proc.wait(2)  # a task stuck on a dead server may not end
            wall = time.monotonic() - t0
            for f in (out, err):
                f.flush()
                os.fsync(f.fileno())
                f.close()
            rc = proc.returncode if proc.returncode is not None else -9
            publish(
                os.path.join(jobs, job_id + ".rc"), {"rc": rc, "timed_out": timed_out, "wall": wall}
            )
            del running[job_id]
        time.sleep(POLL)


main()
