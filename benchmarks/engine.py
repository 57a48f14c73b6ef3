"""The speed of the environment that trains N hosts, as ratios measured in one interleaved run.

    python benchmarks/engine.py            about five minutes on two cores; nothing is downloaded

- limit: bare training loops with the same architecture, memory layout, optimizer, data and number of samples, at the
  best batch size: one model with all threads, or one model per core
- naive: hosts one after the other, contiguous memory layout, default threads, a DataLoader, a separate pass for each
  attribution
"""

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from esper.config import build, build_environment, compose_config
from esper.data import Data
from esper.environment import Environment
from esper.environment.host_run import StepPlan
from esper.growth import GrowingHost, Mode, SeedSetting, SeedSettings
from esper.hosts import Host
from esper.hosts.cnn import ChannelsLast
from esper.lifecycle import Blend
from esper.rng import make_generator

ENVS = 8
CORES = os.cpu_count() or 1
TASKS = {  # overrides, training batches in a step, blueprint of the live seeds
    "CNN, batch 128": (["host=cifar_baseline", "data=synthetic_images", "environment.batch=128"], 10, "conv_light"),
    "GPT, batch 16": (
        [
            "host=tinystories_small",
            "data=synthetic_stories",
            "optimizer=adamw",
            "environment.batch=16",
            "environment.validation_batch=32",
        ],
        6,
        "mlp_small",
    ),
}


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


class Limit:
    """Bare training loops without an environment: one model with all threads, or one model per core with one thread."""

    def __init__(self, config: DictConfig, data: Data, samples: int, batch: int, models: int, threads: int) -> None:
        self._models = [GrowingHost(build(config.host), coadapt=True) for _ in range(models)]
        self._optimizers = [build(config.optimizer, model=model, _partial_=False) for model in self._models]
        self._streams = [data.stream(batch, make_generator("limit", index)) for index in range(models)]
        self._batches, self._threads = samples // batch // models, threads
        self._pool = ThreadPoolExecutor(models)

    def __call__(self) -> None:
        list(self._pool.map(self._train, range(len(self._models))))

    def _train(self, index: int) -> None:
        torch.set_num_threads(self._threads)
        for _ in range(self._batches):
            x, y = self._streams[index].next()
            cross_entropy(self._models[index](x, {}), y).backward()
            self._optimizers[index].step(0.5)
        torch.set_num_threads(1)


class Naive:
    """Hosts one after the other, without any optimisation."""

    def __init__(self, config: DictConfig, env: Environment, slots: list[str], blueprint: str, threads: int) -> None:
        self._threads, self._slots, self._batches = threads, slots, config.environment.batches
        self._models, self._optimizers = [], []
        for _ in range(ENVS):
            host: Host = build(config.host)
            for module in host.segments[0].modules():
                if isinstance(module, nn.Sequential) and isinstance(module[0], ChannelsLast):
                    module[0] = nn.Identity()
            model = GrowingHost(host, coadapt=True)
            for slot in slots:
                model.graft(slot, blueprint, Blend.ADD, rng_seed=1)
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
            self._models.append(model)
            self._optimizers.append(build(config.optimizer, model=model, _partial_=False))
        train = [torch.cat(part).contiguous() for part in zip(*env.data.batches("train", 500), strict=True)]
        batch = config.environment.batch
        self._loader = DataLoader(TensorDataset(*train), batch, shuffle=True)
        self._validation = [
            (x.contiguous(), y) for x, y in env.data.batches("validation", config.environment.validation_batch)
        ]

    def __call__(self) -> None:
        torch.set_num_threads(self._threads)
        on = {slot: SeedSetting(Mode.BLENDED, 1.0) for slot in self._slots}
        for model, optimizer in zip(self._models, self._optimizers, strict=True):
            batches = iter(self._loader)
            for _ in range(self._batches):
                x, y = next(batches)
                cross_entropy(model(x, on), y).backward()
                optimizer.step(0.5)
            model.eval()
            with torch.no_grad():
                for settings in (on, *[{s: v for s, v in on.items() if s != slot} for slot in self._slots]):
                    for x, y in self._validation:
                        cross_entropy(model(x, settings), y).item()
            model.train()
        torch.set_num_threads(1)


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


def measure(name: str, repeats: int) -> None:
    overrides, batches, blueprint = TASKS[name]
    sizes = [f"environment.envs={ENVS}", f"environment.batches={batches}", "environment.steps=1000"]
    config = compose_config("evaluate", [*overrides, *sizes])
    torch.set_num_threads(1)
    env = build_environment(config)
    env.reset(range(ENVS))
    batch, samples = config.environment.batch, ENVS * batches * config.environment.batch

    def train(settings: SeedSettings) -> None:
        def train_run(run: int) -> Tensor:
            with env._runs[run]._thread():
                env._runs[run]._train(StepPlan(settings, settings, (), batches), 0.5, 0.5)
            return torch.zeros(())

        env._map_envs(train_run)

    limits = {
        f"limit: {models} model(s), {count} thread(s) each, batch {size}": Limit(
            config, env.data, samples, size, models, count
        )
        for size in (batch, 2 * batch)
        for models, count in sorted({(1, CORES), (CORES, 1)})
    }
    times = time_interleaved({"engine": partial(train, {}), **limits}, repeats)
    best = min(limits, key=lambda limit: times[limit])
    print(f"{name}: host training at {times[best] / times['engine']:.2f} of the {best}")

    slots = [slot.name for slot in env.model(0).host.slots][:3]
    for run in env._runs:
        for slot in slots:
            run.graft(slot, blueprint, Blend.ADD)
    on = {slot: SeedSetting(Mode.BLENDED, 1.0) for slot in slots}

    def step() -> None:
        env._map_envs(lambda run: env._runs[run].train_and_measure(StepPlan(on, on, tuple(slots), batches), (0.5, 0.5)))

    times = time_interleaved({"engine": step, "naive": Naive(config, env, slots, blueprint, CORES)}, repeats)
    print(f"{name}: a whole step with three live seeds at {times['naive'] / times['engine']:.2f} x the naive speed")
    env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="The speed of the environment, as ratios.")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    measure("CNN, batch 128", arguments.repeats)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"peak memory so far: {peak:.2f} GB (cifar_baseline: {ENVS} environments, limit and naive hosts)")
    measure("GPT, batch 16", arguments.repeats)


if __name__ == "__main__":
    main()
