from esper.evaluation.break_even import break_even_blocks
from esper.evaluation.document import Paragraph, ReportTable
from esper.evaluation.results import group_by_task
from esper.records import EpisodeRecord
from tests.evaluation.fixtures_episodes import make_episodes


def episodes_of(arm: str, score: float, gflops: float, checkpoint: str | None = None) -> list[EpisodeRecord]:
    scores = [score + episode_seed % 3 for episode_seed in range(8)]
    return make_episodes(arm, scores, checkpoint=checkpoint, flops=gflops * 1e9)


EPISODES = [
    *episodes_of("ppo", 40.0, 5.0, checkpoint="a"),
    *episodes_of("fragrow", 40.0, 9.0),  # equal score, higher cost
    *episodes_of("static_final", 40.0, 9.0, checkpoint="a"),  # needs the controller
    *episodes_of("placebo", 20.0, 9.0),
    *episodes_of("none", 30.0, 1.0),  # lower score, lower cost
    *episodes_of("all_seeds", 45.0, 7.0),  # higher score
    *episodes_of("best_open_loop", 39.0, 4.0),
]


def test_training_pays_off_if_a_use_saves_flops_and_does_not_score_less() -> None:
    (task,), _ = group_by_task(EPISODES)
    note, table = break_even_blocks(task, "ppo", {"a": {"gflops": 1_001.0}}, search_gflops=250.0)
    assert isinstance(table, ReportTable)
    assert {row[0].removeprefix("ppo - "): row[2:] for row in table.rows} == {
        "fragrow": ["+4.0 [+4.0, +4.0]", "251"],
        "none": ["-4.0 [-4.0, -4.0]", "never: it does not cost less"],
        "all_seeds": ["+2.0 [+2.0, +2.0]", "never: it scores less"],
        "best_open_loop": ["-1.0 [-1.0, -1.0]", "never: it does not cost less"],
    }
    assert isinstance(note, Paragraph)
    assert "took 1,001 GFLOPs" in note.text
    assert "pays off after 5 of them" in note.text


def test_there_is_no_table_without_a_trained_controller_or_its_cost() -> None:
    (task,), _ = group_by_task(EPISODES)
    assert not break_even_blocks(task, "none", {}, None)
    assert not break_even_blocks(task, "ppo", {"a": {"gflops": None}}, None)
    assert not break_even_blocks(task, "ppo", {}, None)
