"""Each room of the package may import only the rooms before it."""

import ast
from pathlib import Path

import pytest

import esper

PACKAGE = Path(esper.__file__).parent
ROOMS = (
    "seeding", "work", "lifecycle", "blueprints", "hosts", "growth", "data", "environment", "rewards", "controllers",
    "ppo", "records", "telemetry", "evaluation", "config", "gym", "resume", "learners", "sweep", "run", "comparison",
    "evaluate", "report",
)  # fmt: skip
FREE_OF_HYDRA = ROOMS[: ROOMS.index("config")]
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """The full names of all modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_rooms_before_its_own(path: Path) -> None:
    if room(path) == "__init__":
        return
    place = ROOMS.index(room(path))
    for name in imported(path):
        if name.startswith("esper."):
            assert ROOMS.index(name.split(".")[1]) <= place, f"{path} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_keep_out_what_they_must_not_know(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    if room(path) in FREE_OF_HYDRA:
        assert not roots & {"hydra", "omegaconf"}
    if room(path) == "lifecycle":
        assert not any(name.startswith(("torch.nn", "torch.optim")) for name in imported(path))
    if room(path) == "data":
        rooms = {name.split(".")[1] for name in imported(path) if name.startswith("esper.")}
        assert rooms <= {"data", "seeding"}


def test_every_room_that_exists_has_its_place() -> None:
    existing = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert existing - {"__init__"} <= set(ROOMS)
