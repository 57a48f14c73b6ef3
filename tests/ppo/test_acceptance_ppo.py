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
from esper.ppo import PPO, AtomicCheckpointIO, CheckpointMetadata, Rollout, gae, metadata
from esper.ppo import module as ppo_module
from esper.ppo.checkpoint import LAST, read_checkpoint
from esper.ppo.losses import LOG_RATIO_BOUND, surrogate, value_loss
from esper.ppo.metadata import METADATA_VERSION
from esper.ppo.module import UpdateStats
from esper.ppo.update import MinibatchMetrics, StepCounts, UpdateTargets, minibatch_loss, prepare_targets
from esper.training import build_module
from tests.controllers.fixtures_policies import draws, layout, policy, random_inputs, run_inputs
from tests.controllers.test_distribution import random_logits
from tests.fixtures_environment import SMALL
from tests.ppo.fixtures_environments import MatchingEnv, fit, make_module, make_settings, restore, run_round
from tests.ppo.test_checkpoint import train_and_save
from tests.ppo.test_module import compute_loss, prepare

UNIFORM = {"gains": {"hidden": 1.4, "policy": 0.0, "value": 1.0}}  # all legal options are equally likely


def perturb_weights(module: PPO, size: float = 0.1) -> None:
    """Change all weights, as optimizer steps would."""
    noise = draws(3)
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=noise))


def force_wait(rollout: Rollout, steps: slice) -> None:
    """Make WAIT the only legal and the chosen action on these steps."""
    rollout.masks.op[:, steps] = False
    rollout.masks.op[:, steps, 0] = True
    rollout.masks.slot[:, steps] = False
    rollout.action[:, steps] = 0
    rollout.log_prob[:, steps] = rollout.behaviour[:, steps] = 0


# ---------------------------------------------------------------- losses


def test_log_ratios_are_clamped_to_20_so_that_squared_ratios_are_finite() -> None:
    assert LOG_RATIO_BOUND == 20
    assert torch.tensor(LOG_RATIO_BOUND).exp().square().isfinite()
    assert not torch.tensor(88.0).exp().square().isfinite()
    part = surrogate(
        torch.tensor([[500.0], [-500.0]]),
        torch.zeros(2, 1),
        torch.zeros(2, 1),
        torch.ones(2),
        torch.ones(2, 1, dtype=torch.bool),
        clip=0.2,
    )
    assert part.ratio_max.log().item() == pytest.approx(20)
    assert part.ratio_min.log().item() == pytest.approx(-20)


def test_a_round_without_an_active_head_has_a_kl_of_exactly_0() -> None:
    module, rollout, _ = prepare()
    force_wait(rollout, slice(None))
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
    assert not targets.decision.any()
    perturb_weights(module)
    loss, metrics = compute_loss(module, rollout, targets)
    assert metrics.kl.tolist() == [0.0] * len(rollout.layout.options)
    assert metrics.policy == 0
    assert loss.isfinite()


@pytest.mark.parametrize("masked", [True, False])
def test_a_masked_policy_learns_heads_only_on_steps_whose_op_uses_them(masked: bool) -> None:
    env = MatchingEnv()
    module = make_module(env, network={**UNIFORM, "masked": masked})
    rollout = run_round(module, env)
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
    blend = rollout.layout.head_names.index("blend")
    is_wait = rollout.select_head("op") == 0
    assert is_wait.any()
    assert targets.active[is_wait][:, blend].any() == (not masked)
    assert (rollout.log_prob[is_wait][:, blend] == 0).all() == masked
    _, metrics = compute_loss(module, rollout, targets)
    assert metrics.kl.abs().max() < 1e-6  # the update evaluates the sampled actions


def test_the_kl_of_an_update_is_that_of_whole_actions_over_decision_steps() -> None:
    """Heads that are not active add nothing, and steps without an active head are not counted."""
    module, rollout, _ = prepare()
    force_wait(rollout, slice(0, 2))
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
    rollout.log_prob -= 0.1 * targets.active
    rollout.behaviour.copy_(rollout.log_prob)
    _, metrics = compute_loss(module, rollout, targets)
    kl_per_head = 1.1051709 - 1 - 0.1
    expected = targets.active.sum() * kl_per_head / targets.decision.sum()
    assert metrics.kl.sum().item() == pytest.approx(expected.item(), rel=1e-2)
    assert metrics.to_dict(rollout.layout.head_names)["policy/kl"] == metrics.kl.sum()


@pytest.mark.parametrize("actions", ["core", "full", "lean"])
def test_the_entropy_bonus_is_the_mean_over_heads_for_any_number_of_heads(actions: str) -> None:
    env = MatchingEnv(actions=actions)
    module = make_module(env, network=UNIFORM)
    rollout = run_round(module, env)
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
    rows = torch.arange(4)
    counts = StepCounts.of(targets, rows)
    without_bonus, with_bonus = (
        minibatch_loss(module.policy, rollout, targets, rows, counts, module.settings, bonus)[0].item()
        for bonus in (0.0, 0.5)
    )
    is_available = targets.available.any((0, 1)).float().mean().item()  # no op here uses alpha_speed and alpha_curve
    assert without_bonus - with_bonus == pytest.approx(0.5 * is_available, abs=1e-5)


def test_entropy_is_normalised_once_and_averaged_over_available_steps_only() -> None:
    env = MatchingEnv(steps=6)
    module = make_module(env, network=UNIFORM)
    rollout = run_round(module, env)
    force_wait(rollout, slice(0, 4))
    _, metrics = compute_loss(module, rollout, prepare_targets(rollout, module.policy, module.scale, module.settings))
    torch.testing.assert_close(metrics.entropy, torch.ones(4))


def test_the_value_loss_is_clipped_by_default_and_the_huber_loss_does_not_use_old_values() -> None:
    defaults = make_settings()
    assert defaults.value_loss == "clipped"
    values, returns, valid = torch.randn(2, 5, generator=draws())[:1], torch.zeros(1, 5), torch.ones(1, 5).bool()
    losses = [
        value_loss(values, old_values, returns, valid, kind="huber", bound=defaults.value_bound)
        for old_values in (torch.zeros(1, 5), torch.full((1, 5), 1e6))
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", ["huber", "clipped"])
@torch.no_grad()
def test_old_values_are_those_of_the_critic_after_the_return_scale_has_changed(kind: str) -> None:
    env = MatchingEnv()
    module = make_module(env, value_loss=kind)
    fit(module, env, rounds=2)
    rollout = run_round(module, env)
    before = module.scale.std.clone()
    targets = prepare_targets(replace(rollout, reward=7 * rollout.reward), module.policy, module.scale, module.settings)
    assert module.scale.std != before
    again = module.policy(rollout.base, rollout.slots, rollout.blueprints, rollout.state, rollout.context).value
    torch.testing.assert_close(again[rollout.valid], targets.values[rollout.valid], atol=1e-4, rtol=1e-3)


# ---------------------------------------------------------------- updates


@torch.no_grad()
def test_a_later_pass_evaluates_actions_as_the_changed_policy_does_step_by_step() -> None:
    """The acting policy's states are not reused: several passes over recurrent sequences are exact."""
    module, rollout, targets = prepare(network={"layers": 2})
    perturb_weights(module)
    net, state = module.policy, module.policy.begin(4)
    for step in range(rollout.valid.shape[1]):
        now = slice(step, step + 1)
        sequences = (rollout.base[:, now], rollout.slots[:, now], rollout.blueprints[:, now])
        output = net(*sequences, state, rollout.context)
        state = output.state
        masks = rollout.masks.each(lambda mask, step=step: mask[:, step])  # type: ignore[misc]
        rollout.log_prob[:, step] = net.distribution(output.logits, masks).log_prob(rollout.action[:, step])
    _, metrics = compute_loss(module, rollout, targets)
    assert metrics.ratio_max.item() == pytest.approx(1, abs=1e-4)
    assert metrics.ratio_min.item() == pytest.approx(1, abs=1e-4)


@torch.no_grad()
def test_an_update_runs_each_episode_from_its_initial_state() -> None:
    module, rollout, targets = prepare()
    rows = torch.tensor([2, 0])
    plain, _ = compute_loss(module, rollout, targets, rows)
    for part in rollout.state:
        part[:, [1, 3]] = 5.0
    other_states, _ = compute_loss(module, rollout, targets, rows)
    assert torch.equal(plain, other_states)
    for part in rollout.state:
        part[:, 2] = 5.0
    own_state, _ = compute_loss(module, rollout, targets, rows)
    assert not torch.equal(plain, own_state)


def test_every_episode_starts_with_an_lstm_state_of_0() -> None:
    env = MatchingEnv()
    module = make_module(env)
    fit(module, env, rounds=2)
    assert not any(part.any() for part in run_round(module, env).state)


def test_actions_masks_and_losses_use_the_same_causal_structure() -> None:
    env = MatchingEnv(actions="full", envs=8, steps=8)
    module = make_module(env)
    rollout = run_round(module, env)
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
    is_used = causal(rollout.select_head("op"), rollout.layout) & rollout.valid.unsqueeze(-1)
    assert not rollout.log_prob[~is_used].any()
    assert not rollout.action[~is_used].any()
    assert not (targets.active & ~is_used).any()
    assert torch.equal(targets.active, is_used & (rollout.log_prob < 0)), "a single legal option has a log-prob of 0"


def test_statistics_include_a_round_before_the_first_gradient_of_its_update() -> None:
    env, counts = MatchingEnv(), []
    module = make_module(env)
    original = module._compute_gradients

    def spy(*args: Any) -> Any:
        counts.append(module.policy.base_statistics.count.item())
        return original(*args)

    module._compute_gradients = spy  # type: ignore[method-assign]
    fit(module, env, rounds=1)
    assert counts[0] == 19
    assert set(counts) == {19}


def test_the_norm_before_clipping_is_reported_and_all_parameters_are_clipped_together() -> None:
    env = MatchingEnv()
    module = make_module(env, grad_clip=1e-3, epochs=1, target_kl=None)
    fit(module, env, rounds=1)
    assert module.latest_metrics["health/gradient_norm"] > 1e-2
    clipped = torch.stack([parameter.grad.norm() for parameter in module.policy.parameters()]).norm()
    assert clipped.item() == pytest.approx(1e-3, rel=1e-3)


def test_an_update_reports_the_last_minibatch_and_the_largest_gradient_norm() -> None:
    minibatches: list[tuple[dict[str, float], float]] = []
    env = MatchingEnv()
    module = make_module(env, epochs=3, minibatches=2, target_kl=None)
    original = module._compute_gradients

    def spy(*args: Any) -> Any:
        minibatches.append(original(*args))
        return minibatches[-1]

    module._compute_gradients = spy  # type: ignore[method-assign]
    fit(module, env, rounds=1)
    assert len(minibatches) == 6
    assert module.latest_metrics["health/gradient_norm"] == max(norm for _, norm in minibatches)
    assert module.latest_metrics["losses/policy"] == minibatches[-1][0]["losses/policy"]
    assert module.latest_metrics["policy/epochs"] == 3


def test_the_functions_of_an_update_have_precise_return_types() -> None:
    hints = {
        PPO._update: UpdateStats,
        PPO.training_step: dict[str, UpdateTargets],
        prepare_targets: UpdateTargets,
        minibatch_loss: tuple[torch.Tensor, MinibatchMetrics],
    }
    for function, expected in hints.items():
        assert get_type_hints(function)["return"] == expected
    for kind in (UpdateStats, UpdateTargets, MinibatchMetrics):
        assert is_dataclass(kind)
        assert all(get_type_hints(kind)[field.name] is not Any for field in fields(kind))


def test_metrics_do_not_accumulate_over_passes_and_rounds() -> None:
    env = MatchingEnv()
    module = make_module(env, epochs=1, target_kl=None)
    fit(module, env, rounds=1)
    names = set(module.latest_metrics)
    module.settings = replace(module.settings, epochs=5)
    fit(module, env, rounds=3)
    assert set(module.latest_metrics) == names
    assert all(isinstance(value, int | float) for value in module.latest_metrics.values())


def test_mean_and_standard_deviation_of_advantages_are_reported() -> None:
    env = MatchingEnv()
    module = make_module(env)
    rollout = run_round(module, env)
    raw = gae(
        rollout.reward, rollout.value, rollout.next_value, rollout.terminated, rollout.truncated, gamma=0.9, lam=0.95
    )
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
    at_decisions = raw[targets.decision]
    assert targets.metrics["policy/advantage_mean"] == pytest.approx(at_decisions.mean().item(), abs=1e-5)
    assert targets.metrics["policy/advantage_std"] == pytest.approx(at_decisions.std(unbiased=False).item(), abs=1e-5)
    fit(module, env, rounds=1)
    assert {"policy/advantage_mean", "policy/advantage_std"} <= set(module.latest_metrics)


def test_a_pass_shuffles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    original, sizes = torch.randperm, []

    def count_calls(size: int, **kwargs: Any) -> torch.Tensor:
        sizes.append(size)
        return original(size, **kwargs)

    monkeypatch.setattr(torch, "randperm", count_calls)
    env = MatchingEnv()
    fit(make_module(env, epochs=3, minibatches=2, target_kl=None), env, rounds=1)
    assert sizes == [4, 4, 4]


def test_the_named_constants_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ppo_module.KL_MARGIN, ppo_module.ADAM_EPS) == (1.5, 1e-5)
    module = make_module(MatchingEnv(), epochs=10, target_kl=1e-4)
    monkeypatch.setattr(ppo_module, "KL_MARGIN", 1e9)
    monkeypatch.setattr(ppo_module, "ADAM_EPS", 0.125)
    fit(module, MatchingEnv(), rounds=1)
    assert module.latest_metrics["policy/kl_stop"] == 0
    assert {group["eps"] for group in module.configure_optimizers().param_groups} == {0.125}


@pytest.mark.parametrize(("device", "fused"), [("cpu", False), ("cuda:0", True)])
def test_the_optimizer_is_fused_on_cuda_and_foreach_elsewhere(device: str, fused: bool) -> None:
    module = make_module(MatchingEnv())
    module._device = torch.device(device)
    optimizer = module.configure_optimizers().defaults
    assert bool(optimizer["fused"]) is fused
    assert bool(optimizer["foreach"]) is not fused


def test_default_settings_anneal_entropy_and_clip_gradients_at_a_half() -> None:
    defaults = make_settings()
    assert defaults.grad_clip == 0.5
    assert defaults.entropy_final is not None
    assert 0 < defaults.entropy_final < defaults.entropy
    assert defaults.advantage_min_std >= 1e-3
    assert defaults.target_kl == pytest.approx(0.015, abs=0.01)


# ---------------------------------------------------------------- storage


class CallCounter(TorchDispatchMode):
    """Counts the operations that reach torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_gae_takes_the_same_number_of_operations_for_any_number_of_environments() -> None:
    counts = []
    for envs in (1, 50):
        parts, ends = torch.randn(3, envs, 6), torch.zeros(2, envs, 6, dtype=torch.bool)
        with CallCounter() as calls:
            gae(*parts, *ends, gamma=0.9, lam=0.9)
        counts.append(calls.count)
    assert counts[0] == counts[1]


def decide_on_meta(steps: int = 3) -> tuple[Rollout, PolicyDecision]:
    of, meta = layout("full"), torch.device("meta")
    net = policy(of, validate=False).to(meta)
    rollout = Rollout.empty([0, 1], steps, of, net.begin(2))
    inputs, controller = random_inputs(of, 2, draws()), PolicyController(net, greedy=True)
    decision, _ = controller.decide(inputs, controller.begin([0, 1]))
    return rollout, decision


def test_writing_a_rollout_does_not_synchronise_the_device() -> None:
    """On the meta device reading a value raises."""
    rollout, decision = decide_on_meta()
    rollout.write_decision(1, decision, torch.ones(2, dtype=torch.bool, device="meta"))
    rollout.write_result(1, torch.ones(2), torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool))
    assert {rollout.valid.device.type, rollout.reward.device.type, rollout.select_head("op").device.type} == {"meta"}


def test_a_rollout_is_written_by_index_into_memory_allocated_once() -> None:
    of = layout()
    net = policy(of)
    rollout = Rollout.empty([0, 1], 3, of, net.begin(2))
    tensors = [value for value in vars(rollout).values() if isinstance(value, torch.Tensor)]
    tensors += [rollout.masks.op, rollout.masks.slot, *rollout.masks.others.values()]
    before = [tensor.data_ptr() for tensor in tensors]
    inputs, controller = random_inputs(of, 2, draws()), PolicyController(net, greedy=False)
    memory = controller.begin([0, 1])
    for step in range(3):
        decision, memory = controller.decide(inputs, memory)
        rollout.write_decision(step, decision, torch.ones(2, dtype=torch.bool))
        rollout.write_result(step, torch.ones(2), torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool))
    after = [value for value in vars(rollout).values() if isinstance(value, torch.Tensor)]
    after += [rollout.masks.op, rollout.masks.slot, *rollout.masks.others.values()]
    assert [tensor.data_ptr() for tensor in after] == before
    assert rollout.valid.all()


@pytest.mark.parametrize("slots", [3, 4, 5])
def test_policy_and_rollout_have_the_slots_of_the_environment_in_its_order(slots: int) -> None:
    names = [f"block{index + 1}" for index in range(slots)]
    small = [setting for setting in SMALL if not setting.startswith("data.resolution")]
    config = compose_config(
        "run",
        [*small, "host=cifar_scale", f"slots.names=[{','.join(reversed(names))}]", "policy.hidden=16",
         "environment.steps=1", "environment.envs=1", "environment.batches=1"],
    )  # fmt: skip
    env = build_vector_env(config)
    module = build_module(config, env)
    assert list(env.layout.slots) == names, "the order of the host, not of slots.names"
    assert module.policy.layout == env.layout
    rollout = run_round(module, env)
    assert rollout.layout == env.layout
    assert rollout.masks.slot.shape[-1] == rollout.slots.shape[2] == slots
    assert module.metadata().to_dict()["layout"]["slots"] == names


# ---------------------------------------------------------------- the compiler


class GraphRecorder:
    """A torch.compile backend that records the operations of its graphs."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.operations += [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]
        return graph.forward


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_advantages_and_the_validation_of_masks_are_not_compiled() -> None:
    graphs = GraphRecorder()
    rewards, values, next_values = torch.randn(3, 2, 6)
    no_end = torch.zeros(2, 6, dtype=torch.bool)

    def scaled_gae(rewards: torch.Tensor) -> torch.Tensor:
        return 2 * gae(rewards + 1, values, next_values, no_end, no_end, gamma=0.9, lam=0.9)

    compiled = torch.compile(scaled_gae, backend=graphs)(rewards)
    torch.testing.assert_close(compiled, scaled_gae(rewards))
    assert len(graphs.operations) == 2, "one before and one after, none of gae itself"

    of = layout()
    logits = random_logits(of, 3, draws())
    masks = random_inputs(of, 3, draws()).masks
    without_ops = Masks(torch.zeros_like(masks.op), masks.slot, masks.others)

    def entropy(masks: Masks) -> torch.Tensor:
        return FactoredDistribution(logits, masks, of, {}, True).entropy()

    with pytest.raises(ValueError, match="without a legal option"):
        torch.compile(entropy, backend=graphs)(without_ops)
    assert not any("isfinite" in name or "tolist" in name for name in graphs.operations)


# ---------------------------------------------------------------- checkpoints


def test_earlier_versions_of_checkpoints_are_documented() -> None:
    assert METADATA_VERSION == 3
    assert "Versions 1 and 2 belong to policies with a fixed number of slots" in (metadata.__doc__ or "")


def test_other_sizes_of_features_or_lstm_are_refused(tmp_path: Path) -> None:
    train_and_save(tmp_path, rounds=1)
    assert len(read_checkpoint(tmp_path / LAST).metadata.layout.base) == 4
    for key in ("base", "slot"):
        env = MatchingEnv()
        env.layout = replace(env.layout, **{key: ("other", "names")})
        with pytest.raises(ValueError, match=rf"^{key}: this run has \['other', 'names'\], but the checkpoint"):
            restore(make_module(env), tmp_path / LAST, env)
    with pytest.raises(ValueError, match=r"^policy.hidden=24: the checkpoint .* has 16"):
        restore(make_module(MatchingEnv(), network={"hidden": 24}), tmp_path / LAST)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compilation_starts_after_the_weights_of_a_checkpoint_are_loaded(tmp_path: Path) -> None:
    trained = train_and_save(tmp_path, rounds=1, network={"layers": 0})
    graphs, fresh = GraphRecorder(), make_module(MatchingEnv(), run_seed=9, network={"layers": 0})
    fresh.policy.compile(backend=graphs)
    restore(fresh, tmp_path / LAST)
    assert graphs.operations == []
    inputs = random_inputs(fresh.policy.layout, 2, draws())
    torch.testing.assert_close(run_inputs(fresh.policy, inputs).value, run_inputs(trained.policy, inputs).value)
    assert graphs.operations
    torch.save({"esper": {"version": METADATA_VERSION + 1}}, tmp_path / "newer.ckpt")
    with pytest.raises(ValueError, match=rf"reads version {METADATA_VERSION}"):
        restore(fresh, tmp_path / "newer.ckpt")


def test_the_mode_of_compilation_is_saved_and_a_restored_policy_uses_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(Policy, "compile", lambda self, **options: modes.append(options["mode"]))
    train_and_save(tmp_path, rounds=1, network={"compile": "max-autotune"})
    assert read_checkpoint(tmp_path / LAST).metadata.compile == "max-autotune"
    fresh = make_module(MatchingEnv(), network={"compile": "max-autotune"})
    restore(fresh, tmp_path / LAST)
    assert modes == ["max-autotune", "max-autotune"]
    assert fresh.policy.compile_mode == "max-autotune"
    documented = " ".join((CheckpointMetadata.__doc__ or "").split())
    assert "mode of compilation" in documented
    assert "a resumed run compiles by its own configuration" in documented


def test_the_weights_of_a_checkpoint_are_freed_after_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_and_save(tmp_path, rounds=1)
    weights: list[Any] = []

    original = AtomicCheckpointIO.load_checkpoint

    def load_and_track(self: AtomicCheckpointIO, *args: Any, **kwargs: Any) -> dict[str, Any]:
        content = original(self, *args, **kwargs)
        weights.extend(weakref.ref(value) for value in content["state_dict"].values())
        return content

    monkeypatch.setattr(AtomicCheckpointIO, "load_checkpoint", load_and_track)
    fresh = make_module(MatchingEnv(), run_seed=9)
    restore(fresh, tmp_path / LAST)
    gc.collect()
    assert weights
    assert not any(reference() is not None for reference in weights)


def test_metrics_are_reported_for_the_heads_of_the_head_table_and_the_critic() -> None:
    env = MatchingEnv(actions="full")
    module = make_module(env)
    fit(module, env, rounds=1)
    for group in ("policy/entropy_", "policy/kl_", "policy/clipped_"):
        found = {name.removeprefix(group) for name in module.latest_metrics if name.startswith(group)}
        assert found - {"bonus", "stop"} == set(HEAD_NAMES)
    norms = {
        name.removeprefix("health/gradient_") for name in module.latest_metrics if name.startswith("health/gradient_")
    }
    assert norms == {*HEAD_NAMES, "value", "norm"}
