import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from sb3_contrib import MaskablePPO
from stable_baselines3.common.env_checker import check_env as sb3_check_env

from esper.controllers import Chance
from esper.gym import NAME, GrowthEnv, flat_actions, flat_mask
from esper.lifecycle import legal
from tests.environment_kit import SMALL
from tests.lifecycle.play import play, rules, space

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
    action, _ = Chance(env.environment.space).act(seen, Chance(env.environment.space).begin([1]))
    assert (flat_actions(env.environment.space) == action).all(1).any()
