"""The hosts that episodes may have."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

from torch import Tensor

from esper.environment.costs import HostCosts
from esper.hosts import Host
from esper.rng import derive_seed


class HostPool:
    """Hosts by name, each with what it costs; which of them an episode has follows from its seed.

    Arguments:
        hosts: make a host each
        example: one sample, [1, ...]
        slots: that every host must have
    """

    def __init__(self, hosts: Mapping[str, Callable[[], Host]], example: Tensor, slots: Sequence[str]) -> None:
        self._hosts = dict(hosts)
        self._costs = {name: HostCosts(build, example) for name, build in hosts.items()}
        for host, costs in self._costs.items():
            for name in slots:
                if name not in costs.slots:
                    raise ValueError(f"slots.names: {name} is no slot of {host}; it has {', '.join(costs.slots)}.")
        if len({costs.slots for costs in self._costs.values()}) > 1:
            raise ValueError(f"hosts: {', '.join(hosts)} must have the same slots in the same order.")

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._hosts)

    def host_name(self, episode_seed: int) -> str:
        """Of the host that the episode of a seed has."""
        return self.names[derive_seed("host", episode_seed) % len(self)]

    def build(self, episode_seed: int) -> Host:
        return self._hosts[self.host_name(episode_seed)]()

    def costs(self, episode_seed: int) -> HostCosts:
        return self._costs[self.host_name(episode_seed)]

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int:
        """The seed of an episode, by its number: every host comes as often, and a pair of episodes has any two alike.

        With a single host it is the purpose's own.
        """
        hosts = range(len(self._hosts))
        turns = [host for pair in product(hosts, hosts) for host in pair]
        block, place = divmod(index, len(turns))
        earlier = block * turns.count(turns[place]) + turns[:place].count(turns[place])
        return self.episode_seeds(purpose, run_seed, earlier if len(hosts) > 1 else index)[turns[place]]

    def episode_seeds(self, purpose: str, run_seed: int, index: int) -> list[int]:
        """An episode seed for each host, derived from a purpose; with a single host, the purpose's own."""
        found: dict[str, int] = {}
        tried = 0
        while len(found) < len(self._hosts):
            candidate = derive_seed(purpose if tried == 0 else f"{purpose} {tried}", run_seed, index)
            found.setdefault(self.host_name(candidate), candidate)
            tried += 1
        return [found[name] for name in self._hosts]
