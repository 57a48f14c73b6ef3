"""Every blueprint under every blend is harmless at birth and alive at birth."""

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
    alone = growing(x, {})
    features = growing(x, {}, stop=MIDDLE[topology])
    growing.graft(MIDDLE[topology], blueprint, blend, rng_seed=1)
    for alpha in (0.0, 0.3, 1.0):
        with_seed = {MIDDLE[topology]: SeedSetting(Mode.BLENDED, alpha)}
        assert torch.equal(growing(x, with_seed), alone)
        assert growing.seed(MIDDLE[topology])(features, alpha).shape == features.shape


@each_case
def test_a_new_seed_behind_the_host_has_a_sane_gradient(
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
def test_a_seed_behind_the_host_leaves_its_loss_and_gradients_bit_equal(
    topology: str, channels: int, blueprint: str, blend: Blend
) -> None:
    alone, grown = model(topology, channels), model(topology, channels)
    grown.graft(MIDDLE[topology], blueprint, blend, rng_seed=1)
    before = backward(alone, {})
    after = backward(grown, {MIDDLE[topology]: ISOLATED})
    assert torch.equal(before["host"], after["host"])
    assert torch.equal(before["host"], after[MIDDLE[topology]])  # it is the identity still
    assert all_equal(host_gradients(alone), host_gradients(grown))
    assert all_equal(dict(alone.host.named_buffers()), dict(grown.host.named_buffers()))


def test_no_blueprint_ends_the_process_when_it_trains_on_detached_channels_last_features() -> None:
    script = (
        "import torch; torch.set_num_threads(1)\n"
        "from esper.blueprints import blueprints\n"
        "for entry in blueprints('cnn').values():\n"
        "    for channels in (8, 16, 32, 64):\n"
        "        x = torch.randn(4, channels, 8, 8).contiguous(memory_format=torch.channels_last)\n"
        "        entry.build(channels).to(memory_format=torch.channels_last)(x).sum().backward()\n"
        "    print(entry.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, f"crashed after {done.stdout.split()[-1:]}: {done.stderr}"
    assert done.stdout.split() == list(blueprints("cnn"))
