"""Seeds behind modules of any network, by forward hooks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from esper.growth import (
    HookedSlot,
    Mode,
    attach_slots,
    detach_slots,
    find_hooked_slots,
    take_seed_weights,
    without_seeds,
)
from esper.lifecycle import Blend
from tests.grow.fixtures_networks import ResNet, TextNet, images, tokens

CPU = torch.device("cpu")


def hooked(model: nn.Module, name: str, channels: int, topology: str = "cnn") -> HookedSlot:
    slot = HookedSlot(name, topology=topology, channels=channels)
    attach_slots(model, [slot])
    return slot


def train_once(model: nn.Module) -> torch.Tensor:
    """Output of a training pass with dropout; leaves the gradients."""
    torch.manual_seed(3)
    x, y = images()
    out = model.train()(x)
    F.cross_entropy(out, y).backward()
    return out


@pytest.mark.parametrize("name", ["layer1", "layer3"])
@pytest.mark.parametrize("blend", list(Blend))
@pytest.mark.parametrize("is_finite", [True, False])
def test_an_isolated_seed_leaves_values_gradients_and_statistics_bit_equal(
    name: str, blend: Blend, is_finite: bool
) -> None:
    torch.manual_seed(0)
    bare = ResNet()
    grown = copy.deepcopy(bare)
    slot = hooked(grown, name, 8 if name == "layer1" else 16)
    seed = slot.graft("conv_light", blend, rng_seed=1, device=CPU)
    slot.set(Mode.ISOLATED, 1.0)
    if not is_finite:
        next(iter(seed.parameters())).data.fill_(torch.nan)
    outputs = train_once(bare), train_once(grown)
    assert torch.equal(*outputs)
    others = dict(grown.named_parameters())
    for key, parameter in bare.named_parameters():
        assert torch.equal(parameter.grad, others[key].grad), key  # type: ignore[arg-type]
    buffers = dict(grown.named_buffers())
    assert all(torch.equal(value, buffers[key]) for key, value in bare.named_buffers())
    assert all(parameter.grad is not None for parameter in seed.parameters())
    if is_finite:
        assert any(parameter.grad.abs().sum() > 0 for parameter in seed.parameters())  # type: ignore[union-attr]


def test_a_new_seed_that_is_blended_in_is_the_identity_and_gets_a_gradient() -> None:
    torch.manual_seed(0)
    model = ResNet()
    expected = train_once(copy.deepcopy(model))
    slot = hooked(model, "layer2", 16)
    seed = slot.graft("depthwise", Blend.ADD, rng_seed=1, device=CPU)
    slot.set(Mode.BLENDED, 1.0)
    torch.testing.assert_close(train_once(model), expected)
    assert any(parameter.grad.abs().sum() > 0 for parameter in seed.parameters())  # type: ignore[union-attr]


def test_a_fading_seed_is_frozen_and_the_network_before_it_trains() -> None:
    model = ResNet()
    slot = hooked(model, "layer2", 16)
    seed = slot.graft("depthwise", Blend.ADD, rng_seed=1, device=CPU)
    slot.set(Mode.FADING, 0.5)
    train_once(model)
    assert all(parameter.grad is None for parameter in seed.parameters())
    assert model.stem.weight.grad is not None


@pytest.mark.parametrize("kind", ["tensor", "tuple", "named", "dataclass"])
def test_the_features_in_any_form_of_output_pass_the_seed(kind: str) -> None:
    torch.manual_seed(0)
    model = TextNet(kind)
    before = model(tokens())
    slot = hooked(model, "h.1", 8, "transformer")
    seed = slot.graft("mlp_small", Blend.ADD, rng_seed=1, device=CPU)
    slot.set(Mode.BLENDED, 1.0)
    nn.init.ones_(seed.body.branch[-1].bias)  # type: ignore[union-attr,index,operator]
    assert not torch.allclose(model(tokens()), before)
    with without_seeds(model):
        assert torch.equal(model(tokens()), before)


def test_a_seed_is_switched_off_for_a_moment_and_alone() -> None:
    model = ResNet().eval()
    slots = [HookedSlot("layer1", topology="cnn", channels=8), HookedSlot("layer2", topology="cnn", channels=16)]
    attach_slots(model, slots)
    for slot in slots:
        slot.graft("conv_small", Blend.ADD, rng_seed=1, device=CPU)
        slot.set(Mode.BLENDED, 1.0)
    with without_seeds(model, ["layer1"]):
        assert [slot.alpha.item() for slot in slots] == [0.0, 1.0]
    assert [slot.alpha.item() for slot in slots] == [1.0, 1.0]


def test_seeds_move_save_and_switch_modes_with_the_network() -> None:
    model = ResNet()
    slot = hooked(model, "layer1", 8)
    slot.graft("conv_small", Blend.ADD, rng_seed=1, device=CPU)
    names = {name for name in model.state_dict() if "seed" in name}
    assert names
    assert all(name.startswith("esper_slots.layer1.seed.") for name in names)
    model.double().eval()
    assert all(p.dtype == torch.float64 for p in model.parameters())
    assert not slot.seed.training  # type: ignore[union-attr]
    twin = copy.deepcopy(model)
    assert find_hooked_slots(twin)["layer1"] is not slot
    find_hooked_slots(twin)["layer1"].remove()
    assert slot.seed is not None
    assert torch.equal(twin(images()[0].double()), twin(images()[0].double()))


def test_a_network_without_slots_is_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    before = list(model.state_dict()), [name for name, _ in model.named_modules()]
    slot = hooked(model, "0", 4)
    slot.graft("conv_small", Blend.ADD, rng_seed=1, device=CPU)
    model(images()[0])  # a Sequential does not run the slots as a layer
    detach_slots(model)
    assert before == (list(model.state_dict()), [name for name, _ in model.named_modules()])


def test_an_output_that_changes_is_refused_in_one_sentence() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    slot = hooked(model, "0", 5)
    slot.graft("conv_small", Blend.ADD, rng_seed=1, device=CPU)
    with pytest.raises(ValueError, match=r"slot=0: the output must have 5 channels .* but is \[8, 4, 6, 6\]"):
        model(images()[0])


def test_the_weights_of_seeds_are_taken_out_of_a_state_and_loaded_later() -> None:
    model, fresh = ResNet(), ResNet()
    for each in (model, fresh):
        hooked(each, "layer1", 8)
    find_hooked_slots(model)["layer1"].graft("conv_small", Blend.ADD, rng_seed=1, device=CPU)
    state = model.state_dict()
    seeds = take_seed_weights(state)
    fresh.load_state_dict(state)
    find_hooked_slots(fresh)["layer1"].graft("conv_small", Blend.ADD, rng_seed=2, device=CPU)
    assert not fresh.load_state_dict(seeds, strict=False).unexpected_keys
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in model.state_dict().items())
