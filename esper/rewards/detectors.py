"""Signs that a seed earns credit without earning its place: bool [envs, slots]."""

from collections.abc import Callable

from torch import Tensor

from esper.environment import StepRecord

SMALLEST = 1e-8  # a ratio is formed only above this, so that nothing is divided by zero
HACKING_RATIO = 5.0  # contribution this many times the score gained since germination
RANSOM_CONTRIBUTION = 0.1  # points: the host has come to depend on the seed
RANSOM_LOSS = -0.2  # points: and yet it is worse off than before it


def reward_hacking(record: StepRecord) -> Tensor:
    """A seed seems to contribute many times what the host has gained since it came."""
    gained, contribution = record.now.progress, record.now.contribution
    return (gained > SMALLEST) & (contribution / gained.clamp(min=SMALLEST) >= HACKING_RATIO)


def ransomware(record: StepRecord) -> Tensor:
    """Switching the seed off would hurt, but the host is worse than before it had the seed."""
    return (record.now.contribution > RANSOM_CONTRIBUTION) & (record.now.progress < RANSOM_LOSS)


DETECTORS: dict[str, Callable[[StepRecord], Tensor]] = {"reward_hacking": reward_hacking, "ransomware": ransomware}
