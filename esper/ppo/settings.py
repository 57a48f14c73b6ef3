"""PPO's settings."""

from dataclasses import dataclass
from typing import get_type_hints

VALUE_LOSSES = ("clipped", "huber", "squared")
WEIGHTINGS = ("active", "joint")
VALUE_TARGETS = ("episode", "rest", None)


@dataclass(frozen=True)
class PPOSettings:
    """Everything PPO can be told; no schedule depends on how long a run will be.

    Arguments:
        gamma, lam: discount, and the decay of advantage estimation
        lr, lr_final, lr_rounds: learning rate, and what it goes to in a straight line over so many rounds (None: stays)
        weight_decay: of the critic alone; heads that are rarely used would decay more than they learn
        epochs: passes over a round, at most
        minibatches: optimizer steps in a pass, each of whole episodes
        accumulate: pieces in which the episodes of a minibatch are worked off, to save memory; changes no result
        clip: how far a head's ratio may go from 1 before it stops paying
        target_kl: a pass ends the update before its step once the KL exceeds 1.5 times this; None never
        head_weighting: a head's loss is its mean over the steps where it is `active`, or `joint` over all valid steps
        foretells: what the critic learns, the return of the whole `episode` or of its `rest`; None is the episode where
            nothing is discounted. What an episode has been paid so far is known, and taken off; a critic of the rest
            would have to take it off by itself, and its errors would be noise in every advantage
        value_coef, value_loss, value_bound: weight of the critic's loss, its kind and its bound in units of the return
            scale: the clip range of `clipped`, where `huber` turns straight
        entropy, entropy_final, entropy_rounds: weight of the bonus for the mean over heads of normalised entropy, and
            its way
        entropy_weights: how much each head counts in that mean, 1 where not named; None is all alike
        grad_clip: norm of the gradient of all parameters together, at most
        advantage_least: least standard deviation by which advantages are divided
        return_momentum: weight of the newest returns in the return scale; None weighs all alike
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
    head_weighting: str
    value_target: str | None
    value_coef: float
    value_loss: str
    value_bound: float
    entropy: float
    entropy_final: float | None
    entropy_rounds: int
    grad_clip: float
    advantage_min_std: float
    return_momentum: float | None
    entropy_weights: dict[str, float] | None

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if kind in (float, float | None) and not isinstance(value, int | kind):
                raise ValueError(f"ppo.{name}={value}: must be a number.")
        if not isinstance(self.entropy_weights, dict | None):
            raise ValueError(f"ppo.entropy_weights={self.entropy_weights}: must be numbers by head, or null.")
        for key in ("epochs", "minibatches", "accumulate", "lr_rounds", "entropy_rounds"):
            value = getattr(self, key)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"ppo.{key}={value}: must be a whole number of at least 1.")
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
        for key, allowed in (
            ("value_loss", VALUE_LOSSES),
            ("head_weighting", WEIGHTINGS),
            ("value_target", VALUE_TARGETS),
        ):
            if getattr(self, key) not in allowed:
                words = ", ".join("null" if value is None else value for value in allowed)
                raise ValueError(f"ppo.{key}={getattr(self, key)}: must be one of {words}.")
        if self.value_target == "episode" and self.gamma != 1:
            raise ValueError(
                f"ppo.value_target=episode: must be rest where gamma={self.gamma} discounts what is to come."
            )

    @property
    def predicts_episode_return(self) -> bool:
        """Whether the critic foretells the return of whole episodes."""
        return self.gamma == 1 if self.value_target is None else self.value_target == "episode"
