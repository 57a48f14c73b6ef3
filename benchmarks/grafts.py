"""What makes a graft pay: one factor at a time, at equal FLOPs.

    python benchmarks/grafts.py            8 episodes of each setting on CIFAR-10; continues where it was stopped
    python benchmarks/grafts.py --report   the table of what has finished

A `depthwise` seed is germinated in each slot of `cifar_baseline` (8 channels), from half of 200 GFLOPs on, one in each
decision. The first setting is `lifecycle=quick` with the defaults of `cifar_baseline_ppo`; every other one changes one
factor. All settings run on the same episode seeds.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from esper.config import build_environment, compose_config
from esper.controllers import NoGrowth, ScheduleController, ScheduleEntry
from esper.environment import Environment, EpisodeStart

BLUEPRINT = "depthwise"
SHARE = 0.5  # of the budget, at which the first seed germinates
RANDOM = "environment.seed_init=random"
SETTINGS: dict[str, list[str]] = {  # overrides of +experiment=cifar_baseline_ppo
    "quick": [],
    "isolation of 1 decision": ["lifecycle.gates.training.dwell=1"],
    "isolation of 2 decisions": ["lifecycle.gates.training.dwell=2"],
    "seed learning rate x 0.5": ["optimizer.seed_lr=0.05"],
    "seed learning rate x 2": ["optimizer.seed_lr=0.2"],
    "seed learning rate x 4": ["optimizer.seed_lr=0.4"],
    "zero last layer, ramp of 1 decision": ["lifecycle.ramp=2"],
    "zero last layer, ramp of 2 decisions": ["lifecycle.ramp=3"],
    "random last layer, no ramp": [RANDOM],
    "random last layer, ramp of 1 decision": [RANDOM, "lifecycle.ramp=2"],
    "random last layer, ramp of 2 decisions": [RANDOM, "lifecycle.ramp=3"],
    "no co-adaptation": ["environment.coadapt=false"],
    "wsd instead of cosine": ["optimizer.schedule.shape=wsd"],
    "no warm-up of new seeds": ["optimizer.seed_warmup=0"],
    "warm-up of 5 %": ["optimizer.seed_warmup=0.05"],
}
STATIC = {
    "no seeds": 1.0,
    "seeds from the start": 0.0,
    "all seeds at 0.25": 0.25,
    "all seeds at 0.5": 0.5,
}  # fossils at


def run_setting(env: Environment, name: str, episode_seeds: list[int]) -> list[float]:
    """Test scores of one setting, by episode seed."""
    fossils = dict.fromkeys(env.space.slots, (BLUEPRINT, "ADD"))
    start = EpisodeStart(fossils=fossils, at=STATIC[name], measured=False) if name in STATIC else None
    entries = [ScheduleEntry(SHARE, slot, [BLUEPRINT]) for slot in env.space.slots]
    controller = ScheduleController(env.space, entries) if start is None else NoGrowth(env.space)
    observation = env.reset(episode_seeds, [start or EpisodeStart(measured=False)] * len(episode_seeds))
    memory = controller.begin(episode_seeds)
    for _ in range(env.steps):
        action, memory = controller.act(observation, memory)  # type: ignore[arg-type]
        observation = env.step(action).observation
    scores: list[float] = env.test()["score"].tolist()
    return scores


def read(path: Path) -> dict[str, list[float]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {entry["setting"]: entry["scores"] for entry in map(json.loads, lines)}


def report(results: dict[str, list[float]], console: Console) -> None:
    """Mean, standard deviation, and the paired difference to the first setting with its standard error."""
    table = Table("setting", "test score", "sd", "difference", "standard error")
    for name, scores in results.items():
        cells = ["", ""]
        if name != "quick" and "quick" in results:
            gaps = np.subtract(scores, results["quick"])
            cells = [f"{gaps.mean():+.2f}", f"{gaps.std(ddof=1) / len(gaps) ** 0.5:.2f}"]
        table.add_row(name, f"{np.mean(scores):.2f}", f"{np.std(scores, ddof=1):.2f}", *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("outputs/grafts.jsonl"))
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("overrides", nargs="*", help="of the configuration, for all settings")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    settings = [] if options.report else [*SETTINGS, *STATIC]
    for name in settings:
        if name in read(options.out):
            continue
        changes = [*SETTINGS.get(name, []), f"environment.envs={options.episodes}", *options.overrides]
        env = build_environment(compose_config("evaluate", ["+experiment=cifar_baseline_ppo", *changes]))
        seeds = [env.episode_seed("grafts", 0, index) for index in range(options.episodes)]
        scores = run_setting(env, name, seeds)
        env.close()
        with options.out.open("a") as file:
            file.write(json.dumps({"setting": name, "scores": scores}) + "\n")
        console.print(f"{name}: {np.mean(scores):.2f}")
    report(read(options.out), console)


if __name__ == "__main__":
    main()
