from dataclasses import replace

from esper.evaluation.training_runs import TrainingRun, plot_learning_curves, run_names, training_table


def make_run(rounds: int = 8, **metrics: float) -> TrainingRun:
    lines = [{"round": number, "episode/score": float(number), **metrics} for number in range(1, rounds + 1)]
    return TrainingRun("a run", "a task", lines)


def row_of(run: TrainingRun) -> dict[str, str]:
    table = training_table([run])
    return dict(zip(table.header, table.rows[0], strict=True))


def test_a_row_has_first_and_last_quarter_critic_entropy_and_fossils() -> None:
    metrics = {"losses/explained_variance": 0.7, "policy/entropy_op": 0.4, "policy/entropy_slot": 0.1}
    row = row_of(make_run(**metrics, **{"seeds/fossilized": 3.0, "seeds/rollbacks": 0.0, "policy/entropy_bonus": 0.0}))
    assert (row["begins"], row["ends"]) == ("1.50", "7.50")
    assert (row["critic"], row["entropy"], row["fossils"]) == ("0.70", "0.10", "3.00")
    assert (row["KL"], row["greedy"]) == ("-", "-")


def test_updates_with_a_kl_outside_the_range_are_not_healthy() -> None:
    lines = [{"round": number, "policy/kl": kl} for number, kl in enumerate((0.001, 0.003, 0.03, 0.04, None), 1)]
    assert row_of(TrainingRun("", "", lines))["KL"] == "0.50"


def test_a_run_without_scores_shows_its_returns() -> None:
    lines = [{"round": 1, "episode/score": None, "episode/return": 200.0, "validation/greedy_return": 500.0}]
    row = row_of(TrainingRun("", "", lines))
    assert (row["ends"], row["greedy"]) == ("200.00", "500.00")


def test_runs_are_named_by_the_overrides_that_differ() -> None:
    first = ("a", ["+experiment=x", "seed=0", "ppo.lr=1"])
    assert run_names([first, ("b", ["+experiment=x", "seed=1", "ppo.lr=1"])]) == ["seed=0", "seed=1"]
    assert run_names([("/x/a", first[1]), ("/x/b", first[1])]) == ["a", "b"]
    assert run_names([first]) == ["a"]
    assert run_names([]) == []


def test_mean_curves_have_the_rounds_that_all_runs_have() -> None:
    def mean_curves(*runs: TrainingRun) -> dict[str, list[int]]:
        lines = [line for line in plot_learning_curves(runs).axes[0].get_lines() if line.get_linewidth() > 2]
        return {str(line.get_label()): list(line.get_xdata()) for line in lines}

    repetitions = [replace(make_run(4), name="seed=0"), replace(make_run(6), name="seed=1")]
    assert mean_curves(*repetitions) == {"mean": [1, 2, 3, 4]}
    groups = [
        replace(run, name=f"{run.name}, reward={reward}", settings=reward)
        for reward in ("basic", "sparse")
        for run in repetitions
    ]
    assert set(mean_curves(*groups)) == {"mean, reward=basic", "mean, reward=sparse"}
    assert not mean_curves(make_run(4))
