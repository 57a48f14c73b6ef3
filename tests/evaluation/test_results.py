import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from esper.blueprints import blueprints
from esper.evaluation.arms import ARMS
from esper.evaluation.claims import TOO_FEW
from esper.evaluation.controls import control_blocks
from esper.evaluation.document import CodeBlock, Paragraph, ReportFigure, ReportTable, Section, write_report
from esper.evaluation.output import write_results
from esper.evaluation.plots import arm_style, plot_frontier, plot_profiles
from esper.evaluation.provenance import Provenance
from esper.evaluation.results import FAILURE_MARGIN, group_by_task, paired_values
from esper.evaluation.sections import pick_reference, report_sections
from esper.evaluation.statistics import MIN_UNITS
from esper.records import EpisodeRecord
from tests.evaluation.fixtures_episodes import make_episode, make_episodes

SCORES = [30.0 + episode_seed for episode_seed in range(MIN_UNITS)]
HIGHER = [score + 10 for score in SCORES]


def test_episodes_are_comparable_if_their_tasks_are_equal() -> None:
    config = {"host": {"blocks": 1}, "data": {"resolution": 8}, "environment": {"steps": 2, "envs": 8}}
    fewer_envs = {**config, "environment": {"steps": 2, "envs": 4}}  # the same episodes, fewer in parallel
    more_steps = {**config, "environment": {"steps": 9, "envs": 8}}
    episodes = [
        make_episode(config=config),
        make_episode("random", config=fewer_envs),
        make_episode("random", config=more_steps),
        make_episode(config=config, split="validation", test_score=None),
    ]
    tasks, remarks = group_by_task(episodes)
    assert [sorted(task.arms) for task in tasks] == [["none", "random"], ["random"], ["none"]]
    assert [task.name.removeprefix("a_host on synthetic") for task in tasks] == [" (1)", " (2)", ""]
    assert [task.split for task in tasks] == ["test", "test", "validation"]
    assert remarks == []


def test_all_blueprints_by_name_or_as_null_are_the_same_task() -> None:
    config = {"host": {"blocks": 1}, "slots": {"names": None, "blueprints": None}}
    resolved = {**config, "slots": {"names": None, "blueprints": list(blueprints("cnn"))}}
    fewer = {**config, "slots": {"names": None, "blueprints": ["norm"]}}
    tasks, _ = group_by_task(
        [make_episode(str(number), config=c) for number, c in enumerate((config, resolved, fewer))]
    )
    assert [list(task.arms) for task in tasks] == [["0", "1"], ["2"]]


def test_a_repeated_episode_counts_once_and_different_scores_are_remarked() -> None:
    tasks, remarks = group_by_task([make_episode(), make_episode()])
    assert len(tasks[0].episodes) == 1
    assert remarks == []
    _, remarks = group_by_task([make_episode(), make_episode(score=11.0)])
    assert remarks == [
        "a_host on synthetic, test split: none ran twice on episode seed 1, with different scores; the last is used."
    ]


def test_arms_with_one_name_and_different_settings_are_separate() -> None:
    tasks, remarks = group_by_task(
        [
            make_episode("schedule", 1, variant="a"),
            make_episode("schedule", 2, variant="b"),
            make_episode("schedule", 3, variant="a"),
        ]
    )
    assert {name: results.episode_seeds for name, results in tasks[0].arms.items()} == {
        "schedule": [1, 3],
        "schedule (2)": [2],
    }
    assert remarks == ["a_host on synthetic, test split: schedule (2) has other settings than the first schedule."]


def test_controllers_are_paired_by_label_in_any_order_of_episodes() -> None:
    scores = {"a": [10.0, 10.0], "b": [90.0, 90.0]}
    episodes = [episode for name in "ba" for episode in make_episodes("ppo", scores[name], checkpoint=name)]
    episodes += [episode for name in "ab" for episode in make_episodes("replay", scores[name], checkpoint=name)]
    (task,), _ = group_by_task(episodes)
    mine, theirs = paired_values([task.arms["ppo"]], [task.arms["replay"]])
    assert (mine[0] == theirs[0]).all()
    others = [episode for name in "cd" for episode in make_episodes("static_final", [20.0] * 2, checkpoint=name)]
    (task,), _ = group_by_task([*episodes, *others])
    _, theirs = paired_values([task.arms["ppo"]], [task.arms["static_final"]])
    assert theirs[0].shape == (2, 2, 2)  # each of different controllers with every other


def test_an_episode_without_a_score_counts_as_the_lowest_and_is_remarked() -> None:
    tasks, remarks = group_by_task(
        [
            make_episode(episode_seed=1, score=10.0),
            make_episode(episode_seed=2, score=None),
            make_episode("random", episode_seed=1, score=4.0),
        ]
    )
    assert tasks[0].arms["none"].values("score").tolist() == [[10.0, 4.0]]
    assert "ended with non-finite values; it counts as the lowest score of all arms, 4.00" in remarks[0]


def test_arms_are_compared_on_the_episode_seeds_that_both_have() -> None:
    tasks, _ = group_by_task([*make_episodes("none", [1, 2, 3]), *make_episodes("random", [5, 6])])
    mine, theirs = paired_values([tasks[0].arms["random"]], [tasks[0].arms["none"]])
    assert mine[0].tolist() == [[5, 6]]
    assert theirs[0].tolist() == [[1, 2]]


def test_several_controllers_are_rows_and_missing_episodes_are_nan() -> None:
    episodes = [make_episode("ppo", number, 10.0 * number, checkpoint=name) for name in "ab" for number in (1, 2, 3)]
    tasks, _ = group_by_task(episodes[:-1])  # b was interrupted before its last episode
    results = tasks[0].arms["ppo"]
    assert np.nan_to_num(results.values("score")).tolist() == [[10, 20, 30], [10, 20, 0]]
    assert results.count_text == "5 of 2 x 3"
    assert results.estimate_of("score") is not None
    disjoint = [make_episode("ppo", number, 1.0, checkpoint=name) for name, number in (("a", 1), ("b", 2))]
    (task,), _ = group_by_task(disjoint)
    assert task.arms["ppo"].estimate_of("score").value == 1  # type: ignore[union-attr]
    report_sections([task], Provenance())


def test_the_minimum_of_units_makes_random_agreement_rarer_than_one_in_twenty() -> None:
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
    paragraphs = [block.text for section in sections for block in section.blocks if isinstance(block, Paragraph)]
    return "\n".join([*cells, *paragraphs])


def test_the_report_answers_the_question_and_shows_both_axes() -> None:
    episodes = [
        *make_episodes("none", SCORES),
        *make_episodes("ppo", HIGHER, checkpoint="a", parameters=200.0, flops=6e9),
        *make_episodes("heuristic", HIGHER),
    ]
    tasks, _ = group_by_task(episodes)
    title, sections = report_sections(
        tasks, Provenance(commands=["a command"], versions={"torch": "1"}, remarks=["a remark"])
    )
    text = text_of(sections)
    assert title == "esper: a_host on synthetic"
    answer = (
        "scores above none; shows no significant difference from heuristic: a result of this controller, not of "
        "training runs in general."
    )
    assert f"ppo, with 2.00 times the host's parameters at the end, {answer}" in text
    assert "little more than the range" not in text
    assert "+10.00 [+10.00, +10.00]" in text
    assert "2.00x" in text  # parameters
    assert "3.00x" in text  # FLOPs
    assert "200 [200, 200]" in text
    assert "a remark" in text
    assert "not valid for controllers from other training runs" in text
    assert [block.lines for s in sections for block in s.blocks if isinstance(block, CodeBlock)] == [["a command"]]


def test_tasks_with_the_same_kind_of_score_are_averaged() -> None:
    other = {"host": {"blocks": 2}}
    episodes = [
        *make_episodes("none", [1.0] * 6),
        *make_episodes("ppo", [2.0] * 6),
        *make_episodes("none", [1.0] * 6, config=other, host="b"),
        *make_episodes("ppo", [4.0] * 6, config=other, host="b"),
    ]
    tasks, _ = group_by_task(episodes)
    _, sections = report_sections(tasks, Provenance())
    (together,) = [section for section in sections if section.title == "All tasks together"]
    table = next(b for b in together.blocks if isinstance(b, ReportTable) and b.header[0] == "comparison")
    assert [row[:4] for row in table.rows] == [["ppo - none", "2", "12", "+2.00 [+2.00, +2.00]"]]
    text = {"data": {"vocabulary": 257}}
    tasks, _ = group_by_task([*episodes, *make_episodes("none", [-200.0] * 6, config=text, host="c")])
    _, sections = report_sections(tasks, Provenance())
    assert "The tasks have different kinds of scores, which are not averaged." in text_of(sections)


def control_row(name: str, *arms: list[EpisodeRecord]) -> list[str]:
    (task,), _ = group_by_task([episode for episodes in arms for episode in episodes])
    table = control_blocks(task)[0]
    assert isinstance(table, ReportTable)
    return list(next(row for row in table.rows if row[0].startswith(name)))


def test_a_negative_control_is_contradicted_by_a_gain() -> None:
    none = make_episodes("none", SCORES)
    assert control_row("placebo", none, make_episodes("placebo", SCORES))[3] == "not contradicted"
    assert control_row("placebo", none, make_episodes("placebo", HIGHER))[3] == "contradicted"
    assert control_row("placebo", none[1:], make_episodes("placebo", HIGHER))[3] == "too few episode seeds"
    assert control_row("placebo", none)[2:] == ["no episodes", ""]
    replay = make_episodes("replay", SCORES)
    assert control_row("ppo_permuted", replay, make_episodes("ppo_permuted", HIGHER))[3] == "contradicted"
    ppo = make_episodes("ppo", [1.0, 2, 3, 4, 5, 6])
    assert control_row("ppo_blind", ppo, make_episodes("ppo_blind", HIGHER))[3] == "contradicted"
    assert control_row("ppo_shuffled", ppo, make_episodes("ppo_shuffled", [1.0] * 6))[3] == "not contradicted"


def test_a_controller_should_wait_where_growth_does_not_pay() -> None:
    arms = (make_episodes("none", SCORES), make_episodes("schedule", SCORES))
    waiting = control_row("growth", *arms, make_episodes("ppo", SCORES, parameters_mean=105.0))
    assert waiting[2:] == [
        "1.05 x the host's parameters over the steps, 0.0 seeds germinated per episode",
        "not contradicted",
    ]
    growing = control_row("growth", *arms, make_episodes("ppo", SCORES, parameters_mean=150.0))
    assert growing[3] == "contradicted"
    arms = (make_episodes("none", SCORES), make_episodes("schedule", HIGHER), make_episodes("ppo", HIGHER))
    assert control_row("growth", *arms)[2].startswith("growth pays here")


def test_too_few_episode_seeds_are_reported() -> None:
    (task,), _ = group_by_task([*make_episodes("none", [1.0, 2.0]), *make_episodes("ppo", [3.0, 4.0])])
    _, sections = report_sections([task], Provenance())
    text = text_of(sections)
    assert f"has too few episode seeds (fewer than {MIN_UNITS}) for a comparison with none." in text
    assert "an interval is little more than the range of the values" in text
    assert TOO_FEW in text.splitlines()


def test_every_arm_has_its_own_style() -> None:
    styles = [(tuple(arm_style(name)["color"]), arm_style(name)["marker"]) for name in ARMS]
    assert len(set(styles)) == len(ARMS)


def test_the_reference_is_the_requested_arm_or_else_the_learned_controller() -> None:
    (task,), _ = group_by_task(
        [episode for name in ("none", "schedule", "ppo") for episode in make_episodes(name, [1.0])]
    )
    assert pick_reference(task, "none") == "none"
    assert pick_reference(task, None) == pick_reference(task, "replay") == "ppo"


def test_plots_show_every_arm_with_its_intervals() -> None:
    (task,), _ = group_by_task(
        [*make_episodes("none", [1.0, 2, 3]), *make_episodes("ppo", [4.0, 5, 6], parameters=300.0)]
    )
    figure = plot_frontier(task.arms)
    left, right = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["none", "ppo"]
    assert left.get_xscale() == right.get_xscale() == "log"
    points = [container.lines[0].get_data() for container in left.containers]
    assert [(float(x[0]), float(y[0])) for x, y in points] == [(100, 2), (300, 5)]
    axes = plot_profiles(task.arms, "ppo").axes[0]
    curves = {curve.get_label(): np.asarray(curve.get_ydata()) for curve in axes.lines}
    assert curves["none"][0] == curves["ppo"][0] == 1
    assert (curves["none"] <= curves["ppo"]).all()


def test_a_report_is_written_as_markdown_and_as_one_html_file(tmp_path: Path) -> None:
    (task,), _ = group_by_task(make_episodes("none", [1.0, 2, 3]))
    blocks = [
        Paragraph("a `key` and **a <win>**"),
        ReportTable(("arm", "score"), [["none", "1.00 [0.90, 1.10]"], ["a|b", "-"]]),
        CodeBlock(["python -m x > y"]),
        ReportFigure("one", plot_frontier(task.arms), "A caption."),
    ]
    write_report(tmp_path, "Title & more", [Section("First", blocks)])
    text, page = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    assert "| arm | score |\n| --- | ---: |\n| none | 1.00 [0.90, 1.10] |\n| a\\|b | - |" in text
    assert "![one](pictures/one.png)\n\nA caption." in text
    assert (tmp_path / "pictures/one.png").read_bytes().startswith(b"\x89PNG")
    assert "<h1>Title &amp; more</h1>" in page
    assert "<p>a <code>key</code> and <strong>a &lt;win&gt;</strong></p>" in page
    assert "<pre>python -m x &gt; y</pre>" in page
    assert '<td class="number">1.00 [0.90, 1.10]</td>' in page
    assert "<td>none</td>" in page
    assert page.count("data:image/png;base64,") == 1


def test_without_episodes_nothing_is_written(tmp_path: Path) -> None:
    console = Console(record=True, quiet=False)
    assert write_results([], Provenance(), tmp_path, console) == {}
    assert console.export_text() == "there are no finished episodes to report\n"
    assert list(tmp_path.iterdir()) == []


def test_an_arm_shows_its_mean_its_worst_tenth_and_its_failures() -> None:
    """On one of 20 episode seeds the arm falls far below the bare host, and one ended with non-finite values."""
    scores: list[float | None] = [35.0] * 20
    scores[3], scores[7] = 30.0 - FAILURE_MARGIN - 0.1, None
    random = [make_episode("random", episode_seed, score) for episode_seed, score in enumerate(scores)]
    (task,), _ = group_by_task([*make_episodes("none", [30.0] * 20), *random])
    summary, bare = task.summarise("random"), task.summarise("none")
    assert summary.failure_rate == 0.1
    assert summary.worst_tenth == pytest.approx(30.0 - FAILURE_MARGIN - 0.1)  # both: the second counts as the lowest
    assert summary.mean.value == pytest.approx(35 - 0.1 * (5 + FAILURE_MARGIN + 0.1))
    assert task.arms["random"].estimate_of("score").value == 35  # type: ignore[union-attr]
    assert (bare.failure_rate, bare.worst_tenth) == (0, 30)
    _, sections = report_sections([task], Provenance())
    rows = next(section for section in sections if section.title == "Results").blocks[0]
    assert isinstance(rows, ReportTable)
    assert rows.header[2:6] == ("score", "mean", "worst tenth", "failures")
    assert rows.rows[0][4:6] == ["26.90", "10%"]


def test_the_tables_on_the_screen_and_the_file_have_the_same_numbers(tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    episodes = [*make_episodes("none", SCORES), *make_episodes("ppo", HIGHER, checkpoint="a")]
    results = write_results(episodes, Provenance(primary="none"), tmp_path, console)
    none = results["a_host on synthetic, test split"]["none"]
    assert none["mean"]["value"] == none["score"]["value"] == 32.5
    assert (none["worst_tenth"], none["failure_rate"]) == (30, 0)
    assert none["compared"]["is_primary"]
    assert none["compared"]["p"] == none["compared"]["p_adjusted"] < 0.05
    assert none["compared"]["reference_is"] == "better, of this controller"
    text = console.export_text()
    for column in ("mean", "worst tenth", "failures", "ppo - arm", "  p", "parameters", "GFLOPs", "seconds"):
        assert column in text
    assert "< 0.001 *" in text
    assert "* a difference is claimed, of this controller" in text
    assert json.loads((tmp_path / "evaluation.json").read_text())["primary"] == "none"


def test_metrics_that_were_not_measured_are_dashes() -> None:
    episode = make_episode("ppo, greedy", split="validation", test_score=None, seconds=None, flops_by_part={})
    tasks, _ = group_by_task([episode])
    results = tasks[0].arms["ppo, greedy"]
    assert results.estimate_of("seconds") is None
    _, sections = report_sections(tasks, Provenance())
    assert "nan" not in text_of(sections)
    assert math.isfinite(results.estimate_of("score").value)  # type: ignore[union-attr]
