"""The Grower in a plain loop."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

import esper
from esper.grow.grower import Grower
from esper.growth import find_hooked_slots
from tests.grow.fixtures_growers import GROW, WAIT, make_grower, replay
from tests.grow.fixtures_networks import ResNet, TextNet, images, run_loop, tokens, train_batches, validate


def test_a_network_that_never_grows_trains_bit_equal() -> None:
    torch.manual_seed(0)
    bare = ResNet()
    optimizer = SGD(bare.parameters(), lr=0.05, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, 6)
    for step in range(6):
        train_batches(bare, optimizer, step, schedule=schedule)
    model, other, same, grower = make_grower(controller="none")
    run_loop(model, other, grower, range(6), same)
    assert list(model.state_dict()) == list(bare.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in bare.state_dict().items())
    grower.close()
    assert [name for name, _ in model.named_modules()] == [name for name, _ in bare.named_modules()]


def test_planting_a_seed_changes_nothing_of_the_function_and_adds_its_group() -> None:
    model, optimizer, schedule, grower = make_grower(controller=replay(WAIT, GROW))
    train_batches(model, optimizer, 0, schedule=schedule)
    before = model.eval()(images()[0])
    change = grower.step(val_loss=1.0)
    assert change.added == ("layer2",)
    assert change
    torch.testing.assert_close(model.eval()(images()[0]), before)
    assert len(optimizer.param_groups) == 2
    assert grower.history[0]["events"] == ["planted conv_small in layer2"]
    assert grower.history[0]["op"] == "GERMINATE"


def test_a_seed_that_is_blended_in_is_kept_at_the_end_and_trains() -> None:
    model, optimizer, schedule, grower = make_grower(controller=replay(WAIT, GROW))
    run_loop(model, optimizer, grower, range(6), schedule)
    (seed,) = grower.summary()
    assert (seed["slot"], seed["stage"], seed["planted"], seed["alpha"]) == ("layer2", "FOSSILIZED", 1, 1.0)
    slot = find_hooked_slots(model)["layer2"]
    assert slot.seed is not None
    assert slot.seed.body.branch[-1].weight.abs().sum() > 0  # type: ignore[union-attr,index,operator]
    assert grower.is_over


def test_pruning_removes_the_seed_its_group_and_its_state() -> None:
    prune = {"op": "PRUNE", "slot": "layer2"}
    model, optimizer, schedule, grower = make_grower(controller=replay(WAIT, GROW, WAIT, prune))
    run_loop(model, optimizer, grower, range(4), schedule)
    assert grower.summary() == []
    assert len(optimizer.param_groups) == 1
    assert set(optimizer.state) <= set(model.parameters())
    assert not any("seed" in name for name in model.state_dict())


def test_contributions_are_the_difference_that_a_seed_makes() -> None:
    model, optimizer, _, grower = make_grower(controller=replay(WAIT, GROW))
    train_batches(model, optimizer, 0)
    grower.step(val_loss=1.0)
    train_batches(model, optimizer, 1, batches=10)
    loss, score = validate(model)
    with esper.disabled(model):
        without = validate(model)
    model.train()
    grower.step(val_loss=loss, score=score, evaluate=lambda: validate(model))
    assert model.training
    measured = grower.state_dict()["plan"]["log"][-1]["measured"]
    assert measured["loss_contribution"]["layer2"] == pytest.approx(without[0] - loss)
    assert measured["contribution"]["layer2"] == pytest.approx(100 * (score - without[1]))


def test_two_optimizers_train_the_seeds_of_their_own_modules() -> None:
    torch.manual_seed(0)
    model = ResNet()
    first = SGD([*model.stem.parameters(), *model.layer1.parameters()], lr=0.1)
    second = Adam([*model.layer2.parameters(), *model.layer3.parameters(), *model.head.parameters()], lr=0.01)
    grower = Grower(
        model, [first, second], example=images(), steps=5, controller=replay(WAIT, GROW, {**GROW, "slot": "layer1"})
    )
    for _ in range(4):
        model(images()[0]).square().mean().backward()
        first.step()
        second.step()
        grower.step(val_loss=1.0)
    assert [len(optimizer.param_groups) for optimizer in (first, second)] == [2, 2]
    assert grower.state_dict()["structure"]["order"] == ["layer1", "layer2"]


def test_seeds_of_a_frozen_network_train() -> None:
    torch.manual_seed(0)
    model = ResNet()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    optimizer = SGD(model.head.parameters(), lr=0.1)
    grower = Grower(model, optimizer, example=images(), steps=5, controller=replay(WAIT, GROW))
    frozen = copy.deepcopy(model.layer1.state_dict())
    model.layer1.eval()
    grower.step(val_loss=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(images()[0]), images()[1]).backward()
        optimizer.step()
    seed = find_hooked_slots(model)["layer2"].seed
    assert seed is not None
    assert seed.body.branch[-1].weight.abs().sum() > 0  # type: ignore[union-attr,index,operator]
    assert all(torch.equal(model.layer1.state_dict()[name], value) for name, value in frozen.items())


def test_a_compiled_network_compiles_again_at_a_graft_only() -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    compilations: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compilations.append(len(list(graph.graph.nodes)))
        return graph.forward

    model = TextNet()
    compiled = torch.compile(model, backend=backend)
    assert isinstance(compiled, nn.Module)
    compiled(tokens())
    optimizer = SGD(model.parameters(), lr=0.1)
    action = {"op": "GERMINATE", "slot": "h.1", "blueprint": "mlp_small"}
    grower = Grower(compiled, optimizer, example=tokens(), steps=9, controller=replay(WAIT, action))
    compilations.clear()
    compiled(tokens())
    once = len(compilations)
    assert once > 0
    grower.step(val_loss=1.0)
    compiled(tokens())
    grown = len(compilations)
    assert grown > once
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(compiled(tokens()).flatten(0, 1), tokens().flatten()).backward()
        optimizer.step()
        with esper.disabled(compiled):
            compiled(tokens())
        assert torch.allclose(compiled(tokens()), model(tokens()))
        grower.step(val_loss=1.0)
    assert len(compilations) == grown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"mode": "best"}, "mode=best: must be max or min"),
        ({"max_parameters": 0.5}, "max_parameters=0.5: must be at least 1"),
        ({"controller": "gate"}, "controller=gate: must be pretrained, gated, tuned_rule"),
        ({"controller": 3}, "controller=3: must be pretrained"),
        ({"controller": "pretrained", "settings": {"wait": 0.1}}, "settings=.*are for controller="),
        ({"blueprints": ["lora"]}, "lora is unknown among cnn blueprints"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(arguments: dict[str, Any], message: str) -> None:
    model = ResNet()
    given = {"example": images(), "steps": 5, "controller": "none", **arguments}
    with pytest.raises(ValueError, match=message):
        Grower(model, SGD(model.parameters(), lr=0.1), **given)  # type: ignore[arg-type]
    assert not find_hooked_slots(model)


def test_a_network_grows_under_one_grower_only() -> None:
    model, *_ = make_grower(controller="none")
    with pytest.raises(ValueError, match="has slots of esper already"):
        Grower(model, SGD(model.parameters(), lr=0.1), example=images(), steps=5, controller="none")


def test_a_lower_score_is_better_in_mode_min() -> None:
    model, optimizer, _, grower = make_grower(controller=replay(WAIT, GROW), mode="min", score_scale=1.0)
    grower.step(val_loss=2.0, score=30.0)
    for value in (20.0, 25.0):
        train_batches(model, optimizer, 1)
        probe = iter([(2.0, value), (2.5, value + 1)])
        grower.step(val_loss=2.0, score=value, evaluate=lambda probe=probe: next(probe))  # type: ignore[misc]
    assert [record["score"] for record in grower.history] == [-30.0, -20.0, -25.0]
    assert grower.history[1]["contribution"] == {"layer2": 1.0}


def test_mixed_precision_trains_seeds() -> None:
    model, optimizer, _, grower = make_grower(controller=replay(WAIT, GROW, WAIT, WAIT))
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(images()[0]), images()[1])
        loss.backward()
        optimizer.step()
        grower.step(val_loss=loss, train_loss=loss)
    assert [record["stage"] for record in grower.summary()] == ["FOSSILIZED"]


def test_a_misspelled_result_is_refused() -> None:
    *_, grower = make_grower(controller="none")
    with pytest.raises(TypeError, match="valid_loss"):
        grower.step(val_loss=1.0, valid_loss=1.0)  # type: ignore[call-arg]
