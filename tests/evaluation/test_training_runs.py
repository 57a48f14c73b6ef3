from dataclasses import replace

from esper.evaluation.training_runs import TrainingRun, curves, run_names, table


def run(rounds: int = 8, **figures: float) -> TrainingRun:
    lines = [{"round": number, "episode/score": float(number), **figures} for number in range(1, rounds + 1)]
    return TrainingRun("a run", "a task", lines)


def row(training: TrainingRun) -> dict[str, str]:
    found = table([training])
    return dict(zip(found.header, found.rows[0], strict=True))


def test_a_run_is_told_by_its_first_and_last_quarter_its_critic_and_its_steps() -> None:
    figures = {"losses/explained_variance": 0.7, "policy/entropy_op": 0.4, "policy/entropy_slot": 0.1}
    found = row(run(**figures, **{"seeds/fossilized": 3.0, "seeds/rollbacks": 0.0, "policy/entropy_bonus": 0.0}))
    assert (found["begins"], found["ends"]) == ("1.50", "7.50")
    assert (found["critic"], found["entropy"], found["fossils"]) == ("0.70", "0.10", "3.00")
    assert (found["KL"], found["greedy"]) == ("-", "-")


def test_steps_that_went_too_far_or_nowhere_are_not_healthy() -> None:
    lines = [{"round": number, "policy/kl": kl} for number, kl in enumerate((0.001, 0.003, 0.03, 0.04, None), 1)]
    assert row(TrainingRun("", "", lines))["KL"] == "0.50"


def test_without_scores_a_run_is_told_by_its_returns() -> None:
    lines = [{"round": 1, "episode/score": None, "episode/return": 200.0, "validation/greedy_return": 500.0}]
    found = row(TrainingRun("", "", lines))
    assert (found["ends"], found["greedy"]) == ("200.00", "500.00")


def test_runs_are_called_by_what_sets_them_apart() -> None:
    first = ("a", ["+experiment=x", "seed=0", "ppo.lr=1"])
    assert run_names([first, ("b", ["+experiment=x", "seed=1", "ppo.lr=1"])]) == ["seed=0", "seed=1"]
    assert run_names([("/x/a", first[1]), ("/x/b", first[1])]) == ["a", "b"]
    assert run_names([first]) == ["a"]
    assert run_names([]) == []


def test_curves_draw_every_run_and_the_mean_of_rounds_that_all_have() -> None:
    def means(*runs: TrainingRun) -> dict[str, list[int]]:
        lines = [line for line in curves(runs).axes[0].get_lines() if line.get_linewidth() > 2]
        return {str(line.get_label()): list(line.get_xdata()) for line in lines}

    seeds = [replace(run(4), name="seed=0"), replace(run(6), name="seed=1")]
    assert means(*seeds) == {"mean": [1, 2, 3, 4]}
    rewards = ("basic", "sparse")
    apart = [replace(some, name=f"{some.name}, reward={r}", settings=r) for r in rewards for some in seeds]
    assert set(means(*apart)) == {"mean, reward=basic", "mean, reward=sparse"}
    assert not means(run(4))
