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
        skip_forced: whether steps without a choice (no head had two legal options) are left out: of the critic's loss,
            of the return statistics, and of every mean over all steps (`joint` weighting). Advantages pass over them:
            their rewards belong to the decision before, and lambda counts decisions instead of steps
        baseline: what returns are compared with: the `critic` alone, or also the other episodes of the task in the
            round, `leave_one_out` (see `esper/ppo/baseline.py`); the critic then predicts differences from their mean
        advantage_shrinkage: for `leave_one_out`, weight of earlier rounds in the variance that advantages are scaled by
        head_weighting: a head's loss is its mean over the steps where it is `active`, or `joint`: over all valid steps
        value_target: what the critic predicts: the return of the whole `episode`, or of the `rest` of the episode; None
            is `episode` if gamma is 1, else `rest`. The reward collected so far is known and subtracted from `episode`;
            a critic of the rest has to learn to subtract it, and its errors are noise in every advantage
        critic: whether the critic is `shared`, an output of the policy, or a `separate` network with its own optimizer,
            which also gets the descriptors of the task and is not needed for acting
        critic_hidden: width of a separate critic
        critic_lr: learning rate of a separate critic, constant
        critic_epochs: passes of a separate critic over a round, whatever the KL is
        critic_warmup: first rounds of a run in which only a separate critic learns; useful with `start`
        cloning_rounds: for `start=plans`, rounds of episodes that are cloned before the first round of PPO
        cloning_passes: passes over these episodes
        cloning_lr: learning rate of these passes
        cloning_trials: plans that they try in turn until one wins; 0 demonstrates the best plans of each task as
            they are
        cloning_together: try the blueprints of these plans at the same time, each in a slot of its own
        cloning_patience: steps after that of its last seed, before the seeds of a trial are pruned
        value_coef: weight of the loss of a shared critic
        value_loss: kind of the critic's loss: `clipped`, `huber` or `squared`
        value_bound: clip range of `clipped`, or where `huber` becomes linear; in standard deviations of returns
        entropy, entropy_final, entropy_rounds: weight of the entropy bonus (mean over heads of normalised entropy), its
            final value, and the rounds of the linear schedule between them
        entropy_weights: weight of each head in that mean, 1 for heads not named; None is 1 for all
        entropy_weighting: a head's entropy is its mean over the steps where it is `available`; or `joint`: the sum over
            the steps where it is active, divided by all steps, as its loss with `head_weighting: joint`
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
    skip_forced: bool
    baseline: Literal["critic", "leave_one_out"]
    advantage_shrinkage: float
    head_weighting: Literal["active", "joint"]
    value_target: Literal["episode", "rest"] | None
    critic: Literal["shared", "separate"]
    critic_hidden: int
    critic_lr: float
    critic_epochs: int
    critic_warmup: int
    cloning_rounds: int
    cloning_passes: int
    cloning_lr: float
    cloning_trials: int
    cloning_together: bool
    cloning_patience: int
    value_coef: float
    value_loss: Literal["clipped", "huber", "squared"]
    value_bound: float
    entropy: float
    entropy_final: float | None
    entropy_rounds: int
    entropy_weighting: Literal["available", "joint"]
    grad_clip: float
    advantage_min_std: float
    return_momentum: float | None
    entropy_weights: dict[str, float] | None

    def __post_init__(self) -> None:
        positive = (
            "epochs",
            "minibatches",
            "accumulate",
            "lr_rounds",
            "entropy_rounds",
            "critic_hidden",
            "critic_epochs",
            "cloning_rounds",
            "cloning_passes",
            "cloning_patience",
        )
        for key in positive:
            if getattr(self, key) < 1:
                raise ValueError(f"ppo.{key}={getattr(self, key)}: must be at least 1.")
        for key in ("lr", "clip", "value_bound", "grad_clip", "advantage_min_std", "critic_lr", "cloning_lr"):
            if getattr(self, key) <= 0:
                raise ValueError(f"ppo.{key}={getattr(self, key)}: must be above 0.")
        rates = (
            "weight_decay",
            "value_coef",
            "entropy",
            "lr_final",
            "entropy_final",
            "critic_warmup",
            "cloning_trials",
        )
        for key in rates:
            if (getattr(self, key) or 0) < 0:
                raise ValueError(f"ppo.{key}={getattr(self, key)}: must be at least 0.")
        for key in ("gamma", "lam"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"ppo.{key}={getattr(self, key)}: must be between 0 and 1.")
        if self.target_kl is not None and self.target_kl <= 0:
            raise ValueError(f"ppo.target_kl={self.target_kl}: must be above 0, or null for no limit.")
        if not 0 <= self.advantage_shrinkage < 1:
            raise ValueError(f"ppo.advantage_shrinkage={self.advantage_shrinkage}: must be at least 0 and below 1.")
        if self.critic_warmup and self.critic == "shared":
            raise ValueError(f"ppo.critic_warmup={self.critic_warmup}: must be 0 unless ppo.critic is separate.")
        if self.value_target == "episode" and self.gamma != 1:
            raise ValueError(f"ppo.value_target=episode: must be rest if gamma={self.gamma} is not 1.")

        if self.baseline == "leave_one_out" and not self.predicts_episode_return:
            raise ValueError(
                "ppo.baseline=leave_one_out: must be critic unless the critic predicts the return of whole episodes "
                f"(gamma={self.gamma}, ppo.value_target={self.value_target})."
            )

    @property
    def predicts_episode_return(self) -> bool:
        """Whether the critic predicts the return of whole episodes."""
        return self.gamma == 1 if self.value_target is None else self.value_target == "episode"
