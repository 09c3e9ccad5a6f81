"""The wheel, not the checkout: what it holds and that it works where the checkout is not."""

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return out


def test_the_wheel_holds_exactly_the_two_packages(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"payload", "client"}
    assert {"payload/py.typed", "client/py.typed", "payload/testing/server.py"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_holds_nothing_that_rides_along(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert names == {
        "payload", "client", "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "PKG-INFO",
        ".gitignore",
    }  # fmt: skip


def test_the_wheel_works_in_a_clean_environment_outside_the_checkout(
    built: Path, tmp_path: Path
) -> None:
    [wheel] = built.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", wheel], check=True, capture_output=True, cwd=tmp_path
    )
    code = f"""
import importlib.metadata, importlib.util, pathlib, client, payload, payload.testing.server
import numpy as np
for module in (client, payload):
    assert pathlib.Path(module.__file__).is_relative_to({str(tmp_path)!r}), module.__file__
assert importlib.util.find_spec("bench") is None
assert importlib.util.find_spec("tests") is None
[plugin] = importlib.metadata.entry_points(group="vllm.endpoint_plugins")
assert (plugin.name, plugin.load()().name) == ("byhandle", "byhandle")
rows = np.arange(6, dtype=np.uint8).reshape(3, 2)
[segment] = payload.Writer({str(tmp_path / "root")!r}).write({{"f": (0, rows)}})
assert (payload.Resolver({str(tmp_path / "root")!r}).view(segment) == rows).all()
"""
    subprocess.run([python, "-c", code], check=True, cwd=tmp_path)
