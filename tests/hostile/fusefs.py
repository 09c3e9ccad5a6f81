"""A file system that lies: the kernel's FUSE protocol, spoken directly, over a source directory.

    python fusefs.py SOURCE MOUNTPOINT FAULTS

FAULTS is a JSON file, read anew for every request: {file name: {fault: value}}. Needs root.

    lookups   first n look-ups answer ENOENT
    opens     [n, size]: until the file was opened n times, it shows `size` bytes
    errno     {"lookup" | "getattr" | "open" | "read": name of an errno}, or [name, first n times]
    short     reads return at most so many bytes
    zeros     reads return zeros
    end       reads find the end of the file at this byte, whatever the size says
    direct    no page cache: mmap is ENODEV
    delay     seconds each request takes
"""

import ctypes
import errno
import json
import os
import struct
import sys
import threading
import time
from collections import Counter

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 14, 15, 17, 18
FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, BATCH_FORGET = 25, 26, 27, 28, 29, 36, 42
NO_REPLY = (FORGET, BATCH_FORGET, INTERRUPT)
IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
MS_NOSUID, MS_NODEV = 2, 4


class Lies:
    """Answers requests for files of the source directory, with faults."""

    def __init__(self, source: str, faults: str) -> None:
        self.faults = faults
        self.paths = {1: source}  # by node
        self.nodes = {source: 1}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.lock = threading.Lock()

    def fault(self, path: str, name: str, default: object = None) -> object:
        try:
            with open(self.faults) as file:
                known = json.load(file)
        except (OSError, ValueError):
            known = {}
        return known.get(os.path.basename(path), {}).get(name, default)

    def count(self, what: str, path: str) -> int:
        with self.lock:
            self.counts[what, path] += 1
            return self.counts[what, path]

    def refuse(self, call: str, path: str) -> None:
        wanted = self.fault(path, "errno", {}).get(call)
        if wanted is None:
            return
        name, times = wanted if isinstance(wanted, list) else (wanted, None)
        if times is None or self.count(f"errno {call}", path) <= times:
            raise OSError(getattr(errno, name), name)

    def attr(self, node: int) -> bytes:
        path = self.paths[node]
        self.refuse("getattr", path)
        status = os.stat(path)
        size = status.st_size
        opens = self.fault(path, "opens")
        if opens and self.counts["opens", path] < opens[0]:
            size = opens[1]
        times = int(status.st_atime), int(status.st_mtime), int(status.st_ctime)
        return ATTR.pack(
            node, size, -(-size // 512), *times, 0, 0, 0, status.st_mode, 1, 0, 0, 0, 4096, 0
        )

    def answer(self, opcode: int, node: int, body: bytes) -> bytes:
        path = self.paths.get(node, "")
        delay = self.fault(path, "delay") or self.fault("*", "delay")
        if delay:
            time.sleep(delay)
        if opcode == LOOKUP:
            name = body.rstrip(b"\0").decode()
            child = os.path.join(path, name)
            self.refuse("lookup", child)
            if self.count("lookups", child) <= (self.fault(child, "lookups") or 0):
                raise OSError(errno.ENOENT, "not yet")
            os.stat(child)
            with self.lock:
                number = self.nodes.setdefault(child, len(self.nodes) + 1)
                self.paths[number] = child
            return struct.pack("<QQQQII", number, 0, 0, 0, 0, 0) + self.attr(number)
        if opcode == GETATTR:
            return struct.pack("<QII", 0, 0, 0) + self.attr(node)
        if opcode in (OPEN, OPENDIR):
            self.refuse("open", path)
            self.count("opens", path)
            return struct.pack("<QII", node, 1 if self.fault(path, "direct") else 0, 0)
        if opcode == READ:
            self.refuse("read", path)
            _, offset, size = struct.unpack_from("<QQI", body)
            size = min(size, self.fault(path, "short") or size)
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read(size)
            end = self.fault(path, "end")
            if end is not None:
                data = data[: max(0, end - offset)]
            return bytes(len(data)) if self.fault(path, "zeros") else data
        if opcode == READDIR:
            _, offset, _ = struct.unpack_from("<QQI", body)
            entries = b""
            for number, name in enumerate(sorted(os.listdir(path)), 1):
                if number > offset:
                    text = name.encode()
                    entry = struct.pack("<QQII", number + 1000, number, len(text), 8) + text
                    entries += entry.ljust(-(-len(entry) // 8) * 8, b"\0")
            return entries
        if opcode == STATFS:
            return struct.pack("<QQQQQIIII24x", 1, 0, 0, 1, 0, 4096, 255, 4096, 0)
        if opcode in (RELEASE, RELEASEDIR, FLUSH):
            return b""
        raise OSError(errno.ENOSYS, "not spoken here")

    def serve(self, device: int) -> None:
        while True:
            try:
                request = os.read(device, 1 << 20)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                return  # unmounted
            _, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
            body = request[IN_HEADER.size :]
            code, data = 0, b""
            if opcode == INIT:
                _, _, readahead, _ = struct.unpack_from("<IIII", body)
                data = struct.pack(
                    "<IIIIHHIIHHI28x", 7, 31, readahead, 0, 32, 24, 1 << 17, 1, 0, 0, 0
                )
            elif opcode not in NO_REPLY:
                try:
                    data = self.answer(opcode, node, body)
                except OSError as error:
                    code = -(error.errno or errno.EIO)
            if opcode not in NO_REPLY:
                try:
                    os.write(device, OUT_HEADER.pack(16 + len(data), code, unique) + data)
                except OSError as error:
                    if error.errno != errno.ENOENT:  # the caller was killed
                        raise


def main(source: str, mountpoint: str, faults: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"lies", mountpoint.encode(), b"fuse", MS_NOSUID | MS_NODEV, options):
        raise OSError(ctypes.get_errno(), "mount")
    lies = Lies(source, faults)
    threads = [threading.Thread(target=lies.serve, args=(device,), daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
