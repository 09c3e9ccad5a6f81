"""Start the kernel NFS server of this node without nfs-utils.

usage: nfsd_setup.py DISK_DIR CLIENT_IP...     (exports DISK_DIR/export)

rpc.mountd's job is to answer the kernel's export upcalls; with one export and
known clients the answers can be written into the caches ahead of time
(Documentation/filesystems/nfs/knfsd-*.rst, net/sunrpc/svcauth_unix.c,
fs/nfsd/export.c).  The export is fsid=0, so it is the NFSv4 root "/".
"""

import os
import subprocess
import sys

NEVER = 2**31 - 1  # expiry, seconds since 1970
INSECURE_PORT, NOSUBTREECHECK, FSID = 0x2, 0x400, 0x2000


def put(path, text):
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def main():
    disk, clients = sys.argv[1], sys.argv[2:]
    export, recovery = disk + "/export", disk + "/v4recovery"
    os.makedirs(export, exist_ok=True)
    os.makedirs(recovery, exist_ok=True)
    os.chmod(export, 0o1777)
    first_boot = not os.listdir(recovery)
    subprocess.run(["mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd"], check=True)
    put("/proc/fs/nfsd/nfsv4recoverydir", recovery + "\n")
    put("/proc/fs/nfsd/nfsv4leasetime", "10\n")
    put("/proc/fs/nfsd/nfsv4gracetime", "10\n")
    # By default the kernel derives this from its memory (64 KiB here); real
    # servers have 1 MiB.
    put("/proc/fs/nfsd/max_block_size", "1048576\n")
    v3 = os.environ.get("LAB_V3") == "1"
    if v3:
        helper = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rpc_helper.py")
        subprocess.run(
            [sys.executable, "-I", "-S", helper, export, "lab"],
            stdin=subprocess.DEVNULL,
            check=True,
        )
    put("/proc/fs/nfsd/versions", ("+3" if v3 else "-3") + " +4 +4.1 +4.2\n")
    put("/proc/fs/nfsd/portlist", "tcp 2049\n")
    put("/proc/fs/nfsd/threads", "8\n")
    if first_boot:  # nobody can have anything to reclaim: skip the wait
        put("/proc/fs/nfsd/v4_end_grace", "Y\n")
    for ip in clients:
        put("/proc/net/rpc/auth.unix.ip/channel", f"nfsd {ip} {NEVER} lab\n")
    flags = INSECURE_PORT | NOSUBTREECHECK | FSID  # rw, sync, no_root_squash
    put("/proc/net/rpc/nfsd.export/channel", f"lab {export} {NEVER} {flags} 65534 65534 0\n")
    put("/proc/net/rpc/nfsd.fh/channel", f"lab 1 \\x00000000 {NEVER} {export}\n")


main()
