"""Grow a LightningModule while a Trainer fits it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from esper.grow.additions import CHECKPOINT_KEY, describe_additions, seeds_of
from esper.grow.averages import align_copies, grow_copies, restart_copies
from esper.grow.checkpoint import CheckpointHooks
from esper.grow.discovery import SlotTable, find_slots
from esper.grow.fit import DataPass, data_pass, fit_length, refuse_fit
from esper.grow.grower import Grower
from esper.grow.observe import StepMeasurements
from esper.grow.ranks import any_rank, from_first_rank, mean_over_ranks, wrap_again
from esper.grow.report import log_events, log_scalars, show_growth
from esper.grow.results import LoggedNames, RunningLoss
from esper.grow.validation import ValidationProbe, batch_samples, outside_of_inference_mode, run_training_step
from esper.growth import detach_slots, find_hooked_slots

STATE_VERSION = 1  # of the callback's entry in a checkpoint


class Grow(Callback):
    """Grows the network of a LightningModule: after each validation, a controller takes one decision.

    The network does not change until a seed grows. Checkpoints hold what has grown; a fit with `ckpt_path` goes on with
    it, and with the slots that it had.

    Arguments:
        slots, exclude, blueprints, causal: where and what may grow, see `esper.slots`
        controller, settings: what decides, see `esper.Grower`
        monitor: name of the logged score that the training is for, such as val_acc; None is the validation loss
        mode: whether a higher score is better, max, or a lower one, min; None is min for names of losses and errors
        score_scale: points of a score of 1, such as 100 for an accuracy from 0 to 1
        val_loss: name of the logged validation loss; None is the first of the usual names
        max_parameters: largest network, in multiples of the present one; None is no limit
        until: share of the training after which nothing new is planted
        budget_flops: FLOPs of the training, after which the fit stops; None is no limit
        seed_lr: learning rate of a seed, relative to that of the layers at its slot
        chance_loss: validation loss at chance level; None is that of the number of outputs
        measure: share of the validation batches that are run again with each live seed switched off; 0 is none
        measure_share: largest share of the training's FLOPs for that; what would cost more is left out
        guard: whether a non-finite loss removes the newest seed and restores the last good state
        summary: whether a table is printed, and a picture saved in the log directory, at the end
        rng_seed: of the weights of seeds and of the controller's random draws
    """

    def __init__(
        self,
        slots: str | Sequence[str] = "auto",
        *,
        controller: object = "pretrained",
        settings: Mapping[str, Any] | None = None,
        blueprints: Sequence[str] | None = None,
        exclude: str | Sequence[str] = (),
        causal: bool = False,
        monitor: str | None = None,
        mode: Literal["max", "min"] | None = None,
        score_scale: float = 100.0,
        val_loss: str | None = None,
        max_parameters: float | None = None,
        until: float = 1.0,
        budget_flops: float | None = None,
        seed_lr: float = 1.0,
        chance_loss: float | None = None,
        measure: float = 0.25,
        measure_share: float = 0.1,
        guard: bool = True,
        summary: bool = True,
        rng_seed: int = 0,
    ) -> None:
        if not 0 <= measure <= 1:
            raise ValueError(f"measure={measure}: must be from 0 to 1.")
        self._where: dict[str, Any] = {"slots": slots, "exclude": exclude, "blueprints": blueprints, "causal": causal}
        self._names = LoggedNames(val_loss, monitor, mode)
        self._growth: dict[str, Any] = {
            "controller": controller,
            "settings": settings,
            "seed_lr": seed_lr,
            "max_parameters": max_parameters,
            "until": until,
            "budget_flops": budget_flops,
            "mode": self._names.mode,
            "score_scale": score_scale,
            "chance_loss": chance_loss,
            "measure_share": measure_share,
            "guard": guard,
            "rng_seed": rng_seed,
        }
        self._budget, self._summary = budget_flops, summary
        self._probe, self._train_loss = ValidationProbe(measure), RunningLoss()
        self._base_parameters = 0
        self._data: DataPass | None = None
        self._checkpoint: CheckpointHooks | None = None
        self._saved: Mapping[str, Any] | None = None  # state to go on with
        self._grower: Grower | None = None

    @property
    def grower(self) -> Grower:
        """What grows the network; it exists from the first batch of a fit on."""
        if self._grower is None:
            raise ValueError("grower: exists from the first batch of a fit on.")
        return self._grower

    @property
    def history(self) -> list[dict[str, Any]]:
        """A record for each validation: results, the decision, and events in words."""
        return [] if self._grower is None else self._grower.history

    def explain(self) -> list[dict[str, Any]]:
        """For each decision, the probabilities of its options and the features that differ most from the training."""
        return [] if self._grower is None else self._grower.explain()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            refuse_fit(trainer, pl_module, self._budget)
            self._grower, self._saved, self._data = None, None, None
            self._train_loss = RunningLoss()
        self._checkpoint = CheckpointHooks(trainer, pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict and self._checkpoint is not None and self._checkpoint.is_fit:
            if state_dict["version"] != STATE_VERSION:
                raise ValueError(
                    f"ckpt_path: has version {state_dict['version']} of esper.Grow; this esper reads {STATE_VERSION}."
                )
            self._saved = state_dict
            self._checkpoint.take_seeds()

    def state_dict(self) -> dict[str, Any]:
        if self._grower is None or self._data is None:
            return {}
        return {
            "version": STATE_VERSION,
            "grower": self._grower.state_dict(),
            "table": self._grower.table.to_dict(),
            "data": {"batches": self._data.batches, "interval": self._data.interval},
            "train_loss": self._train_loss.state_dict(),
            "parameters": self._base_parameters,
        }

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._saved is None:
            if seeds_of(pl_module):
                raise ValueError("model: has seeds of another fit; use esper.merge, or go on with ckpt_path=.")
            detach_slots(pl_module)  # of a fit that was interrupted
            return
        assert self._checkpoint is not None
        saved = self._saved
        self._data = DataPass(**saved["data"])
        self._build(trainer, pl_module, SlotTable.from_dict(saved["table"]))
        self.grower.load_state_dict(saved["grower"])
        pl_module.load_state_dict(self._checkpoint.taken, strict=False)
        self._train_loss.load_state_dict(saved["train_loss"])
        self._base_parameters = saved["parameters"]
        self._follow_structure(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._grower is None:
            table = find_slots(
                pl_module, batch, **self._where, run=lambda _, example: run_training_step(trainer, pl_module, example)
            )
            self._data = data_pass(trainer)
            self._base_parameters = sum(parameter.numel() for parameter in pl_module.parameters())
            self._build(trainer, pl_module, table)
            grow_copies(trainer, pl_module)
        for config in trainer.lr_scheduler_configs:
            if not any(config.scheduler is known for known in self.grower.schedulers):  # SWA makes one later
                self.grower.add_scheduler(config.scheduler)
        if batch_idx == 0 or not self._train_loss.count:  # a validation leaves new seeds in evaluation mode
            for slot in find_hooked_slots(pl_module).values():
                slot.train(slot.training)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.grower.note_batch(batch_samples(batch) * trainer.world_size)
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._train_loss.add(loss * trainer.accumulate_grad_batches)
        if self._budget is not None and any_rank(trainer, self.grower.spent_share >= 1):
            trainer.should_stop = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_deciding(trainer):
            align_copies(trainer, pl_module)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._is_deciding(trainer):
            self._probe.note(batch, batch_idx, dataloader_idx, is_kept=bool(self.grower.measured_slots))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_deciding(trainer):
            with outside_of_inference_mode() as was_inference:
                self._decide(trainer, pl_module, was_inference)
        self._probe.clear()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._grower is None:
            return
        known = len(self.history[-1]["events"]) if self.history else 0
        if self._grower.finish():
            self._follow_structure(trainer, pl_module)
            log_events(self._grower, known, "at the end")
        align_copies(trainer, pl_module)
        if self._summary:
            show_growth(trainer, self._grower, self._base_parameters)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[CHECKPOINT_KEY] = describe_additions(pl_module)  # also after the fit, when its hooks are gone

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    def _release(self) -> None:
        """Leave the module and its optimizers to themselves."""
        if self._checkpoint is not None:
            self._checkpoint.close()
            if self._checkpoint.is_fit and self._grower is not None:
                self._grower.close()
        self._checkpoint = None

    def _is_deciding(self, trainer: Trainer) -> bool:
        """Whether this validation leads to a decision."""
        is_fit = trainer.state.fn == "fit" and not trainer.sanity_checking
        return is_fit and self._grower is not None and not self._grower.has_finished

    def _build(self, trainer: Trainer, module: LightningModule, table: SlotTable) -> None:
        assert self._data is not None
        trace, budget = table.trace, None
        if self._budget is not None:
            budget = self._budget / max(1.0, (trace.forward + trace.backward) * trace.batch * trainer.world_size)
        length = fit_length(trainer, self._data, budget)
        self._grower = Grower(
            module,
            trainer.optimizers,
            schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
            example=table,
            steps=length.validations,
            passes=length.passes,
            **self._growth,
        )
        self._grower.note_batch(0)  # batches are counted here, not by the steps of the optimizer

    def _decide(self, trainer: Trainer, module: LightningModule, was_inference: bool) -> None:
        """Take a decision from what the validation has logged; every process does the same."""
        grower, names = self.grower, self._names.resolve(trainer.callback_metrics)
        logged = [float(trainer.callback_metrics[names.loss]), self._train_loss.mean()]
        if names.score is not None:
            logged.append(float(trainer.callback_metrics[names.score]))
        val_loss, train_loss, *score = mean_over_ranks(trainer, logged)
        grower.note_evaluation(self._probe.samples * trainer.world_size)

        def evaluate() -> float | tuple[float, float]:
            with torch.inference_mode(was_inference):
                return self._probe.measure(trainer, module, names)

        measured = grower.measure(
            val_loss=val_loss,
            train_loss=train_loss,
            score=score[0] if score else None,
            evaluate=evaluate if self._probe.is_used and grower.can_measure else None,
        )
        measured = StepMeasurements.from_dict(from_first_rank(trainer, measured.to_dict()))
        change, action = grower.choose(measured)
        if action is not None:
            change += grower.apply(from_first_rank(trainer, action))
        if change:
            self._follow_structure(trainer, module)
        if measured.rolled_back is not None:
            restart_copies(trainer, module)
        self._train_loss = RunningLoss()
        log_events(grower, 0, f"after validation {len(grower.history)}")
        log_scalars(trainer, grower)

    def _follow_structure(self, trainer: Trainer, module: LightningModule) -> None:
        """Bring everything up to date that knows the parameters of the network."""
        wrap_again(trainer)
        grow_copies(trainer, module)
