"""Health metrics of PPO: LSTM state, ratios, advantages and memory use. Nothing here changes training."""

import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from esper.controllers import LSTMState
from esper.ppo import PPO, Rollout
from esper.ppo.distributed import reduce_max, reduce_mean

MAX_LISTED = 100  # ratios outside the bounds that are listed one by one


class Health(Callback):
    """Reports health metrics after every update."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PPO)
        assert isinstance(batch, Rollout)
        _, state = reevaluate(pl_module, batch)
        metrics = {
            **head_usage(batch, outputs["targets"]),
            **lstm_health(state),
            **target_moments(outputs["targets"]),
        }
        if metrics:
            values = torch.stack([value.double() for value in metrics.values()])
            signs = {"max": 1.0, "min": -1.0}
            sign = torch.tensor([signs.get(name.rpartition("_")[2], 0.0) for name in metrics], device=values.device)
            reduced = torch.where(sign == 0, reduce_mean(values), sign * reduce_max(sign * values))
            pl_module.report_metrics(dict(zip(metrics, reduced.tolist(), strict=True)))
        pl_module.report_metrics(memory_metrics(pl_module.device))


@torch.no_grad()
def reevaluate(module: PPO, rollout: Rollout) -> tuple[Tensor, LSTMState]:
    """Log-probabilities [envs, steps, heads] of the current policy, and its LSTM state at the end of each episode."""
    log_prob, lengths = torch.zeros_like(rollout.log_prob), rollout.valid.sum(1)
    state = (rollout.state[0].clone(), rollout.state[1].clone())
    for length in lengths.unique().tolist():  # type: ignore[no-untyped-call]  # so that each state is that at the episode's own end
        rows = (lengths == length).nonzero().flatten()
        start = (rollout.state[0][:, rows].contiguous(), rollout.state[1][:, rows].contiguous())
        base, slots, blueprints = (part[rows, :length] for part in (rollout.base, rollout.slots, rollout.blueprints))
        output = module.policy(base, slots, blueprints, start, rollout.context[rows])
        masks = rollout.masks.each(lambda mask, rows=rows, length=length: mask[rows, :length].flatten(0, 1))  # type: ignore[misc]
        distribution = module.policy.distribution(output.logits, masks, validate=False)
        action = rollout.action[rows, :length]
        log_prob[rows, :length] = distribution.log_prob(action.flatten(0, 1)).view(action.shape)
        for whole, part in zip(state, output.state, strict=True):
            whole[:, rows] = part
    return log_prob, state


def head_usage(rollout: Rollout, targets: Any) -> dict[str, Tensor]:
    """The share of decisions in which each head is active."""
    shares = targets.active.sum((0, 1)) / rollout.valid.sum().clamp(min=1)
    return {f"policy/usage_{head}": shares[index] for index, head in enumerate(rollout.layout.head_names)}


def lstm_health(state: LSTMState | None) -> dict[str, Tensor]:
    """Root mean square and maximum of the LSTM state, also if non-finite; empty without an LSTM."""
    if state is None or not state[0].numel():
        return {}
    both = torch.cat([part.flatten() for part in state]).double()
    return {"health/lstm_rms": both.square().mean().sqrt(), "health/lstm_max": both.abs().amax()}


def target_moments(targets: Any) -> dict[str, Tensor]:
    """Moments of advantages and returns after normalisation."""
    advantages, decision = targets.advantages.double(), targets.decision
    count = decision.sum().clamp(min=1)
    returns, learned = targets.returns.double(), targets.learned
    mean = torch.where(learned, returns, 0).sum() / learned.sum().clamp(min=1)
    variance = torch.where(learned, (returns - mean).square(), 0).sum() / learned.sum().clamp(min=1)
    return {
        "policy/advantage_min": torch.where(decision, advantages, 0).amin(),
        "policy/advantage_max": torch.where(decision, advantages, 0).amax(),
        "policy/advantage_skew": torch.where(decision, advantages**3, 0).sum() / count,
        "policy/advantage_positive": ((advantages > 0) & decision).sum() / count,
        "policy/return_scaled_mean": mean,
        "policy/return_scaled_std": variance.sqrt(),
    }


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peak memory so far, in GB."""
    unit = 1e9 if sys.platform == "darwin" else 1e6  # macOS counts bytes, Linux kilobytes
    metrics = {"health/memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    if device.type == "cuda":
        metrics["health/device_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return metrics


@dataclass(frozen=True)
class RatioDiagnostic:
    """Ratios of new to old probability outside bounds: all are counted, at most MAX_LISTED are listed."""

    largest: float
    smallest: float
    above: int
    below: int
    not_finite: int
    listed: list[dict[str, Any]]

    @classmethod
    def of(cls, log_prob: Tensor, rollout: Rollout, active: Tensor, *, low: float, high: float) -> "RatioDiagnostic":
        """`log_prob`, `active` [envs, steps, heads]; only active heads are counted."""
        ratio = torch.where(active, (log_prob - rollout.log_prob).double().exp(), 1.0)
        finite = ratio.isfinite()
        above, below = finite & (ratio > high), finite & (ratio < low)
        bounded = torch.where(finite, ratio, 1.0)
        outside = (above | below | ~finite).nonzero()[:MAX_LISTED].tolist()
        names, options = rollout.layout.head_names, list(rollout.layout.options.values())
        listed = [
            {
                "episode": env,
                "step": step,
                "head": names[head],
                "option": options[head][int(rollout.action[env, step, head])],
                "ratio": ratio[env, step, head].item() if finite[env, step, head] else None,
            }
            for env, step, head in outside
        ]
        return cls(
            bounded.amax().item(),
            bounded.amin().item(),
            int(above.sum()),
            int(below.sum()),
            int((~finite).sum()),
            listed,
        )
