import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.ppo import gae
from tests.controllers.fixtures_policies import draws


def gae_by_definition(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    gamma: float,
    lam: float,
) -> torch.Tensor:
    """One environment and step at a time: the discounted sum of the deltas up to the episode's end."""
    advantages = torch.zeros_like(rewards)
    for env in range(len(rewards)):
        for start in range(rewards.shape[1]):
            factor = 1.0
            for step in range(start, rewards.shape[1]):
                alive = 0.0 if terminated[env, step] else 1.0
                delta = rewards[env, step] + gamma * next_values[env, step] * alive - values[env, step]
                advantages[env, start] += factor * delta
                factor *= gamma * lam
                if terminated[env, step] or truncated[env, step]:
                    break
    return advantages


def random_episodes(rng_seed: int, envs: int = 3, steps: int = 6) -> tuple[torch.Tensor, ...]:
    noise = draws(rng_seed)
    rewards, values, next_values = torch.randn(3, envs, steps, generator=noise)
    ends = torch.rand(2, envs, steps, generator=noise) < 0.2
    return rewards, values, next_values, ends[0], ends[1] & ~ends[0]


@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_discounted_sum_of_temporal_differences_up_to_each_end(
    rng_seed: int, gamma: float, lam: float
) -> None:
    parts = random_episodes(rng_seed)
    torch.testing.assert_close(
        gae(*parts, gamma=gamma, lam=lam), gae_by_definition(*parts, gamma, lam), atol=1e-4, rtol=1e-4
    )


def test_advantages_of_one_environment_do_not_depend_on_another() -> None:
    parts = random_episodes(1)
    changed = [part.clone() for part in parts]
    changed[0][1] += 10
    changed[1][1] -= 10
    before, after = (gae(*each, gamma=0.9, lam=0.9) for each in (parts, changed))
    assert torch.equal(before[[0, 2]], after[[0, 2]])


def test_a_truncated_end_bootstraps_and_a_terminated_one_does_not() -> None:
    rewards, values, next_values = torch.zeros(2, 2), torch.zeros(2, 2), torch.full((2, 2), 7.0)
    ends = torch.tensor([[False, True], [False, False]])
    advantages = gae(rewards, values, next_values, ends, ends.flip(0), gamma=0.5, lam=1.0)
    assert advantages[0].tolist() == [3.5, 0.0]
    assert advantages[1].tolist() == [3.5 + 0.5 * 3.5, 3.5]


def test_advantages_do_not_pass_an_episode_end_in_the_middle_of_a_row() -> None:
    rewards = torch.tensor([[0.0, 0.0, 100.0]])
    values, next_values = torch.zeros(1, 3), torch.zeros(1, 3)
    middle, none = torch.tensor([[False, True, False]]), torch.zeros(1, 3, dtype=torch.bool)
    for terminated, truncated in ((middle, none), (none, middle)):
        assert gae(rewards, values, next_values, terminated, truncated, gamma=1.0, lam=1.0)[0, :2].tolist() == [0, 0]


def test_with_gamma_and_lambda_1_returns_are_sums_of_rewards() -> None:
    rewards, values, _, _, _ = random_episodes(2)
    next_values = torch.cat([values[:, 1:], torch.zeros(3, 1)], 1)
    ends = torch.zeros(3, 6, dtype=torch.bool)
    ends[:, -1] = True
    returns = gae(rewards, values, next_values, ends, torch.zeros_like(ends), gamma=1.0, lam=1.0) + values
    torch.testing.assert_close(returns, rewards.flip(1).cumsum(1).flip(1))


def test_gae_runs_on_the_meta_device() -> None:
    assert gae(*[part.to("meta") for part in random_episodes(3)], gamma=0.9, lam=0.9).shape == (3, 6)
