"""N host runs stepped together. Each step applies actions, trains, measures, governs, ticks, rewards and observes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from esper.arguments import Count
from esper.environment.accounting import batches_for
from esper.environment.clock import BudgetClock, make_clock
from esper.environment.governor import Governor
from esper.environment.host_pool import HostPool
from esper.environment.host_run import HostRun, HostRunOptions
from esper.environment.host_runs import RunFactory
from esper.environment.host_task import HostTask
from esper.environment.parallel import place_runs
from esper.environment.record import StepRecord, net_score
from esper.environment.round import Round, RoundParts
from esper.environment.start import EpisodeStart, check_fossils
from esper.environment.step import GrowthStep, RewardResult
from esper.environment.task_descriptors import TaskDescriptors
from esper.growth import GrowingHost, GrowthOptimizer, LRSchedule, SeedSetting, fossil_settings
from esper.lifecycle import (
    ActionSpace,
    Rules,
    SeedMeasurements,
    Stage,
    acted_slots,
    apply,
    legal,
    tick,
)
from esper.observation import (
    FEATURE_SETS,
    Observation,
    View,
    first_view,
    make_layout,
    next_view,
    observe,
)


class Environment:
    """N host runs, each with its own episode seed. An episode does not depend on the episodes next to it.

    Arguments:
        tasks: hosts with their data, by name; the episode seed determines the host of an episode. They may have
            different slots, each at least one of the action space
        space, rules: the action space and the lifecycle rules
        optimizer: builds the optimizer of a growing host
        governor: builds the governor, given `envs` and `chance`
        reward: computes the reward of a step
        envs: maximum number of parallel episodes
        steps: decisions in an episode
        batch: samples in a training batch of tasks without their own number
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
        budget, budget_batches, budget_share, validation_samples, validation_every, measure_share: see BudgetClock; used
            if `batches` is None
        features: the feature set that controllers observe
        rent: points that the score of an episode loses for each factor e of growth in parameters
        schedule: the schedule of the learning rates, for the share that is left; None is a constant
        seed_init: whether the last layer of a new seed is zero, `identity`, or `random`
        repeats: consecutive episodes of the same task; must divide `envs`
        split: of the tasks that evaluations draw; None is all tasks
        round_steps: numbers of decisions that training rounds have in turn; None is always `steps`
    """

    def __init__(
        self,
        *,
        tasks: Mapping[str, HostTask],
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
        repeats: Count = 1,
        split: str | None = None,
        round_steps: Sequence[int] | None = None,
    ) -> None:
        sizes = {"envs": envs, "steps": steps, "batches": batches, "gradient_stride": gradient_stride}
        for key, value in {**sizes, "validation_batch": validation_batch}.items():
            if value is not None and value < 1:
                raise ValueError(f"environment.{key}={value}: must be at least 1.")
        if attribution_every < 0:
            raise ValueError(f"environment.attribution_every={attribution_every}: must be at least 0.")
        if not 0 < attribution_share <= 1:
            raise ValueError(f"environment.attribution_share={attribution_share}: must be above 0 and at most 1.")
        if repeats < 1 or envs % repeats:
            raise ValueError(f"tasks.repeats={repeats}: must divide environment.envs={envs}.")
        if round_steps is not None and batches is not None:
            raise ValueError(
                f"tasks.steps={list(round_steps)}: must be null with environment.batches={batches}, where more steps "
                "train longer; use environment=budget."
            )
        self.round_steps = (steps,) if round_steps is None else tuple(round_steps)
        tasks = {name: task.with_batch(batch) for name, task in tasks.items()}
        self.space, self.rules, self.envs, self.steps = space, rules, envs, steps
        names = list(dict.fromkeys(task.data.name for task in tasks.values()))
        self.name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} other variants and data sets"
        self._features, self._rent = FEATURE_SETS[features], rent
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
        self._reward, self._time_limit = reward, time_limit
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
        self.host_pool = HostPool(tasks, space.slots, repeats=repeats, split=split)
        self.layout = make_layout(space, self._features, self.host_pool.traits(space.blueprints))
        if isinstance(self._clock, BudgetClock):
            for name, costs in self.host_pool.items():
                bare = float(costs.train({}, {}) * tasks[name].batch)
                self._clock.check(name, bare, tasks[name].budget_batches)
        self._descriptors = TaskDescriptors(self.host_pool, self._clock, steps=steps)
        self.factory = RunFactory(tasks, optimizer, self._options)
        self._runs = place_runs(self.factory, envs, workers, threads)
        self._parts = RoundParts(
            self._runs, self.host_pool, space, rules, self._options, governor, self._clock, schedule, steps,
            attribution_every,
        )  # fmt: skip
        self._round: Round | None = None

    @torch.inference_mode(False)  # hosts train here, even if the caller is in inference mode
    def reset(
        self, episode_seeds: Sequence[int], starts: Sequence[EpisodeStart] | None = None, *, steps: int | None = None
    ) -> Observation:
        """Start one episode per episode seed, at most `envs`.

        `starts` describes each start, None is the default; `steps` is the number of decisions of these episodes, None
        is that of the environment.
        """
        if not 1 <= len(episode_seeds) <= self.envs:
            raise ValueError(
                f"episode_seeds: {len(episode_seeds)} were given, must be between 1 and environment.envs={self.envs}."
            )
        default = EpisodeStart(controller_flops=self.controller_flops)
        parts = self._parts if steps is None else replace(self._parts, steps=steps)
        new = Round(parts, episode_seeds, list(starts or [default] * len(episode_seeds)))
        self._round, self._slots = new, new.first_slots
        now = new.measure_untrained(new.clock.measured_from_start, self._slots, False)
        self._initial_score = now.score
        clock_view = new.clock.first_view(self._slots, now.loss)
        descriptors = self.host_pool.describe(episode_seeds, self.space)
        self._view = first_view(parts.steps, self._slots, now, new.accounting.host_parameters, descriptors, clock_view)
        return self._observe()

    @torch.inference_mode(False)
    def step(self, action: Tensor) -> GrowthStep:
        """Run one step in each environment; `action` is int64 [envs, heads], on any device."""
        if self._round is None or self._view.step >= self._view.steps:
            raise RuntimeError("the episode has ended or was not started; call reset first.")
        this, before, earlier, step = self._round, self._slots, self._view.now, self._view.step
        steps = self._view.steps
        chosen = action.cpu()
        decision = self.space.decode(chosen)
        acted = acted_slots(before, decision, self.space, self.rules)
        during, applied = apply(before, chosen, self.space, self.rules)
        during, entered = this.prepare(during, applied.entered, step, earlier.score)
        trained = this.train(during, step)
        reason = this.rollback_reason(trained, step)
        governed, now, evicted = during, trained.now, torch.zeros_like(entered)
        if reason.any():
            governed, now, evicted = this.roll_back(during, now, reason > 0, step)
        measurements = SeedMeasurements(contribution=now.contribution, health=now.seed_health)
        after, ticked = tick(governed, measurements, self.space, self.rules)
        this.remove_pruned(ticked)
        this.save_snapshots(reason == 0, after, step)
        ended = torch.full((this.episodes,), step + 1 == steps)
        record = StepRecord(
            step=step,
            steps=steps,
            decision=decision,
            acted=acted,
            before=before,
            during=during,
            after=after,
            entered=entered | evicted | ticked.entered,
            earlier=earlier,
            now=now,
            initial_score=self._initial_score,
            host_parameters=this.accounting.host_parameters,
            seed_parameters=this.accounting.seed_parameters(during),
            batches=trained.batches,
            rollback=reason,
            terminated=ended if self._time_limit == "terminate" else torch.zeros_like(ended),
            truncated=ended if self._time_limit == "truncate" else torch.zeros_like(ended),
        )
        rewarded = self._reward(record)
        self._slots = after
        clock_view = this.clock.next_view(record, trained.measured | (reason > 0))
        seed_parameters = this.accounting.seed_parameters(after)
        self._view = next_view(self._view, after, now, seed_parameters, decision.op, acted, reason > 0, clock_view)
        return GrowthStep(self._observe(), rewarded.total, rewarded, record.terminated, record.truncated, record)

    @torch.inference_mode(False)
    def test(self) -> dict[str, Tensor]:
        """Loss, accuracy and score [envs] of hosts with their committed seeds, on the test split.

        Only evaluation calls this, once at the end of an episode.
        """
        committed = {env: self.committed_settings(env) for env in range(self._current.episodes)}
        tests = {env: partial(HostRun.evaluate, settings=seeds, split="test") for env, seeds in committed.items()}
        loss, accuracy = self._current.compute(tests).unbind(1)
        return {"loss": loss, "accuracy": accuracy, "score": self._current.accounting.score("test", loss, accuracy)}

    def flops_spent(self) -> dict[str, Tensor]:
        """FLOPs of the episodes so far by part, float64 [envs] each; their sum is `view.now.flops`."""
        return {part: flops.clone() for part, flops in self._current.accounting.flops_by_part.items()}

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
        task = self.host_pool.task(episode_seed)
        bare = float(self.host_pool.costs(episode_seed).train({}, {}) * task.batch)
        return self._clock.budget(bare, self.steps, EpisodeStart(), task.budget_batches)

    def batches_for(self, flops: float, fossils: Mapping[str, tuple[str, str]], episode_seed: int) -> int:
        """`EpisodeStart.batches` for an episode that starts with these fossils, grows no others and costs `flops`."""
        check_fossils([EpisodeStart(fossils=fossils)], self.space)
        slots = self.host_pool.slot_names(episode_seed)
        own = {slot: seed for slot, seed in fossils.items() if slot in slots}
        task = self.host_pool.task(episode_seed)
        sizes = {"steps": self.steps, "batch": task.batch, "validated": task.data.size("validation")}
        return batches_for(flops, own, self.host_pool.costs(episode_seed), **sizes)

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int:
        """The seed of the episode number `index`; with several hosts, each comes once in every block of episodes."""
        return self.host_pool.episode_seed(purpose, run_seed, index)

    def task_number(self, episode_seed: int) -> int:
        """The number of an episode's task; the same for episodes of the same task."""
        return self.host_pool.host_number(episode_seed)

    @property
    def task_features(self) -> tuple[str, ...]:
        """The names of the columns of `describe_tasks`; empty without families of tasks."""
        return self._descriptors.names

    def describe_tasks(self, episode_seeds: Sequence[int]) -> Tensor:
        """What a critic may know of each episode's task, but no policy: [episodes, task_features], about -1 to 1."""
        return self._descriptors.values[[self.task_number(episode_seed) for episode_seed in episode_seeds]]

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
        seconds = [self._runs.seconds(env) for env in range(self._current.episodes)]
        phases = {name: sum(each[name] for each in seconds) / self._runs.parallel for name in ("train", "measure")}
        return {**phases, "samples": float(self._current.accounting.samples)}

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

    @property
    def _current(self) -> Round:
        """The round that was started last."""
        if self._round is None:
            raise RuntimeError("no episode was started; call reset first.")
        return self._round

    def _observe(self) -> Observation:
        return observe(self._view, legal(self._slots, self.space, self.rules), self._features)
