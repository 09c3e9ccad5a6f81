import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import engine
from .compare import Tally
from .engine import Engine

MODELS = Path(sys.prefix) / "models"  # made by `make engine-test`
TALLY = Tally()


@pytest.fixture(scope="session")
def tally() -> Tally:
    return TALLY


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """16 experts, 3 sparse layers, one API server process."""
    yield from _served("tiny", tmp_path_factory)


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """320 experts, one dense layer and 3 sparse ones, two API server processes."""
    yield from _served("tiny-320", tmp_path_factory, "--api-server-count", "2")


def _served(model: str, directories: pytest.TempPathFactory, *flags: str) -> Iterator[Engine]:
    directory = directories.mktemp(model)
    with engine.running(MODELS / model, directory / "root", directory / "log", *flags) as served:
        yield served
        counted = engine.stats(served.url)
    TALLY.note(f"{model}: {counted}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section(f"vLLM {engine.VERSION} by handle")
    for line in TALLY.lines():
        terminalreporter.write_line(line)
