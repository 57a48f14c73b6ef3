from collections import Counter
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from sb3_contrib import MaskablePPO
from stable_baselines3.common.env_checker import check_env as sb3_check_env

from esper.controllers import RandomController
from esper.gym import NAME, GrowthEnv, GymnasiumVectorEnv, flat_actions, flat_mask
from esper.lifecycle import legal
from tests.fixtures_environment import SMALL
from tests.lifecycle.fixtures_slots import play, rules, space
from tests.ppo.fixtures_environments import make_module, run_round

SMALL_TASKS = (
    "data=synthetic_images", "data.resolution=8", "data.train=200", "data.validation=40", "data.test=40",
    "environment.steps=4", "environment.validation_batch=40", "environment.validation_samples=20",
    "environment.budget=null", "environment.budget_batches=20",
)  # fmt: skip
SMALL_ZOO = (
    *SMALL_TASKS, "tasks.counts={train: 9, validation: 0, test: 2, heldout: 3}", "tasks.settings.batch=16",
    "tasks.settings.budget_batches=20", "tasks.variants=[]", "~tasks.families.permuted_pixels",
    "~tasks.families.fashion_mnist",
)  # fmt: skip
OVERRIDES = [*SMALL, "environment.batches=1", "environment.steps=8"]


@pytest.fixture
def env() -> GrowthEnv:
    env = gymnasium.make(NAME, overrides=OVERRIDES).unwrapped
    assert isinstance(env, GrowthEnv)
    return env


@pytest.mark.filterwarnings("ignore")  # the checkers also warn about style
def test_the_checkers_of_gymnasium_and_stable_baselines_pass(env: GrowthEnv) -> None:
    check_env(env, skip_render_check=True)
    sb3_check_env(env)


def test_equal_seeds_give_equal_episodes(env: GrowthEnv) -> None:
    runs = []
    for seed in (3, 3, 4):
        first, _ = env.reset(seed=seed)
        steps = [env.step(np.int64(0))[:2] for _ in range(3)]
        runs.append([*first.values(), *(each for step in steps for each in (*step[0].values(), step[1]))])
    assert all(np.array_equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(runs[0], runs[2], strict=True))


def test_legal_actions_can_be_taken_until_the_episode_ends(env: GrowthEnv) -> None:
    env.reset(seed=1)
    draws = np.random.default_rng(0)
    for step in range(8):
        choices = np.flatnonzero(env.action_masks())
        _, reward, terminated, truncated, info = env.step(draws.choice(choices))
        assert np.isfinite(reward)
        assert (terminated, truncated) == (step == 7, False)
        assert info["legal"]
    assert (info["step"], info["steps"], info["task"], info["family"]) == (8, 8, "host", "")


def test_an_illegal_action_counts_as_wait(env: GrowthEnv) -> None:
    env.reset(seed=1)
    illegal = int(np.flatnonzero(~env.action_masks())[0])
    observation, reward, _, _, info = env.step(np.int64(illegal))
    env.reset(seed=1)
    wait_observation, wait_reward, _, _, _ = env.step(np.int64(0))
    assert not info["legal"]
    assert all(np.array_equal(observation[name], wait_observation[name]) for name in observation)
    assert reward == wait_reward


@pytest.mark.parametrize("actions", ["core", "full", "lean"])
def test_the_flat_mask_allows_exactly_the_legal_actions(actions: str) -> None:
    chosen, rule = space(actions), rules(dwell=1, prune_age=0)
    flat = flat_actions(chosen)
    assert len(flat.unique(dim=0)) == len(flat)
    if actions == "core":
        assert len(flat) == 1 + 3 * 3 * 3 + 3 + 3
    if actions == "lean":
        assert len(flat) == 1 + 4 * 3 + 4
    for transition in list(play(chosen, rule, envs=1, steps=20, seed=1))[1::2]:
        masks = legal(transition.after, chosen, rule)
        mask = flat_mask(flat, masks, chosen)
        for action, allowed in zip(flat, mask, strict=True):
            op = int(action[0])
            uses_slot = chosen.uses()[op, 1]
            assert allowed == (masks.op[0, op] and (not uses_slot or masks.slot[0, op, action[1]]))


def test_maskable_ppo_trains_on_the_environment(env: GrowthEnv) -> None:
    model = MaskablePPO("MultiInputPolicy", env, n_steps=64, batch_size=32, seed=0, device="cpu")
    before = [parameter.clone() for parameter in model.policy.parameters()]
    model.learn(192)
    assert model.num_timesteps == 192
    assert any(not torch.equal(a, b) for a, b in zip(before, model.policy.parameters(), strict=True))


def test_actions_of_a_controller_are_flat_actions(env: GrowthEnv) -> None:
    controller = RandomController(env.environment.space)
    action, _ = controller.act(env.environment.reset([1]), controller.begin([1]))
    assert (flat_actions(env.environment.space) == action).all(1).any()


@pytest.fixture(scope="module")
def diagnosis() -> GrowthEnv:
    return make_tasks("diagnosis")


def make_tasks(name: str, *overrides: str, **arguments: Any) -> GrowthEnv:
    small = SMALL_TASKS if name == "diagnosis" else SMALL_ZOO
    env = gymnasium.make(NAME, tasks=name, overrides=[*small, *overrides], **arguments).unwrapped
    assert isinstance(env, GrowthEnv)
    return env


@pytest.mark.filterwarnings("ignore")  # the checker also warns about style
def test_an_environment_of_many_tasks_passes_the_checker(diagnosis: GrowthEnv) -> None:
    check_env(diagnosis, skip_render_check=True)


def test_a_seed_determines_the_task_and_families_take_turns_in_successive_resets(diagnosis: GrowthEnv) -> None:
    def tasks(seed: int) -> list[str]:
        return [diagnosis.reset(seed=seed)[1]["task"], *(diagnosis.reset()[1]["task"] for _ in range(7))]

    first = tasks(0)
    assert tasks(0) == first
    assert any(tasks(seed) != first for seed in (1, 2, 3))
    for block in (first[:4], first[4:]):
        families = Counter(task.partition("_")[2] for task in block)
        assert families == {"no_space": 1, "no_activation": 1, "saturated": 1, "complete": 1}


def test_the_seed_of_the_constructor_is_that_of_the_first_reset(diagnosis: GrowthEnv) -> None:
    other = make_tasks("diagnosis", seed=5)
    infos = [other.reset()[1], diagnosis.reset(seed=5)[1], diagnosis.reset()[1]]
    assert infos[0]["rng_seed"] == infos[1]["rng_seed"] != infos[2]["rng_seed"]


def test_info_has_the_task_its_family_the_flops_and_the_legal_actions(diagnosis: GrowthEnv) -> None:
    _, first = diagnosis.reset(seed=1)
    plant = diagnosis.action_names.index("GERMINATE all depthwise")
    _, _, _, _, second = diagnosis.step(np.int64(plant))
    assert first["task"].endswith(first["family"])
    assert 0 < first["flops"] < second["flops"]
    assert first["action_mask"][plant] == 1 > second["action_mask"][plant]
    assert np.array_equal(second["action_mask"], diagnosis.action_masks())
    assert diagnosis.action_space.contains(diagnosis.action_space.sample(second["action_mask"]))


def test_sizes_and_action_numbers_are_the_same_in_every_split() -> None:
    train, heldout = make_tasks("cifar_zoo"), make_tasks("cifar_zoo", split="heldout")
    assert train.observation_space == heldout.observation_space
    assert train.action_names == heldout.action_names
    assert "block5" not in train.environment.space.slots
    slots = train.interface.space.slots
    for env, has_fifth in ((train, False), (heldout, True)):
        names = set()
        for seed in range(3):
            observation, info = env.reset(seed=seed)
            exists = [name for name, exists in zip(slots, observation["exists"], strict=True) if exists]
            missing = observation["exists"] == 0
            assert not observation["slots"][missing].any()
            assert not observation["candidates"][missing].any()
            assert observation["candidates"][~missing].any()
            named = {env.action_names[number].split()[1] for number in np.flatnonzero(info["action_mask"])[1:]}
            assert named - {"all"} == set(exists)
            names |= set(exists)
        assert ("block5" in names) == has_fifth


def test_several_environments_run_as_a_vector_environment() -> None:
    arguments: dict[str, Any] = {"tasks": "diagnosis", "overrides": list(SMALL_TASKS)}
    envs = gymnasium.make_vec(NAME, num_envs=2, vectorization_mode="sync", **arguments)
    observation, info = envs.reset(seed=0)
    assert observation["slots"].shape[0] == 2
    assert info["action_mask"].shape == (2, envs.single_action_space.n)
    envs.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": "nothing"}, r"nothing: is not a task distribution; there are cifar_zoo, diagnosis"),
        ({"tasks": "diagnosis", "split": "all"}, r"tasks.split=all: must be one of"),
        ({"tasks": "diagnosis", "split": "heldout"}, r"tasks.split=heldout: diagnosis has no tasks of this split\."),
        ({"split": "test"}, r"split=test: must be None without tasks"),
    ],
)
def test_a_task_or_a_split_that_does_not_exist_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GrowthEnv(**arguments)


class MaskedEnv(gymnasium.Env[np.ndarray, np.int64]):
    """Three actions of which one is illegal; the episode terminates if the action equals the number of the step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3, start=5)

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.illegal, self.steps = int(self.np_random.integers(3)), 0
        return np.zeros(2, np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert action - 5 != self.illegal
        self.steps += 1
        return np.full(2, self.steps / 10, np.float32), 1.0, bool(action - 5 == self.steps), False, {}

    def action_masks(self) -> np.ndarray:
        return np.arange(3) != self.illegal


gymnasium.register("tests/Masked-v0", entry_point=MaskedEnv, disable_env_checker=True)


def test_the_collector_runs_any_gymnasium_environment() -> None:
    env = GymnasiumVectorEnv("CartPole-v1", envs=3, steps=None, features=[0, 2])
    assert (env.steps, len(env.layout.base), env.layout.ops) == (500, 2, ("0", "1"))
    rollout = run_round(make_module(env), env)
    lengths = rollout.valid.sum(1)
    assert lengths.min() < lengths.max() < 500
    assert torch.equal(env.outcome()["score"], lengths.float()), "CartPole has a reward of 1 for each step"
    assert torch.equal(rollout.terminated.sum(1), torch.ones(3))
    repeated = run_round(make_module(env), env)
    assert torch.equal(repeated.raw_base, rollout.raw_base), "equal episode seeds give equal episodes"


def test_only_the_chosen_features_are_in_the_observation() -> None:
    every, one = (GymnasiumVectorEnv("CartPole-v1", envs=1, steps=None, features=chosen) for chosen in (None, [2]))
    assert torch.equal(every.reset([3]).base[:, 2:3], one.reset([3]).base)


def test_the_collector_flattens_dictionaries() -> None:
    overrides = {"overrides": OVERRIDES}
    gymnasium.register("tests/Growth-v0", entry_point=GrowthEnv, kwargs=overrides, disable_env_checker=True)
    env = GymnasiumVectorEnv("tests/Growth-v0", envs=1, steps=8, features=None)
    assert env.reset([1]).base.shape == (1, len(env.layout.base))


def test_masks_of_the_environment_are_used_and_the_step_limit_truncates() -> None:
    env = GymnasiumVectorEnv("tests/Masked-v0", envs=4, steps=2, features=None)
    inputs = env.reset(range(4))
    assert inputs.masks.op.sum(-1).tolist() == [2, 2, 2, 2]
    rollout = run_round(make_module(env), env)
    ended = rollout.terminated | rollout.truncated
    assert torch.equal(ended.sum(1), torch.ones(4))
    assert torch.equal(rollout.truncated[:, 1], ~rollout.terminated.any(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Nothing-v0"}, r"environment.name=Nothing-v0: "),
        ({"envs": 0}, r"environment.envs=0: must be at least 1"),
        ({"steps": 0}, r"environment.steps=0: must be at least 1"),
        ({"features": [9]}, r"environment.features=\[9\]: must be indices from 0 to 3\."),
        ({"name": "Pendulum-v1"}, r"environment.name=Pendulum-v1: must have discrete actions"),
        ({"name": "tests/Masked-v0"}, r"environment.steps=null: must be a number, since tests/Masked-v0 has no limit"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"name": "CartPole-v1", "envs": 1, "steps": None, "features": None, **changes}
    with pytest.raises(ValueError, match=message):
        GymnasiumVectorEnv(**arguments)
