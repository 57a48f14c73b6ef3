"""A reward is a list of weighted terms; its breakdown has the value of each term."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.environment import StepRecord
from esper.rewards.detectors import DETECTORS

Term = Callable[[StepRecord], Tensor]  # -> float32 [envs]


@dataclass(frozen=True)
class RewardBreakdown:
    """The reward of a step."""

    total: Tensor  # float32 [envs]
    parts: dict[str, Tensor]  # by term, float32 [envs]; they add up to the total
    findings: dict[str, Tensor]  # by detector, bool [envs, slots]


class Reward:
    """Computes the reward of a step.

    Arguments:
        terms: by name; each returns float32 [envs], its weight included
    """

    def __init__(self, terms: Mapping[str, Term]) -> None:
        if not terms:
            raise ValueError("reward.terms={}: must have at least one term.")
        self.terms: dict[str, Term] = dict(terms)

    def __call__(self, record: StepRecord) -> RewardBreakdown:
        parts = {name: term(record) for name, term in self.terms.items()}
        findings = {name: detect(record) for name, detect in DETECTORS.items()}
        return RewardBreakdown(torch.stack(list(parts.values())).sum(0), parts, findings)

    @property
    def gammas(self) -> dict[str, float]:
        """The gamma of each term that has one; it must equal the gamma of PPO."""
        return {name: term.gamma for name, term in self.terms.items() if hasattr(term, "gamma")}
