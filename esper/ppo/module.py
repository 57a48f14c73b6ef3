"""PPO as a LightningModule: a batch is one round of episodes, a training step is one update."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torchmetrics import MeanMetric

from esper.controllers import Policy
from esper.growth import gradient_health
from esper.ppo.baseline import AdvantageScale
from esper.ppo.critic import Critic
from esper.ppo.distributed import reduce_max, reduce_mean, reduce_sum, world_size
from esper.ppo.losses import anneal
from esper.ppo.metadata import CheckpointMetadata, Counters, check_fits
from esper.ppo.return_scale import ReturnScale
from esper.ppo.rollout import Rollout
from esper.ppo.settings import PPOSettings
from esper.ppo.update import (
    MinibatchMetrics,
    StepCounts,
    UpdateTargets,
    critic_minibatch_loss,
    minibatch_loss,
    prepare_targets,
)
from esper.rng import derive_seed, make_generator, seeded_init

ACTOR_OPTIMIZER, CRITIC_OPTIMIZER = 0, 1  # indices of the optimizers; there is only one with a shared critic
ADAM_EPS = 1e-5  # as in the first PPO implementations; 1e-8 makes early steps erratic
KL_MARGIN = 1.5  # an update ends when the KL exceeds this times the target
UPDATE_PASSES = 3  # cost of a forward and backward pass, in forward passes
SCALE_PREFIX = "advantage_scale."  # of names in checkpoints
PATIENCE = 3  # consecutive updates with a skipped minibatch before the run stops


class DivergedError(RuntimeError):
    """Several consecutive updates had non-finite losses or gradients."""


class StaleRolloutError(RuntimeError):
    """A rollout is not of the current policy."""


@dataclass
class UpdateStats:
    """Statistics of one update."""

    steps: int = 0  # optimizer steps of the policy
    skipped: int = 0  # minibatches with non-finite values
    epochs: int = 0  # passes of the policy over the round
    stopped: bool = False  # by the KL
    metrics: dict[str, float] | None = None  # of the last minibatch
    critic_metrics: dict[str, float] = field(default_factory=dict)  # of a separate critic
    norm: float = 0.0  # largest gradient norm before clipping


class PPO(LightningModule):
    """Trains a policy on rounds of episodes.

    Arguments:
        policy: the network that is trained
        settings: settings of the algorithm
        run_seed: the order of episodes in minibatches, and the first weights of a separate critic, are derived from it
        task_features: names of the descriptors of a task that a separate critic gets
    """

    def __init__(self, policy: Policy, settings: PPOSettings, run_seed: int, task_features: Sequence[str] = ()) -> None:
        super().__init__()
        unknown = set(settings.entropy_weights or {}) - set(policy.layout.head_names)
        if unknown:
            known = ", ".join(policy.layout.head_names)
            raise ValueError(f"ppo.entropy_weights: {', '.join(sorted(unknown))} is not a head; heads are {known}.")
        self.automatic_optimization = False
        self.policy, self.settings, self.run_seed = policy, settings, run_seed
        self.scale = ReturnScale(settings.return_momentum)
        self.critic: Critic | None = None
        if settings.critic == "separate":
            policy.critic = None
            with seeded_init(derive_seed("critic", run_seed)):
                self.critic = Critic(policy.layout, task_features, hidden=settings.critic_hidden)
        self.advantage_scale: AdvantageScale | None = None
        if settings.baseline == "leave_one_out":
            self.advantage_scale = AdvantageScale(settings.advantage_shrinkage)
        self._means = nn.ModuleDict()  # by metric; torchmetrics keeps them out of checkpoints
        self.counters = Counters()
        self.start_cost: Mapping[str, float | None] = {}  # training cost of the controller in `start`
        self.validated_round: int | None = None  # the round after which it was last validated
        self.latest_metrics: dict[str, float] = {}  # the latest value of every metric

    def configure_optimizers(self) -> torch.optim.Optimizer | list[torch.optim.Optimizer]:
        named = [("actor", self.policy.heads), ("critic", self.policy.critic)]
        grouped = {name: list(part.parameters()) for name, part in named if part is not None}
        grouped_ids = {id(parameter) for parameters in grouped.values() for parameter in parameters}
        grouped["shared"] = [parameter for parameter in self.policy.parameters() if id(parameter) not in grouped_ids]
        decay = {"critic": self.settings.weight_decay}
        groups = [
            {"params": parameters, "weight_decay": decay.get(name, 0.0), "name": name}
            for name, parameters in grouped.items()
        ]
        on_cuda = self.device.type == "cuda"
        options: dict[str, Any] = {"eps": ADAM_EPS, "fused": on_cuda, "foreach": None if on_cuda else True}
        actor = torch.optim.AdamW(groups, lr=self.settings.lr, **options)
        if self.critic is None:
            return actor
        own = {"params": list(self.critic.parameters()), "weight_decay": self.settings.weight_decay, "name": "critic"}
        return [actor, torch.optim.AdamW([own], lr=self.settings.critic_lr, **options)]

    def _optimizer(self, index: int) -> LightningOptimizer:
        optimizers = self.optimizers()
        chosen = optimizers[index] if isinstance(optimizers, list) else optimizers
        assert isinstance(chosen, LightningOptimizer)
        return chosen

    def training_step(self, rollout: Rollout, batch_idx: int) -> dict[str, UpdateTargets]:
        started = time.perf_counter()
        if rollout.rounds_done != self.counters.rounds:
            raise StaleRolloutError(
                f"ppo: the rollout was collected after round {rollout.rounds_done}, but {self.counters.rounds} rounds "
                "are done; PPO learns only from episodes of the current policy."
            )
        targets = prepare_targets(rollout, self.policy, self.scale, self.settings, self.critic, self.advantage_scale)
        stats = self._update(rollout, targets)
        counters = self.counters
        counters.rounds += 1
        counters.episodes += len(rollout.episode_seeds) * world_size()
        counters.decisions += int(reduce_sum(rollout.valid.sum()))
        counters.updates += stats.steps
        counters.skipped += stats.skipped
        counters.bad = counters.bad + 1 if stats.skipped else 0
        seconds = rollout.seconds["environment"] + rollout.seconds["policy"] + time.perf_counter() - started
        metrics = {
            **(stats.metrics or {}),
            **stats.critic_metrics,
            **targets.metrics,
            "health/gradient_norm": stats.norm if stats.norm else float("nan"),
            "health/skipped": counters.skipped,
            "policy/epochs": stats.epochs,
            "policy/kl_stop": float(stats.stopped),
            "time/update": time.perf_counter() - started,
            "time/decisions_per_second": rollout.decisions * world_size() / seconds,
        }
        if rollout.samples:
            metrics["time/samples_per_second"] = rollout.samples * world_size() / seconds
        self.report_metrics({**self._round_metrics(rollout), **metrics})
        if counters.bad >= PATIENCE:
            raise DivergedError(
                f"ppo: {PATIENCE} consecutive updates had non-finite losses or gradients; the run stops after "
                f"round {counters.rounds} (ppo.lr={self.settings.lr}, ppo.grad_clip={self.settings.grad_clip})."
            )
        return {"targets": targets}

    def validation_step(self, rollout: Rollout, batch_idx: int) -> None:
        self.validated_round = self.counters.rounds
        metrics = {
            key.split("/")[1]: value
            for key, value in self._round_metrics(rollout).items()
            if not key.startswith("time/")
        }
        self.report_metrics({f"validation/{rollout.kind}_{name}": value for name, value in metrics.items()})

    def _round_metrics(self, rollout: Rollout) -> dict[str, float]:
        """Means over the episodes of all ranks, the share of each op, and seconds by phase."""
        means = {}
        for name, samples in round_samples(rollout).items():
            if name not in self._means:  # they are made once, because making one takes longer than using it
                self._means[name] = MeanMetric(nan_strategy="disable").to(rollout.valid.device)
            mean = self._means[name]
            assert isinstance(mean, MeanMetric)
            mean.reset()
            mean.update(samples.to(rollout.valid.device))
            means[name] = mean.compute().double()
        values = torch.stack(list(means.values())).tolist()
        seconds = {f"time/{name}": value for name, value in rollout.seconds.items()}
        return {**dict(zip(means, values, strict=True)), **seconds}

    def _update(self, rollout: Rollout, targets: UpdateTargets) -> UpdateStats:
        """Passes of the policy over the round, and of a separate critic."""
        stats = UpdateStats()
        if self.counters.rounds < self.settings.critic_warmup:
            rows = torch.arange(len(rollout.episode_seeds), device=rollout.valid.device)
            stats.metrics, stats.norm = self._compute_gradients(rollout, targets, rows)
        else:
            self._update_policy(rollout, targets, stats)
        if self.critic is not None:
            self._update_critic(self.critic, rollout, targets, stats)
        return stats

    def _update_policy(self, rollout: Rollout, targets: UpdateTargets, stats: UpdateStats) -> None:
        """Up to `epochs` passes, or until the KL exceeds its limit."""
        settings, counters = self.settings, self.counters
        optimizer = self._optimizer(ACTOR_OPTIMIZER)
        for group in optimizer.param_groups:
            group["lr"] = anneal(settings.lr, settings.lr_final, settings.lr_rounds, counters.rounds)
        generator = make_generator("shuffle", self.run_seed, counters.rounds)
        episodes = len(rollout.episode_seeds)
        for _ in range(settings.epochs):
            order = torch.randperm(episodes, generator=generator).to(rollout.valid.device)
            stats.epochs += 1
            for rows in order.tensor_split(settings.minibatches):
                metrics, norm = self._compute_gradients(rollout, targets, rows)
                is_finite, kl = bool(norm < float("inf")), metrics["policy/kl"]
                if not (is_finite and kl < float("inf")):
                    stats.skipped += 1
                    stats.metrics = stats.metrics or dict.fromkeys(metrics, float("nan"))
                    continue
                stats.metrics, stats.norm = metrics, max(stats.norm, norm)
                if settings.target_kl is not None and kl > KL_MARGIN * settings.target_kl:
                    stats.stopped = True
                    return
                optimizer.step()
                stats.steps += 1

    def _update_critic(self, critic: Critic, rollout: Rollout, targets: UpdateTargets, stats: UpdateStats) -> None:
        """`critic_epochs` passes of a separate critic."""
        settings, optimizer = self.settings, self._optimizer(CRITIC_OPTIMIZER)
        for group in optimizer.param_groups:
            group["lr"] = settings.critic_lr
        generator = make_generator("critic shuffle", self.run_seed, self.counters.rounds)
        largest = 0.0
        for _ in range(settings.critic_epochs):
            order = torch.randperm(len(rollout.episode_seeds), generator=generator).to(rollout.valid.device)
            for rows in order.tensor_split(settings.minibatches):
                metrics = self._compute_critic_gradients(critic, rollout, targets, rows)
                norm = metrics["health/gradient_value"]
                if not norm < float("inf"):
                    stats.skipped += 1
                    stats.critic_metrics = stats.critic_metrics or dict.fromkeys(metrics, float("nan"))
                    continue
                largest = max(largest, norm)
                stats.critic_metrics = {**metrics, "health/gradient_value": largest}
                optimizer.step()
        passes = 1 + UPDATE_PASSES * settings.critic_epochs
        stats.critic_metrics["policy/critic_gflops"] = passes * critic.flops * rollout.decisions * world_size() / 1e9

    def _compute_gradients(
        self, rollout: Rollout, targets: UpdateTargets, rows: Tensor
    ) -> tuple[dict[str, float], float]:
        """Compute and clip the gradients of one minibatch; return its metrics and the norm before clipping."""
        settings, policy = self.settings, self.policy
        bonus = anneal(settings.entropy, settings.entropy_final, settings.entropy_rounds, self.counters.rounds)
        counts = StepCounts.of(targets, rows)
        self._optimizer(ACTOR_OPTIMIZER).zero_grad(set_to_none=True)
        total: MinibatchMetrics | None = None
        for chunk in rows.tensor_split(settings.accumulate):
            loss, metrics = minibatch_loss(policy, rollout, targets, chunk, counts, settings, bonus)
            self.manual_backward(loss if self.critic is None else _include(loss, self.critic.parameters()))
            total = metrics if total is None else total + metrics
        assert total is not None
        parts = dict(policy.heads.items()) | ({} if policy.critic is None else {"value": policy.critic})
        norms = {
            f"health/gradient_{name}": get_total_norm([p.grad for p in part.parameters() if p.grad is not None])
            for name, part in parts.items()
        }
        norms["health/policy"] = gradient_health(list(policy.parameters()), settings.grad_clip)
        norm = clip_grad_norm_(policy.parameters(), settings.grad_clip, foreach=True)
        extremes = reduce_max(torch.stack([total.ratio_max, -total.ratio_min]))
        total = replace(total, ratio_max=extremes[0], ratio_min=-extremes[1])
        named = {**total.to_dict(policy.layout.head_names), **norms}
        values = torch.stack([*named.values(), norm.to(total.policy)])
        *means, norm_before = reduce_mean(values).tolist()
        return {**dict(zip(named, means, strict=True)), "policy/entropy_bonus": bonus}, norm_before

    def _compute_critic_gradients(
        self, critic: Critic, rollout: Rollout, targets: UpdateTargets, rows: Tensor
    ) -> dict[str, float]:
        """Compute and clip the gradients of a separate critic; return the metrics of the minibatch."""
        counts, parameters = StepCounts.of(targets, rows), list(critic.parameters())
        self._optimizer(CRITIC_OPTIMIZER).zero_grad(set_to_none=True)
        total = torch.zeros_like(counts.learned)
        for chunk in rows.tensor_split(self.settings.accumulate):
            loss = critic_minibatch_loss(critic.values(rollout, chunk), targets, chunk, counts, self.settings)
            self.manual_backward(_include(loss, self.policy.parameters()))
            total = total + loss.detach()
        health = gradient_health(parameters, self.settings.grad_clip)
        norm = clip_grad_norm_(parameters, self.settings.grad_clip, foreach=True)
        values = reduce_mean(torch.stack([total, norm.to(total), health.to(total)])).tolist()
        return dict(zip(("losses/value", "health/gradient_value", "health/critic"), values, strict=True))

    def report_metrics(self, metrics: dict[str, float]) -> None:
        """Log metrics against the number of decisions; Lightning's own counter counts optimizer steps.

        Metrics are already reduced over ranks, except seconds and memory, which each rank has for itself.
        """
        self.latest_metrics.update(metrics)
        self.log_dict(metrics, logger=False, on_step=False, on_epoch=True, batch_size=1)
        for logger in self.loggers:
            logger.log_metrics({**metrics, "round": self.counters.rounds}, step=self.counters.decisions)

    def metadata(self) -> CheckpointMetadata:
        return CheckpointMetadata(
            layout=self.policy.layout,
            sizes=self.policy.sizes,
            seed=self.run_seed,
            counters=self.counters,
            compile=self.policy.compile_mode,
            critic=None if self.critic is None else self.critic.sizes,
            start_cost=self.start_cost,
            generator=torch.get_rng_state(),
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["esper"] = self.metadata().to_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = CheckpointMetadata.from_dict(checkpoint["esper"])
        check_fits(saved, self.policy, self.trainer.ckpt_path, self.critic)
        vars(self.counters).update(vars(saved.counters))  # in place, since the collector reads the same object
        self.start_cost = saved.start_cost
        if saved.generator is not None:
            torch.set_rng_state(saved.generator)
        own = self.configure_optimizers()
        optimizers = own if isinstance(own, list) else [own]
        for state, optimizer in zip(checkpoint.get("optimizer_states", []), optimizers, strict=False):
            # learning rate and weight decay are those of this run
            state["param_groups"] = optimizer.state_dict()["param_groups"]
        scale = {} if self.advantage_scale is None else self.advantage_scale.state_dict(prefix=SCALE_PREFIX)
        weights = checkpoint["state_dict"]  # a resumed run may have another baseline
        kept = {key: value for key, value in weights.items() if key in scale or not key.startswith(SCALE_PREFIX)}
        checkpoint["state_dict"] = {**scale, **kept}
        states = checkpoint.get("callbacks", {})
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        present = {callback.state_key for callback in callbacks}  # a resumed run may switch some off
        checkpoint["callbacks"] = {key: state for key, state in states.items() if key in present}


def _include(loss: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """The loss, with a gradient of 0 for some parameters: DDP needs one for every parameter in every backward pass."""
    return loss if world_size() == 1 else loss + 0 * sum(parameter.sum() for parameter in parameters)


def round_samples(rollout: Rollout) -> dict[str, Tensor]:
    """The samples [n] whose means are reported: one for each episode; for the share of each op, one for each step."""
    valid, op = rollout.valid, rollout.select_head("op")[rollout.valid]
    samples = {f"episode/{name}": values.float() for name, values in rollout.outcome.items()}
    samples["episode/return"] = rollout.reward.sum(1)
    samples["episode/length"] = valid.sum(1).float()
    return samples | {f"policy/op_{name}": (op == index).float() for index, name in enumerate(rollout.layout.ops)}
