"""What can be learned on the oracle with many tasks, and how much of it a controller learns.

    python benchmarks/oracle_tasks.py                     the scores of references on each split, in a minute
    python benchmarks/oracle_tasks.py --train             trains two controllers, and compares them
    python benchmarks/oracle_tasks.py --train --seeds 1 ppo.lr=1e-3      one, with other settings
    python benchmarks/oracle_tasks.py --ablation --seeds 5               the recipe, and each part left out
    python benchmarks/oracle_tasks.py --table             the table of an ablation so far, without any training

`optimum` knows the task. `probe then commit` is the best of a family of rules, and `fixed schedule` the best of all
that are the same for every task; both are chosen on the training tasks. Scores of plans are without noise. Printed for
a controller is the share that it reaches of what `probe then commit` gains, over no growth and over the fixed schedule.

An ablation appends one line for each finished run to FILE (`--file`), and skips runs that are there already.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from omegaconf import DictConfig
from oracle_transfer import load_policy, run_episodes
from rich.console import Console
from rich.table import Table

from esper.config import build_vector_env, compose_config
from esper.controllers import PolicyController
from esper.environment import TaskOracle
from esper.environment.oracle_plans import best_fixed, no_growth, optimum, plan_scores
from esper.environment.oracle_probe import ProbeRules, run_probes, tune_probes
from esper.environment.oracle_tasks import SPLITS
from esper.ppo import LAST, read_checkpoint
from esper.training import configure_process, train

EPISODES = 4  # of each task
VALIDATED = 5  # rounds between validations
SHOWN = ("train", "test", "heldout")
FILE = Path("outputs/oracle_tasks_ablation.jsonl")
ENOUGH = 0.8  # share of the gain of probe then commit whose number of episodes is printed
Scores = dict[str, dict[str, float]]  # by split, then by reference

FROM_CHANCE = ("start=null", "ppo=many_tasks", "rounds=46")  # with larger steps and the same number of episodes
PRESENT = ("ppo=few_episodes", "actions=core", "ppo.entropy_rounds=93", "environment.envs=32", "rounds=93")
VARIANTS = {  # changes of the recipe, which is the experiment
    "recipe": (),
    "present learner": ("start=null", *PRESENT),
    "without start=plans": FROM_CHANCE,
    "without actions=lean": ("actions=core",),
    "without leave_one_out": ("ppo.baseline=critic",),
    "without a separate critic": ("ppo.critic=shared", "ppo.critic_warmup=0"),
    "without joint entropy, skip_forced": ("ppo.entropy_weighting=available", "ppo.skip_forced=false"),
    "plans without trials": ("ppo.cloning_trials=0",),
    "trials together": ("ppo.cloning_together=true",),
    "cloning alone": ("rounds=1",),  # in the first round only the critic learns
}


def make_config(*overrides: str) -> DictConfig:
    return compose_config("run", ["+experiment=oracle_tasks", "logger=none", "callbacks.dashboard=null", *overrides])


def make_oracle(split: str, overrides: Sequence[str] = ()) -> TaskOracle:
    """An oracle whose rounds run every task of a split."""
    sizes = [f"environment.repeats={EPISODES}", f"environment.envs={EPISODES * len(SPLITS[split])}"]
    oracle: TaskOracle = build_vector_env(make_config(*overrides, f"environment.split={split}", *sizes))
    return oracle


def score_references(console: Console) -> tuple[Scores, ProbeRules]:
    """The mean score of each reference by split, and the rule of probe then commit; prints both."""
    oracle = make_oracle("train")
    names = oracle.space.blueprints
    schedule = best_fixed(oracle.tasks(SPLITS["train"]), oracle.steps)
    parts = ", ".join("nothing" if index < 0 else names[index] for index in schedule.blueprints)
    order = "output" if schedule.from_output else "input"
    console.print(
        f"fixed schedule: {parts} (by depth), from step {schedule.start} on, next to the {order} first", soft_wrap=True
    )
    rule = tune_probes(oracle)
    tried = ", ".join(names[index] for index in rule.candidates[0].tolist() if index >= 0)
    console.print(
        f"probe then commit: {tried}, from step {rule.start.item()} on, {rule.patience.item()} steps each; planted if "
        f"worth {rule.threshold.item():.1f} points at {rule.price.item():.1f} for the host's cost; "
        f"no further probes at {rule.enough.item():.1f}",
        soft_wrap=True,
    )
    scores = {}
    for split in SHOWN:
        oracle = make_oracle(split)
        tasks, steps = oracle.tasks(SPLITS[split]), oracle.steps
        seeds = [oracle.episode_seed("probe then commit", 0, index) for index in range(oracle.envs)]
        by_name = {
            "no growth": plan_scores(tasks, no_growth(tasks), steps),
            "fixed schedule": plan_scores(tasks, schedule.plans(tasks.exists), steps),
            "probe then commit": run_probes(oracle, rule[torch.zeros(len(seeds), dtype=torch.int64)], seeds),
            "optimum": optimum(tasks, steps)[1],
        }
        scores[split] = {name: float(values.mean()) for name, values in by_name.items()}
    table = Table("tasks", *scores["train"])
    for split, by_reference in scores.items():
        table.add_row(split, *[f"{score:.2f}" for score in by_reference.values()])
    console.print(table)
    return scores, rule


def score_validation(oracle: TaskOracle, rule: ProbeRules, seed: int) -> dict[str, float]:
    """The references of the episodes that validate a training run."""
    episode_seeds = [oracle.episode_seed("validation", seed, index) for index in range(oracle.envs)]
    tasks = oracle.tasks([oracle.task_number(episode_seed) for episode_seed in episode_seeds])
    rules = rule[torch.zeros(oracle.envs, dtype=torch.int64)]
    by_name = {
        "no growth": plan_scores(tasks, no_growth(tasks), oracle.steps),
        "probe then commit": run_probes(oracle, rules, episode_seeds),
    }
    return {name: float(scores.mean()) for name, scores in by_name.items()}


def run_training(seed: int, rule: ProbeRules, overrides: Sequence[str]) -> dict[str, Any]:
    """Train a controller: its scores by split, sampled and greedy, and those of validation by episodes."""
    config = make_config(f"seed={seed}", f"validate_every={VALIDATED}", "environment.split=validation", *overrides)
    with tempfile.TemporaryDirectory() as directory:
        train(config, Path(directory), Console(quiet=True))
        path = Path(directory) / "checkpoints" / LAST
        metadata = read_checkpoint(path).metadata
        if metadata.counters.rounds < config.rounds:
            raise SystemExit(f"stopped after round {metadata.counters.rounds} of {config.rounds}.")
        lines = [json.loads(line) for line in (Path(directory) / "rounds.jsonl").read_text().splitlines()]
        policy = load_policy(path, make_oracle("test", overrides), config)
    start = metadata.start_cost.get("episodes") or 0
    return {
        "curve": [
            [start + line["decisions"] / config.environment.steps, line["validation/sampled_score"]]
            for line in lines
            if line.get("validation/sampled_score") is not None
        ],
        "references": score_validation(build_vector_env(config), rule, seed),
        "scores": {
            split: [
                run_episodes(make_oracle(split, overrides), PolicyController(policy, greedy=g)) for g in (False, True)
            ]
            for split in SHOWN
        },
    }


def share(score: float, references: dict[str, float], over: str = "no growth") -> float:
    """The share of what probe then commit gains."""
    return (score - references[over]) / (references["probe then commit"] - references[over])


def episodes_until(run: dict[str, Any]) -> float:
    """Episodes until a validation reaches ENOUGH; inf if none does."""
    reached = (episodes for episodes, score in run["curve"] if share(score, run["references"]) >= ENOUGH)
    return next(reached, float("inf"))


def compare_runs(console: Console, references: Scores, rule: ProbeRules, seeds: int, overrides: Sequence[str]) -> None:
    """Train some controllers, and print how each compares with the references."""
    table = Table("seed", "tasks", "sampled", "greedy", "share over no growth", "share over fixed schedule")
    for seed in range(seeds):
        for split, (sampled, greedy) in run_training(seed, rule, overrides)["scores"].items():
            shares = [share(sampled, references[split], over) for over in ("no growth", "fixed schedule")]
            table.add_row(str(seed), split, f"{sampled:.2f}", f"{greedy:.2f}", *[f"{each:.0%}" for each in shares])
    console.print(table)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_line(path: Path, line: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def run_ablation(console: Console, path: Path, variants: Sequence[str], seeds: int, overrides: Sequence[str]) -> None:
    """Train the variants with every seed that is not in the file yet; the first seed of all variants comes first."""
    known = [line for line in read_lines(path) if "rule" in line]
    if known:
        rule = ProbeRules(**{name: torch.tensor(values) for name, values in known[0]["rule"].items()})
    else:
        references, rule = score_references(console)
        append_line(path, {"rule": {name: each.tolist() for name, each in vars(rule).items()}, "scores": references})
    for seed in range(seeds):
        for name in variants:
            chosen = [*VARIANTS[name], *overrides]
            key = {"variant": name, "seed": seed, "overrides": chosen}
            if not any(all(line.get(part) == value for part, value in key.items()) for line in read_lines(path)):
                append_line(path, {**key, **run_training(seed, rule, chosen)})
                console.print(f"{name}, seed {seed}: finished")
    print_ablation(console, path)


def print_ablation(console: Console, path: Path) -> None:
    """Print the table of all finished runs: means over seeds, with standard deviations."""
    lines = read_lines(path)
    references = next((line["scores"] for line in lines if "rule" in line), None)
    if references is None:
        raise SystemExit(f"{path}: has no finished runs; --ablation trains them.")
    columns = [text for split in ("test", "heldout") for text in (split, f"share on {split}")]
    table = Table("variant", "seeds", *columns, f"episodes to {ENOUGH:.0%}")
    for name in VARIANTS:
        runs = [line for line in lines if line.get("variant") == name]
        if not runs:
            continue
        cells = []
        for split in ("test", "heldout"):
            scores = [run["scores"][split][0] for run in runs]
            spread = f" ± {stdev(scores):.2f}" if len(scores) > 1 else ""
            cells += [f"{mean(scores):.2f}{spread}", f"{share(mean(scores), references[split]):.0%}"]
        reached = sorted(episodes_until(run) for run in runs)
        middle = reached[len(reached) // 2]
        table.add_row(name, str(len(runs)), *cells, "never" if middle == float("inf") else f"{middle:,.0f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train controllers")
    parser.add_argument("--ablation", action="store_true", help="train the recipe and each part left out; resumes")
    parser.add_argument("--table", action="store_true", help="print the table of an ablation so far")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="of an ablation; all if none is named")
    parser.add_argument("--file", type=Path, default=FILE, help=f"of an ablation, default {FILE}")
    parser.add_argument("--seeds", type=int, default=2, help="controllers to train")
    parser.add_argument("overrides", nargs="*", help="of the training run")
    options = parser.parse_args()
    configure_process()
    console = Console()
    if options.table:
        print_ablation(console, options.file)
    elif options.ablation:
        run_ablation(console, options.file, options.variant or list(VARIANTS), options.seeds, options.overrides)
    else:
        references, rule = score_references(console)
        if options.train:
            compare_runs(console, references, rule, options.seeds, options.overrides)


if __name__ == "__main__":
    main()
