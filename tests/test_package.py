"""The wheel, and esper installed from it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from esper.checkpoints.origin import PRETRAINED
from esper.config import CONF

pytestmark = pytest.mark.xdist_group("package")  # they share a wheel

PROJECT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(build, cwd=PROJECT, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_has_the_configuration_and_the_shipped_controllers(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {f"esper/conf/{path.relative_to(CONF)}" for path in CONF.rglob("*.yaml")}
    assert "esper/conf/host/cifar_baseline.yaml" in files
    assert files <= names
    controllers = {f"esper/pretrained/{path.name}" for path in PRETRAINED.values()}
    assert controllers
    assert {"esper/py.typed", *controllers} <= names
    assert not [name for name in names if name.startswith(("tests/", "conf/"))]


def test_an_installed_package_works_from_any_directory(wheel: Path, tmp_path: Path) -> None:
    site, directory = tmp_path / "site", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(site)
    directory.mkdir()
    script = (
        "from esper.config import CONF, load_preset; from esper.hosts import count_parameters\n"
        "print(CONF, count_parameters(load_preset('host/cifar_baseline')))"
    )
    command, environment = [sys.executable, "-c", script], {"PYTHONPATH": str(site)}
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert result.stdout.split() == [str(site / "esper" / "conf"), "6418"], result.stderr
