"""What seeds are built from. Importing this package registers every blueprint it ships."""

from esper.blueprints import cnn, transformer
from esper.blueprints.registry import Blueprint, blueprint, blueprints, listing, register, topologies

__all__ = ["Blueprint", "blueprint", "blueprints", "cnn", "listing", "register", "topologies", "transformer"]
