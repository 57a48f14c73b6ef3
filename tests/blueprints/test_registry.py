import runpy

import pytest
from torch import nn

from esper.blueprints import blueprint, blueprints, format_blueprints, register, topologies


def test_both_topologies_have_all_their_blueprints() -> None:
    assert topologies() == ("cnn", "transformer")
    assert set(blueprints("cnn")) == {
        "norm", "spatial", "attention", "depthwise", "bottleneck", "conv_small", "conv_light", "conv_heavy",
    }  # fmt: skip
    assert set(blueprints("transformer")) == {"norm", "lora", "lora_large", "attention", "mlp_small", "mlp", "window"}


@pytest.mark.parametrize(("topology", "sizes"), [("cnn", (4, 8, 16, 32, 64)), ("transformer", (64, 80, 384))])
def test_stated_parameter_counts_match_the_built_modules(topology: str, sizes: tuple[int, ...]) -> None:
    for entry in blueprints(topology).values():
        for channels in sizes:
            actual = sum(parameter.numel() for parameter in entry.build(channels).parameters())
            assert actual == entry.parameters(channels), (entry.name, channels)


@pytest.mark.parametrize(
    ("topology", "channels", "counts"),
    [
        (
            "cnn",
            8,
            {"norm": 17, "spatial": 72, "attention": 40, "depthwise": 152, "bottleneck": 720, "conv_heavy": 1184},
        ),
        ("cnn", 64, {"conv_small": 4224, "conv_light": 36992, "bottleneck": 4480, "attention": 2112}),
        (
            "transformer",
            384,
            {"norm": 769, "lora": 6144, "lora_large": 24576, "attention": 591360, "mlp": 1181568, "window": 738048},
        ),
    ],
)
def test_parameter_counts_have_not_changed(topology: str, channels: int, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        assert blueprint(topology, name).parameters(channels) == count


def test_a_name_registered_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="cnn blueprint norm is already registered; choose another name"):
        register("cnn", "norm", lambda c: 0, "again")(nn.Identity)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"blueprint=lora: is unknown among cnn blueprints; allowed are norm, attention"
    ):
        blueprint("cnn", "lora")
    with pytest.raises(ValueError, match="topology=rnn: is unknown; allowed are cnn, transformer"):
        blueprints("rnn")


def test_an_unknown_argument_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="transformer blueprint lora: argument width is unknown; allowed: rank"):
        blueprint("transformer", "lora").build(64, width=3)
    with pytest.raises(ValueError, match="cnn blueprint conv_light: argument kernel is unknown; allowed: none"):
        blueprint("cnn", "conv_light").build(8, kernel=5)
    assert blueprint("transformer", "lora").build(64, rank=2).branch[0].out_features == 2


def test_attention_refuses_heads_that_do_not_divide_the_channels() -> None:
    with pytest.raises(ValueError, match="heads=4 must divide channels=66"):
        blueprint("transformer", "attention").build(66)


def test_the_listing_shows_every_blueprint_with_its_counts_smallest_first() -> None:
    lines = format_blueprints("cnn", (8, 64)).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "norm", "spatial", "attention", "conv_small", "bottleneck", "depthwise", "conv_light", "conv_heavy",
    ]  # fmt: skip
    assert lines[-1].split()[1:3] == ["1,184", "73,984"]


def test_the_command_lists_both_topologies(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module("esper.blueprints", run_name="__main__")
    output = capsys.readouterr().out
    assert "conv_light" in output
    assert "1,181,568" in output
