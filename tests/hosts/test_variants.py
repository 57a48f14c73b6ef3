from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.flops import Flops
from esper.hosts import (
    VARIANTS,
    CNNHost,
    GPTHost,
    Host,
    Slot,
    count_parameters,
    parse_variant,
    variant_arguments,
)

CNN: dict[str, Any] = {
    "blocks": 3, "channels": 4, "kernel": 3, "pools": 3, "pool_slots": True, "resolution": 16, "classes": 10,
}  # fmt: skip
GPT: dict[str, Any] = {
    "vocabulary": 40, "channels": 20, "heads": 5, "layers": 2, "segments": 2, "block_size": 8, "dropout": 0.0,
}  # fmt: skip
HOSTS = {"cnn": (CNNHost, CNN, (3, 16, 16)), "transformer": (GPTHost, GPT, (8,))}


def example(topology: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(2, 3, 16, 16, generator=generator)
        if topology == "cnn"
        else torch.randint(40, (2, 8), generator=generator)
    )


def build_variant(topology: str, name: str) -> Host:
    kind, arguments, _ = HOSTS[topology]
    changed = variant_arguments(kind, arguments, name)
    assert changed is not None
    return kind(**changed)


def forward_flops(host: Host, shape: tuple[int, ...]) -> int:
    return sum(host.flops(shape) or [], Flops()).forward


@pytest.mark.parametrize("name", [*VARIANTS, "deep2", "wide1.25_deep1"])
@pytest.mark.parametrize("topology", HOSTS)
def test_a_variant_runs_costs_more_and_has_the_slots_of_the_host(topology: str, name: str) -> None:
    kind, arguments, shape = HOSTS[topology]
    plain, variant, x = kind(**arguments), build_variant(topology, name), example(topology)
    assert variant(x).shape == plain(x).shape
    assert variant(x).isfinite().all()
    assert [slot.name for slot in variant.slots] == [slot.name for slot in plain.slots]
    assert count_parameters(variant) > count_parameters(plain)
    assert forward_flops(variant, shape) > forward_flops(plain, shape)
    for slot in variant.slots:
        assert torch.equal(variant.run(variant.run(x, stop=slot.name), start=slot.name), variant(x))


def test_a_wide_cnn_has_more_channels_in_every_block() -> None:
    assert [slot.channels for slot in build_variant("cnn", "wide1.5").slots] == [6, 6, 12, 12, 24, 24]
    assert build_variant("cnn", "wide3").slots[0] == Slot("block1", 12)


def test_a_deep_cnn_has_blocks_of_the_last_width_between_the_last_slot_and_its_pool() -> None:
    host = build_variant("cnn", "deep2")
    assert [slot.channels for slot in host.slots] == [4, 4, 8, 8, 16, 16]
    kinds = [type(layer) for layer in host.segments[5].children()]  # from block3 to pool3
    assert kinds == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU] * 2 + [nn.MaxPool2d]
    deeper = variant_arguments(CNNHost, {**CNN, "extra_blocks": 2}, "deep1")
    assert deeper == {**CNN, "extra_blocks": 3}


def test_arguments_that_state_their_defaults_change_no_weights() -> None:
    torch.manual_seed(0)
    plain = CNNHost(**CNN).state_dict()
    torch.manual_seed(0)
    stated = CNNHost(**CNN, extra_blocks=0, norm=True, activation="relu", mixing=True, waist=None).state_dict()
    assert plain.keys() == stated.keys()
    assert all(torch.equal(plain[name], stated[name]) for name in plain)


LACKING: list[tuple[type[Host], dict[str, Any]]] = [
    (CNNHost, {"norm": False, "activation": "sigmoid"}),
    (CNNHost, {"activation": "none"}),
    (CNNHost, {"mixing": False}),
    (CNNHost, {"waist": 3}),
    (GPTHost, {"mlp": False}),
    (GPTHost, {"norm": False}),
]


@pytest.mark.parametrize("name", ["wide1.5", "deep2", "wide1.25_deep1"])
@pytest.mark.parametrize(("kind", "changes"), LACKING, ids=str)
def test_a_variant_lacks_what_its_host_lacks(kind: type[Host], changes: dict[str, Any], name: str) -> None:
    _, arguments, shape = HOSTS[kind.topology]
    lacking = {**arguments, **changes}
    changed = variant_arguments(kind, lacking, name)
    assert changed is not None
    assert {key: changed[key] for key in changes if key != "waist"} == {
        k: v for k, v in changes.items() if k != "waist"
    }
    variant = kind(**changed)
    assert variant(example(kind.topology)).isfinite().all()
    assert forward_flops(variant, shape) > forward_flops(kind(**lacking), shape)


@pytest.mark.parametrize(
    ("channels", "waist", "name", "expected"),
    [(4, 3, "wide2", 6), (4, 2, "deep1", 2), (1, 2, "wide1.25_deep1", 2)],  # no wider than its block, which stays at 2
)
def test_the_waist_of_a_wide_cnn_is_wider(channels: int, waist: int, name: str, expected: int) -> None:
    changed = variant_arguments(CNNHost, {**CNN, "channels": channels, "waist": waist}, name)
    assert changed is not None
    assert changed["waist"] == expected
    assert CNNHost(**changed)(example("cnn")).isfinite().all()


@pytest.mark.parametrize(("channels", "heads", "name", "expected"), [
    (20, 5, "wide1.5", 40), (80, 5, "wide1.5", 120), (48, 0, "wide1.5", 72), (6, 3, "wide1.5", 12), (7, 7, "wide3", 21),
])  # fmt: skip
def test_the_heads_of_a_gpt_and_of_its_seeds_divide_the_channels_of_a_wide_one(
    channels: int, heads: int, name: str, expected: int
) -> None:
    changed = variant_arguments(GPTHost, {**GPT, "channels": channels, "heads": heads}, name)
    assert changed is not None
    assert (changed["channels"], changed["heads"]) == (expected, heads)


def test_a_deep_gpt_has_a_further_layer_in_every_segment() -> None:
    assert variant_arguments(GPTHost, GPT, "deep1") == {**GPT, "layers": 4}
    each = variant_arguments(GPTHost, {**GPT, "layers": 3, "segments": None}, "deep1")
    assert each == {**GPT, "layers": 6, "segments": 3}, "the slots stay where they are"


def test_a_width_that_changes_nothing_is_no_variant() -> None:
    assert variant_arguments(CNNHost, {**CNN, "channels": 1}, "wide1.5") is not None
    assert variant_arguments(CNNHost, {**CNN, "channels": 1}, "wide1.25") is None


def test_a_host_of_a_user_has_no_variants_unless_it_states_them() -> None:
    class Own(Host):
        def __init__(self, *, width: int) -> None:
            super().__init__([nn.Linear(2, width), nn.Linear(width, 2)], [Slot("middle", width)])

    class OwnConstructor(CNNHost):
        def __init__(self, *, channels: int) -> None:
            super().__init__(**{**CNN, "channels": channels})

    class SameConstructor(CNNHost):
        topology = "other"

    class Stated(Own):
        @classmethod
        def variant_arguments(cls, arguments: Any, *, width: float, depth: int) -> dict[str, Any]:
            return {"width": int(arguments["width"] * width)}

    assert variant_arguments(Own, {"width": 2}, "wide2") is None
    assert variant_arguments(OwnConstructor, {"channels": 2}, "wide2") is None
    assert variant_arguments(SameConstructor, CNN, "wide2") == {**CNN, "channels": 8, "extra_blocks": 0}
    assert variant_arguments(Stated, {"width": 2}, "wide2") == {"width": 4}
    assert variant_arguments(Stated, {"width": 2}, "deep1") is None


def test_the_name_of_a_variant_has_factor_and_number() -> None:
    assert parse_variant("wide1.5") == (1.5, 0)
    assert parse_variant("deep2") == (1.0, 2)
    assert parse_variant("wide2_deep1") == (2.0, 1)


@pytest.mark.parametrize("name", ["", "wide", "wide0.5", "wide1", "deep0", "wide2deep1", "_deep1", "tall2", "wide2_"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^variant={name}: must be wideF with a factor above 1, deepN, or wideF_deep"):
        parse_variant(name)
