"""Runs a LightningModule's own training and validation steps without effects: nothing reaches loggers or metrics."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from esper.grow.observe import NAN
from esper.grow.ranks import mean_over_ranks
from esper.grow.results import ResultNames
from esper.grow.tracing import input_size


@dataclass
class LoggedValues:
    """Stands in for `LightningModule.log` and keeps what is logged."""

    samples: int = 1  # of the present batch
    suffix: str = ""  # of the names, with several data loaders
    sums: dict[str, Tensor | float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Keep a value; the arguments are those of `LightningModule.log`."""
        name = name + self.suffix if options.get("add_dataloader_idx", True) else name
        if isinstance(value, Metric):
            self.metrics[name] = value
            return
        samples = options.get("batch_size") or self.samples
        number = value.detach().float() if isinstance(value, Tensor) else float(value)
        self.sums[name] = self.sums.get(name, 0.0) + number * samples
        self.counts[name] = self.counts.get(name, 0) + samples

    def has(self, name: str) -> bool:
        """Whether a value was logged."""
        return name in self.metrics or name in self.sums

    def mean(self, name: str) -> float:
        """The mean of a value over all samples; NaN if it was not logged."""
        if name in self.metrics:
            return float(self.metrics[name].compute())
        return float(self.sums[name]) / self.counts[name] if name in self.sums else NAN


@contextmanager
def intercept_logging(trainer: Trainer, module: LightningModule) -> Iterator[LoggedValues]:
    """Context in which nothing that a module logs or counts has an effect."""
    values, loggers = LoggedValues(), trainer.loggers
    log = torch.compiler.disable(values.log)  # type: ignore[no-untyped-call]
    places = [
        (parent, name, child)
        for parent in module.modules()
        if not isinstance(parent, Metric | MetricCollection)
        for name, child in parent.named_children()
        if isinstance(child, Metric | MetricCollection)
    ]
    module.log = log  # type: ignore[method-assign]
    trainer.loggers = [DummyLogger() for _ in loggers]
    for parent, name, child in places:
        fresh = child.clone()
        fresh.reset()
        setattr(parent, name, fresh)
    try:
        yield values
    finally:
        del module.log
        trainer.loggers = loggers
        for parent, name, child in places:
            setattr(parent, name, child)


def run_training_step(trainer: Trainer, module: LightningModule, batch: Any) -> Mapping[str, Any]:
    """The loss of a batch, and the last output of a module with a row for each sample, from which it follows."""
    outputs: list[Tensor] = []

    def keep(part: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim > 1:
            outputs[:] = [output]

    handles = [part.register_forward_hook(keep) for part in module.modules()]
    try:
        with intercept_logging(trainer, module), trainer.precision_plugin.train_step_context():
            result = module.training_step(*_arguments(module.training_step, batch, 0))
    finally:
        for handle in handles:
            handle.remove()
    loss = result.get("loss") if isinstance(result, Mapping) else result
    return {"loss": loss, "logits": outputs[-1] if outputs else None}


@dataclass(frozen=True)
class KeptBatch:
    """A validation batch on its device."""

    batch: Any
    index: int
    loader: int
    samples: int


class ValidationProbe:
    """Measures a network on some of its validation batches.

    Arguments:
        share: of the batches that are kept; 0 keeps none
    """

    def __init__(self, share: float) -> None:
        self._stride = round(1 / share) if share > 0 else 0
        self._kept: list[KeptBatch] = []
        self.samples = 0  # of the batches whose turn it was
        self._is_warned = False

    @property
    def is_used(self) -> bool:
        """Whether batches are run again at all."""
        return self._stride > 0

    def note(self, batch: Any, index: int, loader: int, *, is_kept: bool) -> None:
        """Count the samples of a batch if it is its turn, and keep it."""
        if self._stride and index % self._stride == 0:
            samples = batch_samples(batch)
            self.samples += samples
            if is_kept:
                self._kept.append(KeptBatch(batch, index, loader, samples))

    def clear(self) -> None:
        """Forget the batches."""
        self._kept.clear()
        self.samples = 0

    def measure(self, trainer: Trainer, module: LightningModule, names: ResultNames) -> float | tuple[float, float]:
        """The loss, or that and the score, that the validation logs for the kept batches; of all processes."""
        several = isinstance(trainer.num_val_batches, list) and len(trainer.num_val_batches) > 1
        module.eval()
        with intercept_logging(trainer, module) as values, torch.no_grad():
            module.on_validation_epoch_start()
            for kept in self._kept:
                values.samples = kept.samples
                values.suffix = f"/dataloader_idx_{kept.loader}" if several else ""
                arguments = _arguments(module.validation_step, kept.batch, kept.index)
                trainer.strategy.validation_step(*arguments, *([kept.loader] if several else []))
            values.suffix = ""
            module.on_validation_epoch_end()
            wanted = [names.loss] if names.score is None else [names.loss, names.score]
            found = [values.mean(name) for name in wanted]
        unlogged = [name for name in wanted if not values.has(name)]
        if unlogged and not self._is_warned:
            rank_zero_warn(f"esper: contributions are not measured: validation_step does not log {unlogged[0]}.")
            self._is_warned = True
        means = mean_over_ranks(trainer, found)
        return means[0] if names.score is None else (means[0], means[1])


def batch_samples(batch: Any) -> int:
    """Number of samples of a batch; 1 if it cannot be known."""
    try:
        return input_size(batch)[1]
    except ValueError:
        return 1


@contextmanager
def outside_of_inference_mode() -> Iterator[bool]:
    """Context in which new parameters can be trained; yields whether inference mode was on."""
    was_on = torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if was_on else nullcontext():
        yield was_on


def _arguments(step: Any, batch: Any, index: int) -> list[Any]:
    has_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    return [batch, index] if has_index else [batch]
