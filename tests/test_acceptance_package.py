"""What reviews ask of the code itself, read from its syntax."""

import ast
import tomllib
from pathlib import Path

import pytest

import esper
from esper.lifecycle import HEAD_NAMES
from tests.fixtures_environment import environment
from tests.fixtures_syntax import nodes, parse

PACKAGE = Path(esper.__file__).parent
PROJECT = Path(__file__).parent.parent
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 400  # lines of a file
STARTS = (  # import what they need late, so that --help is fast
    "app.py", "run.py", "evaluate.py", "report.py", "data/__main__.py", "data/__init__.py", "tasks/__main__.py",
    "tune.py", "growthbench.py",
)  # fmt: skip


def test_imports_stand_at_the_top_and_depend_on_nothing() -> None:
    for path in FILES:
        tree = parse(path)
        everywhere = [node for node in nodes(path) if isinstance(node, ast.Import | ast.ImportFrom)]
        at_the_top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        late = [node for node in everywhere if node not in at_the_top]
        inside = [part for part in tree.body if isinstance(part, ast.FunctionDef | ast.If)]  # if TYPE_CHECKING
        assert not late or str(path.relative_to(PACKAGE)) in STARTS, path
        assert set(late) <= {node for part in inside for node in ast.walk(part)}, path


def test_torch_is_a_hard_dependency_that_nothing_does_without() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert [name for name in project["dependencies"] if name.startswith("torch>")]
    for path in FILES:
        caught = {name.id for node in nodes(path) if isinstance(node, ast.ExceptHandler) and node.type
                  for name in ast.walk(node.type) if isinstance(name, ast.Name)}  # fmt: skip
        assert not caught & {"ImportError", "ModuleNotFoundError"}, path


def test_unions_are_written_with_a_bar() -> None:
    for path in FILES:
        names = {node.id for node in nodes(path) if isinstance(node, ast.Name)}
        names |= {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)}
        reads_annotations = path.name == "signatures.py"  # of other libraries, whatever their style
        assert reads_annotations or not names & {"Optional", "Union"}, path


def test_a_file_is_no_longer_than_can_be_read() -> None:
    assert [path for path in FILES if len(path.read_text().splitlines()) > LONGEST] == []


def test_heads_are_listed_in_the_head_table_alone() -> None:
    """Slots have fields of the same names, so the lifecycle is left out."""
    for path in FILES:
        if "lifecycle" in path.relative_to(PACKAGE).parts:
            continue
        for node in nodes(path):
            entries = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
            written = {entry.value for entry in entries if isinstance(entry, ast.Constant)}
            assert len(written & set(HEAD_NAMES)) < 3, f"{path}, line {getattr(node, 'lineno', 0)}"


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*/__init__.py")), ids=lambda path: path.parent.name)
def test_a_room_exports_its_own_names_alone(path: Path) -> None:
    tree = parse(path)
    own = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    exported: set[str] = set()
    for_type_checkers = [node for part in tree.body if isinstance(part, ast.If) for node in part.body]
    for node in [*tree.body, *for_type_checkers]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"esper.{path.parent.name}"):
            own |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            exported |= set(ast.literal_eval(node.value))
    assert exported <= own
    foreign = {
        node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("esper.")
        and not (node.module or "").startswith(f"esper.{path.parent.name}")
    }  # fmt: skip
    assert not foreign


def test_protocols_say_what_they_exchange() -> None:
    found = set()
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
                for inner in ast.walk(node):
                    kind = inner.annotation if isinstance(inner, ast.arg | ast.AnnAssign) else None
                    kind = inner.returns if isinstance(inner, ast.FunctionDef) else kind
                    if kind is not None and "Any" in ast.unparse(kind).replace("[", " ").split():
                        found.add((node.name, inner.arg if isinstance(inner, ast.arg) else ""))
    assert not found


def test_devices_are_torchs_own_objects() -> None:
    """What a configuration writes as text is turned into one where data is made, and nowhere else is it text."""
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
                name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
                kinds = set(ast.unparse(node.annotation).split(" | "))
                if name == "device":
                    if path.name == "schema.py":  # the types of what a configuration writes
                        continue
                    assert "torch.device" in kinds, path
                    assert kinds <= {"torch.device", "None"} or path.parent.name == "data", path
    env = environment()
    assert type(env.host_pool.task(0).data.device).__name__ == "device"
