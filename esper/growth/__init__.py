"""Growth: seeds are grafted into hosts, trained in isolation, blended in, removed, and exported."""

from esper.growth.export import GrownNetwork, export, load_grown
from esper.growth.model import GrowingHost, Mode, SeedSetting, SeedSettings, fossil_settings, seed_settings
from esper.growth.optimizer import HOST_GROUP, GrowthOptimizer, LRSchedule
from esper.growth.seed import Seed
from esper.growth.snapshot import Snapshot, adopt, restore, snapshot
from esper.growth.widen import widen_host, widened

__all__ = [
    "HOST_GROUP",
    "GrowingHost",
    "GrownNetwork",
    "GrowthOptimizer",
    "LRSchedule",
    "Mode",
    "Seed",
    "SeedSetting",
    "SeedSettings",
    "Snapshot",
    "adopt",
    "export",
    "fossil_settings",
    "load_grown",
    "restore",
    "seed_settings",
    "snapshot",
    "widen_host",
    "widened",
]
