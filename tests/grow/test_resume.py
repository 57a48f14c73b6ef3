"""A growth is saved, restored, and the same in every process."""

import copy
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from esper.grow.grower import Grower
from esper.grow.observe import StepMeasurements
from tests.grow.fixtures_growers import GROW, WAIT, make_grower, replay
from tests.grow.fixtures_networks import ResNet, images, run_loop, train_batches


@pytest.mark.parametrize("controller", ["gated", "tuned_rule", "fragrow", "heuristic", "schedule", "pretrained"])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_resumed_loop_ends_where_an_undisturbed_one_does(controller: str, kind: type[torch.optim.Optimizer]) -> None:
    steps, at = 8, 5
    model, optimizer, schedule, grower = make_grower(steps, kind, controller=controller)
    run_loop(model, optimizer, grower, range(at), schedule)
    parts = (model, optimizer, schedule, grower)
    saved = copy.deepcopy([part.state_dict() for part in parts])
    run_loop(model, optimizer, grower, range(at, steps), schedule)
    again = make_grower(steps, kind, controller=controller)
    for part, state in zip((again[3], *again[:3]), (saved[3], *saved[:3]), strict=True):
        part.load_state_dict(state)
    run_loop(again[0], again[1], again[3], range(at, steps), again[2])
    assert list(again[0].state_dict()) == list(model.state_dict())
    assert all(torch.equal(value, again[0].state_dict()[name]) for name, value in model.state_dict().items())
    assert repr(again[3].history) == repr(grower.history)
    assert repr(again[3].explain()) == repr(grower.explain())
    assert again[3].flops == grower.flops


def test_the_state_is_plain_data(tmp_path: Any) -> None:
    model, optimizer, schedule, grower = make_grower(controller="pretrained")
    run_loop(model, optimizer, grower, range(4), schedule)
    torch.save({"grower": grower.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert repr(loaded["grower"]) == repr(grower.state_dict())


def test_groups_are_rebuilt_in_the_saved_order() -> None:
    order = [{**GROW, "slot": slot} for slot in ("layer3", "layer1", "layer2")]
    model, optimizer, schedule, grower = make_grower(controller=replay(WAIT, *order))
    run_loop(model, optimizer, grower, range(4), schedule)
    sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    again = make_grower(controller=replay(WAIT, *order))
    again[3].load_state_dict(grower.state_dict())
    assert grower.state_dict()["structure"]["order"] == ["layer3", "layer1", "layer2"]
    assert [sum(p.numel() for p in group["params"]) for group in again[1].param_groups] == sizes


def test_processes_with_equal_measurements_do_the_same() -> None:
    first, second = make_grower(controller="pretrained"), make_grower(controller="pretrained")
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


def test_another_network_or_other_slots_are_refused() -> None:
    *_, grower = make_grower(controller="none")
    state = grower.state_dict()
    wide = ResNet(16)
    other = Grower(wide, SGD(wide.parameters(), lr=0.1), example=images(), steps=6, controller="none")
    with pytest.raises(ValueError, match="must be the network of the saved state"):
        other.load_state_dict(state)
    *_, fewer = make_grower(controller="none", slots=["layer1"])
    with pytest.raises(ValueError, match=r"slots=\['layer1'\]: must be \['layer1', 'layer2', 'layer3'\]"):
        fewer.load_state_dict(state)
