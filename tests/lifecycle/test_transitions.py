from dataclasses import fields
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.lifecycle import (
    TRANSITIONS,
    ActionSpace,
    Op,
    Rules,
    SeedMeasurements,
    Slots,
    Stage,
    acted_slots,
    apply,
    legal,
    tick,
)
from tests.lifecycle.fixtures_slots import (
    Transition,
    act,
    play,
    quick,
    random_action,
    random_measurements,
    rules,
    space,
)

SPACES = st.sampled_from(["core", "full", "lean"])
RULES = st.builds(
    rules,
    steps=st.integers(1, 40),
    health=st.sampled_from([None, 0.1]),
    contribution=st.sampled_from([None, -1.0]),
    dwell=st.sampled_from([None, 0, 1, 2]),
    prune_age=st.sampled_from([None, 0, 2]),
    cooldown=st.integers(0, 4),
    max_live=st.sampled_from([None, 1, 2]),
    keep=st.sampled_from(["explicit", "auto"]),
    ramp=st.sampled_from([None, 0, 1, 2]),
) | st.builds(quick)
RNG_SEEDS = st.integers(0, 2**32)
few_examples = settings(max_examples=10)  # each is many transitions of several environments


def transitions(actions: str, rule: Rules, rng_seed: int, envs: int = 8, steps: int = 24) -> list[Transition]:
    return list(play(space(actions), rule, envs=envs, steps=steps, seed=rng_seed))


def equal(one: Slots, other: Slots) -> bool:
    return all(
        torch.equal(torch.nan_to_num(a, -7.0), torch.nan_to_num(b, -7.0))
        for a, b in ((getattr(one, field.name), getattr(other, field.name)) for field in fields(Slots))
    )


def path_exists(stage: Stage, entered: frozenset[Stage], end: Stage) -> bool:
    """Whether the entered stages, each once, form a chain of legal transitions from `stage` to `end`."""
    if not entered:
        return stage == end
    return any(path_exists(step, entered - {step}, end) for step in TRANSITIONS[stage] & entered)


@few_examples
@given(SPACES, RULES, RNG_SEEDS)
def test_every_change_of_stage_follows_the_transition_table(actions: str, rule: Rules, rng_seed: int) -> None:
    for transition in transitions(actions, rule, rng_seed):
        changed = transition.events.entered.any(-1)
        assert torch.equal(transition.before.stage[~changed], transition.after.stage[~changed])
        assert (transition.after.steps_in_stage[changed] == 0).all()
        for env, slot in changed.nonzero().tolist():
            entered = frozenset(Stage(i) for i in transition.events.entered[env, slot].nonzero().flatten().tolist())
            before, after = (Stage(int(s.stage[env, slot])) for s in (transition.before, transition.after))
            assert path_exists(before, entered, after), (transition.call, before, entered, after)


@pytest.mark.parametrize("actions", ["core", "full"])
def test_random_episodes_visit_every_stage(actions: str) -> None:
    seen = torch.stack(
        [transition.events.entered for transition in transitions(actions, rules(dwell=1), rng_seed=0, envs=16)]
    )
    assert seen.flatten(0, -2).any(0).all()


@few_examples
@given(SPACES, RULES, RNG_SEEDS)
def test_alpha_stays_in_bounds_and_is_zero_outside_blending_holding_and_fossils(
    actions: str, rule: Rules, rng_seed: int
) -> None:
    for transition in transitions(actions, rule, rng_seed):
        slots = transition.after
        assert ((slots.alpha >= 0) & (slots.alpha <= 1)).all()
        assert (slots.alpha[slots.in_stage([Stage.HOLDING, Stage.FOSSILIZED])] == 1).all()
        assert (slots.alpha[slots.stage == Stage.BLENDING] > 0).all()
        not_blended = [Stage.DORMANT, Stage.GERMINATED, Stage.TRAINING, Stage.PRUNED]
        assert (slots.alpha[slots.in_stage(not_blended)] == 0).all()


@few_examples
@given(SPACES, RULES, RNG_SEEDS)
def test_fossils_are_permanent(actions: str, rule: Rules, rng_seed: int) -> None:
    for transition in transitions(actions, rule, rng_seed):
        fossil = transition.before.stage == Stage.FOSSILIZED
        for name in ("stage", "blueprint", "blend", "alpha"):
            assert torch.equal(getattr(transition.before, name)[fossil], getattr(transition.after, name)[fossil])


@few_examples
@given(SPACES, RULES, RNG_SEEDS)
def test_only_an_explicit_action_or_an_automatic_commit_fossilises(actions: str, rule: Rules, rng_seed: int) -> None:
    for transition in transitions(actions, rule, rng_seed):
        if transition.call == "commit" and rule.commit == "auto":
            continue
        new = transition.events.into(Stage.FOSSILIZED).sum(1)
        requested = space(actions).decode(transition.action).op == Op.FOSSILIZE
        assert torch.equal(new, requested.long() if transition.call == "apply" else torch.zeros_like(new))


@few_examples
@given(SPACES, RULES, RNG_SEEDS)
def test_the_cooldown_after_a_prune_has_exactly_its_length(actions: str, rule: Rules, rng_seed: int) -> None:
    waited = torch.zeros(8, 3, dtype=torch.long)
    for transition in transitions(actions, rule, rng_seed, steps=40):
        if transition.call == "tick":
            waited += transition.before.stage == Stage.PRUNED
        free = transition.events.into(Stage.DORMANT)
        assert (waited[free] == rule.cooldown).all()
        assert (waited <= rule.cooldown).all()
        waited[free] = 0


@few_examples
@given(SPACES, RULES, RNG_SEEDS)
def test_max_live_is_never_exceeded(actions: str, rule: Rules, rng_seed: int) -> None:
    for transition in transitions(actions, rule, rng_seed):
        assert (transition.after.live.sum(1) <= (rule.max_live or 3)).all()


@few_examples
@given(SPACES, RULES, RNG_SEEDS)
def test_masks_agree_with_apply_for_every_op_and_slot(actions: str, rule: Rules, rng_seed: int) -> None:
    chosen = space(actions)
    for transition in list(play(chosen, rule, envs=1, steps=25, seed=rng_seed))[1::6]:
        masks = legal(transition.after, chosen, rule)
        accepted = []
        for op, slot in product(range(len(chosen.ops)), range(len(chosen.slot_options))):
            action = torch.tensor([[op, slot, *[0] * (len(chosen.heads) - 2)]])
            if chosen.ops[op] is Op.WAIT or masks.slot[0, op, slot]:
                assert masks.op[0, op]
                accepted.append(action)
            else:
                place = "all slots" if slot == len(chosen.slots) else f"slot block{slot + 1}"
                with pytest.raises(ValueError, match=f"^{chosen.ops[op].name} in {place} of environment 0 is illegal"):
                    apply(transition.after, action, chosen, rule)
        apply(transition.after[torch.zeros(len(accepted), dtype=torch.long)], torch.cat(accepted), chosen, rule)


@few_examples
@given(RULES, RNG_SEEDS)
def test_an_op_in_all_slots_is_that_op_in_each_slot_where_it_is_legal(rule: Rules, rng_seed: int) -> None:
    lean, count = space("lean"), 0
    for transition in transitions("lean", rule, rng_seed):
        if transition.call != "apply":
            continue
        masks, decision = legal(transition.before, lean, rule), lean.decode(transition.action)
        acted = acted_slots(transition.before, decision, lean, rule)
        assert torch.equal(acted.any(1), decision.op != Op.WAIT)
        for env in (decision.slot == 3).nonzero().flatten().tolist():
            count += 1
            assert torch.equal(acted[env], masks.slot[env, transition.action[env, 0], :3])
            one = transition.before[env : env + 1]
            for column in acted[env].nonzero().flatten().tolist():
                single = transition.action[env : env + 1].clone()
                single[:, 1] = column
                one, _ = apply(one, single, lean, rule)
            assert equal(one, transition.after[env : env + 1])
    if rule.max_live is None:
        assert count > 0


@few_examples
@given(SPACES, RULES, RNG_SEEDS)
def test_environments_in_one_batch_equal_separate_environments(actions: str, rule: Rules, rng_seed: int) -> None:
    chosen, generator = space(actions), torch.Generator().manual_seed(rng_seed)
    batched, separate = Slots.empty(3, 3), [Slots.empty(1, 3) for _ in range(3)]
    for _ in range(20):
        action = random_action(legal(batched, chosen, rule), chosen, generator)
        measured = random_measurements(batched, generator)
        batched = tick(apply(batched, action, chosen, rule)[0], measured, chosen, rule)[0]
        for env in range(3):
            one = SeedMeasurements(measured.contribution[env : env + 1], measured.health[env : env + 1])
            separate[env] = tick(apply(separate[env], action[env : env + 1], chosen, rule)[0], one, chosen, rule)[0]
            assert equal(batched[env : env + 1], separate[env])


@few_examples
@given(SPACES, RULES, RNG_SEEDS)
def test_apply_and_tick_do_not_change_their_input(actions: str, rule: Rules, rng_seed: int) -> None:
    for one, following in pairwise(transitions(actions, rule, rng_seed, steps=10)):
        assert equal(one.after, following.before)
    chosen, slots = space(actions), Slots.empty(2, 3)
    apply(slots, act(chosen, {"op": "GERMINATE"}, {"op": "WAIT"}), chosen, rule)
    assert equal(slots, Slots.empty(2, 3))


def trace(chosen: ActionSpace, rule: Rules, choices: list[dict[str, str]]) -> list[tuple[str, float]]:
    """Stage and alpha of the first slot during each step, that is after apply."""
    slots, states = Slots.empty(1, 1), []
    for choice in choices:
        slots, _ = apply(slots, act(chosen, choice), chosen, rule)
        states.append((Stage(int(slots.stage)).name, round(slots.alpha.item(), 3)))
        slots, _ = tick(slots, SeedMeasurements.none(slots), chosen, rule)
    return states


WAIT = {"op": "WAIT"}


def test_a_core_seed_advances_automatically_from_germination_to_holding() -> None:
    core = space("core", slots=1)
    assert trace(core, rules(steps=20), [{"op": "GERMINATE"}, *[WAIT] * 6, {"op": "FOSSILIZE"}, WAIT]) == [
        ("TRAINING", 0.0),
        ("TRAINING", 0.0),
        ("BLENDING", 0.333),
        ("BLENDING", 0.667),
        ("BLENDING", 1.0),
        ("HOLDING", 1.0),
        ("HOLDING", 1.0),
        ("FOSSILIZED", 1.0),
        ("FOSSILIZED", 1.0),
    ]


def test_a_full_seed_waits_for_advance_and_moves_alpha_on_request() -> None:
    full = space("full", slots=1)
    choices = [
        {"op": "GERMINATE", "tempo": "FAST", "alpha_target": "HALF"},
        WAIT,
        {"op": "ADVANCE"},
        {"op": "ADVANCE"},
        *[WAIT] * 3,
        {"op": "SET_ALPHA", "alpha_target": "FULL", "alpha_speed": "INSTANT"},
        {"op": "ADVANCE"},
        {"op": "SET_ALPHA", "alpha_target": "HALF", "alpha_speed": "FAST"},
    ]
    assert trace(full, rules(steps=10), choices) == [
        ("GERMINATED", 0.0),
        ("GERMINATED", 0.0),
        ("TRAINING", 0.0),
        ("BLENDING", 0.167),
        ("BLENDING", 0.333),
        ("BLENDING", 0.5),
        ("BLENDING", 0.5),
        ("BLENDING", 1.0),
        ("HOLDING", 1.0),
        ("BLENDING", 0.833),
    ]


def test_a_prune_at_full_alpha_blends_out_then_removes_then_cools_down() -> None:
    core = space("core", slots=1)
    states = trace(core, rules(steps=10, cooldown=2), [{"op": "GERMINATE"}, *[WAIT] * 4, {"op": "PRUNE"}, *[WAIT] * 4])
    assert states[4:] == [
        ("HOLDING", 1.0),
        ("BLENDING", 0.667),
        ("BLENDING", 0.333),
        ("PRUNED", 0.0),
        ("PRUNED", 0.0),
        ("DORMANT", 0.0),
    ]


def test_a_prune_at_alpha_zero_removes_immediately() -> None:
    core = space("core", slots=1)
    states = trace(core, rules(steps=50, prune_age=1, cooldown=1), [{"op": "GERMINATE"}, {"op": "PRUNE"}, WAIT])
    assert states == [("TRAINING", 0.0), ("PRUNED", 0.0), ("DORMANT", 0.0)]


def test_alpha_gets_a_new_target_only_after_its_ramp() -> None:
    full = space("full", slots=1)
    moving = Slots.empty(1, 1).where(
        torch.tensor([[True]]), stage=Stage.BLENDING, alpha=0.5, alpha_target=1.0, ramp_ticks=4, ramp_done=2, age=9
    )
    masks = legal(moving, full, rules())
    assert not masks.op[0, [Op.SET_ALPHA, Op.PRUNE]].any()
    resting = moving.where(torch.tensor([[True]]), ramp_done=4, alpha=1.0)
    assert legal(resting, full, rules()).op[0, [Op.SET_ALPHA, Op.PRUNE]].all()


def test_setting_alpha_to_its_current_value_changes_nothing() -> None:
    full = space("full", slots=1)
    holding = Slots.empty(1, 1).where(torch.tensor([[True]]), stage=Stage.HOLDING, alpha=1.0, alpha_target=1.0)
    action = act(full, {"op": "SET_ALPHA", "alpha_target": "FULL", "alpha_speed": "SLOW"})
    after, events = apply(holding, action, full, rules())
    assert equal(holding, after)
    assert not events.entered.any()


def test_a_measurement_lasts_until_the_next_and_its_age_counts_steps() -> None:
    core = space("core", slots=1)
    slots, _ = apply(Slots.empty(1, 1), act(core, {"op": "GERMINATE"}), core, rules(steps=99))

    def step(slots: Slots, contribution: float, health: float) -> Slots:
        measured = SeedMeasurements(torch.tensor([[contribution]]), torch.tensor([[health]]))
        return tick(slots, measured, core, rules(steps=99))[0]

    nan = float("nan")
    assert slots.contribution.isnan().item()
    slots = step(slots, nan, 0.8)
    assert (slots.contribution_age.item(), slots.health.item()) == (-1, pytest.approx(0.8))
    slots = step(slots, 1.5, nan)
    assert (slots.contribution.item(), slots.contribution_age.item()) == (1.5, 0)
    slots = step(slots, nan, nan)
    assert (slots.contribution.item(), slots.contribution_age.item()) == (1.5, 1)
    assert slots.health.item() == pytest.approx(0.8)


def test_an_empty_slot_has_no_state_of_its_removed_seed() -> None:
    core, rule = space("core", slots=1), rules(steps=50, prune_age=1, cooldown=0)
    slots, _ = apply(Slots.empty(1, 1), act(core, {"op": "GERMINATE", "blueprint": "attention"}), core, rule)
    slots, _ = tick(slots, SeedMeasurements(torch.tensor([[2.0]]), torch.tensor([[0.5]])), core, rule)
    slots, events = apply(slots, act(core, {"op": "PRUNE"}), core, rule)
    assert equal(slots, Slots.empty(1, 1))
    assert events.into(Stage.PRUNED).all()


def test_a_seed_of_bad_or_unknown_health_stays_in_training() -> None:
    core = space("core", slots=1)
    rule = rules(steps=10, health=0.1)

    def stage_after(health: Tensor) -> Stage:
        slots, _ = apply(Slots.empty(1, 1), act(core, {"op": "GERMINATE"}), core, rule)
        slots, _ = tick(slots, SeedMeasurements(torch.full((1, 1), torch.nan), health), core, rule)
        return Stage(int(slots.stage))

    assert stage_after(torch.tensor([[0.0]])) is Stage.TRAINING
    assert stage_after(torch.tensor([[torch.nan]])) is Stage.TRAINING
    assert stage_after(torch.tensor([[0.9]])) is Stage.BLENDING
