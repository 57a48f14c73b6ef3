import pytest
import torch
from rich.console import Console

from esper.config import build_vector_env, compose_config
from esper.environment import Oracle
from esper.lifecycle import Stage
from esper.training import train


def make_oracle(*overrides: str) -> Oracle:
    return build_vector_env(compose_config("run", ["+experiment=oracle", "environment.noise=0", *overrides]))


def score_of(oracle: Oracle, actions: dict[int, list[int]]) -> float:
    """The score of an episode with these actions (op, slot, blueprint, blend) by step, and WAIT otherwise."""
    oracle.reset([1])
    for step in range(oracle.steps):
        oracle.step(torch.tensor([actions.get(step, [0, 0, 0, 0])]))
    return float(oracle.outcome()["score"][0])


def test_the_score_follows_the_formula() -> None:
    """conv_light in block2 germinates in the first step and is fossilised: 6 points x (1 - e^-4), minus ln(1 + 1.5)."""
    oracle = make_oracle()
    host_score = 10 + 20 * (1 - torch.tensor(-20 / 5).exp())
    assert score_of(oracle, {}) == pytest.approx(float(host_score))
    germinate, fossilize = oracle.layout.ops.index("GERMINATE"), oracle.layout.ops.index("FOSSILIZE")
    grown = score_of(oracle, {0: [germinate, 1, 1, 0], 15: [fossilize, 1, 0, 0]})
    assert int((oracle.view.slots.stage == Stage.FOSSILIZED).sum()) == 1
    expected = host_score + 6 * (1 - torch.tensor(-20 / 5).exp()) - torch.tensor(2.5).log()
    assert grown == pytest.approx(float(expected), abs=1e-3)
    assert score_of(oracle, {0: [germinate, 1, 1, 0]}) == pytest.approx(float(host_score))  # not committed


def test_later_seeds_gain_less_and_useless_seeds_lower_the_score() -> None:
    oracle = make_oracle()
    germinate, fossilize = oracle.layout.ops.index("GERMINATE"), oracle.layout.ops.index("FOSSILIZE")
    scores = [score_of(oracle, {at: [germinate, 2, 2, 0], 19: [fossilize, 2, 0, 0]}) for at in (0, 5, 8)]
    assert scores[0] > scores[1] > scores[2] > score_of(oracle, {})
    assert score_of(oracle, {0: [germinate, 0, 0, 0], 19: [fossilize, 0, 0, 0]}) < score_of(oracle, {})


def test_random_episodes_stay_below_the_optimum_and_the_return_is_the_change_of_score() -> None:
    oracle = make_oracle("environment.envs=64")
    best = oracle.optimum()
    generator = torch.Generator().manual_seed(0)
    observation = oracle.reset(range(64))
    start, total = oracle.view.now.score, torch.zeros(64)
    for _ in range(oracle.steps):
        masks = observation.masks
        op = torch.multinomial(masks.op.float(), 1, generator=generator)[:, 0]
        slot = torch.multinomial(masks.under("slot", op).float() + 1e-9, 1, generator=generator)[:, 0]
        rest = torch.randint(0, 3, (64, 2), generator=generator)
        step = oracle.step(torch.cat([torch.stack([op, slot], 1), rest], 1))
        observation, total = step.observation, total + step.reward
    score = oracle.outcome()["score"]
    assert (score <= best + 1e-3).all()
    assert score.max() < best
    assert torch.allclose(total, score - start, atol=0.05)  # gamma is 1, and shaping vanishes


def test_an_automatic_commit_keeps_blended_seeds_in_the_last_step_and_records_it() -> None:
    oracle = make_oracle("lifecycle=quick")
    germinate = oracle.layout.ops.index("GERMINATE")
    kept = score_of(oracle, {0: [germinate, 1, 1, 0]})
    host_score = 10 + 20 * (1 - torch.tensor(-20 / 5).exp())
    assert kept == pytest.approx(
        float(host_score + 6 * (1 - torch.tensor(-4.0).exp()) - torch.tensor(2.5).log()), abs=1e-3
    )
    assert score_of(oracle, {19: [germinate, 1, 1, 0]}) == pytest.approx(float(host_score))  # health not measured yet
    oracle.reset([1])
    for step in range(oracle.steps):
        result = oracle.step(torch.tensor([[germinate, 1, 1, 0] if step == 3 else [0, 0, 0, 0]]))
        committed = result.record.entered[0, 1, Stage.FOSSILIZED].item()
        assert committed is (step + 1 == oracle.steps)


def test_seeds_in_all_slots_at_once_all_count() -> None:
    oracle = make_oracle("lifecycle=quick", "actions=lean")
    host_score, trained = 10 + 20 * (1 - torch.tensor(-20 / 5).exp()), 1 - torch.tensor(-4.0).exp()
    grown = {0: [oracle.layout.ops.index("GERMINATE"), 3, 2]}
    oracle.reset([1])
    for step in range(oracle.steps):
        oracle.step(torch.tensor([grown.get(step, [0, 0, 0])]))
    expected = host_score + (3.0 + 6.5 + 9.0) * trained - torch.tensor(1 + 3 * 4.0).log()
    assert float(oracle.outcome()["score"][0]) == pytest.approx(float(expected), abs=1e-3)
    with pytest.raises(ValueError, match=r"^actions\.all_slots=true: must be false"):
        oracle.optimum()


@pytest.mark.parametrize("overrides", [["lifecycle=quick"], ["lifecycle.commit=auto"]])
def test_the_optimum_with_automatic_commits_is_reached_by_a_script_and_by_no_random_episode(
    overrides: list[str],
) -> None:
    oracle = make_oracle("environment.envs=64", *overrides)
    germinate, best = oracle.layout.ops.index("GERMINATE"), oracle.optimum()
    script = {slot: [germinate, 2 - slot, 2, 0] for slot in range(3)}  # conv_heavy everywhere, largest gain first
    assert score_of(oracle, script) == pytest.approx(best, abs=1e-3)
    generator, observation = torch.Generator().manual_seed(0), oracle.reset(range(64))
    for _ in range(oracle.steps):
        op = torch.multinomial(observation.masks.op.float(), 1, generator=generator)[:, 0]
        slot = torch.multinomial(observation.masks.under("slot", op).float() + 1e-9, 1, generator=generator)[:, 0]
        rest = torch.randint(0, 3, (64, 2), generator=generator)
        observation = oracle.step(torch.cat([torch.stack([op, slot], 1), rest], 1)).observation
    assert oracle.outcome()["score"].max() < best


@pytest.mark.parametrize("lifecycle", ["default", "quick"])
def test_the_optimum_is_the_same_if_seeds_advance_on_request(lifecycle: str) -> None:
    rules = f"lifecycle={lifecycle}"
    assert make_oracle("actions=full", rules).optimum() == pytest.approx(make_oracle(rules).optimum(), abs=1e-3)


def test_ppo_reaches_95_percent_of_the_possible_gain(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = compose_config("run", ["+experiment=oracle", "rounds=25", "logger=none", "callbacks.dashboard=null"])
    figures = train(config, tmp_path, Console(quiet=True))
    oracle = build_vector_env(config)
    none, best = 10 + 20 * (1 - float(torch.tensor(-4.0).exp())), oracle.optimum()
    assert (figures["validation/greedy_score"] - none) / (best - none) > 0.95


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "environment.gains.norm=[1]",
            r"environment\.gains\.norm=\[1\]: must have an entry for each of block1, block2",
        ),
        ("slots.blueprints=[norm,depthwise]", r"environment\.gains: must have an entry for depthwise\."),
    ],
)
def test_an_oracle_without_gains_for_all_blueprints_and_slots_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_oracle(override)
