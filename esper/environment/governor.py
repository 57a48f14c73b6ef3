"""Vital signs of the hosts: which of them must be brought back to their last good state."""

from enum import IntEnum

import torch
from torch import Tensor


class RollbackReason(IntEnum):
    """Why a host was rolled back."""

    NONE = 0
    NON_FINITE = 1
    COLLAPSED = 2  # it had learned, and answers at chance
    DIVERGING = 3


class Governor:
    """Judges validation losses, one history for each environment.

    Arguments:
        envs: how many environments
        chance: loss of an even guess
        history: how many sane losses are remembered
        least: fewer are too few to judge divergence by
        learned: a mean loss below this share of `chance` means that the host had learned
        band: a loss this close to `chance`, as a share of it, is one of chance
        factor, sigmas, ceiling: a loss diverges above `factor` x the mean, `sigmas` standard deviations above it, and
            above `ceiling` x chance, all three
        patience: so many diverging losses in a row are too many
        snapshot_every: steps between snapshots of a host in good health
    """

    def __init__(
        self,
        *,
        envs: int,
        chance: float,
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
        self._chance, self._least, self._learned, self._band = chance, min_history, learned_below, chance_band
        self._factor, self._sigmas, self._ceiling, self._patience = mean_factor, std_factor, chance_factor, patience
        self._losses = torch.full((envs, history), torch.nan)
        self._strikes = torch.zeros(envs, dtype=torch.int64)

    def judge(self, loss: Tensor) -> Tensor:
        """The reason to roll each environment back, int64 [envs], given its latest loss [envs]."""
        known = (~self._losses.isnan()).sum(1)
        mean = self._losses.nanmean(1)
        spread = (self._losses - mean[:, None]).square().nanmean(1).sqrt()
        finite = loss.isfinite()
        collapsed = (mean < self._learned * self._chance) & ((loss - self._chance).abs() < self._band * self._chance)
        wild = loss > self._ceiling * self._chance
        wild &= (loss > mean + self._sigmas * spread) & (loss > self._factor * mean) & (known >= self._least)
        self._strikes = torch.where(wild, self._strikes + 1, torch.zeros_like(self._strikes))
        reason = torch.zeros_like(self._strikes)
        reason[self._strikes >= self._patience] = RollbackReason.DIVERGING
        reason[collapsed] = RollbackReason.COLLAPSED
        reason[~finite] = RollbackReason.NON_FINITE
        self._strikes[reason > 0] = 0
        sane = (reason == 0) & ~wild
        rolled = torch.cat([self._losses[:, 1:], loss[:, None]], 1)
        self._losses = torch.where(sane[:, None], rolled, self._losses)
        return reason

    def restored(self, envs: Tensor, loss: Tensor) -> None:
        """Some environments, bool [envs], are back at an older state with this loss [envs]; their past is forgotten."""
        self._losses[envs] = torch.nan
        self._losses[envs, -1] = loss[envs]

    def healthy(self) -> Tensor:
        """Which environments show no sign of trouble, and may be saved: bool [envs]."""
        return self._strikes == 0
