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
from esper.environment.governor import Governor, RollbackReason
from esper.environment.host_pool import HostPool
from esper.environment.host_run import HostRun, HostRunOptions, StepPlan
from esper.environment.host_runs import RunFactory
from esper.environment.parallel import place_runs
from esper.environment.record import StepRecord, net_score
from esper.environment.run_changes import RunChanges, indices
from esper.environment.start import EpisodeStart, initial_slots
from esper.environment.step import GrowthStep, RewardResult
from esper.growth import GrowingHost, GrowthOptimizer, Mode, SeedSetting, fossil_settings, seed_settings
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
    evict,
    legal,
    tick,
)
from esper.observation import HostMeasurements, Observation, View, first_view, next_view, observe
from esper.observation.features import BASE_WIDTH, SLOT_WIDTH


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
        batches: training batches in a step
        validation_batch: samples in a batch of validation and test
        attribution_every: steps between measurements of contribution; 0 is never
        attribution_share: share of the validation split, from its start, that measures contribution
        gradient_stride: batches between measurements of gradient health
        time_limit: how the last step ends the episode, `terminate` or `truncate`
        precision: 32, bf16 or fp16
        coadapt: whether gradients of blended seeds reach the host's earlier layers
        workers: processes that train the hosts; 0 is none: threads of this process train them; None is one for each
            core, and none on a GPU
        threads: threads that train the hosts if there are no workers; None is one for each core
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
        batches: Count,
        validation_batch: Count,
        attribution_every: int,
        attribution_share: float,
        gradient_stride: Count,
        time_limit: Literal["terminate", "truncate"],
        precision: Literal[32, "32", "bf16", "fp16"],
        coadapt: bool,
        workers: int | None,
        threads: int | None,
    ) -> None:
        sizes = {"envs": envs, "steps": steps, "batches": batches, "gradient_stride": gradient_stride}
        for key, value in {**sizes, "validation_batch": validation_batch}.items():
            if value < 1:
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
        self.layout = Layout.from_space(space, BASE_WIDTH, SLOT_WIDTH)
        self._make_governor, self._reward = governor, reward
        self._attribution_every, self._time_limit = attribution_every, time_limit
        self._options = HostRunOptions(
            batch, batches, validation_batch, attribution_share, gradient_stride, str(precision), coadapt
        )
        example, _ = next(data.batches("validation", 1))
        self.host_pool = HostPool(hosts, example, space.slots)
        self.host_pool.check_outputs(data)
        self.factory = RunFactory(hosts, optimizer, data, self._options)
        self._runs = place_runs(self.factory, envs, workers, threads)
        self._episodes = 0  # of the current round

    @torch.inference_mode(False)  # hosts train here, even if the caller is in inference mode
    def reset(self, episode_seeds: Sequence[int], starts: Sequence[EpisodeStart] | None = None) -> Observation:
        """Start one episode per episode seed, at most `envs`; `starts` describes each start, None is the default."""
        if not 1 <= len(episode_seeds) <= self.envs:
            raise ValueError(
                f"episode_seeds: {len(episode_seeds)} were given, must be between 1 and environment.envs={self.envs}."
            )
        self._starts = list(starts or [EpisodeStart()] * len(episode_seeds))
        self._episodes = len(episode_seeds)
        self._runs.start([(episode_seed, self.host_pool.host_name(episode_seed)) for episode_seed in episode_seeds])
        self._slots = initial_slots(self._starts, self.space)
        self._changes = RunChanges(self._runs, self.space, self._episodes)
        self._changes.graft(self._slots.stage == Stage.FOSSILIZED, self._slots)
        self._changes.freeze_seeds(torch.tensor([start.frozen for start in self._starts]))
        all_envs = torch.ones(len(episode_seeds), dtype=torch.bool)
        self._governor = self._make_governor(envs=len(episode_seeds), chance=math.log(self.data.options))
        self._changes.save_snapshots(all_envs, self._slots)
        costs = [self.host_pool.costs(episode_seed) for episode_seed in episode_seeds]
        self._accounting = CostAccounting(costs, self.data, self.space, self._options)
        now = self._measure_untrained(all_envs, self._slots, False)
        self._initial_score = now.score
        self._view = first_view(self.steps, self._slots, now, self._accounting.host_parameters)
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
        self._apply_events(during, applied, earlier.score)
        self._changes.save_fossils(applied.into(Stage.FOSSILIZED), self._governor.is_healthy(), during)

        progress = (step / self.steps, (step + 1) / self.steps)
        plans = {env: self._plan(env, during, step, last) for env in range(self._episodes)}
        train = {env: partial(HostRun.train_and_measure, plan=plan, progress=progress) for env, plan in plans.items()}
        now = self._accounting.unpack_measurements(self._compute(train), during, last)
        reason = self._rollback_reason(now.loss, last)
        governed, evicted = during, torch.zeros_like(applied.entered)
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
            entered=applied.entered | evicted | ticked.entered,
            earlier=earlier,
            now=now,
            initial_score=self._initial_score,
            host_parameters=self._accounting.host_parameters,
            seed_parameters=self._accounting.seed_parameters(during),
            rollback=reason,
            terminated=ended if self._time_limit == "terminate" else torch.zeros_like(ended),
            truncated=ended if self._time_limit == "truncate" else torch.zeros_like(ended),
        )
        rewarded = self._reward(record)
        self._slots = after
        self._view = next_view(
            self._view, after, now, self._accounting.seed_parameters(after), decision.op, decision.slot, reason > 0
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
            "score": net_score(now.score, growth),
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
        samples = self._episodes * self._view.step * self._options.batches * self._options.batch
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
        batches = self._starts[env].batches_in_step(step, self.steps, self._options.batches)
        final = fossil_settings(during, env, self.space.slots) if last else settings
        off = () if last else self._slots_to_probe(settings, during, env, step)
        plan = StepPlan(settings, final, off, batches, measure=self._changes.must_measure(env, batches, (final, off)))
        self._accounting.charge_step(env, plan, during)
        return plan

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

    def _rollback_reason(self, loss: Tensor, last: bool) -> Tensor:
        """RollbackReason of each host. In the last step live seeds are off, so past losses do not compare."""
        if last:
            return torch.where(loss.isfinite(), 0, int(RollbackReason.NON_FINITE))
        return self._governor.judge(loss)

    def _measure_untrained(self, envs: Tensor, slots: Slots, last: bool) -> HostMeasurements:
        """Measure some hosts, bool [envs], with their fossils and without training; NaN for the others."""
        committed = {env: fossil_settings(slots, env, self.space.slots) for env in indices(envs)}
        for env, settings in committed.items():
            self._accounting.charge_validation(env, settings, slots)
        measured = self._compute(
            {env: partial(HostRun.measure, settings=settings) for env, settings in committed.items()}
        )
        values = torch.full((self._episodes, measured.shape[1]), torch.nan)
        values[envs] = measured
        return self._accounting.unpack_measurements(values, slots, last)

    def _observe(self) -> Observation:
        return observe(self._view, legal(self._slots, self.space, self.rules))
