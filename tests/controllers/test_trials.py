"""Plans that run in turn: what is planted and pruned, and when."""

import pytest

from esper.config import build_vector_env, compose_config
from esper.controllers import TrialController
from esper.environment import TaskOracle
from esper.tasks import FixedPlan

DEPTHWISE, NORM = FixedPlan((("all", "depthwise"),)), FixedPlan((("all", "norm"),))
TASKS = ["+experiment=oracle_tasks", "environment.repeats=1"]


def make_oracle(actions: str) -> TaskOracle:
    oracle: TaskOracle = build_vector_env(compose_config("run", [*TASKS, f"actions={actions}"]))
    return oracle


def run(oracle: TaskOracle, *plans: FixedPlan, patience: int = 2) -> list[list[str]]:
    """What each of some episodes does: the op, the slot and the blueprint of the steps that do not wait."""
    seeds = [oracle.episode_seed("training", 0, index) for index in range(8)]
    controller = TrialController(oracle.space, oracle.rules, [plans] * len(seeds), patience=patience)
    observation, memory = oracle.reset(seeds), controller.begin(seeds)
    done: list[list[str]] = [[] for _ in seeds]
    for step in range(oracle.steps):
        action, memory = controller.act(observation, memory)
        for env, row in enumerate(action.tolist()):
            named = dict(zip(oracle.space.head_names, row, strict=True))
            op = oracle.space.ops[named["op"]].name
            if op == "WAIT":
                continue
            blueprint = f" {oracle.space.blueprints[named['blueprint']]}" if op == "GERMINATE" else ""
            done[env].append(f"{step} {op} {oracle.space.slot_options[named['slot']]}{blueprint}")
        observation = oracle.step(action).observation
    return done


def has_several_slots(oracle: TaskOracle, env: int) -> bool:
    return int(oracle.view.slots.exists[env].sum()) > 1


def test_one_action_plants_all_slots_and_one_prunes_them() -> None:
    oracle = make_oracle("lean")
    for env, done in enumerate(run(oracle, DEPTHWISE, NORM)):
        slot = "all" if has_several_slots(oracle, env) else "block1"
        assert done == [f"0 GERMINATE {slot} depthwise", f"3 PRUNE {slot}", f"4 GERMINATE {slot} norm"]


def test_without_that_option_slots_come_one_after_the_other() -> None:
    oracle = make_oracle("core")
    done = run(oracle, DEPTHWISE, FixedPlan())
    counts = oracle.view.slots.exists.sum(1).tolist()
    env = counts.index(3)
    assert done[env] == [
        *[f"{step} GERMINATE block{step + 1} depthwise" for step in range(3)],
        *[f"{step + 5} PRUNE block{step + 1}" for step in range(3)],
    ]


@pytest.mark.parametrize(("at", "step"), [(0.0, 0), (0.1, 2), (0.26, 6)])
def test_a_single_plan_starts_at_its_moment_and_stays(at: float, step: int) -> None:
    oracle = make_oracle("lean")
    done = run(oracle, FixedPlan((("first", "norm"),), at))
    assert done == [[f"{step} GERMINATE block1 norm"]] * 8
    assert (oracle.outcome()["fossils"] == 1).all()


def test_the_empty_plan_waits() -> None:
    assert run(make_oracle("lean"), FixedPlan()) == [[]] * 8
