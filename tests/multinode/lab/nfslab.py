#!/usr/bin/env python3
"""nfslab: several Linux "nodes" with real kernel NFS on one machine.

Each node is a User-Mode-Linux kernel (Debian package user-mode-linux) whose
root is this machine's own root, read-only.  One node runs the kernel NFS server,
the others mount it.  All nodes hang on a bridge in a network namespace of their
own, which has no way out.  Needs root, /dev/net/tun, ptrace; no internet.
Nothing outlives the processes but the state folder: no named namespace, no
interface in the host's namespace, no file in /dev/shm.

From pytest:
    with Lab("/tmp/lab", clients=("infer", "trainer")) as lab:
        r = lab.run("infer", [sys.executable, "-c", "..."], timeout=30)
        assert r.rc == 0, r.err
From a shell:
    nfslab.py up   --state DIR [--clients infer,trainer] [--rtt-ms 0.5] ...
    nfslab.py run  --state DIR [--timeout 60] NODE -- argv...
    nfslab.py down --state DIR
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass

HERE = os.path.dirname(os.path.abspath(__file__))
NET = "10.99.0."
SERVER = "server"
PACKAGES = "user-mode-linux iproute2 util-linux e2fsprogs gcc libc6-dev"
TOOLS = ("linux.uml", "ip", "unshare", "nsenter", "setpriv", "taskset", "mkfs.ext4", "cc")
COMMON_MODULES = ["sunrpc", "sch_netem"]
CLIENT_MODULES = ["nfs", "nfsv4", "nfsv3"]
SERVER_MODULES = ["nfsd"]


class LabError(RuntimeError):
    pass


@dataclass
class Result:
    rc: int
    out: str
    err: str
    timed_out: bool
    wall: float


def missing_tools():
    return [tool for tool in TOOLS if not shutil.which(tool)]


def _starttime(pid):
    """Field 22 of /proc/PID/stat: with the pid it names one process for good."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except OSError:
        return None


def _text(path):
    with open(path, errors="replace") as f:
        return f.read()


def _run(*argv, check=True):
    p = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if check and p.returncode:
        raise LabError(f"{' '.join(argv)}: rc {p.returncode}: {p.stderr.strip()}")
    return p


class Job:
    def __init__(self, lab, node, base, timeout):
        self.lab, self.node, self.base, self.timeout = lab, node, base, timeout

    def poll(self):
        return os.path.exists(self.base + ".rc")

    def wait(self, grace=20):
        deadline = time.monotonic() + self.timeout + grace
        while not self.poll():
            if not self.lab.alive(self.node):
                raise LabError(f"node {self.node} died:\n" + self.lab.console(self.node))
            if time.monotonic() > deadline:
                raise LabError(f"node {self.node} does not answer:\n" + self.lab.console(self.node))
            time.sleep(0.005)
        rc = json.loads(_text(self.base + ".rc"))
        out, err = _text(self.base + ".out"), _text(self.base + ".err")
        for ext in (".rc", ".out", ".err"):
            os.unlink(self.base + ext)
        return Result(rc["rc"], out, err, rc["timed_out"], rc["wall"])


class Lab:
    def __init__(
        self,
        state,
        clients=("infer", "trainer"),
        mem="384M",
        server_mem="512M",
        export="ext4",
        export_size="4G",
        rtt_ms=0.0,
        v3=False,
        mounts=None,
        python=sys.executable,
        shm="/dev/shm",
        die_with_me=True,
    ):
        self.state = os.path.abspath(os.fspath(state))
        self.clients = list(clients)
        self.mem, self.server_mem = mem, server_mem
        self.export, self.export_size = export, export_size
        self.rtt_ms, self.v3, self.shm = rtt_ms, v3, shm
        # The kernel kills the nodes when the thread that started them ends (so
        # call up() and boot() from the main thread).  Off for `nfslab.py up`.
        self.die_with_me = die_with_me
        self._procs = {}
        self.python = os.path.realpath(python)
        # name -> (NFS version, extra mount options); mounted at /run/lab/NAME
        self.mounts = mounts or {"nfs": ("4.2", "")}

    # -- paths and facts ---------------------------------------------------
    def _p(self, *parts):
        return os.path.join(self.state, *parts)

    @classmethod
    def attach(cls, state):
        lab = cls(state)
        with open(lab._p("lab.json")) as f:
            lab.__dict__.update(json.load(f))
        return lab

    def nodes(self):
        return [SERVER, *self.clients]

    def ip(self, node):
        return NET + str(1 + self.nodes().index(node))

    def console(self, node, tail=3000):
        try:
            with open(self._p("nodes", node, "console.log"), errors="replace") as f:
                return f.read()[-tail:]
        except OSError:
            return ""

    # -- host processes ----------------------------------------------------
    def _spawn(self, name, argv, log):
        if self.die_with_me:
            argv = ["setpriv", "--pdeathsig", "KILL", *argv]
        p = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR": self.shm},
        )
        self._procs[name] = p
        with open(self._p("pids", name), "w") as f:
            f.write(f"{p.pid} {_starttime(p.pid) or 0}")
        return p

    def _pid(self, name):
        """(pid, start time) of a process we started, or None once it is gone."""
        if name in self._procs:
            self._procs[name].poll()  # reap
        try:
            with open(self._p("pids", name)) as f:
                pid, start = map(int, f.read().split())
        except (OSError, ValueError):
            return None
        return pid if start and _starttime(pid) == start else None

    def _kill(self, name, timeout=10):
        end = time.monotonic() + timeout
        while (pid := self._pid(name)) is not None:
            if time.monotonic() > end:
                raise LabError(f"{name}: pid {pid} does not die")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def alive(self, node):
        return self._pid(node) is not None

    def _in_net(self):
        pid = self._pid("net")
        if pid is None:
            raise LabError("the lab's network namespace is gone")
        return ["nsenter", f"--net=/proc/{pid}/ns/net"]

    def _ip(self, *args, check=True):
        return _run(*self._in_net(), "ip", *args, check=check)

    # -- life cycle --------------------------------------------------------
    def __enter__(self):
        self.up()
        return self

    def __exit__(self, *exc):
        self.down()

    def up(self, timeout=60):
        """Start everything; on failure nothing is left but the console logs."""
        if os.path.exists(self._p("lab.json")):
            raise LabError(f"{self.state} is in use: run down first")
        try:
            self._up(timeout)
        except BaseException:
            self.down(keep_logs=True)
            raise

    def _up(self, timeout):
        if os.geteuid() != 0:
            raise LabError("needs root")
        missing = missing_tools()
        if missing:
            raise LabError(f"{', '.join(missing)} not found (apt-get install {PACKAGES})")
        if not os.path.exists("/dev/net/tun"):
            os.makedirs("/dev/net", exist_ok=True)
            os.mknod("/dev/net/tun", 0o666 | 0o020000, os.makedev(10, 200))
        os.makedirs(self._p("bin"), exist_ok=True)
        os.makedirs(self._p("uml"), exist_ok=True)
        os.makedirs(self._p("sync"), exist_ok=True)
        os.makedirs(self._p("pids"), exist_ok=True)
        for f in ("node_init.sh", "node_agent.py", "nfsd_setup.py", "modload.py", "rpc_helper.py"):
            shutil.copy(os.path.join(HERE, f), self._p("bin", f))
        os.chmod(self._p("bin", "node_init.sh"), 0o755)
        _run(
            "cc",
            "-O1",
            "-shared",
            "-fPIC",
            "-o",
            self._p("bin", "xstate.so"),
            os.path.join(HERE, "xstate.c"),
            "-ldl",
        )
        with open(self._p("lab.json"), "w") as f:
            json.dump(
                {
                    k: getattr(self, k)
                    for k in (
                        "clients",
                        "mem",
                        "server_mem",
                        "export",
                        "export_size",
                        "rtt_ms",
                        "v3",
                        "shm",
                        "python",
                        "mounts",
                        "die_with_me",
                    )
                },
                f,
            )
        # A process that only holds the network namespace.
        net = self._spawn("net", ["unshare", "--net", "sleep", "infinity"], subprocess.DEVNULL)
        mine, end = os.readlink("/proc/self/ns/net"), time.monotonic() + 5
        while os.readlink(f"/proc/{net.pid}/ns/net") == mine:
            if net.poll() is not None or time.monotonic() > end:
                raise LabError("cannot make a network namespace")
            time.sleep(0.005)
        self._ip("link", "set", "lo", "up")
        self._ip("link", "add", "br0", "type", "bridge")
        self._ip("link", "set", "br0", "up")
        if self.export == "ext4":
            img = self._p("export.img")
            with open(img, "wb") as f:
                f.truncate(_bytes(self.export_size))
            _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1", "-m", "0", img)
        deadline = time.monotonic() + timeout
        for node in self.nodes():
            self.boot(node, wait=False)
        for node in self.nodes():
            self.wait_ready(node, deadline)
        for node in self.clients:
            for name, (vers, opts) in self.mounts.items():
                self.mount(node, "/run/lab/" + name, vers, opts)

    def boot(self, node, wait=True, timeout=60):
        """Start (or start again, after crash()) one node."""
        if self.alive(node):
            raise LabError(f"{node} is up")
        d = self._p("nodes", node)
        shutil.rmtree(d, ignore_errors=True)
        os.makedirs(os.path.join(d, "jobs"))
        is_server = node == SERVER
        i = self.nodes().index(node)
        tap = f"tap{i}"
        self._ip("link", "del", tap, check=False)  # left by a crash()
        self._ip("tuntap", "add", tap, "mode", "tap")
        self._ip("link", "set", tap, "master", "br0", "up")
        mods = COMMON_MODULES + (SERVER_MODULES if is_server else CLIENT_MODULES)
        env = {
            "LAB_ROLE": "server" if is_server else "client",
            "LAB_IP": self.ip(node),
            "LAB_IF": "eth0",
            "LAB_SERVER_IP": self.ip(SERVER),
            "LAB_CLIENT_IPS": " ".join(self.ip(c) for c in self.clients),
            "LAB_MODULES": " ".join(mods),
            "LAB_EXPORT": self.export,
            "LAB_EXPORT_SIZE": self.export_size,
            "LAB_V3": "1" if self.v3 else "0",
            "LAB_RTT_MS": "0" if is_server else f"{self.rtt_ms:g}",
        }
        with open(os.path.join(d, "node.env"), "w") as f:
            f.writelines(f"export {k}='{v}'\n" for k, v in env.items())
        uml = [
            "env",
            f"LD_PRELOAD={self._p('bin', 'xstate.so')}",
            "linux.uml",
            f"mem={self.server_mem if is_server else self.mem}",
            "root=/dev/root",
            "rootfstype=hostfs",
            "rootflags=/",
            "ro",
            "loglevel=4",
            "panic=-1",
            "noreboot",
            "con=null",
            "con0=null,fd:1",
            "ssl=null",
            f"umid={node}",
            f"uml_dir={self._p('uml')}",
            # Not vec0: on 6.1 its tap transport loses a third of the segments
            # (0.9 MB/s here against 117 MB/s with the older driver).
            f"eth0=tuntap,{tap},02:00:00:99:00:{i + 1:02x}",
            f"init={self._p('bin', 'node_init.sh')}",
            f"LAB_STATE={self.state}",
            f"LAB_NODE={node}",
            f"LAB_PYTHON={self.python}",
        ]
        if is_server and self.export == "ext4":
            uml.append(f"ubd0={self._p('export.img')}")
        # A pid namespace of its own: when `unshare` is killed, the kernel kills
        # every host process of the node (UML runs one per guest address space).
        # One CPU per node: UML switches to a traced process on every fault and
        # system call, which is 2.7 times as fast when both are on one CPU.
        cpus = sorted(os.sched_getaffinity(0))
        cmd = [
            *self._in_net(),
            "unshare",
            "--pid",
            "--fork",
            "--kill-child=KILL",
            "sh",
            "-c",
            '"$@"; exit $?',
            "sh",
            "taskset",
            "-c",
            str(cpus[i % len(cpus)]),
            *uml,
        ]
        with open(os.path.join(d, "console.log"), "wb") as log:
            self._spawn(node, cmd, log)
        if wait:
            self.wait_ready(node, time.monotonic() + timeout)

    def wait_ready(self, node, deadline):
        while not os.path.exists(self._p("nodes", node, "ready")):
            if not self.alive(node):
                raise LabError(f"{node} did not boot:\n{self.console(node)}")
            if time.monotonic() > deadline:
                raise LabError(f"{node} not ready in time:\n{self.console(node)}")
            time.sleep(0.02)

    def mount(self, node, where, vers="4.2", opts=""):
        srv = self.ip(SERVER)
        o = f"addr={srv},vers={vers},proto=tcp"
        if vers.startswith("3"):
            o += ",port=2049,mountport=20048,mountproto=tcp,mountvers=3,nolock"
            src = f"{srv}:/run/lab/disk/export"
        else:
            o += f",clientaddr={self.ip(node)}"
            src = f"{srv}:/"
        o += "," + opts if opts else ""
        r = self.run(
            node,
            [
                "sh",
                "-c",
                f"mkdir -p {where} && mount -i -t nfs"
                f"{'' if vers.startswith('3') else '4'} -o {o} {src} {where}",
            ],
            timeout=30,
        )
        if r.rc:
            raise LabError(f"mount {where} on {node}: {r.err}\n{self.console(node)}")

    def crash(self, node):
        """Power cut: SIGKILL, nothing is flushed."""
        self._kill(node)

    def poweroff(self, node, timeout=5):
        with open(self._p("nodes", node, "jobs", "poweroff"), "w"):
            pass
        end = time.monotonic() + timeout
        while self.alive(node) and time.monotonic() < end:
            time.sleep(0.02)
        self._kill(node)

    def down(self, keep_logs=False):
        if not os.path.exists(self._p("lab.json")):
            return
        for name in [*self.nodes(), "net"]:
            self._kill(name)
        if not keep_logs:
            shutil.rmtree(self.state, ignore_errors=True)
            return
        for p in ("lab.json", "export.img"):
            if os.path.exists(self._p(p)):
                os.unlink(self._p(p))

    # -- jobs --------------------------------------------------------------
    def start(self, node, argv, timeout=60, env=None, cwd=None):
        job_id = f"{time.monotonic_ns():020d}-{uuid.uuid4().hex[:6]}"
        base = self._p("nodes", node, "jobs", job_id)
        with open(base + ".new", "w") as f:
            json.dump({"argv": list(argv), "env": env or {}, "cwd": cwd, "timeout": timeout}, f)
        os.rename(base + ".new", base + ".job")
        return Job(self, node, base, timeout)

    def run(self, node, argv, timeout=60, env=None, cwd=None):
        return self.start(node, argv, timeout, env, cwd).wait()


def _bytes(s):
    return int(s[:-1]) << {"K": 10, "M": 20, "G": 30}[s[-1]]


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sub = ap.add_subparsers(dest="cmd", required=True)
    p = sub.add_parser("up")
    p.add_argument("--state", default="/tmp/nfslab-state")
    p.add_argument("--clients", default="infer,trainer")
    p.add_argument("--mem", default="384M")
    p.add_argument("--server-mem", default="512M")
    p.add_argument("--export", choices=["ext4", "tmpfs"], default="ext4")
    p.add_argument("--export-size", default="4G")
    p.add_argument("--rtt-ms", type=float, default=0.0)
    p.add_argument("--v3", action="store_true")
    p.add_argument(
        "--mount", action="append", default=[], metavar="NAME:VERS[:OPTS]", help="default nfs:4.2"
    )
    p.add_argument("--timeout", type=float, default=60)
    p = sub.add_parser("run")
    p.add_argument("--state", default="/tmp/nfslab-state")
    p.add_argument("--timeout", type=float, default=60)
    p.add_argument("node")
    p.add_argument("argv", nargs=argparse.REMAINDER)
    p = sub.add_parser("down")
    p.add_argument("--state", default="/tmp/nfslab-state")
    p.add_argument("--keep-logs", action="store_true")
    a = ap.parse_args()
    if a.cmd == "up":
        mounts = {
            m.split(":")[0]: ([*m.split(":"), "4.2", ""])[1:3]
            if ":" not in m
            else (([*m.split(":", 2), ""])[1:3])
            for m in a.mount
        }
        lab = Lab(
            a.state,
            a.clients.split(","),
            a.mem,
            a.server_mem,
            a.export,
            a.export_size,
            a.rtt_ms,
            a.v3,
            mounts or None,
            die_with_me=False,
        )
        t = time.monotonic()
        lab.up(a.timeout)
        print(f"up in {time.monotonic() - t:.1f} s: {', '.join(lab.nodes())}")
    elif a.cmd == "run":
        argv = a.argv[1:] if a.argv[:1] == ["--"] else a.argv
        r = Lab.attach(a.state).run(a.node, argv, a.timeout)
        sys.stdout.write(r.out)
        sys.stderr.write(r.err)
        if r.timed_out:
            print(f"nfslab: timed out after {a.timeout} s", file=sys.stderr)
        sys.exit(r.rc if r.rc >= 0 else 128 - r.rc)
    else:
        with contextlib.suppress(FileNotFoundError):
            Lab.attach(a.state).down(a.keep_logs)


if __name__ == "__main__":
    main()
