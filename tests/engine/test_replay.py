"""A trainer that replays the engine's choice of experts agrees with it more than one that does not."""

import subprocess
import sys

from .compare import Tally
from .conftest import MODELS
from .engine import MASKS, Engine


def test_replayed_experts_bring_the_trainer_closer_to_the_engine(
    wide: Engine, tally: Tally
) -> None:
    command = [
        sys.executable, "-m", "bench.router_replay",
        wide.url, str(MODELS / "tiny-320"), str(wide.root),
        "--rollouts", "4" if MASKS else "8",  # an interpreter runs the sampler there
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        tally.note(line)
    assert done.returncode == 0, done.stdout + done.stderr
