import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from esper.controllers import PRETRAINED
from esper.ppo import read_checkpoint
from esper.records import EpisodeRecord
from esper.report import main
from tests.evaluation.fixtures_episodes import make_episode, make_episodes, write_episodes


def make_directory(path: Path, episodes: list[EpisodeRecord], **provenance: object) -> Path:
    path.mkdir(parents=True)
    write_episodes(path / "episodes.jsonl", episodes)
    if provenance:
        (path / "evaluation.json").write_text(json.dumps(provenance))
    return path


def ten_episodes(arm: str, score: float, **changes: object) -> list[EpisodeRecord]:
    return make_episodes(arm, [score + number for number in range(10)], **changes)


def test_several_runs_make_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = make_directory(
        tmp_path / "a", ten_episodes("none", 30.0), commands=["command one"], versions={"torch": "1"}
    )
    second = make_directory(
        tmp_path / "b", ten_episodes("ppo", 40.0, checkpoint="x"), commands=["command two"], reference="ppo"
    )
    main([str(first), str(second), "--out", str(tmp_path / "out")])
    text = (tmp_path / "out/report.md").read_text()
    assert (
        "ppo, with 1.00 times the host's parameters at the end, scores above none: a result of this controller" in text
    )
    assert "command one\ncommand two\npython" in text  # and the command of the report
    assert "ppo - arm" in capsys.readouterr().out
    main([str(first)])
    assert (first / "report.html").exists()
    assert json.loads((first / "evaluation.json").read_text())["commands"] == ["command one"]


def test_the_last_record_of_a_repeated_episode_counts(tmp_path: Path) -> None:
    again = [
        make_episode("schedule", 1, 5.0, inputs_digest="a", variant="a"),
        make_episode("schedule", 1, 7.0, inputs_digest="b", variant="b"),
    ]
    where = make_directory(tmp_path / "a", again)
    main([str(where)])
    (results,) = json.loads((where / "evaluation.json").read_text())["tasks"].values()
    assert list(results) == ["schedule"]
    assert results["schedule"]["score"]["value"] == 7


def test_remarks_about_episodes_are_not_saved_with_the_provenance(tmp_path: Path) -> None:
    where = make_directory(
        tmp_path / "a", [make_episode(episode_seed=1, score=None), make_episode(episode_seed=2, score=4.0)]
    )
    main([str(where)])
    assert "counts as the lowest score of all arms" in (where / "report.md").read_text()
    assert json.loads((where / "evaluation.json").read_text())["remarks"] == []


def test_lines_that_cannot_be_read_are_counted_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = make_directory(tmp_path / "a", ten_episodes("none", 30.0))
    with (where / "episodes.jsonl").open("a") as file:
        file.write(
            '{"version": 1, "steps": []}\n[1]\n\n'
            + json.dumps(make_episode(episode_seed=9).to_dict())
            + '\n{"version": 2, "steps": [], '
        )
    main([str(where)])
    output = capsys.readouterr().out + (where / "report.md").read_text()
    path = where / "episodes.jsonl"
    for complaint in (
        f"{path}: line 11 is an episode record of version 1; must be 2 or 3; it is left out.",
        f"{path}: line 12 is not an episode record; it is left out.",
        f"{path}: line 13 is not JSON; it is left out.",
        f"{path}: line 15 was cut off; it is left out.",
    ):
        assert output.count(complaint) == 2  # on the screen and in the report
    assert "4 lines could not be read, 11 could." in output


def test_held_out_episodes_of_a_training_run_are_reported_as_validation(tmp_path: Path) -> None:
    def episodes_of(kind: str, number: int, score: float) -> list[EpisodeRecord]:
        episodes = ten_episodes("ppo", score, kind=kind, round=number)
        return [replace(episode, split="validation", test_score=None, config={}) for episode in episodes]

    earlier = [*episodes_of("training", 2, 1.0), *episodes_of("greedy", 1, 10.0)]
    where = make_directory(
        tmp_path / "run", [*earlier, *episodes_of("greedy", 2, 40.0), *episodes_of("sampled", 2, 35.0)]
    )
    main([str(where)])
    tasks = json.loads((where / "evaluation.json").read_text())["tasks"]
    assert list(tasks) == ["a_host on synthetic, validation split"]
    results = tasks["a_host on synthetic, validation split"]
    assert sorted(results) == ["ppo, greedy", "ppo, sampled"]
    assert results["ppo, greedy"]["score"]["value"] == 44.5


def make_run(path: Path, run_seed: int, scores: list[float], *more: str) -> Path:
    """The directory of a training run with a round for each score and two held-out episodes of each kind."""
    episodes = [
        make_episode("ppo", 100 * run_seed + number, 40.0 + run_seed + number, kind=kind, round=len(scores))
        for kind in ("greedy", "sampled")
        for number in range(2)
    ]
    make_directory(path, [replace(episode, split="validation", test_score=None) for episode in episodes])
    rounds = [
        {"round": number, "decisions": 160 * number, "episode/score": score, "losses/explained_variance": 0.6,
         "policy/kl": 0.02, "policy/entropy_op": 0.5, "policy/entropy_bonus": 0.01, "time/environment": 60.0}
        for number, score in enumerate(scores, 1)
    ]  # fmt: skip
    rounds[-1] |= {"validation/greedy_score": 41.0, "validation/sampled_score": 40.5}
    (path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rounds))
    (path / ".hydra").mkdir()
    (path / ".hydra/config.yaml").write_text("name: tried\n")
    overrides = ["+experiment=cifar_ppo", f"seed={run_seed}", *more]
    (path / ".hydra/overrides.yaml").write_text("".join(f"- {override}\n" for override in overrides))
    return path


def make_sweep(path: Path, *runs: tuple[str, ...]) -> Path:
    """The directory of a sweep with two run seeds for each list of overrides."""
    for number, overrides in enumerate(runs):
        for run_seed in range(2):
            make_run(path / str(2 * number + run_seed), run_seed, [30.0, 31.0, 32.0, 40.0 + run_seed], *overrides)
    (path / "multirun.yaml").touch()
    return path


@pytest.mark.usefixtures("rendered_figures")
def test_training_runs_are_reported_with_and_without_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = make_sweep(tmp_path / "sweep", ())
    main([str(runs), "--out", str(tmp_path / "runs")])
    text = (tmp_path / "runs/report.md").read_text()
    (results,) = json.loads((tmp_path / "runs/evaluation.json").read_text())["tasks"].values()
    assert {name: (arm["controllers"], arm["seeds"], arm["episodes"]) for name, arm in results.items()} == {
        "ppo, greedy": (2, 2, 4), "ppo, sampled": (2, 2, 4)
    }  # fmt: skip
    assert "The unit is the trained controller, of which there are 2" in text
    assert "| seed=1 | 4 | 30.00 | 41.00 | 41.00 | 40.50 | 0.60 | 1.00 | 0.50 | - | - | 4.0 |" in text
    assert (tmp_path / "runs/pictures/learning0.png").stat().st_size > 10_000
    assert "python -m esper.run +experiment=cifar_ppo seed=1" in text
    assert "seed=0" in capsys.readouterr().out

    evaluation = make_directory(tmp_path / "evaluation", ten_episodes("ppo", 40.0))
    main([str(runs), str(evaluation), "--out", str(tmp_path / "both")])
    text = (tmp_path / "both/report.md").read_text()
    assert "a_host on synthetic, test split" in text
    assert "## Training" in text
    assert "learning0" in (tmp_path / "both/report.html").read_text()
    assert "ppo, greedy" not in text


@pytest.mark.usefixtures("rendered_figures")
def test_a_saved_controller_has_its_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(["pretrained", "--out", "report"])
    text = Path("report/report.md").read_text()
    assert "esper: cifar_ppo, cifar_blind on cifar10" in text
    assert f"| {read_checkpoint(PRETRAINED['pretrained']).metadata.counters.rounds} |" in text
    assert "python -m esper.run +experiment=cifar_ppo" in text
    assert Path("report/pictures/learning0.png").stat().st_size > 10_000
    main([str(PRETRAINED["pretrained"])])
    assert next(Path("outputs/report").glob("*/report.md")).is_file()
    Path("other.txt").write_text("not a controller")
    with pytest.raises(SystemExit, match=r"other\.txt: "):
        main(["other.txt"])


def test_runs_with_different_settings_are_separate_arms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = make_sweep(tmp_path / "sweep", ("slots.names=[a]",), ("slots.names=[b]",))
    main([str(runs)])
    (results,) = json.loads((runs / "evaluation.json").read_text())["tasks"].values()
    assert {arm["controllers"] for arm in results.values()} == {2}
    assert sorted(results) == [f"slots.names=[{slot}], {kind}" for slot in "ab" for kind in ("greedy", "sampled")]
    assert "held-out episodes of training runs, greedy" in (runs / "report.md").read_text()
    assert "slots.names=[b]" in capsys.readouterr().out.replace("\n", "")


def test_a_job_without_records_is_remarked_and_a_run_without_episodes_has_its_curves(tmp_path: Path) -> None:
    runs = make_sweep(tmp_path / "sweep", ())
    (runs / "1/episodes.jsonl").unlink()
    (runs / "1/rounds.jsonl").unlink()
    (runs / "0/episodes.jsonl").unlink()
    main([str(runs)])
    text = (runs / "report.md").read_text()
    assert f"{runs}/1: has no records; it is left out." in text
    assert "learning0.png" in text
    assert "what it is" not in text
    assert "The question" not in text


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("rounds.jsonl", "3\n", "rounds.jsonl: line 1 is not a round record."),
        ("rounds.jsonl", "what\n", "rounds.jsonl: line 1 is not a round record."),
        ("rounds.jsonl", '{"episode/score": 3}\n', "rounds.jsonl: line 1 is not a round record."),
        (".hydra/overrides.yaml", "a: [", ".hydra/overrides.yaml: cannot be read."),
        (".hydra/config.yaml", "a: [", ".hydra/config.yaml: cannot be read."),
    ],
)
def test_an_unreadable_run_is_one_sentence(file: str, content: str, sentence: str, tmp_path: Path) -> None:
    where = make_run(tmp_path / "run", 0, [30.0])
    (where / file).write_text(content)
    with pytest.raises(SystemExit) as error:
        main([str(where)])
    assert str(error.value) == f"{where}/{sentence}"


def test_consecutive_lines_with_the_same_flaw_are_one_remark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = make_directory(tmp_path / "a", [*ten_episodes("none", 30.0)])
    with (where / "episodes.jsonl").open("a") as file:
        file.write("[1]\n[2]\n[3]\n{}\n" + json.dumps(make_episode(episode_seed=11).to_dict()) + "\n[4]\n")
    main([str(where)])
    output = capsys.readouterr().out
    assert "each of lines 11 to 14 is not an episode record; they are left out." in output
    assert "line 16 is not an episode record; it is left out." in output
    assert "5 lines could not be read, 11 could." in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["nowhere"],
            "{here}/nowhere: must be an evaluation or a run with episodes.jsonl or rounds.jsonl.",
        ),
        (["empty"], "empty: there are no finished episodes to report."),
        (["one", "--reference", "ppo"], "--reference ppo: must be one of none."),
    ],
)
def test_a_report_that_cannot_be_written_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_directory(tmp_path / "empty", [])
    make_directory(tmp_path / "one", ten_episodes("none", 1.0))
    monkeypatch.setattr(sys, "argv", ["esper.report", *arguments])
    with pytest.raises(SystemExit) as error:
        main()
    assert str(error.value) == sentence.replace("{here}", str(tmp_path))


def test_an_output_directory_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    where = make_directory(tmp_path / "one", ten_episodes("none", 1.0))
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as error:
        main([str(where), "--out", str(tmp_path / "file" / "out")])
    assert str(error.value) == f"{tmp_path}/file/out: Not a directory."
