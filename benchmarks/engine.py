"""The speed of the environment that trains N hosts, as ratios measured in one interleaved run.

    python benchmarks/engine.py            about five minutes on two cores; nothing is downloaded
    python benchmarks/engine.py --tasks cifar_ppo --repeats 10

A row is a task without seeds, or with three blended seeds whose contributions are measured in every step. Columns:

- train / limit: training batches of one host against a bare loop with the same network, data stream, memory format and
  fused optimizer, which neither clips nor measures anything; one thread each
- env / plain: whole steps of all hosts, with validation and contributions, in one worker process for each core, against
  a plain training loop in contiguous (NCHW) memory format with torch's own threads, which trains such a network on as
  many samples and measures nothing
- env / bare: the same against a plain loop that trains the host without seeds
- workers / threads: workers against threads of one process
- workers / one: all workers against a single one
- episodes / hour: episodes of 20 steps with the workers
- memory: proportional memory of this process and the workers
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from esper.config import build, build_environment, compose_config
from esper.environment import Environment
from esper.environment.host_run import HostRun, StepPlan
from esper.environment.host_runs import HostRuns, RunOrigin
from esper.environment.parallel import available_cores, place_runs
from esper.growth import Mode, SeedSetting
from esper.hosts.cnn import ChannelsLast
from esper.lifecycle import Blend
from esper.rng import make_generator

STEPS = 20  # of an episode
IMAGES = ["data=synthetic_images", "data.train=10000", "data.validation=2000"]
TEXT = ["data=synthetic_stories", "optimizer=adamw", "environment.batch=16", "environment.validation_batch=32"]
TASKS = {  # overrides, hosts, training batches in a step, blueprint of the seeds
    "cifar_ppo": (["+experiment=cifar_batches_ppo", *IMAGES, "data.resolution=16"], 8, 16, "conv_light"),
    "32x32, batch 128": (["host=cifar_baseline", *IMAGES, "environment.batch=128"], 2, 8, "conv_light"),
    "GPT, batch 16": (["host=tinystories_small", *TEXT], 2, 4, "mlp_small"),
}
COLUMNS = (
    "train / limit",
    "env / plain",
    "env / bare",
    "workers / threads",
    "workers / one",
    "episodes / hour",
    "memory",
)


@contextmanager
def threads(count: int) -> Iterator[None]:
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


class Bench:
    """One task with or without seeds."""

    def __init__(self, overrides: list[str], hosts: int, batches: int, blueprint: str | None) -> None:
        sizes = [f"environment.envs={hosts}", f"environment.steps={STEPS}", "environment.workers=0"]
        self.config = compose_config("evaluate", [*overrides, *sizes])
        self.env: Environment = build_environment(self.config)
        slots = self.env.space.slots[:3] if blueprint else ()
        on = {slot: SeedSetting(Mode.BLENDED, 1.0) for slot in slots}
        self.plan = StepPlan(on, on, tuple(on), batches, (0.5, 0.5))
        self.hosts, self.blueprint = hosts, blueprint

    def place(self, workers: int, threads: int | None = None) -> HostRuns:
        """New host runs with their seeds, in worker processes or in threads."""
        runs = place_runs(self.env.factory, self.hosts, workers, threads)
        runs.start([RunOrigin(seed, self.env.host_pool.host_name(seed)) for seed in range(self.hosts)])
        for env in range(self.hosts):
            for slot in self.plan.settings:
                runs.change(env, partial(HostRun.graft, slot=slot, blueprint=self.blueprint, blend=Blend.ADD))
        return runs

    def step(self, runs: HostRuns) -> Callable[[], object]:
        """A whole step of all hosts."""
        work = partial(HostRun.train_and_measure, plan=self.plan)
        return lambda: runs.compute(dict.fromkeys(range(self.hosts), work))

    def train(self, run: HostRun) -> Callable[[], object]:
        """The training batches of one host."""

        def train() -> None:
            with run._thread():
                run._train(self.plan, 0.5, 0.5)

        return train

    def loop(self, run: HostRun, *, plain: bool) -> Callable[[], object]:
        """The same batches in a bare loop; `plain` is in contiguous memory format."""
        model = run.model
        settings = {slot: setting for slot, setting in self.plan.settings.items() if slot in model.seeds}
        if plain:
            for module in list(model.modules()):
                for name, child in module.named_children():
                    if isinstance(child, ChannelsLast):
                        setattr(module, name, torch.nn.Identity())
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        optimizer = build(self.config.optimizer, model=model, _partial_=False).torch
        stream = self.env.host_pool.task(0).data.stream(self.config.environment.batch, make_generator("bench", 0))

        def train() -> None:
            for _ in range(self.plan.batches):
                x, y = stream.next()
                output = model(x.contiguous() if plain else x, settings)
                F.cross_entropy(output.flatten(0, -2), y.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()

        return train


def time_interleaved(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each function; they take turns, and the first turn is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def memory() -> float:
    """Gigabytes of this process and its children; memory that they share counts once."""
    pids = [os.getpid(), *(child.pid for child in active_children())]
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e6


def measure(bench: Bench, repeats: int) -> list[str]:
    """The row of a task."""
    cores = available_cores()
    many = bench.place(cores)
    bench.step(many)()
    used = memory()
    local, single = bench.place(0, cores), bench.place(1)
    first, limit, plain, bare = (bench.place(0, 1).fetch(0) for _ in range(4))
    for slot in list(bare.model.seeds):
        bare.remove(slot)

    def repeat(loop: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            with threads(cores):
                for _ in range(bench.hosts):
                    loop()

        return run

    steps = {"workers": bench.step(many), "one": bench.step(single), "threads": bench.step(local)}
    steps["plain"] = repeat(bench.loop(plain, plain=True))
    if bench.blueprint:
        steps["bare"] = repeat(bench.loop(bare, plain=True))
    seconds = time_interleaved(steps, repeats)
    seconds.setdefault("bare", seconds["plain"])
    seconds |= time_interleaved({"train": bench.train(first), "limit": bench.loop(limit, plain=False)}, 3 * repeats)
    for runs in (local, single, many):
        runs.close()
    bench.env.close()
    return [
        f"{seconds['limit'] / seconds['train']:.2f}",
        *(f"{seconds[name] / seconds['workers']:.2f}" for name in ("plain", "bare", "threads", "one")),
        f"{3600 * bench.hosts / (STEPS * seconds['workers']):,.0f}",
        f"{used:.2f} GB",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console, table = Console(width=150), Table("task", "seeds", *COLUMNS)
    for name in arguments.tasks:
        overrides, hosts, batches, blueprint = TASKS[name]
        for seeds in (None, blueprint):
            row = measure(Bench(overrides, hosts, batches, seeds), arguments.repeats)
            table.add_row(f"{name}, {hosts} hosts", f"3 {seeds}" if seeds else "none", *row)
            console.print(f"measured {name}, {f'three {seeds}' if seeds else 'no seeds'}")
    console.print(table)


if __name__ == "__main__":
    main()
