"""A new seed of every blueprint and blend changes no output, unless its weights are random, and has a gradient."""

import subprocess
import sys

import pytest
import torch

from esper.blueprints import blueprints
from esper.config import load_preset
from esper.growth import GrowingHost, Mode, SeedSetting
from esper.lifecycle import Blend
from tests.growth.fixtures_hosts import (
    CASES,
    ISOLATED,
    MIDDLE,
    all_equal,
    backward,
    batch,
    host_gradients,
    loss,
    model,
    optimizer,
)

each_case = pytest.mark.parametrize(
    ("topology", "channels", "blueprint", "blend"), CASES, ids=lambda value: getattr(value, "name", str(value))
)


@each_case
def test_a_new_seed_changes_neither_output_nor_shape(
    topology: str, channels: int, blueprint: str, blend: Blend
) -> None:
    growing = model(topology, channels)
    x, _ = batch(topology)
    without_seed = growing(x, {})
    features = growing(x, {}, stop=MIDDLE[topology])
    growing.graft(MIDDLE[topology], blueprint, blend, rng_seed=1)
    for alpha in (0.0, 0.3, 1.0):
        with_seed = {MIDDLE[topology]: SeedSetting(Mode.BLENDED, alpha)}
        assert torch.equal(growing(x, with_seed), without_seed)
        assert growing.seed(MIDDLE[topology])(features, alpha).shape == features.shape


@each_case
def test_a_new_isolated_seed_has_a_gradient_of_normal_size(
    topology: str, channels: int, blueprint: str, blend: Blend
) -> None:
    growing = model(topology, channels)
    x, y = batch(topology)
    h = growing(x, {}, stop=MIDDLE[topology]).detach().requires_grad_()
    loss(growing(h, {}, start=MIDDLE[topology]), y).backward()
    seed = growing.graft(MIDDLE[topology], blueprint, blend, rng_seed=1)
    backward(growing, {MIDDLE[topology]: ISOLATED})
    total = torch.stack([p.grad.norm() for p in seed.parameters() if p.grad is not None]).norm()
    assert torch.isfinite(total)
    assert 1e-4 <= (total / h.grad.norm()).item() <= 1e2


@each_case
def test_an_isolated_seed_leaves_the_hosts_loss_and_gradients_bit_equal(
    topology: str, channels: int, blueprint: str, blend: Blend
) -> None:
    bare, grown = model(topology, channels), model(topology, channels)
    grown.graft(MIDDLE[topology], blueprint, blend, rng_seed=1)
    before = backward(bare, {})
    after = backward(grown, {MIDDLE[topology]: ISOLATED})
    assert torch.equal(before["host"], after["host"])
    assert torch.equal(before["host"], after[MIDDLE[topology]])  # a new seed is the identity
    assert all_equal(host_gradients(bare), host_gradients(grown))
    assert all_equal(dict(bare.host.named_buffers()), dict(grown.host.named_buffers()))


@each_case
def test_a_seed_with_random_weights_is_no_identity_and_differs_only_in_layers_of_zeros(
    topology: str, channels: int, blueprint: str, blend: Blend
) -> None:
    slot = MIDDLE[topology]
    identity, random, again = (model(topology, channels) for _ in range(3))
    zeros = identity.graft(slot, blueprint, blend, rng_seed=1).state_dict()
    new = random.graft(slot, blueprint, blend, rng_seed=1, init="random").state_dict()
    assert all_equal(new, again.graft(slot, blueprint, blend, rng_seed=1, init="random").state_dict())
    changed = {name for name in new if not torch.equal(new[name], zeros[name])}
    assert not any(zeros[name].any() for name in changed)
    assert all(new[name].any() for name in new if new[name].ndim > 1)
    losses = [backward(growing, {slot: SeedSetting(Mode.BLENDED, 1.0)})["host"] for growing in (identity, random)]
    assert torch.equal(*losses) == (blueprint == "norm") == (not changed)  # norm has no matrix: it is the identity
    gradients = [parameter.grad for parameter in random.seed(slot).parameters() if parameter.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.any() for gradient in gradients)


LACKING = [
    "cifar_linear", "cifar_saturated", "cifar_unnormalised", "cifar_unmixed", "cifar_waist", "tinystories_no_mlp",
    "tinystories_unnormalised",
]  # fmt: skip


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.name)
@pytest.mark.parametrize("preset", LACKING)
def test_every_blueprint_trains_in_a_host_that_lacks_something(preset: str, mode: Mode) -> None:
    sizes = {"resolution": 16} if preset.startswith("cifar") else {"vocabulary": 40, "block_size": 12}
    host = load_preset(f"host/{preset}", **sizes)
    names, places = list(blueprints(host.topology)), [slot.name for slot in host.slots]
    for first in range(0, len(names), len(places)):
        growing = GrowingHost(host, coadapt=True).train()
        for slot, blueprint in zip(places, names[first:], strict=False):
            growing.graft(slot, blueprint, Blend.ADD, rng_seed=0, init="random")
        steps = optimizer(growing, "sgd" if host.topology == "cnn" else "adamw")
        settings = {slot: SeedSetting(mode, 0.5) for slot in growing.seeds}
        for index in range(2):
            losses = backward(growing, settings, index)
            assert all(value.isfinite() for value in losses.values())
            steps.step(0.0)
        assert all(parameter.isfinite().all() for parameter in growing.parameters())


def test_random_weights_are_those_of_torch_and_leave_the_global_generator_alone() -> None:
    seed = model("cnn", 32).graft("block1", "conv_light", Blend.ADD, rng_seed=1, init="random")
    last = seed.body.branch[-1].weight
    assert last.abs().max() <= (32 * 9) ** -0.5  # the bound of torch's uniform distribution
    assert last.std().item() == pytest.approx((3 * 32 * 9) ** -0.5, rel=0.05)
    growing, state = model("cnn", 32), torch.get_rng_state()
    growing.graft("block1", "conv_light", Blend.ADD, rng_seed=1, init="random")
    assert torch.equal(state, torch.get_rng_state())


def test_no_blueprint_crashes_the_process_when_it_trains_on_detached_channels_last_features() -> None:
    script = (
        "import torch; torch.set_num_threads(1)\n"
        "from esper.blueprints import blueprints\n"
        "for entry in blueprints('cnn').values():\n"
        "    for channels in (8, 16, 32, 64):\n"
        "        x = torch.randn(4, channels, 8, 8).contiguous(memory_format=torch.channels_last)\n"
        "        entry.build(channels).to(memory_format=torch.channels_last)(x).sum().backward()\n"
        "    print(entry.name)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, f"crashed after {result.stdout.split()[-1:]}: {result.stderr}"
    assert result.stdout.split() == list(blueprints("cnn"))
