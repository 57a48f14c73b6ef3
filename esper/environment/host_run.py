"""One host run. Its weights, data order and dropout are derived from one episode seed."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.data import Data
from esper.environment.host_metrics import batch_sums, means
from esper.growth import (
    HOST_GROUP,
    GrowingHost,
    GrowthOptimizer,
    SeedSettings,
    Snapshot,
    adopt,
    gradient_health,
    restore,
    snapshot,
    widened,
)
from esper.hosts import Host
from esper.lifecycle import Blend
from esper.rng import derive_seed, make_generator, seeded_init

HOST_VALUES = (
    "train_loss",
    "train_accuracy",
    "loss",
    "accuracy",
    "gradient_norm",
    "health",
)  # measured once for a host
SLOT_VALUES = (
    "contribution",
    "loss_contribution",
    "gradient_norm",
    "health",
    "isolated_gain",
)  # measured for each slot; NaN without a seed
PRECISIONS = {"32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class HostRunOptions:
    """How a step trains and measures."""

    batch: int  # samples in a training batch
    validation_batch: int  # samples in a batch of validation and test
    attribution_share: float  # share of the validation split that probes use
    gradient_stride: int  # batches between measurements of gradient health
    precision: str  # 32, bf16 or fp16
    coadapt: bool  # whether gradients of blended seeds reach the host's earlier layers
    slots: tuple[str, ...]  # of the action space: the columns of results, NaN for one that the host lacks
    seed_init: Literal["identity", "random"] = "identity"  # last layer of a new seed: zero or random

    def probes(self, size: int) -> int:
        """Number of samples, from the first of a split of `size`, that are run again with a seed switched off."""
        return math.ceil(size * self.attribution_share)


@dataclass(frozen=True)
class StepPlan:
    """The plan of one step of a run; it names only slots of the run's own host."""

    settings: SeedSettings  # of the seeds during training
    final: SeedSettings  # of the seeds during validation
    off: tuple[str, ...]  # slots whose contribution is measured
    batches: int  # training batches
    progress: tuple[float, float]  # share of the episode before and after these batches; sets the learning rate
    measure: bool = True  # false: the latest measurement is returned
    samples: int | None = None  # of the validation split, from its start; None is all


def vector_width(slots: int) -> int:
    """Number of values that a run returns."""
    return len(HOST_VALUES) + slots * len(SLOT_VALUES)


class HostRun:
    """A growing host with its optimizer and data stream.

    Building, grafting, removing and restoring draw from torch's global generator inside `seeded_init`, so call them in
    the main thread. `train_and_measure` and `measure` may run in any thread and read no value from the device.

    Arguments:
        episode_seed: all randomness of the run is derived from it; None uses torch's global generator
        build: builds the host
        optimizer: builds the optimizer of the growing host
        data: the data set
        options: how a step trains and measures
        variants: functions that build hosts to which this one can be widened, by name
    """

    def __init__(
        self,
        episode_seed: int | None,
        *,
        build: Callable[[], Host],
        optimizer: Callable[[GrowingHost], GrowthOptimizer],
        data: Data,
        options: HostRunOptions,
        variants: Mapping[str, Callable[[], Host]] | None = None,
    ) -> None:
        self._episode_seed, self._data, self._options = episode_seed or 0, data, options
        self._build_optimizer, self._variants = optimizer, variants or {}
        with seeded_init(derive_seed("weights", self._episode_seed)):
            host = build()
        if episode_seed is not None:
            host.use_generator(make_generator("dropout", episode_seed, device=data.device))
        self.model = GrowingHost(host.to(data.device), coadapt=options.coadapt).train()
        self.optimizer = optimizer(self.model)
        generator = None if episode_seed is None else make_generator("data", episode_seed, device=data.device)
        self._stream = data.stream(options.batch, generator)
        self._grafts = 0
        self.saved: Snapshot | None = None  # the last good state, for a rollback
        is_cuda = data.device.type == "cuda"
        self._cuda_stream = torch.cuda.Stream(data.device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._scaler = self._new_scaler()
        self._measured: dict[tuple[str, str], Tensor] = {}  # by the latest step
        self.seconds = {"train": 0.0, "measure": 0.0}  # so far; on a GPU only the time of the CPU

    def graft(self, slot: str, blueprint: str, blend: Blend) -> None:
        self._grafts += 1
        self.model.graft(
            slot,
            blueprint,
            blend,
            rng_seed=derive_seed("seed weights", self._episode_seed, self._grafts),
            init=self._options.seed_init,
        )
        self.optimizer.add(slot)

    def remove(self, slot: str) -> None:
        self.optimizer.remove(slot)
        self.model.remove(slot)
        self._measured = {key: value for key, value in self._measured.items() if key[0] != slot}

    def widen(self, variant: str) -> None:
        """Replace the host by a wider one that computes the same function; the optimizer starts anew."""
        with seeded_init(derive_seed("wide weights", self._episode_seed)):
            wide = self._variants[variant]()
        self.model = widened(self.model, wide, make_generator("widen", self._episode_seed))
        self.optimizer = self._build_optimizer(self.model)

    def freeze_seeds(self) -> None:
        """Train the present seeds no further."""
        self.model.seeds.requires_grad_(False)

    def save_snapshot(self, seeds: Collection[str]) -> None:
        """Replace the snapshot by the present state of the host and of the seeds in some slots."""
        self.saved = snapshot(self.model, self.optimizer, seeds)

    def add_to_snapshot(self, seeds: Collection[str]) -> None:
        """Add the seeds in some slots to the snapshot, and leave its host as it was."""
        assert self.saved is not None
        self.saved = adopt(self.saved, snapshot(self.model, self.optimizer, seeds), seeds)

    def roll_back(self) -> None:
        """Restore the snapshot. The optimizer state is cleared, because momentum may have caused the failure."""
        assert self.saved is not None
        restore(self.saved, self.model, self.optimizer)
        self.optimizer.torch.state.clear()
        self._scaler = self._new_scaler()

    def _new_scaler(self) -> torch.amp.GradScaler | None:
        return torch.amp.GradScaler(self._data.device.type) if self._options.precision == "fp16" else None

    def train_and_measure(self, plan: StepPlan) -> Tensor:
        """Train for one step, then measure: float32 [len(HOST_VALUES) + slots * len(SLOT_VALUES)] on the device."""
        with self._thread():
            with self._clock("train"):
                trained = self._train(plan)
            with self._clock("measure"):
                if plan.measure:
                    self._measured = self._measure(plan.final, plan.off, plan.samples)
                return self._pack({**trained, **self._measured})

    def measure(self, settings: SeedSettings, samples: int | None) -> Tensor:
        """Measure without training; packed like the result of `train_and_measure`."""
        with self._thread(), self._clock("measure"):
            self._measured = self._measure(settings, (), samples)
            return self._pack(self._measured)

    def evaluate(self, settings: SeedSettings, split: str) -> Tensor:
        """Mean loss and accuracy on a split: float32 [2] on the device."""
        with self._thread():
            return self._evaluate(settings, (), split, None)[0]

    @contextmanager
    def _thread(self) -> Iterator[None]:
        """One intra-op thread, gradients on, and on a GPU the run's own CUDA stream."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        stream: AbstractContextManager[object] = nullcontext()
        if self._cuda_stream is not None:
            self._cuda_stream.wait_stream(torch.cuda.current_stream(self._data.device))  # grafts ran on that stream
            stream = torch.cuda.stream(self._cuda_stream)
        try:
            with torch.inference_mode(False), torch.enable_grad(), stream:
                yield
        finally:
            torch.set_num_threads(threads)

    @contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = PRECISIONS[self._options.precision]
        return nullcontext() if dtype is None else torch.autocast(self._data.device.type, dtype)

    def _train(self, plan: StepPlan) -> dict[tuple[str, str], Tensor]:
        """Train `plan.batches` batches; the means over them, and the lowest health of gradients."""
        before, after = plan.progress
        values: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        health: dict[str, Tensor] = {}

        def update_health() -> None:
            for owner in self.optimizer.owners:
                latest = gradient_health(self.optimizer.parameters(owner), self.optimizer.clip)
                health[owner] = torch.minimum(health.get(owner, latest), latest)

        for index in range(plan.batches):
            x, y = self._stream.next()
            outputs: list[Tensor] = []
            with self._autocast():
                loss, isolated = self.model.losses(x, plan.settings, _criterion(y, outputs))
            joint = torch.stack([loss, *isolated.values()]).sum() if isolated else loss
            (joint if self._scaler is None else self._scaler.scale(joint)).backward()  # type: ignore[no-untyped-call]
            progress = before + (after - before) * index / plan.batches
            is_due = index % self._options.gradient_stride == 0
            watch = update_health if is_due else None
            norms = self.optimizer.step(progress, self._scaler, watch, keep_buffer=index + 1 < plan.batches)
            values[HOST_GROUP, "train_loss"].append(loss.detach())
            values[HOST_GROUP, "train_accuracy"].append((outputs[0].argmax(-1) == y).sum() / y.numel())
            for owner, norm in norms.items():
                values[owner, "gradient_norm"].append(norm)
            for slot, isolated_loss in isolated.items():
                values[slot, "isolated_gain"].append(loss.detach() - isolated_loss.detach())
        result = {key: torch.stack(each).mean() for key, each in values.items()}
        return {**result, **{(owner, "health"): value for owner, value in health.items()}}

    def _measure(
        self, settings: SeedSettings, off: Collection[str], samples: int | None
    ) -> dict[tuple[str, str], Tensor]:
        whole, without = self._evaluate(settings, off, "validation", samples)
        result = {(HOST_GROUP, "loss"): whole[0], (HOST_GROUP, "accuracy"): whole[1]}
        score = self._data.score
        for slot, pair in without.items():  # both over the same part of the split
            with_seed, without_seed = (score("validation", part[0], part[1]) for part in pair)
            result[slot, "contribution"] = with_seed - without_seed
            result[slot, "loss_contribution"] = pair[1][0] - pair[0][0]
        return result

    def _evaluate(
        self, settings: SeedSettings, off: Collection[str], split: str, samples: int | None
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Mean loss and accuracy [2] over `samples` samples: with all seeds, and for each slot in `off` a pair, with
        and without its seed, over the probed samples.
        The features before each slot in `off` are cached, so that switching it off only recomputes what follows.
        """
        model, whole, probed = self.model.eval(), [], []
        without: dict[str, list[Tensor]] = {slot: [] for slot in off}
        probed_slots = [slot.name for slot in model.host.slots if slot.name in off]
        with torch.no_grad(), self._autocast():
            for x, y, is_probed in self._validation_batches(split, samples, bool(off)):
                cached, start = {}, None
                for slot in probed_slots if is_probed else ():
                    x = cached[slot] = model(x, settings, start, slot)
                    start = slot
                whole.append(batch_sums(model(x, settings, start), y))
                if cached:
                    probed.append(whole[-1])
                for slot, features in cached.items():
                    others = {name: setting for name, setting in settings.items() if name != slot}
                    without[slot].append(batch_sums(model(features, others, slot), y))
        model.train()
        return means(whole), {slot: (means(probed), means(sums)) for slot, sums in without.items()}

    def _validation_batches(
        self, split: str, samples: int | None, probe: bool
    ) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """The first `samples` of a split in batches, each with whether it is probed; one may be divided."""
        size = self._data.size(split)
        rest = size if samples is None else min(samples, size)
        left = self._options.probes(rest) if probe else 0
        for x, y in self._data.batches(split, min(rest, self._options.validation_batch)):
            x, y = x[:rest], y[:rest]
            if left:
                yield x[:left], y[:left], True
            if left < len(y):
                yield x[left:], y[left:], False
            left, rest = max(0, left - len(y)), rest - len(y)
            if not rest:
                return

    def _pack(self, measured: Mapping[tuple[str, str], Tensor]) -> Tensor:
        missing = torch.full((), torch.nan, device=self._data.device)
        keys = [(HOST_GROUP, name) for name in HOST_VALUES] + [
            (slot, name) for slot in self._options.slots for name in SLOT_VALUES
        ]
        return torch.stack([measured.get(key, missing).float() for key in keys])


def _criterion(y: Tensor, outputs: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Cross-entropy against targets `y`; appends each output to `outputs`, the host's first."""

    def loss(output: Tensor) -> Tensor:
        outputs.append(output.detach())
        return F.cross_entropy(output.flatten(0, -2), y.flatten())

    return loss
