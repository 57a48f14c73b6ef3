"""How well the learner is: memory, ratios, advantages, and what the process holds. It looks, and changes nothing."""

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

MOST_LISTED = 100  # offending ratios that are listed one by one


class Health(Callback):
    """Reports figures of health after every update."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PPO)
        assert isinstance(batch, Rollout)
        _, state = reevaluate(pl_module, batch)
        found = {
            **head_usage(batch, outputs["targets"]),
            **lstm_health(state),
            **target_moments(batch, outputs["targets"]),
        }
        if found:
            values = torch.stack([value.double() for value in found.values()])
            ends = {"max": 1.0, "min": -1.0}
            sign = torch.tensor([ends.get(name.rpartition("_")[2], 0.0) for name in found], device=values.device)
            agreed = torch.where(sign == 0, reduce_mean(values), sign * reduce_max(sign * values))
            pl_module.report_metrics(dict(zip(found, agreed.tolist(), strict=True)))
        pl_module.report_metrics(memory_metrics(pl_module.device))


@torch.no_grad()
def reevaluate(module: PPO, rollout: Rollout) -> tuple[Tensor, LSTMState]:
    """Log-probabilities [envs, steps, heads] under the policy as it is now, and its memory after the last step."""
    log_prob, lengths = torch.zeros_like(rollout.log_prob), rollout.valid.sum(1)
    state = (rollout.state[0].clone(), rollout.state[1].clone())
    for length in lengths.unique().tolist():  # type: ignore[no-untyped-call]  # an episode's memory is that at its own end
        rows = (lengths == length).nonzero().flatten()
        start = (rollout.state[0][:, rows].contiguous(), rollout.state[1][:, rows].contiguous())
        base, slots, blueprints = (part[rows, :length] for part in (rollout.base, rollout.slots, rollout.blueprints))
        output = module.policy(base, slots, blueprints, start)
        masks = rollout.masks.each(lambda mask, rows=rows, length=length: mask[rows, :length].flatten(0, 1))  # type: ignore[misc]
        distribution = module.policy.distribution(output.logits, masks, validate=False)
        action = rollout.action[rows, :length]
        log_prob[rows, :length] = distribution.log_prob(action.flatten(0, 1)).view(action.shape)
        for whole, part in zip(state, output.state, strict=True):
            whole[:, rows] = part
    return log_prob, state


def head_usage(rollout: Rollout, targets: Any) -> dict[str, Tensor]:
    """How often each head took part with a choice, as a share of decisions."""
    shares = targets.active.sum((0, 1)) / rollout.valid.sum().clamp(min=1)
    return {f"policy/usage_{head}": shares[index] for index, head in enumerate(rollout.layout.head_names)}


def lstm_health(state: LSTMState | None) -> dict[str, Tensor]:
    """Size of the memory; nothing where there is none. What is not finite stays so, for the checks to see."""
    if state is None or not state[0].numel():
        return {}
    both = torch.cat([part.flatten() for part in state]).double()
    return {"health/lstm_rms": both.square().mean().sqrt(), "health/lstm_max": both.abs().amax()}


def target_moments(rollout: Rollout, targets: Any) -> dict[str, Tensor]:
    """Advantages and returns after normalisation."""
    advantages, chosen = targets.advantages.double(), targets.decision
    count = chosen.sum().clamp(min=1)
    returns, valid = targets.returns.double(), rollout.valid
    mean = torch.where(valid, returns, 0).sum() / valid.sum().clamp(min=1)
    spread = torch.where(valid, (returns - mean).square(), 0).sum() / valid.sum().clamp(min=1)
    return {
        "policy/advantage_min": torch.where(chosen, advantages, 0).amin(),
        "policy/advantage_max": torch.where(chosen, advantages, 0).amax(),
        "policy/advantage_skew": torch.where(chosen, advantages**3, 0).sum() / count,
        "policy/advantage_positive": ((advantages > 0) & chosen).sum() / count,
        "policy/return_scaled_mean": mean,
        "policy/return_scaled_std": spread.sqrt(),
    }


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Most memory held so far, in GB."""
    unit = 1e9 if sys.platform == "darwin" else 1e6  # macOS counts bytes, Linux kilobytes
    found = {"health/memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit}
    if device.type == "cuda":
        found["health/device_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return found


@dataclass(frozen=True)
class RatioDiagnostic:
    """Ratios of new to old probability that lie outside bounds; the list is cut off, the counts are not."""

    reduce_max: float
    smallest: float
    above: int
    below: int
    not_finite: int
    listed: list[dict[str, Any]]

    @classmethod
    def of(cls, log_prob: Tensor, rollout: Rollout, active: Tensor, *, low: float, high: float) -> "RatioDiagnostic":
        """`log_prob`, `active` [envs, steps, heads]; only heads that took part with a choice are looked at."""
        ratio = torch.where(active, (log_prob - rollout.log_prob).double().exp(), 1.0)
        finite = ratio.isfinite()
        above, below = finite & (ratio > high), finite & (ratio < low)
        seen = torch.where(finite, ratio, 1.0)
        offending = (above | below | ~finite).nonzero()[:MOST_LISTED].tolist()
        names, options = rollout.layout.head_names, list(rollout.layout.options.values())
        listed = [
            {
                "episode": env,
                "step": step,
                "head": names[head],
                "option": options[head][int(rollout.action[env, step, head])],
                "ratio": ratio[env, step, head].item() if finite[env, step, head] else None,
            }
            for env, step, head in offending
        ]
        return cls(
            seen.amax().item(), seen.amin().item(), int(above.sum()), int(below.sum()), int((~finite).sum()), listed
        )
