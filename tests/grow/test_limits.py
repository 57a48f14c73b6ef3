"""What a growth may not exceed, what it spends, and what breaks it."""

import copy

import pytest
import torch

import esper
from tests.grow.fixtures_growers import GROW, WAIT, make_grower, replay
from tests.grow.fixtures_networks import ResNet, images, run_loop, train_batches


def test_contributions_that_cost_too_much_are_left_out_and_others_are_charged() -> None:
    model, optimizer, schedule, grower = make_grower(controller=replay(WAIT, GROW), evaluate_samples=10_000)
    run_loop(model, optimizer, grower, range(3), schedule)
    assert all(not record["contribution"] for record in grower.history)
    cheap = make_grower(controller=replay(WAIT, GROW), evaluate_samples=1)
    run_loop(cheap[0], cheap[1], cheap[3], range(3), cheap[2])
    assert cheap[3].history[-1]["contribution"]
    assert cheap[3].flops > grower.flops


def test_a_network_without_seeds_is_not_charged_for_measurements() -> None:
    spent = []
    for samples in (None, 1):
        model, optimizer, schedule, grower = make_grower(controller="none", evaluate_samples=samples)
        run_loop(model, optimizer, grower, range(3), schedule)
        spent.append(grower.flops)
    assert spent[0] == spent[1] > 0


def test_nothing_is_planted_after_until() -> None:
    model, optimizer, schedule, grower = make_grower(controller="gated", until=0.2)
    run_loop(model, optimizer, grower, range(6), schedule)
    assert [record["step"] for record in grower.history if record.get("op") == "GERMINATE"] == [1]


def test_the_network_never_exceeds_max_parameters() -> None:
    model, optimizer, schedule, grower = make_grower(controller="gated", max_parameters=1.05)
    bare = sum(p.numel() for p in model.parameters())
    run_loop(model, optimizer, grower, range(6), schedule)
    assert bare < max(record["parameters"] for record in grower.history) <= 1.05 * bare
    small = make_grower(controller="gated", max_parameters=1.0)
    run_loop(small[0], small[1], small[3], range(6), small[2])
    assert small[3].summary() == []


def test_progress_is_the_spent_share_of_a_budget() -> None:
    trace = esper.slots(ResNet(), images()).trace
    sample = trace.forward + trace.backward
    model, optimizer, _, grower = make_grower(controller="none", budget_flops=sample * 8 * 3 * 2)
    train_batches(model, optimizer, 0)
    grower.step(val_loss=1.0)
    assert grower.spent_share == pytest.approx(0.5)
    assert grower.history[0]["progress"] == pytest.approx(0.5)
    grower.note_batch(24)
    assert grower.spent_share == 1.0
    assert grower.is_over


def test_progress_may_be_given_as_a_share() -> None:
    *_, grower = make_grower(controller="none")
    grower.step(val_loss=1.0, progress=0.75)
    assert grower.history[0]["progress"] == 0.75
    grower.step(val_loss=1.0, progress=1.0)
    assert grower.is_over


def test_a_non_finite_loss_removes_the_newest_seed_and_restores_the_last_good_state() -> None:
    order = [GROW, {**GROW, "slot": "layer1"}]
    model, optimizer, schedule, grower = make_grower(8, controller=replay(WAIT, *order))
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
