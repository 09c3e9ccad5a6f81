"""Print the oldest run-time dependencies pyproject.toml allows, as requirements."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
print(*[requirement.replace(">=", "==") for requirement in project["dependencies"]])
