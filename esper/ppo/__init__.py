"""Proximal policy optimisation (PPO): rollouts, advantages, losses, updates and checkpoints."""

from esper.ppo.checkpoint import (
    LAST,
    AtomicCheckpointIO,
    Checkpoint,
    CheckpointCallback,
    read_checkpoint,
    restore_module,
)
from esper.ppo.collector import Collector, RoundListener, RoundLoader, StoppedError, VectorEnv
from esper.ppo.distributed import RankLostError, detect_lost_rank, world_size
from esper.ppo.gae import gae
from esper.ppo.metadata import CheckpointMetadata, Counters, TrainingHistory
from esper.ppo.module import PPO, DivergedError
from esper.ppo.return_scale import ReturnScale
from esper.ppo.rollout import PADDING_OPTION, Rollout
from esper.ppo.settings import PPOSettings

__all__ = [
    "LAST",
    "PADDING_OPTION",
    "PPO",
    "AtomicCheckpointIO",
    "Checkpoint",
    "CheckpointCallback",
    "CheckpointMetadata",
    "Collector",
    "Counters",
    "DivergedError",
    "PPOSettings",
    "RankLostError",
    "ReturnScale",
    "Rollout",
    "RoundListener",
    "RoundLoader",
    "StoppedError",
    "TrainingHistory",
    "VectorEnv",
    "detect_lost_rank",
    "gae",
    "read_checkpoint",
    "restore_module",
    "world_size",
]
