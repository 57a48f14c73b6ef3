"""The callback in an ordinary fit: what it does, what it leaves alone, and what it shows."""

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torchmetrics import SumMetric

import esper
from esper.grow.callback import Grow
from esper.growth import find_hooked_slots
from tests.grow.fixtures_growers import WAIT
from tests.grow.fixtures_lightning import (
    PLANT,
    PRUNE,
    Classifier,
    fit,
    loader,
    make_grow,
    make_module,
    make_trainer,
    same_weights,
)


def test_it_is_exported_by_the_package() -> None:
    assert esper.Grow is Grow


def test_a_callback_that_never_grows_changes_no_weight(tmp_path: Path) -> None:
    """Sanity validation, shuffling and dropout draw the same random numbers."""

    class Undetermined(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            pass

    def train(*callbacks: Any) -> Classifier:
        module, trainer = make_module(Undetermined), make_trainer(tmp_path, *callbacks)
        torch.manual_seed(1)
        trainer.fit(module, loader(shuffle=True), loader(2, seed=7))
        return module

    bare, grown = train(), train(make_grow(WAIT))
    assert same_weights(bare, grown)
    assert bare.validated == grown.validated
    assert not find_hooked_slots(grown)
    assert [name for name, _ in bare.named_modules()] == [name for name, _ in grown.named_modules()]


def test_a_decision_follows_each_validation_but_not_the_sanity_check(tmp_path: Path) -> None:
    grow = make_grow()
    module = fit(make_module(), make_trainer(tmp_path, grow, val_check_interval=2, max_epochs=3), batches=4)
    assert [record["step"] for record in grow.history] == [1, 2, 3, 4, 5, 6]
    assert [record["progress"] for record in grow.history] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    assert grow.history[0]["events"] == ["planted conv_small in net.layer2"]
    (seed,) = grow.grower.summary()
    assert (seed["slot"], seed["stage"], seed["planted"]) == ("net.layer2", "FOSSILIZED", 1)
    assert len(grow.explain()) == 5
    grown = find_hooked_slots(module)["net.layer2"].seed
    assert grown is not None
    assert grown.training
    assert module.net.training
    assert grown.body.branch[-1].weight.abs().sum() > 0  # type: ignore[union-attr,index,operator]


def test_a_new_seed_trains_in_training_mode(tmp_path: Path) -> None:
    modes: list[bool] = []

    class Watching(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            modes.extend(slot.seed.training for slot in find_hooked_slots(self).values() if slot.seed is not None)
            return super().training_step(batch, batch_idx)

    fit(make_module(Watching), make_trainer(tmp_path, make_grow()))
    assert modes
    assert all(modes)


def test_results_are_those_that_the_module_logs(tmp_path: Path) -> None:
    losses: list[float] = []

    class Recording(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.training:  # not while the costs are counted
                losses.append(loss.item())
            return loss

    grow = make_grow()
    trainer = make_trainer(tmp_path, grow, max_epochs=2, accumulate_grad_batches=2)
    fit(make_module(Recording), trainer)
    last = grow.history[-1]
    assert last["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]))
    assert last["score"] == pytest.approx(100 * float(trainer.callback_metrics["val_acc"]))
    assert last["train_loss"] == pytest.approx(sum(losses[3:]) / 3, rel=1e-5)


def test_contributions_are_measured_by_the_validation_step_without_a_trace(tmp_path: Path) -> None:
    """The metrics, the loggers and the numbers that the module logs are those of a fit without it."""

    def train(measure: float, name: str) -> tuple[Grow, Classifier, list[dict[str, str]]]:
        grow, logger = make_grow(measure=measure, measure_share=1.0), CSVLogger(tmp_path, name)
        module = fit(make_module(), make_trainer(tmp_path, grow, logger=logger))
        with open(Path(logger.log_dir) / "metrics.csv") as file:
            rows = [{k: v for k, v in row.items() if not k.startswith("grow/")} for row in csv.DictReader(file)]
        return grow, module, [row for row in rows if any(v for k, v in row.items() if k not in ("epoch", "step"))]

    with_probe, measured, rows = train(1.0, "with")
    without_probe, plain, same_rows = train(0.0, "without")
    assert rows == same_rows
    assert same_weights(measured, plain)
    assert "net.layer2" in with_probe.history[-1]["contribution"]
    assert all(not record["contribution"] for record in without_probe.history)
    assert measured.validated > plain.validated
    assert "log" not in vars(measured)


def test_metrics_and_loggers_that_a_module_uses_itself_see_each_batch_once(tmp_path: Path) -> None:
    class Counting(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.trained, self.seen = SumMetric(), SumMetric()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.trained.update(len(batch[0]))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.seen.update(len(batch[0]))
            assert self.logger is not None
            self.logger.log_metrics({"direct": 1.0})

    grow, logger = make_grow(measure=1.0, measure_share=1.0), CSVLogger(tmp_path)
    module = fit(make_module(Counting), make_trainer(tmp_path, grow, logger=logger, num_sanity_val_steps=0))
    assert grow.history[-1]["contribution"]
    assert module.trained.compute() == 4 * 24  # type: ignore[operator,union-attr]
    assert module.seen.compute() == 4 * 16  # type: ignore[operator,union-attr]
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        assert len([row for row in csv.DictReader(file) if row["direct"]]) == 4 * 2


def test_a_contribution_is_the_difference_that_a_seed_makes(tmp_path: Path) -> None:
    grow = make_grow(measure=1.0, measure_share=1.0)
    module = fit(make_module(lr=0.3), make_trainer(tmp_path, grow, max_epochs=6))
    module.eval()

    def validate() -> tuple[float, float]:
        with torch.no_grad():
            outs = [(module(x), y) for x, y in loader(2, seed=7)]
        losses = [F.cross_entropy(out, y).item() for out, y in outs]
        right = [(out.argmax(-1) == y).float().mean().item() for out, y in outs]
        return sum(losses) / 2, 100 * sum(right) / 2

    loss, score = validate()
    with esper.disabled(module):
        other_loss, other_score = validate()
    measured = grow.grower.state_dict()["plan"]["log"][-1]["measured"]
    assert measured["loss_contribution"]["net.layer2"] == pytest.approx(other_loss - loss, abs=1e-5)
    assert measured["contribution"]["net.layer2"] == pytest.approx(score - other_score, abs=1e-3)
    assert other_loss != loss


def test_contributions_that_cost_too_much_are_left_out(tmp_path: Path) -> None:
    never = make_grow(measure=1.0, measure_share=0.01)
    fit(make_module(), make_trainer(tmp_path, never))
    assert all(not record["contribution"] for record in never.history)
    assert "contribution" in never.grower.state_dict()["plan"]["missing"], "the controller is not to wait for them"
    seldom = make_grow(measure=1.0, measure_share=0.2)
    fit(make_module(), make_trainer(tmp_path, seldom, max_epochs=8))
    measured = [bool(record["contribution"]) for record in seldom.history]
    assert 1 <= sum(measured) < 7
    assert seldom.grower.state_dict()["plan"]["missing"] == []


def test_a_batch_may_be_nested(tmp_path: Path) -> None:
    class Nested(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([batch["inputs"]["x"], batch["y"]], batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step([batch["inputs"]["x"], batch["y"]], batch_idx)

    data = [{"inputs": {"x": x}, "y": y} for x, y in loader(3).dataset]
    grow = make_grow(measure=1.0, measure_share=1.0)
    batches = torch.utils.data.DataLoader(data, batch_size=8)  # type: ignore[arg-type,var-annotated]
    make_trainer(tmp_path, grow).fit(make_module(Nested), batches, batches)
    assert "net.layer2" in grow.history[-1]["contribution"]
    plain = make_grow(WAIT)
    fit(make_module(), make_trainer(tmp_path, plain, max_epochs=1))
    assert grow.history[0]["flops"] == plain.history[0]["flops"]


def test_values_that_are_logged_at_the_end_of_a_validation_are_measured_too(tmp_path: Path) -> None:
    class AtTheEnd(Classifier):
        def on_validation_epoch_start(self) -> None:
            self.losses: list[Tensor] = []

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.losses.append(F.cross_entropy(self(batch[0]), batch[1]))

        def on_validation_epoch_end(self) -> None:
            self.log_dict({"val_loss": torch.stack(self.losses).mean()})

    grow = make_grow(measure=1.0, measure_share=1.0, monitor=None)
    fit(make_module(AtTheEnd), make_trainer(tmp_path, grow))
    assert "net.layer2" in grow.history[-1]["contribution"]


def test_several_validation_loaders_are_measured_by_their_names(tmp_path: Path) -> None:
    class TwoLoaders(Classifier):
        def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
            super().validation_step(batch, batch_idx)

        def val_dataloader(self) -> Any:
            return [loader(2, seed=7), loader(1, seed=8)]

    names = {"monitor": "val_acc/dataloader_idx_1", "val_loss": "val_loss/dataloader_idx_1"}
    grow = make_grow(measure=1.0, measure_share=1.0, **names)
    make_trainer(tmp_path, grow).fit(make_module(TwoLoaders), loader())
    assert "net.layer2" in grow.history[-1]["contribution"]


def test_growth_is_shown_in_a_table_a_picture_loggers_and_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    grow = make_grow(WAIT, PLANT, WAIT, PRUNE, {**PLANT, "slot": "net.layer1"}, summary=True)
    loggers = [TensorBoardLogger(tmp_path, "board"), CSVLogger(tmp_path, "table")]
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):  # runs of esper make it quiet
        fit(make_module(), make_trainer(tmp_path, grow, logger=loggers, max_epochs=7))
    printed = capsys.readouterr().out
    assert [word in printed for word in ("net.layer2", "conv_small", "pruned", "fossilized", "net.layer1")] == [
        True
    ] * 5
    assert "removed" in printed
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("esper:")]
    assert lines == [
        "esper: planted conv_small in net.layer2 after validation 1",
        "esper: removed the seed in net.layer2 after validation 3",
        "esper: planted conv_small in net.layer1 after validation 4",
    ]
    assert (Path(loggers[0].log_dir) / "growth.png").is_file()
    assert "grow/timeline" in EventAccumulator(loggers[0].log_dir).Reload().Tags()["images"]
    with open(Path(loggers[1].log_dir) / "metrics.csv") as file:
        parameters = [float(row["grow/parameters"]) for row in csv.DictReader(file) if row.get("grow/parameters")]
    assert len(parameters) == 7
    assert parameters[1] > parameters[0]


def test_a_fit_in_which_nothing_grows_is_summed_up_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(make_module(), make_trainer(tmp_path, make_grow(WAIT, summary=True)))
    assert capsys.readouterr().out.strip() == "esper: nothing grew"


def test_nothing_is_printed_or_written_without_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(make_module(), make_trainer(tmp_path, make_grow()))
    assert "What grew" not in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.png"))


def test_a_fit_that_stops_early_keeps_what_has_grown(tmp_path: Path) -> None:
    class Stop(Classifier):
        def on_validation_epoch_end(self) -> None:
            self.trainer.should_stop = self.trainer.current_epoch == 2

    grow = make_grow()
    module = fit(make_module(Stop), make_trainer(tmp_path, grow, max_epochs=50))
    assert len(grow.history) == 3
    assert [seed["stage"] for seed in grow.grower.summary()] == ["FOSSILIZED"]
    assert esper.merge(module.net) is not None


def test_a_non_finite_loss_removes_the_seed_and_training_goes_on(tmp_path: Path) -> None:
    class Breaking(Classifier):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.current_epoch == 1 and batch_idx == 2:
                with torch.no_grad():
                    self.net.stem.weight.fill_(torch.nan)

    grow = make_grow()
    with pytest.warns(UserWarning, match="loss is non-finite; the seed in net.layer2 was removed") as warned:
        module = fit(make_module(Breaking), make_trainer(tmp_path, grow))
    assert [str(warning.message).startswith("esper:") for warning in warned].count(True) == 1
    assert grow.history[1]["events"] == ["rolled back net.layer2", "removed the seed in net.layer2"]
    assert all(value.isfinite().all() for value in module.state_dict().values())


def test_a_merged_network_has_the_outputs_of_the_grown_one(tmp_path: Path) -> None:
    module = fit(make_module(lr=0.3), make_trainer(tmp_path, make_grow())).eval()
    merged, (x, _) = esper.merge(module).eval(), next(iter(loader(2, seed=7)))
    assert not find_hooked_slots(merged)
    assert torch.equal(merged(x), module(x))
    with esper.disabled(module):
        assert not torch.equal(merged(x), module(x))


def test_results_that_no_step_logs_are_not_measured_and_said_once(tmp_path: Path) -> None:
    class Elsewhere(Classifier):
        def on_validation_start(self) -> None:
            self.trainer.callback_metrics["quality"] = torch.tensor(0.5)

    grow = make_grow(monitor="quality", measure_share=1.0)
    with pytest.warns(UserWarning, match="validation_step does not log quality") as warned:
        fit(make_module(Elsewhere), make_trainer(tmp_path, grow))
    assert [str(warning.message).startswith("esper:") for warning in warned].count(True) == 1
    assert not grow.history[-1]["contribution"]
