"""A new seed of every blueprint and blend changes no output and has a non-zero gradient."""

import subprocess
import sys

import pytest
import torch

from esper.blueprints import blueprints
from esper.growth import Mode, SeedSetting
from esper.lifecycle import Blend
from tests.growth.fixtures_hosts import CASES, ISOLATED, MIDDLE, all_equal, backward, batch, host_gradients, loss, model

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
