"""Settings of PPO."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PPOSettings:
    """All settings of PPO. No schedule depends on the length of the run, so a longer run begins with the same rounds.

    Arguments:
        gamma, lam: discount factor, and lambda of generalised advantage estimation
        lr, lr_final, lr_rounds: learning rate, its final value, and the rounds of the linear schedule between them; a
            final value of None keeps it constant
        weight_decay: of the critic only; heads that are rarely used would decay more than they learn
        epochs: maximum number of passes over a round
        minibatches: optimizer steps per pass; each minibatch has whole episodes
        accumulate: chunks into which a minibatch is split to save memory; the result does not change
        clip: maximum distance of a head's ratio from 1; beyond it the surrogate has no gradient
        target_kl: an update ends, before the next optimizer step, when the KL exceeds 1.5 times this; None is no limit
        head_weighting: a head's loss is its mean over the steps where it is `active`, or `joint`: over all valid steps
        value_target: what the critic predicts: the return of the whole `episode`, or of the `rest` of the episode; None
            is `episode` if gamma is 1, else `rest`. The reward collected so far is known and subtracted from `episode`;
            a critic of the rest has to learn to subtract it, and its errors are noise in every advantage
        value_coef, value_loss: weight of the critic's loss, and its kind: `clipped`, `huber` or `squared`
        value_bound: clip range of `clipped`, or where `huber` becomes linear; in standard deviations of returns
        entropy, entropy_final, entropy_rounds: weight of the entropy bonus (mean over heads of normalised entropy), its
            final value, and the rounds of the linear schedule between them
        entropy_weights: weight of each head in that mean, 1 for heads not named; None is 1 for all
        grad_clip: maximum gradient norm of all parameters together
        advantage_min_std: minimum standard deviation by which advantages are divided
        return_momentum: weight of the newest round in the running return statistics; None weighs all rounds equally
    """

    gamma: float
    lam: float
    lr: float
    lr_final: float | None
    lr_rounds: int
    weight_decay: float
    epochs: int
    minibatches: int
    accumulate: int
    clip: float
    target_kl: float | None
    head_weighting: Literal["active", "joint"]
    value_target: Literal["episode", "rest"] | None
    value_coef: float
    value_loss: Literal["clipped", "huber", "squared"]
    value_bound: float
    entropy: float
    entropy_final: float | None
    entropy_rounds: int
    grad_clip: float
    advantage_min_std: float
    return_momentum: float | None
    entropy_weights: dict[str, float] | None

    def __post_init__(self) -> None:
        for key in ("epochs", "minibatches", "accumulate", "lr_rounds", "entropy_rounds"):
            if getattr(self, key) < 1:
                raise ValueError(f"ppo.{key}={getattr(self, key)}: must be at least 1.")
        for key in ("lr", "clip", "value_bound", "grad_clip", "advantage_min_std"):
            if getattr(self, key) <= 0:
                raise ValueError(f"ppo.{key}={getattr(self, key)}: must be above 0.")
        for key in ("weight_decay", "value_coef", "entropy", "lr_final", "entropy_final"):
            if (getattr(self, key) or 0) < 0:
                raise ValueError(f"ppo.{key}={getattr(self, key)}: must be at least 0.")
        for key in ("gamma", "lam"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"ppo.{key}={getattr(self, key)}: must be between 0 and 1.")
        if self.target_kl is not None and self.target_kl <= 0:
            raise ValueError(f"ppo.target_kl={self.target_kl}: must be above 0, or null for no limit.")
        if self.value_target == "episode" and self.gamma != 1:
            raise ValueError(f"ppo.value_target=episode: must be rest if gamma={self.gamma} is not 1.")

    @property
    def predicts_episode_return(self) -> bool:
        """Whether the critic predicts the return of whole episodes."""
        return self.gamma == 1 if self.value_target is None else self.value_target == "episode"
