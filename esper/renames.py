"""Names of version 0.1 and their new names: to name the new one in messages, and to read files of that version."""

from fnmatch import fnmatchcase
from typing import Any

MODULES = {
    "esper.seeding": "esper.rng",
    "esper.work": "esper.flops",
    "esper.learners": "esper.checkpoints",
    "esper.resume": "esper.checkpoints",
    "esper.comparison": "esper.evaluation",
    "esper.sweep": "esper.sweeps",
}
TARGETS = {  # values of `_target_`
    "esper.controllers.Chance": "esper.controllers.RandomController",
    "esper.controllers.Nothing": "esper.controllers.NoGrowth",
    "esper.controllers.Schedule": "esper.controllers.ScheduleController",
    "esper.controllers.Heuristic": "esper.controllers.HeuristicController",
    "esper.controllers.Fragrow": "esper.controllers.FragrowController",
    "esper.controllers.Learned": "esper.controllers.PolicyController",
    "esper.data.cifar10.load": "esper.data.cifar10.load_cifar10",
    "esper.data.tinystories.load": "esper.data.tinystories.load_tinystories",
    "esper.growth.Schedule": "esper.growth.LRSchedule",
    "esper.gym.Gymnasium": "esper.gym.GymnasiumVectorEnv",
    "esper.ppo.Checkpoints": "esper.ppo.CheckpointCallback",
    "esper.ppo.Settings": "esper.ppo.PPOSettings",
    "esper.sweep.Watch": "esper.sweeps.SweepCallback",
    "esper.telemetry.EpisodeRecords": "esper.telemetry.EpisodeWriter",
    "esper.telemetry.Progress": "esper.telemetry.ProgressDisplay",
    "esper.telemetry.RoundRecords": "esper.telemetry.RoundWriter",
}
KEYS = {  # pattern of a configuration key -> new name of its last part
    "ppo.foretells": "value_target",
    "ppo.advantage_least": "advantage_min_std",
    "policy.least": "min_std",
    "policy.most": "clip",
    "governor.least": "min_history",
    "governor.learned": "learned_below",
    "governor.band": "chance_band",
    "governor.sigmas": "std_factor",
    "governor.factor": "mean_factor",
    "governor.ceiling": "chance_factor",
    "callbacks.anomalies.closely": "detail_rounds",
    "callbacks.anomalies.thresholds.recovered": "recovery_factor",
    "callbacks.anomalies.thresholds.unearned": "unearned_steps",
    "controller.heuristic.rest": "cooldown",
    "controller.heuristic.hopeless": "max_drop",
    "controller.heuristic.keep": "min_contribution",
    "controller.heuristic.forget": "penalty_decay",
    "controller.heuristic.tolerance": "max_penalty",
    "controller.heuristic.steady": "steady_range",
    "controller.fragrow.longest": "max_interval",
    "environment.keep": "features",
    "reward.terms.*.most": "cap",
    "reward.terms.*.least_gain": "min_gain",
    "reward.terms.*.enough": "min_contribution",
    "reward.terms.*.too_little": "penalty",
    "reward.terms.*.legitimate": "full_credit_steps",
    "reward.terms.*.first": "base",
    "reward.terms.*.more": "per_step",
    "reward.terms.*.harmful": "harmful_bonus",
    "reward.terms.*.useful": "useful_penalty",
    "reward.terms.early_prune.age": "min_age",
}
NEW_TARGETS = {"callbacks.anomalies.thresholds": "esper.telemetry.Thresholds"}  # of nodes that had none
OPTIONS = {("policy", "lstm_open"): "lstm_floors", ("ablation", "critic_of_rest"): "value_target_rest"}
SUMMARY_KEYS = {"asked": "requested"}  # of summary.json


def renamed_key(key: str) -> str | None:
    """The new name of a configuration key; None if it was not renamed."""
    new = next((new for old, new in KEYS.items() if fnmatchcase(key, old)), None)
    return None if new is None else f"{key.rpartition('.')[0]}.{new}"


def renamed_override(override: str) -> str:
    """An override with its key and option renamed; unchanged if neither was renamed."""
    prefix = override[: len(override) - len(override.lstrip("+~"))]
    key, equals, value = override.removeprefix(prefix).partition("=")
    values = ",".join(OPTIONS.get((key, part), part) for part in value.split(",")) if equals else value
    return f"{prefix}{renamed_key(key) or key}{equals}{values}"


def rename_config(node: Any, path: str = "") -> Any:
    """A plain configuration with keys and targets renamed; `path` is the key of the node."""
    if isinstance(node, list):
        return [rename_config(entry, path) for entry in node]
    if not isinstance(node, dict):
        return node
    migrated = {}
    for key, value in node.items():
        full_key = f"{path}.{key}" if path else str(key)
        new = (renamed_key(full_key) or full_key).rpartition(".")[2]
        if key == "_target_":
            migrated[key] = TARGETS.get(value, value)
        elif new == key or new not in node:
            migrated[new] = rename_config(value, full_key)
    if path in NEW_TARGETS:
        migrated.setdefault("_target_", NEW_TARGETS[path])
    return migrated
