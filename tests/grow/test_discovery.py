"""Where a network can grow."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import esper
from tests.grow.fixtures_networks import ResNet, TextNet, images, tokens


@pytest.mark.parametrize(
    ("slots", "exclude", "found"),
    [
        ("auto", (), ["layer1", "layer2", "layer3"]),
        ("auto", ["layer2"], ["layer1", "layer3"]),
        (["layer3", "layer1"], (), ["layer1", "layer3"]),
        (["layer1.0"], (), ["layer1.0"]),
        (["conv"], ["layer2.1.conv"], ["layer1.0.conv", "layer1.1.conv", "layer2.0.conv", "layer3.conv"]),
        (r"layer\d", r".*3", ["layer1", "layer2"]),
        (r"layer1|head", (), ["layer1"]),  # a regular expression passes over what cannot be a slot
        (r".*\.conv", ["layer1.0.conv", "layer2.0.conv"], ["layer1.1.conv", "layer2.1.conv", "layer3.conv"]),
    ],
)
def test_slots_are_named_as_the_modules_of_peft(slots: Any, exclude: Any, found: list[str]) -> None:
    assert list(esper.slots(ResNet(), images(), slots=slots, exclude=exclude).names) == found


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (["layer4"], r"slots: 'layer4' matches no module; the nearest are layer\d, layer\d, layer\d"),
        ("layr1", "slots='layr1': matches no module; the nearest are layer1"),
        ("layer(", "must be a regular expression or a list of names"),
        (["head"], r"slots: head has an output of the shape \[8, 4\]; it must be \[batch, channels, height, width\]"),
        (["act"], "slots: act runs 3 times in one forward pass; it must run once"),
        (["yer1"], "matches no module"),  # an end must begin at a dot
    ],
)
def test_what_cannot_be_a_slot_is_refused_in_one_sentence(slots: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        esper.slots(ResNet(), images(), slots=slots)


def test_a_module_that_does_not_run_is_refused() -> None:
    model = ResNet()
    model.spare = nn.Conv2d(3, 3, 1)
    with pytest.raises(ValueError, match="spare does not run in a forward pass of the example"):
        esper.slots(model, images(), slots=["spare"])


def test_the_table_prints_what_a_user_chooses_by() -> None:
    table = esper.slots(ResNet(), images())
    lines = str(table).splitlines()
    assert lines[0].split() == ["slot", "output", "topology", "channels", "cost", "blueprints"]
    assert lines[1].split()[:1] == ["layer1"]
    assert "8 x 8 x 8 x 8" in lines[1]
    assert "depthwise" in lines[1]
    assert [slot.channels for slot in table] == [8, 16, 16]
    assert 0.9 < sum(slot.cost for slot in table) <= 1


def test_flops_are_those_that_torch_counts() -> None:
    model = ResNet().eval()
    counter = FlopCounterMode(display=False)
    with counter:
        F.cross_entropy(model(images()[0]).clone(), images()[1])
    trace = esper.slots(model, images()).trace
    assert trace.forward * 8 == counter.get_total_flops()
    assert 1.5 * trace.forward < trace.backward < 2.5 * trace.forward
    assert (trace.batch, trace.positions, trace.options) == (8, 64, 4)


def test_the_flops_of_attention_are_counted_on_every_device() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    trace = esper.slots(Attention(), torch.randn(2, 16, 8)).trace
    assert trace.forward == 2 * 16 * 8 * 8 + 2 * (2 * 16 * 16 * 8)


def test_nothing_of_the_network_changes() -> None:
    model = ResNet().train()
    model.layer1.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    esper.slots(model, images())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert not model.layer1.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_texts_get_blueprints_that_mix_positions_only_if_the_model_is_causal() -> None:
    model = TextNet()
    names = esper.slots(model, tokens())[0].blueprints
    assert "mlp_small" in names
    assert not {"attention", "window"} & set(names)
    assert {"attention", "window"} <= set(esper.slots(model, tokens(), causal=True)[0].blueprints)
    assert esper.slots(model, tokens(), blueprints=["window"])[0].blueprints == ("window",)


def test_blueprints_that_do_not_fit_the_channels_are_left_out() -> None:
    table = esper.slots(TextNet(channels=6), tokens(), causal=True)
    assert "attention" not in table[0].blueprints  # its four heads do not divide six channels


def test_a_network_without_stages_grows_after_the_last_layer_of_each_shape() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, 1, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    )
    assert esper.slots(model, images()).names == ("1", "3")
    with pytest.raises(ValueError, match="slots=auto: no module has an output"):
        esper.slots(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), images())


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = TextNet()

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(ids)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}  # type: ignore[union-attr]


def test_an_example_may_be_a_tensor_a_tuple_or_a_mapping() -> None:
    assert esper.slots(ResNet(), images()[0]).trace.batch == 8
    table = esper.slots(Keywords(), {"ids": tokens(), "labels": tokens()})
    assert table.names == ("net.h.0", "net.h.1", "net.h.2")
    assert table.trace.options == 11
    with pytest.raises(ValueError, match="must be a batch whose first tensor is the input"):
        esper.slots(ResNet(), {"ids": None})


def test_images_and_texts_do_not_grow_together() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.layer = nn.Conv2d(3, 4, 1), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.conv(x).flatten(2).mT)

    with pytest.raises(ValueError, match="must all have images or all have texts, not both"):
        esper.slots(Both(), images(), slots=["conv", "layer"])
