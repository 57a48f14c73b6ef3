"""Neural networks that grow while they train, under a controller that has learned when, where and what to grow."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType

from esper.renames import MODULES


class _RenamedModules(MetaPathFinder):
    """Import hook: the error for a module of version 0.1 names the new module."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"{name} is now {MODULES[name]}", name=name)


sys.meta_path.append(_RenamedModules())

_EXPORTS = {  # name -> module and name; imported when it is used, so that `import esper` is fast
    "Grow": ("esper.grow.callback", "Grow"),
    "Grower": ("esper.grow.grower", "Grower"),
    "blueprint": ("esper.grow.blueprints", "register_blueprint"),
    "disabled": ("esper.growth", "without_seeds"),
    "load": ("esper.grow.save", "load_additions"),
    "merge": ("esper.grow.merge", "merge_seeds"),
    "save": ("esper.grow.save", "save_additions"),
    "slots": ("esper.grow.discovery", "find_slots"),
}


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'esper' has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return [*globals(), *_EXPORTS]
