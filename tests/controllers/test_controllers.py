from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from esper.config import build
from esper.controllers import (
    BlindPolicyController,
    Controller,
    PermutedPolicyController,
    PolicyController,
    RandomController,
    ReplayController,
    ScheduleController,
    ShuffledPolicyController,
    calibrate_rates,
    random_schedule,
)
from esper.controllers.fragrow import interval
from esper.controllers.random_controller import _simulate_counts
from esper.environment import Environment, StepRecord
from esper.lifecycle import Op, Stage
from esper.records import named_action
from tests.controllers.fixtures_policies import draws, layout, policy, random_inputs
from tests.fixtures_environment import config, environment


def controller(name: str, env: Environment, **changes: object) -> Controller:
    return build(config().controller[name], space=env.space, _partial_=False, **changes)


def run(
    env: Environment, chosen: Controller, episode_seeds: list[int]
) -> list[tuple[list[dict[str, str]], StepRecord]]:
    seen, memory = env.reset(episode_seeds), chosen.begin(episode_seeds)
    result = []
    for _ in range(env.steps):
        action, memory = chosen.act(seen, memory)
        step = env.step(action)
        result.append(([named_action(env.space, row) for row in action], step.record))
        seen = step.observation
    return result


def test_none_always_waits() -> None:
    env = environment()
    steps = run(env, controller("none", env), [1, 2])
    assert all(action == {"op": "WAIT"} for actions, _ in steps for action in actions)


def test_random_is_legal_depends_on_its_episode_seed_only_and_uses_every_op() -> None:
    env = environment(envs=2)
    chosen = controller("random", env)
    first = [actions[0] for actions, _ in run(env, chosen, [5, 6])]
    assert [actions[1] for actions, _ in run(env, chosen, [9, 5])] == first
    ops = [
        action["op"] for first in range(4) for actions, _ in run(env, chosen, [first, first + 50]) for action in actions
    ]
    assert set(ops) == {"WAIT", "GERMINATE", "PRUNE", "FOSSILIZE"}


def test_random_is_uniform_over_all_legal_actions() -> None:
    env = environment("slots.names=[block1]", "slots.blueprints=[norm,conv_light]", envs=1)
    seen = env.reset([1])
    chosen = RandomController(env.space)
    memory = chosen.begin([3])
    counts: Counter[tuple[str, ...]] = Counter()
    for _ in range(2100):
        action, memory = chosen.act(seen, memory)
        counts[tuple(named_action(env.space, action[0]).values())] += 1
    assert len(counts) == 7  # WAIT, and two blueprints x three blends in the only slot
    assert min(counts.values()) > 230
    assert max(counts.values()) < 370


@pytest.mark.parametrize("actions", ["core", "full"])
def test_the_schedule_germinates_on_time_and_fossilises_as_soon_as_legal(actions: str) -> None:
    env = environment("environment.steps=20", f"actions={actions}", envs=1)
    steps = run(env, controller("schedule", env), [1])
    germinated = [
        (t, action["slot"], action["blueprint"])
        for t, ((action,), _) in enumerate(steps)
        if action["op"] == "GERMINATE"
    ]
    assert germinated == [(5, "block2", "conv_light"), (10, "block3", "conv_light")]
    fossilized = [t for t, ((action,), _) in enumerate(steps) if action["op"] == "FOSSILIZE"]
    assert len(fossilized) == 2
    assert steps[-1][1].after.stage.tolist() == [[Stage.DORMANT, Stage.FOSSILIZED, Stage.FOSSILIZED]]
    if actions == "core":
        assert fossilized[0] == 12  # 2 training, 3 blending, 2 holding


def test_a_schedule_with_an_unknown_slot_or_blueprint_is_refused() -> None:
    env = environment()
    with pytest.raises(ValueError, match=r"schedule: slot=block9: must be one of first, middle, last, block1"):
        controller("schedule", env, entries=[{"at": 1, "slot": "block9", "blueprint": ["norm"]}])
    with pytest.raises(ValueError, match=r"blueprint=\['lora'\]: must have one of norm"):
        controller("schedule", env, entries=[{"at": 1, "slot": "last", "blueprint": ["lora"]}])


def test_with_two_slots_the_schedule_uses_both() -> None:
    env = environment("slots.names=[block1,block2]", "environment.steps=20", envs=1)
    steps = run(env, controller("schedule", env), [1])
    assert [action["slot"] for (action,), _ in steps if action["op"] == "GERMINATE"] == ["block1", "block2"]


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"at": 1, "slott": "last", "blueprint": ["norm"]}, "must have the keys at, slot, blueprint, blend"),
        (
            {"at": 1, "slot": "last", "blueprint": ["norm"], "blend": "FOO"},
            "blend=FOO: must be one of ADD, MULTIPLY, GATED",
        ),
    ],
)
def test_a_wrong_entry_of_a_schedule_is_refused(entry: dict[str, object], sentence: str) -> None:
    env = environment()
    with pytest.raises(ValueError, match=sentence):
        controller("schedule", env, entries=[entry])


def test_a_recording_of_another_action_space_is_refused() -> None:
    env = environment()
    for step, sentence in (
        ({"op": "ADVANCE", "slot": "block1"}, "step 0 has op=ADVANCE; must be one of WAIT, GERMINATE"),
        ({"op": "PRUNE", "slot": "block1", "alpha_speed": "FAST"}, "alpha_speed=FAST; heads are op, slot, blueprint"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ReplayController(env.space, [step])


EAGER = {
    "plateau_gain": 1e9,
    "plateau_steps": 1,
    "earliest": 0.0,
    "latest": 1.0,
    "cooldown": 0.0,
    "steady_range": [-9.0, 9.0],
    "calm_steps": 1,
}


def test_the_heuristic_waits_for_a_plateau() -> None:
    env = environment(envs=1)
    patient = run(env, controller("heuristic", env, plateau_gain=-1e9), [1])
    assert {action["op"] for (action,), _ in patient} == {"WAIT"}
    eager = run(env, controller("heuristic", env, **EAGER), [1])
    late = run(env, controller("heuristic", env, **{**EAGER, "latest": 0.0}), [1])
    assert {action["op"] for (action,), _ in late} == {"WAIT"}
    assert eager[1][0][0] == {"op": "GERMINATE", "slot": "block1", "blueprint": "conv_light", "blend": "ADD"}


@pytest.mark.parametrize(("min_contribution", "expected"), [(-1e9, "FOSSILIZE"), (1e9, "PRUNE")])
def test_the_heuristic_fossilises_seeds_that_contribute_and_prunes_the_others(
    min_contribution: float, expected: str
) -> None:
    env = environment("environment.steps=20", envs=1)
    heuristic = controller("heuristic", env, **EAGER, min_contribution=min_contribution, max_drop=1e9)
    steps = run(env, heuristic, [1])
    ops = [action["op"] for (action,), _ in steps]
    assert expected in ops
    assert {"FOSSILIZE": "PRUNE", "PRUNE": "FOSSILIZE"}[expected] not in ops or min_contribution < 0
    germinations = [action for (action,), _ in steps if action["op"] == "GERMINATE"]
    if expected == "FOSSILIZE":
        count = len(germinations)
        assert [action["slot"] for action in germinations] == ["block1", "block2", "block3"][:count]
        assert [action["blueprint"] for action in germinations] == ["conv_light", "conv_heavy", "attention"][:count]
    assert max(int(record.after.live.sum()) for _, record in steps) == 1


def test_a_replay_repeats_a_recorded_episode_exactly() -> None:
    env = environment(envs=1)
    original = run(env, controller("random", env), [4])
    actions = [action for (action,), _ in original]
    again = run(env, ReplayController(env.space, actions), [4])
    assert [action for (action,), _ in again] == actions
    assert torch.equal(again[-1][1].now.loss, original[-1][1].now.loss)


LEAN = ("environment.steps=10", "lifecycle=quick", "actions=lean", "actions.fixed.alpha_speed=INSTANT")


def test_rates_in_all_slots_are_those_of_their_own_names() -> None:
    env = environment(*LEAN, envs=1)
    only_all = [action for (action,), _ in run(env, RandomController(env.space, {"GERMINATE all": 1.0}), [3])]
    assert (only_all[0]["slot"], {action["op"] for action in only_all[1:]}) == ("all", {"WAIT"})
    single = [action for (action,), _ in run(env, RandomController(env.space, {"GERMINATE": 1.0}), [3])]
    assert sorted(action["slot"] for action in single[:3]) == ["block1", "block2", "block3"]
    assert {action["op"] for action in single[3:]} == {"WAIT"}


def test_random_growth_takes_all_slots_at_once_as_often_as_one_of_them() -> None:
    env = environment(*LEAN, "slots.blueprints=[norm]", envs=1)
    seen, chosen = env.reset([1]), RandomController(env.space)
    memory, counts = chosen.begin([3]), Counter[str]()
    for _ in range(1000):
        action, memory = chosen.act(seen, memory)
        counts[named_action(env.space, action[0]).get("slot", "none")] += 1
    assert set(counts) == {"none", "block1", "block2", "block3", "all"}
    assert min(counts.values()) > 150


def test_a_replay_repeats_actions_in_all_slots_where_they_are_legal() -> None:
    env = environment(*LEAN, envs=1)
    grow = {"op": "GERMINATE", "slot": "all", "blueprint": "norm"}
    actions = [grow, grow, {"op": "PRUNE", "slot": "all"}, {"op": "PRUNE", "slot": "all"}]
    played = [action for (action,), _ in run(env, ReplayController(env.space, actions), [4])]
    assert played[:4] == [grow, {"op": "WAIT"}, {"op": "PRUNE", "slot": "all"}, {"op": "WAIT"}]


def test_a_replayed_action_that_is_not_legal_becomes_wait() -> None:
    env = environment(envs=1)
    steps = run(env, ReplayController(env.space, [{"op": "FOSSILIZE", "slot": "block1"}]), [4])
    assert {action["op"] for (action,), _ in steps} == {Op.WAIT.name}


def test_ops_without_a_rate_are_never_taken_and_wait_is_the_fallback() -> None:
    env = environment(envs=1)
    never_germinates = run(env, RandomController(env.space, {"WAIT": 1.0, "PRUNE": 5.0}), [3])
    assert {action["op"] for (action,), _ in never_germinates} == {"WAIT"}
    eager = run(env, RandomController(env.space, {"GERMINATE": 1.0}), [3])
    ops = [action["op"] for (action,), _ in eager]
    assert ops[:3] == ["GERMINATE"] * 3  # three slots
    assert set(ops[3:]) <= {"WAIT", "GERMINATE"}


@pytest.mark.parametrize(
    "wanted",
    [
        {"WAIT": 14.0, "GERMINATE": 3.0, "FOSSILIZE": 3.0},  # fossilising is legal in few steps
        {"WAIT": 15.0, "GERMINATE": 3.0, "PRUNE": 1.0, "FOSSILIZE": 1.0},
        {"WAIT": 20.0},
    ],
)
def test_calibrated_rates_take_each_op_as_often_as_wanted(wanted: dict[str, float]) -> None:
    env = environment("environment.steps=20", "environment.batches=1", envs=5)
    rates = calibrate_rates(env.space, env.rules, 20, wanted)
    assert set(rates) == set(wanted)
    steps = run(env, RandomController(env.space, rates), list(range(5)))
    taken = Counter(action["op"] for actions, _ in steps for action in actions)
    for op, count in wanted.items():
        assert taken[op] / 5 == pytest.approx(count, abs=2.0)  # five episodes, in environments with hosts
    by_op = torch.tensor([rates.get(op.name, 0.0) for op in env.space.ops])
    simulated = _simulate_counts(env.space, env.rules, 20, by_op)
    for op, count in zip(env.space.ops, simulated.tolist(), strict=True):
        assert count == pytest.approx(wanted.get(op.name, 0.0), abs=0.5)


def test_an_op_that_cannot_be_taken_often_enough_gets_nearly_all_of_the_rate() -> None:
    env = environment(envs=1)
    rates = calibrate_rates(env.space, env.rules, 10, {"WAIT": 1.0, "FOSSILIZE": 9.0})
    assert set(rates) == {"WAIT", "FOSSILIZE"}
    assert rates["FOSSILIZE"] > 0.9


def test_the_interval_of_fragrow_grows_with_the_gap() -> None:
    assert interval(4.0, 10.0) == pytest.approx(5.0)  # half of max_interval at a gap of four points
    assert interval(0.0, 10.0) == pytest.approx(10 / (1 + 2.718281828**4))
    assert interval(100.0, 10.0) == pytest.approx(10.0)
    assert interval(-1e4, 10.0) == pytest.approx(0.0)


def test_fragrow_fills_slots_while_the_host_generalises_and_fossilises_every_seed() -> None:
    env = environment("environment.steps=20", envs=1)
    steps = run(env, controller("fragrow", env), [1])
    used = [(index, action) for index, ((action,), _) in enumerate(steps) if action["op"] == "GERMINATE"]
    assert used[0] == (1, {"op": "GERMINATE", "slot": "block1", "blueprint": "conv_light", "blend": "ADD"})
    assert [action["slot"] for _, action in used] == ["block1", "block2", "block3"]
    assert int((steps[-1][1].after.stage == Stage.FOSSILIZED).sum()) == 3
    late = run(env, controller("fragrow", env, latest=0.0), [1])
    assert {action["op"] for (action,), _ in late} == {"WAIT"}


def test_random_schedules_depend_on_their_seed_only_and_cover_all_options() -> None:
    env = environment()
    assert random_schedule(env.space, 10, 3) == random_schedule(env.space, 10, 3)
    drawn = [random_schedule(env.space, 10, rng_seed) for rng_seed in range(200)]
    assert {len(entries) for entries in drawn} == {0, 1, 2, 3}
    for entries in drawn:
        assert len({entry.slot for entry in entries}) == len(entries)
        ScheduleController(env.space, entries)  # accepts them
    every = [entry for entries in drawn for entry in entries]
    assert {entry.at for entry in every} == set(range(10))
    assert {name for entry in every for name in entry.blueprint} == set(env.space.blueprints)
    assert {entry.blend for entry in every} == {"ADD", "MULTIPLY", "GATED"}


def test_a_blind_policy_acts_the_same_whatever_it_observes() -> None:
    spec = layout()
    network = policy(spec)
    network.base_statistics.mean.normal_()
    network.slot_statistics.mean.normal_()
    network.base_statistics.count.fill_(1)
    network.slot_statistics.count.fill_(1)
    actor = PolicyController(network, greedy=True)
    blind = BlindPolicyController(actor)
    inputs = random_inputs(spec, 4, draws())
    means = {
        "base": network.base_statistics.mean.float().expand_as(inputs.base),
        "slots": network.slot_statistics.mean.float().expand_as(inputs.slots) * inputs.exists.unsqueeze(-1),
    }
    chosen, memory = blind.act(inputs, blind.begin([1, 2, 3, 4]))
    expected, _ = actor.act(replace(inputs, **means), actor.begin([1, 2, 3, 4]))
    assert torch.equal(chosen, expected)
    other = replace(inputs, base=inputs.base + 3, slots=inputs.slots - 2)
    again, other_memory = blind.act(other, blind.begin([1, 2, 3, 4]))
    assert torch.equal(again, chosen)
    assert torch.equal(other_memory.state[0], memory.state[0])


def test_a_policy_with_shuffled_descriptors_takes_each_blueprint_for_another() -> None:
    spec = layout()
    actor = PolicyController(policy(spec), greedy=True)
    shuffled = ShuffledPolicyController(actor)
    inputs = random_inputs(spec, 4, draws())
    orders, own = shuffled.begin([1, 2, 3, 4])
    count = inputs.candidates.shape[2]
    assert all(sorted(order) == list(range(count)) for order in orders.tolist())
    assert not (orders == torch.arange(count)).any(), "no blueprint keeps its own"
    assert torch.equal(orders, shuffled.begin([1, 2, 3, 4])[0])
    shown = torch.stack([inputs.candidates[env][:, orders[env]] for env in range(4)])
    chosen, _ = shuffled.act(inputs, (orders, own))
    expected, _ = actor.act(replace(inputs, candidates=shown), actor.begin([1, 2, 3, 4]))
    assert torch.equal(chosen, expected)


def test_a_permuted_policy_sees_the_next_episode_but_uses_its_own_masks() -> None:
    spec = layout()
    actor = PolicyController(policy(spec), greedy=True)
    inputs = random_inputs(spec, 4, draws())
    swapped = replace(inputs, base=inputs.base.roll(1, 0), slots=inputs.slots.roll(1, 0),
                      blueprints=inputs.blueprints.roll(1, 0))  # fmt: skip
    shown, _ = PermutedPolicyController(actor).act(inputs, PermutedPolicyController(actor).begin([1, 2, 3, 4]))
    expected, _ = actor.act(swapped, actor.begin([1, 2, 3, 4]))
    assert torch.equal(shown, expected)
    with pytest.raises(ValueError, match="must have at least two parallel episodes"):
        PermutedPolicyController(actor).begin([1])


@pytest.mark.parametrize("actions", ["core", "full", "lean"])
def test_a_decision_costs_what_torch_counts(actions: str) -> None:
    """torch does not count the LSTM, whose FLOPs are the products of its matrices with one vector each."""
    spec = layout(actions)
    without = policy(spec, layers=0)
    inputs = random_inputs(spec, 1, draws())
    with FlopCounterMode(display=False) as counter:
        actor = PolicyController(without, greedy=True)
        actor.act(inputs, actor.begin([1]))
    assert without.flops == counter.get_total_flops()
    assert policy(spec, layers=1).flops == without.flops + 2 * (4 * 16 * 16 + 4 * 16 * 16)


QUICK = ("environment.steps=10", "lifecycle=quick", "lifecycle.prune_age=1", "lifecycle.cooldown=1")


def gated_actions(min_contribution: float, *overrides: str, **changes: object) -> list[dict[str, str]]:
    env = environment(*QUICK, *overrides, envs=1)
    chosen = controller("gated", env, min_contribution=min_contribution, **changes)
    return [actions[0] for actions, _ in run(env, chosen, [1])]


def test_gated_plants_everywhere_and_keeps_seeds_that_contribute() -> None:
    actions = gated_actions(-1e9, wait=0.2)
    assert [action.get("slot") for action in actions[:3]] == ["block1", "block2", "block3"]
    assert {action.get("blueprint") for action in actions[:3]} == {"depthwise"}
    assert [action["op"] for action in actions] == ["GERMINATE"] * 3 + ["FOSSILIZE"] * 3 + ["WAIT"] * 4


@pytest.mark.parametrize(
    ("name", "changes", "kept"),
    [
        ("gated", {"min_contribution": -1e9, "wait": 0.2}, 3),
        ("gated", {"min_contribution": 1e9, "wait": 0.2}, 0),
        ("heuristic", {**EAGER, "min_contribution": -1e9, "max_drop": 1e9}, 3),
        ("fragrow", {"max_interval": 1e-9, "latest": 1.0}, 3),
        ("schedule", {}, 2),
        ("none", {}, 0),
    ],
)
def test_rules_act_with_three_ops_and_their_seeds_are_kept_unless_they_are_pruned(
    name: str, changes: dict[str, object], kept: int
) -> None:
    env = environment(*LEAN, envs=1)
    steps = run(env, controller(name, env, **changes), [1])
    assert int((steps[-1][1].after.stage == Stage.FOSSILIZED).sum()) == kept
    assert {action["op"] for (action,), _ in steps} <= {"WAIT", "GERMINATE", "PRUNE"}


def test_gated_prunes_seeds_that_do_not_contribute_and_leaves_their_slots_empty() -> None:
    actions = gated_actions(1e9, wait=0.2)
    assert [action["op"] for action in actions] == ["GERMINATE"] * 3 + ["PRUNE"] * 3 + ["WAIT"] * 4


def test_gated_waits_before_it_plants_and_before_it_judges() -> None:
    actions = gated_actions(-1e9, "slots.names=[block1]", earliest=0.3, wait=0.4)
    ops = [action["op"] for action in actions]
    assert ops.index("GERMINATE") == 3
    assert ops.index("FOSSILIZE") == 3 + 4


def test_gated_keeps_a_seed_that_was_never_measured() -> None:
    ops = [action["op"] for action in gated_actions(1e9, "environment.attribution_every=0", wait=0.2)]
    assert "PRUNE" not in ops
    assert ops.count("FOSSILIZE") == 3


def test_gated_refuses_shares_outside_of_the_episode() -> None:
    env = environment()
    with pytest.raises(ValueError, match=r"^controller\.gated\.wait=2: must be between 0 and 1"):
        controller("gated", env, wait=2)


def test_a_schedule_fossilises_no_seeds_that_are_committed_automatically() -> None:
    env = environment(*QUICK, envs=1)
    entries = [{"at": 0, "slot": slot, "blueprint": ["norm"]} for slot in ("first", "middle", "last")]
    actions = [
        actions[0]["op"] for actions, _ in run(env, ScheduleController(env.space, entries, rules=env.rules), [1])
    ]
    assert actions == ["GERMINATE"] * 3 + ["WAIT"] * 7
