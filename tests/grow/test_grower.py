"""The Grower in a plain loop."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import esper
from esper.controllers import ReplayController
from esper.grow.grower import Grower
from esper.grow.observe import StepMeasurements
from esper.growth import find_hooked_slots
from esper.lifecycle import ActionSpace
from tests.grow.fixtures_networks import ResNet, TextNet, images, run_loop, tokens, train_batches, validate

GROW = {"op": "GERMINATE", "slot": "layer2", "blueprint": "conv_small"}
WAIT = {"op": "WAIT"}


def replay(*actions: dict[str, str]) -> Any:
    """A controller that takes these actions and then waits."""

    def build(space: ActionSpace) -> ReplayController:
        return ReplayController(space, actions)

    return build


def make(steps: int = 6, kind: type[torch.optim.Optimizer] = SGD, **arguments: Any) -> tuple[ResNet, Any, Any, Grower]:
    torch.manual_seed(0)
    model = ResNet()
    options: dict[str, Any] = {"momentum": 0.9} if kind is SGD else {}
    optimizer = kind(model.parameters(), lr=0.05, **options)
    schedule = CosineAnnealingLR(optimizer, steps)
    return (
        model,
        optimizer,
        schedule,
        Grower(model, optimizer, example=images(), steps=steps, schedulers=schedule, **arguments),
    )


def test_a_network_that_never_grows_trains_bit_equal() -> None:
    torch.manual_seed(0)
    bare = ResNet()
    optimizer = SGD(bare.parameters(), lr=0.05, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, 6)
    for step in range(6):
        train_batches(bare, optimizer, step, schedule=schedule)
    model, other, same, grower = make(controller="none")
    run_loop(model, other, grower, range(6), same)
    assert list(model.state_dict()) == list(bare.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in bare.state_dict().items())
    grower.close()
    assert [name for name, _ in model.named_modules()] == [name for name, _ in bare.named_modules()]


def test_planting_a_seed_changes_nothing_of_the_function_and_adds_its_group() -> None:
    model, optimizer, schedule, grower = make(controller=replay(WAIT, GROW))
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
    model, optimizer, schedule, grower = make(controller=replay(WAIT, GROW))
    run_loop(model, optimizer, grower, range(6), schedule)
    (seed,) = grower.summary()
    assert (seed["slot"], seed["stage"], seed["planted"], seed["alpha"]) == ("layer2", "FOSSILIZED", 1, 1.0)
    slot = find_hooked_slots(model)["layer2"]
    assert slot.seed is not None
    assert slot.seed.body.branch[-1].weight.abs().sum() > 0  # type: ignore[union-attr,index,operator]
    assert grower.is_over


def test_pruning_removes_the_seed_its_group_and_its_state() -> None:
    prune = {"op": "PRUNE", "slot": "layer2"}
    model, optimizer, schedule, grower = make(controller=replay(WAIT, GROW, WAIT, prune))
    run_loop(model, optimizer, grower, range(4), schedule)
    assert grower.summary() == []
    assert len(optimizer.param_groups) == 1
    assert set(optimizer.state) <= set(model.parameters())
    assert not any("seed" in name for name in model.state_dict())


@pytest.mark.parametrize("controller", ["gated", "tuned_rule", "fragrow", "heuristic", "schedule", "pretrained"])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_resumed_loop_ends_where_an_undisturbed_one_does(controller: str, kind: type[torch.optim.Optimizer]) -> None:
    steps, at = 8, 5
    model, optimizer, schedule, grower = make(steps, kind, controller=controller)
    run_loop(model, optimizer, grower, range(at), schedule)
    parts = (model, optimizer, schedule, grower)
    saved = copy.deepcopy([part.state_dict() for part in parts])
    run_loop(model, optimizer, grower, range(at, steps), schedule)
    again = make(steps, kind, controller=controller)
    for part, state in zip((again[3], *again[:3]), (saved[3], *saved[:3]), strict=True):
        part.load_state_dict(state)
    run_loop(again[0], again[1], again[3], range(at, steps), again[2])
    assert list(again[0].state_dict()) == list(model.state_dict())
    assert all(torch.equal(value, again[0].state_dict()[name]) for name, value in model.state_dict().items())
    assert repr(again[3].history) == repr(grower.history)
    assert repr(again[3].explain()) == repr(grower.explain())
    assert again[3].flops == grower.flops


def test_the_state_is_plain_data(tmp_path: Any) -> None:
    model, optimizer, schedule, grower = make(controller="pretrained")
    run_loop(model, optimizer, grower, range(4), schedule)
    torch.save({"grower": grower.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert repr(loaded["grower"]) == repr(grower.state_dict())


def test_groups_are_rebuilt_in_the_saved_order() -> None:
    order = [{**GROW, "slot": slot} for slot in ("layer3", "layer1", "layer2")]
    model, optimizer, schedule, grower = make(controller=replay(WAIT, *order))
    run_loop(model, optimizer, grower, range(4), schedule)
    sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    again = make(controller=replay(WAIT, *order))
    again[3].load_state_dict(grower.state_dict())
    assert grower.state_dict()["structure"]["order"] == ["layer3", "layer1", "layer2"]
    assert [sum(p.numel() for p in group["params"]) for group in again[1].param_groups] == sizes


def test_processes_with_equal_measurements_do_the_same() -> None:
    first, second = make(controller="pretrained"), make(controller="pretrained")
    for step in range(6):
        train_loss = train_batches(first[0], first[1], step, schedule=first[2])
        train_batches(second[0], second[1], step, schedule=second[2])
        sent = first[3].measure(val_loss=1.0, train_loss=train_loss, score=0.5).to_dict()
        change, action = first[3].choose(StepMeasurements.from_dict(sent))
        second[3].measure(val_loss=2.0)
        other, same = second[3].choose(StepMeasurements.from_dict(sent))
        assert change == other
        assert (action is None) == (same is None)
        if action is not None and same is not None:
            assert torch.equal(action, same)
            assert first[3].apply(action) == second[3].apply(action)
    assert all(torch.equal(a, b) for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True))


def test_contributions_are_the_difference_that_a_seed_makes() -> None:
    model, optimizer, _, grower = make(controller=replay(WAIT, GROW))
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


def test_contributions_that_cost_too_much_are_left_out_and_others_are_charged() -> None:
    model, optimizer, schedule, grower = make(controller=replay(WAIT, GROW), evaluate_samples=10_000)
    run_loop(model, optimizer, grower, range(3), schedule)
    assert all(not record["contribution"] for record in grower.history)
    cheap = make(controller=replay(WAIT, GROW), evaluate_samples=1)
    run_loop(cheap[0], cheap[1], cheap[3], range(3), cheap[2])
    assert cheap[3].history[-1]["contribution"]
    assert cheap[3].flops > grower.flops


def test_nothing_is_planted_after_until() -> None:
    model, optimizer, schedule, grower = make(controller="gated", until=0.2)
    run_loop(model, optimizer, grower, range(6), schedule)
    assert [record["step"] for record in grower.history if record.get("op") == "GERMINATE"] == [1]


def test_the_network_never_exceeds_max_parameters() -> None:
    model, optimizer, schedule, grower = make(controller="gated", max_parameters=1.05)
    bare = sum(p.numel() for p in model.parameters())
    run_loop(model, optimizer, grower, range(6), schedule)
    assert bare < max(record["parameters"] for record in grower.history) <= 1.05 * bare
    small = make(controller="gated", max_parameters=1.0)
    run_loop(small[0], small[1], small[3], range(6), small[2])
    assert small[3].summary() == []


def test_progress_is_the_spent_share_of_a_budget() -> None:
    trace = esper.slots(ResNet(), images()).trace
    sample = trace.forward + trace.backward
    model, optimizer, _, grower = make(controller="none", budget_flops=sample * 8 * 3 * 2)
    train_batches(model, optimizer, 0)
    grower.step(val_loss=1.0)
    assert grower.spent_share == pytest.approx(0.5)
    assert grower.history[0]["progress"] == pytest.approx(0.5)
    grower.note_batch(24)
    assert grower.spent_share == 1.0
    assert grower.is_over


def test_progress_may_be_given_as_a_share() -> None:
    *_, grower = make(controller="none")
    grower.step(val_loss=1.0, progress=0.75)
    assert grower.history[0]["progress"] == 0.75
    grower.step(val_loss=1.0, progress=1.0)
    assert grower.is_over


def test_a_non_finite_loss_removes_the_newest_seed_and_restores_the_last_good_state() -> None:
    order = [GROW, {**GROW, "slot": "layer1"}]
    model, optimizer, schedule, grower = make(8, controller=replay(WAIT, *order))
    run_loop(model, optimizer, grower, range(2), schedule)
    good = copy.deepcopy(model.state_dict())
    momentum = copy.deepcopy(optimizer.state[model.stem.weight]["momentum_buffer"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    with pytest.warns(UserWarning, match="loss is non-finite; the seed in layer1 was removed") as warned:
        change = grower.step(val_loss=float("nan"), train_loss=float("nan"), score=0.1)
    assert len(warned) == 1
    assert change.removed == ("layer1",)
    now = model.state_dict()
    assert [record["slot"] for record in grower.summary()] == ["layer2"]
    assert all(torch.equal(now[name], value) for name, value in good.items() if name in now)
    assert torch.equal(optimizer.state[model.stem.weight]["momentum_buffer"], momentum)
    assert "rolled back layer1" in grower.history[-1]["events"]
    run_loop(model, optimizer, grower, range(3, 8), schedule)
    assert all(value.isfinite().all() for value in model.state_dict().values())


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


def test_another_network_or_other_slots_are_refused() -> None:
    *_, grower = make(controller="none")
    state = grower.state_dict()
    wide = ResNet(16)
    other = Grower(wide, SGD(wide.parameters(), lr=0.1), example=images(), steps=6, controller="none")
    with pytest.raises(ValueError, match="must be the network of the saved state"):
        other.load_state_dict(state)
    *_, fewer = make(controller="none", slots=["layer1"])
    with pytest.raises(ValueError, match=r"slots=\['layer1'\]: must be \['layer1', 'layer2', 'layer3'\]"):
        fewer.load_state_dict(state)


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
    model, *_ = make(controller="none")
    with pytest.raises(ValueError, match="has slots of esper already"):
        Grower(model, SGD(model.parameters(), lr=0.1), example=images(), steps=5, controller="none")
