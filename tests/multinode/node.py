"""Runs on a node as long as the suite: imports the product once, then forks a process for each that
a test starts. ``node.py DIRECTORY``; calls and answers go through files there, never through the
file system under test.

``<id>.start``      start a process, ``<id>.kill`` end it; ``<id>.exit`` says how it ended
``<id>/<n>.call``   [function of jobs.py, arguments], ``<id>/<n>.done`` its answer
"""

import ctypes
import os
import signal
import sys
import time

import jobs
import msgspec

POLL, LAST_POLL = 0.004, 0.025  # s; many processes wait for long, and each look costs the node


def pause(idle: float) -> float:
    """Wait a little, longer after a long time without work; return how long nothing came."""
    for_ = min(LAST_POLL, POLL + idle / 20)
    time.sleep(for_)
    return idle + for_


def publish(path: str, answer: object) -> None:
    with open(path + ".part", "wb") as file:
        file.write(msgspec.json.encode(answer))
    os.rename(path + ".part", path)


def take(path: str) -> bytes:
    with open(path, "rb") as file:
        content = file.read()
    os.unlink(path)
    return content


def follow(directory: str, parent: int) -> None:
    """Carry out the calls of one process, in order, until its node ends."""
    idle = 0.0
    while os.getppid() == parent:
        for name in sorted(os.listdir(directory)):
            if name.endswith(".call"):
                path = f"{directory}/{name}"
                answer = jobs.call(*msgspec.json.decode(take(path)))
                publish(path.replace(".call", ".done"), answer)
                idle = 0.0
        idle = pause(idle)


def main(directory: str) -> None:
    here = os.getpid()
    running: dict[int, str] = {}
    publish(f"{directory}/ready", here)
    idle = 0.0
    while True:
        for name in sorted(os.listdir(directory)):
            one = f"{directory}/{name.partition('.')[0]}"
            if name.endswith(".start"):
                take(f"{directory}/{name}")
                idle = 0.0
                child = os.fork()
                if not child:
                    try:
                        follow(one, here)
                    finally:
                        os._exit(0)
                running[child] = one
            elif name.endswith(".kill"):
                take(f"{directory}/{name}")
                for pid, known in running.items():
                    if known == one:
                        os.kill(pid, signal.SIGKILL)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            publish(f"{running.pop(pid)}.exit", os.waitstatus_to_exitcode(status))
        idle = pause(idle)


if __name__ == "__main__":
    # An ordinary process of the suite ends with it; on a node of the lab the kernel does.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    main(sys.argv[1])
