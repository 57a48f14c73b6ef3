"""The episodes of a round while they run: seeds come and go, hosts train, are measured and rolled back."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from esper.environment.accounting import CostAccounting
from esper.environment.clock import Clock
from esper.environment.governor import Governor, RollbackReason
from esper.environment.host_pool import HostPool
from esper.environment.host_run import HostRun, HostRunOptions, StepPlan, vector_width
from esper.environment.host_runs import HostRuns, RunOrigin
from esper.environment.round_clock import RoundClock
from esper.environment.run_changes import RunChanges, indices
from esper.environment.start import EpisodeStart, graft_fossils, initial_slots
from esper.growth import LRSchedule, Mode, SeedSettings, fossil_settings, seed_settings
from esper.lifecycle import ActionSpace, Events, Rules, Slots, Stage, commit, evict
from esper.observation import HostMeasurements


@dataclass(frozen=True)
class RoundParts:
    """What all rounds of an environment have in common."""

    runs: HostRuns
    host_pool: HostPool
    space: ActionSpace
    rules: Rules
    options: HostRunOptions
    governor: Callable[..., Governor]
    clock: Clock
    schedule: LRSchedule | None
    steps: int  # decisions in an episode
    attribution_every: int  # steps between measurements of contribution; 0 is never


@dataclass(frozen=True)
class TrainedStep:
    """The result of training and measuring all hosts for one step."""

    now: HostMeasurements
    batches: Tensor  # int64 [envs], training batches
    measured: Tensor  # bool [envs], whether the step ended with a measurement


class Round:
    """The episodes of a round, which start here.

    Arguments:
        parts: of the environment
        episode_seeds, starts: of each episode
    """

    def __init__(self, parts: RoundParts, episode_seeds: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        self._parts, self._starts, self.episodes = parts, starts, len(episode_seeds)
        pool, pairs = parts.host_pool, list(zip(episode_seeds, starts, strict=True))
        tasks = [pool.task(episode_seed) for episode_seed in episode_seeds]
        self.first_slots = initial_slots(starts, parts.space, pool.exists(episode_seeds))
        self._wide_costs = [pool.costs(episode_seed, start.widen) for episode_seed, start in pairs]
        self.accounting = CostAccounting(
            [pool.costs(episode_seed) for episode_seed in episode_seeds],
            [pool.costs(episode_seed, start.host) for episode_seed, start in pairs],
            tasks, parts.space, parts.options,
        )  # fmt: skip
        parts.runs.start(
            [RunOrigin(seed, pool.host_name(seed), start.host, start.lr_scale) for seed, start in pairs]
        )  # fmt: skip
        self._changes = RunChanges(parts.runs, parts.space, self.episodes)
        self._changes.graft(self.first_slots.stage == Stage.FOSSILIZED, self.first_slots)
        self._changes.freeze_seeds(torch.tensor([start.frozen for start in starts]))
        self._changes.save_snapshots(torch.ones(self.episodes, dtype=torch.bool), self.first_slots)
        self.governor = parts.governor(
            envs=self.episodes, chance=torch.tensor([math.log(task.data.options) for task in tasks])
        )
        self.clock = RoundClock(parts.clock, starts, parts.steps, self.accounting, self._changes, parts.schedule)

    def prepare(self, slots: Slots, entered: Tensor, step: int, score: Tensor) -> tuple[Slots, Tensor]:
        """Change the hosts before a step: seeds of the chosen actions, and the plans of the episodes.

        Arguments:
            slots: after the actions
            entered: bool [envs, slots, stages], the stages that slots entered by the actions
            step: number of the step
            score: [envs], before the step

        Returns both with the changes of the plans.
        """
        slots, entered = self._follow_plans(slots, entered, step)
        self.remove_pruned(Events(entered))
        new = entered[..., Stage.GERMINATED]
        self.accounting.note_germination(new, score)
        self._changes.graft(new, slots)
        self._changes.save_fossils(entered[..., Stage.FOSSILIZED], self.governor.is_healthy(), slots)
        return slots, entered

    def train(self, during: Slots, step: int) -> TrainedStep:
        """Train and measure all hosts for one step."""
        plans = {env: self._plan(env, during, step) for env in range(self.episodes)}
        results = self.compute({env: partial(HostRun.train_and_measure, plan=plan) for env, plan in plans.items()})
        measured = torch.tensor([plan.measure or not self._parts.clock.is_budgeted for plan in plans.values()])
        now = self.accounting.unpack_measurements(results, during, self._is_last(step), measured)
        return TrainedStep(now, torch.tensor([plan.batches for plan in plans.values()]), measured)

    def rollback_reason(self, trained: TrainedStep, step: int) -> Tensor:
        """RollbackReason of each host: int64 [envs].

        In the last step live seeds are off, so past losses do not compare. A host that was not measured is judged by
        its training loss.
        """
        now, non_finite = trained.now, int(RollbackReason.NON_FINITE)
        if self._is_last(step):
            return torch.where(now.loss.isfinite(), 0, non_finite)
        reason = self.governor.judge(now.loss, trained.measured)
        has_failed = ~trained.measured & (trained.batches > 0) & ~now.train_loss.isfinite()
        return torch.where(has_failed, non_finite, reason)

    def roll_back(
        self, during: Slots, now: HostMeasurements, envs: Tensor, step: int
    ) -> tuple[Slots, HostMeasurements, Tensor]:
        """Restore the last good snapshot of some hosts, prune their live seeds, and measure them again."""
        slots, events = evict(during, envs, self._parts.rules)
        self.accounting.note_removal(events.into(Stage.PRUNED))
        self._changes.roll_back(envs)
        now = now.where(envs, self.measure_untrained(envs, slots, self._is_last(step)))
        self.governor.reset_history(envs, now.loss)
        return slots, now, events.entered

    def remove_pruned(self, events: Events) -> None:
        """Remove the seeds that were pruned."""
        pruned = events.into(Stage.PRUNED)
        self.accounting.note_removal(pruned)
        self._changes.remove(pruned)

    def save_snapshots(self, is_normal: Tensor, slots: Slots, step: int) -> None:
        """Save the hosts that ended a step without a rollback, bool [envs], every few steps."""
        if (step + 1) % self.governor.snapshot_every == 0:
            self._changes.save_snapshots(is_normal & self.governor.is_healthy(), slots)

    def measure_untrained(self, envs: Tensor, slots: Slots, last: bool) -> HostMeasurements:
        """Measure some hosts, bool [envs], with their fossils and without training; NaN for the others."""
        is_final = last and self._parts.clock.is_budgeted  # of the whole split, and nothing depends on it
        names = self._parts.space.slots
        committed = {env: fossil_settings(slots, env, names) for env in indices(envs)}
        samples = {env: self.clock.samples(env, is_final) for env in committed}
        for env, settings in committed.items() if not is_final else ():
            self.accounting.charge_validation(env, settings, slots, samples[env])
        values = torch.full((self.episodes, vector_width(len(names))), torch.nan)
        if committed:
            values[envs] = self.compute(
                {env: partial(HostRun.measure, settings=s, samples=samples[env]) for env, s in committed.items()}
            )
        return self.accounting.unpack_measurements(values, slots, last)

    def compute(self, computations: Mapping[int, Callable[[HostRun], Tensor]]) -> Tensor:
        """Compute with some runs, by environment: [runs, values] on the CPU, the only transfer from the device."""
        results = self._parts.runs.compute(computations)
        device = self.accounting.tasks[0].data.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # each run has its own stream
        return torch.stack(results).cpu()

    def _is_last(self, step: int) -> bool:
        return step + 1 == self._parts.steps

    def _follow_plans(self, slots: Slots, entered: Tensor, step: int) -> tuple[Slots, Tensor]:
        """Graft the fossils and widen the hosts of episodes whose time has come; commit seeds before the last step."""
        parts = self._parts
        due = [start.starts_at(parts.steps) == step for start in self._starts]
        grafts = [is_due and start.at > 0 for is_due, start in zip(due, self._starts, strict=True)]
        slots, new = graft_fossils(slots, self._starts, parts.space, grafts)
        entered = entered.clone()
        entered[..., Stage.GERMINATED] |= new
        entered[..., Stage.FOSSILIZED] |= new
        for env, start in enumerate(self._starts):
            if due[env] and start.widen is not None:
                self._changes.widen(env, start.widen)
                self.accounting.replace_host(env, self._wide_costs[env])
                self._changes.save_snapshots(torch.arange(self.episodes) == env, slots)
        if self._is_last(step):
            slots, committed = commit(slots, parts.rules)
            entered |= committed.entered
        return slots, entered

    def _plan(self, env: int, during: Slots, step: int) -> StepPlan:
        """The plan of a run's next step, which is charged."""
        names, last = self._parts.space.slots, self._is_last(step)
        settings = seed_settings(during, env, names)
        final = fossil_settings(during, env, names) if last else settings
        off = () if last else self._slots_to_probe(settings, during, env, step)
        return self.clock.plan(env, StepPlan(settings, final, off, 0, (0.0, 0.0)), during, step)

    def _slots_to_probe(self, settings: SeedSettings, during: Slots, env: int, step: int) -> tuple[str, ...]:
        """Slots of the live seeds whose contribution is measured in this step."""
        every = self._parts.attribution_every
        if not every or step % every:
            return ()
        live = dict(zip(self._parts.space.slots, during.live[env].tolist(), strict=True))
        return tuple(name for name, s in settings.items() if live[name] and s.mode is not Mode.ISOLATED and s.alpha > 0)
