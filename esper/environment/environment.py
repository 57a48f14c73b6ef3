"""N host runs stepped together: act, train, measure, govern, tick, reward, observe, in that order and no other."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from esper.data import Data
from esper.environment.accounting import CostAccounting, batches_for
from esper.environment.governor import Governor, RollbackReason
from esper.environment.host_pool import HostPool
from esper.environment.host_run import PRECISIONS, HostRun, HostRunOptions, StepPlan
from esper.environment.record import StepRecord, net_score
from esper.environment.snapshots import SnapshotStore
from esper.environment.start import EpisodeStart, initial_slots
from esper.environment.step import GrowthStep, RewardResult
from esper.growth import GrowingHost, GrowthOptimizer, Mode, SeedSetting, fossil_settings, seed_settings
from esper.hosts import Host
from esper.lifecycle import (
    ActionSpace,
    Blend,
    Events,
    Layout,
    Rules,
    SeedMeasurements,
    Slots,
    Stage,
    apply,
    evict,
    legal,
    tick,
)
from esper.observation import HostMeasurements, Observation, View, first_view, next_view, observe
from esper.observation.features import BASE_WIDTH, SLOT_WIDTH


class Environment:
    """N host runs, each with an episode seed of its own; what one does never depends on its neighbours.

    Arguments:
        hosts: make a host each, by name; which of them an episode has follows from its seed
        data: what hosts train on
        space, rules: what may be done, and when
        optimizer: makes the optimizer of a growing host
        governor: makes the governor, given `envs` and `chance`
        reward: pays for a step
        envs: how many host runs at once
        steps: decisions in an episode
        batch, batches: training batches, samples in each and how many in a step
        validation_batch: samples at once where nothing is trained
        attribution_every: steps between measurements of contribution; 0 is never
        attribution_share: of the validation split, for those
        gradient_stride: batches between looks at gradient health
        time_limit: what the last step is, `terminate` or `truncate`
        precision: 32, bf16 or fp16
        coadapt: whether blended seeds' gradients reach the host's earlier layers
        threads: environments trained at the same time; None is one for each core
    """

    def __init__(
        self,
        *,
        hosts: Mapping[str, Callable[[], Host]],
        data: Data,
        space: ActionSpace,
        rules: Rules,
        optimizer: Callable[..., GrowthOptimizer],
        governor: Callable[..., Governor],
        reward: Callable[[StepRecord], RewardResult],
        envs: int,
        steps: int,
        batch: int,
        batches: int,
        validation_batch: int,
        attribution_every: int,
        attribution_share: float,
        gradient_stride: int,
        time_limit: str,
        precision: str,
        coadapt: bool,
        threads: int | None,
    ) -> None:
        sizes = {"envs": envs, "steps": steps, "batches": batches, "gradient_stride": gradient_stride}
        for key, value in {**sizes, "validation_batch": validation_batch}.items():
            if value < 1:
                raise ValueError(f"environment.{key}={value}: must be at least 1.")
        if not 1 <= batch <= data.size("train"):
            raise ValueError(
                f"environment.batch={batch}: must be between 1 and the {data.size('train'):,} to train on."
            )
        if attribution_every < 0 or not 0 < attribution_share <= 1:
            raise ValueError(
                f"environment.attribution_every={attribution_every}, attribution_share={attribution_share}: "
                "must be at least 0, and above 0 up to 1."
            )
        _one_of("time_limit", time_limit, ("terminate", "truncate"))
        _one_of("precision", precision, tuple(PRECISIONS))
        self.space, self.rules, self.data, self.envs, self.steps = space, rules, data, envs, steps
        self.name = data.name
        self.layout = Layout.from_space(space, BASE_WIDTH, SLOT_WIDTH)
        self._optimizer, self._make_governor, self._reward = optimizer, governor, reward
        self._every, self._time_limit = attribution_every, time_limit
        self._options = HostRunOptions(
            batch, batches, validation_batch, attribution_share, gradient_stride, str(precision), coadapt
        )
        example, _ = next(data.batches("validation", 1))
        self.host_pool = HostPool(hosts, example, space.slots)
        self._threads = min(envs, threads or os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads) if self._threads > 1 else None
        self._runs: list[HostRun] = []

    @torch.inference_mode(False)  # hosts train here, whatever the caller is doing
    def reset(self, episode_seeds: Sequence[int], starts: Sequence[EpisodeStart] | None = None) -> Observation:
        """Begin an episode for each seed, up to `envs` of them; `starts` say how, None is the usual way."""
        if not 1 <= len(episode_seeds) <= self.envs:
            raise ValueError(f"episode_seeds: {len(episode_seeds)} were given for environment.envs={self.envs}.")
        self._starts = list(starts or [EpisodeStart()] * len(episode_seeds))
        self._runs = [
            HostRun(
                episode_seed, build=partial(self.host_pool.build, episode_seed), optimizer=self._optimizer, data=self.data,
                options=self._options,
            )
            for episode_seed in episode_seeds
        ]  # fmt: skip
        self._slots = initial_slots(self._starts, self.space)
        self._put(self._slots.stage == Stage.FOSSILIZED, self._slots)
        for run in (run for run, start in zip(self._runs, self._starts, strict=True) if start.frozen):
            run.model.seeds.requires_grad_(False)
        everywhere = torch.ones(len(episode_seeds), dtype=torch.bool)
        self._governor = self._make_governor(envs=len(episode_seeds), chance=math.log(self.data.options))
        self._snapshots = SnapshotStore(self._runs, self.space.slots)
        costs = [self.host_pool.costs(episode_seed) for episode_seed in episode_seeds]
        self._accounting = CostAccounting(self._runs, costs, self.data, self.space.slots, self._options)
        now = self._remeasured(everywhere, self._slots, False)
        self._initial_score = now.score
        self._view = first_view(self.steps, self._slots, now, self._accounting.host_parameters)
        return self._observe()

    @torch.inference_mode(False)
    def step(self, action: Tensor) -> GrowthStep:
        """One decision in each environment: int64 [envs, heads], on any device."""
        if not self._runs or self._view.step >= self.steps:
            raise RuntimeError("the episode is over or was never begun; call reset first.")
        before, earlier, step = self._slots, self._view.now, self._view.step
        last = step + 1 == self.steps
        chosen = action.cpu()
        decision = self.space.decode(chosen)
        during, applied = apply(before, chosen, self.space, self.rules)
        self._graft(during, applied, earlier.score)
        self._snapshots.save_fossils(applied.into(Stage.FOSSILIZED), self._governor.healthy(), during)
        seed_parameters = self._accounting.seed_parameters()

        plans = [self._plan(env, during, step, last) for env in range(len(self._runs))]
        progress = (step / self.steps, (step + 1) / self.steps)
        found = self._each(lambda env: self._runs[env].train_and_measure(plans[env], progress))
        now = self._accounting.measured(self._transfer(found), during, last)
        reason = self._judge(now.loss, last)
        governed, evicted = during, torch.zeros_like(applied.entered)
        if reason.any():
            governed, now, evicted = self._roll_back(during, now, reason > 0, last)

        measurements = SeedMeasurements(contribution=now.contribution, health=now.seed_health)
        after, ticked = tick(governed, measurements, self.space, self.rules)
        self._remove(ticked)
        if (step + 1) % self._governor.snapshot_every == 0:
            self._snapshots.save((reason == 0) & self._governor.healthy(), after)
        ended = torch.full((len(self._runs),), last)
        record = StepRecord(
            step=step,
            steps=self.steps,
            decision=decision,
            before=before,
            during=during,
            after=after,
            entered=applied.entered | evicted | ticked.entered,
            earlier=earlier,
            now=now,
            initial_score=self._initial_score,
            host_parameters=self._accounting.host_parameters,
            seed_parameters=seed_parameters,
            rollback=reason,
            terminated=ended if self._time_limit == "terminate" else torch.zeros_like(ended),
            truncated=ended if self._time_limit == "truncate" else torch.zeros_like(ended),
        )
        rewarded = self._reward(record)
        self._slots = after
        there = self._accounting.seed_parameters()
        self._view = next_view(self._view, after, now, there, decision.op, decision.slot, reason > 0)
        return GrowthStep(self._observe(), rewarded.total, rewarded, record.terminated, record.truncated, record)

    @torch.inference_mode(False)
    def test(self) -> dict[str, Tensor]:
        """Loss, accuracy and score [envs] of what was committed, on the test split; for evaluation, at the very end."""
        found = self._transfer(self._each(lambda env: self._runs[env].evaluate(self.committed_settings(env), "test")))
        return {
            "loss": found[:, 0],
            "accuracy": found[:, 1],
            "score": self.data.score("test", found[:, 0], found[:, 1]),
        }

    def flops_spent(self) -> dict[str, Tensor]:
        """FLOPs of the episodes so far by what they went into: float64 [envs] each, in total the measured `flops`."""
        return {part: flops.clone() for part, flops in self._accounting.spent.items()}

    def batches_for(self, flops: float, fossils: Mapping[str, tuple[str, str]], episode_seed: int) -> int:
        """`Start.batches` with which a seed's episode with such fossils from the start, and no more, costs `flops`."""
        initial_slots([EpisodeStart(fossils=fossils)], self.space)  # refuses what does not exist
        validated = self.data.size("validation")
        sizes = {"steps": self.steps, "batch": self._options.batch, "validated": validated}
        return batches_for(flops, fossils, self.host_pool.costs(episode_seed), **sizes)

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int:
        """Of the episode of that number; of several hosts, each comes as often."""
        return self.host_pool.episode_seed(purpose, run_seed, index)

    def outcome(self) -> dict[str, Tensor]:
        """What the episodes have come to so far, by what was validated: figures [envs]."""
        now, growth = self._view.now, self._view.now.parameters / self._view.host_parameters
        return {
            "score": net_score(now.score, growth),
            "validation_score": now.score,
            "loss": now.loss,
            "growth": growth,
            "fossils": (self._slots.stage == Stage.FOSSILIZED).sum(1).float(),
            "gflops": (now.flops / 1e9).float(),
        }

    def effort(self) -> dict[str, float]:
        """Of the episodes so far: seconds of each phase as they passed on the clock, and samples trained on."""
        phases = {name: sum(run.seconds[name] for run in self._runs) / self._threads for name in ("train", "measure")}
        samples = len(self._runs) * self._view.step * self._options.batches * self._options.batch
        return {**phases, "samples": float(samples)}

    def committed_settings(self, env: int) -> dict[str, SeedSetting]:
        """How the seeds that are fossils take part; no others do."""
        return fossil_settings(self._slots, env, self.space.slots)

    def seconds(self, env: int) -> float:
        """What one episode has taken so far of its thread's time."""
        return sum(self._runs[env].seconds.values())

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    @property
    def view(self) -> View:
        return self._view

    def model(self, env: int) -> GrowingHost:
        return self._runs[env].model

    def _each(self, function: Callable[[int], Tensor]) -> list[Tensor]:
        """Do something in every environment, in threads; the results in order."""
        if self._pool is None:
            return [function(env) for env in range(len(self._runs))]
        return list(self._pool.map(function, range(len(self._runs))))

    def _transfer(self, found: list[Tensor]) -> Tensor:
        """The one transfer from the device in a step."""
        if self.data.device.type == "cuda":
            torch.cuda.synchronize(self.data.device)  # each run has a stream of its own
        return torch.stack(found).cpu()

    def _plan(self, env: int, during: Slots, step: int, last: bool) -> StepPlan:
        settings = seed_settings(during, env, self.space.slots)
        batches = self._starts[env].batches_in_step(step, self.steps, self._options.batches)
        if last:
            plan = StepPlan(settings, fossil_settings(during, env, self.space.slots), (), batches)
        else:
            plan = StepPlan(settings, settings, self._attributed(settings, during, env, step), batches)
        self._accounting.charge_step(env, plan)
        return plan

    def _attributed(self, settings: dict[str, SeedSetting], during: Slots, env: int, step: int) -> tuple[str, ...]:
        """Live seeds whose contribution is measured in this step."""
        if not self._every or step % self._every:
            return ()
        live = dict(zip(self.space.slots, during.live[env].tolist(), strict=True))
        return tuple(name for name, s in settings.items() if live[name] and s.mode is not Mode.ISOLATED and s.alpha > 0)

    def _graft(self, during: Slots, applied: Events, score: Tensor) -> None:
        self._remove(applied)
        new = applied.into(Stage.GERMINATED)
        self._accounting.note_germination(new, score)
        self._put(new, during)

    def _put(self, new: Tensor, slots: Slots) -> None:
        """Graft what the slots in `new` [envs, slots] are to hold."""
        for env, column in new.nonzero().tolist():
            blueprint = self.space.blueprints[int(slots.blueprint[env, column])]
            self._runs[env].graft(self.space.slots[column], blueprint, Blend(int(slots.blend[env, column])))

    def _remove(self, events: Events) -> None:
        gone = events.into(Stage.PRUNED)
        self._accounting.note_removal(gone)
        for env, column in gone.nonzero().tolist():
            self._runs[env].remove(self.space.slots[column])

    def _roll_back(
        self, during: Slots, now: HostMeasurements, envs: Tensor, last: bool
    ) -> tuple[Slots, HostMeasurements, Tensor]:
        """Bring hosts back to their last good state without their live seeds, and measure them again."""
        slots, events = evict(during, envs, self.rules)
        self._accounting.note_removal(events.into(Stage.PRUNED))
        self._snapshots.restore(envs)
        now = now.where(envs, self._remeasured(envs, slots, last))
        self._governor.restored(envs, now.loss)
        return slots, now, events.entered

    def _judge(self, loss: Tensor, last: bool) -> Tensor:
        """Why to roll each host back. At the very end live seeds are switched off, so that no past loss compares."""
        if last:
            return torch.where(loss.isfinite(), 0, int(RollbackReason.NON_FINITE))
        return self._governor.judge(loss)

    def _remeasured(self, envs: Tensor, slots: Slots, last: bool) -> HostMeasurements:
        """Measure some hosts with their fossils, without training; the figures of the others are NaN."""
        committed = {env: fossil_settings(slots, env, self.space.slots) for env in envs.nonzero().flatten().tolist()}
        for env, settings in committed.items():
            self._accounting.charge_validation(env, settings)

        def measure(env: int) -> Tensor:
            run = self._runs[env]
            return run.measure(committed[env]) if env in committed else run.unmeasured()

        return self._accounting.measured(self._transfer(self._each(measure)), slots, last)

    def _observe(self) -> Observation:
        return observe(self._view, legal(self._slots, self.space, self.rules))


def _one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    if str(value) not in allowed:
        raise ValueError(f"environment.{key}={value}: must be one of {', '.join(allowed)}.")
