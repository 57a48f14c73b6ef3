"""Hosts that grow: seeds grafted, trained behind the host, blended, removed."""

from esper.growth.export import Grown, export, load_grown
from esper.growth.model import GrowingHost, Mode, Setting, Settings, fossil_settings, seed_settings
from esper.growth.optimizer import HOST, GrowthOptimizer, Schedule
from esper.growth.seed import Seed
from esper.growth.snapshot import Snapshot, adopt, restore, snapshot

__all__ = [
    "HOST",
    "GrowingHost",
    "Grown",
    "GrowthOptimizer",
    "Mode",
    "Schedule",
    "Seed",
    "Setting",
    "Settings",
    "Snapshot",
    "adopt",
    "export",
    "fossil_settings",
    "load_grown",
    "restore",
    "seed_settings",
    "snapshot",
]
