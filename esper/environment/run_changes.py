"""The changes of host runs that follow from events of the lifecycle: seeds and snapshots."""

from functools import partial

from torch import Tensor

from esper.environment.host_run import HostRun
from esper.environment.host_runs import HostRuns
from esper.growth import fossil_settings
from esper.lifecycle import ActionSpace, Blend, Slots


class RunChanges:
    """Changes the runs of a round.

    Arguments:
        runs: the host runs
        space: the action space, with the names of slots and blueprints
        envs: number of environments
    """

    def __init__(self, runs: HostRuns, space: ActionSpace, envs: int) -> None:
        self._runs, self._space = runs, space
        self._measured: list[object] = [None] * envs  # how each run was measured last, if it is unchanged since

    def graft(self, new: Tensor, slots: Slots) -> None:
        """Graft the seeds of the slots in `new`, bool [envs, slots]."""
        for env, column in new.nonzero().tolist():
            blueprint = self._space.blueprints[int(slots.blueprint[env, column])]
            seed = {"slot": self._space.slots[column], "blueprint": blueprint}
            self._runs.change(env, partial(HostRun.graft, **seed, blend=Blend(int(slots.blend[env, column]))))

    def remove(self, pruned: Tensor) -> None:
        """Remove the seeds of the slots in `pruned`, bool [envs, slots]."""
        for env, column in pruned.nonzero().tolist():
            self._runs.change(env, partial(HostRun.remove, slot=self._space.slots[column]))
            self._measured[env] = None

    def widen(self, env: int, variant: str) -> None:
        """Widen a host to one of its variants."""
        self._runs.change(env, partial(HostRun.widen, variant=variant))
        self._measured[env] = None

    def freeze_seeds(self, envs: Tensor) -> None:
        """Train the present seeds of some hosts, bool [envs], no further."""
        for env in indices(envs):
            self._runs.change(env, HostRun.freeze_seeds)

    def save_snapshots(self, envs: Tensor, slots: Slots) -> None:
        """Replace the snapshots of some hosts, bool [envs], by their present state with their fossils."""
        for env in indices(envs):
            fossils = tuple(fossil_settings(slots, env, self._space.slots))
            self._runs.change(env, partial(HostRun.save_snapshot, seeds=fossils))

    def save_fossils(self, new: Tensor, is_healthy: Tensor, slots: Slots) -> None:
        """Save new fossils, bool [envs, slots], because a rollback must not lose them.

        A host that `is_healthy`, bool [envs], is saved with them; otherwise only the fossils join its snapshot.
        """
        self.save_snapshots(new.any(1) & is_healthy, slots)
        for env in indices(new.any(1) & ~is_healthy):
            names = tuple(self._space.slots[column] for column in indices(new[env]))
            self._runs.change(env, partial(HostRun.add_to_snapshot, seeds=names))

    def roll_back(self, envs: Tensor) -> None:
        """Restore the snapshots of some hosts, bool [envs]."""
        for env in indices(envs):
            self._runs.change(env, HostRun.roll_back)
            self._measured[env] = None

    def must_measure(self, env: int, batches: int, how: object) -> bool:
        """Whether a step of `batches` training batches can change what is measured; `how` is all else it depends on."""
        is_known = batches == 0 and self._measured[env] == how
        self._measured[env] = how
        return not is_known


def indices(mask: Tensor) -> list[int]:
    """Where a mask, bool [n], is true."""
    found: list[int] = mask.nonzero().flatten().tolist()
    return found
