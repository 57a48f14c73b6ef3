"""Detectors of seeds whose contribution is not backed by a better score. Each returns bool [envs, slots]."""

from collections.abc import Callable

from torch import Tensor

from esper.environment import StepRecord

MIN_DENOMINATOR = 1e-8  # ratios need a larger denominator, so that nothing is divided by zero
HACKING_RATIO = 5.0  # contribution / gain since germination that is suspicious
RANSOM_CONTRIBUTION = 0.1  # points; above, the host depends on the seed
RANSOM_LOSS = -0.2  # points; a lower gain since germination means that the seed made the host worse


def reward_hacking(record: StepRecord) -> Tensor:
    """The contribution is many times the gain of the host since the seed germinated."""
    gain, contribution = record.now.progress, record.now.contribution
    return (gain > MIN_DENOMINATOR) & (contribution / gain.clamp(min=MIN_DENOMINATOR) >= HACKING_RATIO)


def ransomware(record: StepRecord) -> Tensor:
    """Switching the seed off would lower the score, but the host is worse than before the seed germinated."""
    return (record.now.contribution > RANSOM_CONTRIBUTION) & (record.now.progress < RANSOM_LOSS)


DETECTORS: dict[str, Callable[[StepRecord], Tensor]] = {"reward_hacking": reward_hacking, "ransomware": ransomware}
