"""PPO as a LightningModule: a batch is one round of episodes, a training step is one update."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torchmetrics import MeanMetric

from esper.controllers import Policy
from esper.environment import gradient_health
from esper.ppo.distributed import reduce_max, reduce_mean, reduce_sum, world_size
from esper.ppo.losses import anneal
from esper.ppo.metadata import CheckpointMetadata, Counters, check_fits
from esper.ppo.return_scale import ReturnScale
from esper.ppo.rollout import Rollout
from esper.ppo.settings import PPOSettings
from esper.ppo.update import MinibatchMetrics, StepCounts, UpdateTargets, minibatch_loss, prepare_targets
from esper.rng import make_generator

ADAM_EPS = 1e-5  # as in the first PPO implementations; 1e-8 makes early steps erratic
KL_MARGIN = 1.5  # an update ends when the KL exceeds this times the target
PATIENCE = 3  # consecutive updates with a skipped minibatch before the run stops


class DivergedError(RuntimeError):
    """Several consecutive updates had non-finite losses or gradients."""


class StaleRolloutError(RuntimeError):
    """A rollout is not of the current policy."""


@dataclass
class UpdateStats:
    """Statistics of one update."""

    steps: int = 0  # optimizer steps
    skipped: int = 0  # minibatches with non-finite values
    epochs: int = 0  # passes over the round
    stopped: bool = False  # by the KL
    metrics: dict[str, float] | None = None  # of the last minibatch
    norm: float = 0.0  # largest gradient norm before clipping


class PPO(LightningModule):
    """Trains a policy on rounds of episodes.

    Arguments:
        policy: the network that is trained
        settings: settings of the algorithm
        run_seed: the order of episodes in minibatches is derived from it
    """

    def __init__(self, policy: Policy, settings: PPOSettings, run_seed: int) -> None:
        super().__init__()
        unknown = set(settings.entropy_weights or {}) - set(policy.layout.head_names)
        if unknown:
            known = ", ".join(policy.layout.head_names)
            raise ValueError(f"ppo.entropy_weights: {', '.join(sorted(unknown))} is not a head; heads are {known}.")
        self.automatic_optimization = False
        self.policy, self.settings, self.run_seed = policy, settings, run_seed
        self.scale = ReturnScale(settings.return_momentum)
        self._means = nn.ModuleDict()  # by metric; torchmetrics keeps them out of checkpoints
        self.counters = Counters()
        self.start_cost: Mapping[str, float | None] = {}  # training cost of the controller in `start`
        self.validated_round: int | None = None  # the round after which it was last validated
        self.latest_metrics: dict[str, float] = {}  # the latest value of every metric

    def configure_optimizers(self) -> torch.optim.Optimizer:
        named = [("actor", self.policy.heads), ("critic", self.policy.critic)]
        grouped = {name: list(part.parameters()) for name, part in named}
        grouped_ids = {id(parameter) for parameters in grouped.values() for parameter in parameters}
        grouped["shared"] = [parameter for parameter in self.policy.parameters() if id(parameter) not in grouped_ids]
        decay = {"critic": self.settings.weight_decay}
        groups = [
            {"params": parameters, "weight_decay": decay.get(name, 0.0), "name": name}
            for name, parameters in grouped.items()
        ]
        on_cuda = self.device.type == "cuda"
        return torch.optim.AdamW(
            groups, lr=self.settings.lr, eps=ADAM_EPS, fused=on_cuda, foreach=None if on_cuda else True
        )

    def training_step(self, rollout: Rollout, batch_idx: int) -> dict[str, UpdateTargets]:
        started = time.perf_counter()
        if rollout.rounds_done != self.counters.rounds:
            raise StaleRolloutError(
                f"ppo: the rollout was collected after round {rollout.rounds_done}, but {self.counters.rounds} rounds "
                "are done; PPO learns only from episodes of the current policy."
            )
        targets = prepare_targets(rollout, self.policy, self.scale, self.settings)
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
        """Passes over the round, up to `epochs` or until the KL exceeds its limit."""
        settings, counters, stats = self.settings, self.counters, UpdateStats()
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
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
                    return stats
                optimizer.step()
                stats.steps += 1
        return stats

    def _compute_gradients(
        self, rollout: Rollout, targets: UpdateTargets, rows: Tensor
    ) -> tuple[dict[str, float], float]:
        """Compute and clip the gradients of one minibatch; return its metrics and the norm before clipping."""
        settings, policy = self.settings, self.policy
        bonus = anneal(settings.entropy, settings.entropy_final, settings.entropy_rounds, self.counters.rounds)
        counts = StepCounts.of(rollout, targets, rows)
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.zero_grad(set_to_none=True)
        total: MinibatchMetrics | None = None
        for chunk in rows.tensor_split(settings.accumulate):
            loss, metrics = minibatch_loss(policy, rollout, targets, chunk, counts, settings, bonus)
            self.manual_backward(loss)
            total = metrics if total is None else total + metrics
        assert total is not None
        parts = {**dict(policy.heads.items()), "value": policy.critic}
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
            start_cost=self.start_cost,
            generator=torch.get_rng_state(),
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["esper"] = self.metadata().to_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = CheckpointMetadata.from_dict(checkpoint["esper"])
        check_fits(saved, self.policy, self.trainer.ckpt_path)
        vars(self.counters).update(vars(saved.counters))  # in place, since the collector reads the same object
        self.start_cost = saved.start_cost
        if saved.generator is not None:
            torch.set_rng_state(saved.generator)
        groups = self.configure_optimizers().state_dict()["param_groups"]
        for state in checkpoint.get("optimizer_states", []):
            state["param_groups"] = groups  # learning rate and weight decay are those of this run
        states = checkpoint.get("callbacks", {})
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        present = {callback.state_key for callback in callbacks}  # a resumed run may switch some off
        checkpoint["callbacks"] = {key: state for key, state in states.items() if key in present}


def round_samples(rollout: Rollout) -> dict[str, Tensor]:
    """The samples [n] whose means are reported: one for each episode; for the share of each op, one for each step."""
    valid, op = rollout.valid, rollout.select_head("op")[rollout.valid]
    samples = {f"episode/{name}": values.float() for name, values in rollout.outcome.items()}
    samples["episode/return"] = rollout.reward.sum(1)
    samples["episode/length"] = valid.sum(1).float()
    return samples | {f"policy/op_{name}": (op == index).float() for index, name in enumerate(rollout.layout.ops)}
