"""How fast the environment trains N hosts, as ratios in one interleaved run.

    python benchmarks/engine.py            about five minutes on two cores; nothing is downloaded

- limit: the same architecture, layout, optimizer, data and number of samples in bare loops that fill the cores, at the
  best batch size: one net with all threads, or a net for each core
- naive: hosts in turn, contiguous layout, default threads, a DataLoader, a separate pass for each attribution
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
from esper.growth import GrowingHost, Mode, SeedSetting
from esper.hosts import Host
from esper.hosts.cnn import ChannelsLast
from esper.lifecycle import Blend
from esper.ppo import PPOSettings
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


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


class Limit:
    """Bare training loops: one net with all threads, or a net for each core with one thread; no environment around."""

    def __init__(self, config: DictConfig, data: Data, samples: int, batch: int, nets: int, threads: int) -> None:
        self._models = [GrowingHost(build(config.host), coadapt=True) for _ in range(nets)]
        self._optimizers = [build(config.optimizer, model=model, _partial_=False) for model in self._models]
        self._streams = [data.stream(batch, make_generator("limit", net)) for net in range(nets)]
        self._batches, self._threads = samples // batch // nets, threads
        self._pool = ThreadPoolExecutor(nets)

    def __call__(self) -> None:
        list(self._pool.map(self._train, range(len(self._models))))

    def _train(self, net: int) -> None:
        torch.set_num_threads(self._threads)
        for _ in range(self._batches):
            x, y = self._streams[net].next()
            loss_of(self._models[net](x, {}), y).backward()
            self._optimizers[net].step(0.5)
        torch.set_num_threads(1)


class Naive:
    """Hosts one after the other, as a first version would have it."""

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
                loss_of(model(x, on), y).backward()
                optimizer.step(0.5)
            model.eval()
            with torch.no_grad():
                for settings in (on, *[{s: v for s, v in on.items() if s != slot} for slot in self._slots]):
                    for x, y in self._validation:
                        loss_of(model(x, settings), y).item()
            model.train()
        torch.set_num_threads(1)


def interleaved(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, taken in turn after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def measure(name: str, repeats: int) -> None:
    overrides, batches, blueprint = TASKS[name]
    sizes = [f"environment.envs={ENVS}", f"environment.batches={batches}", "environment.steps=1000"]
    config = compose_config("evaluate", [*overrides, *sizes])
    torch.set_num_threads(1)
    env = build_environment(config)
    env.reset(range(ENVS))
    batch, samples = config.environment.batch, ENVS * batches * config.environment.batch

    def train(settings: PPOSettings) -> None:
        def one(run: int) -> Tensor:
            with env._runs[run]._thread():
                env._runs[run]._train(StepPlan(settings, settings, (), batches), 0.5, 0.5)
            return torch.zeros(())

        env._each(one)

    limits = {
        f"limit: {nets} net(s) of {count} thread(s), batch {size}": Limit(config, env.data, samples, size, nets, count)
        for size in (batch, 2 * batch)
        for nets, count in sorted({(1, CORES), (CORES, 1)})
    }
    times = interleaved({"engine": partial(train, {}), **limits}, repeats)
    best = min(limits, key=lambda limit: times[limit])
    print(f"{name}: host training at {times[best] / times['engine']:.2f} of the {best}")

    slots = [slot.name for slot in env.model(0).host.slots][:3]
    for run in env._runs:
        for slot in slots:
            run.graft(slot, blueprint, Blend.ADD)
    on = {slot: SeedSetting(Mode.BLENDED, 1.0) for slot in slots}

    def step() -> None:
        env._each(lambda run: env._runs[run].epoch(StepPlan(on, on, tuple(slots), batches), (0.5, 0.5)))

    times = interleaved({"engine": step, "naive": Naive(config, env, slots, blueprint, CORES)}, repeats)
    print(f"{name}: a whole step with three live seeds at {times['naive'] / times['engine']:.2f} x the naive way")
    env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Ratios of the environment's speed.")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    measure("CNN, batch 128", chosen.repeats)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"peak memory so far, {ENVS} environments of cifar_baseline, limits and naive hosts included: {peak:.2f} GB")
    measure("GPT, batch 16", chosen.repeats)


if __name__ == "__main__":
    main()
