"""The oracle with many tasks: splits, episodes, formula and references."""

from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor

from esper.config import build_vector_env, compose_config
from esper.environment import TaskOracle
from esper.environment.oracle_plans import FixedSchedule, Plans, best_fixed, no_growth, optimum, plan_scores
from esper.environment.oracle_probe import run_probes, tune_probes
from esper.environment.oracle_tasks import (
    COST_RANGE,
    HELD_OUT_COST_RANGE,
    HELD_OUT_SLOT_RANGE,
    LACKS,
    SLOT_RANGE,
    SPLITS,
    TASKS,
    OracleTasks,
    draw_tasks,
)
from esper.lifecycle import Stage
from esper.observation import Observation

STEPS = 20
CORE = ("+experiment=oracle_tasks", "actions=core", "environment.envs=32")
NUMBERS = SPLITS["train"][:16]
BLUEPRINTS = ("norm", "attention", "conv_small", "depthwise", "conv_light")


def make_oracle(*overrides: str) -> TaskOracle:
    oracle: TaskOracle = build_vector_env(compose_config("run", [*CORE, *overrides]))
    return oracle


@pytest.fixture(scope="module")
def oracle() -> TaskOracle:
    return make_oracle()


@pytest.fixture(scope="module")
def noiseless() -> TaskOracle:
    return make_oracle("environment.noise=0")


@pytest.fixture(scope="module")
def tasks() -> OracleTasks:
    """The first training tasks."""
    return draw_tasks(NUMBERS, 8, BLUEPRINTS)


@pytest.fixture(scope="module")
def best(tasks: OracleTasks) -> tuple[Plans, Tensor]:
    return optimum(tasks, STEPS)


def random_action(observation: Observation, oracle: TaskOracle, generator: torch.Generator) -> Tensor:
    op = torch.multinomial(observation.masks.op.float(), 1, generator=generator)[:, 0]
    slot = torch.multinomial(observation.masks.under("slot", op).float() + 1e-9, 1, generator=generator)[:, 0]
    blueprint = torch.randint(len(oracle.space.blueprints), op.shape, generator=generator)
    return torch.stack([op, slot, blueprint, torch.zeros_like(op)], 1)


def random_plans(tasks: OracleTasks, generator: torch.Generator) -> Plans:
    shape = tasks.exists.shape
    blueprint = torch.randint(-1, len(BLUEPRINTS), shape, generator=generator)
    return Plans(torch.where(tasks.exists, blueprint, -1), torch.randint(STEPS, shape, generator=generator))


def test_splits_have_no_task_in_common_and_held_out_tasks_have_other_slots_and_costs() -> None:
    numbers = [number for split in SPLITS.values() for number in split]
    assert sorted(numbers) == list(range(TASKS))
    assert len(SPLITS["train"]) == 64
    for split, slots, cost in (
        ("train", SLOT_RANGE, COST_RANGE),
        ("test", SLOT_RANGE, COST_RANGE),
        ("heldout", HELD_OUT_SLOT_RANGE, HELD_OUT_COST_RANGE),
    ):
        tasks = draw_tasks(SPLITS[split], 8, BLUEPRINTS)
        counts, reference = tasks.exists.sum(1), tasks.cost.sum(1)[:, BLUEPRINTS.index("conv_small")]
        assert set(counts.tolist()) == set(range(slots[0], slots[1] + 1))
        assert cost[0] <= reference.min() < reference.max() <= cost[1]


def test_a_task_depends_on_its_number_only() -> None:
    some, one = draw_tasks([3, 70, 200], 8, BLUEPRINTS), draw_tasks([70], 10, ("depthwise", "norm"))
    chosen = [BLUEPRINTS.index(name) for name in ("depthwise", "norm")]
    assert torch.equal(some.gain[1][:, chosen], one.gain[0, :8])
    assert torch.equal(some.level[1:2], one.level)
    assert not one.exists[0, 8:].any()


@pytest.mark.parametrize("purpose", ["training", "warm-up", "validation", "other"])
def test_every_block_has_every_task_of_the_split_equally_often_in_groups(oracle: TaskOracle, purpose: str) -> None:
    split = SPLITS["train"] if purpose in ("training", "warm-up") else SPLITS["validation"]
    seeds = [oracle.episode_seed(purpose, 0, index) for index in range(2 * 4 * 64)]
    numbers = [oracle.task_number(seed) for seed in seeds]
    groups = [numbers[first : first + 4] for first in range(0, len(numbers), 4)]
    assert all(len(set(group)) == 1 for group in groups)
    blocks = [[group[0] for group in groups[first : first + 64]] for first in (0, 64)]
    assert [sorted(block) for block in blocks] == [list(split)] * 2
    assert blocks[0] != blocks[1]
    assert len(set(seeds)) == len(seeds)


def test_the_split_chooses_the_tasks_of_validation_but_not_of_training() -> None:
    oracle = make_oracle("environment.split=heldout")
    validated = Counter(oracle.task_number(oracle.episode_seed("validation", 0, index)) for index in range(32))
    assert set(validated.values()) == {4}
    assert set(validated) <= set(SPLITS["heldout"])
    assert oracle.task_number(oracle.episode_seed("training", 0, 0)) in SPLITS["train"]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("environment.repeats=5", r"^environment\.repeats=5: must divide environment\.envs=32\.$"),
        ("slots.names=[block1,block2]", r"^slots\.names=\['block1', 'block2'\]: must be at least 8 slots, because"),
    ],
)
def test_repeats_that_do_not_divide_the_environments_and_too_few_slots_are_refused(
    override: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_oracle(override)


def test_missing_slots_are_never_legal_and_never_counted(oracle: TaskOracle) -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = [oracle.episode_seed("training", 0, index) for index in range(32)]
    observation = oracle.reset(seeds)
    missing = ~observation.exists
    counts = oracle.tasks([oracle.task_number(seed) for seed in seeds]).exists.sum(1)
    assert torch.equal(observation.exists.sum(1), counts)
    for _ in range(oracle.steps):
        assert not (observation.masks.slot & missing.unsqueeze(1)).any()
        assert not observation.slots[missing].any()
        assert not observation.candidates[missing].any()
        step = oracle.step(random_action(observation, oracle, generator))
        observation = step.observation
        assert not step.record.entered[missing].any()
        assert step.record.now.contribution[missing].isnan().all()
        assert observation.base.isfinite().all()
        assert observation.slots.isfinite().all()


def test_an_episode_does_not_depend_on_its_neighbours(oracle: TaskOracle) -> None:
    seeds = [oracle.episode_seed("training", 1, index) for index in range(0, 32, 4)]
    germinate = torch.tensor([oracle.layout.ops.index("GERMINATE"), 0, 3, 0])

    def run(episode_seeds: list[int]) -> list[Tensor]:
        rows = [oracle.reset(episode_seeds).base]
        for step in range(oracle.steps):
            action = (germinate if step == 2 else torch.zeros_like(germinate)).expand(len(episode_seeds), -1)
            rows.append(oracle.step(action).observation.base)
        return [*rows, oracle.outcome()["score"].unsqueeze(1)]

    for together, alone in zip(run(seeds), run([seeds[5]]), strict=True):
        assert torch.equal(together[5:6], alone)


def test_an_episode_without_noise_has_the_score_of_its_plan(noiseless: TaskOracle) -> None:
    """Two seeds germinate, another is pruned again: that one only slows the host down."""
    numbers = [number for number in SPLITS["train"] if noiseless.tasks([number]).exists.sum() >= 2][:16]
    tasks = noiseless.tasks(numbers)
    germinate, prune = noiseless.layout.ops.index("GERMINATE"), noiseless.layout.ops.index("PRUNE")

    def run(actions: dict[int, list[int]]) -> Tensor:
        noiseless.reset([noiseless.seed_of_task(number, 12345) for number in numbers])
        for step in range(noiseless.steps):
            noiseless.step(torch.tensor([actions.get(step, [0, 0, 0, 0])] * len(numbers)))
        return noiseless.outcome()["score"]

    plans = no_growth(tasks)
    assert torch.allclose(run({}), plan_scores(tasks, plans, STEPS))
    plans.blueprint[:, 0], plans.start[:, 0], plans.blueprint[:, 1], plans.start[:, 1] = 3, 4, 0, 9
    planted = {4: [germinate, 0, 3, 0], 9: [germinate, 1, 0, 0]}
    assert torch.allclose(run(planted), plan_scores(tasks, plans, STEPS), atol=1e-4)
    assert (run({**planted, 0: [germinate, 0, 4, 0], 2: [prune, 0, 0, 0]}) < plan_scores(tasks, plans, STEPS)).all()
    late = run({19: [germinate, 0, 3, 0]})
    plans = no_growth(tasks)
    plans.blueprint[:, 0], plans.start[:, 0] = 3, 19
    assert torch.allclose(late, plan_scores(tasks, plans, STEPS), atol=1e-4), "it costs, but it is not committed"


def test_no_random_plan_exceeds_the_optimum(tasks: OracleTasks, best: tuple[Plans, Tensor]) -> None:
    plans, score = best
    assert torch.allclose(plan_scores(tasks, plans, STEPS), score)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        assert (plan_scores(tasks, random_plans(tasks, generator), STEPS) <= score + 1e-4).all()


def test_the_optimum_of_two_slots_is_that_of_all_plans(tasks: OracleTasks) -> None:
    steps, row = 8, int((tasks.exists.sum(1) == 2).nonzero()[0])
    options = [(-1, 0), *product(range(len(BLUEPRINTS)), range(steps - 1))]
    pairs = torch.tensor(list(product(options, repeat=2)))  # [plans, slots, blueprint and start]
    plans = no_growth(tasks[torch.full((len(pairs),), row)])
    plans.blueprint[:, :2], plans.start[:, :2] = pairs[..., 0], pairs[..., 1]
    every = plan_scores(tasks[torch.full((len(pairs),), row)], plans, steps)
    assert float(optimum(tasks[torch.tensor([row])], steps)[1]) == pytest.approx(float(every.max()), abs=1e-4)


def test_a_task_without_gain_is_best_left_alone_and_others_are_not(
    tasks: OracleTasks, best: tuple[Plans, Tensor]
) -> None:
    plans, score = best
    none = plan_scores(tasks, no_growth(tasks), STEPS)
    lacks_nothing = torch.tensor([LACKS[number % len(LACKS)] is None for number in NUMBERS])
    assert lacks_nothing.float().mean() == 0.25
    assert (plans.blueprint[lacks_nothing] == -1).all()
    assert torch.equal(score[lacks_nothing], none[lacks_nothing])
    assert (score[~lacks_nothing] > none[~lacks_nothing] + 1).all()


def test_growing_everywhere_from_the_start_is_not_best_everywhere(
    tasks: OracleTasks, best: tuple[Plans, Tensor]
) -> None:
    start = torch.zeros(tasks.exists.shape, dtype=torch.int64)
    for blueprint in range(len(BLUEPRINTS)):
        scores = plan_scores(tasks, Plans(torch.where(tasks.exists, blueprint, -1), start), STEPS)
        assert (scores < best[1] - 0.5).float().mean() > 0.5


def test_references_are_ordered(oracle: TaskOracle, tasks: OracleTasks, best: tuple[Plans, Tensor]) -> None:
    """No growth < the best fixed schedule < probe then commit < optimum."""
    none = plan_scores(tasks, no_growth(tasks), STEPS).mean()
    fixed = plan_scores(tasks, best_fixed(tasks, STEPS).plans(tasks.exists), STEPS).mean()
    rule = tune_probes(oracle, NUMBERS, draws=32)
    seeds = [oracle.seed_of_task(number, rng_seed) for number in NUMBERS for rng_seed in (10_000, 20_000)]
    probe = run_probes(oracle, rule[torch.zeros(len(seeds), dtype=torch.int64)], seeds).mean()
    assert none + 1 < fixed < probe - 1 < best[1].mean() - 1.5


def test_a_fixed_schedule_plants_one_seed_in_a_step(tasks: OracleTasks) -> None:
    schedule = FixedSchedule((3, -1, 0), 4, from_output=True)
    plans = schedule.plans(tasks.exists)
    for blueprint, start in zip(plans.blueprint, plans.start, strict=True):
        starts = start[blueprint >= 0].tolist()
        assert sorted(starts) == list(range(schedule.start, schedule.start + len(starts)))


def test_neither_the_number_nor_the_gains_of_a_task_are_observed_before_anything_grows() -> None:
    """Two tasks are made equal in everything but their number, gains and delay; without noise they look the same."""
    oracle, (one, other) = make_oracle("environment.noise=0"), SPLITS["train"][1:3]
    for table, kept in ((oracle._all, ("gain", "delay")), (oracle._described, ())):
        for name, values in vars(table).items():
            if name not in kept:
                values[other] = values[one]
    observation = oracle.reset([oracle.seed_of_task(number, 12345) for number in (one, other)])
    assert not torch.equal(*oracle.tasks([one, other]).gain)
    for _ in range(oracle.steps):
        for name in ("base", "slots", "candidates", "blueprints", "exists"):
            assert torch.equal(*getattr(observation, name))
        observation = oracle.step(torch.zeros(2, 4, dtype=torch.int64)).observation


def test_a_critic_can_know_the_task(oracle: TaskOracle) -> None:
    numbers = [SPLITS["train"][1], SPLITS["heldout"][0]]
    seeds = [oracle.seed_of_task(number, rng_seed) for number in numbers for rng_seed in (10_000, 20_000)]
    described = oracle.describe_tasks(seeds)
    assert described.shape == (4, len(oracle.task_features))
    assert torch.equal(described[0], described[1])
    assert not torch.equal(described[1], described[2])
    gain = described[0, oracle.task_features.index("gain=depthwise")]
    assert gain == pytest.approx(float(oracle.tasks(numbers).gain[0, :, 3].sum()) / 10)
    assert described.isfinite().all()


def test_the_reward_is_the_score_and_contributions_show_what_a_seed_adds(oracle: TaskOracle) -> None:
    number = next(n for n in SPLITS["train"] if LACKS[n % len(LACKS)] == "spatial")
    seeds = [oracle.seed_of_task(number, rng_seed << 20) for rng_seed in range(64)]
    oracle.reset(seeds)
    germinate, total = oracle.layout.ops.index("GERMINATE"), torch.zeros(64)
    for step in range(oracle.steps):
        action = torch.zeros(64, 4, dtype=torch.int64)
        if step == 0:  # depthwise in one half of the episodes, norm in the other
            action[:] = torch.tensor([germinate, 0, 3, 0])
            action[32:, 2] = 0
        result = oracle.step(action)
        total += result.reward
        if step == 10:
            contribution = result.record.now.contribution[:, 0]
    assert torch.equal(total, oracle.outcome()["score"])
    assert (result.record.after.stage[:, 0] == Stage.FOSSILIZED).all()
    assert contribution[:32].mean() > contribution[32:].mean() + 1
