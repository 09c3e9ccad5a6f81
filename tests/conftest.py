import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import uvicorn
from hypothesis import HealthCheck, settings

from payload import Segment
from payload.testing.server import App

# `ci` is reproducible, `dev` fast, `nightly` searches.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
settings.register_profile("dev", max_examples=50, **COMMON)
settings.register_profile("ci", max_examples=300, derandomize=True, **COMMON)
settings.register_profile("nightly", max_examples=2000, stateful_step_count=100, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))


def segment(**changes: object) -> Segment:
    """A legal segment, with some attributes changed."""
    known = {
        "field": "routed_experts",
        "file": "/shared/payload/v3/0123.bin",
        "offset": 0,
        "pos": 2,
        "rows": 4,
        "dtype": "uint8",
        "shape": (2, 3),
    }
    return Segment(**(known | changes))


@pytest.fixture
def serve() -> Iterator[Callable[[App], str]]:
    """Serve an ASGI app on a loopback port for the length of a test; gives its URL."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: App) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
