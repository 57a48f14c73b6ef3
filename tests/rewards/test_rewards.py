import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.config import CONF, load_preset
from esper.environment import StepRecord
from esper.lifecycle import Stage
from esper.rewards import DETECTORS, Reward, terms
from tests.fixtures_environment import environment
from tests.lifecycle.fixtures_slots import act, play, rules, space
from tests.rewards.fixtures_records import HERE, measured, on_slot, record, seed, with_seed_parameters

PRESETS = sorted(path.stem for path in (CONF / "reward").glob("*.yaml"))


def pay(term: terms.Improvement, step: StepRecord) -> float:
    return term(step).item()


def preset(name: str, gamma: float = 1.0) -> Reward:
    changes = {"shaping": {"gamma": gamma}} if name not in ("sparse", "minimal") else {}
    return load_preset(f"reward/{name}", terms=changes)


# ---------------------------------------------------------------- potential shaping


@given(st.sampled_from(["core", "full"]), st.integers(0, 2**32), st.sampled_from([1.0, 0.99, 0.9]), st.booleans())
def test_shaping_telescopes_exactly_through_every_transition(
    actions: str, seed: int, gamma: float, truncated: bool
) -> None:
    """Its discounted sum is that of the last state alone, and nothing where the episode terminated."""
    chosen, rule = space(actions), rules(dwell=1, cooldown=1, prune_age=0)
    turns = list(play(chosen, rule, envs=3, steps=25, seed=seed))
    term = terms.StagePotential(weight=0.3, gamma=gamma)
    paid = torch.zeros(3, dtype=torch.float64)
    for step in range(25):
        applied, ticked = turns[2 * step], turns[2 * step + 1]
        last = step == 24
        made = replace(
            record(chosen=chosen),
            before=applied.before,
            after=ticked.after,
            now=measured(envs=3),
            terminated=torch.full((3,), last and not truncated),
        )
        paid += gamma**step * term(made).double()
    left = terms.potential(turns[-1].after) if truncated else torch.zeros(3)
    expected = 0.3 * gamma**25 * left.double()
    torch.testing.assert_close(paid, expected, rtol=0, atol=1e-4)


def test_the_potential_sees_every_slot_and_grows_along_the_lifecycle() -> None:
    along = [Stage.DORMANT, Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED]
    values = [terms.potential(seed(stage)).item() for stage in along]
    assert values == sorted(set(values))
    everywhere = seed(Stage.HOLDING).where(torch.ones(1, 3, dtype=torch.bool), stage=Stage.HOLDING)
    assert terms.potential(everywhere).item() == pytest.approx(3 * values[4])


# ---------------------------------------------------------------- signs, end to end


def test_a_run_whose_score_rises_and_loss_falls_is_paid_for_it() -> None:
    env = environment("reward=objective", envs=1)
    env.reset([1])
    steps = [env.step(act(env.space, {"op": "WAIT"})) for _ in range(10)]
    loss = load_preset("reward/loss", terms={"shaping": {"gamma": 1.0}}).terms["improvement"]
    for step in steps:
        rise = step.record.now.score - step.record.earlier.score
        fall = step.record.earlier.loss - step.record.now.loss
        assert torch.equal(step.rewarded.parts["improvement"].sign(), rise.sign())
        assert torch.equal(loss(step.record).sign(), fall.sign())
    assert sum(loss(step.record).item() for step in steps) > 0


def test_an_episodes_return_is_its_final_score_less_its_final_rent() -> None:
    env = environment("reward=objective", envs=1)
    env.reset([1])
    script = {
        0: {"op": "GERMINATE", "slot": "block2", "blueprint": "conv_light"},
        6: {"op": "FOSSILIZE", "slot": "block2"},
    }
    steps = [env.step(act(env.space, script.get(t, {"op": "WAIT"}))) for t in range(10)]
    last = steps[-1].record
    earned = sum(step.reward.item() for step in steps)
    growth = math.log((last.host_parameters + 2336).item() / last.host_parameters.item())
    assert earned == pytest.approx((last.now.score - last.initial_score).item() - growth, abs=1e-3)


def test_every_signal_of_a_real_run_has_its_sign() -> None:
    """Rent falls due when a seed germinates and is paid back when it is pruned; credit follows what was measured."""
    env = environment("reward=shaped", envs=1)
    env.reset([1])
    script = {0: {"op": "GERMINATE", "slot": "block2", "blueprint": "conv_light"}, 6: {"op": "PRUNE", "slot": "block2"}}
    steps = [env.step(act(env.space, script.get(t, {"op": "WAIT"}))) for t in range(10)]
    rent = [terms.Rent(weight=-1.0)(step.record).item() for step in steps]
    gone = next(t for t, step in enumerate(steps) if step.record.entered[0, 1, Stage.PRUNED])
    assert rent[0] == pytest.approx(-math.log((6418 + 2336) / 6418), abs=1e-5)
    assert sum(rent) == pytest.approx(0, abs=1e-5)
    assert rent[gone] > 0 or rent[gone + 1] > 0
    for step in steps:
        standing, now, before = step.rewarded.parts, step.record.now, step.record.before
        assert (standing["rent"] < 0) == (now.parameters > 6418)
        earned = terms.credit(step.record.after.contribution, now.progress).sum()
        owned = terms.credit(before.contribution, step.record.earlier.progress).sum()
        if not step.record.terminated:
            assert standing["attribution"].item() == pytest.approx((earned - owned).item(), abs=1e-5)
    pruned = steps[6].record.before.contribution[0, 1].item()
    assert (steps[6].rewarded.parts["prune"].item() > 0) == (pruned < 0)


def test_growing_costs_rent_when_it_happens() -> None:
    grown = record(earlier=measured(parameters=1000.0), now=measured(parameters=2000.0))
    assert pay(terms.Rent(weight=-1.0), grown) == pytest.approx(-math.log(2))
    shrunk = record(earlier=measured(parameters=2000.0), now=measured(parameters=1000.0))
    assert pay(terms.Rent(weight=-1.0), shrunk) == pytest.approx(math.log(2))


def test_a_fall_of_the_loss_pays_and_a_rise_costs_half() -> None:
    term = terms.LossImprovement(weight=5.0, sigma=0.1, cap=5.0)
    assert pay(term, record(earlier=measured(loss=2.0), now=measured(loss=1.9))) == pytest.approx(5.0)
    assert pay(term, record(earlier=measured(loss=1.9), now=measured(loss=2.0))) == pytest.approx(-2.5)
    assert pay(term, record(earlier=measured(loss=99.0), now=measured(loss=1.0))) == pytest.approx(25.0)


def test_the_governors_penalty_is_a_term() -> None:
    assert pay(terms.Rollback(weight=-10.0), record(rollback=1)) == -10
    assert pay(terms.Rollback(weight=-10.0), record()) == 0


# ---------------------------------------------------------------- bounds and guards


def test_the_sparse_reward_is_held_in_bounds_before_it_is_weighted() -> None:
    rich = record(ended=True, now=measured(score=1000.0))
    assert pay(terms.Sparse(weight=7.0, base=0.0, span=100.0, per_parameter=0.0), rich) == pytest.approx(7.0)
    assert pay(terms.Sparse(weight=7.0, base=0.0, span=100.0, per_parameter=0.0), record(now=measured(score=50.0))) == 0
    assert pay(
        terms.Sparse(weight=2.0, base=0.0, span=100.0, per_parameter=1e-4), record(ended=True, now=measured(score=50.0))
    ) == pytest.approx(2 * (0.5 - 0.1))


@pytest.mark.parametrize("progress", [0.0, 1e-12, -1.0, math.nan])
def test_ratios_are_never_formed_with_nothing(progress: float) -> None:
    step = record(now=measured(contribution=on_slot(8.0), progress=on_slot(progress)))
    term = terms.RatioPenalty(weight=-1.0, threshold=5.0, min_gain=0.0, cap=0.3)
    assert -0.3 <= pay(term, step) <= 0
    assert torch.isfinite(terms.credit(on_slot(8.0), on_slot(progress))).all()


def test_the_ratio_penalty_starts_above_its_threshold_and_is_bounded() -> None:
    term = terms.RatioPenalty(weight=-1.0, threshold=5.0, min_gain=0.1, cap=0.3)
    paid = [
        pay(term, record(now=measured(contribution=on_slot(contribution), progress=on_slot(1.0))))
        for contribution in (4.0, 6.0, 10.0, 1e6)
    ]
    assert paid[0] == 0
    assert paid[0] > paid[1] > paid[2] > paid[3]
    assert paid[3] == pytest.approx(-0.3)


def test_indecision_grows_boundedly() -> None:
    term = terms.Indecision(weight=-1.0, grace=2, base=0.1, per_step=0.05, cap=0.3)
    paid = [
        pay(term, record(after=seed(Stage.HOLDING, steps_in_stage=epochs, contribution=1.0))) for epochs in range(12)
    ]
    assert paid[:2] == [0, 0]
    assert paid[2] == pytest.approx(-0.1)
    assert paid[3:] == sorted(paid[3:], reverse=True)
    assert min(paid) == pytest.approx(-0.3)


def test_a_seed_is_credited_once_however_long_it_stays() -> None:
    term = terms.Attribution(weight=1.0)
    slots, figures = seed(Stage.HOLDING, contribution=3.0), measured(progress=on_slot(5.0))
    came = record(before=seed(Stage.HOLDING), after=slots, earlier=figures, now=figures)
    stayed = record(before=slots, after=slots, earlier=figures, now=figures)
    assert pay(term, came) == pytest.approx(3.0)
    assert pay(term, stayed) == 0
    assert pay(term, replace(stayed, terminated=torch.tensor([True]))) == pytest.approx(-3.0)  # it is switched off
    fossil = seed(Stage.FOSSILIZED, contribution=3.0)
    assert pay(term, record(before=fossil, after=fossil, earlier=figures, now=figures, ended=True)) == 0


def test_only_seeds_on_their_way_in_are_warned() -> None:
    term = terms.BlendingWarning(weight=-1.0, base=0.1, per_step=0.05, cap=0.4)
    losing = measured(progress=on_slot(-1.0))
    coming = seed(Stage.BLENDING, alpha=0.5, alpha_target=1.0, steps_in_stage=1)
    going = seed(Stage.BLENDING, alpha=0.5, alpha_target=0.0, steps_in_stage=1)
    assert pay(term, record(after=coming, now=losing)) == pytest.approx(-0.15)
    assert pay(term, record(after=going, now=losing)) == 0


@pytest.mark.parametrize(
    ("contribution", "progress", "expected"),
    [(3.0, 5.0, 3.0), (6.0, 2.0, 3.0), (3.0, -1.0, 0.0), (-2.0, 5.0, -2.0), (math.nan, 5.0, 0.0)],
)
def test_credit_follows_contribution_only_as_far_as_the_host_has_gained(
    contribution: float, progress: float, expected: float
) -> None:
    assert terms.credit(torch.tensor(contribution), torch.tensor(progress)).item() == pytest.approx(expected)


def test_pruning_is_shaped_within_bounds() -> None:
    term = terms.PruneShaping(weight=1.0, harmful_bonus=0.15, useful_penalty=0.3, per_point=0.05, cap=0.9)
    action = {"op": "PRUNE", "slot": "block1"}
    paid = [
        pay(term, record(action=action, before=seed(Stage.HOLDING, contribution=value)))
        for value in (-1.0, 2.0, 1000.0, math.nan)
    ]
    assert paid == pytest.approx([0.15, -0.4, -0.9, 0.0])


def test_fossilising_pays_for_contribution_and_legitimacy() -> None:
    term = terms.FossilizeShaping(
        weight=1.0, min_contribution=1.0, base=0.5, per_point=0.1, cap=2.0, penalty=0.2, full_credit_steps=5
    )

    def paid(contribution: float, epochs: int, progress: float = 5.0) -> float:
        before = seed(Stage.HOLDING, contribution=contribution, steps_in_stage=epochs)
        earlier = measured(progress=on_slot(progress))
        return pay(term, record(before=before, entered={Stage.FOSSILIZED: HERE}, earlier=earlier))

    assert paid(5.0, 5) == pytest.approx(1.0)
    assert paid(5.0, 1) == pytest.approx(0.2)
    assert paid(0.5, 5) == paid(5.0, 5, progress=-1.0) == pytest.approx(-0.2)
    assert paid(1e9, 5) == pytest.approx(1.5)  # the harmonic mean of it and the host's five points
    assert paid(1e9, 5, progress=1e9) == pytest.approx(2.0)


def test_terminal_terms_pay_only_at_the_end() -> None:
    end, middle = (record(ended=ended, now=measured(score=40.0, loss=1.3)) for ended in (True, False))
    assert pay(terms.FinalScore(weight=0.05), end) == pytest.approx(2.0)
    assert pay(terms.FinalGain(weight=0.05), end) == pytest.approx(1.5)
    assert pay(terms.FinalLoss(weight=1.0, base=2.3, target=0.3), end) == pytest.approx(0.5)
    for term in (
        terms.FinalScore(weight=1.0),
        terms.FinalGain(weight=1.0),
        terms.FinalLoss(weight=1, base=2, target=1),
    ):
        assert pay(term, middle) == 0
    fossil = seed(Stage.FOSSILIZED, contribution=2.0)
    assert pay(terms.FinalFossils(weight=2.0, min_contribution=1.0), record(ended=True, after=fossil)) == 2


def test_rents_of_the_presets_charge_what_is_there() -> None:
    standing = terms.StandingRent(weight=-1.0, scale=0.5, cap=0.3, grace=3)
    grown = record(step=3, now=measured(parameters=1500.0))
    assert pay(standing, grown) == pytest.approx(-0.5 * math.log(1.5))
    assert pay(standing, replace(grown, step=2)) == 0
    assert pay(standing, record(step=9, now=measured(parameters=1e9))) == pytest.approx(-0.3)
    half = with_seed_parameters(record(before=seed(Stage.BLENDING, alpha=0.5)), 1000.0)
    assert pay(terms.ParameterRent(weight=-1.0, per_parameter=1e-3), half) == pytest.approx(-0.5)


def test_costs_are_per_op_and_unknown_ops_are_refused() -> None:
    term = terms.ActionCost(weight=-1.0, costs={"GERMINATE": 0.02})
    assert pay(term, record(action={"op": "GERMINATE"})) == pytest.approx(-0.02)
    assert pay(term, record()) == 0
    with pytest.raises(ValueError, match="the op CULL is unknown; allowed are WAIT, GERMINATE"):
        terms.ActionCost(weight=-1.0, costs={"CULL": 1.0})


def test_pruning_too_young_costs() -> None:
    term = terms.EarlyPrune(weight=-0.1, min_age=5)
    action = {"op": "PRUNE", "slot": "block1"}
    assert pay(term, record(action=action, before=seed(Stage.TRAINING, min_age=4))) == pytest.approx(-0.1)
    assert pay(term, record(action=action, before=seed(Stage.TRAINING, min_age=5))) == 0


# ---------------------------------------------------------------- detectors and presets


def test_detectors_find_what_they_are_for_and_nothing_else() -> None:
    def found(contribution: float, progress: float) -> dict[str, bool]:
        step = record(now=measured(contribution=on_slot(contribution), progress=on_slot(progress)))
        return {name: bool(detect(step).any()) for name, detect in DETECTORS.items()}

    assert found(10.0, 1.0) == {"reward_hacking": True, "ransomware": False}
    assert found(2.0, -1.0) == {"reward_hacking": False, "ransomware": True}
    assert found(2.0, 3.0) == found(math.nan, math.nan) == {"reward_hacking": False, "ransomware": False}
    payment = preset("objective")(record(now=measured(contribution=on_slot(10.0), progress=on_slot(1.0))))
    assert payment.findings["reward_hacking"].tolist() == [[True, False, False]]


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_total_is_the_sum_of_its_parts_through_a_real_episode(name: str) -> None:
    env = environment(f"reward={name}", "gamma=0.99", envs=2)
    env.reset([1, 2])
    script = {0: {"op": "GERMINATE", "slot": "block2", "blueprint": "conv_light"}, 7: {"op": "PRUNE", "slot": "block2"}}
    for t in range(10):
        step = env.step(act(env.space, script.get(t, {"op": "WAIT"}), {"op": "WAIT"}))
        assert step.reward.isfinite().all()
        torch.testing.assert_close(step.reward, torch.stack(list(step.rewarded.parts.values())).sum(0))
        assert step.reward.abs().max() < 200


def test_there_are_the_promised_presets() -> None:
    assert PRESETS == ["basic", "loss", "minimal", "objective", "shaped", "simplified", "sparse"]
    assert preset("shaped", gamma=0.97).gammas == {"shaping": 0.97}


def test_an_empty_reward_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reward\.terms: must name at least one term"):
        Reward({})
