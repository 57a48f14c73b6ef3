import numpy as np
import pytest

from esper.evaluation.claims import NO_DIFFERENCE, TOO_FEW, ArmComparison, compare_arms, describe_scope, format_p_value
from esper.evaluation.document import Paragraph, ReportTable
from esper.evaluation.provenance import Provenance
from esper.evaluation.results import TaskResults, group_by_task
from esper.evaluation.sections import report_sections
from esper.evaluation.statistics import MIN_UNITS, Estimate
from tests.evaluation.fixtures_episodes import make_episodes

NOISE = np.random.default_rng(0).normal(0, 1, 10)


def make_comparison(
    value: float, p_value: float, episode_seeds: int = 10, controllers: int | None = None
) -> ArmComparison:
    strata = [np.zeros((1, episode_seeds))]
    return ArmComparison("none", Estimate(value, value - 1, value + 1), p_value, False, (strata, strata), controllers)


@pytest.mark.parametrize(
    ("value", "p_value", "episode_seeds", "outcome"),
    [
        (1.0, 0.04, 10, "better"),
        (-1.0, 0.04, 10, "worse"),
        (1.0, 0.05, 10, NO_DIFFERENCE),
        (1.0, 0.01, MIN_UNITS - 1, TOO_FEW),
    ],
)
def test_a_difference_is_claimed_below_5_percent_on_enough_episode_seeds(
    value: float, p_value: float, episode_seeds: int, outcome: str
) -> None:
    found = make_comparison(value, p_value, episode_seeds)
    assert found.outcome == found.claim == outcome
    assert found.is_claim == (outcome in ("better", "worse"))


@pytest.mark.parametrize(
    ("controllers", "claim"),
    [
        (1, "better, of this controller"),
        (3, "better, of these controllers"),
        (MIN_UNITS - 1, "better, of these controllers"),
        (MIN_UNITS, "better"),
        (None, "better"),
    ],
)
def test_a_claim_about_few_controllers_is_of_these_controllers(controllers: int | None, claim: str) -> None:
    assert make_comparison(1.0, 0.01, controllers=controllers).claim == claim
    assert make_comparison(1.0, 0.50, controllers=controllers).claim == NO_DIFFERENCE
    assert bool(describe_scope(controllers)) == (claim != "better")


def make_task(gains: dict[str, float], controllers: int = 1) -> TaskResults:
    """ppo scores 40, and each arm less by its gain of ppo, with noise of its own."""
    rng = np.random.default_rng(1)
    episodes = []
    for number in range(controllers):
        episodes += make_episodes("ppo", list(40 + rng.normal(0, 0.1, 10)), checkpoint=f"/{number}")
    for name, gain in gains.items():
        episodes += make_episodes(name, list(40 - gain + rng.normal(0, 1, 10)))
    (task,), _ = group_by_task(episodes)
    return task


def test_p_values_are_adjusted_for_the_number_of_arms_and_the_primary_one_is_not() -> None:
    gains = {"none": 0.38, "random": 5.0, "schedule": 0.0, "heuristic": 0.0, "fragrow": 0.0}
    task = make_task(gains)
    adjusted = {one.arm: one for one in compare_arms([task], "ppo")}
    alone = compare_arms([make_task({"none": 0.38})], "ppo")[0]
    assert alone.p_value == alone.gap.p_value
    none = adjusted["none"]
    assert none.p_value == pytest.approx(4 * none.gap.p_value)  # the second smallest of five
    assert none.gap.excludes_zero
    assert none.outcome == NO_DIFFERENCE
    assert adjusted["random"].outcome == "better"
    primary = {one.arm: one for one in compare_arms([task], "ppo", "none")}
    assert primary["none"].is_primary
    assert primary["none"].p_value == none.gap.p_value
    assert primary["none"].outcome == "better"
    assert primary["random"].p_value == pytest.approx(4 * primary["random"].gap.p_value)  # of the other four


@pytest.mark.parametrize(("controllers", "is_limited"), [(3, True), (6, False)])
def test_the_report_limits_claims_to_few_controllers(controllers: int, is_limited: bool) -> None:
    _, sections = report_sections([make_task({"none": 5.0}, controllers)], Provenance(primary="none"))
    blocks = {section.title: section.blocks for section in sections}
    answer = blocks["The question"][1]
    assert isinstance(answer, Paragraph)
    assert ("scores above none: a result of these controllers, not of training runs in general." in answer.text) == (
        is_limited
    )
    table, note = blocks["Paired differences"][:2]
    assert isinstance(table, ReportTable)
    assert isinstance(note, Paragraph)
    assert table.rows[0][0] == "ppo - none (primary)"
    assert table.rows[0][-1] == ("better, of these controllers" if is_limited else "better")
    assert ("results are of these controllers; nothing is claimed about training runs in general" in note.text) == (
        is_limited
    )


def test_small_p_values_are_not_printed_as_zero() -> None:
    assert format_p_value(0.0004) == "< 0.001"
    assert format_p_value(0.0412) == "0.041"
