"""modprobe for a machine without kmod: modload.py NAME... (deps from modules.dep)."""

import ctypes
import os
import sys

BASE = "/usr/lib/uml/modules/" + os.uname().release


def key(path):
    return os.path.basename(path).split(".ko")[0].replace("-", "_")


def main():
    libc = ctypes.CDLL(None, use_errno=True)
    deps = {}
    with open(BASE + "/modules.dep") as f:
        for line in f:
            path, _, rest = line.partition(":")
            deps[key(path)] = [path, *rest.split()]
    for name in sys.argv[1:]:
        name = name.replace("-", "_")
        if name not in deps:
            if os.path.isdir("/sys/module/" + name):
                continue
            sys.exit(f"modload: no module {name} in {BASE}")
        for path in reversed(deps[name]):  # modules.dep lists deps last-first
            if os.path.isdir("/sys/module/" + key(path)):
                continue
            fd = os.open(os.path.join(BASE, path), os.O_RDONLY)
            if libc.syscall(313, fd, b"", 0) != 0:  # finit_module
                e = ctypes.get_errno()
                if e != 17:
                    sys.exit(f"modload: {path}: {os.strerror(e)}")
            os.close(fd)


main()
