import gc
import weakref
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from esper.config import build_vector_env, compose_config
from esper.controllers import FactoredDistribution, Policy, PolicyController, PolicyDecision
from esper.lifecycle import HEAD_NAMES, Masks, causal
from esper.ppo import PPO, Rollout, checkpoint, gae, restore_module
from esper.ppo import module as learning
from esper.ppo.checkpoint import LAST, read_checkpoint
from esper.ppo.losses import LOG_RATIO_BOUND, surrogate, value_loss
from esper.ppo.metadata import VERSION
from esper.ppo.module import UpdateStats
from esper.ppo.update import MinibatchMetrics, StepCounts, UpdateTargets, minibatch_loss, prepare_targets
from esper.training import build_module
from tests.controllers.fixtures_policies import draws, layout, policy, random_inputs
from tests.controllers.test_distribution import random_logits
from tests.fixtures_environment import SMALL
from tests.ppo.fixtures_environments import Locks, fit, learner, played, settings
from tests.ppo.test_checkpoint import run
from tests.ppo.test_module import loss_of, ready

EVEN = {"gains": {"hidden": 1.4, "policy": 0.0, "value": 1.0}}  # every legal option is as likely as the others


def changed(module: PPO, size: float = 0.1) -> None:
    """Move all weights, as optimizer steps would."""
    noise = draws(3)
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=noise))


def only_waiting(rollout: Rollout, steps: slice) -> None:
    """Nothing but WAIT was legal on these steps, and so it was done."""
    rollout.masks.op[:, steps] = False
    rollout.masks.op[:, steps, 0] = True
    rollout.masks.slot[:, steps] = False
    rollout.action[:, steps] = 0
    rollout.log_prob[:, steps] = 0


# ---------------------------------------------------------------- losses


def test_log_ratios_are_held_within_20_whose_ratio_can_still_be_squared() -> None:
    assert LOG_RATIO_BOUND == 20
    assert torch.tensor(LOG_RATIO_BOUND).exp().square().isfinite()
    assert not torch.tensor(88.0).exp().square().isfinite()
    part = surrogate(
        torch.tensor([[500.0], [-500.0]]),
        torch.zeros(2, 1),
        torch.ones(2),
        torch.ones(2, 1, dtype=torch.bool),
        clip=0.2,
    )
    assert part.largest.log().item() == pytest.approx(20)
    assert part.smallest.log().item() == pytest.approx(-20)


def test_a_round_without_any_choice_has_a_kl_of_exactly_0() -> None:
    module, rollout, _ = ready()
    only_waiting(rollout, slice(None))
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
    assert not targets.decision.any()
    changed(module)
    loss, figures = loss_of(module, rollout, targets)
    assert figures.kl.tolist() == [0.0] * len(rollout.layout.options)
    assert figures.policy == 0
    assert loss.isfinite()


@pytest.mark.parametrize("masked", [True, False])
def test_a_policy_says_whether_heads_learn_where_they_had_no_part(masked: bool) -> None:
    world = Locks()
    module = learner(world, net={**EVEN, "masked": masked})
    rollout = played(module, world)
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
    blend = rollout.layout.head_names.index("blend")
    waited = rollout.each("op") == 0
    assert waited.any()
    assert targets.active[waited][:, blend].any() == (not masked)
    assert (rollout.log_prob[waited][:, blend] == 0).all() == masked
    _, figures = loss_of(module, rollout, targets)
    assert figures.kl.abs().max() < 1e-6  # what was drawn is what is updated


def test_the_kl_of_an_update_is_that_of_whole_actions_over_decision_steps() -> None:
    """Heads that took no part add nothing, and are not counted in what is divided by."""
    module, rollout, _ = ready()
    only_waiting(rollout, slice(0, 2))
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
    rollout.log_prob -= 0.1 * targets.active
    _, figures = loss_of(module, rollout, targets)
    one = 1.1051709 - 1 - 0.1
    expected = targets.active.sum() * one / targets.decision.sum()
    assert figures.kl.sum().item() == pytest.approx(expected.item(), rel=1e-2)
    assert figures.named(rollout.layout.head_names)["policy/kl"] == figures.kl.sum()


@pytest.mark.parametrize("actions", ["core", "full"])
def test_entropy_is_a_bonus_for_the_mean_over_heads_however_many_there_are(actions: str) -> None:
    world = Locks(actions=actions)
    module = learner(world, net=EVEN)
    rollout = played(module, world)
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
    rows = torch.arange(4)
    counts = StepCounts.of(rollout, targets, rows)
    plain, paid = (
        minibatch_loss(module.policy, rollout, targets, rows, counts, module.settings, bonus)[0].item()
        for bonus in (0.0, 0.5)
    )
    there = targets.available.any((0, 1)).float().mean().item()  # alpha_speed and alpha_curve are never asked for
    assert plain - paid == pytest.approx(0.5 * there, abs=1e-5)


def test_entropy_is_normalised_once_and_not_diluted_by_steps_without_a_choice() -> None:
    world = Locks(steps=6)
    module = learner(world, net=EVEN)
    rollout = played(module, world)
    only_waiting(rollout, slice(0, 4))
    _, figures = loss_of(module, rollout, prepare_targets(rollout, module.policy, module.scale, module.settings))
    torch.testing.assert_close(figures.entropy, torch.ones(4))


def test_the_shipped_value_loss_does_not_look_at_old_values() -> None:
    shipped = settings()
    assert shipped.value_loss == "huber"
    values, returns, valid = torch.randn(2, 5, generator=draws())[:1], torch.zeros(1, 5), torch.ones(1, 5).bool()
    found = [
        value_loss(values, old, returns, valid, kind=shipped.value_loss, bound=shipped.value_bound)
        for old in (torch.zeros(1, 5), torch.full((1, 5), 1e6))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["huber", "clipped"])
@torch.no_grad()
def test_values_to_clip_against_are_the_critics_own_though_the_return_scale_has_moved(kind: str) -> None:
    world = Locks()
    module = learner(world, value_loss=kind)
    fit(module, world, rounds=2)
    rollout = played(module, world)
    before = module.scale.std.clone()
    targets = prepare_targets(replace(rollout, reward=7 * rollout.reward), module.policy, module.scale, module.settings)
    assert module.scale.std != before
    again = module.policy(rollout.base, rollout.slots, rollout.blueprints, rollout.state).value
    torch.testing.assert_close(again[rollout.valid], targets.values[rollout.valid], atol=1e-4, rtol=1e-3)


# ---------------------------------------------------------------- updates


@torch.no_grad()
def test_a_later_pass_judges_actions_as_the_changed_policy_would_step_by_step() -> None:
    """No state of the acting policy is left over: several passes over recurrent sequences are exact."""
    module, rollout, targets = ready(net={"layers": 2})
    changed(module)
    net, state = module.policy, module.policy.begin(4)
    for step in range(rollout.valid.shape[1]):
        now = slice(step, step + 1)
        output = net(rollout.base[:, now], rollout.slots[:, now], rollout.blueprints[:, now], state)
        state = output.state
        masks = rollout.masks.each(lambda mask, step=step: mask[:, step])  # type: ignore[misc]
        rollout.log_prob[:, step] = net.distribution(output.logits, masks).log_prob(rollout.action[:, step])
    _, figures = loss_of(module, rollout, targets)
    assert figures.largest.item() == pytest.approx(1, abs=1e-4)
    assert figures.smallest.item() == pytest.approx(1, abs=1e-4)


@torch.no_grad()
def test_an_update_runs_each_episode_from_the_state_it_started_with() -> None:
    module, rollout, targets = ready()
    rows = torch.tensor([2, 0])
    plain, _ = loss_of(module, rollout, targets, rows)
    states = [part.clone() for part in rollout.state]
    for part, kept in zip(rollout.state, states, strict=True):
        part.copy_(kept)
        part[:, [1, 3]] = 5.0
    others, _ = loss_of(module, rollout, targets, rows)
    assert torch.equal(plain, others)
    for part in rollout.state:
        part[:, 2] = 5.0
    mine, _ = loss_of(module, rollout, targets, rows)
    assert not torch.equal(plain, mine)


def test_every_new_episode_starts_with_an_empty_memory_whatever_was_before() -> None:
    world = Locks()
    module = learner(world)
    fit(module, world, rounds=2)
    assert not any(part.any() for part in played(module, world).state)


def test_one_causal_structure_rules_actions_masks_and_losses() -> None:
    world = Locks(actions="full", envs=8, steps=8)
    module = learner(world)
    rollout = played(module, world)
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
    used = causal(rollout.each("op"), rollout.layout) & rollout.valid.unsqueeze(-1)
    assert not rollout.log_prob[~used].any()
    assert not rollout.action[~used].any()
    assert not (targets.active & ~used).any()
    assert torch.equal(targets.active, used & (rollout.log_prob < 0)), "what was certain was no choice"


def test_statistics_take_a_round_in_before_the_first_gradient_of_its_update() -> None:
    world, counts = Locks(), []
    module = learner(world)
    original = module._gradients

    def spy(*given: Any) -> Any:
        counts.append(module.policy.base_statistics.count.item())
        return original(*given)

    module._gradients = spy  # type: ignore[method-assign]
    fit(module, world, rounds=1)
    assert counts[0] == 19
    assert set(counts) == {19}


def test_the_norm_before_clipping_is_reported_and_all_parameters_are_clipped_together() -> None:
    world = Locks()
    module = learner(world, grad_clip=1e-3, epochs=1, target_kl=None)
    fit(module, world, rounds=1)
    assert module.latest_metrics["health/gradient_norm"] > 1e-2
    left = torch.stack([parameter.grad.norm() for parameter in module.policy.parameters()]).norm()
    assert left.item() == pytest.approx(1e-3, rel=1e-3)


def test_a_minibatchs_figures_and_an_updates_tally_are_apart() -> None:
    seen: list[tuple[dict[str, float], float]] = []
    world = Locks()
    module = learner(world, epochs=3, minibatches=2, target_kl=None)
    original = module._gradients

    def spy(*given: Any) -> Any:
        seen.append(original(*given))
        return seen[-1]

    module._gradients = spy  # type: ignore[method-assign]
    fit(module, world, rounds=1)
    assert len(seen) == 6
    assert module.latest_metrics["health/gradient_norm"] == max(norm for _, norm in seen)
    assert module.latest_metrics["losses/policy"] == seen[-1][0]["losses/policy"]
    assert module.latest_metrics["policy/epochs"] == 3


def test_an_update_says_precisely_what_it_gives() -> None:
    hints = {
        PPO._learn: UpdateStats,
        PPO.training_step: dict[str, UpdateTargets],
        prepare_targets: UpdateTargets,
        minibatch_loss: tuple[torch.Tensor, MinibatchMetrics],
    }
    for function, expected in hints.items():
        assert get_type_hints(function)["return"] == expected
    for kind in (UpdateStats, UpdateTargets, MinibatchMetrics):
        assert is_dataclass(kind)
        assert all(get_type_hints(kind)[field.name] is not Any for field in fields(kind))


def test_figures_do_not_pile_up_over_passes_and_rounds() -> None:
    world = Locks()
    module = learner(world, epochs=1, target_kl=None)
    fit(module, world, rounds=1)
    names = set(module.latest_metrics)
    module.settings = replace(module.settings, epochs=5)
    fit(module, world, rounds=3)
    assert set(module.latest_metrics) == names
    assert all(isinstance(value, int | float) for value in module.latest_metrics.values())


def test_the_advantages_mean_and_spread_are_reported() -> None:
    world = Locks()
    module = learner(world)
    rollout = played(module, world)
    raw = gae(
        rollout.reward, rollout.value, rollout.next_value, rollout.terminated, rollout.truncated, gamma=0.9, lam=0.95
    )
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
    chosen = raw[targets.decision]
    assert targets.figures["policy/advantage_mean"] == pytest.approx(chosen.mean().item(), abs=1e-5)
    assert targets.figures["policy/advantage_std"] == pytest.approx(chosen.std(unbiased=False).item(), abs=1e-5)
    fit(module, world, rounds=1)
    assert {"policy/advantage_mean", "policy/advantage_std"} <= set(module.latest_metrics)


def test_a_pass_shuffles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    original, sizes = torch.randperm, []

    def counted(size: int, **given: Any) -> torch.Tensor:
        sizes.append(size)
        return original(size, **given)

    monkeypatch.setattr(torch, "randperm", counted)
    world = Locks()
    fit(learner(world, epochs=3, minibatches=2, target_kl=None), world, rounds=1)
    assert sizes == [4, 4, 4]


def test_the_named_constants_are_the_ones_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (learning.KL_MARGIN, learning.ADAM_EPS) == (1.5, 1e-5)
    module = learner(Locks(), epochs=10, target_kl=1e-4)
    monkeypatch.setattr(learning, "KL_MARGIN", 1e9)
    monkeypatch.setattr(learning, "ADAM_EPS", 0.125)
    fit(module, Locks(), rounds=1)
    assert module.latest_metrics["policy/kl_stop"] == 0
    assert {group["eps"] for group in module.configure_optimizers().param_groups} == {0.125}


@pytest.mark.parametrize(("device", "fused"), [("cpu", False), ("cuda:0", True)])
def test_the_kind_of_device_chooses_the_optimizers_kernels(device: str, fused: bool) -> None:
    module = learner(Locks())
    module._device = torch.device(device)
    chosen = module.configure_optimizers().defaults
    assert bool(chosen["fused"]) is fused
    assert bool(chosen["foreach"]) is not fused


def test_shipped_settings_anneal_entropy_and_clip_at_a_half() -> None:
    shipped = settings()
    assert shipped.grad_clip == 0.5
    assert shipped.entropy_final is not None
    assert 0 < shipped.entropy_final < shipped.entropy
    assert shipped.advantage_min_std >= 1e-3
    assert shipped.target_kl == pytest.approx(0.015, abs=0.01)


# ---------------------------------------------------------------- storage


class Calls(TorchDispatchMode):
    """Counts the operations that reach torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_more_environments_take_no_more_operations_to_estimate_advantages() -> None:
    counts = []
    for envs in (1, 50):
        parts, ends = torch.randn(3, envs, 6), torch.zeros(2, envs, 6, dtype=torch.bool)
        with Calls() as calls:
            gae(*parts, *ends, gamma=0.9, lam=0.9)
        counts.append(calls.count)
    assert counts[0] == counts[1]


def on_meta(steps: int = 3) -> tuple[Rollout, PolicyDecision]:
    of, meta = layout("full"), torch.device("meta")
    net = policy(of, validate=False).to(meta)
    rollout = Rollout.empty([0, 1], steps, of, net.begin(2))
    inputs, controller = random_inputs(of, 2, draws()), PolicyController(net, greedy=True)
    choice, _ = controller.decide(inputs, controller.begin([0, 1]))
    return rollout, choice


def test_a_rollout_is_written_and_paid_without_a_look_at_the_device() -> None:
    """On the meta device any look at a value would raise."""
    rollout, choice = on_meta()
    rollout.write(1, choice, torch.ones(2, dtype=torch.bool, device="meta"))
    rollout.pay(1, torch.ones(2), torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool))
    assert {rollout.valid.device.type, rollout.reward.device.type, rollout.each("op").device.type} == {"meta"}


def test_a_rollout_is_written_by_index_into_memory_that_stays_where_it_is() -> None:
    of = layout()
    net = policy(of)
    rollout = Rollout.empty([0, 1], 3, of, net.begin(2))
    places = [value for value in vars(rollout).values() if isinstance(value, torch.Tensor)]
    places += [rollout.masks.op, rollout.masks.slot, *rollout.masks.others.values()]
    before = [place.data_ptr() for place in places]
    inputs, controller = random_inputs(of, 2, draws()), PolicyController(net, greedy=False)
    memory = controller.begin([0, 1])
    for step in range(3):
        choice, memory = controller.decide(inputs, memory)
        rollout.write(step, choice, torch.ones(2, dtype=torch.bool))
        rollout.pay(step, torch.ones(2), torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool))
    after = [value for value in vars(rollout).values() if isinstance(value, torch.Tensor)]
    after += [rollout.masks.op, rollout.masks.slot, *rollout.masks.others.values()]
    assert [place.data_ptr() for place in after] == before
    assert rollout.valid.all()


@pytest.mark.parametrize("slots", [3, 4, 5])
def test_learner_policy_and_rollout_share_the_worlds_own_slots_in_their_order(slots: int) -> None:
    names = [f"block{index + 1}" for index in range(slots)]
    small = [setting for setting in SMALL if not setting.startswith("data.resolution")]
    config = compose_config(
        "run",
        [*small, "host=cifar_scale", f"slots.names=[{','.join(reversed(names))}]", "policy.hidden=16",
         "environment.steps=1", "environment.envs=1", "environment.batches=1"],
    )  # fmt: skip
    world = build_vector_env(config)
    module = build_module(config, world)
    assert list(world.layout.slots) == names, "as they stand in the host, however they were named"
    assert module.policy.layout == world.layout
    rollout = played(module, world)
    assert rollout.layout == world.layout
    assert rollout.masks.slot.shape[-1] == rollout.slots.shape[2] == slots
    assert module.metadata().to_dict()["layout"]["slots"] == names


# ---------------------------------------------------------------- the compiler


class Graphs:
    """A compiler that only keeps what it is given."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.operations += [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]
        return graph.forward


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_advantages_and_the_validation_of_masks_stay_out_of_the_compiler() -> None:
    graphs = Graphs()
    rewards, values, after = torch.randn(3, 2, 6)
    never = torch.zeros(2, 6, dtype=torch.bool)

    def around(rewards: torch.Tensor) -> torch.Tensor:
        return 2 * gae(rewards + 1, values, after, never, never, gamma=0.9, lam=0.9)

    found = torch.compile(around, backend=graphs)(rewards)
    torch.testing.assert_close(found, around(rewards))
    assert len(graphs.operations) == 2, "one before and one behind, nothing of what is between"

    of = layout()
    logits = random_logits(of, 3, draws())
    masks = random_inputs(of, 3, draws()).masks
    none = Masks(torch.zeros_like(masks.op), masks.slot, masks.others)

    def judged(masks: Masks) -> torch.Tensor:
        return FactoredDistribution(logits, masks, of, {}, True).entropy()

    with pytest.raises(ValueError, match="without a legal option"):
        torch.compile(judged, backend=graphs)(none)
    assert not any("isfinite" in name or "tolist" in name for name in graphs.operations)


# ---------------------------------------------------------------- checkpoints


def test_every_version_of_checkpoints_is_written_down() -> None:
    rows = [line.split("|")[1].strip() for line in (checkpoint.__doc__ or "").splitlines() if line.startswith("| ")]
    assert rows == ["version", *map(str, range(1, VERSION + 1))]


def test_another_width_of_features_or_memory_is_refused(tmp_path: Path) -> None:
    run(tmp_path, rounds=1)
    assert read_checkpoint(tmp_path / LAST)["esper"]["layout"]["base"] == 4
    for key in ("base", "slot"):
        world = Locks()
        world.layout = replace(world.layout, **{key: 9})
        with pytest.raises(ValueError, match=rf"^{key}: this run has 9, but the checkpoint"):
            restore_module(learner(world), tmp_path / LAST)
    with pytest.raises(ValueError, match=r"^policy.hidden=24: the checkpoint .* has 16"):
        restore_module(learner(Locks(), net={"hidden": 24}), tmp_path / LAST)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compilation_begins_only_when_a_checkpoints_weights_are_in(tmp_path: Path) -> None:
    trained = run(tmp_path, rounds=1, net={"layers": 0})
    graphs, fresh = Graphs(), learner(Locks(), seed=9, net={"layers": 0})
    fresh.policy.compile(backend=graphs)
    restore_module(fresh, tmp_path / LAST)
    assert graphs.operations == []
    inputs = random_inputs(fresh.policy.layout, 2, draws())
    given = (inputs.base[:, None], inputs.slots[:, None], inputs.blueprints[:, None], fresh.policy.begin(2))
    torch.testing.assert_close(fresh.policy(*given).value, trained.policy(*given).value)
    assert graphs.operations
    torch.save({"esper": {"version": VERSION + 1}}, tmp_path / "newer.ckpt")
    with pytest.raises(ValueError, match=rf"reads 1 to {VERSION}"):
        restore_module(fresh, tmp_path / "newer.ckpt")


def test_the_mode_of_compilation_is_saved_and_a_restored_policy_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Policy, "compile", lambda self, **options: asked.append(options["mode"]))
    run(tmp_path, rounds=1, net={"compile": "max-autotune"})
    assert read_checkpoint(tmp_path / LAST)["esper"]["compile"] == "max-autotune"
    fresh = learner(Locks(), net={"compile": "max-autotune"})
    restore_module(fresh, tmp_path / LAST)
    assert asked == ["max-autotune", "max-autotune"]
    assert fresh.policy.compile_mode == "max-autotune"
    assert "mode of compilation" in (checkpoint.__doc__ or "")
    assert "a resumed run compiles by its own configuration" in " ".join((checkpoint.__doc__ or "").split())


def test_a_checkpoints_weights_are_let_go_once_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, rounds=1)
    held: list[Any] = []

    def watched(path: Path) -> dict[str, Any]:
        found = read_checkpoint(path)
        held.extend(weakref.ref(value) for value in found["state_dict"].values())
        return found

    monkeypatch.setattr(checkpoint, "read_checkpoint", watched)
    fresh = learner(Locks(), seed=9)
    restore_module(fresh, tmp_path / LAST)
    gc.collect()
    assert held
    assert not any(reference() is not None for reference in held)
    fresh.configure_optimizers()
    assert fresh.optimizer_state is None


def test_the_heads_reported_are_the_head_tables_and_the_value() -> None:
    world = Locks(actions="full")
    module = learner(world)
    fit(module, world, rounds=1)
    for group in ("policy/entropy_", "policy/kl_", "policy/clipped_"):
        found = {name.removeprefix(group) for name in module.latest_metrics if name.startswith(group)}
        assert found - {"bonus", "stop"} == set(HEAD_NAMES)
    norms = {
        name.removeprefix("health/gradient_") for name in module.latest_metrics if name.startswith("health/gradient_")
    }
    assert norms == {*HEAD_NAMES, "value", "norm"}
