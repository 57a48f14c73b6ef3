"""Automatic commits, ramps of a fixed length, and the rules `quick`."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.controllers import calibrate_rates
from esper.controllers.random_controller import _simulate_counts
from esper.growth import Mode, SeedSetting, seed_settings
from esper.lifecycle import ActionSpace, Op, Rules, SeedMeasurements, Slots, Stage, apply, commit, legal, tick
from tests.lifecycle.fixtures_slots import act, play, quick, rules, space

WAIT = {"op": "WAIT"}
SPACES = st.sampled_from(["core", "full", "lean"])
RULES = st.sampled_from(
    [quick(), quick(commit="explicit"), quick(ramp=2)]
    + [rules(health=health, keep=keep) for health, keep in product([None, 0.4], ["explicit", "auto"])]
)
RNG_SEEDS = st.integers(0, 2**32)
few_examples = settings(max_examples=10)  # each is many transitions of several environments


def seed(stage: Stage, **values: float) -> Slots:
    """One slot with a healthy, fully blended seed, except for `values`."""
    blended = {
        "alpha": 1,
        "alpha_target": 1,
        "health": 1,
        "age": 9,
        "steps_in_stage": 9,
        "ramp_ticks": 3,
        "ramp_done": 3,
    }
    return Slots.empty(1, 1).where(torch.ones(1, 1, dtype=torch.bool), stage=stage, **{**blended, **values})


def stages(slots: Slots) -> list[str]:
    return [Stage(stage).name for stage in slots.stage.flatten().tolist()]


def entered(events: torch.Tensor) -> list[str]:
    return [Stage(stage).name for stage in events.flatten().nonzero().flatten().tolist()]


def healthy(slots: Slots) -> SeedMeasurements:
    return SeedMeasurements(contribution=torch.zeros_like(slots.alpha), health=torch.ones_like(slots.alpha))


def trace(chosen: ActionSpace, rule: Rules, choices: list[dict[str, str]]) -> list[tuple[str, float]]:
    """Stage and alpha of the first slot during each step; the seed is healthy."""
    slots, states = Slots.empty(1, 1), []
    for choice in choices:
        slots, _ = apply(slots, act(chosen, choice), chosen, rule)
        states.append((stages(slots)[0], round(slots.alpha.item(), 3)))
        slots, _ = tick(slots, healthy(slots), chosen, rule)
    return states


@few_examples
@given(SPACES, RULES, RNG_SEEDS)
def test_a_commit_leaves_no_fully_blended_healthy_seed_alive(actions: str, rule: Rules, rng_seed: int) -> None:
    for transition in play(space(actions), rule, envs=8, steps=24, seed=rng_seed):
        before = transition.after
        after, events = commit(before, rule)
        required = rule.gates[Stage.HOLDING].health
        is_healthy = torch.ones_like(before.live) if required is None else before.health >= required
        kept = before.live & (before.alpha == 1) & ~before.moving & (before.alpha_target == 1) & is_healthy
        expected = kept if rule.commit == "auto" else torch.zeros_like(kept)
        assert torch.equal(events.into(Stage.FOSSILIZED), expected)
        assert torch.equal(after.stage != before.stage, expected)
        assert (after.stage[expected] == Stage.FOSSILIZED).all()
        again, none = commit(after, rule)
        assert torch.equal(again.stage, after.stage)
        assert not none.entered.any()


@few_examples
@given(SPACES, RNG_SEEDS)
def test_an_explicit_commit_returns_the_same_slots(actions: str, rng_seed: int) -> None:
    for transition in play(space(actions), quick(commit="explicit"), envs=4, steps=12, seed=rng_seed):
        after, events = commit(transition.after, quick(commit="explicit"))
        assert after is transition.after
        assert not events.entered.any()


def test_random_episodes_commit_seeds_from_blending_and_from_holding() -> None:
    slow = rules(dwell=2, ramp=0, keep="auto", steps=20)
    for actions in ("core", "full"):
        last = [t for t in play(space(actions), slow, envs=64, steps=12, seed=0) if t.call == "commit"]
        assert len(last) == 1
        new = last[0].events.into(Stage.FOSSILIZED)
        assert set(last[0].before.stage[new].tolist()) == {Stage.BLENDING, Stage.HOLDING}


def test_a_commit_from_blending_passes_through_holding() -> None:
    after, events = commit(seed(Stage.BLENDING), quick())
    assert stages(after) == ["FOSSILIZED"]
    assert entered(events.entered) == ["HOLDING", "FOSSILIZED"]
    assert after.steps_in_stage.item() == 0
    assert entered(commit(seed(Stage.HOLDING), quick())[1].entered) == ["FOSSILIZED"]


@pytest.mark.parametrize(
    ("stage", "values"),
    [
        (Stage.HOLDING, {"health": math.nan}),
        (Stage.HOLDING, {"health": 0.05}),
        (Stage.BLENDING, {"alpha": 0.7, "alpha_target": 0.7}),
        (Stage.BLENDING, {"ramp_done": 2}),
        (Stage.BLENDING, {"alpha_target": 0}),
        (Stage.TRAINING, {"alpha": 0}),
    ],
)
def test_a_seed_that_is_unhealthy_or_not_fully_blended_is_not_committed(stage: Stage, values: dict[str, float]) -> None:
    after, events = commit(seed(stage, **values), quick())
    assert stages(after) == [stage.name]
    assert not events.entered.any()


def test_a_commit_needs_no_health_if_the_gate_of_holding_requires_none() -> None:
    assert stages(commit(seed(Stage.HOLDING, health=math.nan), rules(keep="auto"))[0]) == ["FOSSILIZED"]


@pytest.mark.parametrize(
    ("ramp", "alphas"),
    [(0, [1.0]), (1, [1.0]), (2, [0.5, 1.0]), (4, [0.25, 0.5, 0.75, 1.0]), (None, [0.333, 0.667, 1.0])],
)
def test_a_ramp_of_the_rules_overrides_the_tempo_and_reaches_exactly_one(ramp: int | None, alphas: list[float]) -> None:
    states = trace(space("core", slots=1), quick(ramp=ramp), [{"op": "GERMINATE"}, *[WAIT] * 6])
    assert [alpha for _, alpha in states] == alphas + [1.0] * (7 - len(alphas))
    assert states[-1] == ("HOLDING", 1.0)
    full = space("full", slots=1)
    germinate = {"op": "GERMINATE", "tempo": "SLOW", "alpha_target": "FULL"}
    if ramp is not None:
        states = trace(full, quick(ramp=ramp), [germinate, {"op": "ADVANCE"}, {"op": "ADVANCE"}, *[WAIT] * 6])
        assert [alpha for _, alpha in states[2:]] == alphas + [1.0] * (7 - len(alphas))


@pytest.mark.parametrize("blend", ["ADD", "MULTIPLY", "GATED"])
def test_a_quick_seed_is_fully_blended_in_the_step_that_follows_its_germination(blend: str) -> None:
    core = space("core")
    action = act(core, {"op": "GERMINATE", "slot": "block2", "blend": blend})
    during, events = apply(Slots.empty(1, 3), action, core, quick())
    assert seed_settings(during, 0, core.slots) == {"block2": SeedSetting(Mode.BLENDED, 1.0)}
    assert entered(events.entered[0, 1]) == ["GERMINATED", "TRAINING", "BLENDING", "HOLDING"]
    assert stages(commit(during, quick())[0]) == ["DORMANT", "HOLDING", "DORMANT"]  # its health is not measured yet
    after, _ = tick(during, healthy(during), core, quick())
    masks = legal(after, core, quick())
    assert {op.name for op, is_legal in zip(core.ops, masks.op[0], strict=True) if is_legal} == {
        op.name for op in core.ops
    }
    assert stages(commit(after, quick())[0]) == ["DORMANT", "FOSSILIZED", "DORMANT"]


def test_a_quick_seed_of_the_full_space_waits_for_advance() -> None:
    germinate = {"op": "GERMINATE", "alpha_target": "FULL"}
    choices = [germinate, WAIT, *[{"op": "ADVANCE"}] * 3, {"op": "FOSSILIZE"}]
    assert trace(space("full", slots=1), quick(), choices) == [
        ("GERMINATED", 0.0),
        ("GERMINATED", 0.0),
        ("TRAINING", 0.0),
        ("BLENDING", 1.0),
        ("HOLDING", 1.0),
        ("FOSSILIZED", 1.0),
    ]


def test_only_new_seeds_advance_in_apply() -> None:
    """A seed whose alpha has reached 1 holds after a step at that alpha, as its gate applies to a whole step."""
    core = space("core", slots=1)
    after, events = apply(seed(Stage.BLENDING), act(core, WAIT), core, quick())
    assert stages(after) == ["BLENDING"]
    assert not events.entered.any()


def test_the_slot_of_a_pruned_quick_seed_is_soon_free() -> None:
    instant = space("full", slots=1)
    prune = {"op": "PRUNE", "alpha_speed": "INSTANT"}
    germinate = {"op": "GERMINATE", "alpha_target": "FULL"}
    states = trace(instant, quick(), [germinate, {"op": "ADVANCE"}, {"op": "ADVANCE"}, prune, germinate])
    assert [stage for stage, _ in states[2:]] == ["BLENDING", "PRUNED", "GERMINATED"]


@pytest.mark.parametrize("actions", ["core", "full", "lean"])
def test_calibrated_rates_match_the_wanted_counts_with_quick_rules(actions: str) -> None:
    chosen = space(actions)
    wanted = {"WAIT": 15.0, "GERMINATE": 3.0, "PRUNE": 1.0, "FOSSILIZE": 1.0}
    if Op.ADVANCE in chosen.ops:
        wanted |= {"WAIT": 8.0, "ADVANCE": 7.0}
    names = [op.name for op in chosen.ops]
    if chosen.all_slots:
        wanted = {"WAIT": 15.0, "GERMINATE": 2.0, "GERMINATE all": 1.0, "PRUNE": 1.0, "PRUNE all": 1.0}
        names += [f"{name} all" for name in names]
    rates = calibrate_rates(chosen, quick(), 20, wanted)
    assert set(rates) == set(wanted)
    counts = _simulate_counts(chosen, quick(), 20, torch.tensor([rates.get(name, 0.0) for name in names]))
    for name, count in zip(names, counts.tolist(), strict=True):
        assert count == pytest.approx(wanted.get(name, 0.0), abs=0.5), name
