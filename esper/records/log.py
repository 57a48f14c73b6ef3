"""Collects the steps of episodes while they run, and creates their records."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper.environment import Environment, GrowthStep, RollbackReason
from esper.lifecycle import ActionSpace, Blend, Rules, Stage, legal
from esper.records.record import EpisodeRecord, StepEntry

MEASURED = (
    "train_loss", "train_accuracy", "loss", "accuracy", "score", "gradient_norm", "health", "parameters", "flops",
)  # fmt: skip
MEASURED_BY_SLOT = ("contribution", "progress", "seed_gradient_norm", "seed_health", "isolated_gain")


@dataclass
class EpisodeLog:
    """Collects the steps of one round: N episodes that run in parallel."""

    space: ActionSpace
    rules: Rules
    episode_seeds: list[int]
    steps: list[list[StepEntry]] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = [[] for _ in self.episode_seeds]

    def add(self, action: Tensor, step: GrowthStep) -> None:
        """Add one step of all episodes."""
        legal_ops = legal(step.record.before, self.space, self.rules).op.tolist()
        blueprints = torch.where(
            step.record.during.blueprint < 0, step.record.before.blueprint, step.record.during.blueprint
        )
        for env, exists in enumerate(step.record.before.exists):
            ops = [op.name for op, is_legal in zip(self.space.ops, legal_ops[env], strict=True) if is_legal]
            entry = self._make_entry(env, exists, action.cpu()[env], step, ops, blueprints[env, exists].tolist())
            self.steps[env].append(entry)

    def _make_entry(
        self, env: int, exists: Tensor, action: Tensor, step: GrowthStep, ops: list[str], blueprints: list[int]
    ) -> StepEntry:
        """One step of an episode; lists have only the slots that `exists`, bool [slots], in its host."""
        record = step.record
        return StepEntry(
            action=named_action(self.space, action),
            legal=ops,
            reward=to_plain(step.reward[env]),
            reward_terms={name: to_plain(part[env]) for name, part in step.rewarded.parts.items()},
            findings=[
                f"{name}:{slot}"
                for name, findings in step.rewarded.findings.items()
                for slot, is_found in zip(self.space.slots, findings[env].tolist(), strict=True)
                if is_found
            ],
            **{name: to_plain(getattr(record.now, name)[env]) for name in MEASURED},
            **{name: to_plain(getattr(record.now, name)[env, exists]) for name in MEASURED_BY_SLOT},
            stage=[Stage(index).name for index in record.during.stage[env, exists].tolist()],
            alpha=to_plain(record.during.alpha[env, exists]),
            blueprint=[self.space.blueprints[index] if index >= 0 else None for index in blueprints],
            entered=[
                [Stage(index).name for index in stages.nonzero().flatten().tolist()]
                for stages in record.entered[env, exists]
            ],
            batches=int(record.batches[env]),
            rollback=RollbackReason(int(record.rollback[env])).name if record.rollback[env] else None,
        )


def named_action(space: ActionSpace, action: Tensor) -> dict[str, str]:
    """An action [heads] as option names by head, for the heads that its op uses."""
    op = space.ops[int(action[0])]
    return {
        head.name: head.options[index]
        for head, index in zip(space.heads, action.tolist(), strict=True)
        if op in head.ops
    }


def to_plain(values: Tensor) -> Any:
    """A tensor as a number or a list of numbers; None for non-finite values: not measured."""
    return _number(values.item()) if values.ndim == 0 else [_number(number) for number in values.tolist()]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def make_record(environment: Environment, log: EpisodeLog, env: int, **known: Any) -> EpisodeRecord:
    """The record of one finished episode; `known` are fields that only the caller knows: arm, score, and others."""
    steps, slots, pool = log.steps[env], environment.view.slots, environment.host_pool
    entered = [stage for step in steps for stages in step.entered for stage in stages]
    sizes = [step.parameters for step in steps if step.parameters is not None]
    if len(pool) > 1:
        known["host"] = pool.host_name(log.episode_seeds[env])
    return EpisodeRecord(
        **known,
        episode_seed=log.episode_seeds[env],
        data=pool.task(log.episode_seeds[env]).data.name,
        slots=list(environment.space.present_slots(slots.exists[env])),
        fossils={
            name: (environment.space.blueprints[int(blueprint)], Blend(int(blend)).name)
            for name, stage, blueprint, blend in zip(
                environment.space.slots, slots.stage[env], slots.blueprint[env], slots.blend[env], strict=True
            )
            if stage == Stage.FOSSILIZED
        },
        host_parameters=int(environment.view.host_parameters[env]),
        parameters_peak=max(sizes),
        parameters_mean=sum(sizes) / len(sizes),
        episode_return=_number(sum(math.nan if step.reward is None else step.reward for step in steps)),
        fossilized=entered.count(Stage.FOSSILIZED.name),
        pruned=entered.count(Stage.PRUNED.name),
        rollbacks=sum(step.rollback is not None for step in steps),
        steps=steps,
    )
