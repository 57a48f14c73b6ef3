"""PPO as a LightningModule: a batch is a whole round of episodes, a training step is a whole update."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from esper.controllers import Policy
from esper.environment import gradient_health
from esper.ppo.distributed import reduce_max, reduce_mean, reduce_sum, world_size
from esper.ppo.losses import annealed
from esper.ppo.metadata import CheckpointMetadata, Counters
from esper.ppo.return_scale import ReturnScale
from esper.ppo.rollout import Rollout
from esper.ppo.settings import PPOSettings
from esper.ppo.update import MinibatchMetrics, StepCounts, UpdateTargets, minibatch_loss, prepare_targets
from esper.rng import make_generator

ADAM_EPS = 1e-5  # as in the first PPO implementations; 1e-8 makes early steps erratic
KL_MARGIN = 1.5  # times the target, at which an update ends
PATIENCE = 3  # updates in a row with a skipped minibatch before the run stops


class DivergedError(RuntimeError):
    """Updates keep giving losses or gradients that are not finite."""


@dataclass
class UpdateStats:
    """What an update did, over its minibatches."""

    steps: int = 0
    skipped: int = 0
    epochs: int = 0
    stopped: bool = False
    figures: dict[str, float] | None = None  # of the last minibatch that was looked at
    norm: float = 0.0  # largest, before clipping


class PPO(LightningModule):
    """Learns a policy from rounds.

    Arguments:
        policy: the network
        settings: of the algorithm
        run_seed: for the order of episodes in minibatches
    """

    def __init__(self, policy: Policy, settings: PPOSettings, run_seed: int) -> None:
        super().__init__()
        unknown = set(settings.entropy_weights or {}) - set(policy.layout.head_names)
        if unknown:
            known = ", ".join(policy.layout.head_names)
            raise ValueError(f"ppo.entropy_weights: {', '.join(sorted(unknown))} is no head; there are {known}.")
        self.automatic_optimization = False
        self.policy, self.settings, self.run_seed = policy, settings, run_seed
        self.scale = ReturnScale(settings.return_momentum)
        self.counters = Counters()
        self.start_cost: Mapping[str, float | None] = {}  # what went into the policy that this one began with
        self.validated_round: int | None = None  # rounds done when it was last validated
        self.latest_metrics: dict[str, float] = {}  # every figure as it was last reported
        self.optimizer_state: dict[str, Any] | None = None  # of a checkpoint, until there is an optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        named = [("actor", self.policy.heads), ("critic", self.policy.critic)]
        grouped = {name: list(part.parameters()) for name, part in named}
        taken = {id(parameter) for parameters in grouped.values() for parameter in parameters}
        grouped["shared"] = [parameter for parameter in self.policy.parameters() if id(parameter) not in taken]
        decay = {"critic": self.settings.weight_decay}
        groups = [
            {"params": parameters, "weight_decay": decay.get(name, 0.0), "name": name}
            for name, parameters in grouped.items()
        ]
        on_cuda = self.device.type == "cuda"
        optimizer = torch.optim.AdamW(
            groups, lr=self.settings.lr, eps=ADAM_EPS, fused=on_cuda, foreach=None if on_cuda else True
        )
        if self.optimizer_state is not None:
            groups_now = optimizer.state_dict()["param_groups"]  # rates and decay are this run's own
            optimizer.load_state_dict({"state": self.optimizer_state["state"], "param_groups": groups_now})
            self.optimizer_state = None
        return optimizer

    def training_step(self, rollout: Rollout, batch_idx: int) -> dict[str, UpdateTargets]:
        started = time.perf_counter()
        targets = prepare_targets(rollout, self.policy, self.scale, self.settings)
        tally = self._learn(rollout, targets)
        counters = self.counters
        counters.rounds += 1
        counters.episodes += len(rollout.episode_seeds) * world_size()
        counters.decisions += int(reduce_sum(rollout.valid.sum()))
        counters.updates += tally.steps
        counters.skipped += tally.skipped
        counters.bad = counters.bad + 1 if tally.skipped else 0
        seconds = rollout.seconds["environment"] + rollout.seconds["policy"] + time.perf_counter() - started
        update = {
            **(tally.figures or {}),
            **targets.figures,
            "health/gradient_norm": tally.norm if tally.norm else float("nan"),
            "health/skipped": counters.skipped,
            "policy/epochs": tally.epochs,
            "policy/kl_stop": float(tally.stopped),
            "time/update": time.perf_counter() - started,
            "time/decisions_per_second": rollout.decisions * world_size() / seconds,
        }
        if rollout.samples:
            update["time/samples_per_second"] = rollout.samples * world_size() / seconds
        self.report_metrics({**round_metrics(rollout), **update})
        collector = self.trainer.datamodule  # type: ignore[attr-defined]
        if collector is not None and collector.budget_exhausted(counters.decisions):
            self.trainer.should_stop = True
        if counters.bad >= PATIENCE:
            raise DivergedError(
                f"ppo: {PATIENCE} updates in a row met losses or gradients that are not finite; the run stops after "
                f"round {counters.rounds} (ppo.lr={self.settings.lr}, ppo.grad_clip={self.settings.grad_clip})."
            )
        return {"targets": targets}

    def validation_step(self, rollout: Rollout, batch_idx: int) -> None:
        self.validated_round = self.counters.rounds
        figures = {
            key.split("/")[1]: value for key, value in round_metrics(rollout).items() if not key.startswith("time/")
        }
        self.report_metrics({f"validation/{rollout.kind}_{name}": value for name, value in figures.items()})

    def _learn(self, rollout: Rollout, targets: UpdateTargets) -> UpdateStats:
        """Passes over the round, until they are done or the policy has moved far enough."""
        settings, counters, tally = self.settings, self.counters, UpdateStats()
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        for group in optimizer.param_groups:
            group["lr"] = annealed(settings.lr, settings.lr_final, settings.lr_rounds, counters.rounds)
        shuffle = make_generator("shuffle", self.run_seed, counters.rounds)
        episodes = len(rollout.episode_seeds)
        for _ in range(settings.epochs):
            order = torch.randperm(episodes, generator=shuffle).to(rollout.valid.device)
            tally.epochs += 1
            for rows in order.tensor_split(settings.minibatches):
                figures, norm = self._gradients(rollout, targets, rows)
                finite, kl = bool(norm < float("inf")), figures["policy/kl"]
                if not (finite and kl < float("inf")):
                    tally.skipped += 1
                    tally.figures = tally.figures or dict.fromkeys(figures, float("nan"))
                    continue
                tally.figures, tally.norm = figures, max(tally.norm, norm)
                if settings.target_kl is not None and kl > KL_MARGIN * settings.target_kl:
                    tally.stopped = True
                    return tally
                optimizer.step()
                tally.steps += 1
        return tally

    def _gradients(self, rollout: Rollout, targets: UpdateTargets, rows: Tensor) -> tuple[dict[str, float], float]:
        """Clipped gradients of one minibatch, its figures, and the gradients' norm before clipping."""
        settings, policy = self.settings, self.policy
        bonus = annealed(settings.entropy, settings.entropy_final, settings.entropy_rounds, self.counters.rounds)
        counts = StepCounts.of(rollout, targets, rows)
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.zero_grad(set_to_none=True)
        total: MinibatchMetrics | None = None
        for some in rows.tensor_split(settings.accumulate):
            loss, figures = minibatch_loss(policy, rollout, targets, some, counts, settings, bonus)
            self.manual_backward(loss)
            total = figures if total is None else total + figures
        assert total is not None
        parts = {**dict(policy.heads.items()), "value": policy.critic}
        norms = {
            f"health/gradient_{name}": get_total_norm([p.grad for p in part.parameters() if p.grad is not None])
            for name, part in parts.items()
        }
        norms["health/policy"] = gradient_health(list(policy.parameters()), settings.grad_clip)
        norm = clip_grad_norm_(policy.parameters(), settings.grad_clip, foreach=True)
        ends = reduce_max(torch.stack([total.largest, -total.smallest]))
        total = replace(total, largest=ends[0], smallest=-ends[1])
        named = {**total.named(policy.layout.head_names), **norms}
        values = torch.stack([*named.values(), norm.to(total.policy)])
        *agreed, before = reduce_mean(values).tolist()
        return {**dict(zip(named, agreed, strict=True)), "policy/entropy_bonus": bonus}, before

    def report_metrics(self, figures: dict[str, float]) -> None:
        """Figures against our own count of decisions, since Lightning's counts optimizer steps.

        Ranks have agreed on them already, but for seconds and memory, of which each has its own.
        """
        self.latest_metrics.update(figures)
        self.log_dict(figures, logger=False, on_step=False, on_epoch=True, batch_size=1)
        for logger in self.loggers:
            logger.log_metrics({**figures, "round": self.counters.rounds}, step=self.counters.decisions)

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


def round_metrics(rollout: Rollout) -> dict[str, float]:
    """What the episodes of a round came to, as means over them, and how the policy acted."""
    valid = rollout.valid
    figures = {f"episode/{name}": values.float().mean() for name, values in rollout.outcome.items()}
    figures["episode/return"] = rollout.reward.sum(1).mean()
    figures["episode/length"] = valid.sum(1).float().mean()
    op = rollout.each("op")
    for index, name in enumerate(rollout.layout.ops):
        figures[f"policy/op_{name}"] = ((op == index) & valid).sum() / valid.sum()
    found = reduce_mean(torch.stack([figure.to(valid.device).double() for figure in figures.values()])).tolist()
    return {**dict(zip(figures, found, strict=True)), **{f"time/{name}": s for name, s in rollout.seconds.items()}}
