"""Proximal policy optimisation (PPO): rollouts, advantages, losses, updates and checkpoints."""

from esper.ppo.budget import DecisionBudget
from esper.ppo.checkpoint import LAST, AtomicCheckpointIO, Checkpoint, CheckpointCallback, read_checkpoint
from esper.ppo.collector import (
    Collector,
    RoundListener,
    RoundLoader,
    StoppedError,
    VectorEnv,
    round_steps,
    task_features,
)
from esper.ppo.critic import Critic
from esper.ppo.distributed import RankLostError, detect_lost_rank, world_size
from esper.ppo.gae import gae
from esper.ppo.metadata import CheckpointMetadata, Counters, TrainingHistory, check_fits
from esper.ppo.module import PPO, DivergedError, StaleRolloutError
from esper.ppo.return_scale import ReturnScale
from esper.ppo.rollout import PADDING_OPTION, Rollout
from esper.ppo.settings import PPOSettings
from esper.ppo.teachers import clone_plans, listed_gains, oracle_gains

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
    "Critic",
    "DecisionBudget",
    "DivergedError",
    "PPOSettings",
    "RankLostError",
    "ReturnScale",
    "Rollout",
    "RoundListener",
    "RoundLoader",
    "StaleRolloutError",
    "StoppedError",
    "TrainingHistory",
    "VectorEnv",
    "check_fits",
    "clone_plans",
    "detect_lost_rank",
    "gae",
    "listed_gains",
    "oracle_gains",
    "read_checkpoint",
    "round_steps",
    "task_features",
    "world_size",
]
