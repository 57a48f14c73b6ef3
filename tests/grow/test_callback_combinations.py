"""The callback beside other callbacks and options of the Trainer."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch.optim import lr_scheduler

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
from tests.grow.fixtures_networks import TextNet, tokens

OTHER = {**PLANT, "slot": "net.layer1"}


def assert_grown(module: Classifier, grow: Grow) -> None:
    """One seed is there, has trained, and is whole."""
    assert [seed["stage"] for seed in grow.grower.summary()] == ["FOSSILIZED"]
    slot = find_hooked_slots(module)["net.layer2"]
    assert slot.seed is not None
    assert slot.alpha.item() == 1
    assert slot.seed.body.branch[-1].weight.abs().sum() > 0  # type: ignore[union-attr,index,operator]
    assert all(value.isfinite().all() for value in module.state_dict().values())


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 2, "val_check_interval": 1},
        {"gradient_clip_val": 0.01},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "64-true"},
        {"inference_mode": False},
        {"num_sanity_val_steps": 0},
        {"fast_dev_run": 3},
        {"detect_anomaly": True},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_options_of_the_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    grow = make_grow(measure=1.0, measure_share=1.0)
    module = fit(make_module(lr=0.2), make_trainer(tmp_path, grow, **options))
    if "fast_dev_run" in options:  # one validation, after which nothing is planted
        assert len(grow.history) == 1
        return
    assert_grown(module, grow)
    assert "net.layer2" in grow.grower.state_dict()["plan"]["log"][-1]["measured"]["loss_contribution"]
    kinds = {parameter.dtype for parameter in module.parameters()}
    assert kinds == {
        {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(str(options.get("precision")), torch.float32)
    }


def test_clipping_covers_the_gradients_of_seeds(tmp_path: Path) -> None:
    norms: list[float] = []

    class Norms(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
            assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
                id(p) for p in pl_module.parameters()
            }

        def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
            found = [p.grad.norm() for p in pl_module.parameters() if p.grad is not None]
            norms.extend([torch.stack(found).norm().item()] if found else [])

    fit(make_module(), make_trainer(tmp_path, make_grow(), Norms(), gradient_clip_val=0.01))
    assert norms
    assert max(norms) <= 0.0101


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("average", [WeightAveraging, lambda: EMAWeightAveraging(decay=0.5)])
def test_averaged_weights_grow_too(tmp_path: Path, average: Any, is_first: bool) -> None:
    def train(*actions: dict[str, str], with_grow: bool = True) -> tuple[Classifier, Grow]:
        grow = make_grow(*actions)
        own = [grow, average()] if is_first else [average(), grow]
        callbacks = own if with_grow else [average()]
        return fit(make_module(), make_trainer(tmp_path, *callbacks, max_epochs=6)), grow

    bare, _ = train(with_grow=False)
    never, _ = train(WAIT)
    assert same_weights(bare, never)
    module, grow = train(WAIT, OTHER, PLANT, WAIT, {**PRUNE, "slot": "net.layer1"})
    assert_grown(module, grow)
    assert module.net.layer1[0].norm.num_batches_tracked.item() == bare.net.layer1[0].norm.num_batches_tracked.item()  # type: ignore[union-attr,index]


@pytest.mark.parametrize("is_first", [True, False])
def test_alphas_are_not_averaged_with_the_weights(tmp_path: Path, is_first: bool) -> None:
    """WeightAveraging averages buffers too, but the alpha of a seed is not a weight."""
    alphas: list[float] = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            for slot in find_hooked_slots(pl_module).values():
                slot.alpha.fill_(0.5)  # as while a seed blends in

        def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            alphas.extend(s.alpha.item() for s in find_hooked_slots(pl_module).values() if s.seed is not None)

    own = [make_grow(), WeightAveraging()]
    module = fit(make_module(), make_trainer(tmp_path, *(own if is_first else own[::-1]), Watch(), max_epochs=5))
    assert set(alphas) == {0.5}
    assert find_hooked_slots(module)["net.layer2"].alpha.item() == 1


@pytest.mark.filterwarnings("ignore:esper. the loss is non-finite")
def test_averages_start_again_when_the_last_good_state_is_restored(tmp_path: Path) -> None:
    class Breaking(Classifier):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.current_epoch == 1 and batch_idx == 1:
                with torch.no_grad():
                    self.net.stem.weight.fill_(torch.nan)  # type: ignore[union-attr,operator]

    grow = make_grow()
    module = fit(make_module(Breaking), make_trainer(tmp_path, grow, EMAWeightAveraging(decay=0.9)))
    assert grow.history[1]["events"][0] == "rolled back net.layer2"
    assert all(value.isfinite().all() for value in module.state_dict().values())


def test_the_average_of_a_seed_begins_with_its_first_weights(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    class Watch(Callback):
        def keep(self, module: LightningModule) -> None:
            seed = find_hooked_slots(module)["net.layer2"].seed
            if seed is not None:
                seen.append(next(seed.parameters()).detach().clone())

        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            if not seen:
                self.keep(pl_module)

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            self.keep(pl_module)

    average = EMAWeightAveraging(decay=0.5)
    module = fit(make_module(lr=0.3), make_trainer(tmp_path, make_grow(), average, Watch()))
    expected = seen[0]
    for value in seen[1:]:
        expected = 0.5 * expected + 0.5 * value
    seed = find_hooked_slots(module)["net.layer2"].seed
    assert seed is not None
    torch.testing.assert_close(next(seed.parameters()).detach(), expected)
    assert not torch.equal(expected, seen[-1])


@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch")
def test_stochastic_weight_averaging_grows_too(tmp_path: Path) -> None:
    def schedule(optimizer: Any) -> Any:
        return [optimizer], [lr_scheduler.StepLR(optimizer, 2)]

    def train(*callbacks: Any) -> Classifier:
        swa = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=2)
        return fit(make_module(lr=0.2, schedule=schedule), make_trainer(tmp_path, *callbacks, swa, max_epochs=6))

    assert same_weights(train(), train(make_grow(WAIT)))
    grow = make_grow(WAIT, OTHER, PLANT, WAIT, {**PRUNE, "slot": "net.layer1"})
    assert_grown(train(grow), grow)


def test_the_best_checkpoint_is_loaded_by_name(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path / "best", monitor="val_loss", mode="min")
    trainer = make_trainer(tmp_path, make_grow(), save)
    module = fit(make_module(), trainer)
    results = trainer.validate(module, loader(2, seed=7), ckpt_path="best", verbose=False)
    assert results[0]["val_loss"] == pytest.approx(float(save.best_model_score or 0), rel=1e-5)


def test_early_stopping_keeps_what_has_grown(tmp_path: Path) -> None:
    grow, stop = make_grow(), EarlyStopping("train_loss", mode="max", patience=2, check_on_train_epoch_end=True)
    module = fit(make_module(), make_trainer(tmp_path, grow, stop, max_epochs=50))
    assert 2 < len(grow.history) < 50
    assert_grown(module, grow)


@pytest.mark.parametrize("has_schedule", [True, False])
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_the_learning_rate_monitor_names_the_groups(tmp_path: Path, has_schedule: bool) -> None:
    def schedule(optimizer: Any) -> Any:
        return [optimizer], [lr_scheduler.StepLR(optimizer, 2)]

    def train(root: Path, **options: Any) -> list[dict[str, str]]:
        logger, save = CSVLogger(root), ModelCheckpoint(root / "saved", filename="{epoch}", save_top_k=-1)
        callbacks = [make_grow(), LearningRateMonitor(), save]
        module = make_module(schedule=schedule if has_schedule else None)
        fit(module, make_trainer(root, *callbacks, logger=logger), **options)
        with open(Path(logger.log_dir) / "metrics.csv") as file:
            return list(csv.DictReader(file))

    rows = train(tmp_path / "1")
    resumed = train(tmp_path / "2", ckpt_path=tmp_path / "1" / "saved" / "epoch=1.ckpt")
    names = {name for row in rows for name in row if name.startswith("lr-")}
    assert names == ({"lr-SGD"} if has_schedule else {"lr-SGD", "lr-SGD/pg1", "lr-SGD/pg2"})
    assert {name for row in resumed for name in row if name.startswith("lr-")} == names - (
        set() if has_schedule else {"lr-SGD"}
    )


@pytest.mark.parametrize("kind", ["plateau", "one cycle", "cosine"])
def test_schedulers_go_on_while_seeds_come_and_go(tmp_path: Path, kind: str) -> None:
    def schedule(optimizer: Any) -> Any:
        if kind == "plateau":
            plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        if kind == "one cycle":
            one = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=18)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": one, "interval": "step"}}
        return [optimizer], [lr_scheduler.CosineAnnealingLR(optimizer, 6)]

    rates: dict[str, list[float]] = {"bare": [], "grown": []}

    class Rates(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            groups = trainer.optimizers[0].param_groups
            rates[self.name].append(groups[0]["lr"])

    fit(make_module(schedule=schedule), make_trainer(tmp_path, Rates("bare"), max_epochs=6))
    grow = make_grow(WAIT, OTHER, PLANT, WAIT, {**PRUNE, "slot": "net.layer1"})
    module = fit(make_module(schedule=schedule), make_trainer(tmp_path, Rates("grown"), grow, max_epochs=6))
    assert rates["grown"] == rates["bare"]
    assert len(set(rates["bare"])) > 2
    assert_grown(module, grow)


def test_a_frozen_backbone_stays_as_it_is(tmp_path: Path) -> None:
    module = make_module(lr=0.2)
    for name, parameter in module.net.named_parameters():
        parameter.requires_grad = name.startswith(("layer3", "head"))
    before = {name: value.clone() for name, value in module.net.named_parameters() if not value.requires_grad}
    grow = make_grow()
    fit(module, make_trainer(tmp_path, grow))
    now = dict(module.net.named_parameters())
    assert before
    assert all(torch.equal(now[name], value) for name, value in before.items())
    assert_grown(module, grow)


class Texts(Classifier):
    """A language model that is compiled inside of the module."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self(batch)
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), batch.flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch)
        self.log("val_loss", torch.nn.functional.cross_entropy(out.flatten(0, 1), batch.flatten()))


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_compiled_network_grows(tmp_path: Path, is_wrapped: bool) -> None:
    torch.compiler.reset()
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(len(list(graph.graph.nodes)))
        return graph.forward

    module = make_module(Texts, net=TextNet(), lr=0.3)
    if is_wrapped:
        module.net = torch.compile(module.net, backend=backend)
    else:
        module.net.compile(backend=backend)  # type: ignore[operator]
    slot = "net._orig_mod.h.1" if is_wrapped else "net.h.1"
    action = {"op": "GERMINATE", "slot": slot, "blueprint": "mlp_small"}
    grow = make_grow(WAIT, action, monitor=None, measure=1.0, measure_share=1.0)
    data = torch.utils.data.DataLoader(tokens(16), batch_size=4)
    make_trainer(tmp_path, grow).fit(module, data, data)
    assert graphs
    assert [seed["slot"] for seed in grow.grower.summary()] == [slot]
    x = next(iter(data))
    with torch.no_grad(), esper.disabled(module):
        without = module.eval()(x)
    with torch.no_grad():
        assert not torch.equal(module(x), without)
    measured = grow.grower.state_dict()["plan"]["log"][-1]["measured"]
    assert math.isfinite(measured["loss_contribution"][slot])
    assert measured["loss_contribution"][slot] != 0
