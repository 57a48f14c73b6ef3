import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.ppo import gae
from esper.ppo.gae import skip_steps
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


@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_skipped_steps_are_part_of_the_step_before(rng_seed: int, gamma: float, lam: float) -> None:
    """The advantages of the other steps are those of episodes whose steps have different lengths."""
    rewards, values, next_values, terminated, truncated = random_episodes(rng_seed, envs=1)
    next_values[:, :-1] = values[:, 1:]
    terminated[:, -1], truncated[:, :] = True, False
    terminated[:, :-1] = False
    skipped = torch.rand(rewards.shape, generator=draws(rng_seed)) < 0.4
    ends = (terminated, truncated)
    exact, exact_next = skip_steps(rewards, values, next_values, *ends, skipped, gamma=gamma)
    found = gae(rewards, exact, exact_next, *ends, gamma=gamma, lam=torch.where(skipped, 1.0, lam))
    kept, expected = (~skipped[0]).nonzero().flatten().tolist(), 0.0
    for position, step in reversed(list(enumerate(kept))):
        end = kept[position + 1] if position + 1 < len(kept) else rewards.shape[1]
        total = sum(gamma ** (later - step) * rewards[0, later].item() for later in range(step, end))
        factor = gamma ** (end - step) if end < rewards.shape[1] else 0.0
        value_after = values[0, end].item() if end < rewards.shape[1] else 0.0
        expected = total + factor * value_after - values[0, step].item() + factor * lam * expected
        assert abs(found[0, step].item() - expected) < 1e-4


def test_the_value_of_a_skipped_step_has_no_effect_on_other_steps() -> None:
    rewards, values, next_values, terminated, truncated = random_episodes(3)
    next_values[:, :-1] = values[:, 1:]
    skipped = torch.zeros_like(terminated)
    skipped[:, 2:4] = True

    def advantages() -> torch.Tensor:
        ends = (terminated, truncated)
        exact, exact_next = skip_steps(rewards, values, next_values, *ends, skipped, gamma=0.9)
        return gae(rewards, exact, exact_next, *ends, gamma=0.9, lam=torch.where(skipped, 1.0, 0.8))

    before = advantages()
    values[:, 2:4] += 5
    next_values[:, 1:3] = torch.where(terminated[:, 1:3] | truncated[:, 1:3], next_values[:, 1:3], values[:, 2:4])
    torch.testing.assert_close(advantages(), before)
