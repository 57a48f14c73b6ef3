import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.command_line import CONF
from esper.config import load_preset
from esper.environment import StepRecord
from esper.lifecycle import Rules, Stage
from esper.rewards import DETECTORS, Reward, terms
from tests.fixtures_environment import environment
from tests.lifecycle.fixtures_slots import act, play, quick, rules, space
from tests.rewards.fixtures_records import FIRST_SLOT, measured, on_slot, record, seed, with_seed_parameters

PRESETS = sorted(path.stem for path in (CONF / "reward").glob("*.yaml"))


def value_of(term: terms.Improvement, step: StepRecord) -> float:
    return term(step).item()


def preset(name: str, gamma: float = 1.0) -> Reward:
    changes = {"shaping": {"gamma": gamma}} if name not in ("sparse", "minimal") else {}
    return load_preset(f"reward/{name}", terms=changes)


# ---------------------------------------------------------------- potential shaping


@given(
    st.sampled_from(["core", "full", "lean"]),
    st.sampled_from([rules(dwell=1, cooldown=1, prune_age=0), quick()]),
    st.integers(0, 2**32),
    st.sampled_from([1.0, 0.99, 0.9]),
    st.booleans(),
)
def test_shaping_telescopes_exactly_through_every_transition(
    actions: str, rule: Rules, rng_seed: int, gamma: float, truncated: bool
) -> None:
    """Its discounted sum depends on the last state only, and is 0 after a termination."""
    action_space = space(actions)
    transitions = list(play(action_space, rule, envs=3, steps=25, seed=rng_seed))
    by_call = {call: [each for each in transitions if each.call == call] for call in ("apply", "tick")}
    term = terms.StagePotential(weight=0.3, gamma=gamma)
    total = torch.zeros(3, dtype=torch.float64)
    for step in range(25):
        applied, ticked = (by_call[call][step] for call in ("apply", "tick"))
        is_last = step == 24
        changed = replace(
            record(action_space=action_space),
            before=applied.before,
            after=ticked.after,
            now=measured(envs=3),
            terminated=torch.full((3,), is_last and not truncated),
        )
        total += gamma**step * term(changed).double()
    final = terms.potential(transitions[-1].after) if truncated else torch.zeros(3)
    expected = 0.3 * gamma**25 * final.double()
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-4)


def test_the_potential_sums_over_slots_and_grows_along_the_lifecycle() -> None:
    stages = [Stage.DORMANT, Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED]
    values = [terms.potential(seed(stage)).item() for stage in stages]
    assert values == sorted(set(values))
    everywhere = seed(Stage.HOLDING).where(torch.ones(1, 3, dtype=torch.bool), stage=Stage.HOLDING)
    assert terms.potential(everywhere).item() == pytest.approx(3 * values[4])


# ---------------------------------------------------------------- signs, end to end


def test_a_higher_score_and_a_lower_loss_give_a_positive_reward() -> None:
    env = environment("reward=objective", envs=1)
    env.reset([1])
    steps = [env.step(act(env.space, {"op": "WAIT"})) for _ in range(10)]
    loss = load_preset("reward/loss", terms={"shaping": {"gamma": 1.0}}).terms["improvement"]
    for step in steps:
        increase = step.record.now.score - step.record.earlier.score
        decrease = step.record.earlier.loss - step.record.now.loss
        assert torch.equal(step.rewarded.parts["improvement"].sign(), increase.sign())
        assert torch.equal(loss(step.record).sign(), decrease.sign())
    assert sum(loss(step.record).item() for step in steps) > 0


def test_the_return_of_an_episode_is_its_final_gain_minus_its_final_rent() -> None:
    env = environment("reward=objective", envs=1)
    env.reset([1])
    script = {
        0: {"op": "GERMINATE", "slot": "block2", "blueprint": "conv_light"},
        6: {"op": "FOSSILIZE", "slot": "block2"},
    }
    steps = [env.step(act(env.space, script.get(t, {"op": "WAIT"}))) for t in range(10)]
    last = steps[-1].record
    episode_return = sum(step.reward.item() for step in steps)
    growth = math.log((last.host_parameters + 2336).item() / last.host_parameters.item())
    assert episode_return == pytest.approx((last.now.score - last.initial_score).item() - growth, abs=1e-3)


def test_every_term_has_the_right_sign_in_a_real_episode() -> None:
    """Rent is charged when a seed germinates and returned when it is pruned; credit follows the measurements."""
    env = environment("reward=shaped", envs=1)
    env.reset([1])
    script = {0: {"op": "GERMINATE", "slot": "block2", "blueprint": "conv_light"}, 6: {"op": "PRUNE", "slot": "block2"}}
    steps = [env.step(act(env.space, script.get(t, {"op": "WAIT"}))) for t in range(10)]
    rent = [terms.Rent(weight=-1.0)(step.record).item() for step in steps]
    pruned_at = next(t for t, step in enumerate(steps) if step.record.entered[0, 1, Stage.PRUNED])
    assert rent[0] == pytest.approx(-math.log((6418 + 2336) / 6418), abs=1e-5)
    assert sum(rent) == pytest.approx(0, abs=1e-5)
    assert rent[pruned_at] > 0 or rent[pruned_at + 1] > 0
    for step in steps:
        parts, now, before = step.rewarded.parts, step.record.now, step.record.before
        assert (parts["rent"] < 0) == (now.parameters > 6418)
        credit = terms.credit(step.record.after.contribution, now.progress).sum()
        earlier_credit = terms.credit(before.contribution, step.record.earlier.progress).sum()
        if not step.record.terminated:
            assert parts["attribution"].item() == pytest.approx((credit - earlier_credit).item(), abs=1e-5)
    contribution = steps[6].record.before.contribution[0, 1].item()
    assert (steps[6].rewarded.parts["prune"].item() > 0) == (contribution < 0)


def test_growth_costs_rent_in_the_step_it_happens() -> None:
    grown = record(earlier=measured(parameters=1000.0), now=measured(parameters=2000.0))
    assert value_of(terms.Rent(weight=-1.0), grown) == pytest.approx(-math.log(2))
    shrunk = record(earlier=measured(parameters=2000.0), now=measured(parameters=1000.0))
    assert value_of(terms.Rent(weight=-1.0), shrunk) == pytest.approx(math.log(2))


def test_a_lower_loss_is_rewarded_and_a_higher_loss_costs_half() -> None:
    term = terms.LossImprovement(weight=5.0, sigma=0.1, cap=5.0)
    assert value_of(term, record(earlier=measured(loss=2.0), now=measured(loss=1.9))) == pytest.approx(5.0)
    assert value_of(term, record(earlier=measured(loss=1.9), now=measured(loss=2.0))) == pytest.approx(-2.5)
    assert value_of(term, record(earlier=measured(loss=99.0), now=measured(loss=1.0))) == pytest.approx(25.0)


def test_the_governors_penalty_is_a_term() -> None:
    assert value_of(terms.Rollback(weight=-10.0), record(rollback=1)) == -10
    assert value_of(terms.Rollback(weight=-10.0), record()) == 0


# ---------------------------------------------------------------- bounds and guards


def test_the_sparse_reward_is_clipped_before_it_is_weighted() -> None:
    high_score = record(is_last=True, now=measured(score=1000.0))
    assert value_of(terms.Sparse(weight=7.0, base=0.0, span=100.0, per_parameter=0.0), high_score) == pytest.approx(7.0)
    assert (
        value_of(terms.Sparse(weight=7.0, base=0.0, span=100.0, per_parameter=0.0), record(now=measured(score=50.0)))
        == 0
    )
    assert value_of(
        terms.Sparse(weight=2.0, base=0.0, span=100.0, per_parameter=1e-4),
        record(is_last=True, now=measured(score=50.0)),
    ) == pytest.approx(2 * (0.5 - 0.1))


@pytest.mark.parametrize("progress", [0.0, 1e-12, -1.0, math.nan])
def test_ratios_are_finite_without_a_gain(progress: float) -> None:
    step = record(now=measured(contribution=on_slot(8.0), progress=on_slot(progress)))
    term = terms.RatioPenalty(weight=-1.0, threshold=5.0, min_gain=0.0, cap=0.3)
    assert -0.3 <= value_of(term, step) <= 0
    assert torch.isfinite(terms.credit(on_slot(8.0), on_slot(progress))).all()


def test_the_ratio_penalty_starts_above_its_threshold_and_is_bounded() -> None:
    term = terms.RatioPenalty(weight=-1.0, threshold=5.0, min_gain=0.1, cap=0.3)
    values = [
        value_of(term, record(now=measured(contribution=on_slot(contribution), progress=on_slot(1.0))))
        for contribution in (4.0, 6.0, 10.0, 1e6)
    ]
    assert values[0] == 0
    assert values[0] > values[1] > values[2] > values[3]
    assert values[3] == pytest.approx(-0.3)


def test_the_indecision_penalty_grows_up_to_its_cap() -> None:
    term = terms.Indecision(weight=-1.0, grace=2, base=0.1, per_step=0.05, cap=0.3)
    values = [
        value_of(term, record(after=seed(Stage.HOLDING, steps_in_stage=steps, contribution=1.0))) for steps in range(12)
    ]
    assert values[:2] == [0, 0]
    assert values[2] == pytest.approx(-0.1)
    assert values[3:] == sorted(values[3:], reverse=True)
    assert min(values) == pytest.approx(-0.3)


def test_a_seed_is_credited_once() -> None:
    term = terms.Attribution(weight=1.0)
    slots, measurements = seed(Stage.HOLDING, contribution=3.0), measured(progress=on_slot(5.0))
    first = record(before=seed(Stage.HOLDING), after=slots, earlier=measurements, now=measurements)
    later = record(before=slots, after=slots, earlier=measurements, now=measurements)
    assert value_of(term, first) == pytest.approx(3.0)
    assert value_of(term, later) == 0
    assert value_of(term, replace(later, terminated=torch.tensor([True]))) == pytest.approx(-3.0)  # it is switched off
    fossil = seed(Stage.FOSSILIZED, contribution=3.0)
    assert (
        value_of(term, record(before=fossil, after=fossil, earlier=measurements, now=measurements, is_last=True)) == 0
    )


def test_only_seeds_that_blend_in_get_the_blending_warning() -> None:
    term = terms.BlendingWarning(weight=-1.0, base=0.1, per_step=0.05, cap=0.4)
    losing = measured(progress=on_slot(-1.0))
    blending_in = seed(Stage.BLENDING, alpha=0.5, alpha_target=1.0, steps_in_stage=1)
    blending_out = seed(Stage.BLENDING, alpha=0.5, alpha_target=0.0, steps_in_stage=1)
    assert value_of(term, record(after=blending_in, now=losing)) == pytest.approx(-0.15)
    assert value_of(term, record(after=blending_out, now=losing)) == 0


@pytest.mark.parametrize(
    ("contribution", "progress", "expected"),
    [(3.0, 5.0, 3.0), (6.0, 2.0, 3.0), (3.0, -1.0, 0.0), (-2.0, 5.0, -2.0), (math.nan, 5.0, 0.0)],
)
def test_credit_is_limited_by_the_gain_of_the_host(contribution: float, progress: float, expected: float) -> None:
    assert terms.credit(torch.tensor(contribution), torch.tensor(progress)).item() == pytest.approx(expected)


def test_the_prune_bonus_and_penalty_are_bounded() -> None:
    term = terms.PruneShaping(weight=1.0, harmful_bonus=0.15, useful_penalty=0.3, per_point=0.05, cap=0.9)
    action = {"op": "PRUNE", "slot": "block1"}
    values = [
        value_of(term, record(action=action, before=seed(Stage.HOLDING, contribution=value)))
        for value in (-1.0, 2.0, 1000.0, math.nan)
    ]
    assert values == pytest.approx([0.15, -0.4, -0.9, 0.0])


def test_seeds_that_are_pruned_together_each_have_their_bonus_or_penalty() -> None:
    prune = terms.PruneShaping(weight=1.0, harmful_bonus=0.15, useful_penalty=0.3, per_point=0.05, cap=0.9)
    two = torch.tensor([[True, True, False]])
    before = seed(Stage.HOLDING).where(two, stage=Stage.HOLDING, age=9, contribution=torch.tensor([[-1.0, 2.0, 0.0]]))
    step = record(action={"op": "PRUNE", "slot": "all"}, before=before, action_space=space("lean"))
    assert value_of(prune, step) == pytest.approx(0.15 - 0.4)
    early = terms.EarlyPrune(weight=-0.1, min_age=5)
    assert value_of(early, step) == 0, "the empty slot is not pruned"
    young = before.where(FIRST_SLOT, age=4)
    step = record(action={"op": "PRUNE", "slot": "all"}, before=young, action_space=space("lean"))
    assert value_of(early, step) == pytest.approx(-0.1)


def test_the_fossilize_bonus_depends_on_contribution_and_steps_in_holding() -> None:
    term = terms.FossilizeShaping(
        weight=1.0, min_contribution=1.0, base=0.5, per_point=0.1, cap=2.0, penalty=0.2, full_credit_steps=5
    )

    def bonus(contribution: float, steps: int, progress: float = 5.0) -> float:
        before = seed(Stage.HOLDING, contribution=contribution, steps_in_stage=steps)
        earlier = measured(progress=on_slot(progress))
        return value_of(term, record(before=before, entered={Stage.FOSSILIZED: FIRST_SLOT}, earlier=earlier))

    assert bonus(5.0, 5) == pytest.approx(1.0)
    assert bonus(5.0, 1) == pytest.approx(0.2)
    assert bonus(0.5, 5) == bonus(5.0, 5, progress=-1.0) == pytest.approx(-0.2)
    assert bonus(1e9, 5) == pytest.approx(1.5)  # the harmonic mean of the contribution and the host's five points
    assert bonus(1e9, 5, progress=1e9) == pytest.approx(2.0)


def test_final_terms_are_zero_before_the_last_step() -> None:
    last, middle = (record(is_last=is_last, now=measured(score=40.0, loss=1.3)) for is_last in (True, False))
    assert value_of(terms.FinalScore(weight=0.05), last) == pytest.approx(2.0)
    assert value_of(terms.FinalGain(weight=0.05), last) == pytest.approx(1.5)
    assert value_of(terms.FinalLoss(weight=1.0, base=2.3, target=0.3), last) == pytest.approx(0.5)
    for term in (
        terms.FinalScore(weight=1.0),
        terms.FinalGain(weight=1.0),
        terms.FinalLoss(weight=1, base=2, target=1),
    ):
        assert value_of(term, middle) == 0
    fossil = seed(Stage.FOSSILIZED, contribution=2.0)
    assert value_of(terms.FinalFossils(weight=2.0, min_contribution=1.0), record(is_last=True, after=fossil)) == 2


def test_standing_and_parameter_rent_charge_the_current_parameters() -> None:
    standing = terms.StandingRent(weight=-1.0, scale=0.5, cap=0.3, grace=3)
    grown = record(step=3, now=measured(parameters=1500.0))
    assert value_of(standing, grown) == pytest.approx(-0.5 * math.log(1.5))
    assert value_of(standing, replace(grown, step=2)) == 0
    assert value_of(standing, record(step=9, now=measured(parameters=1e9))) == pytest.approx(-0.3)
    half = with_seed_parameters(record(before=seed(Stage.BLENDING, alpha=0.5)), 1000.0)
    assert value_of(terms.ParameterRent(weight=-1.0, per_parameter=1e-3), half) == pytest.approx(-0.5)


def test_costs_are_per_op_and_unknown_ops_are_refused() -> None:
    term = terms.ActionCost(weight=-1.0, costs={"GERMINATE": 0.02})
    assert value_of(term, record(action={"op": "GERMINATE"})) == pytest.approx(-0.02)
    assert value_of(term, record()) == 0
    with pytest.raises(ValueError, match=r"costs\.CULL is unknown; must be one of WAIT, GERMINATE"):
        terms.ActionCost(weight=-1.0, costs={"CULL": 1.0})


def test_pruning_a_young_seed_costs() -> None:
    term = terms.EarlyPrune(weight=-0.1, min_age=5)
    action = {"op": "PRUNE", "slot": "block1"}
    assert value_of(term, record(action=action, before=seed(Stage.TRAINING, age=4))) == pytest.approx(-0.1)
    assert value_of(term, record(action=action, before=seed(Stage.TRAINING, age=5))) == 0


# ---------------------------------------------------------------- detectors and presets


def test_detectors_find_reward_hacking_and_ransomware_and_nothing_else() -> None:
    def detect_all(contribution: float, progress: float) -> dict[str, bool]:
        step = record(now=measured(contribution=on_slot(contribution), progress=on_slot(progress)))
        return {name: bool(detect(step).any()) for name, detect in DETECTORS.items()}

    assert detect_all(10.0, 1.0) == {"reward_hacking": True, "ransomware": False}
    assert detect_all(2.0, -1.0) == {"reward_hacking": False, "ransomware": True}
    assert detect_all(2.0, 3.0) == detect_all(math.nan, math.nan) == {"reward_hacking": False, "ransomware": False}
    breakdown = preset("objective")(record(now=measured(contribution=on_slot(10.0), progress=on_slot(1.0))))
    assert breakdown.findings["reward_hacking"].tolist() == [[True, False, False]]


@pytest.mark.parametrize("name", PRESETS)
def test_the_reward_is_the_sum_of_its_terms_in_a_real_episode(name: str) -> None:
    env = environment(f"reward={name}", "gamma=0.99", envs=2)
    env.reset([1, 2])
    script = {0: {"op": "GERMINATE", "slot": "block2", "blueprint": "conv_light"}, 7: {"op": "PRUNE", "slot": "block2"}}
    for t in range(10):
        step = env.step(act(env.space, script.get(t, {"op": "WAIT"}), {"op": "WAIT"}))
        assert step.reward.isfinite().all()
        torch.testing.assert_close(step.reward, torch.stack(list(step.rewarded.parts.values())).sum(0))
        assert step.reward.abs().max() < 200


def test_all_documented_presets_exist() -> None:
    assert PRESETS == ["basic", "loss", "minimal", "objective", "score", "shaped", "simplified", "sparse"]
    assert preset("shaped", gamma=0.97).gammas == {"shaping": 0.97}


def test_the_return_of_an_episode_is_its_score_with_the_reward_score() -> None:
    env = environment("reward=score", "+environment.rent=0.5", envs=2)
    env.reset([1, 2])
    germinate = {"op": "GERMINATE", "slot": "block2", "blueprint": "conv_light"}
    script = {0: germinate, 9: {"op": "FOSSILIZE", "slot": "block2"}}
    rewards = [env.step(act(env.space, script.get(t, {"op": "WAIT"}), {"op": "WAIT"})).reward for t in range(10)]
    assert torch.stack(rewards)[:-1].count_nonzero() == 0
    assert env.outcome()["growth"][0] > 1
    torch.testing.assert_close(rewards[-1], env.outcome()["score"])


def test_an_empty_reward_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reward\.terms=\{\}: must have at least one term"):
        Reward({})
