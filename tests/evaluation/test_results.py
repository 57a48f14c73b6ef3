import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from esper.evaluation.arms import ARMS
from esper.evaluation.controls import controls
from esper.evaluation.document import CodeBlock, Paragraph, ReportFigure, ReportTable, Section, write_report
from esper.evaluation.output import write_results
from esper.evaluation.plots import frontier, look, profiles
from esper.evaluation.results import group_by_task, paired_values
from esper.evaluation.sections import TOO_FEW, UNDECIDED, Provenance, pick_reference, report_sections, verdict
from esper.evaluation.statistics import MIN_UNITS, Estimate
from tests.evaluation.fixtures_episodes import line

FLAT = [30.0 + seed for seed in range(MIN_UNITS)]


def arm(name: str, scores: list[float], **changes: object) -> list[EpisodeRecord]:
    return [line(name, seed, score, **changes) for seed, score in enumerate(scores)]


def test_episodes_are_sorted_into_tasks_by_what_makes_them_comparable() -> None:
    config = {"host": {"blocks": 1}, "data": {"resolution": 8}, "environment": {"steps": 2, "envs": 8}}
    wider = {**config, "environment": {"steps": 2, "envs": 4}}  # the same episodes, fewer at once
    longer = {**config, "environment": {"steps": 9, "envs": 8}}
    lines = [line(config=config), line("random", config=wider), line("random", config=longer)]
    lines.append(line(config=config, split="validation", test_score=None))
    tasks, remarks = group_by_task(lines)
    assert [sorted(task.arms) for task in tasks] == [["none", "random"], ["random"], ["none"]]
    assert [task.name.removeprefix("a_host on synthetic") for task in tasks] == [" (1)", " (2)", ""]
    assert [task.split for task in tasks] == ["test", "test", "validation"]
    assert remarks == []


def test_the_same_episode_of_two_runs_counts_once_and_unlike_ones_are_named() -> None:
    tasks, remarks = group_by_task([line(), line()])
    assert len(tasks[0].lines()) == 1
    assert remarks == []
    _, remarks = group_by_task([line(), line(score=11.0)])
    assert remarks == [
        "a_host on synthetic, test split: none ran twice on episode seed 1, with different scores; "
        "the last is used."
    ]


def test_arms_of_one_name_with_unlike_settings_stay_apart() -> None:
    tasks, remarks = group_by_task(
        [line("schedule", 1, variant="a"), line("schedule", 2, variant="b"), line("schedule", 3, variant="a")]
    )
    assert {name: results.episode_seeds for name, results in tasks[0].arms.items()} == {
        "schedule": [1, 3],
        "schedule (2)": [2],
    }
    assert remarks == ["a_host on synthetic, test split: schedule (2) has other settings than its namesake."]


def test_controllers_are_paired_by_their_labels_whatever_the_order_of_their_episodes() -> None:
    lines = [line("ppo", seed, {"a": 10.0, "b": 90.0}[name], checkpoint=name) for name in "ba" for seed in (1, 2)]
    lines += [line("replay", seed, {"a": 10.0, "b": 90.0}[name], checkpoint=name) for name in "ab" for seed in (1, 2)]
    (task,), _ = group_by_task(lines)
    mine, theirs = paired_values([task.arms["ppo"]], [task.arms["replay"]])
    assert (mine[0] == theirs[0]).all()
    others = [line("static_final", seed, 20.0, checkpoint=name) for name in "cd" for seed in (1, 2)]
    (task,), _ = group_by_task([*lines, *others])
    _, theirs = paired_values([task.arms["ppo"]], [task.arms["static_final"]])
    assert theirs[0].shape == (2, 2, 2)  # of other controllers, each with every one


def test_an_episode_that_ended_without_a_score_counts_as_the_lowest_and_is_named() -> None:
    tasks, remarks = group_by_task(
        [line(episode_seed=1, score=10.0), line(episode_seed=2, score=None), line("random", episode_seed=1, score=4.0)]
    )
    assert tasks[0].arms["none"].table("score").tolist() == [[10.0, 4.0]]
    assert "ended with non-finite values; it counts as the lowest score of all arms, 4.00" in remarks[0]


def test_only_seeds_that_both_have_played_are_compared() -> None:
    tasks, _ = group_by_task([*arm("none", [1, 2, 3]), *arm("random", [5, 6])])
    mine, theirs = paired_values([tasks[0].arms["random"]], [tasks[0].arms["none"]])
    assert mine[0].tolist() == [[5, 6]]
    assert theirs[0].tolist() == [[1, 2]]


def test_several_controllers_are_rows_and_what_was_not_played_is_left_open() -> None:
    lines = [line("ppo", seed, 10.0 * seed, checkpoint=name) for name in "ab" for seed in (1, 2, 3)]
    tasks, _ = group_by_task(lines[:-1])  # b was interrupted before its last
    results = tasks[0].arms["ppo"]
    assert np.nan_to_num(results.table("score")).tolist() == [[10, 20, 30], [10, 20, 0]]
    assert results.played == "5 of 2 x 3"
    assert results.figure("score") is not None
    unlike = [line("ppo", seed, 1.0, checkpoint=name) for name, seed in (("a", 1), ("b", 2))]  # no seed in common
    (task,), _ = group_by_task(unlike)
    assert task.arms["ppo"].figure("score").value == 1  # type: ignore[union-attr]
    report_sections([task], Provenance())


@pytest.mark.parametrize(
    ("gap", "seeds", "told"),
    [
        (Estimate(1.0, 0.5, 2.0), 10, "better"),
        (Estimate(-1.0, -2.0, -0.5), 10, "worse"),
        (Estimate(1.0, -0.1, 2.0), 10, UNDECIDED),
        (Estimate(1.0, 0.0, 2.0), 10, UNDECIDED),
        (Estimate(1.0, 0.5, 2.0), MIN_UNITS - 1, TOO_FEW),
    ],
)
def test_a_win_is_claimed_only_where_the_interval_excludes_zero_on_enough_seeds(
    gap: Estimate, seeds: int, told: str
) -> None:
    assert verdict(gap, seeds) == told


def test_enough_are_those_that_chance_seldom_lets_agree() -> None:
    assert 2 * 0.5**MIN_UNITS < 0.05 < 2 * 0.5 ** (MIN_UNITS - 1)


def text_of(sections: list[Section]) -> str:
    cells = [
        cell
        for section in sections
        for block in section.blocks
        if isinstance(block, ReportTable)
        for row in block.rows
        for cell in row
    ]
    words = [block.words for section in sections for block in section.blocks if isinstance(block, Paragraph)]
    return "\n".join([*cells, *words])


def test_the_report_answers_the_question_and_shows_both_axes() -> None:
    lines = [
        *arm("none", FLAT),
        *arm("ppo", [score + 10 for score in FLAT], checkpoint="a", parameters=200.0, flops=6e9),
        *arm("heuristic", [score + 10 for score in FLAT]),
    ]
    tasks, _ = group_by_task(lines)
    title, sections = report_sections(
        tasks, Provenance(commands=["a command"], versions={"torch": "1"}, remarks=["a remark"])
    )
    text = text_of(sections)
    assert title == "esper: a_host on synthetic"
    assert "ppo, with 2.00 times the host's parameters at the end, scores above none; cannot be told from heur" in text
    assert "hardly more than the range" not in text
    assert "+10.00 [+10.00, +10.00]" in text
    assert "2.00x" in text  # parameters
    assert "3.00x" in text  # FLOPs
    assert "200 [200, 200]" in text
    assert "a remark" in text
    assert "they say nothing of controllers that were trained another time" in text
    assert [block.lines for s in sections for block in s.blocks if isinstance(block, CodeBlock)] == [["a command"]]


def test_tasks_that_are_scored_alike_are_put_together() -> None:
    other = {"host": {"blocks": 2}}
    lines = [*arm("none", [1.0] * 6), *arm("ppo", [2.0] * 6), *arm("none", [1.0] * 6, config=other, host="b"),
             *arm("ppo", [4.0] * 6, config=other, host="b")]  # fmt: skip
    tasks, _ = group_by_task(lines)
    _, sections = report_sections(tasks, Provenance())
    (together,) = [section for section in sections if section.title == "All tasks together"]
    table = together.blocks[0]
    assert isinstance(table, ReportTable)
    assert [row[:4] for row in table.rows] == [["ppo - none", "2", "12", "+2.00 [+2.00, +2.00]"]]
    text = {"data": {"vocabulary": 257}}
    tasks, _ = group_by_task([*lines, *arm("none", [-200.0] * 6, config=text, host="c")])
    _, sections = report_sections(tasks, Provenance())
    assert "The tasks are not scored alike" in text_of(sections)


def row(name: str, lines: list[EpisodeRecord]) -> list[str]:
    (task,), _ = group_by_task(lines)
    table = controls(task)[0]
    assert isinstance(table, ReportTable)
    return list(next(row for row in table.rows if row[0].startswith(name)))


def test_negative_controls_hold_where_nothing_is_gained() -> None:
    flat, better = FLAT, [score + 3 for score in FLAT]
    assert row("placebo", [*arm("none", flat), *arm("placebo", flat)])[3] == "not contradicted"
    assert row("placebo", [*arm("none", flat), *arm("placebo", better)])[3] == "contradicted"
    assert row("placebo", [*arm("none", flat[1:]), *arm("placebo", better)])[3] == "too few seeds"
    assert row("placebo", arm("none", flat))[2:] == ["not played", ""]
    assert row("ppo_permuted", [*arm("replay", flat), *arm("ppo_permuted", better)])[3] == "contradicted"
    idle = [*arm("none", flat), *arm("schedule", flat)]
    waiting = row("growth", [*idle, *arm("ppo", flat, parameters_mean=105.0)])
    assert waiting[2:] == [
        "1.05 x the host's parameters over the steps, 0.0 seeds germinated an episode",
        "not contradicted",
    ]
    assert row("growth", [*idle, *arm("ppo", flat, parameters_mean=150.0)])[3] == "contradicted"
    paying = [*arm("none", flat), *arm("schedule", better), *arm("ppo", better)]
    assert row("growth", paying)[2].startswith("growth pays here")


def test_few_seeds_are_named_and_no_arms_look_alike() -> None:
    (task,), _ = group_by_task([*arm("none", [1.0, 2.0]), *arm("ppo", [3.0, 4.0])])
    _, sections = report_sections([task], Provenance())
    text = text_of(sections)
    assert f"at the end, has been played on too few seeds (fewer than {MIN_UNITS}) to be told from none." in text
    assert "intervals are hardly more than the range of what was seen" in text
    assert "too few seeds" in text
    looks = [(tuple(look(name)["color"]), look(name)["marker"]) for name in ARMS]
    assert len(set(looks)) == len(ARMS)


def test_the_reference_is_the_one_that_is_wanted_else_the_learned_one() -> None:
    (task,), _ = group_by_task([*arm("none", [1.0]), *arm("schedule", [1.0]), *arm("ppo", [1.0])])
    assert pick_reference(task, "none") == "none"
    assert pick_reference(task, None) == pick_reference(task, "replay") == "ppo"


def test_pictures_show_every_arm_with_its_intervals() -> None:
    (task,), _ = group_by_task([*arm("none", [1.0, 2, 3]), *arm("ppo", [4.0, 5, 6], parameters=300.0)])
    figure = frontier(task.arms)
    left, right = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["none", "ppo"]
    assert left.get_xscale() == right.get_xscale() == "log"
    points = [container.lines[0].get_data() for container in left.containers]
    assert [(float(x[0]), float(y[0])) for x, y in points] == [(100, 2), (300, 5)]
    curves = {curve.get_label(): np.asarray(curve.get_ydata()) for curve in profiles(task.arms, "ppo").axes[0].lines}
    assert curves["none"][0] == curves["ppo"][0] == 1
    assert (curves["none"] <= curves["ppo"]).all()


def test_a_document_is_written_as_markdown_and_as_one_page(tmp_path: Path) -> None:
    (task,), _ = group_by_task(arm("none", [1.0, 2, 3]))
    blocks = [
        Paragraph("a `key` and **a <win>**"),
        ReportTable(("arm", "score"), [["none", "1.00 [0.90, 1.10]"], ["a|b", "-"]]),
        CodeBlock(["python -m x > y"]),
        ReportFigure("one", frontier(task.arms), "A caption."),
    ]
    write_report(tmp_path, "Title & more", [Section("First", blocks)])
    text, page = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    assert "| arm | score |\n| --- | ---: |\n| none | 1.00 [0.90, 1.10] |\n| a\\|b | - |" in text
    assert "![one](pictures/one.png)\n\nA caption." in text
    assert (tmp_path / "pictures/one.png").read_bytes().startswith(b"\x89PNG")
    assert "<h1>Title &amp; more</h1>" in page
    assert "<p>a <code>key</code> and <strong>a &lt;win&gt;</strong></p>" in page
    assert "<pre>python -m x &gt; y</pre>" in page
    assert '<td class="figure">1.00 [0.90, 1.10]</td>' in page
    assert "<td>none</td>" in page
    assert page.count("data:image/png;base64,") == 1


def test_what_is_left_of_no_episodes_is_a_sentence(tmp_path: Path) -> None:
    console = Console(record=True, quiet=False)
    assert write_results([], Provenance(), tmp_path, console) == {}
    assert console.export_text() == "there are no finished episodes to report\n"
    assert list(tmp_path.iterdir()) == []


def test_figures_that_were_not_measured_are_left_open() -> None:
    missing = line("ppo, greedy", split="validation", test_score=None, seconds=None, flops_by_part={})
    tasks, _ = group_by_task([missing])
    assert tasks[0].arms["ppo, greedy"].figure("seconds") is None
    _, sections = report_sections(tasks, Provenance())
    assert "nan" not in text_of(sections)
    assert math.isfinite(tasks[0].arms["ppo, greedy"].figure("score").value)  # type: ignore[union-attr]
