"""Blueprints: modules that seeds are built from. Importing this package registers its blueprints."""

from esper.blueprints import cnn, transformer
from esper.blueprints.registry import (
    GLOBAL,
    KINDS,
    Blueprint,
    add_missing,
    blueprint,
    blueprints,
    format_blueprints,
    register,
    topologies,
)

__all__ = [
    "GLOBAL",
    "KINDS",
    "Blueprint",
    "add_missing",
    "blueprint",
    "blueprints",
    "cnn",
    "format_blueprints",
    "register",
    "topologies",
    "transformer",
]
