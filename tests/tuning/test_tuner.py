"""The search: budget, pairing, fresh episodes, and that it continues bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from esper.config import build_vector_env, compose_config
from esper.controllers import RULE_RANGES, TunedRule
from esper.environment import TaskOracle
from esper.environment.oracle_tasks import SPLITS
from esper.records import read_lines
from esper.tuning import EpisodeLedger, GenerationResult, RuleTuner, TuneResult

DEFAULTS = {name: float(value) for name, value in compose_config("tune").controller.items() if name in RULE_RANGES}
BAD = {**DEFAULTS, "min_worth": 0.25, "candidates": 1.0, "start": 0.4}  # hardly ever plants anything
SMALL = {"episodes": 100, "gflops": None, "population": 4, "generation_seeds": 4, "sigma": 0.2, "fresh": 4}


@cache
def oracle() -> TaskOracle:
    return build_vector_env(
        compose_config("tune", ["+experiment=oracle_tasks", "environment.repeats=1", "environment.envs=128"])
    )


def make_tuner(
    path: Path,
    initial: dict[str, float] = DEFAULTS,
    none: Callable[[int], float | None] = lambda _: None,
    **changes: Any,
) -> RuleTuner:
    env = oracle()
    ledger = EpisodeLedger(env, lambda numbers: TunedRule(env.space, **numbers), path, lambda count: None)
    return RuleTuner(ledger, RULE_RANGES, initial, rng_seed=0, none=none, **{**SMALL, **changes})


def run(tuner: RuleTuner) -> tuple[TuneResult, list[GenerationResult]]:
    generations: list[GenerationResult] = []
    return tuner.run(generations.append), generations


def test_tuning_improves_bad_numbers_by_two_standard_errors(tmp_path: Path) -> None:
    sizes = {"episodes": 400, "population": 6, "generation_seeds": 6, "sigma": 0.3, "fresh": 40}
    result, generations = run(make_tuner(tmp_path / "a.jsonl", BAD, **sizes))
    assert result.difference > 1
    assert result.difference > 2 * result.standard_error
    assert result.score > generations[0].score
    assert result.score - result.initial_score == pytest.approx(result.difference)


def test_a_search_that_was_interrupted_continues_bit_for_bit(tmp_path: Path) -> None:
    whole, generations = run(make_tuner(tmp_path / "whole.jsonl"))

    def interrupt(generation: GenerationResult) -> None:
        if generation.number == 1:
            raise KeyboardInterrupt

    part = tmp_path / "part.jsonl"
    with pytest.raises(KeyboardInterrupt):
        make_tuner(part).run(interrupt)
    lines = part.read_text().splitlines(keepends=True)
    part.write_text("".join(lines[:-3]) + lines[-1][:20])  # killed in the middle of a round
    again, repeated = run(make_tuner(part))
    assert (again, repeated) == (whole, generations)
    assert sorted(part.read_text().splitlines()) == sorted((tmp_path / "whole.jsonl").read_text().splitlines())


def test_a_finished_search_runs_no_episode_again_and_may_get_a_larger_budget(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    first, _ = run(make_tuner(path))
    lines = path.read_text()
    assert run(make_tuner(path))[0] == first
    assert path.read_text() == lines
    more, _ = run(make_tuner(path, episodes=150))
    assert more.generations > first.generations
    assert path.read_text().startswith(lines)


def test_candidates_of_a_generation_share_episode_seeds_of_different_training_tasks(tmp_path: Path) -> None:
    run(make_tuner(tmp_path / "a.jsonl"))
    lines = list(read_lines(tmp_path / "a.jsonl"))
    first = [line["episode_seed"] for line in lines[:16]]
    assert first == first[:4] * 4
    tasks = [oracle().task_number(seed) for seed in first[:4]]
    assert len(set(tasks)) == 4
    assert {oracle().task_number(line["episode_seed"]) for line in lines} <= set(SPLITS["train"])
    generations = {line["episode_seed"] for line in lines[:32]}
    assert not generations & {line["episode_seed"] for line in lines[-8:]}  # fresh ones


def test_it_spends_at_most_its_episodes(tmp_path: Path) -> None:
    result, generations = run(make_tuner(tmp_path / "a.jsonl"))
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == result.episodes <= 100
    assert len(generations) == result.generations == 5  # 5 x 16 episodes, and 5 x 4 of finalists
    needed = r"^tune\.episodes=30: must be at least 36: 4 candidates x 4 episodes of one generation, and 5 x 4 of final"
    with pytest.raises(ValueError, match=needed):
        make_tuner(tmp_path / "b.jsonl", episodes=30)
    with pytest.raises(ValueError, match=r"^tune\.episodes=null: must be a number if tune\.gflops is null\.$"):
        make_tuner(tmp_path / "b.jsonl", episodes=None)
    with pytest.raises(ValueError, match=r"^tune\.gflops=9\.0: needs tune\.episodes here"):
        run(make_tuner(tmp_path / "b.jsonl", episodes=None, gflops=9.0))


def test_it_spends_at_most_its_gflops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each episode costs a GFLOP here; an oracle costs none."""
    measure = TaskOracle._measurements

    def measure_with_cost(self: TaskOracle, *args: Any, **values: Any) -> Any:
        now = measure(self, *args, **values)
        return replace(now, flops=now.flops + 1e9)

    monkeypatch.setattr(TaskOracle, "_measurements", measure_with_cost)
    result, _ = run(make_tuner(tmp_path / "a.jsonl", episodes=None, gflops=70.0))
    assert result.gflops == result.episodes
    assert 36 < result.gflops <= 70


def test_gains_are_over_no_growth_where_it_is_known(tmp_path: Path) -> None:
    _, known = run(make_tuner(tmp_path / "a.jsonl", none=lambda seed: 40.0))
    _, unknown = run(make_tuner(tmp_path / "a.jsonl"))
    assert [generation.gain for generation in known] == pytest.approx([each.score - 40 for each in known])
    assert [generation.gain for generation in unknown] == pytest.approx([0.0] * len(unknown), abs=1e-9)
    assert [generation.score for generation in known] == [generation.score for generation in unknown]  # same ranks
