"""The two user-space RPC services NFSv3 needs: rpc_helper.py EXPORT DOMAIN

rpcbind (TCP 111; enough for the kernel to "register" nfsd and lockd) and mountd
version 3 (TCP 20048; MNT of the one export).  RFC 1833, RFC 1813 appendix I.
"""

import os
import socketserver
import struct
import sys
import threading

EXPORT, DOMAIN = sys.argv[1:3]


def file_handle():
    fd = os.open("/proc/fs/nfsd/filehandle", os.O_RDWR)
    try:
        os.write(fd, f"{DOMAIN} {EXPORT} 64\n".encode())
        return bytes.fromhex(os.read(fd, 4096).decode().strip().replace("\\x", ""))
    finally:
        os.close(fd)


def opaque(b):
    return struct.pack(">I", len(b)) + b + b"\0" * (-len(b) % 4)


def reply(prog, vers, proc, args):
    """The result bytes, or None for PROC_UNAVAIL."""
    if proc == 0:
        return b""
    if prog == 100000:
        if proc in (1, 2):  # SET, UNSET
            return struct.pack(">I", 1)
        if proc == 3:  # GETPORT / GETADDR
            return struct.pack(">I", 0) if vers == 2 else opaque(b"")
    if prog == 100005:
        if proc == 1:  # MNT
            n = struct.unpack_from(">I", args)[0]
            path = args[4 : 4 + n].decode()
            if path != EXPORT:
                return struct.pack(">I", 2)  # MNT3ERR_NOENT
            return struct.pack(">I", 0) + opaque(file_handle()) + struct.pack(">II", 1, 1)
        if proc in (3, 4):  # UMNT, UMNTALL
            return b""
    return None


class Handler(socketserver.BaseRequestHandler):
    def exactly(self, n):
        b = b""
        while len(b) < n:
            more = self.request.recv(n - len(b))
            if not more:
                raise EOFError
            b += more
        return b

    def handle(self):
        try:
            while True:
                rec, last = b"", False
                while not last:
                    head = struct.unpack(">I", self.exactly(4))[0]
                    last = bool(head & 0x80000000)
                    rec += self.exactly(head & 0x7FFFFFFF)
                xid, _, _, prog, vers, proc = struct.unpack_from(">6I", rec)
                off = 24
                for _ in range(2):  # credential, verifier
                    n = struct.unpack_from(">I", rec, off + 4)[0]
                    off += 8 + n + (-n % 4)
                body = reply(prog, vers, proc, rec[off:])
                stat = 3 if body is None else 0
                out = struct.pack(">6I", xid, 1, 0, 0, 0, stat) + (body or b"")
                self.request.sendall(struct.pack(">I", 0x80000000 | len(out)) + out)
        except (EOFError, ConnectionError):
            pass


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


servers = [Server(("", port), Handler) for port in (111, 20048)]
if os.fork():
    os._exit(0)  # both ports are listening: the caller may go on
os.setsid()
for s in servers[1:]:
    threading.Thread(target=s.serve_forever, daemon=True).start()
servers[0].serve_forever()
