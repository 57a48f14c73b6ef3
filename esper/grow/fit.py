"""What a Trainer is going to do: how many validations a fit has, and fits that cannot grow."""

import math
from dataclasses import dataclass

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature


@dataclass(frozen=True)
class DataPass:
    """A pass over the training data, which a Trainer knows once it has the data."""

    batches: float  # inf is not known
    interval: float  # batches between validations; inf is one validation after each pass


@dataclass(frozen=True)
class FitLength:
    """How long a fit is."""

    validations: int
    passes: float | None  # over the training set; None is not known


def refuse_fit(trainer: Trainer, module: LightningModule, budget: float | None) -> None:
    """Refuse what cannot grow, before the training starts."""
    strategy = trainer.strategy
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or isinstance(strategy, DeepSpeedStrategy):
        raise ValueError(
            f"strategy={type(strategy).__name__}: must be a single device or ddp, because sharded parameters cannot be "
            "added to."
        )
    if not module.automatic_optimization:
        raise ValueError("automatic_optimization=False: must be True; for manual optimisation, use esper.Grower.")
    for step in (module.training_step, module.validation_step):
        if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise ValueError(
                f"{step.__name__}: must take a batch, not dataloader_iter, so that a batch can be run again."
            )
    if not trainer.enable_validation:
        raise ValueError(
            "validation: must be there, because growth is decided after each; give the Trainer a validation_step, "
            "validation data and limit_val_batches above 0."
        )
    if budget is None and trainer.max_epochs == -1 and trainer.max_steps == -1:
        raise ValueError("max_epochs=-1: must be positive; or set max_steps or Grow(budget_flops=...).")


def data_pass(trainer: Trainer) -> DataPass:
    """The passes of a Trainer that has its data."""
    interval = trainer.val_check_batch
    if interval is None:
        raise ValueError(
            "val_check_interval: must be a number of batches or a share of the training data, not a time, because the "
            "number of validations must be known."
        )
    return DataPass(float(trainer.num_training_batches), float(interval))


def fit_length(trainer: Trainer, data: DataPass, budget_batches: float | None) -> FitLength:
    """How long a fit is, from the limits of its Trainer, and the batches that its budget pays for."""
    batches = _total_batches(trainer, data)
    if budget_batches is not None:
        batches = min(batches, math.ceil(budget_batches))
    validations = _validations(trainer, data, batches)
    if not math.isfinite(validations):
        raise ValueError(
            f"max_steps={trainer.max_steps}: must be set where the training data has no length, so that the number of "
            "validations is known."
        )
    passes = batches / data.batches
    last = budget_batches is not None  # a fit that is stopped validates once more
    return FitLength(max(1, int(validations) + last), passes if math.isfinite(passes) and passes > 0 else None)


def _validations(trainer: Trainer, data: DataPass, batches: float) -> float:
    """Validations in a number of batches; inf is not known."""
    every = trainer.check_val_every_n_epoch
    if every is None:
        return batches // data.interval
    if math.isinf(data.batches):
        is_by_batches = not math.isinf(data.interval)
        return batches // data.interval if is_by_batches else float(_max_epochs(trainer) // every)
    if math.isinf(batches):
        return math.inf
    whole, rest = divmod(batches, data.batches)
    is_last_validated = (whole + 1) % every == 0
    return whole // every * (data.batches // data.interval) + (rest // data.interval if is_last_validated else 0)


def _max_epochs(trainer: Trainer) -> float:
    return math.inf if trainer.max_epochs in (None, -1) else float(trainer.max_epochs)


def _total_batches(trainer: Trainer, data: DataPass) -> float:
    """Batches of the fit; inf is not known."""
    epochs = _max_epochs(trainer)
    total = epochs * data.batches if epochs else 0.0
    if trainer.max_steps == -1:
        return total
    if math.isinf(data.batches):
        return min(total, trainer.max_steps * float(trainer.accumulate_grad_batches))
    steps = math.ceil(data.batches / trainer.accumulate_grad_batches)  # Lightning steps after the last batch too
    whole, rest = divmod(trainer.max_steps, steps)
    return min(total, whole * data.batches + rest * trainer.accumulate_grad_batches)
