from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.growth import GrowingHost, export, load_grown, widen_host, widened
from esper.hosts import CNNHost, GPTHost, Host, variant_arguments
from esper.lifecycle import Blend
from tests.growth.fixtures_hosts import FULL, backward, batch, loss, optimizer

CNN: dict[str, Any] = {
    "blocks": 3, "channels": 4, "kernel": 3, "pools": 2, "pool_slots": True, "resolution": 16, "classes": 10,
}  # fmt: skip
FACTORS = ["wide1.5", "wide1.25", "wide2", "wide3", "wide3.75"]
each_factor = pytest.mark.parametrize("name", FACTORS)


def trained(**changes: Any) -> CNNHost:
    """A host whose weights, norms and running statistics differ from those of a new one."""
    torch.manual_seed(0)
    host = CNNHost(**{**CNN, **changes})
    growing = GrowingHost(host, coadapt=True).train()
    steps = optimizer(growing)
    for index in range(5):
        backward(growing, {}, index)
        steps.step(0.0)
    return host


def wider(narrow: Host, name: str, rng_seed: int = 1, **changes: Any) -> CNNHost:
    arguments = variant_arguments(CNNHost, {**CNN, **changes}, name)
    assert arguments is not None
    wide = CNNHost(**arguments).train(narrow.training)
    widen_host(narrow, wide, torch.Generator().manual_seed(rng_seed))
    return wide


def assert_same_function(narrow: Host, wide: Host) -> None:
    x, _ = batch("cnn", 9)
    for training in (False, True):
        torch.testing.assert_close(wide.train(training)(x), narrow.train(training)(x), rtol=1e-5, atol=1e-5)


@each_factor
@pytest.mark.parametrize("changes", [
    {}, {"extra_blocks": 2}, {"shrink": 2, "kernel": 1}, {"channels": 5, "norm": False, "activation": "sigmoid"},
    {"activation": "none"}, {"mixing": False, "extra_blocks": 1}, {"waist": 3},
], ids=str)  # fmt: skip
def test_a_widened_host_computes_the_same_function_in_training_and_evaluation(name: str, changes: dict) -> None:
    narrow = trained(**changes)
    before = {key: value.clone() for key, value in narrow.state_dict().items()}
    wide = wider(narrow, name, **changes)
    assert all(torch.equal(before[key], value) for key, value in narrow.state_dict().items())
    assert_same_function(narrow, wide)


def test_every_channel_is_copied_equally_often_and_keeps_its_norm_and_statistics() -> None:
    narrow = trained()
    wide = wider(narrow, "wide3")
    old, new = ([m for m in host.modules() if isinstance(m, nn.BatchNorm2d)] for host in (narrow, wide))
    for one, many in zip(old, new, strict=True):
        for key, value in one.state_dict().items():
            copies = many.state_dict()[key]
            assert (
                torch.equal(copies.sort()[0], value.repeat_interleave(3).sort()[0]) if value.ndim else copies == value
            )
        assert torch.equal(many.running_mean[: len(one.running_mean)], one.running_mean)


def copies(wide: Host) -> tuple[nn.Conv2d, list[tuple[int, int]]]:
    """The first convolution, and the pairs of its channels that are copies."""
    layer = next(module for module in wide.modules() if isinstance(module, nn.Conv2d))
    rows = layer.weight.flatten(1)
    pairs = [(i, j) for i in range(len(rows)) for j in range(i) if torch.equal(rows[i], rows[j])]
    return layer, pairs


def direction(values: Tensor) -> Tensor:
    return values.flatten() / values.norm()


def test_copies_get_different_gradients_in_size_and_direction_and_diverge_in_training() -> None:
    wide = wider(trained(), "wide2")
    layer, pairs = copies(wide)
    assert len(pairs) == 4
    growing = GrowingHost(wide, coadapt=True).train()
    backward(growing, {})
    assert layer.weight.grad is not None
    for one, other in pairs:
        gradients = direction(layer.weight.grad[one]), direction(layer.weight.grad[other])
        assert (gradients[0] - gradients[1]).norm() > 0.01
    growing.zero_grad()
    steps = optimizer(growing)
    for index in range(10):
        backward(growing, {}, index)
        steps.step(0.0)
    for one, other in pairs:
        assert (direction(layer.weight[one]) - direction(layer.weight[other])).norm() > 0.01
    assert loss(growing(batch("cnn")[0], {}), batch("cnn")[1]).isfinite()


def test_a_single_channel_can_be_widened_with_and_without_mixing() -> None:
    for mixing in (True, False):
        narrow = trained(channels=1, mixing=mixing)
        assert_same_function(narrow, wider(narrow, "wide2", channels=1, mixing=mixing))


def test_copies_that_do_not_mix_diverge_in_training() -> None:
    wide = wider(trained(mixing=False), "wide2", mixing=False)
    layer, pairs = copies(wide)
    assert len(pairs) == 4
    growing = GrowingHost(wide, coadapt=True).train()
    steps = optimizer(growing)
    for index in range(10):
        backward(growing, {}, index)
        steps.step(0.0)
    for one, other in pairs:
        assert (direction(layer.weight[one]) - direction(layer.weight[other])).norm() > 0.01


def test_shares_are_positive_sum_to_one_and_differ() -> None:
    narrow = trained()
    wide = wider(narrow, "wide2")
    old, new = (host.segments[-1][-1].weight for host in (narrow, wide))
    assert (new[:, :16].abs() < old.abs()).all()
    assert (new[:, :16] / old).std() > 0.05
    torch.testing.assert_close(new.sum(1), old.sum(1))


def test_widening_follows_from_its_generator_only() -> None:
    narrow = trained()
    state = torch.get_rng_state()
    one, same, other = (wider(narrow, "wide1.5", rng_seed).state_dict() for rng_seed in (1, 1, 2))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not all(torch.equal(one[key], other[key]) for key in one)
    torch.set_rng_state(state)
    wide = CNNHost(**{**CNN, "channels": 8})
    state = torch.get_rng_state()
    widen_host(narrow, wide, torch.Generator().manual_seed(1))
    assert torch.equal(state, torch.get_rng_state())


def test_a_host_can_be_widened_twice() -> None:
    narrow = trained()
    twice = wider(wider(narrow, "wide1.5"), "wide2", channels=6)
    assert twice.slots[0].channels == 12
    assert_same_function(narrow, twice)


@pytest.mark.parametrize("changes", [
    {"blocks": 2}, {"extra_blocks": 1}, {"kernel": 1}, {"pools": 1}, {"pool_slots": False}, {"shrink": 2},
    {"norm": False}, {"activation": "tanh"}, {"waist": 2},
])  # fmt: skip
def test_hosts_of_another_structure_are_refused(changes: dict[str, Any]) -> None:
    wide = CNNHost(**{**CNN, "channels": 8, **changes})
    with pytest.raises(ValueError, match=r"^widen: the wide host must have the class, the layers and the slots of"):
        widen_host(trained(), wide, torch.Generator())


def test_fewer_channels_and_other_outputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^widen: the wide host must have at least 4 channels in Conv2d\(3, 3, "):
        widen_host(trained(), CNNHost(**{**CNN, "channels": 3}), torch.Generator())
    with pytest.raises(ValueError, match=r"^widen: the wide host must have 10 outputs, not 12\.$"):
        widen_host(trained(), CNNHost(**{**CNN, "channels": 8, "classes": 12}), torch.Generator())


def test_a_gpt_is_refused_in_one_sentence() -> None:
    narrow, wide = (
        GPTHost(vocabulary=40, channels=c, heads=2, layers=2, segments=2, block_size=8, dropout=0.0) for c in (16, 32)
    )
    with pytest.raises(ValueError, match=r"^widen: GPTHost cannot be widened without changing its function; only CNN"):
        widen_host(narrow, wide, torch.Generator())


def test_a_grouped_convolution_is_refused() -> None:
    def grouped(channels: int) -> CNNHost:
        host = CNNHost(**{**CNN, "channels": channels})
        host.segments[1].append(nn.Conv2d(channels, channels, 3, padding=1, groups=2))
        return host

    with pytest.raises(ValueError, match=r"^widen: Conv2d\(4, .*groups=2\) cannot be widened to Conv2d\(8, .*; only "):
        widen_host(grouped(4), grouped(8), torch.Generator())
    mixing, unmixed = CNNHost(**CNN), CNNHost(**{**CNN, "channels": 8}, mixing=False)
    with pytest.raises(
        ValueError, match=r"^widen: Conv2d\(4, .* cannot be widened to Conv2d\(8, .*groups=8, bias=False\); o"
    ):
        widen_host(mixing, unmixed, torch.Generator())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("coadapt", [True, False])
def test_a_widened_model_keeps_mode_coadaptation_and_memory_format(coadapt: bool, training: bool) -> None:
    model = GrowingHost(trained(), coadapt=coadapt).train(training)
    wide = widened(model, CNNHost(**{**CNN, "channels": 8}), torch.Generator().manual_seed(1))
    assert (wide.coadapt, wide.training, wide.host.training) == (coadapt, training, training)
    assert not wide.seeds
    for module in wide.modules():
        if isinstance(module, nn.Conv2d):
            assert module.weight.is_contiguous(memory_format=torch.channels_last)
            assert module.weight.requires_grad
    assert_same_function(model.host, wide.host)
    wide.graft("block1", "conv_light", Blend.ADD, rng_seed=0)
    assert wide(batch("cnn")[0], {"block1": FULL}).shape == (8, 10)


def test_a_model_with_seeds_is_refused() -> None:
    model = GrowingHost(trained(), coadapt=True)
    model.graft("block2", "conv_light", Blend.ADD, rng_seed=0)
    with pytest.raises(ValueError, match=r"^widen: the host must have no seeds, but has some in block2\.$"):
        widened(model, CNNHost(**{**CNN, "channels": 8}), torch.Generator())


def test_a_widened_host_is_exported_with_the_arguments_of_its_variant(tmp_path: Path) -> None:
    model = GrowingHost(trained(), coadapt=True)
    arguments = variant_arguments(CNNHost, CNN, "wide1.5")
    assert arguments is not None
    wide = widened(model, CNNHost(**arguments), torch.Generator().manual_seed(1)).eval()
    host = {"target": "esper.hosts.CNNHost", "arguments": arguments}
    export(tmp_path / "wide.pt", wide, {}, host=host, about={})
    x, _ = batch("cnn")
    assert torch.equal(load_grown(tmp_path / "wide.pt")(x), wide(x, {}))
