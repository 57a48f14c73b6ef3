"""The hosts that episodes choose from."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from esper.data import Data
from esper.environment.costs import HostCosts
from esper.hosts import Host
from esper.lifecycle import ActionSpace, merge_slot_names
from esper.observation import Descriptors
from esper.rng import derive_seed, make_generator


class HostPool:
    """Hosts by name, with their costs. The episode seed determines the host of an episode.

    Hosts may have different slots, but each has at least one of the action space.

    Arguments:
        hosts: functions that build a host, by name
        example: one sample, [1, ...]
        slots: the slots of the action space
        variants: for each host, functions that build wider and deeper ones, by name
    """

    def __init__(
        self,
        hosts: Mapping[str, Callable[[], Host]],
        example: Tensor,
        slots: Sequence[str],
        variants: Mapping[str, Mapping[str, Callable[[], Host]]] | None = None,
    ) -> None:
        self._hosts, self._example, self._slots = dict(hosts), example, tuple(slots)
        self._variants = variants or {}
        self._variant_costs: dict[tuple[str, str], HostCosts] = {}
        self._costs = {name: HostCosts(build, example) for name, build in hosts.items()}
        known = merge_slot_names(costs.slots for costs in self._costs.values())
        for name in slots:
            if name not in known:
                raise ValueError(
                    f"slots.names={name}: is not a slot of {', '.join(hosts)}; must be one of {', '.join(known)}."
                )
        for host, costs in self._costs.items():
            if not set(costs.slots) & set(slots):
                raise ValueError(
                    f"host {host}: must have at least one of the slots {', '.join(slots)}, but has "
                    f"{', '.join(costs.slots) or 'none'}."
                )

    def check_outputs(self, data: Data) -> None:
        """Refuse hosts with fewer outputs than the data set has classes or tokens."""
        key, plural = ("vocabulary", "tokens") if data.kind == "text" else ("classes", "classes")
        for name, costs in self._costs.items():
            if costs.outputs < data.options:
                path = f"host.{key}" if len(self) == 1 else f"host.hosts.{name}.{key}"
                raise ValueError(
                    f"{path}={costs.outputs}: must be at least {data.options}, the {plural} of {data.name}."
                )

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._hosts)

    def host_name(self, episode_seed: int) -> str:
        """The name of the host of an episode."""
        return self.names[derive_seed("host", episode_seed) % len(self)]

    def slot_names(self, episode_seed: int) -> tuple[str, ...]:
        """The slots of the action space that an episode's host has."""
        own = self.costs(episode_seed).slots
        return tuple(name for name in self._slots if name in own)

    def exists(self, episode_seeds: Iterable[int]) -> Tensor:
        """Which slots of the action space the host of each episode has: bool [episodes, slots]."""
        return self._exists(self.host_name(episode_seed) for episode_seed in episode_seeds)

    def exists_by_host(self) -> Tensor:
        """Which slots of the action space each host has: bool [hosts, slots]."""
        return self._exists(self.names)

    def _exists(self, hosts: Iterable[str]) -> Tensor:
        return torch.tensor([[name in self._costs[host].slots for name in self._slots] for host in hosts])

    def build(self, episode_seed: int) -> Host:
        return self._hosts[self.host_name(episode_seed)]()

    def costs(self, episode_seed: int, variant: str | None = None) -> HostCosts:
        """The costs of an episode's host, or of one of its variants."""
        host = self.host_name(episode_seed)
        if variant is None:
            return self._costs[host]
        if variant not in self.variants(host):
            allowed = ", ".join(self.variants(host)) or "none"
            raise ValueError(f"host variant {variant}: {host} has no such variant; it has {allowed}.")
        if (host, variant) not in self._variant_costs:
            self._variant_costs[host, variant] = HostCosts(self._variants[host][variant], self._example)
        return self._variant_costs[host, variant]

    def variants(self, host: str) -> tuple[str, ...]:
        """The names of the wider and deeper variants of a host."""
        return tuple(self._variants.get(host, {}))

    def describe(self, episode_seeds: Sequence[int], space: ActionSpace) -> Descriptors:
        """The descriptors of the slots and blueprints of some episodes."""
        hosts = [self.host_name(episode_seed) for episode_seed in episode_seeds]
        by_host = {name: self._costs[name].describe(space.slots, space.blueprints) for name in dict.fromkeys(hosts)}
        return Descriptors.stack([by_host[name] for name in hosts])

    def items(self) -> Iterable[tuple[str, HostCosts]]:
        return self._costs.items()

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int:
        """The seed of the episode number `index`.

        Each host comes once in every block of as many episodes as there are hosts, in an order that differs from block
        to block. With a single host this is `derive_seed(purpose, run_seed, index)`.
        """
        block, position = divmod(index, len(self))
        order = torch.randperm(len(self), generator=make_generator(f"{purpose} hosts", run_seed, block))
        return self.episode_seeds(purpose, run_seed, block)[int(order[position])]

    def episode_seeds(self, purpose: str, run_seed: int, index: int) -> list[int]:
        """One episode seed for each host, by trying derived seeds until every host has one."""
        chosen: dict[str, int] = {}
        attempt = 0
        while len(chosen) < len(self._hosts):
            candidate = derive_seed(purpose if attempt == 0 else f"{purpose} {attempt}", run_seed, index)
            chosen.setdefault(self.host_name(candidate), candidate)
            attempt += 1
        return [chosen[name] for name in self._hosts]
