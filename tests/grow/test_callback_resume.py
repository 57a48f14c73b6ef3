"""Checkpoints of a fit that grows: fits go on, and other commands load them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

import esper
from esper.growth import find_hooked_slots
from tests.grow.fixtures_growers import WAIT
from tests.grow.fixtures_lightning import (
    PLANT,
    PRUNE,
    Classifier,
    Interruption,
    PowerCutError,
    fit,
    loader,
    make_grow,
    make_module,
    make_trainer,
    same_weights,
)
from tests.grow.fixtures_networks import ResNet

COURSE = (WAIT, PLANT, {**PLANT, "slot": "net.layer1"}, WAIT, PRUNE)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)]


def saver(root: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(root / "saved", filename="{epoch}", save_top_k=-1, **options)


@pytest.mark.parametrize("controller", ["a course", "pretrained"])
@pytest.mark.parametrize("at_train_end", [False, True])
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_an_interrupted_fit_ends_where_an_undisturbed_one_does(
    tmp_path: Path, controller: str, at_train_end: bool
) -> None:
    def parts(*others: Any) -> tuple[Any, Any]:
        options = {} if controller == "a course" else {"controller": controller}
        grow, save = make_grow(*COURSE, **options), saver(tmp_path, save_on_train_epoch_end=at_train_end)
        trainer = make_trainer(tmp_path, grow, save, *others, max_epochs=8)
        return grow, trainer

    undisturbed, trainer = parts()
    whole = fit(make_module(schedule=cosine), trainer)
    events = [event for record in undisturbed.history for event in record["events"]]
    for stop in (2, 4, 6):
        _, trainer = parts(Interruption(stop))
        broken = make_module(schedule=cosine)
        with pytest.raises(PowerCutError):
            fit(broken, trainer)
        assert [event for event in events if event.startswith("planted")]
        file = tmp_path / "saved" / f"epoch={stop - 1}.ckpt"
        for module in (make_module(schedule=cosine), broken):  # in a new process, or in the same notebook
            grow, trainer = parts()
            fit(module, trainer, ckpt_path=file)
            assert same_weights(module, whole)
            assert repr(grow.history) == repr(undisturbed.history)
            assert repr(grow.explain()) == repr(undisturbed.explain())


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_checkpoint_from_the_middle_of_an_epoch_is_resumed_too(tmp_path: Path) -> None:
    """Lightning begins the epoch's data anew, so only the number of validations is as without an interruption."""
    options: dict[str, Any] = {"max_epochs": 4, "val_check_interval": 2}
    save = ModelCheckpoint(tmp_path / "saved", filename="{step}", save_top_k=-1, save_on_train_epoch_end=False)
    whole, grow = make_grow(*COURSE), make_grow(*COURSE)
    fit(make_module(), make_trainer(tmp_path, whole, save, **options), batches=4)
    file = tmp_path / "saved" / "step=6.ckpt"
    fit(make_module(), make_trainer(tmp_path, grow, **options), batches=4, ckpt_path=file)
    assert [record["step"] for record in grow.history] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert repr(grow.history[:3]) == repr(whole.history[:3])
    assert [seed["slot"] for seed in grow.grower.summary()] == ["net.layer1"]


def test_a_longer_fit_goes_on_from_the_end_of_a_shorter_one(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_grow(WAIT, PLANT), max_epochs=3)
    first = fit(make_module(), trainer)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    grow = make_grow(WAIT, PLANT, WAIT, WAIT, {**PLANT, "slot": "net.layer1"})
    second = fit(make_module(), make_trainer(tmp_path, grow, max_epochs=6), ckpt_path=tmp_path / "end.ckpt")
    assert [record["step"] for record in grow.history] == [1, 2, 3, 4, 5, 6]
    assert set(find_hooked_slots(second)) == set(find_hooked_slots(first))
    assert [seed["slot"] for seed in grow.grower.summary()] == ["net.layer1", "net.layer2"]


def grown_checkpoint(root: Path, **options: Any) -> tuple[Classifier, Path]:
    save = saver(root, **options)
    module = fit(make_module(lr=0.3), make_trainer(root, make_grow(), save))
    return module, root / "saved" / "epoch=3.ckpt"


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_validate_and_test_load_a_grown_checkpoint_into_a_fresh_module(tmp_path: Path, weights_only: bool) -> None:
    module, file = grown_checkpoint(tmp_path, save_weights_only=weights_only)
    expected = make_trainer(tmp_path).test(module, loader(2, seed=7), verbose=False)
    fresh = make_module(lr=0.3)
    trainer = make_trainer(tmp_path, make_grow())
    assert trainer.test(fresh, loader(2, seed=7), ckpt_path=file, verbose=False) == expected
    assert same_weights(fresh, module)
    trainer.validate(make_module(), loader(2, seed=7), ckpt_path=file, verbose=False)
    assert trainer.test(module, loader(2, seed=7), ckpt_path=file, verbose=False) == expected


@pytest.mark.filterwarnings("ignore:Found keys that are not in the model state dict")
def test_load_puts_a_grown_checkpoint_into_a_module_without_a_trainer(tmp_path: Path) -> None:
    module, file = grown_checkpoint(tmp_path)
    x, _ = next(iter(loader(1, seed=7)))
    for fresh in (Classifier(), Classifier.load_from_checkpoint(file, strict=False)):
        esper.load(fresh, file)
        assert torch.equal(fresh.eval()(x), module.eval()(x))
    checkpoint = torch.load(file, weights_only=True)
    assert [slot["name"] for slot in checkpoint["esper"]["slots"]] == ["net.layer2"]


def test_a_grown_module_is_not_fitted_again_as_if_it_were_new(tmp_path: Path) -> None:
    module = fit(make_module(), make_trainer(tmp_path, make_grow()))
    with pytest.raises(ValueError, match=r"has seeds of another fit; use esper\.merge"):
        fit(module, make_trainer(tmp_path, make_grow()))


@pytest.mark.parametrize("command", ["fit", "validate"])
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path, command: str) -> None:
    _, file = grown_checkpoint(tmp_path)
    wide, data = make_module(net=ResNet(16)), [loader()] * (2 if command == "fit" else 1)
    with pytest.raises(ValueError, match="ckpt_path: belongs to another network"):
        getattr(make_trainer(tmp_path, make_grow()), command)(wide, *data, ckpt_path=file)
    with pytest.raises(ValueError, match=r"epoch=3\.ckpt: belongs to another network"):
        esper.load(wide, file)


def test_a_checkpoint_without_seeds_of_ours_is_refused_by_load(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    fit(make_module(), trainer)
    trainer.save_checkpoint(tmp_path / "bare.ckpt")
    with pytest.raises(ValueError, match=r"must be a checkpoint of a Trainer with esper\.Grow, or a directory"):
        esper.load(make_module(), tmp_path / "bare.ckpt")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_averaged_weights_are_resumed_with_their_seeds(tmp_path: Path, is_first: bool) -> None:
    def parts(*others: Any) -> Any:
        own = [make_grow(*COURSE), EMAWeightAveraging(decay=0.8)]
        callbacks = own if is_first else own[::-1]
        return make_trainer(tmp_path, *callbacks, saver(tmp_path), *others, max_epochs=6)

    whole = fit(make_module(), parts())
    with pytest.raises(PowerCutError):
        fit(make_module(), parts(Interruption(3)))
    resumed = fit(make_module(), parts(), ckpt_path=tmp_path / "saved" / "epoch=2.ckpt")
    assert same_weights(whole, resumed)
