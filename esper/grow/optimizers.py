"""The user's optimizers and schedulers, with a parameter group for each seed.

Schedulers do not see the groups of seeds: before every optimizer step, a seed gets its host group's learning rate times
a factor. So every scheduler continues while groups come and go.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.hooks import RemovableHandle

OWNER = "esper_slot"  # entry of a seed's parameter group: its slot
HOST_INDEX = "esper_host_group"  # and the index of the group that it follows
FOLLOWED = ("momentum", "betas")  # besides the learning rate, what schedulers change
OWN_OPTIONS = (
    "params",
    "initial_lr",
    "max_lr",
    "min_lr",
    "swa_lr",
    "max_momentum",
    "base_momentum",
    "param_names",
    OWNER,
)


class HostGroups:
    """Stands for an optimizer in a scheduler: it has the parameter groups that the scheduler knows.

    Groups are found by their list of parameters, because loading a state replaces them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._known = list(optimizer.param_groups)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        by_parameters = {id(group["params"]): group for group in self.optimizer.param_groups}
        self._known = [by_parameters.get(id(group["params"]), group) for group in self._known]
        return self._known

    @property  # type: ignore[misc]  # Lightning's LearningRateMonitor takes names from it
    def __class__(self) -> type:
        return type(self.optimizer)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.optimizer

    def __hash__(self) -> int:
        return hash(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "optimizer":  # while it is copied, there is no optimizer yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)


def hide_seeds(scheduler: object) -> None:
    """Make a scheduler, and those that it consists of, see the present groups only."""
    for part in all_schedulers(scheduler):
        optimizer = getattr(part, "optimizer", None)
        if isinstance(optimizer, Optimizer) and not isinstance(optimizer, HostGroups):
            part.optimizer = HostGroups(optimizer)  # type: ignore[attr-defined]


def show_seeds(scheduler: object) -> None:
    """Undo `hide_seeds`."""
    for part in all_schedulers(scheduler):
        stand_in = getattr(part, "optimizer", None)
        if isinstance(stand_in, HostGroups):
            part.optimizer = stand_in.optimizer  # type: ignore[attr-defined]


def all_schedulers(scheduler: object) -> Iterator[object]:
    """A scheduler and the schedulers that it consists of, such as those of a SequentialLR."""
    yield scheduler
    for value in list(vars(scheduler).values()):
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, LRScheduler):
                yield from all_schedulers(part)


class SeedGroups:
    """Adds and removes the parameter groups of seeds. Nothing else in the optimizers changes.

    Arguments:
        model: the network
        optimizers: those that train it
        schedulers: of their learning rates
        lr_scale: learning rate of a seed relative to the layers at its slot
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[object] = (),
        *,
        lr_scale: float = 1.0,
    ) -> None:
        self.optimizers, self._model, self._lr_scale = list(optimizers), model, lr_scale
        if not self.optimizers:
            raise ValueError("optimizer=[]: must be at least one torch optimizer.")
        for optimizer in self.optimizers:
            if isinstance(optimizer, LBFGS):
                raise ValueError("optimizer=LBFGS: must have parameter groups; LBFGS allows only one.")
            if not schedulers and any("initial_lr" in group for group in optimizer.param_groups):
                raise ValueError(
                    f"schedulers=(): {type(optimizer).__name__} has a learning rate scheduler, which must be passed "
                    "too, because it would refuse the groups of seeds."
                )
        self._schedulers: list[object] = []
        for scheduler in schedulers:
            self.add_scheduler(scheduler)
        self._handles: list[RemovableHandle] = []
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        self.listeners: list[Callable[[Optimizer], None]] = []  # called after each step, before gradients are cleared

    def add_scheduler(self, scheduler: object) -> None:
        """Keep a scheduler from the groups of seeds."""
        hide_seeds(scheduler)
        self._schedulers.append(scheduler)

    def add(self, slot: str, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Add the parameters of a new seed to the optimizer that trains the module at its slot."""
        optimizer, index = self._owner(module)
        host = optimizer.param_groups[index]
        options = {key: _copied(value) for key, value in host.items() if key not in OWN_OPTIONS}
        named = [(f"{slot}.{number}", parameter) for number, parameter in enumerate(parameters)]
        own = named if "param_names" in host else list(parameters)  # torch wants names for all groups or for none
        optimizer.add_param_group({"params": own, **options, OWNER: slot, HOST_INDEX: index})
        self._follow(optimizer)

    def remove(self, slot: str) -> None:
        """Remove the parameters of a seed and their state."""
        for optimizer in self.optimizers:
            for group in [group for group in optimizer.param_groups if group.get(OWNER) == slot]:
                for parameter in group["params"]:
                    optimizer.state.pop(parameter, None)
                optimizer.param_groups[:] = [other for other in optimizer.param_groups if other is not group]

    def order(self) -> list[str]:
        """The slots that have a group, in the order of the optimizers and their groups."""
        return [group[OWNER] for optimizer in self.optimizers for group in optimizer.param_groups if OWNER in group]

    def owned(self, optimizer: Optimizer) -> dict[str | None, list[nn.Parameter]]:
        """The parameters in an optimizer by the slot of their seed; None is the network without seeds."""
        result: dict[str | None, list[nn.Parameter]] = {}
        for group in optimizer.param_groups:
            result.setdefault(group.get(OWNER), []).extend(group["params"])
        return result

    @property
    def schedulers(self) -> tuple[object, ...]:
        return tuple(self._schedulers)

    def close(self) -> None:
        """Leave the optimizers and schedulers to themselves; the groups of seeds stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for scheduler in self._schedulers:
            if not any(OWNER in group for optimizer in self.optimizers for group in optimizer.param_groups):
                show_seeds(scheduler)

    def _owner(self, module: nn.Module) -> tuple[Optimizer, int]:
        """The optimizer that trains a module, and the index of the group with the largest part of its weights.

        A module without trained weights belongs to the largest group of all.
        """
        places = [
            (optimizer, index, {id(parameter): parameter for parameter in group["params"]})
            for optimizer in self.optimizers
            for index, group in enumerate(optimizer.param_groups)
            if OWNER not in group
        ]
        own = {id(parameter) for parameter in module.parameters()}
        sizes = [sum(p.numel() for key, p in held.items() if key in own) for _, _, held in places]
        if not any(sizes):
            sizes = [sum(p.numel() for p in held.values()) for _, _, held in places]
        optimizer, index, _ = places[sizes.index(max(sizes))]
        return optimizer, index

    def _before_step(self, optimizer: Optimizer, arguments: object, keywords: object) -> None:
        self._follow(optimizer)

    def _after_step(self, optimizer: Optimizer, arguments: object, keywords: object) -> None:
        for listener in self.listeners:
            listener(optimizer)

    def _follow(self, optimizer: Optimizer) -> None:
        """Set the learning rates of seeds by those of their host groups."""
        for group in optimizer.param_groups:
            if OWNER not in group:
                continue
            host = optimizer.param_groups[group[HOST_INDEX]]
            _set(group, "lr", host["lr"] * self._lr_scale)
            for key in FOLLOWED:
                if key in host:
                    group[key] = host[key]


def future_rates(scheduler: object, steps: int) -> list[float] | None:
    """The learning rates of the first group until a scheduler has made some more steps, that of now first.

    Nothing of the scheduler changes. None if they cannot be known, as for a scheduler that depends on results.
    """
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        return None
    original = scheduler.optimizer
    keep = [{key: value for key, value in group.items() if key != "param_names"} for group in original.param_groups]
    groups = [{**group, "params": [nn.Parameter(torch.zeros(()))]} for group in keep]
    stand_in = SGD(groups, lr=float(groups[0]["lr"]))
    parts = [getattr(part, "optimizer", None) for part in all_schedulers(scheduler)]
    replaced = [each for part in parts for each in (part, getattr(part, "optimizer", part))]
    twin = copy.deepcopy(scheduler, {id(each): stand_in for each in replaced})
    rates = []
    with warnings.catch_warnings(action="ignore"):
        for _ in range(steps):
            rates.append(float(stand_in.param_groups[0]["lr"]))
            try:
                twin.step()
            except (ValueError, ZeroDivisionError):  # OneCycleLR has ended
                break
    return rates


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _set(group: dict[str, Any], key: str, value: float | Tensor) -> None:
    """Set an option of a group; a tensor, as in a captured graph, is changed in place."""
    if isinstance(group[key], Tensor):
        group[key].fill_(value)
    else:
        group[key] = float(value) if isinstance(value, Tensor) else value
