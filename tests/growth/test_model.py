import pytest
import torch

from esper.growth import GrowingHost, Mode, SeedSetting, seed_settings
from esper.lifecycle import Blend, Slots, Stage
from tests.growth.fixtures_hosts import (
    FULL,
    ISOLATED,
    MIDDLE,
    all_equal,
    backward,
    batch,
    fill_with_nan,
    host_gradients,
    loss,
    model,
    optimizer,
)

TOPOLOGIES = {"cnn": (8, "conv_light"), "transformer": (64, "mlp_small")}
each_topology = pytest.mark.parametrize("topology", TOPOLOGIES)
each_blend = pytest.mark.parametrize("blend", Blend)


def grown(topology: str, blend: Blend = Blend.ADD, *, coadapt: bool = True, trained: bool = True) -> GrowingHost:
    """A host with one seed in its first slot; `trained` changes its weights, so that it is not the identity."""
    channels, blueprint = TOPOLOGIES[topology]
    growing = model(topology, channels, coadapt=coadapt)
    seed = growing.graft(MIDDLE[topology], blueprint, blend, rng_seed=1)
    if trained:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in seed.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return growing


@each_topology
@each_blend
def test_a_non_finite_isolated_seed_leaves_the_training_of_the_host_bit_equal(topology: str, blend: Blend) -> None:
    runs = []
    for with_seed in (False, True):
        growing = grown(topology, blend)
        if not with_seed:
            growing.remove(MIDDLE[topology])
        trainer = optimizer(growing)
        for index in range(4):
            backward(growing, {MIDDLE[topology]: ISOLATED}, index)
            trainer.step(0.0)
            if with_seed and index == 1:
                fill_with_nan(growing.seed(MIDDLE[topology]))
        runs.append(growing.host.state_dict())
    assert all_equal(*runs)


@each_topology
@each_blend
def test_an_isolated_seed_trains_as_if_it_were_blended(topology: str, blend: Blend) -> None:
    """Its loss and gradient are those of the network with the seed blended in at its target alpha."""
    slot, results = MIDDLE[topology], []
    for mode in (Mode.ISOLATED, Mode.BLENDED):
        growing = grown(topology, blend)
        losses = backward(growing, {slot: SeedSetting(mode, 0.7)})
        gradients = {name: parameter.grad for name, parameter in growing.seed(slot).named_parameters()}
        results.append({**gradients, "loss": losses[slot if mode is Mode.ISOLATED else "host"]})
    assert all_equal(*results)


def test_isolated_seeds_do_not_affect_each_other() -> None:
    gradients = []
    for other in (False, True):
        growing = grown("cnn")
        settings = {"block1": ISOLATED}
        if other:
            growing.graft("block2", "conv_light", Blend.ADD, rng_seed=2)
            settings["block2"] = ISOLATED
        losses = backward(growing, settings)
        assert set(losses) == {"host", *settings}
        gradients.append({name: p.grad for name, p in growing.seed("block1").named_parameters()})
    assert all_equal(*gradients)


def test_an_isolated_seed_leaves_the_hosts_dropout_bit_equal() -> None:
    runs = []
    for with_seed in (False, True):
        growing = model("transformer", 64, dropout=0.2)
        growing.host.use_generator(torch.Generator().manual_seed(3))
        if with_seed:
            growing.graft("segment1", "mlp_small", Blend.ADD, rng_seed=1)
        losses = [backward(growing, {"segment1": ISOLATED}, index)["host"] for index in range(3)]
        runs.append({**host_gradients(growing), "losses": torch.stack(losses)})
    assert all_equal(*runs)


@each_topology
def test_an_isolated_seed_does_not_change_the_output(topology: str) -> None:
    growing = grown(topology).eval()
    fill_with_nan(growing.seed(MIDDLE[topology]))
    x, _ = batch(topology)
    with torch.no_grad():
        assert torch.equal(growing(x, {MIDDLE[topology]: ISOLATED}), growing(x, {}))


@each_topology
@each_blend
def test_a_trained_seed_changes_the_output_once_it_is_blended(topology: str, blend: Blend) -> None:
    growing = grown(topology, blend).eval()
    x, _ = batch(topology)
    outputs = [growing(x, {MIDDLE[topology]: SeedSetting(Mode.BLENDED, alpha)}) for alpha in (0.0, 0.5, 1.0)]
    assert torch.equal(outputs[0], growing(x, {}))
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


def test_add_is_a_cross_fade_and_multiply_is_bounded() -> None:
    x, _ = batch("cnn")
    adding, multiplying = grown("cnn", Blend.ADD).eval(), grown("cnn", Blend.MULTIPLY).eval()
    h = adding(x, {}, stop="block1")
    assert torch.equal(adding.seed("block1")(h, 1.0), adding.seed("block1").body(h))
    with torch.no_grad():
        multiplying.seed("block1").body.branch[-1].weight *= 1e3
    seed = multiplying.seed("block1")
    assert (seed(h, 0.5) <= 1.5 * h).all()
    assert (seed(h, 0.5) >= 0.5 * h).all()


@each_blend
def test_a_blended_transformer_seed_is_causal(blend: Blend) -> None:
    growing = grown("transformer", blend).eval()
    x, _ = batch("transformer")
    changed = x.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 40
    one, other = (growing(tokens, {"segment1": FULL}) for tokens in (x, changed))
    assert torch.equal(one[:, :6], other[:, :6])


@each_topology
@each_blend
@pytest.mark.parametrize("coadapt", [True, False])
def test_a_fading_seed_is_frozen_and_the_host_gradient_unchanged(topology: str, blend: Blend, coadapt: bool) -> None:
    slot = MIDDLE[topology]
    gradients = {}
    for mode in (Mode.BLENDED, Mode.FADING):
        growing = grown(topology, blend, coadapt=coadapt)
        gradients[mode] = {**backward(growing, {slot: SeedSetting(mode, 0.6)}), **host_gradients(growing)}
        trained = [p.grad is not None for p in growing.seed(slot).parameters()]
        assert all(trained) if mode is Mode.BLENDED else not any(trained)
    assert all_equal(gradients[Mode.BLENDED], gradients[Mode.FADING])
    first = next(iter(growing.host.parameters()))
    assert first.grad is not None
    assert first.grad.abs().sum() > 0


@each_blend
def test_without_coadaptation_the_earlier_layers_get_the_gradient_at_the_slot(blend: Blend) -> None:
    """They train as if the seed were absent."""
    growing = grown("cnn", blend, coadapt=False)
    x, y = batch("cnn")
    h = growing(x, {}, stop="block1").detach().requires_grad_()
    at_slot = growing.seed("block1")(h.detach(), 0.8).detach().requires_grad_()
    loss(growing.host.run(at_slot, start="block1"), y).backward()
    loss(growing(h, {"block1": SeedSetting(Mode.BLENDED, 0.8)}, start="block1"), y).backward()
    assert torch.equal(h.grad, at_slot.grad)


def test_with_coadaptation_the_gradient_of_earlier_layers_passes_through_the_seed() -> None:
    gradients = []
    for coadapt in (True, False):
        growing = grown("cnn", coadapt=coadapt)
        backward(growing, {"block1": FULL})
        gradients.append(growing.host.segments[0][1].weight.grad)
    assert not torch.allclose(*gradients)


@each_topology
def test_a_run_resumed_from_a_slot_equals_a_full_run(topology: str) -> None:
    growing = grown(topology).eval()
    first, last = (slot.name for slot in growing.host.slots)
    growing.graft(last, TOPOLOGIES[topology][1], Blend.ADD, rng_seed=2)
    on = {first: FULL, last: FULL}
    x, _ = batch(topology)
    at_first, at_last = growing(x, on, stop=first), growing(x, on, stop=last)
    for switched in (on, {first: FULL}, {last: FULL}, {}):
        assert torch.equal(growing(at_first, switched, start=first), growing(x, switched))
    assert torch.equal(growing(at_last, {first: FULL}, start=last), growing(x, {first: FULL}))
    assert torch.equal(growing(at_first, on, start=first, stop=last), at_last)


@each_topology
@each_blend
def test_a_seed_trained_in_isolation_lowers_the_loss_once_it_is_blended(topology: str, blend: Blend) -> None:
    growing, slot = grown(topology, blend, trained=False), MIDDLE[topology]
    trainer = optimizer(growing, {"cnn": "sgd", "transformer": "adamw"}[topology])
    x, y = batch(topology)
    for parameter in growing.host.parameters():
        parameter.requires_grad_(False)
    before = loss(growing(x, {}), y).item()
    for _ in range(60):
        backward(growing, {slot: ISOLATED})
        trainer.step(0.0)
    assert loss(growing(x, {}), y).item() == before
    assert loss(growing(x, {slot: FULL}), y).item() < before - 0.25


def test_the_weights_of_a_seed_depend_on_its_random_seed_only() -> None:
    bodies = []
    for rng_seed, global_seed in ((7, 0), (7, 1), (8, 0)):
        torch.manual_seed(global_seed)
        growing = model("cnn", 8)
        torch.manual_seed(global_seed)
        state = torch.get_rng_state()
        bodies.append(growing.graft("block1", "conv_heavy", Blend.GATED, rng_seed=rng_seed).state_dict())
        assert torch.equal(state, torch.get_rng_state())
    assert all_equal(bodies[0], bodies[1])
    assert not all_equal(bodies[0], bodies[2])


def test_grafting_into_an_occupied_slot_or_with_an_unknown_blueprint_is_refused() -> None:
    growing = grown("cnn")
    with pytest.raises(ValueError, match="slot=block1: must be empty, but has a seed"):
        growing.graft("block1", "norm", Blend.ADD, rng_seed=0)
    with pytest.raises(ValueError, match="blueprint=lora: is unknown among cnn blueprints"):
        growing.graft("block2", "lora", Blend.ADD, rng_seed=0)
    with pytest.raises(ValueError, match="slot=block9: CNNHost has no such slot; it has block1, block2"):
        growing.graft("block9", "norm", Blend.ADD, rng_seed=0)
    with pytest.raises(ValueError, match="slot=block2: must have a seed, but is empty"):
        growing.remove("block2")
    assert list(growing.seeds) == ["block1"]


def test_settings_follow_from_the_stage_of_each_slot() -> None:
    stages = list(Stage)
    slots = Slots.empty(2, len(stages) + 1)
    stage = torch.tensor([[*stages, Stage.BLENDING]] * 2)
    alpha = torch.tensor([[0, 0, 0, 0.25, 1, 1, 0, 0.75]] * 2)
    target = torch.tensor([[0, 0.5, 0.5, 1, 1, 1, 0, 0]] * 2)
    everywhere = torch.ones(2, 8, dtype=torch.bool)
    slots = slots.where(everywhere, stage=stage, alpha=alpha, alpha_target=target)
    names = tuple("abcdefgh")
    assert seed_settings(slots, 1, names) == {
        "c": SeedSetting(Mode.ISOLATED, 0.5),
        "d": SeedSetting(Mode.BLENDED, 0.25),
        "e": SeedSetting(Mode.BLENDED, 1.0),
        "f": SeedSetting(Mode.BLENDED, 1.0),
        "h": SeedSetting(Mode.FADING, 0.75),
    }


def test_a_blueprint_that_changes_the_shape_is_refused() -> None:
    growing = grown("cnn")
    growing.seed("block1").body = torch.nn.AvgPool2d(2)
    x, _ = batch("cnn")
    with pytest.raises(ValueError, match=r"must return features of shape \[8, 8, 16, 16\], not \[8, 8, 8, 8\]"):
        growing(x, {"block1": FULL})


@each_topology
def test_training_a_growing_host_runs_on_the_meta_device(topology: str) -> None:
    """A hidden CPU tensor or a read of a value would raise there."""
    growing = grown(topology).to("meta")
    growing.graft(growing.host.slots[1].name, TOPOLOGIES[topology][1], Blend.GATED, rng_seed=1)
    trainer = optimizer(
        growing, {"cnn": "sgd", "transformer": "adamw"}[topology], fused=False
    )  # meta has no fused kernel
    x, y = (part.to("meta") for part in batch(topology))
    settings = {MIDDLE[topology]: SeedSetting(Mode.FADING, 0.5), growing.host.slots[1].name: ISOLATED}
    for _ in range(2):
        host_loss, isolated = growing.losses(x, settings, lambda output: loss(output, y))
        (host_loss + sum(isolated.values())).backward()
        norms = trainer.step(0.0)
    assert {norm.device.type for norm in norms.values()} == {"meta"}


@pytest.mark.parametrize("mode", Mode)
@each_topology
@each_blend
def test_growth_runs_in_mixed_precision(topology: str, blend: Blend, mode: Mode) -> None:
    growing = grown(topology, blend)
    with torch.autocast("cpu", torch.bfloat16):
        losses = backward(growing, {MIDDLE[topology]: SeedSetting(mode, 0.5)})
    assert all(loss.isfinite() for loss in losses.values())
    assert all(gradient.isfinite().all() for gradient in host_gradients(growing).values())
