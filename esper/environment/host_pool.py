"""The hosts that episodes choose from; in a task distribution, its tasks."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from esper.environment.costs import HostCosts
from esper.environment.host_task import HostTask
from esper.environment.purposes import TRAINING_PURPOSES, VALIDATION
from esper.hosts import Host
from esper.lifecycle import ActionSpace, merge_slot_names
from esper.observation import Descriptors
from esper.rng import derive_seed, make_generator

CACHED_BLOCKS = 256  # of episode seeds


class HostPool:
    """Hosts by name, with their data and costs. The episode seed determines the host of an episode.

    Hosts may have different slots, but each has at least one of the action space. In a task distribution, a name is
    that of a task, and the purpose of an episode decides from which split its task is drawn.

    Arguments:
        tasks: host, data and settings, by name
        slots: the slots of the action space
        repeats: consecutive episodes with the same task
        split: of tasks that evaluations draw; None is all tasks
    """

    def __init__(
        self, tasks: Mapping[str, HostTask], slots: Sequence[str], *, repeats: int = 1, split: str | None = None
    ) -> None:
        self._tasks, self._slots, self._repeats, self._split = dict(tasks), tuple(slots), repeats, split
        self._names = tuple(tasks)
        self._variant_costs: dict[tuple[str, str], HostCosts] = {}
        self._costs = {name: HostCosts(task.build, _example(task)) for name, task in tasks.items()}
        self._seeds_by_host = lru_cache(CACHED_BLOCKS)(partial(HostPool._find_seeds, self))
        known = merge_slot_names(costs.slots for costs in self._costs.values())
        for name in slots:
            if name not in known:
                raise ValueError(
                    f"slots.names={name}: is not a slot of {', '.join(tasks)}; must be one of {', '.join(known)}."
                )
        for host, costs in self._costs.items():
            if not set(costs.slots) & set(slots):
                raise ValueError(
                    f"host {host}: must have at least one of the slots {', '.join(slots)}, but has "
                    f"{', '.join(costs.slots) or 'none'}."
                )
        self._check_outputs()

    def _check_outputs(self) -> None:
        """Refuse hosts with fewer outputs than their data set has classes or tokens."""
        for name, costs in self._costs.items():
            data = self._tasks[name].data
            key, plural = ("vocabulary", "tokens") if data.kind == "text" else ("classes", "classes")
            if costs.outputs < data.options:
                path = f"host.{key}" if len(self) == 1 else f"host.hosts.{name}.{key}"
                raise ValueError(
                    f"{path}={costs.outputs}: must be at least {data.options}, the {plural} of {data.name}."
                )

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    def host_number(self, episode_seed: int) -> int:
        """The number of the host of an episode."""
        return derive_seed("host", episode_seed) % len(self)

    def host_name(self, episode_seed: int) -> str:
        """The name of the host of an episode."""
        return self._names[self.host_number(episode_seed)]

    def task(self, episode_seed: int) -> HostTask:
        """Host, data and settings of an episode."""
        return self._tasks[self.host_name(episode_seed)]

    def tasks(self) -> Mapping[str, HostTask]:
        """All tasks by name."""
        return self._tasks

    def slot_names(self, episode_seed: int) -> tuple[str, ...]:
        """The slots of the action space that an episode's host has."""
        return self.slots_of(self.host_name(episode_seed))

    def slots_of(self, host: str) -> tuple[str, ...]:
        """The slots of the action space that a host has."""
        return tuple(name for name in self._slots if name in self._costs[host].slots)

    def exists(self, episode_seeds: Iterable[int]) -> Tensor:
        """Which slots of the action space the host of each episode has: bool [episodes, slots]."""
        return self._exists(self.host_name(episode_seed) for episode_seed in episode_seeds)

    def exists_by_host(self) -> Tensor:
        """Which slots of the action space each host has: bool [hosts, slots]."""
        return self._exists(self.names)

    def _exists(self, hosts: Iterable[str]) -> Tensor:
        return torch.tensor([[name in self._costs[host].slots for name in self._slots] for host in hosts])

    def build(self, episode_seed: int) -> Host:
        return self.task(episode_seed).build()

    def costs(self, episode_seed: int, variant: str | None = None) -> HostCosts:
        """The costs of an episode's host, or of one of its variants."""
        host = self.host_name(episode_seed)
        if variant is None:
            return self._costs[host]
        if variant not in self.variants(host):
            allowed = ", ".join(self.variants(host)) or "none"
            raise ValueError(f"host variant {variant}: {host} has no such variant; it has {allowed}.")
        if (host, variant) not in self._variant_costs:
            task = self._tasks[host]
            self._variant_costs[host, variant] = HostCosts(task.variants[variant], _example(task))
        return self._variant_costs[host, variant]

    def variants(self, host: str) -> tuple[str, ...]:
        """The names of the wider and deeper variants of a host."""
        return tuple(self._tasks[host].variants)

    def traits(self, blueprints: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """What each blueprint does in these hosts, and its reach."""
        return next(iter(self._costs.values())).traits(blueprints)

    def describe(self, episode_seeds: Sequence[int], space: ActionSpace) -> Descriptors:
        """The descriptors of the slots and blueprints of some episodes."""
        hosts = [self.host_name(episode_seed) for episode_seed in episode_seeds]
        by_host = {name: self._costs[name].describe(space.slots, space.blueprints) for name in dict.fromkeys(hosts)}
        return Descriptors.stack([by_host[name] for name in hosts])

    def items(self) -> Iterable[tuple[str, HostCosts]]:
        return self._costs.items()

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int:
        """The seed of the episode number `index`.

        Each host comes once in every block of as many episodes as there are hosts, `repeats` times in a row, in an
        order that differs from block to block; families take turns. With a single host this is
        `derive_seed(purpose, run_seed, index)`.
        """
        numbers = self._numbers(purpose)
        block, position = divmod(index, len(numbers) * self._repeats)
        place, repeat = divmod(position, self._repeats)
        chosen = self._take_turns(numbers, make_generator(f"{purpose} hosts", run_seed, block))[place]
        return self._seeds_by_host(purpose, run_seed, block * self._repeats + repeat)[chosen]

    def episode_seeds(self, purpose: str, run_seed: int, index: int) -> list[int]:
        """One episode seed for each host of a purpose."""
        chosen = self._seeds_by_host(purpose, run_seed, index)
        return [chosen[number] for number in self._numbers(purpose)]

    def episode_seed_of(self, host: str, purpose: str, run_seed: int, index: int) -> int:
        """The episode seed of one host among those of `episode_seeds`."""
        return self._seeds_by_host(purpose, run_seed, index)[self._names.index(host)]

    def _numbers(self, purpose: str) -> list[int]:
        """The hosts that episodes of a purpose draw from."""
        if purpose in TRAINING_PURPOSES:
            split: str | None = "train"
        else:
            split = VALIDATION if purpose == VALIDATION else self._split
        drawn = [
            number
            for number, task in enumerate(self._tasks.values())
            if split is None or task.split is None or task.split == split
        ]
        if not drawn:
            raise ValueError(f"tasks: has no task of the split {split}, which {purpose} episodes draw from.")
        return drawn

    def _take_turns(self, numbers: Sequence[int], generator: torch.Generator) -> list[int]:
        """Hosts in random order such that families take turns: one of each family, then the next of each."""
        order = [numbers[index] for index in torch.randperm(len(numbers), generator=generator).tolist()]
        families: dict[str, list[int]] = {}
        for number in order:
            families.setdefault(self._tasks[self._names[number]].family, []).append(number)
        longest = max(len(family) for family in families.values())
        return [family[turn] for turn in range(longest) for family in families.values() if turn < len(family)]

    def _find_seeds(self, purpose: str, run_seed: int, index: int) -> dict[int, int]:
        """One episode seed for each host, by trying derived seeds until every host has one."""
        chosen: dict[int, int] = {}
        attempt = 0
        while len(chosen) < len(self):
            candidate = derive_seed(purpose if attempt == 0 else f"{purpose} {attempt}", run_seed, index)
            chosen.setdefault(self.host_number(candidate), candidate)
            attempt += 1
        return chosen


def _example(task: HostTask) -> Tensor:
    """One sample, [1, ...]."""
    sample, _ = next(task.data.batches("validation", 1))
    return sample
