from esper.evaluation.document import ReportTable
from esper.evaluation.rent_sweep import RENT_WEIGHTS, rent_blocks, rent_table
from esper.evaluation.results import group_by_task
from tests.evaluation.fixtures_episodes import make_episode, make_episodes


def test_differences_are_shown_for_every_weight_of_the_rent() -> None:
    """A network of e times the host's parameters measures 0.5 points more: the sign flips at a weight of 0.5."""
    accuracies = [30.0, 31.0, 32.0, 33.0, 34.0, 35.0]
    grown = [
        make_episode("ppo", episode_seed, accuracy - 0.5, test_score=accuracy + 0.5, parameters=271.8281828)
        for episode_seed, accuracy in enumerate(accuracies)
    ]
    (task,), _ = group_by_task([*make_episodes("none", accuracies), *grown])
    table, _ = rent_blocks([task], "ppo")
    assert isinstance(table, ReportTable)
    assert table.header == ("comparison", "weight 0", "weight 0.25", "weight 0.5", "weight 1", "weight 2")
    (row,) = table.rows
    assert row[0] == "ppo - none"
    assert [float(cell.split()[0]) for cell in row[1:]] == [0.5 - weight for weight in RENT_WEIGHTS]


def test_the_weight_of_the_scores_themselves_gives_the_scores_of_the_validation_split() -> None:
    grown = make_episodes("ppo", [40.0] * 6, split="validation", validation_score=43.0, parameters=200.0)
    bare = make_episodes("none", [39.0] * 6, split="validation", validation_score=39.0)
    (task,), _ = group_by_task([*grown, *bare])
    table, _ = rent_blocks([task], "ppo")
    assert isinstance(table, ReportTable)
    assert table.rows[0][1:5] == [
        "+4.00 [+4.00, +4.00]",
        "+3.83 [+3.83, +3.83]",
        "+3.65 [+3.65, +3.65]",
        "+3.31 [+3.31, +3.31]",
    ]


def test_there_is_no_table_without_measured_scores_or_another_arm() -> None:
    (task,), _ = group_by_task(make_episodes("ppo", [1.0] * 6, split="validation"))
    assert not rent_blocks([task], "ppo")
    (task,), _ = group_by_task(make_episodes("ppo", [1.0] * 6))
    assert not rent_blocks([task], "ppo")


def test_differences_over_several_tasks_are_means_over_them() -> None:
    episodes = [
        *make_episodes("none", [30.0] * 6), *make_episodes("ppo", [31.0] * 6),
        *make_episodes("none", [30.0] * 6, data="other"), *make_episodes("ppo", [33.0] * 6, data="other"),
    ]  # fmt: skip
    tasks, _ = group_by_task(episodes)
    table = rent_table(tasks, "ppo")
    assert table is not None
    assert table.rows[0][1].startswith("+2.00 [")
