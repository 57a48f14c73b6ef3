"""A reward is a weighted list of terms; it always tells what each of them gave."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.environment import StepRecord
from esper.rewards.detectors import DETECTORS

Term = Callable[[StepRecord], Tensor]  # -> float32 [envs]


@dataclass(frozen=True)
class RewardBreakdown:
    """What a step earned: the total [envs], its parts by term, and which detectors found something [envs, slots]."""

    total: Tensor
    parts: dict[str, Tensor]
    findings: dict[str, Tensor]


class Reward:
    """Pays for steps.

    Arguments:
        terms: by name; each gives float32 [envs], weight included
    """

    def __init__(self, terms: Mapping[str, Term]) -> None:
        if not terms:
            raise ValueError("reward.terms: must name at least one term.")
        self.terms: dict[str, Term] = dict(terms)

    def __call__(self, record: StepRecord) -> RewardBreakdown:
        parts = {name: term(record) for name, term in self.terms.items()}
        findings = {name: detect(record) for name, detect in DETECTORS.items()}
        return RewardBreakdown(torch.stack(list(parts.values())).sum(0), parts, findings)

    @property
    def gammas(self) -> dict[str, float]:
        """The discount of each term that has one; it must be PPO's."""
        return {name: term.gamma for name, term in self.terms.items() if hasattr(term, "gamma")}
