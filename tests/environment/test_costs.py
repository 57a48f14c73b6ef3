from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from esper.blueprints import Blueprint, registry
from esper.config import build_environment
from esper.controllers import NoGrowth
from esper.environment import Environment, EpisodeStart
from esper.environment.costs import HostCosts
from esper.environment.host_run import StepPlan
from esper.flops import Flops, linear_flops, symmetric_flops
from esper.growth import GrowingHost, Mode, SeedSetting, SeedSettings
from esper.growth.seed import GATE_HIDDEN
from esper.hosts import CNNHost, GPTHost, Host
from esper.lifecycle import Blend
from tests.fixtures_environment import environment, text_config
from tests.fixtures_flops import counter
from tests.lifecycle.fixtures_slots import act

SAMPLES = 2


@dataclass(frozen=True)
class HostCase:
    build: Callable[[], Host]
    batch: Tensor
    blueprint: str
    skipped_flops: Callable[[int, Blend], int]  # input gradient of a seed's first layers, which an isolated seed skips


def skipped_flops_images(channels: int, blend: Blend) -> int:
    """The convolution follows a normalisation, so only the first layer of a gate reads the features directly."""
    return linear_flops(channels, max(GATE_HIDDEN, channels // 4)).input_grad if blend is Blend.GATED else 0


def skipped_flops_texts(channels: int, blend: Blend) -> int:
    gate = linear_flops(channels, max(GATE_HIDDEN, channels // 4), 12).input_grad if blend is Blend.GATED else 0
    return linear_flops(channels, 2 * channels, 12).input_grad + gate


IMAGES = {"blocks": 3, "channels": 8, "kernel": 3, "pools": 3, "resolution": 16, "classes": 10}
TEXTS = {"vocabulary": 99, "channels": 16, "heads": 2, "layers": 3, "segments": 3, "block_size": 12}
HOSTS = {
    "images": HostCase(
        lambda: CNNHost(**IMAGES, pool_slots=False),
        torch.zeros(SAMPLES, 3, 16, 16),
        "conv_light",
        skipped_flops_images,
    ),
    "texts": HostCase(
        lambda: GPTHost(**TEXTS, dropout=0.0),
        torch.zeros(SAMPLES, 12, dtype=torch.long),
        "mlp_small",
        skipped_flops_texts,
    ),
}


def grow_all_slots(
    case: HostCase, blend: Blend, coadapt: bool = True
) -> tuple[GrowingHost, HostCosts, dict[str, Flops]]:
    """A host with a seed in each of its three slots, and their costs."""
    growing, costs = GrowingHost(case.build(), coadapt=coadapt), HostCosts(case.build, case.batch[:1])
    for slot in costs.slots:
        growing.graft(slot, case.blueprint, blend, rng_seed=0)
    return growing, costs, {slot: costs.seed(slot, case.blueprint, blend) for slot in costs.slots}


def count_training(growing: GrowingHost, batch: Tensor, settings: SeedSettings) -> float:
    """FLOPs per sample of a batch of training, as torch counts them."""
    with counter() as count:
        loss, isolated = growing.losses(batch, settings, lambda output: output.float().mean())
        (loss + sum(isolated.values())).backward()
    return count.get_total_flops() / SAMPLES


@pytest.mark.parametrize("blend", Blend)
@pytest.mark.parametrize("name", HOSTS)
def test_flops_of_forward_passes_equal_the_count_of_torch(name: str, blend: Blend) -> None:
    case = HOSTS[name]
    growing, costs, seeds = grow_all_slots(case, blend)
    growing.eval()
    first, second, third = costs.slots
    on = {
        first: SeedSetting(Mode.BLENDED, 1.0),
        second: SeedSetting(Mode.ISOLATED, 1.0),
        third: SeedSetting(Mode.FADING, 0.5),
    }

    def forward(settings: SeedSettings, start: str | None = None) -> float:
        x = case.batch if start is None else growing(case.batch, on, None, start)
        with counter() as count:
            growing(x, settings, start)
        return count.get_total_flops() / SAMPLES

    assert costs.forward(seeds, {}) == forward({})
    assert costs.forward(seeds, on) == forward(on)
    assert costs.forward(seeds, on, first) == forward(on, first)
    assert costs.forward(seeds, on, third) == forward(on, third)
    without = {first: forward({second: on[second], third: on[third]}, first), third: forward({}, third)}
    assert costs.probe(seeds, on, without) == sum(without.values())


@pytest.mark.parametrize("modes", list(permutations(Mode)), ids=lambda modes: "-".join(mode.value for mode in modes))
@pytest.mark.parametrize("name", HOSTS)
def test_flops_of_training_equal_the_count_of_torch(name: str, modes: tuple[Mode, ...]) -> None:
    case, blend = HOSTS[name], Blend.GATED
    growing, costs, seeds = grow_all_slots(case, blend)
    settings = {slot: SeedSetting(mode, 0.5) for slot, mode in zip(costs.slots, modes, strict=True)}
    isolated = next(slot for slot, setting in settings.items() if setting.mode is Mode.ISOLATED)
    blended = {slot: setting for slot, setting in settings.items() if slot != isolated}
    without_isolated = count_training(growing, case.batch, blended)
    assert costs.train(seeds, settings) == costs.train(seeds, blended) == without_isolated
    assert costs.isolated(seeds, blended) == 0
    skipped = case.skipped_flops(growing.host.slot(isolated).channels, blend)  # features are detached
    measured = count_training(growing, case.batch, settings) - without_isolated
    assert costs.isolated(seeds, settings) - skipped == measured


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("name", HOSTS)
def test_flops_of_two_seeds_in_the_same_mode_equal_the_count_of_torch(name: str, mode: Mode) -> None:
    case = HOSTS[name]
    growing, costs, seeds = grow_all_slots(case, Blend.ADD)
    settings = {slot: SeedSetting(mode, 0.5) for slot in costs.slots[:2]}
    stated = costs.train(seeds, settings) + costs.isolated(seeds, settings)
    if mode is Mode.ISOLATED:
        stated -= sum(case.skipped_flops(growing.host.slot(slot).channels, Blend.ADD) for slot in settings)
    assert stated == count_training(growing, case.batch, settings)


@pytest.mark.parametrize("mode", [Mode.BLENDED, Mode.FADING])
@pytest.mark.parametrize("name", HOSTS)
def test_without_coadaptation_the_charge_is_an_upper_bound(name: str, mode: Mode) -> None:
    case = HOSTS[name]
    growing, costs, seeds = grow_all_slots(case, Blend.ADD, coadapt=False)
    settings = {slot: SeedSetting(mode, 0.5) for slot in costs.slots[:2]}
    measured = count_training(growing, case.batch, settings)
    assert measured <= costs.train(seeds, settings) <= 1.1 * measured  # seeds skip at most their input gradient


def test_a_blueprint_that_does_not_state_its_flops_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(channels: int) -> nn.Module:
        return nn.Conv2d(channels, channels, 5, padding=2)

    own = Blueprint("own", "cnn", "made by a user", lambda c: 25 * c * c + c, build)
    monkeypatch.setitem(registry._REGISTRY["cnn"], "own", own)
    costs = HostCosts(HOSTS["images"].build, HOSTS["images"].batch[:1])
    gate = linear_flops(16, GATE_HIDDEN) + linear_flops(GATE_HIDDEN, 1)
    body = symmetric_flops(2 * 25 * 16 * 16 * 8 * 8)  # block2 has 16 channels and 8 x 8 pixels
    assert costs.seed("block2", "own", Blend.ADD) == body
    assert costs.seed("block2", "own", Blend.GATED) == body + gate


def test_a_host_that_does_not_state_its_flops_is_counted() -> None:
    class Unstated(CNNHost):
        flops = Host.flops

    example = HOSTS["images"].batch[:1]
    stated = HostCosts(lambda: CNNHost(**IMAGES, pool_slots=False), example)
    counted = HostCosts(lambda: Unstated(**IMAGES, pool_slots=False), example)
    assert [cost.forward for cost in counted.segments] == [cost.forward for cost in stated.segments]
    assert counted.segments[1:] == stated.segments[1:]
    assert counted.segments[0].input_grad > stated.segments[0].input_grad == 0  # images need no gradient


def test_the_stated_flops_of_a_gpt_without_heads_equal_the_count() -> None:
    class Unstated(GPTHost):
        flops = Host.flops

    example = HOSTS["texts"].batch[:1]
    stated, counted = (
        HostCosts(lambda kind=kind: kind(**{**TEXTS, "heads": 0}, dropout=0.0), example) for kind in (GPTHost, Unstated)
    )
    assert [cost.forward for cost in stated.segments] == [cost.forward for cost in counted.segments]


ON, ISOLATED = SeedSetting(Mode.BLENDED, 1.0), SeedSetting(Mode.ISOLATED, 1.0)


@pytest.mark.parametrize(
    ("settings", "off", "parts"),
    [
        ({}, (), {"training", "validation"}),
        ({"block1": ON, "block2": ISOLATED}, (), {"training", "isolated", "validation"}),
        ({"block1": ON, "block2": ON}, ("block1", "block2"), {"training", "validation", "probes"}),
    ],
)
def test_the_charge_of_a_step_equals_the_count_of_torch(
    settings: SeedSettings, off: tuple[str, ...], parts: set[str]
) -> None:
    env = environment("environment.attribution_share=0.5", envs=1)
    env.reset([3], [EpisodeStart(fossils={"block1": ("conv_light", "ADD"), "block2": ("bottleneck", "MULTIPLY")})])
    before, plan = env.flops_spent(), StepPlan(settings, settings, off, 3, (0.4, 0.5))
    env._current.accounting.charge_step(0, plan, env._slots)
    charged = {part: (flops - before[part]).item() for part, flops in env.flops_spent().items()}
    with counter() as count:
        env.host_run(0).train_and_measure(plan)
    assert sum(charged.values()) == count.get_total_flops()
    assert {part for part, flops in charged.items() if flops} == parts


def run_script(env: Environment, starts: list[EpisodeStart], script: dict[int, dict[str, str]] | None = None) -> Tensor:
    """FLOPs [envs] of whole episodes with the actions of the script by step, and WAIT otherwise."""
    observation, controller = env.reset([3] * len(starts), starts), NoGrowth(env.space)
    for step in range(env.steps):
        choice = (script or {}).get(step)
        action = controller.act(observation, None)[0] if choice is None else act(env.space, *[choice] * len(starts))
        observation = env.step(action).observation
    return env.view.now.flops


GERMINATE = {"op": "GERMINATE", "slot": "block2", "blueprint": "conv_light"}
PRUNE = {"op": "PRUNE", "slot": "block2"}


def test_the_parts_add_up_to_the_total() -> None:
    env = environment(envs=2)
    total = run_script(env, [EpisodeStart(), EpisodeStart(fossils={"block1": ("norm", "GATED")})], {0: GERMINATE})
    parts = env.flops_spent()
    assert set(parts) == {"training", "isolated", "validation", "probes", "controller"}
    assert all((part > 0).all() for name, part in parts.items() if name != "controller")  # a script costs nothing
    assert torch.equal(sum(parts.values(), torch.zeros(2)), total)


def test_the_flops_of_a_pruned_seed_still_count() -> None:
    env = environment(envs=1)
    plain = run_script(env, [EpisodeStart()])
    assert env.flops_spent()["isolated"].item() == 0
    pruned = run_script(env, [EpisodeStart()], {0: GERMINATE, 3: PRUNE})
    assert not env.view.slots.occupied.any()
    assert env.flops_spent()["isolated"] > 0
    assert pruned > plain


FOSSILS = {
    "images": [{}, {"block1": ("conv_light", "ADD"), "block3": ("depthwise", "GATED")}],
    "texts": [{}, {"segment2": ("attention", "ADD"), "segment3": ("mlp", "GATED")}],
}


@pytest.mark.parametrize("name", FOSSILS)
def test_a_budget_of_flops_is_converted_to_batches_that_cost_it(name: str) -> None:
    env = (
        environment("environment.steps=3")
        if name == "images"
        else build_environment(text_config("environment.steps=3"), 2)
    )
    target = 2.5 * run_script(env, [EpisodeStart()]).item()
    fossils = FOSSILS[name]
    batches = [env.batches_for(target, grown, 0) for grown in fossils]
    starts = [EpisodeStart(fossils=grown, batches=number) for grown, number in zip(fossils, batches, strict=True)]
    flops = run_script(env, starts)
    one_batch = env.flops_spent()["training"] / torch.tensor(batches)
    assert ((flops - target).abs() <= one_batch / 2).all()
    assert batches[0] > batches[1] > 1


def test_a_budget_of_zero_trains_on_one_batch() -> None:
    assert environment().batches_for(0.0, {}, 0) == 1


def test_a_budget_for_an_unknown_blueprint_is_refused() -> None:
    with pytest.raises(ValueError, match="fossils: lora in block1 with blend ADD does not exist"):
        environment().batches_for(1e9, {"block1": ("lora", "ADD")}, 0)
