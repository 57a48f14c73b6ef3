"""The last good state of a training, to go back to when a new seed breaks it."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from esper.growth import copy_optimizer_state, restore_optimizer_state


@dataclass(frozen=True)
class GoodState:
    """Weights and optimizer state on the CPU, and the results that belong to them."""

    weights: dict[str, Tensor]
    optimizers: list[dict[str, dict[str, Any]]]
    loss: float
    score: float

    @classmethod
    def of(cls, model: nn.Module, optimizers: list[Optimizer], loss: float, score: float) -> "GoodState":
        """A copy of the present state."""
        parameters = dict(model.named_parameters())
        tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        return cls(
            weights={name: value.detach().to("cpu", copy=True) for name, value in tensors.items()},
            optimizers=[copy_optimizer_state(parameters, optimizer) for optimizer in optimizers],
            loss=loss,
            score=score,
        )

    def restore(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        """Set everything that still exists to this state; new parts keep theirs."""
        present = model.state_dict()
        model.load_state_dict({name: value for name, value in self.weights.items() if name in present}, strict=False)
        parameters = dict(model.named_parameters())
        for optimizer, saved in zip(optimizers, self.optimizers, strict=True):
            restore_optimizer_state(saved, parameters, optimizer)
