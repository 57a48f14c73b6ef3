"""How the policy learns."""

from esper.ppo.agree import RankLostError, ranks, together
from esper.ppo.checkpoint import LAST, AtomicIO, Checkpoints, read_checkpoint, restore
from esper.ppo.collector import Collector, Rounds, StoppedError, Watcher, World
from esper.ppo.gae import gae
from esper.ppo.module import PPO, Counters, DivergedError
from esper.ppo.rollout import PADDING_OPTION, Rollout
from esper.ppo.scale import ReturnScale
from esper.ppo.settings import Settings

__all__ = [
    "LAST",
    "PADDING_OPTION",
    "PPO",
    "AtomicIO",
    "Checkpoints",
    "Collector",
    "Counters",
    "DivergedError",
    "RankLostError",
    "ReturnScale",
    "Rollout",
    "Rounds",
    "Settings",
    "StoppedError",
    "Watcher",
    "World",
    "gae",
    "ranks",
    "read_checkpoint",
    "restore",
    "together",
]
