from esper.evaluation.document import ReportTable
from esper.evaluation.per_controller import per_controller_tables, short_labels
from esper.evaluation.results import group_by_task
from tests.evaluation.fixtures_episodes import make_episodes


def test_each_of_several_controllers_has_its_own_row() -> None:
    scores = [30.0 + episode_seed % 3 for episode_seed in range(8)]
    episodes = make_episodes("none", scores)
    for checkpoint, gain in (("/runs/0/checkpoints/last.ckpt", 5.0), ("/runs/1/checkpoints/last.ckpt", -1.0)):
        episodes += make_episodes("ppo", [score + gain for score in scores], checkpoint=checkpoint)
        episodes += make_episodes("replay", [30.0] * 8, checkpoint=checkpoint)
    (task,), _ = group_by_task(episodes)
    _, table = per_controller_tables(task, "ppo")
    assert isinstance(table, ReportTable)
    assert table.header == ("controller", "score", "parameters", "- none")  # replay has checkpoints too
    gaps = [(row[0], row[3].split()[0]) for row in table.rows]
    assert gaps == [("0", "+5.00"), ("1", "-1.00"), ("all", "+2.00")]
    assert per_controller_tables(task, "none") == []


def test_labels_are_shortened_to_the_parts_that_differ() -> None:
    assert short_labels(["/a/b/0/checkpoints/last.ckpt", "/a/b/1/checkpoints/best.ckpt"]) == ["0", "1"]
    assert short_labels(["/a/b/one.pt", "/a/two.pt"]) == ["b/one.pt", "two.pt"]
    assert short_labels(["pretrained", "/a/two.pt"]) == ["pretrained", "/a/two.pt"]
    assert short_labels(["/a/checkpoints/last.ckpt", "/a/checkpoints/best.ckpt"]) == [
        "/a/checkpoints/last.ckpt",
        "/a/checkpoints/best.ckpt",
    ]
