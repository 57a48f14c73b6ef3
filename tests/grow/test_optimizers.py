"""Parameter groups of seeds, and every scheduler while they come and go."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.optim.lr_scheduler as lr
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import SWALR

from esper.grow.optimizers import OWNER, SeedGroups, future_rates
from tests.grow.fixtures_networks import ResNet, images

LR = 0.1
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr.LambdaLR(o, [lambda n: 0.9**n, lambda n: 0.8**n]),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, [lambda n: 0.9, lambda n: 0.8]),
    "StepLR": lambda o: lr.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr.LinearLR(o, 0.5, total_iters=6),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, total_iters=3), lr.CosineAnnealingLR(o, 7)], [3]),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 10),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.5, 3), lr.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=0, min_lr=[1e-3, 1e-4]),
    "CyclicLR": lambda o: lr.CyclicLR(o, [0.01, 0.02], [0.1, 0.2], step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, [0.1, 0.2], total_steps=11),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 10),
    "SWALR": lambda o: SWALR(o, [0.05, 0.02], anneal_epochs=5),
}


def make(kind: type[Optimizer] = SGD) -> tuple[ResNet, Optimizer]:
    torch.manual_seed(0)
    model = ResNet()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    options: dict[str, Any] = {"momentum": 0.9} if kind is SGD else {}
    return model, kind([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=LR, **options)


def advance(model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
    torch.manual_seed(5)  # dropout
    optimizer.zero_grad()
    model(images()[0]).square().mean().backward()
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    optimizer.step()
    scheduler.step(*[1.0] if isinstance(scheduler, lr.ReduceLROnPlateau) else [])


def host_rates(optimizer: Optimizer) -> list[list[float]]:
    keys = ("lr", "momentum")
    return [[float(group[key]) for key in keys] for group in optimizer.param_groups if OWNER not in group]


def test_every_scheduler_of_torch_is_tested() -> None:
    assert set(lr.__all__) - {"LRScheduler"} | {"SWALR"} == set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_while_seeds_come_and_go(name: str) -> None:
    model, optimizer = make()
    bare_model, bare = make()
    scheduler, reference = SCHEDULERS[name](optimizer), SCHEDULERS[name](bare)
    groups = SeedGroups(model, [optimizer], [scheduler], lr_scale=0.5)
    seeds = {slot: nn.Conv2d(2, 2, 1) for slot in ("layer1", "layer2", "layer3")}
    events = {2: ("add", "layer1"), 3: ("add", "layer2"), 5: ("remove", "layer1"), 6: ("add", "layer3")}
    events |= {7: ("remove", "layer2")}
    for step in range(9):
        if step in events:
            what, slot = events[step]
            if what == "add":
                groups.add(slot, getattr(model, slot), list(seeds[slot].parameters()))
            else:
                groups.remove(slot)
        rates = [float(group["lr"]) for group in optimizer.param_groups if OWNER not in group]
        advance(model, optimizer, scheduler)
        advance(bare_model, bare, reference)
        assert host_rates(optimizer) == host_rates(bare), step
        for group in optimizer.param_groups:
            if OWNER in group:  # in the step before the scheduler changed the rates
                assert group["lr"] == pytest.approx(0.5 * rates[0])
    assert groups.order() == ["layer3"]
    assert scheduler.get_last_lr() == reference.get_last_lr()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_is_saved_and_restored_beside_seeds(name: str) -> None:
    def build() -> tuple[ResNet, Optimizer, Any, SeedGroups]:
        model, optimizer = make()
        scheduler = SCHEDULERS[name](optimizer)
        return model, optimizer, scheduler, SeedGroups(model, [optimizer], [scheduler])

    def grow(model: nn.Module, groups: SeedGroups) -> None:
        torch.manual_seed(1)
        groups.add("layer2", model.layer2, list(nn.Conv2d(2, 2, 1).parameters()))  # type: ignore[arg-type]

    model, optimizer, scheduler, groups = build()
    advance(model, optimizer, scheduler)
    grow(model, groups)
    advance(model, optimizer, scheduler)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    twin, other, again, others = build()
    grow(twin, others)
    twin.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    again.load_state_dict(saved[2])
    for _ in range(4):
        advance(model, optimizer, scheduler)
        advance(twin, other, again)
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in other.param_groups]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_removing_a_seed_leaves_every_other_state_bit_equal(kind: type[Optimizer]) -> None:
    model, optimizer = make(kind)
    groups = SeedGroups(model, [optimizer])
    seed = nn.Conv2d(2, 2, 1)
    groups.add("layer1", model.layer1, list(seed.parameters()))
    seed.weight.grad = torch.ones_like(seed.weight)
    model(images()[0]).square().mean().backward()
    optimizer.step()
    before = {p: copy.deepcopy(state) for p, state in optimizer.state.items() if p is not seed.weight}
    groups.remove("layer1")
    assert set(optimizer.state) == set(before)
    for p, state in before.items():
        assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(optimizer.state[p][key])) for key in state)
    assert len(optimizer.param_groups) == 2


def test_a_seed_joins_the_optimizer_and_group_of_its_module() -> None:
    model = ResNet()
    first = SGD(model.layer1.parameters(), lr=0.1)
    second = AdamW(
        [{"params": model.layer2.parameters(), "weight_decay": 0.3}, {"params": model.layer3.parameters()}], lr=0.01
    )
    groups = SeedGroups(model, [first, second])
    seed = nn.Conv2d(2, 2, 1)
    groups.add("layer2", model.layer2, list(seed.parameters()))
    assert len(first.param_groups) == 1
    assert second.param_groups[2]["weight_decay"] == 0.3
    assert [id(p) for p in second.param_groups[2]["params"]] == [id(p) for p in seed.parameters()]


def test_a_module_without_trained_weights_takes_the_largest_group() -> None:
    model = ResNet()
    optimizer = SGD([{"params": model.head.parameters(), "lr": 0.3}], lr=0.1)
    groups = SeedGroups(model, [optimizer])
    groups.add("layer2", model.layer2, list(nn.Conv2d(2, 2, 1).parameters()))
    assert optimizer.param_groups[1]["lr"] == 0.3


def test_equal_values_are_different_parameters() -> None:
    model, optimizer = make()
    groups = SeedGroups(model, [optimizer])
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(6)]  # a comparison by value would add one
    groups.add("layer1", model.layer1, parameters)
    assert len(optimizer.param_groups[-1]["params"]) == 6


def test_groups_with_named_parameters_stay_named() -> None:
    model = ResNet()
    optimizer = SGD(list(model.named_parameters()), lr=0.1)
    groups = SeedGroups(model, [optimizer])
    groups.add("layer1", model.layer1, list(nn.Conv2d(2, 2, 1).parameters()))
    assert optimizer.param_groups[1]["param_names"] == ["layer1.0", "layer1.1"]


def test_a_scheduler_that_is_not_passed_and_an_optimizer_without_groups_are_refused() -> None:
    model, optimizer = make()
    lr.StepLR(optimizer, 2)
    with pytest.raises(ValueError, match="has a learning rate scheduler, which must be passed"):
        SeedGroups(model, [optimizer])
    with pytest.raises(ValueError, match="LBFGS allows only one"):
        SeedGroups(model, [torch.optim.LBFGS(model.parameters())])


def test_the_future_of_a_scheduler_is_known_and_nothing_of_it_changes() -> None:
    model, optimizer = make()
    scheduler = lr.SequentialLR(
        optimizer, [lr.LinearLR(optimizer, 0.1, total_iters=3), lr.CosineAnnealingLR(optimizer, 7)], [3]
    )
    SeedGroups(model, [optimizer], [scheduler])
    for _ in range(2):
        advance(model, optimizer, scheduler)
    before = copy.deepcopy(scheduler.state_dict())
    foreseen = future_rates(scheduler, 5)
    assert scheduler.state_dict() == before
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        advance(model, optimizer, scheduler)
    assert foreseen == pytest.approx(rates)
