from dataclasses import replace

from esper.evaluation.document import ReportTable
from esper.evaluation.run_groups import run_group_tables
from esper.evaluation.training_runs import TrainingRun


def make_run(settings: str, run_seed: int, score: float, has_held_out: bool = True) -> TrainingRun:
    held_out = {"validation/greedy_score": score, "validation/sampled_score": score - 1} if has_held_out else {}
    lines = [{"round": number, "episode/score": score, **held_out} for number in (1, 2)]
    return TrainingRun(f"seed={run_seed}, {settings}", "a task", lines, settings, str(run_seed))


def rows_of(*runs: TrainingRun) -> list[dict[str, str]]:
    blocks = run_group_tables(runs)
    if not blocks:
        return []
    (table,) = (block for block in blocks if isinstance(block, ReportTable))
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


def test_settings_are_averaged_over_their_runs_and_compared_with_the_first() -> None:
    default = [make_run("ppo.epochs=10", run_seed, 40.0 + run_seed) for run_seed in range(3)]
    other = [make_run("ppo.epochs=1", run_seed, 38.0 + run_seed) for run_seed in range(3)]
    first, second = rows_of(*default, *other)
    assert first["settings"] == "ppo.epochs=10"
    assert first["runs"] == "3"
    assert first["greedy"].startswith("41.00 [")
    assert first["worst sampled"] == "39.00"
    assert first["sampled - first"] == ""
    assert second["sampled - first"] == "-2.00 [-2.00, -2.00]"  # the difference is the same for each run seed


def test_runs_are_compared_on_the_run_seeds_that_both_have() -> None:
    default = [make_run("a=1", run_seed, 40.0 + 9 * run_seed) for run_seed in (0, 2, 3, 4)]
    _, second = rows_of(*default, *(make_run("a=2", run_seed, 41.0 + 9 * run_seed) for run_seed in (3, 2, 1, 0)))
    assert second["sampled - first"] == "+1.00 [+1.00, +1.00]"
    _, second = rows_of(*default, make_run("a=2", 2, 50.0))
    assert (second["sampled"], second["sampled - first"]) == ("49.00", "-8.00")  # one run has no interval
    _, second = rows_of(*default, make_run("a=2", 7, 50.0))
    assert second["sampled - first"] == "-"


def test_a_run_that_collapsed_counts() -> None:
    default = [make_run("a=1", run_seed, 40.0) for run_seed in range(5)]
    other = [make_run("a=2", run_seed, 20.0 if run_seed == 4 else 40.0) for run_seed in range(5)]
    _, second = rows_of(*default, *other)
    assert second["sampled - first"].startswith("-4.00 [")


def test_each_task_has_its_own_table() -> None:
    runs = [make_run(settings, run_seed, 40.0) for settings in ("a=1", "a=2") for run_seed in (0, 1)]
    others = [replace(run, task="another task") for run in runs]
    tables = [block for block in run_group_tables([*runs, *others]) if isinstance(block, ReportTable)]
    assert [len(table.rows) for table in tables] == [2, 2]


def test_a_missing_measurement_is_a_dash() -> None:
    first, second = rows_of(
        *(
            make_run(settings, run_seed, 40.0, has_held_out=settings == "a=1")
            for settings in ("a=1", "a=2")
            for run_seed in (0, 1)
        )
    )
    assert first["sampled"] == "39.00 [39.00, 39.00]"
    assert (second["sampled"], second["sampled - first"]) == ("-", "-")


def test_there_is_no_table_without_repetitions_or_without_several_settings() -> None:
    assert not rows_of(make_run("a=1", 0, 40.0), make_run("a=2", 0, 41.0))
    assert not rows_of(make_run("a=1", 0, 40.0), make_run("a=1", 1, 41.0))
