"""Environments: N episodes stepped together."""

from esper.environment.environment import Environment
from esper.environment.governor import Governor, RollbackReason
from esper.environment.host_task import HostTask, KnownScores
from esper.environment.oracle import Oracle
from esper.environment.parallel import available_cores
from esper.environment.record import StepRecord, net_score
from esper.environment.start import EpisodeStart
from esper.environment.step import GrowthStep, RewardResult
from esper.environment.task_oracle import TaskOracle
from esper.environment.worker_runs import WorkerLostError

__all__ = [
    "Environment",
    "EpisodeStart",
    "Governor",
    "GrowthStep",
    "HostTask",
    "KnownScores",
    "Oracle",
    "RewardResult",
    "RollbackReason",
    "StepRecord",
    "TaskOracle",
    "WorkerLostError",
    "available_cores",
    "net_score",
]
