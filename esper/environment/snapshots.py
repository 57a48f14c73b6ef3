"""Snapshots of hosts, for rollbacks."""

from collections.abc import Sequence

from torch import Tensor

from esper.environment.host_run import HostRun
from esper.growth import Snapshot, adopt, fossil_settings
from esper.lifecycle import Slots


class SnapshotStore:
    """The last good state of each host with its fossils.

    Arguments:
        runs: host runs at the start of their episodes
        names: slot names, in the order of their columns
    """

    def __init__(self, runs: Sequence[HostRun], names: tuple[str, ...]) -> None:
        self._runs, self._names = runs, names
        self.snapshots: list[Snapshot] = [run.snapshot(tuple(run.model.seeds)) for run in runs]

    def save(self, envs: Tensor, slots: Slots) -> None:
        """Replace the snapshots of some hosts, bool [envs]."""
        for env in _indices(envs):
            self.snapshots[env] = self._runs[env].snapshot(fossil_settings(slots, env, self._names).keys())

    def save_fossils(self, new: Tensor, is_healthy: Tensor, slots: Slots) -> None:
        """Save new fossils, bool [envs, slots], because a rollback must not lose them.

        A host that `is_healthy`, bool [envs], is saved with them; otherwise only the fossils join the old snapshot.
        """
        self.save(new.any(1) & is_healthy, slots)
        for env in _indices(new.any(1) & ~is_healthy):
            names = [name for name, is_new in zip(self._names, new[env].tolist(), strict=True) if is_new]
            self.snapshots[env] = adopt(self.snapshots[env], self._runs[env].snapshot(names), names)

    def restore(self, envs: Tensor) -> None:
        """Restore the snapshots of some hosts, bool [envs]."""
        for env in _indices(envs):
            self._runs[env].restore(self.snapshots[env])


def _indices(envs: Tensor) -> list[int]:
    indices: list[int] = envs.nonzero().flatten().tolist()
    return indices
