"""Hosts with different slots in one round."""

import pytest
import torch

from esper.config import check_config
from esper.controllers import Controller, HeuristicController, ReplayController, ScheduleController
from esper.environment import Environment, EpisodeStart, GrowthStep
from esper.evaluation.plans import fill
from esper.lifecycle import Stage
from esper.records import EpisodeLog, EpisodeRecord, make_record
from esper.telemetry.timeline import describe_episode, timeline
from tests.environment.test_environment import is_equal, rows, run_random
from tests.fixtures_environment import config, environment
from tests.lifecycle.fixtures_slots import act

SLOTS = {
    "slots1": ("block1",),
    "slots2": ("block1", "block2"),
    "slots3": ("block1", "block2", "block3"),
    "slots5": ("block1", "block2", "block3", "block4", "block5"),
    "slots8": ("block1", "pool1", "block2", "pool2", "block3", "pool3", "block4", "block5"),
}
ALL = ("host=cifar_slots", "environment.envs=5")
BRIEF = ("environment.batches=1", "data.validation=20", "environment.validation_batch=20")
BUDGET = ("environment=budget", "environment.batches=null", "environment.budget_batches=40", "lifecycle=quick")
LEAN = ("lifecycle=quick", "actions=lean", "actions.fixed.alpha_speed=INSTANT")
ENTRIES = [
    {"at": 0, "slot": "block3", "blueprint": ["conv_light"]},
    {"at": 1, "slot": "pool2", "blueprint": ["norm"]},
    {"at": 1, "slot": "block1", "blueprint": ["attention"], "blend": "GATED"},
]


@pytest.fixture(scope="module")
def mixed() -> Environment:
    return environment(*ALL)


def seeds(env: Environment) -> list[int]:
    """One episode seed of each host."""
    return env.host_pool.episode_seeds("test", 0, 0)


def run(env: Environment, controller: Controller[object], episode_seeds: list[int]) -> list[GrowthStep]:
    observation, memory = env.reset(episode_seeds), controller.begin(episode_seeds)
    steps = []
    for _ in range(env.steps):
        action, memory = controller.act(observation, memory)
        steps.append(env.step(action))
        observation = steps[-1].observation
    return steps


def test_the_action_space_has_the_slots_of_all_hosts_and_each_host_has_its_own(mixed: Environment) -> None:
    assert mixed.space.slots == SLOTS["slots8"]
    observation = mixed.reset(seeds(mixed))
    for env, (host, own) in enumerate(SLOTS.items()):
        assert mixed.host_pool.host_name(seeds(mixed)[env]) == host
        assert mixed.host_pool.slot_names(seeds(mixed)[env]) == own
        assert mixed.space.present_slots(observation.exists[env]) == own
        assert [slot.name for slot in mixed.model(env).host.slots] == list(own)
    assert torch.equal(observation.exists, mixed.host_pool.exists_by_host())
    assert not observation.slots[~observation.exists].any(), "features of a missing slot are 0"


def test_random_growth_uses_the_slots_of_its_own_host_only(mixed: Environment) -> None:
    steps = run_random(mixed, seeds(mixed), steps=10)
    exists = mixed.host_pool.exists(seeds(mixed))
    for step in steps:
        assert not step.record.entered[~exists].any()
        for name in ("contribution", "loss_contribution", "progress", "seed_gradient_norm", "seed_health"):
            assert getattr(step.record.now, name)[~exists].isnan().all(), name
        assert not step.record.seed_parameters[~exists].any()
        assert step.reward.isfinite().all()
    for env, own in enumerate(SLOTS.values()):
        assert set(mixed.model(env).seeds) <= set(own)
    assert any(set(mixed.model(env).seeds) for env in range(5))


@pytest.mark.xdist_group("workers")
def test_a_round_of_different_hosts_is_bit_equal_in_workers() -> None:
    workers, single = environment(*ALL, *BRIEF, "environment.workers=2"), environment(*ALL, *BRIEF)
    one, other = (run_random(each, seeds(each), steps=6) for each in (workers, single))
    assert all(is_equal(rows(one, env), rows(other, env)) for env in range(5))
    tested, expected = workers.test(), single.test()
    assert all(torch.equal(tested[name], expected[name]) for name in expected)
    workers.close()


@pytest.mark.xdist_group("workers")
def test_growth_in_all_slots_is_bit_equal_in_workers_and_threads() -> None:
    played, spent = [], []
    for place in ("environment.workers=2", "environment.threads=2", "environment.threads=1"):
        env = environment(*ALL, *LEAN, *BRIEF, place)
        played.append(run_random(env, seeds(env), steps=8))
        spent.append(env.flops_spent())
        env.close()
    assert any((step.record.entered[..., Stage.GERMINATED].sum(1) >= 2).any() for step in played[0])
    assert any((step.record.entered[..., Stage.PRUNED].sum(1) >= 2).any() for step in played[0])
    for other, flops in zip(played[1:], spent[1:], strict=True):
        assert all(is_equal(rows(played[0], env), rows(other, env)) for env in range(5))
        assert all(torch.equal(spent[0][part], flops[part]) for part in flops)


def test_germinating_in_all_slots_fills_those_that_exist_and_pruning_in_all_empties_them() -> None:
    """The seeds, parameters and costs are those of episodes that start with all slots filled."""
    env, exists = environment(*ALL, *LEAN), environment(*ALL).host_pool.exists_by_host()
    heads, several = ("op", "slot", "blueprint"), [slots if len(slots) == 1 else ("all",) for slots in SLOTS.values()]
    assert env.space.head_names == heads
    env.reset(seeds(env), [EpisodeStart(fossils=fill(env.space, "conv_light"))] * 5)
    filled = env.step(act(env.space, *[{"op": "WAIT"}] * 5)).record
    names, training = [set(env.model(each).seeds) for each in range(5)], env.flops_spent()["training"]

    env.reset(seeds(env))
    germinate = [{"op": "GERMINATE", "slot": slot, "blueprint": "conv_light"} for (slot,) in several]
    grown = env.step(act(env.space, *germinate)).record
    assert torch.equal(grown.acted, exists)
    assert torch.equal(grown.entered[..., Stage.GERMINATED], exists)
    assert (grown.after.stage[exists] == Stage.HOLDING).all()
    assert [set(env.model(each).seeds) for each in range(5)] == names == [set(own) for own in SLOTS.values()]
    assert torch.equal(grown.seed_parameters, filled.seed_parameters)
    assert torch.equal(grown.now.parameters, filled.now.parameters)
    assert torch.equal(grown.batches, filled.batches)
    assert torch.equal(env.flops_spent()["training"], training)

    pruned = env.step(act(env.space, *[{"op": "PRUNE", "slot": slot} for (slot,) in several])).record
    assert torch.equal(pruned.entered[..., Stage.PRUNED], exists)
    assert not any(env.model(each).seeds for each in range(5))
    assert torch.equal(pruned.now.parameters, pruned.host_parameters)


@pytest.mark.parametrize("clock", [(), BUDGET], ids=["batches", "budget"])
def test_columns_of_other_hosts_change_nothing(clock: tuple[str, ...]) -> None:
    """An episode of the host with three slots is bit-equal where that host is the only one."""
    mixed, alone = environment(*ALL, *clock), environment("host=cifar_blind", *clock, envs=1)
    assert alone.space.slots == SLOTS["slots3"]
    episode_seeds = seeds(mixed)
    many = run(mixed, ScheduleController(mixed.space, ENTRIES, rules=mixed.rules), episode_seeds)
    own_entries = [entry for entry in ENTRIES if entry["slot"] in alone.space.slots]
    single = run(alone, ScheduleController(alone.space, own_entries, rules=alone.rules), episode_seeds[2:3])
    exists = mixed.host_pool.exists(episode_seeds)[2]
    assert (many[-1].record.after.stage[2] == Stage.FOSSILIZED).sum() == 2, "seeds have grown"
    for padded, plain in zip(many, single, strict=True):
        for name in ("loss", "score", "train_loss", "gradient_norm", "parameters", "flops"):
            values, expected = getattr(padded.record.now, name)[2:3], getattr(plain.record.now, name)
            assert torch.equal(values.nan_to_num(-7), expected.nan_to_num(-7)), name
        for name in ("contribution", "seed_gradient_norm", "seed_health"):
            values, expected = getattr(padded.record.now, name)[2, exists], getattr(plain.record.now, name)[0]
            assert torch.equal(values.nan_to_num(-7), expected.nan_to_num(-7)), name
        assert torch.equal(padded.observation.base[2:3], plain.observation.base)
        assert torch.equal(padded.observation.slots[2, exists], plain.observation.slots[0])
        assert torch.equal(padded.reward[2:3], plain.reward)
    for part, flops in alone.flops_spent().items():
        assert torch.equal(mixed.flops_spent()[part][2:3], flops), part


def test_a_host_with_all_slots_filled_has_exactly_its_own(mixed: Environment) -> None:
    start = EpisodeStart(fossils=fill(mixed.space, "norm"))
    late = EpisodeStart(fossils=fill(mixed.space, "norm"), at=0.5)
    for each in (start, late):
        mixed.reset(seeds(mixed), [each] * 5)
        wait = torch.zeros(5, len(mixed.space.heads), dtype=torch.int64)
        for _ in range(mixed.steps):
            step = mixed.step(wait)
        assert torch.equal(step.record.after.stage == Stage.FOSSILIZED, mixed.host_pool.exists_by_host())
        assert [set(mixed.model(env).seeds) for env in range(5)] == [set(own) for own in SLOTS.values()]
        assert [set(mixed.committed_settings(env)) for env in range(5)] == [set(own) for own in SLOTS.values()]
    assert mixed.outcome()["fossils"].tolist() == [len(own) for own in SLOTS.values()]
    assert step.observation.base.isfinite().all()
    first, last = seeds(mixed)[0], seeds(mixed)[-1]
    own = fill(mixed.space, "conv_light")
    assert mixed.batches_for(1e9, own, first) == mixed.batches_for(1e9, {"block1": own["block1"]}, first)
    assert mixed.batches_for(1e9, own, last) < mixed.batches_for(1e9, {}, last)


def test_shares_of_slots_are_of_the_slots_that_a_host_has(mixed: Environment) -> None:
    start = EpisodeStart(fossils={"block1": ("norm", "ADD")})
    observation = mixed.reset(seeds(mixed), [start] * 5)
    names = [feature.name for feature in mixed._features.base]
    widths = [feature.width for feature in mixed._features.base]
    column = sum(widths[: names.index("fossilized")])
    assert observation.base[:, column].tolist() == pytest.approx([1 / len(own) for own in SLOTS.values()])


def test_first_middle_and_last_are_places_in_the_host_of_an_episode(mixed: Environment) -> None:
    entries = [{"at": 0, "slot": name, "blueprint": ["norm"]} for name in ("middle", "last", "first")]
    controller = ScheduleController(mixed.space, entries)
    slots = [[entry.slot for entry in controller.entries_of(row)] for row in mixed.host_pool.exists_by_host()]
    assert slots == [
        ["block1"], ["block1", "block2"], ["block2", "block3", "block1"], ["block3", "block5", "block1"],
        ["pool2", "block5", "block1"],
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"^schedule: slot=block9: must be one of first, middle, last, block1, pool1"):
        ScheduleController(mixed.space, [{"at": 0, "slot": "block9", "blueprint": ["norm"]}])


def test_a_recorded_action_in_a_slot_that_the_host_lacks_becomes_wait(mixed: Environment) -> None:
    actions = [{"op": "GERMINATE", "slot": "pool2", "blueprint": "norm", "blend": "ADD"}]
    steps = run(mixed, ReplayController(mixed.space, actions), seeds(mixed))
    assert steps[0].record.decision.op.tolist() == [0, 0, 0, 0, 1]


def records_of(
    env: Environment, episode_seeds: list[int], controller: Controller[object] | None = None
) -> list[EpisodeRecord]:
    log = EpisodeLog(env.space, env.rules, episode_seeds)
    controller = controller or ScheduleController(env.space, ENTRIES)
    observation, memory = env.reset(episode_seeds), controller.begin(episode_seeds)
    for _ in range(env.steps):
        action, memory = controller.act(observation, memory)
        step = env.step(action)
        log.add(action, step)
        observation = step.observation
    known = {"arm": "schedule", "score": 1.0, "parameters": 1.0, "flops": 1.0}
    return [make_record(env, log, env_index, **known) for env_index in range(len(episode_seeds))]


def test_records_and_timelines_have_only_the_slots_of_the_host(mixed: Environment) -> None:
    records = records_of(mixed, seeds(mixed))
    for record, own in zip(records, SLOTS.values(), strict=True):
        assert record.slots == list(own)
        assert set(record.fossils) <= set(own)
        for step in record.steps:
            for name in ("stage", "alpha", "blueprint", "entered", "contribution", "progress", "seed_health"):
                assert len(getattr(step, name)) == len(own), name
        assert {germination.slot for germination in record.germinations} <= set(own)
        assert EpisodeRecord.from_dict(record.to_dict()) == record
    assert [germination.slot for germination in records[0].germinations] == ["block1"]
    assert [germination.slot for germination in records[4].germinations] == ["block3", "pool2", "block1"]
    assert "pool" not in describe_episode(records[3])
    lanes = timeline({"small": records[0], "large": records[4]}).axes[2:4]
    drawn = [[label.get_text() for label in axes.get_yticklabels()] for axes in lanes]
    assert drawn == [list(SLOTS["slots1"]), list(SLOTS["slots8"])]


def test_records_and_timelines_have_each_seed_of_an_action_in_all_slots() -> None:
    env = environment(*ALL, *LEAN)
    grow = {"op": "GERMINATE", "slot": "all", "blueprint": "norm"}
    actions = [grow, {"op": "PRUNE", "slot": "block2"}]
    (*_, record) = records_of(env, seeds(env), ReplayController(env.space, actions))
    assert [step.action for step in record.steps[:2]] == actions
    assert [step.choice for step in record.steps[:3]] == ["GERMINATE all", "PRUNE", "WAIT"]
    assert [germination.slot for germination in record.germinations] == list(SLOTS["slots8"])
    assert set(record.fossils) == set(SLOTS["slots8"]) - {"block2"}
    assert EpisodeRecord.from_dict(record.to_dict()) == record
    assert describe_episode(record).count("step 0: norm in ") >= 8
    assert sum(text.get_text() == "norm" for text in timeline({"all": record}).axes[1].texts) == 8


def test_a_host_of_one_block_and_one_of_eight_slots_run_alone() -> None:
    one = environment("host=cifar_baseline", "host.blocks=1", "host.pools=1")
    assert one.space.slots == ("block1",)
    eight = environment("data.resolution=16", "host.blocks=4", "host.pools=4", "host.pool_slots=true")
    assert len(eight.space.slots) == 8
    for env in (one, eight):
        steps = run_random(env, [1, 2], steps=10)
        assert steps[-1].record.now.score.isfinite().all()
        start = EpisodeStart(fossils=fill(env.space, "conv_light"))
        env.reset([1, 2], [start, start])
        assert env.step(torch.zeros(2, len(env.space.heads), dtype=torch.int64)).record.now.loss.isfinite().all()


def test_rules_of_hand_written_controllers_see_only_their_own_slots(mixed: Environment) -> None:
    """The heuristic germinates in the first free slot of each host."""
    settings = dict(config(*ALL).controller.heuristic)
    settings = {key: value for key, value in settings.items() if not key.startswith("_")}
    settings |= {"plateau_gain": 1e9, "plateau_steps": 1, "earliest": 0.0, "latest": 1.0, "cooldown": 0.0}
    settings |= {"steady_range": [-9.0, 9.0], "calm_steps": 1}
    steps = run(mixed, HeuristicController(mixed.space, **settings), seeds(mixed))
    germinated = torch.stack([step.record.entered[..., Stage.GERMINATED] for step in steps]).any(0)
    assert germinated[:, 0].all()
    assert not (germinated & ~mixed.host_pool.exists_by_host()).any()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("slots.names=[block9]",), r"^slots\.names: block9 is not a slot of any host; they have block1, pool1, bl"),
        (("slots.names=[block3]",), r"^host\.hosts\.slots1: must have at least one of the slots in slots\.names, but"),
        (("slots.names=[]",), r"^slots\.names=\[\]: must name at least one of block1, pool1, block2"),
    ],
    ids=["unknown", "a host without any", "none"],
)
def test_slots_that_do_not_fit_the_hosts_are_refused_in_one_sentence(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_config(config("host=cifar_slots", *overrides))


def test_chosen_slots_are_a_part_of_every_host() -> None:
    env = environment(*ALL, "slots.names=[pool1,block2,block1]")
    assert env.space.slots == ("block1", "pool1", "block2")
    assert env.reset(seeds(env)).exists.sum(1).tolist() == [1, 2, 2, 2, 3]
