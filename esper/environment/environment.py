"""N host runs stepped together. Each step applies actions, trains, measures, governs, ticks, rewards and observes."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from esper.arguments import Count
from esper.data import Data
from esper.environment.accounting import CostAccounting, batches_for
from esper.environment.clock import BudgetClock, make_clock
from esper.environment.governor import Governor, RollbackReason
from esper.environment.host_pool import HostPool
from esper.environment.host_run import HostRun, HostRunOptions, StepPlan, vector_width
from esper.environment.host_runs import RunFactory, RunOrigin
from esper.environment.parallel import place_runs
from esper.environment.record import StepRecord, net_score
from esper.environment.round_clock import RoundClock
from esper.environment.run_changes import RunChanges, indices
from esper.environment.start import EpisodeStart, check_fossils, graft_fossils, initial_slots
from esper.environment.step import GrowthStep, RewardResult
from esper.growth import GrowingHost, GrowthOptimizer, LRSchedule, Mode, SeedSetting, fossil_settings, seed_settings
from esper.hosts import Host
from esper.lifecycle import (
    ActionSpace,
    Events,
    Layout,
    Rules,
    SeedMeasurements,
    Slots,
    Stage,
    apply,
    commit,
    evict,
    legal,
    tick,
)
from esper.observation import (
    FEATURE_SETS,
    HostMeasurements,
    Observation,
    View,
    first_view,
    next_view,
    observe,
)


class Environment:
    """N host runs, each with its own episode seed. An episode does not depend on the episodes next to it.

    Arguments:
        hosts: functions that build a host, by name; the episode seed determines the host of an episode
        data: the data set
        space, rules: the action space and the lifecycle rules
        optimizer: builds the optimizer of a growing host
        governor: builds the governor, given `envs` and `chance`
        reward: computes the reward of a step
        envs: maximum number of parallel episodes
        steps: decisions in an episode
        batch: samples in a training batch
        batches: training batches in a step; None measures episodes in FLOPs
        validation_batch: samples in a batch of validation and test
        attribution_every: steps between measurements of contribution; 0 is never
        attribution_share: share of the validated samples, from the first, that measures contribution
        gradient_stride: batches between measurements of gradient health
        time_limit: how the last step ends the episode, `terminate` or `truncate`
        precision: 32, bf16 or fp16
        coadapt: whether gradients of blended seeds reach the host's earlier layers
        workers: processes that train the hosts; 0 is none: threads of this process train them; None is one for each
            core, and none on a GPU
        threads: threads that train the hosts if there are no workers; None is one for each core
        variants: for each host, functions that build wider and deeper ones, by name
        budget, budget_batches, budget_share, validation_samples, validation_every, measure_share: see BudgetClock; used
            if `batches` is None
        features: the feature set that controllers observe
        rent: points that the score of an episode loses for each factor e of growth in parameters
        schedule: the schedule of the learning rates, for the share that is left; None is a constant
        seed_init: whether the last layer of a new seed is zero, `identity`, or `random`
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
        envs: Count,
        steps: Count,
        batch: Count,
        batches: Count | None,
        validation_batch: Count,
        attribution_every: int,
        attribution_share: float,
        gradient_stride: Count,
        time_limit: Literal["terminate", "truncate"],
        precision: Literal[32, "32", "bf16", "fp16"],
        coadapt: bool,
        workers: int | None,
        threads: int | None,
        variants: Mapping[str, Mapping[str, Callable[[], Host]]] | None = None,
        budget: float | None = None,
        budget_batches: float | None = None,
        budget_share: float = 1.0,
        validation_samples: Count = 200,
        validation_every: Count = 1,
        measure_share: float = 0.1,
        features: Literal["absolute", "scale_free"] = "absolute",
        rent: float = 1.0,
        schedule: LRSchedule | None = None,
        seed_init: Literal["identity", "random"] = "identity",
    ) -> None:
        sizes = {"envs": envs, "steps": steps, "batches": batches, "gradient_stride": gradient_stride}
        for key, value in {**sizes, "validation_batch": validation_batch}.items():
            if value is not None and value < 1:
                raise ValueError(f"environment.{key}={value}: must be at least 1.")
        if not 1 <= batch <= data.size("train"):
            raise ValueError(
                f"environment.batch={batch}: must be between 1 and the {data.size('train'):,} training samples."
            )
        if attribution_every < 0:
            raise ValueError(f"environment.attribution_every={attribution_every}: must be at least 0.")
        if not 0 < attribution_share <= 1:
            raise ValueError(f"environment.attribution_share={attribution_share}: must be above 0 and at most 1.")
        self.space, self.rules, self.data, self.envs, self.steps = space, rules, data, envs, steps
        self.name = data.name
        self._features, self._rent, self._schedule = FEATURE_SETS[features], rent, schedule
        self.layout = Layout.from_space(space, self._features.base_width, self._features.slot_width, features)
        self._clock = make_clock(
            batches=batches,
            budget=budget,
            budget_batches=budget_batches,
            budget_share=budget_share,
            validation_samples=validation_samples,
            validation_every=validation_every,
            measure_share=measure_share,
        )
        self.controller_flops = 0  # of a decision, for episodes without their own EpisodeStart
        self._make_governor, self._reward = governor, reward
        self._attribution_every, self._time_limit = attribution_every, time_limit
        self._options = HostRunOptions(
            batch,
            validation_batch,
            attribution_share,
            gradient_stride,
            str(precision),
            coadapt,
            space.slots,
            seed_init,
        )
        example, _ = next(data.batches("validation", 1))
        self.host_pool = HostPool(hosts, example, space.slots, variants)
        self.host_pool.check_outputs(data)
        if isinstance(self._clock, BudgetClock):
            for name, costs in self.host_pool.items():
                self._clock.check(name, float(costs.train({}, {}) * batch))
        self.factory = RunFactory(hosts, optimizer, data, self._options, variants or {})
        self._runs = place_runs(self.factory, envs, workers, threads)
        self._episodes = 0  # of the current round

    @torch.inference_mode(False)  # hosts train here, even if the caller is in inference mode
    def reset(self, episode_seeds: Sequence[int], starts: Sequence[EpisodeStart] | None = None) -> Observation:
        """Start one episode per episode seed, at most `envs`; `starts` describes each start, None is the default."""
        if not 1 <= len(episode_seeds) <= self.envs:
            raise ValueError(
                f"episode_seeds: {len(episode_seeds)} were given, must be between 1 and environment.envs={self.envs}."
            )
        default = EpisodeStart(controller_flops=self.controller_flops)
        self._starts = list(starts or [default] * len(episode_seeds))
        self._episodes = len(episode_seeds)
        check_fossils(self._starts, self.space)
        bare = [self.host_pool.costs(episode_seed) for episode_seed in episode_seeds]
        pairs = list(zip(episode_seeds, self._starts, strict=True))
        costs = [self.host_pool.costs(episode_seed, start.host) for episode_seed, start in pairs]
        self._wide_costs = [self.host_pool.costs(episode_seed, start.widen) for episode_seed, start in pairs]
        self._runs.start(
            [
                RunOrigin(episode_seed, self.host_pool.host_name(episode_seed), start.host, start.lr_scale)
                for episode_seed, start in pairs
            ]
        )
        self._slots = initial_slots(self._starts, self.space)
        self._changes = RunChanges(self._runs, self.space, self._episodes)
        self._changes.graft(self._slots.stage == Stage.FOSSILIZED, self._slots)
        self._changes.freeze_seeds(torch.tensor([start.frozen for start in self._starts]))
        all_envs = torch.ones(len(episode_seeds), dtype=torch.bool)
        self._governor = self._make_governor(envs=len(episode_seeds), chance=math.log(self.data.options))
        self._changes.save_snapshots(all_envs, self._slots)
        self._accounting = CostAccounting(bare, costs, self.data, self.space, self._options)
        self._round = RoundClock(
            self._clock, self._starts, self.steps, self._accounting, self._changes, self.data, self._schedule
        )
        now = self._measure_untrained(self._round.measured_from_start, self._slots, False)
        self._initial_score = now.score
        clock_view = self._round.first_view(self._slots, now.loss)
        self._view = first_view(self.steps, self._slots, now, self._accounting.host_parameters, clock_view)
        return self._observe()

    @torch.inference_mode(False)
    def step(self, action: Tensor) -> GrowthStep:
        """Run one step in each environment; `action` is int64 [envs, heads], on any device."""
        if not self._episodes or self._view.step >= self.steps:
            raise RuntimeError("the episode has ended or was not started; call reset first.")
        before, earlier, step = self._slots, self._view.now, self._view.step
        last = step + 1 == self.steps
        chosen = action.cpu()
        decision = self.space.decode(chosen)
        during, applied = apply(before, chosen, self.space, self.rules)
        during, entered = self._follow_plans(during, applied.entered, step, last)
        self._apply_events(during, Events(entered), earlier.score)
        self._changes.save_fossils(entered[..., Stage.FOSSILIZED], self._governor.is_healthy(), during)

        plans = {env: self._plan(env, during, step, last) for env in range(self._episodes)}
        train = {env: partial(HostRun.train_and_measure, plan=plan) for env, plan in plans.items()}
        is_measured = torch.tensor([plan.measure or not self.is_budgeted for plan in plans.values()])
        now = self._accounting.unpack_measurements(self._compute(train), during, last, is_measured)
        reason = self._rollback_reason(now, last, is_measured, torch.tensor([p.batches > 0 for p in plans.values()]))
        governed, evicted = during, torch.zeros_like(entered)
        if reason.any():
            governed, now, evicted = self._roll_back(during, now, reason > 0, last)
        measurements = SeedMeasurements(contribution=now.contribution, health=now.seed_health)
        after, ticked = tick(governed, measurements, self.space, self.rules)
        self._remove_pruned(ticked)
        if (step + 1) % self._governor.snapshot_every == 0:
            self._changes.save_snapshots((reason == 0) & self._governor.is_healthy(), after)
        ended = torch.full((self._episodes,), last)
        record = StepRecord(
            step=step,
            steps=self.steps,
            decision=decision,
            before=before,
            during=during,
            after=after,
            entered=entered | evicted | ticked.entered,
            earlier=earlier,
            now=now,
            initial_score=self._initial_score,
            host_parameters=self._accounting.host_parameters,
            seed_parameters=self._accounting.seed_parameters(during),
            batches=torch.tensor([plan.batches for plan in plans.values()]),
            rollback=reason,
            terminated=ended if self._time_limit == "terminate" else torch.zeros_like(ended),
            truncated=ended if self._time_limit == "truncate" else torch.zeros_like(ended),
        )
        rewarded = self._reward(record)
        self._slots = after
        clock_view = self._round.next_view(record, is_measured | (reason > 0))
        seed_parameters = self._accounting.seed_parameters(after)
        self._view = next_view(
            self._view, after, now, seed_parameters, decision.op, decision.slot, reason > 0, clock_view
        )
        return GrowthStep(self._observe(), rewarded.total, rewarded, record.terminated, record.truncated, record)

    @torch.inference_mode(False)
    def test(self) -> dict[str, Tensor]:
        """Loss, accuracy and score [envs] of hosts with their committed seeds, on the test split.

        Only evaluation calls this, once at the end of an episode.
        """
        committed = {env: self.committed_settings(env) for env in range(self._episodes)}
        tests = {env: partial(HostRun.evaluate, settings=seeds, split="test") for env, seeds in committed.items()}
        loss, accuracy = self._compute(tests).unbind(1)
        return {"loss": loss, "accuracy": accuracy, "score": self.data.score("test", loss, accuracy)}

    def flops_spent(self) -> dict[str, Tensor]:
        """FLOPs of the episodes so far by part, float64 [envs] each; their sum is `view.now.flops`."""
        return {part: flops.clone() for part, flops in self._accounting.flops_by_part.items()}

    @property
    def is_budgeted(self) -> bool:
        """Whether episodes are measured in FLOPs."""
        return self._clock.is_budgeted

    @property
    def rent(self) -> float:
        """Points that the score of an episode loses for each factor e of growth in parameters."""
        return self._rent

    def budget_flops(self, episode_seed: int) -> float:
        """The budget of an episode."""
        if not self.is_budgeted:
            raise ValueError("environment: has no budget; use environment=budget.")
        bare = float(self.host_pool.costs(episode_seed).train({}, {}) * self._options.batch)
        return self._clock.budget(bare, self.steps, EpisodeStart())

    def batches_for(self, flops: float, fossils: Mapping[str, tuple[str, str]], episode_seed: int) -> int:
        """`EpisodeStart.batches` for an episode that starts with these fossils, grows no others and costs `flops`."""
        initial_slots([EpisodeStart(fossils=fossils)], self.space)  # raises on unknown names
        validated = self.data.size("validation")
        sizes = {"steps": self.steps, "batch": self._options.batch, "validated": validated}
        return batches_for(flops, fossils, self.host_pool.costs(episode_seed), **sizes)

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int:
        """The seed of the episode number `index`; with several hosts, each comes equally often."""
        return self.host_pool.episode_seed(purpose, run_seed, index)

    def outcome(self) -> dict[str, Tensor]:
        """The validation results of the episodes so far: tensors [envs]."""
        now, growth = self._view.now, self._view.now.parameters / self._view.host_parameters
        return {
            "score": net_score(now.score, growth, self._rent),
            "validation_score": now.score,
            "loss": now.loss,
            "growth": growth,
            "fossils": (self._slots.stage == Stage.FOSSILIZED).sum(1).float(),
            "gflops": (now.flops / 1e9).float(),
        }

    def effort(self) -> dict[str, float]:
        """Wall-clock seconds of each phase, and training samples, of the episodes so far."""
        seconds = [self._runs.seconds(env) for env in range(self._episodes)]
        phases = {name: sum(each[name] for each in seconds) / self._runs.parallel for name in ("train", "measure")}
        samples = sum(self._accounting.batches) * self._options.batch
        return {**phases, "samples": float(samples)}

    def committed_settings(self, env: int) -> dict[str, SeedSetting]:
        """The settings of the fossils; live seeds are switched off."""
        return fossil_settings(self._slots, env, self.space.slots)

    def seconds(self, env: int) -> float:
        """Seconds of one core that an episode has taken so far."""
        return sum(self._runs.seconds(env).values())

    def close(self) -> None:
        self._runs.close()

    @property
    def view(self) -> View:
        return self._view

    def host_run(self, env: int) -> HostRun:
        """The run of an environment; from a worker process it is a copy."""
        return self._runs.fetch(env)

    def model(self, env: int) -> GrowingHost:
        """The growing host of an environment; from a worker process it is a copy."""
        return self.host_run(env).model

    def _compute(self, computations: Mapping[int, Callable[[HostRun], Tensor]]) -> Tensor:
        """Compute with some runs, by environment: [runs, values] on the CPU, the only transfer from the device."""
        results = self._runs.compute(computations)
        if self.data.device.type == "cuda":
            torch.cuda.synchronize(self.data.device)  # each run has its own stream
        return torch.stack(results).cpu()

    def _plan(self, env: int, during: Slots, step: int, last: bool) -> StepPlan:
        settings = seed_settings(during, env, self.space.slots)
        final = fossil_settings(during, env, self.space.slots) if last else settings
        off = () if last else self._slots_to_probe(settings, during, env, step)
        return self._round.plan(env, StepPlan(settings, final, off, 0, (0.0, 0.0)), during, step)

    def _follow_plans(self, slots: Slots, entered: Tensor, step: int, last: bool) -> tuple[Slots, Tensor]:
        """Graft the fossils and widen the hosts of episodes whose time has come; commit seeds before the last step.

        Returns the slots, and the stages that they entered: bool [envs, slots, stages].
        """
        due = [start.starts_at(self.steps) == step for start in self._starts]
        slots, new = graft_fossils(
            slots,
            self._starts,
            self.space,
            [is_due and start.at > 0 for is_due, start in zip(due, self._starts, strict=True)],
        )
        entered = entered.clone()
        entered[..., Stage.GERMINATED] |= new
        entered[..., Stage.FOSSILIZED] |= new
        for env, start in enumerate(self._starts):
            if due[env] and start.widen is not None:
                self._changes.widen(env, start.widen)
                self._accounting.replace_host(env, self._wide_costs[env])
                self._changes.save_snapshots(torch.arange(self._episodes) == env, slots)
        if last:
            slots, committed = commit(slots, self.rules)
            entered |= committed.entered
        return slots, entered

    def _slots_to_probe(self, settings: dict[str, SeedSetting], during: Slots, env: int, step: int) -> tuple[str, ...]:
        """Slots of the live seeds whose contribution is measured in this step."""
        if not self._attribution_every or step % self._attribution_every:
            return ()
        live = dict(zip(self.space.slots, during.live[env].tolist(), strict=True))
        return tuple(name for name, s in settings.items() if live[name] and s.mode is not Mode.ISOLATED and s.alpha > 0)

    def _apply_events(self, during: Slots, applied: Events, score: Tensor) -> None:
        """Remove pruned seeds and graft new ones."""
        self._remove_pruned(applied)
        new = applied.into(Stage.GERMINATED)
        self._accounting.note_germination(new, score)
        self._changes.graft(new, during)

    def _remove_pruned(self, events: Events) -> None:
        pruned = events.into(Stage.PRUNED)
        self._accounting.note_removal(pruned)
        self._changes.remove(pruned)

    def _roll_back(
        self, during: Slots, now: HostMeasurements, envs: Tensor, last: bool
    ) -> tuple[Slots, HostMeasurements, Tensor]:
        """Restore the last good snapshot of some hosts, prune their live seeds, and measure them again."""
        slots, events = evict(during, envs, self.rules)
        self._accounting.note_removal(events.into(Stage.PRUNED))
        self._changes.roll_back(envs)
        now = now.where(envs, self._measure_untrained(envs, slots, last))
        self._governor.reset_history(envs, now.loss)
        return slots, now, events.entered

    def _rollback_reason(self, now: HostMeasurements, last: bool, measured: Tensor, trained: Tensor) -> Tensor:
        """RollbackReason of each host. In the last step live seeds are off, so past losses do not compare.

        A host that was not `measured`, bool [envs], is judged by its training loss if it `trained`, bool [envs].
        """
        non_finite = int(RollbackReason.NON_FINITE)
        if last:
            return torch.where(now.loss.isfinite(), 0, non_finite)
        reason = self._governor.judge(now.loss, measured)
        return torch.where(~measured & trained & ~now.train_loss.isfinite(), non_finite, reason)

    def _measure_untrained(self, envs: Tensor, slots: Slots, last: bool) -> HostMeasurements:
        """Measure some hosts, bool [envs], with their fossils and without training; NaN for the others."""
        is_final = last and self.is_budgeted  # of the whole split, and nothing depends on it
        samples = self._round.samples(is_final)
        committed = {env: fossil_settings(slots, env, self.space.slots) for env in indices(envs)}
        for env, settings in committed.items() if not is_final else ():
            self._accounting.charge_validation(env, settings, slots, samples)
        values = torch.full((self._episodes, vector_width(len(self.space.slots))), torch.nan)
        if committed:
            values[envs] = self._compute(
                {env: partial(HostRun.measure, settings=s, samples=samples) for env, s in committed.items()}
            )
        return self._accounting.unpack_measurements(values, slots, last)

    def _observe(self) -> Observation:
        return observe(self._view, legal(self._slots, self.space, self.rules), self._features)
