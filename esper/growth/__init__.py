"""Growth: seeds are grafted into hosts, trained in isolation, blended in, removed, and exported."""

from esper.growth.costs import count_flops, seed_flops, seed_parameters
from esper.growth.export import GrownNetwork, export, load_grown
from esper.growth.gradients import gradient_health
from esper.growth.hooks import (
    HookedSlot,
    attach_slots,
    detach_slots,
    find_hooked_slots,
    first_tensor,
    output_form,
    replace_first_tensor,
    take_seed_weights,
    without_seeds,
)
from esper.growth.model import GrowingHost
from esper.growth.modes import Mode, SeedSetting, SeedSettings, fossil_settings, seed_settings
from esper.growth.optimizer import HOST_GROUP, GrowthOptimizer, LRSchedule
from esper.growth.seed import Seed, make_seed
from esper.growth.snapshot import Snapshot, adopt, copy_optimizer_state, restore, restore_optimizer_state, snapshot
from esper.growth.widen import widen_host, widened

__all__ = [
    "HOST_GROUP",
    "GrowingHost",
    "GrownNetwork",
    "GrowthOptimizer",
    "HookedSlot",
    "LRSchedule",
    "Mode",
    "Seed",
    "SeedSetting",
    "SeedSettings",
    "Snapshot",
    "adopt",
    "attach_slots",
    "copy_optimizer_state",
    "count_flops",
    "detach_slots",
    "export",
    "find_hooked_slots",
    "first_tensor",
    "fossil_settings",
    "gradient_health",
    "load_grown",
    "make_seed",
    "output_form",
    "replace_first_tensor",
    "restore",
    "restore_optimizer_state",
    "seed_flops",
    "seed_parameters",
    "seed_settings",
    "snapshot",
    "take_seed_weights",
    "widen_host",
    "widened",
    "without_seeds",
]
