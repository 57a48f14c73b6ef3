import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from esper.checkpoints import PRETRAINED
from esper.records import EpisodeRecord
from esper.report import main
from tests.evaluation.fixtures_episodes import line, write_episodes


def directory(path: Path, lines: list[EpisodeRecord], **told: object) -> Path:
    path.mkdir(parents=True)
    write_episodes(path / "episodes.jsonl", lines)
    if told:
        (path / "evaluation.json").write_text(json.dumps(told))
    return path


def some(arm: str, score: float, **changes: object) -> list[EpisodeRecord]:
    return [line(arm, seed, score + seed, **changes) for seed in range(10)]


def test_several_runs_make_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = directory(tmp_path / "a", some("none", 30.0), commands=["command one"], versions={"torch": "1"})
    second = directory(tmp_path / "b", some("ppo", 40.0, checkpoint="x"), commands=["command two"], reference="ppo")
    main([str(first), str(second), "--out", str(tmp_path / "out")])
    text = (tmp_path / "out/report.md").read_text()
    assert "ppo, with 1.00 times the host's parameters at the end, scores above none." in text
    assert "command one\ncommand two\npython" in text  # and the command that put them together
    assert "ppo - arm" in capsys.readouterr().out
    main([str(first)])
    assert (first / "report.html").exists()
    assert json.loads((first / "evaluation.json").read_text())["commands"] == ["command one"]


def test_an_episode_that_was_played_again_counts_as_it_was_played_last(tmp_path: Path) -> None:
    again = [
        line("schedule", 1, 5.0, inputs_digest="a", variant="a"),
        line("schedule", 1, 7.0, inputs_digest="b", variant="b"),
    ]
    where = directory(tmp_path / "a", again)
    main([str(where)])
    (figures,) = json.loads((where / "evaluation.json").read_text())["tasks"].values()
    assert list(figures) == ["schedule"]
    assert figures["schedule"]["score"]["value"] == 7


def test_what_episodes_show_of_themselves_is_not_written_down_twice(tmp_path: Path) -> None:
    where = directory(tmp_path / "a", [line(episode_seed=1, score=None), line(episode_seed=2, score=4.0)])
    main([str(where)])
    assert "counts as the lowest score of all arms" in (where / "report.md").read_text()
    assert json.loads((where / "evaluation.json").read_text())["remarks"] == []


def test_lines_that_cannot_be_read_are_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = directory(tmp_path / "a", some("none", 30.0))
    with (where / "episodes.jsonl").open("a") as file:
        file.write('{"version": 1, "steps": []}\n[1]\n\n' + json.dumps(line(episode_seed=9).to_dict()) + '\n{"version": 2, "steps": [], ')
    main([str(where)])
    told = capsys.readouterr().out + (where / "report.md").read_text()
    path = where / "episodes.jsonl"
    for complaint in (
        f"{path}: line 11 is an episode record of version 1, not 3; it is left out.",
        f"{path}: line 12 is no episode record; it is left out.",
        f"{path}: line 13 is no JSON; it is left out.",
        f"{path}: line 15 was cut off; it is left out.",
    ):
        assert told.count(complaint) == 2  # on the screen, and in the report
    assert "4 lines could not be read, 11 could." in told


def test_held_out_episodes_of_a_training_run_are_reported_as_validation(tmp_path: Path) -> None:
    def held_out(kind: str, played: int, score: float) -> list[EpisodeRecord]:
        made = some("ppo", score, kind=kind, round=played)
        return [replace(each, split="validation", test_score=None, config={}) for each in made]

    lines = [*held_out("training", 2, 1.0), *held_out("greedy", 1, 10.0), *held_out("greedy", 2, 40.0)]
    where = directory(tmp_path / "run", [*lines, *held_out("sampled", 2, 35.0)])
    main([str(where)])
    found = json.loads((where / "evaluation.json").read_text())["tasks"]
    assert list(found) == ["a_host on synthetic, validation split"]
    figures = found["a_host on synthetic, validation split"]
    assert sorted(figures) == ["ppo, greedy", "ppo, sampled"]
    assert figures["ppo, greedy"]["score"]["value"] == 44.5


def run(path: Path, seed: int, scores: list[float], *more: str) -> Path:
    """The directory of a training run of some rounds, with two held-out episodes of each kind."""
    episodes = [
        line("ppo", 100 * seed + number, 40.0 + seed + number, kind=kind, round=len(scores))
        for kind in ("greedy", "sampled")
        for number in range(2)
    ]
    directory(path, [replace(each, split="validation", test_score=None) for each in episodes])
    rounds = [
        {"round": number, "decisions": 160 * number, "episode/score": score, "losses/explained_variance": 0.6,
         "policy/kl": 0.02, "policy/entropy_op": 0.5, "policy/entropy_bonus": 0.01, "time/environment": 60.0}
        for number, score in enumerate(scores, 1)
    ]  # fmt: skip
    rounds[-1] |= {"validation/greedy_score": 41.0, "validation/sampled_score": 40.5}
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rounds))
    (path / ".hydra").mkdir()
    (path / ".hydra/config.yaml").write_text("name: tried\n")
    overrides = ["+experiment=cifar_ppo", f"seed={seed}", *more]
    (path / ".hydra/overrides.yaml").write_text("".join(f"- {override}\n" for override in overrides))
    return path


def sweep(path: Path, *runs: tuple[str, ...]) -> Path:
    """The directory of a sweep of two seeds for each list of overrides."""
    for number, overrides in enumerate(runs):
        for seed in range(2):
            run(path / str(2 * number + seed), seed, [30.0, 31.0, 32.0, 40.0 + seed], *overrides)
    (path / "multirun.yaml").touch()
    return path


def test_training_runs_show_how_they_learned_alone_and_beside_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = sweep(tmp_path / "sweep", ())
    main([str(runs), "--out", str(tmp_path / "alone")])
    text = (tmp_path / "alone/report.md").read_text()
    figures = json.loads((tmp_path / "alone/evaluation.json").read_text())["tasks"]
    (found,) = figures.values()
    assert {name: (arm["controllers"], arm["seeds"], arm["episodes"]) for name, arm in found.items()} == {
        "ppo, greedy": (2, 2, 4), "ppo, sampled": (2, 2, 4)
    }  # fmt: skip
    assert "The unit is the trained controller, of which there are 2" in text
    assert "| seed=1 | 4 | 30.00 | 41.00 | 41.00 | 40.50 | 0.60 | 1.00 | 0.50 | - | - | 4.0 |" in text
    assert (tmp_path / "alone/pictures/learning0.png").stat().st_size > 10_000
    assert "python -m esper.run +experiment=cifar_ppo seed=1" in text
    assert "seed=0" in capsys.readouterr().out

    evaluation = directory(tmp_path / "evaluation", some("ppo", 40.0))
    main([str(runs), str(evaluation), "--out", str(tmp_path / "both")])
    text = (tmp_path / "both/report.md").read_text()
    assert "a_host on synthetic, test split" in text
    assert "## Training" in text
    assert "learning0" in (tmp_path / "both/report.html").read_text()
    assert "ppo, greedy" not in text


def test_a_kept_controller_tells_how_it_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(["pretrained/0", "pretrained/1", "--out", "report"])
    text = Path("report/report.md").read_text()
    assert "esper: cifar_ppo, cifar_blind on cifar10" in text
    assert "| seed=0 | 30 |" in text
    assert "| seed=1 | 30 |" in text
    assert "python -m esper.run +experiment=cifar_ppo seed=1" in text
    assert Path("report/pictures/learning0.png").stat().st_size > 10_000
    main([str(PRETRAINED["pretrained"])])
    assert next(Path("outputs/report").glob("*/report.md")).is_file()
    Path("other.txt").write_text("no controller")
    with pytest.raises(SystemExit, match=r"other\.txt: "):
        main(["other.txt"])


def test_runs_of_unlike_settings_are_no_repetitions_of_one_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = sweep(tmp_path / "sweep", ("slots.names=[a]",), ("slots.names=[b]",))
    main([str(runs)])
    (found,) = json.loads((runs / "evaluation.json").read_text())["tasks"].values()
    assert {arm["controllers"] for arm in found.values()} == {2}
    assert sorted(found) == [f"slots.names=[{slot}], {kind}" for slot in "ab" for kind in ("greedy", "sampled")]
    assert "held-out episodes of training runs, greedy" in (runs / "report.md").read_text()
    assert "slots.names=[b]" in capsys.readouterr().out.replace("\n", "")


def test_a_sweeps_job_that_left_nothing_is_remarked_and_a_run_without_episodes_has_its_curves(tmp_path: Path) -> None:
    runs = sweep(tmp_path / "sweep", ())
    (runs / "1/episodes.jsonl").unlink()
    (runs / "1/rounds.jsonl").unlink()
    (runs / "0/episodes.jsonl").unlink()
    main([str(runs)])
    text = (runs / "report.md").read_text()
    assert f"{runs}/1: has left no records; it is left out." in text
    assert "learning0.png" in text
    assert "what it is" not in text
    assert "The question" not in text


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("rounds.jsonl", "3\n", "rounds.jsonl: line 1 is no round record."),
        ("rounds.jsonl", "what\n", "rounds.jsonl: line 1 is no round record."),
        ("rounds.jsonl", '{"episode/score": 3}\n', "rounds.jsonl: line 1 is no round record."),
        (".hydra/overrides.yaml", "a: [", ".hydra/overrides.yaml: cannot be read."),
        (".hydra/config.yaml", "a: [", ".hydra/config.yaml: cannot be read."),
    ],
)
def test_a_run_that_cannot_be_read_is_told_in_one_sentence(
    file: str, content: str, sentence: str, tmp_path: Path
) -> None:
    where = run(tmp_path / "run", 0, [30.0])
    (where / file).write_text(content)
    with pytest.raises(SystemExit) as refused:
        main([str(where)])
    assert str(refused.value) == f"{where}/{sentence}"


def test_lines_in_a_row_with_the_same_flaw_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = directory(tmp_path / "a", [*some("none", 30.0)])
    with (where / "episodes.jsonl").open("a") as file:
        file.write("[1]\n[2]\n[3]\n{}\n" + json.dumps(line(episode_seed=11)) + "\n[4]\n")
    main([str(where)])
    told = capsys.readouterr().out
    assert "each of lines 11 to 14 is no episode record; they are left out." in told
    assert "line 16 is no episode record; it is left out." in told
    assert "5 lines could not be read, 11 could." in told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["nowhere"],
            "{here}/nowhere: holds no episodes.jsonl or rounds.jsonl; it must be the directory of an evaluation or a "
            "run.",
        ),
        (["empty"], "empty: there are no finished episodes to report."),
        (["one", "--reference", "ppo"], "--reference ppo: was not played; there are none."),
    ],
)
def test_what_cannot_be_reported_is_told_in_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory(tmp_path / "empty", [])
    directory(tmp_path / "one", some("none", 1.0))
    monkeypatch.setattr(sys, "argv", ["esper.report", *arguments])
    with pytest.raises(SystemExit) as refused:
        main()
    assert str(refused.value) == sentence.replace("{here}", str(tmp_path))


def test_a_place_that_cannot_be_written_is_told_in_one_sentence(tmp_path: Path) -> None:
    where = directory(tmp_path / "one", some("none", 1.0))
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as refused:
        main([str(where), "--out", str(tmp_path / "file" / "out")])
    assert str(refused.value) == f"{tmp_path}/file/out: Not a directory."
