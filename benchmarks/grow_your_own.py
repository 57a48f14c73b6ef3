"""Grow networks that know nothing of esper, at equal FLOPs: those of examples/grow_your_own.py and grow_gpt2.py.

    python benchmarks/grow_your_own.py                          8 seeds of each arm; continues where it was stopped
    python benchmarks/grow_your_own.py --model gpt2 --root DIR  4 seeds; DIR has TinyStories' train.txt and valid.txt
    python benchmarks/grow_your_own.py --report                 the table of what has finished

Every arm spends the same FLOPs: training, and measuring seeds at the price of forward passes. `bare` never grows,
`full` has a seed in every slot from the start, `general` is the trained controller. The learning rate falls as a
cosine of the share that is spent. All arms have the same initial weights and batches; the score is that of the test
split: accuracy in percent, or -100 x bits per byte. A run takes 20 to 40 seconds on one core.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import esper
from esper.config import load_preset
from esper.data import Data, DataError
from esper.evaluation.statistics import estimate, holm, paired_difference
from esper.rng import derive_seed, make_generator, seeded_init

EXAMPLES = Path(__file__).parent.parent / "examples"
FIRST_CHOICE = {"resnet": ["depthwise"], "gpt2": ["window"]}  # of `full`, as of the rules with one blueprint
ARMS = ("bare", "full", "gated", "fragrow", "tuned_rule", "general")
BUDGETS = {"resnet": 1.0e12, "gpt2": 1.0e12}  # FLOPs
SEEDS = {"resnet": 8, "gpt2": 4}
WIDTH = 120  # of the table
PROBE_BATCHES = 2  # validation batches that measure a seed


@dataclass(frozen=True)
class Task:
    """A network, its data and how it trains."""

    name: str
    data: Data
    build: Callable[[int], nn.Module]  # from the number of decisions; forward returns logits
    slots: list[str] | str
    causal: bool
    batch: int
    eval_batch: int


def load_example(name: str) -> ModuleType:
    """An example as a module; examples are not installed."""
    spec = spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_task(name: str, root: str | None, data: Data | None = None) -> Task:
    """A task by its name; `data` replaces the real data."""
    if name == "resnet":
        example = load_example("grow_your_own")
        images = load_preset("data/cifar10", resolution=16, root=root) if data is None else data
        slots = ["layer1", "layer2", "layer3"]
        return Task(name, images, lambda steps: example.ResNet(images.options, steps), slots, False, 64, 500)
    example = load_example("grow_gpt2")
    stories = example.load_stories(root) if data is None else data

    def build(steps: int) -> nn.Module:
        return example.StoryModel(stories.options, stories.block_size, steps)

    return Task(name, stories, build, example.SLOTS, True, 32, 128)


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, split: str, batches: int | None = None) -> tuple[float, float]:
    """Loss and score on a split, or on its first batches."""
    model.eval()
    losses, hits, count = torch.zeros(()), torch.zeros(()), 0
    for index, (x, y) in enumerate(task.data.batches(split, task.eval_batch)):
        if index == batches:
            break
        out, y = model(x).flatten(0, -2), y.flatten()
        losses += F.cross_entropy(out, y, reduction="sum")
        hits += (out.argmax(-1) == y).sum()
        count += len(y)
    model.train()
    loss = losses / count
    return loss.item(), float(task.data.score(split, loss, hits / count))


def decide(task: Task, arm: str, general: str) -> tuple[Any, dict[str, Any] | None]:
    """The controller of an arm and its settings."""
    if arm != "full":
        return {"bare": "none", "general": general}.get(arm, arm), None
    table = esper.slots(task.build(1), next(task.data.batches("train", 2)), slots=task.slots, causal=task.causal)
    entries = [{"at": 0.0, "slot": slot, "blueprint": FIRST_CHOICE[task.name]} for slot in table.names]
    return "schedule", {"entries": entries}


def train_until(
    share: float, model: nn.Module, optimizer: torch.optim.Optimizer, grower: Any, next_batch: Callable[[], Any]
) -> float | None:
    """Train until a share of the budget is spent; the mean loss."""
    losses: list[Tensor] = []
    while grower.spent_share < share:
        x, y = next_batch()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean()) if losses else None


def run(task: Task, arm: str, seed: int, *, budget: float, steps: int, general: str = "pretrained") -> dict[str, Any]:
    """Train a network under an arm; its record."""
    started = time.process_time()
    with seeded_init(derive_seed("weights", seed)):
        model = task.build(steps)
    [optimizer], [scheduler] = model.configure_optimizers()
    controller, settings = decide(task, arm, general)
    lead = 0 if settings is None else len(settings["entries"])  # decisions before the training
    stream = task.data.stream(task.batch, make_generator("data", seed))
    grower = esper.Grower(
        model, optimizer, example=next(task.data.batches("train", task.batch)), steps=steps + lead, slots=task.slots,
        controller=controller, settings=settings, causal=task.causal, schedulers=scheduler, budget_flops=budget,
        score_scale=1.0, evaluate_samples=PROBE_BATCHES * task.eval_batch, rng_seed=seed,
    )  # fmt: skip
    for _ in range(lead):
        loss, score = evaluate(model, task, "validation", 1)
        grower.step(val_loss=loss, score=score)
    for step in range(steps):
        train_loss = train_until((step + 1) / steps, model, optimizer, grower, stream.next)
        scheduler.step()
        loss, score = evaluate(model, task, "validation")
        probe = None if arm == "full" else lambda: evaluate(model, task, "validation", PROBE_BATCHES)
        grower.step(val_loss=loss, score=score, train_loss=train_loss, evaluate=probe)
    return {
        "model": task.name, "arm": arm, "controller": general if arm == "general" else None, "seed": seed,
        "budget": budget, "steps": steps, "data": task.data.name, "score": evaluate(model, task, "test")[1],
        "flops": grower.flops, "parameters": sum(p.numel() for p in model.parameters()),
        "grown": {seed["slot"]: seed["blueprint"] for seed in grower.summary()},
        "seconds": time.process_time() - started,
    }  # fmt: skip


def read_records(path: Path) -> list[dict[str, Any]]:
    """The finished runs; a line that was cut off by a kill is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a run the same."""
    return tuple(record[name] for name in ("model", "arm", "controller", "seed", "budget", "steps"))


def report(records: list[dict[str, Any]], console: Console) -> None:
    """Interquartile means and paired differences on the same seeds, with intervals of 95 %."""
    by_arm: dict[str, dict[int, dict[str, Any]]] = {}
    for record in records:
        by_arm.setdefault(record["arm"], {})[record["seed"]] = record
    if not by_arm:
        console.print("no run has finished")
        return
    seeds = sorted({seed for runs in by_arm.values() for seed in runs})
    scores = {
        arm: np.array([[runs[seed]["score"] if seed in runs else np.nan for seed in seeds]])
        for arm, runs in by_arm.items()
    }
    others = [arm for arm in by_arm if arm != "general" and "general" in by_arm]
    gaps = {arm: paired_difference([scores["general"]], [scores[arm]]) for arm in others}
    adjusted = dict(zip(others, holm([gaps[arm].p_value for arm in others]), strict=True))
    table = Table("arm", "seeds", "score", "parameters", "seeds kept", "general - arm", "p")
    for arm in sorted(by_arm, key=lambda arm: -estimate([scores[arm]]).value):
        runs, found = by_arm[arm].values(), estimate([scores[arm]])
        gap = gaps.get(arm)
        cells = (
            ["", ""] if gap is None else [f"{gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]", f"{adjusted[arm]:.3f}"]
        )
        parameters = np.mean([run["parameters"] for run in runs])
        kept = np.mean([len(run["grown"]) for run in runs])
        score = f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"
        table.add_row(arm, str(len(runs)), score, f"{parameters:,.0f}", f"{kept:.1f}", *cells)
    first = records[0]
    console.print(
        f"{first['model']} on {first['data']}, test split, {first['budget']:.3g} FLOPs, {first['steps']} decisions"
    )
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(BUDGETS), default="resnet")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--controller", default="pretrained", help="of the arm general: pretrained, or a checkpoint")
    parser.add_argument("--seeds", type=int, help="8 for resnet, 4 for gpt2")
    parser.add_argument("--budget", type=float, help="FLOPs of each run")
    parser.add_argument("--steps", type=int, default=20, help="decisions of each run")
    parser.add_argument("--root", help="directory of the data; default: ESPER_DATA or the cache")
    parser.add_argument("--out", type=Path, default=Path("outputs/grow_your_own.jsonl"))
    parser.add_argument("--report", action="store_true", help="run nothing")
    return parser.parse_args()


def main() -> None:
    options, console = parse_arguments(), Console(width=WIDTH)
    torch.set_num_threads(1)
    budget = options.budget or BUDGETS[options.model]
    same = {"model": options.model, "budget": budget, "steps": options.steps}
    wanted = [
        {**same, "arm": arm, "controller": options.controller if arm == "general" else None, "seed": seed}
        for seed in range(options.seeds or SEEDS[options.model])
        for arm in options.arms
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    finished = {key(record) for record in read_records(options.out)}
    missing = [] if options.report else [each for each in wanted if key(each) not in finished]
    try:
        task = make_task(options.model, options.root) if missing else None
    except DataError as error:
        raise SystemExit(str(error)) from None
    for each in missing:
        assert task is not None
        record = run(task, each["arm"], each["seed"], budget=budget, steps=options.steps, general=options.controller)
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        console.print(f"{each['arm']}, seed {each['seed']}: {record['score']:.2f} in {record['seconds']:.0f} s")
    keys = {key(each) for each in wanted}
    report([record for record in read_records(options.out) if key(record) in keys], console)


if __name__ == "__main__":
    main()
