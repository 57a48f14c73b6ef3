"""The declared dependencies, the wheel, and esper installed from it."""

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from esper.command_line import CONF
from esper.controllers import PRETRAINED

pytestmark = pytest.mark.xdist_group("package")  # they share a wheel

PROJECT = Path(__file__).parent.parent


def distribution(requirement: str) -> str:
    """The name of a requirement or a distribution, as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", requirement)[0]).lower()


def imported_modules(path: Path) -> set[str]:
    """The top-level modules that a file imports, without the standard library and esper itself."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").split(".")[0])
    return modules - sys.stdlib_module_names - {"esper"}


def test_everything_that_is_imported_is_declared() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    required = set(map(distribution, project["dependencies"]))
    extras = {name: set(map(distribution, needed)) for name, needed in project["optional-dependencies"].items()}
    package, installed = PROJECT / "esper", packages_distributions()
    optional: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        found = {distribution(installed.get(name, [name])[0]) for name in imported_modules(path)}
        if found - required:
            optional[str(path.relative_to(package))] = found - required
    assert optional == {"gym.py": extras["gym"], "tuning/tuner.py": extras["tune"]}


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


COMMANDS = """
import os, runpy, sys
import esper
assert esper.__file__.startswith(sys.prefix), esper.__file__
sizes = ("data=synthetic_images data.resolution=8 data.train=200 data.validation=40 data.test=40 environment.batch=16 "
         "environment.workers=0 environment.threads=1 environment.envs=2")
for command in (
    f"run +experiment=cifar_ppo debug=fast {sizes} environment.budget=5 rounds=1 validate_every=0 "
    "callbacks.dashboard=null hydra.run.dir=trained",
    f"evaluate +experiment=cifar_ppo ckpt=pretrained controllers=[none,ppo] {sizes} environment.steps=4 episodes=2 "
    "environment.budget=0.01 hydra.run.dir=compared",
    "report trained compared --out report",
):
    name, *sys.argv[1:] = command.split()
    runpy.run_module(f"esper.{name}", run_name="__main__")
"""


def test_an_installed_wheel_trains_evaluates_and_reports_outside_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which has the dependencies of this one but not its esper."""
    prefix, directory = tmp_path / "venv", tmp_path / "elsewhere"
    venv.create(prefix, symlinks=True)
    python = prefix / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (site,) = prefix.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    directory.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    run = [str(python), "-c", COMMANDS]
    result = subprocess.run(run, cwd=directory, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for name in ("trained/summary.json", "compared/evaluation.json", "report/report.html"):
        assert (directory / name).is_file()
