"""Copies of hosts, to bring them back to."""

from collections.abc import Sequence

from torch import Tensor

from esper.environment.host_run import HostRun
from esper.growth import Snapshot, adopt, fossil_settings
from esper.lifecycle import Slots


class SnapshotStore:
    """The last good state of each host with its fossils.

    Arguments:
        runs: the hosts, as their episodes begin
        names: of the slots, in the order of their columns
    """

    def __init__(self, runs: Sequence[HostRun], names: tuple[str, ...]) -> None:
        self._runs, self._names = runs, names
        self.saved: list[Snapshot] = [run.snapshot(tuple(run.model.seeds)) for run in runs]

    def save(self, envs: Tensor, slots: Slots) -> None:
        """Keep a copy of some hosts, bool [envs]; the older copy is let go."""
        for env in _indices(envs):
            self.saved[env] = self._runs[env].snapshot(fossil_settings(slots, env, self._names).keys())

    def save_fossils(self, new: Tensor, sound: Tensor, slots: Slots) -> None:
        """A later return must find every fossil; the host around new ones, bool [envs, slots], is kept if `sound`."""
        self.save(new.any(1) & sound, slots)
        for env in _indices(new.any(1) & ~sound):
            names = [name for name, here in zip(self._names, new[env].tolist(), strict=True) if here]
            self.saved[env] = adopt(self.saved[env], self._runs[env].snapshot(names), names)

    def restore(self, envs: Tensor) -> None:
        """Bring some hosts, bool [envs], back."""
        for env in _indices(envs):
            self._runs[env].restore(self.saved[env])


def _indices(envs: Tensor) -> list[int]:
    found: list[int] = envs.nonzero().flatten().tolist()
    return found
