"""The governor: decides which hosts to roll back to their last good snapshot."""

from enum import IntEnum

import torch
from torch import Tensor


class RollbackReason(IntEnum):
    """Why a host was rolled back."""

    NONE = 0
    NON_FINITE = 1
    COLLAPSED = 2  # it had learned and is back at chance level
    DIVERGING = 3  # its loss is far above its recent mean


class Governor:
    """Checks validation losses against a history of normal losses per environment.

    Arguments:
        envs: number of environments
        chance: loss at chance level, [envs]
        history: normal losses in the history
        min_history: no divergence is detected with fewer losses in the history
        learned_below: a host has learned if its mean loss is below this share of `chance`
        chance_band: a loss is at chance level if its distance to `chance` is below this share of `chance`
        mean_factor, std_factor, chance_factor: a loss diverges if it is above `mean_factor` x the mean, more than
            `std_factor` standard deviations above the mean, and above `chance_factor` x `chance`; all three
        patience: consecutive diverging losses that cause a rollback
        snapshot_every: steps between snapshots of healthy hosts
    """

    def __init__(
        self,
        *,
        envs: int,
        chance: Tensor | float,
        history: int,
        min_history: int,
        learned_below: float,
        chance_band: float,
        mean_factor: float,
        std_factor: float,
        chance_factor: float,
        patience: int,
        snapshot_every: int,
    ) -> None:
        counts = {
            "history": history,
            "min_history": min_history,
            "patience": patience,
            "snapshot_every": snapshot_every,
        }
        for key, value in counts.items():
            if value < 1:
                raise ValueError(f"governor.{key}={value}: must be at least 1.")
        self.snapshot_every = snapshot_every
        self._chance, self._chance_band, self._chance_factor = chance, chance_band, chance_factor
        self._min_history, self._learned_below, self._patience = min_history, learned_below, patience
        self._mean_factor, self._std_factor = mean_factor, std_factor
        self._losses = torch.full((envs, history), torch.nan)
        self._strikes = torch.zeros(envs, dtype=torch.int64)

    def judge(self, loss: Tensor, measured: Tensor | None = None) -> Tensor:
        """The RollbackReason of each environment, int64 [envs], given its latest loss [envs].

        Environments that were not `measured`, bool [envs], are not judged; None is all of them.
        """
        if measured is None:
            measured = torch.ones_like(loss, dtype=torch.bool)
        known = (~self._losses.isnan()).sum(1)
        mean = self._losses.nanmean(1)
        std = (self._losses - mean[:, None]).square().nanmean(1).sqrt()
        at_chance = (loss - self._chance).abs() < self._chance_band * self._chance
        collapsed = measured & (mean < self._learned_below * self._chance) & at_chance
        diverging = measured & (loss > self._chance_factor * self._chance) & (known >= self._min_history)
        diverging &= (loss > mean + self._std_factor * std) & (loss > self._mean_factor * mean)
        strikes = torch.where(diverging, self._strikes + 1, torch.zeros_like(self._strikes))
        self._strikes = torch.where(measured, strikes, self._strikes)
        reason = torch.zeros_like(self._strikes)
        reason[measured & (self._strikes >= self._patience)] = RollbackReason.DIVERGING
        reason[collapsed] = RollbackReason.COLLAPSED
        reason[measured & ~loss.isfinite()] = RollbackReason.NON_FINITE
        self._strikes[reason > 0] = 0
        is_normal = measured & (reason == 0) & ~diverging
        extended = torch.cat([self._losses[:, 1:], loss[:, None]], 1)
        self._losses = torch.where(is_normal[:, None], extended, self._losses)
        return reason

    def reset_history(self, envs: Tensor, loss: Tensor) -> None:
        """Restart the history of some environments, bool [envs], with the loss [envs] of the restored host."""
        self._losses[envs] = torch.nan
        self._losses[envs, -1] = loss[envs]

    def is_healthy(self) -> Tensor:
        """Environments whose latest loss did not diverge, and whose host may be saved: bool [envs]."""
        return self._strikes == 0
