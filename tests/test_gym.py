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
from tests.ppo.fixtures_environments import learner, played

OVERRIDES = [*SMALL, "environment.batches=1", "environment.steps=8"]


@pytest.fixture
def env() -> GrowthEnv:
    made = gymnasium.make(NAME, overrides=OVERRIDES).unwrapped
    assert isinstance(made, GrowthEnv)
    return made


@pytest.mark.filterwarnings("ignore")  # the checkers advise about more than they require
def test_both_checkers_are_satisfied(env: GrowthEnv) -> None:
    check_env(env, skip_render_check=True)
    sb3_check_env(env)


def test_a_seed_repeats_an_episode(env: GrowthEnv) -> None:
    runs = []
    for seed in (3, 3, 4):
        first, _ = env.reset(seed=seed)
        steps = [env.step(np.int64(0))[:2] for _ in range(3)]
        runs.append([first, *[np.append(seen, reward) for seen, reward in steps]])
    assert all(np.array_equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(runs[0], runs[2], strict=True))


def test_every_masked_action_can_be_taken_until_the_end(env: GrowthEnv) -> None:
    env.reset(seed=1)
    draws = np.random.default_rng(0)
    for step in range(8):
        choices = np.flatnonzero(env.action_masks())
        _, reward, terminated, truncated, info = env.step(draws.choice(choices))
        assert np.isfinite(reward)
        assert (terminated, truncated) == (step == 7, False)
        assert info["legal"]
    assert set(info) == {"score", "loss", "parameters", "legal"}


def test_an_illegal_action_counts_as_waiting(env: GrowthEnv) -> None:
    env.reset(seed=1)
    illegal = int(np.flatnonzero(~env.action_masks())[0])
    seen, reward, _, _, info = env.step(np.int64(illegal))
    env.reset(seed=1)
    waited, same, _, _, _ = env.step(np.int64(0))
    assert not info["legal"]
    assert np.array_equal(seen, waited)
    assert reward == same


@pytest.mark.parametrize("actions", ["core", "full"])
def test_the_flat_mask_allows_exactly_the_legal_actions(actions: str) -> None:
    chosen, rule = space(actions), rules(dwell=1, prune_age=0)
    flat = flat_actions(chosen)
    assert len(flat.unique(dim=0)) == len(flat)
    if actions == "core":
        assert len(flat) == 1 + 3 * 3 * 3 + 3 + 3
    for turn in list(play(chosen, rule, envs=1, steps=20, seed=1))[1::2]:
        masks = legal(turn.after, chosen, rule)
        mask = flat_mask(flat, masks, chosen)
        for action, allowed in zip(flat, mask, strict=True):
            op = int(action[0])
            used = chosen.uses()[op, 1]
            assert allowed == (masks.op[0, op] and (not used or masks.slot[0, op, action[1]]))


def test_maskable_ppo_trains_on_it(env: GrowthEnv) -> None:
    model = MaskablePPO("MlpPolicy", env, n_steps=64, batch_size=32, seed=0, device="cpu")
    before = [parameter.clone() for parameter in model.policy.parameters()]
    model.learn(192)
    assert model.num_timesteps == 192
    assert any(not torch.equal(a, b) for a, b in zip(before, model.policy.parameters(), strict=True))


def test_chance_and_the_flat_actions_count_alike(env: GrowthEnv) -> None:
    seen = env.environment.reset([1])
    env._flat(seen)
    action, _ = RandomController(env.environment.space).act(seen, RandomController(env.environment.space).begin([1]))
    assert (flat_actions(env.environment.space) == action).all(1).any()


class Doors(gymnasium.Env[np.ndarray, np.int64]):
    """Three doors, of which one is locked; episodes end behind the door of the step's number."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3, start=5)

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.locked, self.at = int(self.np_random.integers(3)), 0
        return np.zeros(2, np.float32), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert action - 5 != self.locked
        self.at += 1
        return np.full(2, self.at / 10, np.float32), 1.0, bool(action - 5 == self.at), False, {}

    def action_masks(self) -> np.ndarray:
        return np.arange(3) != self.locked


gymnasium.register("tests/Doors-v0", entry_point=Doors, disable_env_checker=True)


def test_any_gymnasium_environment_can_be_played_by_our_collector() -> None:
    world = GymnasiumVectorEnv("CartPole-v1", envs=3, steps=None, features=[0, 2])
    assert (world.steps, world.layout.base, world.layout.ops) == (500, 2, ("0", "1"))
    rollout = played(learner(world), world)
    lengths = rollout.valid.sum(1)
    assert lengths.min() < lengths.max() < 500
    assert torch.equal(world.outcome()["score"], lengths.float()), "a step of balance pays 1"
    assert torch.equal(rollout.terminated.sum(1), torch.ones(3))
    again = played(learner(world), world)
    assert torch.equal(again.raw_base, rollout.raw_base), "the same seeds, the same episodes"


def test_features_left_out_are_not_seen() -> None:
    whole, part = (GymnasiumVectorEnv("CartPole-v1", envs=1, steps=None, keep=keep) for keep in (None, [2]))
    assert torch.equal(whole.reset([3]).base[:, 2:3], part.reset([3]).base)


def test_masks_of_an_environment_are_kept_and_a_limit_truncates() -> None:
    world = GymnasiumVectorEnv("tests/Doors-v0", envs=4, steps=2, features=None)
    inputs = world.reset(range(4))
    assert inputs.masks.op.sum(-1).tolist() == [2, 2, 2, 2]
    rollout = played(learner(world), world)
    ended = rollout.terminated | rollout.truncated
    assert torch.equal(ended.sum(1), torch.ones(4))
    assert torch.equal(rollout.truncated[:, 1], ~rollout.terminated.any(1))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"name": "Nothing-v0"}, r"environment.name=Nothing-v0: "),
        ({"envs": 0}, r"environment.envs=0: must be at least 1"),
        ({"steps": 0}, r"environment.steps=0: must be at least 1"),
        ({"keep": [9]}, r"environment.features=\[9\]: must be among the 4 features"),
        ({"name": "Pendulum-v1"}, r"environment.name=Pendulum-v1: must have discrete actions"),
        ({"name": "tests/Doors-v0"}, r"environment.steps=null: tests/Doors-v0 has no limit of its own"),
    ],
)
def test_what_cannot_be_played_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        GymnasiumVectorEnv(**{"name": "CartPole-v1", "envs": 1, "steps": None, "keep": None, **given})  # type: ignore[arg-type]
