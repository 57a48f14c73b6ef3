from dataclasses import replace

from esper.evaluation.document import ReportTable
from esper.evaluation.run_groups import repeated_runs
from esper.evaluation.training_runs import TrainingRun


def run(settings: str, seed: int, score: float, held_out: bool = True) -> TrainingRun:
    last = {"validation/greedy_score": score, "validation/sampled_score": score - 1} if held_out else {}
    lines = [{"round": number, "episode/score": score, **last} for number in (1, 2)]
    return TrainingRun(f"seed={seed}, {settings}", "a task", lines, settings, str(seed))


def rows(*runs: TrainingRun) -> list[dict[str, str]]:
    blocks = repeated_runs(runs)
    if not blocks:
        return []
    (table,) = (block for block in blocks if isinstance(block, ReportTable))
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


def test_settings_are_told_over_their_runs_and_against_the_first() -> None:
    usual = [run("ppo.epochs=10", seed, 40.0 + seed) for seed in range(3)]
    other = [run("ppo.epochs=1", seed, 38.0 + seed) for seed in range(3)]
    first, second = rows(*usual, *other)
    assert first["settings"] == "ppo.epochs=10"
    assert first["runs"] == "3"
    assert first["greedy"].startswith("41.00 [")
    assert first["worst sampled"] == "39.00"
    assert first["sampled - first"] == ""
    assert second["sampled - first"] == "-2.00 [-2.00, -2.00]"  # seed by seed, the difference never varies


def test_runs_are_compared_on_the_seeds_that_both_have() -> None:
    usual = [run("a=1", seed, 40.0 + 9 * seed) for seed in (0, 2, 3, 4)]
    _, second = rows(*usual, *(run("a=2", seed, 41.0 + 9 * seed) for seed in (3, 2, 1, 0)))
    assert second["sampled - first"] == "+1.00 [+1.00, +1.00]"
    _, second = rows(*usual, run("a=2", 2, 50.0))
    assert (second["sampled"], second["sampled - first"]) == ("49.00", "-8.00")  # one run has no interval
    _, second = rows(*usual, run("a=2", 7, 50.0))
    assert second["sampled - first"] == "-"


def test_a_run_that_collapsed_counts() -> None:
    usual = [run("a=1", seed, 40.0) for seed in range(5)]
    _, second = rows(*usual, *(run("a=2", seed, 20.0 if seed == 4 else 40.0) for seed in range(5)))
    assert second["sampled - first"].startswith("-4.00 [")


def test_tasks_are_not_put_together() -> None:
    runs = [run(settings, seed, 40.0) for settings in ("a=1", "a=2") for seed in (0, 1)]
    others = [replace(some, task="another task") for some in runs]
    tables = [block for block in repeated_runs([*runs, *others]) if isinstance(block, ReportTable)]
    assert [len(table.rows) for table in tables] == [2, 2]


def test_what_was_not_measured_is_left_open() -> None:
    first, second = rows(
        *(run(settings, seed, 40.0, held_out=settings == "a=1") for settings in ("a=1", "a=2") for seed in (0, 1))
    )
    assert first["sampled"] == "39.00 [39.00, 39.00]"
    assert (second["sampled"], second["sampled - first"]) == ("-", "-")


def test_runs_that_were_not_repeated_have_no_such_table() -> None:
    assert not rows(run("a=1", 0, 40.0), run("a=2", 0, 41.0))
    assert not rows(run("a=1", 0, 40.0), run("a=1", 1, 41.0))
