from collections import Counter

import pytest
import torch

from esper.config import build
from esper.controllers import Chance, Controller, Replay
from esper.environment import Environment, StepRecord
from esper.lifecycle import Op, Stage
from esper.records import named
from tests.environment_kit import config, environment


def controller(name: str, env: Environment, **changes: object) -> Controller:
    return build(config().controller[name], space=env.space, _partial_=False, **changes)


def run(env: Environment, chosen: Controller, seeds: list[int]) -> list[tuple[list[dict[str, str]], StepRecord]]:
    seen, memory = env.reset(seeds), chosen.begin(seeds)
    result = []
    for _ in range(env.steps):
        action, memory = chosen.act(seen, memory)
        step = env.step(action)
        result.append(([named(env.space, row) for row in action], step.record))
        seen = step.observation
    return result


def test_none_always_waits() -> None:
    env = environment()
    steps = run(env, controller("none", env), [1, 2])
    assert all(action == {"op": "WAIT"} for actions, _ in steps for action in actions)


def test_random_is_legal_follows_its_own_seed_and_uses_every_op() -> None:
    env = environment(envs=2)
    chosen = controller("random", env)
    first = [actions[0] for actions, _ in run(env, chosen, [5, 6])]
    assert [actions[1] for actions, _ in run(env, chosen, [9, 5])] == first
    played = [
        action["op"] for seed in range(4) for actions, _ in run(env, chosen, [seed, seed + 50]) for action in actions
    ]
    assert set(played) == {"WAIT", "GERMINATE", "PRUNE", "FOSSILIZE"}


def test_random_is_uniform_over_all_legal_actions() -> None:
    env = environment("slots.names=[block1]", "slots.blueprints=[norm,conv_light]", envs=1)
    seen = env.reset([1])
    chosen = Chance(env.space)
    memory = chosen.begin([3])
    counts: Counter[tuple[str, ...]] = Counter()
    for _ in range(2100):
        action, memory = chosen.act(seen, memory)
        counts[tuple(named(env.space, action[0]).values())] += 1
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
    kept = [t for t, ((action,), _) in enumerate(steps) if action["op"] == "FOSSILIZE"]
    assert len(kept) == 2
    assert steps[-1][1].after.stage.tolist() == [[Stage.DORMANT, Stage.FOSSILIZED, Stage.FOSSILIZED]]
    if actions == "core":
        assert kept[0] == 12  # 2 training, 3 blending, 2 holding


def test_a_schedule_with_an_unknown_slot_or_blueprint_is_refused() -> None:
    env = environment()
    with pytest.raises(ValueError, match=r"schedule: slot=block9 is unknown; allowed are first, middle, last, block1"):
        controller("schedule", env, entries=[{"at": 1, "slot": "block9", "blueprint": ["norm"]}])
    with pytest.raises(ValueError, match=r"blueprint=\['lora'\]: none is in this space"):
        controller("schedule", env, entries=[{"at": 1, "slot": "last", "blueprint": ["lora"]}])


def test_with_two_slots_the_schedule_still_uses_both() -> None:
    env = environment("slots.names=[block1,block2]", "environment.steps=20", envs=1)
    steps = run(env, controller("schedule", env), [1])
    assert [action["slot"] for (action,), _ in steps if action["op"] == "GERMINATE"] == ["block1", "block2"]


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"at": 1, "slott": "last", "blueprint": ["norm"]}, "must have the keys at, slot, blueprint, blend"),
        (
            {"at": 1, "slot": "last", "blueprint": ["norm"], "blend": "FOO"},
            "blend=FOO must be one of ADD, MULTIPLY, GATED",
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
        ({"op": "ADVANCE", "slot": "block1"}, "step 0 has op=ADVANCE; this action space allows WAIT, GERMINATE"),
        (
            {"op": "PRUNE", "slot": "block1", "alpha_speed": "FAST"},
            "alpha_speed=FAST; this action space allows nothing",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            Replay(env.space, [step])


EAGER = {
    "plateau_gain": 1e9,
    "plateau_steps": 1,
    "earliest": 0.0,
    "latest": 1.0,
    "rest": 0.0,
    "steady": [-9.0, 9.0],
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


@pytest.mark.parametrize(("keep", "verdict"), [(-1e9, "FOSSILIZE"), (1e9, "PRUNE")])
def test_the_heuristic_keeps_what_contributes_and_prunes_what_does_not(keep: float, verdict: str) -> None:
    env = environment("environment.steps=20", envs=1)
    steps = run(env, controller("heuristic", env, **EAGER, keep=keep, hopeless=1e9), [1])
    ops = [action["op"] for (action,), _ in steps]
    assert verdict in ops
    assert {"FOSSILIZE": "PRUNE", "PRUNE": "FOSSILIZE"}[verdict] not in ops or keep < 0
    used = [action for (action,), _ in steps if action["op"] == "GERMINATE"]
    if verdict == "FOSSILIZE":
        assert [action["slot"] for action in used] == ["block1", "block2", "block3"][: len(used)]
        assert [action["blueprint"] for action in used] == ["conv_light", "conv_heavy", "attention"][: len(used)]
    assert max(int(record.after.live.sum()) for _, record in steps) == 1


def test_a_replay_repeats_a_recorded_episode_exactly() -> None:
    env = environment(envs=1)
    original = run(env, controller("random", env), [4])
    actions = [action for (action,), _ in original]
    again = run(env, Replay(env.space, actions), [4])
    assert [action for (action,), _ in again] == actions
    assert torch.equal(again[-1][1].now.loss, original[-1][1].now.loss)


def test_a_replayed_action_that_is_not_legal_becomes_wait() -> None:
    env = environment(envs=1)
    steps = run(env, Replay(env.space, [{"op": "FOSSILIZE", "slot": "block1"}]), [4])
    assert {action["op"] for (action,), _ in steps} == {Op.WAIT.name}
