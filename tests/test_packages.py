"""The packages of esper: what each may import, how long entry points are, and that public names are unique."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import esper
from tests.fixtures_syntax import nodes, parse

PACKAGE = Path(esper.__file__).parent
ORDER = (  # each may import only those before it
    "renames", "arguments", "command_line", "plugins", "files", "rng", "flops", "lifecycle", "blueprints", "hosts",
    "growth", "data", "observation", "environment", "tasks", "rewards", "controllers", "grow", "ppo", "records",
    "telemetry", "config", "app", "checkpoints", "evaluation", "tuning", "gym", "sweeps", "training", "run", "evaluate",
    "report", "tune", "growthbench",
)  # fmt: skip
GROW_IMPORTS = {"grow", "lifecycle", "blueprints", "growth", "observation", "controllers", "rng", "flops"}
WITHOUT_HYDRA = ORDER[: ORDER.index("config")]
ENTRY_POINTS = (
    "run.py",
    "evaluate.py",
    "report.py",
    "tune.py",
    "growthbench.py",
    "data/__main__.py",
    "tasks/__main__.py",
)
CONVENTIONAL = {"main", "cli", "prepare", "log"}  # names that every module of a kind has
FILES = sorted(PACKAGE.rglob("*.py"))


def package_of(path: Path) -> str:
    """The package of a file; the command of tasks may import what comes after its package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "report" if parts == ("tasks", "__main__") else parts[0]


def imported_names(path: Path) -> set[str]:
    """The full names of everything that a file imports."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_a_file_imports_only_packages_before_its_own() -> None:
    for path in FILES:
        own = {name for name in imported_names(path) if name.startswith("esper.")}
        if package_of(path) == "__init__":
            assert own == {"esper.renames.MODULES"}
            continue
        later = ORDER[ORDER.index(package_of(path)) + 1 :]
        assert [name for name in own if name.split(".")[1] in later] == [], path
        assert {name.split(".")[1] for name in own} <= set(ORDER), path


def test_a_package_does_not_import_what_it_must_not_know() -> None:
    for path in FILES:
        roots = {name.split(".")[0] for name in imported_names(path)}
        if package_of(path) in WITHOUT_HYDRA:
            assert not roots & {"hydra", "omegaconf"}, path
        if package_of(path) == "lifecycle":
            assert not any(name.startswith(("torch.nn", "torch.optim")) for name in imported_names(path)), path
        packages = {name.split(".")[1] for name in imported_names(path) if name.startswith("esper.")}
        if package_of(path) == "data":
            assert packages <= {"data", "rng"}, path
        if package_of(path) == "grow":
            assert packages <= GROW_IMPORTS, path
        if package_of(path) == "evaluation":
            assert "training" not in packages, path


def test_every_package_has_its_place_in_the_order() -> None:
    existing = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert existing - {"__init__"} == set(ORDER)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_an_entry_point_has_less_than_80_lines(name: str) -> None:
    assert len((PACKAGE / name).read_text().splitlines()) < 80


def public_names(path: Path) -> set[str]:
    """Classes, functions and constants that a module defines."""
    names: set[str] = set()
    for node in parse(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return {name for name in names if not name.startswith("_")} - CONVENTIONAL


def test_no_two_public_things_share_a_name() -> None:
    places = defaultdict(list)
    for path in FILES:
        for name in public_names(path):
            places[name].append(str(path.relative_to(PACKAGE)))
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
