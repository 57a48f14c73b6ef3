"""Scripts that are not part of the package, as modules, and small images for them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from esper.config import load_preset
from esper.data import Data

PROJECT = Path(__file__).parent.parent
EXAMPLES = PROJECT / "examples"


def load_script(name: str, folder: Path = EXAMPLES) -> ModuleType:
    """A script as a module of a name that is not in use."""
    spec = importlib.util.spec_from_file_location(f"tested_{folder.name}_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def small_images() -> Data:
    data: Data = load_preset("data/synthetic_images", resolution=8, train=300, validation=40, test=40)
    return data
