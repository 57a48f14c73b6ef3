from esper.evaluation.per_controller import per_controller_tables, short_labels
from esper.evaluation.results import group_by_task
from tests.evaluation.fixtures_episodes import line


def test_each_of_several_controllers_is_told_by_itself() -> None:
    lines = [line("none", seed, 30.0 + seed % 3) for seed in range(8)]
    for learner, gain in (("/runs/0/checkpoints/last.ckpt", 5.0), ("/runs/1/checkpoints/last.ckpt", -1.0)):
        lines += [line("ppo", seed, 30.0 + seed % 3 + gain, checkpoint=learner) for seed in range(8)]
        lines += [line("replay", seed, 30.0, checkpoint=learner) for seed in range(8)]
    (task,), _ = group_by_task(lines)
    _, table = per_controller_tables(task, "ppo")
    assert table.header == ("controller", "score", "parameters", "- none")  # replay has a controller of its own
    told = [(row[0], row[3].split()[0]) for row in table.rows]
    assert told == [("0", "+5.00"), ("1", "-1.00"), ("all", "+2.00")]
    assert per_controller_tables(task, "none") == []


def test_controllers_are_called_by_what_sets_them_apart() -> None:
    assert short_labels(["/a/b/0/checkpoints/last.ckpt", "/a/b/1/checkpoints/best.ckpt"]) == ["0", "1"]
    assert short_labels(["/a/b/one.pt", "/a/two.pt"]) == ["b/one.pt", "two.pt"]
    assert short_labels(["pretrained", "/a/two.pt"]) == ["pretrained", "/a/two.pt"]
    assert short_labels(["/a/checkpoints/last.ckpt", "/a/checkpoints/best.ckpt"]) == [
        "/a/checkpoints/last.ckpt",
        "/a/checkpoints/best.ckpt",
    ]
