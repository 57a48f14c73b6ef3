"""python -m esper.evaluate: compare controllers on the same episodes."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from esper.config import CONF, build, build_environment, check, entry, grows
from esper.controllers import Controller
from esper.data import DataError
from esper.environment import Environment
from esper.evaluation.runner import run_episodes
from esper.evaluation.summary import summarise, table
from esper.records import Writer, read
from esper.seeding import derive
from esper.telemetry import timeline

WIDTH = 120  # columns of what is printed into a file


def build_controller(config: DictConfig, name: str, environment: Environment) -> Controller[Any]:
    changes = {"actions": recorded_actions(config)} if name == "replay" else {}
    controller: Controller[Any] = build(config.controller[name], space=environment.space, _partial_=False, **changes)
    return controller


def recorded_actions(config: DictConfig) -> list[dict[str, str]]:
    """The actions of the episode that is to be replayed."""
    path, line = config.replay.records, config.replay.line
    if path is None:
        raise ValueError("replay.records=null: must name an episodes.jsonl for the controller replay.")
    episodes = list(read(Path(path)))
    if not episodes:
        raise ValueError(f"replay.records={path}: holds no episodes.")
    if not 0 <= line < len(episodes):
        raise ValueError(f"replay.line={line}: must be between 0 and {len(episodes) - 1}.")
    try:
        return [dict(step["action"]) for step in episodes[line]["steps"]]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"replay.records={path}: line {line} is no episode record.") from None


def check_arms(config: DictConfig) -> None:
    """Refuse what cannot be compared, before anything is built."""
    if not grows(config):
        raise ValueError(f"environment: {config.environment._target_} grows no hosts; there is nothing to compare.")
    if config.episodes < 1 or not config.controllers:
        raise ValueError(
            f"episodes={config.episodes}, controllers={list(config.controllers)}: must be at least one each."
        )
    for name in config.controllers:
        if name not in config.controller:
            raise ValueError(f"controllers: {name} is unknown; there are {', '.join(config.controller)}.")
    if "replay" in config.controllers:
        recorded_actions(config)


def evaluate(config: DictConfig, directory: Path, console: Console) -> dict[str, Any]:
    """Run every controller on every episode; records, summary and picture go into `directory`."""
    check_arms(config)
    check(config)
    rounds = -(-config.episodes // config.environment.envs)
    environment = build_environment(config, -(-config.episodes // rounds))  # so that no round has idle environments
    controllers = {name: build_controller(config, name, environment) for name in config.controllers}
    seeds = [derive("evaluation", config.seed, index) for index in range(config.episodes)]
    console.print(f"{environment.data.name}, {len(seeds)} episodes of {environment.steps} steps each -> {directory}")
    finished: dict[str, list[dict[str, Any]]] = {}
    writer = Writer(directory / "episodes.jsonl", fresh=True)
    about = {"config": OmegaConf.to_container(config, resolve=True)}
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True) as progress:
            task = progress.add_task("", total=len(controllers) * rounds * environment.steps)
            for name, controller in controllers.items():
                progress.update(task, description=name)
                advance = partial(progress.advance, task)
                for line in run_episodes(environment, controller, seeds, {"controller": name, **about}, advance):
                    writer.write(line)
                    finished.setdefault(name, []).append(line)
    except KeyboardInterrupt:
        console.print("interrupted; what is finished is kept")
    finally:
        writer.close()
        environment.close()
    summaries = {name: summarise(episodes) for name, episodes in finished.items()}
    if summaries:
        conclude(config, directory, console, environment, finished, summaries)
    return summaries


def conclude(
    config: DictConfig,
    directory: Path,
    console: Console,
    environment: Environment,
    finished: dict[str, list[dict[str, Any]]],
    summaries: dict[str, Any],
) -> None:
    """Table, JSON and picture."""
    title = f"score [95 % interval] on {environment.data.name}: test points - ln(parameters / host parameters)"
    console.print(table(summaries, title))
    result = {"data": environment.data.name, "seed": config.seed, "controllers": summaries}
    (directory / "evaluation.json").write_text(json.dumps(result, indent=2))
    median = {name: sorted(lines, key=lambda line: line["score"])[len(lines) // 2] for name, lines in finished.items()}
    titled = {
        f"{name}: test {line['test_score']:.1f}, {line['parameters']:,.0f} parameters": line
        for name, line in median.items()
    }
    timeline(titled).savefig(directory / "timeline.png", dpi=130)
    console.print(f"{directory}/episodes.jsonl, evaluation.json, timeline.png (the median episode of each)")


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="evaluate")
def main(config: DictConfig) -> None:
    torch.set_num_threads(1)  # environments run in threads of their own
    try:
        console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
        evaluate(config, Path(HydraConfig.get().runtime.output_dir), console)
    except (ValueError, DataError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    entry(main, "evaluate")
