import json
from io import StringIO
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from esper.ppo import Collector
from esper.telemetry import ProgressDisplay, RoundWriter, draw_rounds, summary_table
from tests.ppo.fixtures_environments import Locks, learner, trainer


def run(callback: Any, rounds: int = 3, watch: bool = False) -> Any:
    world = Locks()
    module = learner(world)
    collector = Collector(world, run_seed=0, warmup=0, listeners=[callback] if watch else [])
    trainer(rounds, callbacks=[callback], limit_val_batches=1.0, check_val_every_n_epoch=2).fit(
        module, datamodule=collector
    )
    return module


def test_every_round_is_a_line_and_held_out_figures_stand_only_where_they_were_measured(tmp_path: Path) -> None:
    records = RoundWriter(tmp_path)
    module = run(records)
    lines = records.lines()
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert ["validation/greedy_score" in line for line in lines] == [False, True, False]
    assert lines[-1]["decisions"] == module.counters.decisions
    assert lines[-1]["episode/score"] == module.latest_metrics["episode/score"]


def test_lines_of_rounds_that_are_played_again_are_taken_back(tmp_path: Path) -> None:
    old = [{"round": number, "decisions": 19 * number} for number in range(3)]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old) + '{"round": 9, "cut')
    records = RoundWriter(tmp_path)
    run(records, rounds=1)
    assert [line["round"] for line in records.lines()] == [0, 1], "nothing had been saved of rounds 1 and 2"


def test_a_terminal_sees_bars_over_rounds_and_steps() -> None:
    seen = StringIO()
    run(ProgressDisplay(Console(file=seen, force_terminal=True, width=120), rounds=3), watch=True)
    shown = seen.getvalue()
    assert "rounds, score" in shown
    assert "training steps" in shown
    assert "round 1/3" not in shown


def test_a_file_gets_a_line_every_so_many_rounds() -> None:
    seen = StringIO()
    run(ProgressDisplay(Console(file=seen, width=200), rounds=3, every=2), watch=True)
    lines = seen.getvalue().strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("round 2/3  score ")


def test_watching_changes_nothing(tmp_path: Path) -> None:
    first = run(ProgressDisplay(Console(quiet=True), rounds=3), watch=True).state_dict()
    second = run(RoundWriter(tmp_path)).state_dict()
    assert all((first[name] == second[name]).all() for name in first)


def test_a_run_ends_in_a_table_and_a_picture(tmp_path: Path) -> None:
    records = RoundWriter(tmp_path)
    module = run(records, rounds=4)
    seen = StringIO()
    held_out = {name: value for name, value in module.latest_metrics.items() if name.startswith("validation/")}
    Console(file=seen, width=120).print(summary_table(records.lines(), held_out, 0.5))
    for row in ("first 2 rounds", "last 2 rounds", "best round", "held out, sampled", "held out, greedy"):
        assert row in seen.getvalue()
    draw_rounds(records.lines(), "a run", tmp_path / "rounds.png")
    with Image.open(tmp_path / "rounds.png") as picture:
        assert picture.size[0] > 1000
        colours = picture.convert("RGB").getcolors(10**6)
        assert colours is not None
        assert len(colours) > 50, "something is drawn"
