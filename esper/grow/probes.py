"""What each seed contributes: the network is measured again with the seed switched off."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from esper.growth import without_seeds

EvaluateResult = float | Tensor | tuple[float | Tensor, float | Tensor]
Evaluate = Callable[[], EvaluateResult]


@dataclass(frozen=True)
class Contributions:
    """Of each seed, by slot."""

    loss: dict[str, float] = field(default_factory=dict)  # without the seed minus with it
    score: dict[str, float] = field(default_factory=dict)  # with the seed minus without it


def measure_contributions(
    model: nn.Module, slots: Sequence[str], evaluate: Evaluate, points: Callable[[float | Tensor | None, float], float]
) -> Contributions:
    """Measure the seeds in some slots; `evaluate` returns the validation loss, or that and the score.

    It is called once with all seeds, and once for each slot. The mode of each module and torch's generator are as
    before. `points` turns a score, which may be unknown, and a loss into points.
    """
    if not slots:
        return Contributions()
    training = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng():
        loss, score = _pair(evaluate(), points)
        without = {}
        for slot in slots:
            with without_seeds(model, [slot]):
                without[slot] = _pair(evaluate(), points)
    for module, was_training in training:
        module.training = was_training
    return Contributions(
        loss={slot: pair[0] - loss for slot, pair in without.items()},
        score={slot: score - pair[1] for slot, pair in without.items()},
    )


def _pair(result: EvaluateResult, points: Callable[[float | Tensor | None, float], float]) -> tuple[float, float]:
    if isinstance(result, tuple | list):
        loss, score = result
        return float(loss), points(float(score), float(loss))
    loss = float(result)
    return loss, points(None, loss)
