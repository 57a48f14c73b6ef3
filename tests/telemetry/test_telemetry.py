import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from esper.telemetry import ProgressDisplay, RoundWriter, draw_rounds, summary_table
from tests.ppo.fixtures_environments import MatchingEnv, make_collector, make_module, make_trainer


def train_with(callback: Any, rounds: int = 3, listen: bool = False) -> Any:
    env = MatchingEnv()
    module = make_module(env)
    collector = make_collector(module, env, listeners=[callback] if listen else [])
    make_trainer(rounds, callbacks=[callback], limit_val_batches=1.0, check_val_every_n_epoch=2).fit(
        module, datamodule=collector
    )
    return module


def test_every_round_is_a_line_and_only_validated_rounds_have_validation_metrics(tmp_path: Path) -> None:
    writer = RoundWriter(tmp_path)
    module = train_with(writer)
    lines = writer.lines()
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert ["validation/greedy_score" in line for line in lines] == [False, True, False]
    assert lines[-1]["decisions"] == module.counters.decisions
    assert lines[-1]["episode/score"] == module.latest_metrics["episode/score"]


def test_lines_of_rounds_that_run_again_are_removed(tmp_path: Path) -> None:
    old = [{"round": number, "decisions": 19 * number} for number in range(3)]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old) + '{"round": 9, "cut')
    writer = RoundWriter(tmp_path)
    train_with(writer, rounds=1)
    assert [line["round"] for line in writer.lines()] == [0, 1], "no checkpoint of rounds 1 and 2"


def test_a_terminal_shows_bars_over_rounds_and_steps() -> None:
    output = StringIO()
    train_with(ProgressDisplay(Console(file=output, force_terminal=True, width=120), rounds=3), listen=True)
    shown = output.getvalue()
    assert "rounds, score" in shown
    assert "training steps" in shown
    assert "round 1/3" not in shown


def test_without_a_terminal_a_line_is_printed_at_each_interval() -> None:
    output = StringIO()
    train_with(ProgressDisplay(Console(file=output, width=200), rounds=3, every=2), listen=True)
    lines = output.getvalue().strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("round 2/3  score ")


def test_callbacks_do_not_change_the_weights(tmp_path: Path) -> None:
    first = train_with(ProgressDisplay(Console(quiet=True), rounds=3), listen=True).state_dict()
    second = train_with(RoundWriter(tmp_path)).state_dict()
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.usefixtures("rendered_figures")
def test_a_run_ends_with_a_table_and_a_figure(tmp_path: Path) -> None:
    writer = RoundWriter(tmp_path)
    module = train_with(writer, rounds=4)
    output = StringIO()
    held_out = {name: value for name, value in module.latest_metrics.items() if name.startswith("validation/")}
    Console(file=output, width=120).print(summary_table(writer.lines(), held_out, 0.5))
    for row in ("first 2 rounds", "last 2 rounds", "best round", "held out, sampled", "held out, greedy"):
        assert row in output.getvalue()
    draw_rounds(writer.lines(), "a run", tmp_path / "rounds.png")
    with Image.open(tmp_path / "rounds.png") as image:
        assert image.size[0] > 1000
        colours = image.convert("RGB").getcolors(10**6)
        assert colours is not None
        assert len(colours) > 50, "the figure is not empty"
