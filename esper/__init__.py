"""Neural networks that grow while they train, under a controller that has learned when, where and what to grow."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

from esper.renames import MODULES


class _RenamedModules(MetaPathFinder):
    """Import hook: the error for a module of version 0.1 names the new module."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"{name} is now {MODULES[name]}", name=name)


sys.meta_path.append(_RenamedModules())
