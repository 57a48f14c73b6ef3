"""Environments whose episodes are measured in FLOPs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper.command_line import CONF
from esper.config import build_environment, check_config, compose_config
from esper.controllers import NoGrowth, RandomController
from esper.environment import Environment, EpisodeStart, GrowthStep
from esper.environment.host_run import vector_width
from esper.environment.host_runs import Change, Computation, RunOrigin
from esper.lifecycle import Stage
from tests.fixtures_environment import config, environment
from tests.lifecycle.fixtures_slots import act

BUDGET = (
    "environment=budget", "environment.batches=null", "environment.budget_batches=40", "lifecycle=quick",
    "environment.validation_samples=20",
)  # fmt: skip
FOSSILS = {"block2": ("conv_light", "ADD")}
GERMINATE = {"op": "GERMINATE", "slot": "block1", "blueprint": "conv_light"}


def budget_environment(*overrides: str, envs: int = 2) -> Environment:
    return environment(*BUDGET, *overrides, envs=envs)


def run(
    env: Environment, starts: Sequence[EpisodeStart], script: Mapping[int, dict[str, str]] | None = None
) -> list[GrowthStep]:
    """Whole episodes on one episode seed; all take the action of the script, by step, or wait."""
    env.reset([5] * len(starts), starts)
    waits = NoGrowth(env.space).act(env._observe(), None)[0]
    actions = {step: act(env.space, *[choice] * len(starts)) for step, choice in (script or {}).items()}
    return [env.step(actions.get(step, waits)) for step in range(env.steps)]


def spent(env: Environment) -> dict[str, list[float]]:
    return {part: flops.tolist() for part, flops in env.flops_spent().items()}


class FakeRuns:
    """Runs that train nothing: costs are formulas, so whole experiments are simulated in milliseconds."""

    parallel = 1

    def __init__(self, slots: int) -> None:
        self._values = torch.rand(vector_width(slots))

    def start(self, episodes: Sequence[RunOrigin]) -> None: ...

    def change(self, env: int, change: Change) -> None: ...

    def compute(self, computations: Mapping[int, Computation]) -> list[Tensor]:
        return [self._values for _ in computations]

    def seconds(self, env: int) -> dict[str, float]:
        return {"train": 0.0, "measure": 0.0}

    def close(self) -> None: ...


def budget_experiments() -> list[str]:
    names = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
    return [
        name
        for name in names
        if compose_config("evaluate", [f"+experiment={name}"]).environment.get("budget_batches", 0) != 0
    ]


def test_an_episode_spends_its_budget_and_at_most_one_batch_more() -> None:
    env = budget_environment()
    steps = run(env, [EpisodeStart(), EpisodeStart(fossils=FOSSILS)])
    budget, total = env.budget_flops(5), env.view.now.flops
    batch = [float(sum(env.flops_spent()[part][row] for part in ("training", "isolated"))) for row in (0, 1)]
    batches = torch.stack([step.record.batches for step in steps]).sum(0)
    assert (total >= budget).all()
    assert (total <= budget + torch.tensor(batch) / batches + 1).all()
    assert batches[0] > batches[1]  # seeds cost FLOPs, so there are fewer batches
    assert env.effort()["samples"] == batches.sum() * 16


def test_an_unmeasured_episode_validates_nothing_before_its_end() -> None:
    env = budget_environment()
    steps = run(env, [EpisodeStart(measured=False), EpisodeStart()])
    parts = spent(env)
    assert parts["validation"][0] == parts["probes"][0] == 0
    assert parts["validation"][1] > 0
    losses = torch.stack([step.record.now.loss for step in steps])
    assert losses[:-1, 0].isnan().all()
    assert losses.isfinite()[-1].all()
    assert losses[:, 1].isfinite().all()


def test_the_last_measurement_is_of_the_whole_split_and_costs_nothing() -> None:
    env = budget_environment("environment.validation_samples=20", "environment.validation_every=100")
    run(env, [EpisodeStart()])
    first = env.host_pool.costs(5).forward({}, {}) * 20  # before the first step
    assert spent(env)["validation"] == [first]
    whole = env.host_run(0).evaluate({}, "validation")
    assert env.view.now.loss[0] == whole[0]


def test_decisions_see_the_loss_on_a_fixed_part_of_the_validation_split() -> None:
    env = budget_environment("environment.validation_samples=20", envs=1)
    env.reset([5])
    part = env.host_pool.task(0).data.batches("validation", 20)
    x, y = next(part)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(env.model(0).eval()(x, {}), y)
    torch.testing.assert_close(env.view.now.loss[0], expected)


def test_fossils_are_grafted_at_a_share_of_the_episode() -> None:
    env = budget_environment()
    steps = run(env, [EpisodeStart(fossils=FOSSILS, at=0.5), EpisodeStart(fossils=FOSSILS, at=1.0)])
    occupied = torch.stack([step.record.during.occupied for step in steps]).sum(2)
    assert occupied[:, 0].tolist() == [0] * 5 + [1] * 5
    assert occupied[:, 1].sum() == 0
    batches = torch.stack([step.record.batches for step in steps])[:, 0]
    assert batches[:5].sum() > batches[5:].sum()
    assert steps[5].record.entered[0, 1, Stage.FOSSILIZED]
    assert env.view.now.parameters[0] > env.view.now.parameters[1] == env.view.host_parameters[1]


def test_a_seed_of_a_quick_lifecycle_is_blended_at_once_and_committed_at_the_end() -> None:
    env = budget_environment("environment.budget_batches=300", "environment.measure_share=0.5", envs=1)
    steps = run(env, [EpisodeStart()], {2: GERMINATE})
    assert steps[2].record.during.alpha[0].tolist() == [1, 0, 0]
    assert steps[2].record.now.contribution[0].isfinite().tolist() == [True, False, False]
    stages = [int(step.record.after.stage[0, 0]) for step in steps]
    assert stages[-1] == Stage.FOSSILIZED
    assert Stage.FOSSILIZED not in stages[:-1]
    assert env.outcome()["fossils"].tolist() == [1]
    assert list(env.committed_settings(0)) == ["block1"]


def test_a_seed_without_a_commit_is_lost_under_explicit_commit() -> None:
    env = budget_environment("lifecycle.commit=explicit", envs=1)
    run(env, [EpisodeStart()], {2: GERMINATE})
    assert env.outcome()["fossils"].tolist() == [0]
    assert env.view.now.parameters.tolist() == env.view.host_parameters.tolist()


def test_a_smaller_share_of_the_budget_decays_fully_too() -> None:
    env = budget_environment()
    run(env, [EpisodeStart(budget=0.25, measured=False), EpisodeStart(measured=False)])
    quarter, whole = env.view.now.flops.tolist()
    assert quarter * 4 == whole
    assert env.view.clock is not None
    assert env.view.clock.spent.tolist() == [1, 1]
    assert env.view.clock.lr_left.tolist() == [0, 0]
    assert (env.view.clock.passes[0] * 4).item() == pytest.approx(env.view.clock.passes[1].item())


def test_the_score_of_an_episode_has_the_rent_of_the_environment() -> None:
    env = budget_environment(envs=1)
    run(env, [EpisodeStart(fossils=FOSSILS)])
    assert env.outcome()["score"].tolist() == env.outcome()["validation_score"].tolist()
    rented = budget_environment("environment.rent=2", envs=1)
    run(rented, [EpisodeStart(fossils=FOSSILS)])
    growth = rented.outcome()["growth"].log()
    torch.testing.assert_close(rented.outcome()["score"], rented.outcome()["validation_score"] - 2 * growth)


def test_a_decision_is_charged() -> None:
    env = budget_environment()
    run(env, [EpisodeStart(controller_flops=1000), EpisodeStart()])
    assert spent(env)["controller"] == [10_000, 0]


def test_a_variant_of_the_host_trains_and_is_charged() -> None:
    env = budget_environment()
    steps = run(env, [EpisodeStart(host="wide2", measured=False), EpisodeStart(measured=False)])
    batches = torch.stack([step.record.batches for step in steps]).sum(0)
    assert batches[0] < batches[1] / 2
    assert env.view.now.parameters[0] > 2 * env.view.host_parameters[0]
    with pytest.raises(ValueError, match="host variant wide99: host has no such variant; it has wide"):
        env.reset([1], [EpisodeStart(host="wide99")])


def test_a_widened_host_computes_the_same_function_and_goes_on_training() -> None:
    env = budget_environment("environment.validation_samples=100", envs=1)
    start = EpisodeStart(widen="wide2", at=0.5)
    env.reset([5], [start])
    wait = NoGrowth(env.space).act(env._observe(), None)[0]
    for _ in range(5):
        env.step(wait)
    before = env.host_run(0).evaluate({}, "validation")
    env.host_run(0).widen("wide2")
    torch.testing.assert_close(env.host_run(0).evaluate({}, "validation"), before, atol=1e-4, rtol=1e-4)
    steps = run(env, [start])
    batches = [int(step.record.batches[0]) for step in steps]
    assert sum(batches[5:]) < sum(batches[:5])
    assert env.view.now.parameters[0] > 2 * env.view.host_parameters[0]


def test_learning_rates_are_scaled() -> None:
    env = budget_environment()
    run(env, [EpisodeStart(lr_scale=0.5, measured=False), EpisodeStart(measured=False)])
    low, high = (env.host_run(row).optimizer.torch.param_groups[0]["lr"] for row in (0, 1))
    assert low == high / 2


def test_a_non_finite_host_without_validation_is_rolled_back_by_its_training_loss() -> None:
    env = budget_environment("environment.budget_batches=100")
    env.reset([5, 6], [EpisodeStart(measured=False)] * 2)
    wait = NoGrowth(env.space).act(env._observe(), None)[0]
    env.step(wait)
    next(env.model(0).parameters()).data.fill_(torch.nan)
    assert env.step(wait).record.rollback.tolist() == [1, 0]


def test_a_budgeted_episode_is_bit_equal_in_workers() -> None:
    starts = [
        EpisodeStart(),
        EpisodeStart(widen="wide1.5", at=0.3),
        EpisodeStart(host="deep1", lr_scale=2.0, measured=False),
    ]
    results = []
    for workers in (0, 2):
        env = budget_environment(f"environment.workers={workers}", envs=3)
        steps = run(env, starts[:1] + starts[1:])
        results.append(
            [torch.stack([step.record.now.train_loss for step in steps]), env.test()["loss"], env.view.now.flops]
        )
        env.close()
    for local, remote in zip(*results, strict=True):
        assert torch.equal(local.nan_to_num(-1), remote.nan_to_num(-1))


def test_validation_and_probes_take_at_most_a_tenth_of_the_budget_in_shipped_experiments() -> None:
    names = budget_experiments()
    assert "cifar_ppo" in names
    for name in names:
        check_cost_of_measurements(name)


def check_cost_of_measurements(name: str) -> None:
    is_text = compose_config("evaluate", [f"+experiment={name}"]).data.get("vocabulary") is not None
    data = ["data=synthetic_stories"] if is_text else [
        "data=synthetic_images", "data.train=1000", "data.validation=500", "data.test=100", "environment.batch=64",
    ]  # fmt: skip
    places = ["device=cpu", "environment.envs=4", "environment.workers=0"]
    composed = compose_config("evaluate", [f"+experiment={name}", *data, *places])
    check_config(composed)
    env = build_environment(composed)
    env._parts = replace(env._parts, runs=FakeRuns(len(env.space.slots)))
    controller = RandomController(env.space)
    expensive = next(name for name in ("mlp", "conv_heavy", "conv_small") if name in env.space.blueprints)
    for episode_seeds in ([1, 2, 3, 4], [5, 6, 7, 8]):
        observation, memory = env.reset(episode_seeds), controller.begin(episode_seeds)
        for step in range(env.steps):
            action, memory = controller.act(observation, memory)
            if step < len(env.space.slots) and episode_seeds[0] == 1:  # the most expensive network, from the start
                heads = {**GERMINATE, "slot": env.space.slots[step], "blueprint": expensive}
                own = {head: option for head, option in heads.items() if head in env.space.head_names}
                grown = act(env.space, *[own] * 4)
                action = torch.where(env.view.slots.exists[:, [step]], grown, torch.zeros_like(grown))
            observation = env.step(action).observation
        parts = env.flops_spent()
        budget = torch.tensor([env.budget_flops(episode_seed) for episode_seed in episode_seeds], dtype=torch.float64)
        assert ((parts["validation"] + parts["probes"]) <= 0.1 * budget).all(), name
        assert (parts["validation"] > 0).all(), name
        assert (env.view.now.flops >= budget).all(), name
        assert (env.view.now.flops - budget <= 0.03 * budget).all(), f"{name}: a batch"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("environment.budget=3", "environment.budget=3, environment.budget_batches=40: must set exactly one."),
        (
            "environment.budget_batches=null",
            "environment.budget=None, environment.budget_batches=None: must set exactly",
        ),
        (
            "environment.budget_batches=0.5",
            "environment.budget_batches=0.5: must be at least 1, one training batch of host",
        ),
        (
            "environment.batches=4",
            "environment.budget_batches=40: must be null with environment.batches=4; use environm",
        ),
    ],
)
def test_a_wrong_budget_gets_one_sentence(override: str, sentence: str) -> None:
    composed = config(*BUDGET, override)
    with pytest.raises(ValueError, match="environment") as error:
        build_environment(composed)
    assert str(error.value).startswith(sentence)
