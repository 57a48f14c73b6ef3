"""esper uses only public names of other libraries; private ones may change in any release."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import esper

PACKAGE = Path(esper.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ALLOWED: dict[tuple[str, str], str] = {}  # (file, private name) -> why there is no public one
PUBLIC = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}  # keys of Hydra's instantiate


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in PUBLIC


def root_of(node: ast.expr) -> str | None:
    """The variable that an expression such as `a.b().c[0]` begins with; `self.a` counts as `a`."""
    attributes: list[str] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            return None
    if node.id in ("self", "cls"):
        return attributes[-1] if attributes else None
    return node.id


def foreign_names(tree: ast.Module) -> set[str]:
    """The names that a module imports from other libraries, and the variables that hold objects of them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names if is_foreign(alias.name)}
        elif isinstance(node, ast.ImportFrom) and is_foreign(node.module or ""):
            names |= {alias.asname or alias.name for alias in node.names}
    imported = frozenset(names)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            annotation = {part.id for part in ast.walk(node.annotation) if isinstance(part, ast.Name)}
            names |= {node.arg} if annotation & imported else set()
        elif isinstance(node, ast.Assign) and root_of(node.value) in imported:
            names |= {name for target in node.targets if (name := root_of(target)) is not None}
    return names


def is_foreign(module: str) -> bool:
    root = module.split(".")[0]
    return root != "esper" and root not in sys.stdlib_module_names


def private_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each private attribute or import of another library."""
    tree = ast.parse(source)
    foreign = foreign_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and root_of(node.value) in foreign:
            yield node.lineno, ast.unparse(node)
            continue
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            target, name = node.args[:2]
            if isinstance(name, ast.Constant) and is_private(name.value) and root_of(target) in foreign:
                yield node.lineno, ast.unparse(node)
            continue
        else:
            continue
        for path in paths:
            if is_foreign(path) and any(map(is_private, path.split("."))):
                yield node.lineno, path


def test_files_use_no_private_name_of_another_library_without_a_reason() -> None:
    used = {
        (str(path.relative_to(PACKAGE)), name): f"{path}, line {line}: {name}"
        for path in FILES
        for line, name in private_names(path.read_text())
    }
    assert [place for key, place in used.items() if key not in ALLOWED] == []
    assert set(ALLOWED) <= used.keys(), "an exception is in use"
    assert all(ALLOWED.values())


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._foreach_norm([])",
        "import torch\ntorch.nn.Linear(1, 1)._parameters['weight']",
        "from numpy._core import multiarray",
        "from torch.utils._pytree import tree_map",
        "import torch.utils._pytree",
        "from torch import _foreach_norm",
        "from lightning.pytorch import Trainer\nTrainer()._teardown()",
        "from lightning import Trainer\ndef f(trainer: Trainer | None):\n    trainer.strategy._launcher",
        "import torch\nclass A:\n    def f(self):\n        self.own = torch.zeros(1)\n        self.own._version",
        "import torch\ngetattr(torch, '_foreach_norm')([])",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert len(list(private_names(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self):\n        self._own._more",
        "from esper.lifecycle import rules\nrules._own",
        "import os\nos._exit(1)",
        "def f(config):\n    config._target_",
        "import torch\ntorch.Tensor.__add__",
        "from torch import nn\nnn.functional.relu",
    ],
)
def test_a_public_or_own_name_is_not(source: str) -> None:
    assert list(private_names(source)) == []
