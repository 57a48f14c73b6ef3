"""How long a fit is, and which fits are refused."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import esper
from esper.grow.callback import Grow
from esper.grow.fit import refuse_fit
from esper.growth import find_hooked_slots
from tests.grow.fixtures_growers import WAIT
from tests.grow.fixtures_lightning import (
    PLANT,
    Classifier,
    fit,
    loader,
    make_grow,
    make_module,
    make_trainer,
)
from tests.grow.fixtures_networks import ResNet, images


class Stream(IterableDataset[Any]):
    """Training data without a length."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.batches):
            yield images(seed=index)


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 3},
        {"max_epochs": 5, "check_val_every_n_epoch": 2},
        {"max_epochs": 3, "val_check_interval": 0.5},
        {"max_epochs": 3, "val_check_interval": 3},
        {"max_epochs": -1, "max_steps": 14},
        {"max_epochs": 3, "max_steps": 7, "val_check_interval": 2},
        {"max_epochs": 3, "val_check_interval": 5, "check_val_every_n_epoch": None},
        {"max_epochs": 3, "max_steps": 5, "accumulate_grad_batches": 2},
        {"max_epochs": 3, "accumulate_grad_batches": 3},
        {"max_epochs": 3, "limit_train_batches": 2},
    ],
)
def test_the_number_of_validations_is_known_in_advance(tmp_path: Path, options: dict[str, Any]) -> None:
    grow = make_grow(WAIT)
    fit(make_module(), make_trainer(tmp_path, grow, **options), batches=4)
    assert grow.history[-1]["progress"] == 1
    assert grow.grower.has_finished
    assert len(grow.explain()) == len(grow.history) - 1, "nothing is decided after the last"


def test_data_without_a_length_needs_a_number_of_steps(tmp_path: Path) -> None:
    stream = DataLoader(Stream(20), batch_size=None)
    options: dict[str, Any] = {"val_check_interval": 3, "check_val_every_n_epoch": None}
    grow = make_grow(WAIT)
    make_trainer(tmp_path, grow, max_steps=9, max_epochs=-1, **options).fit(make_module(), stream, loader(1))
    assert [record["progress"] for record in grow.history] == pytest.approx([1 / 3, 2 / 3, 1])
    with pytest.raises(ValueError, match="max_steps=-1: must be set where the training data has no length"):
        make_trainer(tmp_path, make_grow(), max_epochs=2, **options).fit(make_module(), stream, loader(1))
    by_epochs = make_grow(WAIT)
    make_trainer(tmp_path, by_epochs, max_epochs=2).fit(make_module(), stream, loader(1))
    assert [record["progress"] for record in by_epochs.history] == pytest.approx([0.5, 1])


def test_a_fit_stops_when_its_budget_is_spent(tmp_path: Path) -> None:
    trace = esper.slots(ResNet(), images()).trace
    batch = 8 * (trace.forward + trace.backward)
    grow = make_grow(budget_flops=10 * batch, measure=0)
    trainer = make_trainer(tmp_path, grow, max_epochs=-1)
    fit(make_module(), trainer)
    assert trainer.global_step == 10  # seeds cost a few per mille
    assert grow.grower.spent_share == 1
    assert [record["progress"] for record in grow.history] == pytest.approx([0.3, 0.6, 0.9, 1.0], abs=0.02)
    assert [seed["stage"] for seed in grow.grower.summary()] == ["FOSSILIZED"]


def test_limits_hold(tmp_path: Path) -> None:
    early, small = make_grow(controller="gated", until=0.3), make_grow(controller="gated", max_parameters=1.0)
    fit(make_module(), make_trainer(tmp_path, early))
    assert [record["step"] for record in early.history if record.get("op") == "GERMINATE"] == [1]
    fit(make_module(), make_trainer(tmp_path, small))
    assert small.grower.summary() == []


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Unlogged(Classifier):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("quality", 1.0)


class Twice(nn.Module):
    """A block that runs twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.block(x)).mean((2, 3)))


@pytest.mark.parametrize(
    ("module", "grow", "options", "message"),
    [
        (Manual, {}, {}, "automatic_optimization=False: must be True; for manual optimisation, use esper.Grower"),
        (Classifier, {}, {"limit_val_batches": 0}, "validation: must be there"),
        (Classifier, {}, {"max_epochs": -1}, "max_epochs=-1: must be positive; or set max_steps or Grow.budget_flops="),
        (Classifier, {"monitor": "val_accuracy"}, {}, "monitor=val_accuracy: must be logged .* val_acc, val_loss"),
        (Classifier, {"val_loss": "loss"}, {}, "val_loss=loss: must be logged by the validation"),
        (Unlogged, {"monitor": "quality"}, {}, "val_loss=None: must name the validation loss, or one of val_loss,"),
        (Classifier, {"slots": ["layr2"]}, {}, "slots: 'layr2' matches no module; the nearest are .*layer2"),
        (Classifier, {"controller": "gate"}, {}, "controller=gate: must be pretrained, gated"),
        (
            Classifier,
            {},
            {"val_check_interval": {"minutes": 1}},
            "val_check_interval: must be a number of batches or a share of the training data",
        ),
    ],
)
def test_what_cannot_grow_is_refused_in_one_sentence(
    tmp_path: Path, module: type[Classifier], grow: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    made = make_module(module)
    with pytest.raises(ValueError, match=message):
        fit(made, make_trainer(tmp_path, make_grow(**grow), **options))
    assert "on_load_checkpoint" not in vars(made)


def test_several_optimizers_need_manual_optimisation_which_is_refused(tmp_path: Path) -> None:
    class Two(Classifier):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net.stem.parameters(), 0.1), torch.optim.SGD(self.net.head.parameters(), 0.1)]  # type: ignore[union-attr,arg-type]

    with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
        fit(make_module(Two), make_trainer(tmp_path, make_grow()))


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
def test_steps_that_take_an_iterator_are_refused(tmp_path: Path) -> None:
    class Iterating(Classifier):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            return super().training_step(*next(dataloader_iter)[:2])

    with pytest.raises(ValueError, match="training_step: must take a batch, not dataloader_iter"):
        fit(make_module(Iterating), make_trainer(tmp_path, make_grow()))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_a_fit_without_validation_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="validation: must be there, because growth is decided after each"):
        make_trainer(tmp_path, make_grow()).fit(make_module(), loader())


def test_a_module_that_runs_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"net\.block runs 2 times in one forward pass; it must run once"):
        fit(make_module(net=Twice()), make_trainer(tmp_path, make_grow(slots=["block"])))


def test_an_output_whose_shape_changes_is_refused(tmp_path: Path) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer2 = nn.Conv2d(3, 6, 3)
            self.head = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer2(x).mean((-2, -1)))

    class Widening(Classifier):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 2:
                self.net.layer2.weight = nn.Parameter(torch.randn(5, 3, 3, 3))  # type: ignore[union-attr]
                self.net.layer2.bias = nn.Parameter(torch.randn(5))  # type: ignore[union-attr]

    with pytest.raises(ValueError, match=r"slot=net\.layer2: the output must have 6 channels as in the example"):
        fit(make_module(Widening, net=Flat()), make_trainer(tmp_path, make_grow(slots=["layer2"])))


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_sharding_strategies_are_refused(strategy: Any) -> None:
    trainer: Any = SimpleNamespace(strategy=strategy.__new__(strategy))
    with pytest.raises(ValueError, match=f"strategy={strategy.__name__}: must be a single device or ddp"):
        refuse_fit(trainer, make_module(), None)
    single: Any = SimpleNamespace(
        strategy=SingleDeviceStrategy(torch.device("cpu")), enable_validation=True, max_epochs=1, max_steps=-1
    )
    refuse_fit(single, make_module(), None)


def test_arguments_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="measure=2: must be from 0 to 1"):
        Grow(measure=2)
    with pytest.raises(ValueError, match="grower: exists from the first batch of a fit on"):
        Grow().grower  # noqa: B018
    assert Grow().history == []
    assert Grow().explain() == []


def test_a_refused_fit_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    module = make_module()
    with pytest.raises(ValueError, match="matches no module"):
        fit(module, make_trainer(tmp_path, make_grow(slots=["nowhere"])))
    assert not find_hooked_slots(module)
    fit(module, make_trainer(tmp_path, make_grow(WAIT, {**PLANT, "slot": "net.layer1"})))
