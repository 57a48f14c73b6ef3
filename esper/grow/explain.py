"""Why a controller decided as it did."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from esper.controllers import PolicyController
from esper.lifecycle import ActionSpace
from esper.observation import Observation

FEATURES = 5  # that an explanation names


@dataclass(frozen=True)
class Explanation:
    """Probabilities of the options of each head, and the features that differ most from those of the training.

    Rules have no probabilities: their choice has probability 1, and they have no training.
    """

    probabilities: dict[str, dict[str, float]]  # by head: option -> probability, given the chosen op and slot
    features: dict[str, float] = field(
        default_factory=dict
    )  # name -> standard deviations from the mean of the training

    def __str__(self) -> str:
        heads = [
            f"{head}: " + ", ".join(f"{name} {share:.0%}" for name, share in sorted(options.items(), key=_by_value)[:4])
            for head, options in self.probabilities.items()
        ]
        unusual = ", ".join(f"{name} {value:+.1f}" for name, value in self.features.items())
        return "; ".join([*heads, *([f"unusual: {unusual}"] if unusual else [])])


def explain_decision(
    controller: Any, observation: Observation, memory: Any, action: Tensor, space: ActionSpace
) -> Explanation:
    """Why a controller with some memory took an action; for a trained one, from its distribution."""
    controller = getattr(controller, "controller", controller)
    op = space.ops[int(action[0, 0])]
    used = [head for head in space.heads if head.name == "op" or op in head.ops]
    if not isinstance(controller, PolicyController):
        chosen = zip(space.heads, action[0].tolist(), strict=True)
        return Explanation({head.name: {head.options[option]: 1.0} for head, option in chosen if head in used})
    decision = controller.explain(observation, memory)
    assert decision.distribution is not None
    shares = {
        head.name: dict(
            zip(head.options, decision.distribution.probabilities(head.name, action)[0].tolist(), strict=True)
        )
        for head in used
    }
    return Explanation(shares, _unusual(controller, decision.base, decision.slots, observation, space))


def _unusual(
    controller: PolicyController, base: Tensor, slots: Tensor, observation: Observation, space: ActionSpace
) -> dict[str, float]:
    layout = controller.layout
    values = dict(zip(layout.base, base[0].tolist(), strict=False))
    for slot, row, exists in zip(space.slots, slots[0].tolist(), observation.exists[0].tolist(), strict=True):
        if exists:
            values |= {f"{slot}: {name}": value for name, value in zip(layout.slot, row, strict=True)}
    ranked = sorted(values, key=lambda name: -abs(values[name]))
    return {name: values[name] for name in ranked[:FEATURES]}


def _by_value(item: tuple[str, float]) -> float:
    return -item[1]
