"""What a user gets who installs the package."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from esper.checkpoints.origin import PRETRAINED
from esper.config import CONF

pytestmark = pytest.mark.xdist_group("package")  # what they share is made once

PROJECT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(build, cwd=PROJECT, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_carries_the_whole_configuration(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {f"esper/conf/{path.relative_to(CONF)}" for path in CONF.rglob("*.yaml")}
    assert "esper/conf/host/cifar_baseline.yaml" in files
    assert files <= names
    controllers = {f"esper/pretrained/{path.name}" for path in PRETRAINED.values()}
    assert controllers
    assert {"esper/py.typed", *controllers} <= names
    assert not [name for name in names if name.startswith(("tests/", "conf/"))]


def test_an_installed_package_works_from_any_directory(wheel: Path, tmp_path: Path) -> None:
    check_launcher_installed, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(check_launcher_installed)
    elsewhere.mkdir()
    script = (
        "import esper.config as c; print(c.CONF)\n"
        "from esper.hosts import parameter_count; print(parameter_count(c.load('host/cifar_baseline')))"
    )
    command, environment = [sys.executable, "-c", script], {"PYTHONPATH": str(check_launcher_installed)}
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [str(check_launcher_installed / "esper" / "conf"), "6418"], done.stderr
