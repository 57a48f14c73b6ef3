"""A task distribution: families with ranges, from which task seeds draw tasks."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from inspect import signature
from typing import Any, Literal

import torch

from esper.arguments import Count
from esper.data import Data, ImageData, TextData
from esper.data.tokens import PLAIN_BYTES
from esper.data.variants import ImageVariant, TextVariant
from esper.rng import make_generator
from esper.tasks.ranges import check_range, draw, listed_values

TASK_SPLITS = ("train", "validation", "test", "heldout")  # heldout: of families that the other splits do not have
TASK_NAME = re.compile(rf"(?P<split>{'|'.join(TASK_SPLITS)})\d+_(?P<family>.+)")  # of the name of a task
HOSTS = {"cnn": "esper.hosts.CNNHost", "transformer": "esper.hosts.GPTHost"}
DATA_VARIANTS = {"cnn": ImageVariant, "transformer": TextVariant}
NUMBERS = {  # of settings and data variants: kind, and the least value
    "lr_scale": ("decimal", 0), "budget_batches": ("decimal", 0), "batch": ("whole", 1), "train": ("whole", 1),
    "label_noise": ("decimal", 0),
}  # fmt: skip
ABOVE_ZERO = ("lr_scale", "budget_batches")  # for which 0 is too small
CONFIGURED = "data"  # name of the configured data set
HOST_SIZES = ("classes", "vocabulary")  # of a variant, which are arguments of its host, too
SETTINGS = ("lr_scale", "batch", "budget_batches")


@dataclass(frozen=True)
class TaskSpec:
    """One task, as plain data."""

    name: str  # unique in its distribution
    family: str
    split: str
    host: Mapping[str, Any]  # the class as _target_, and its arguments
    data_set: str  # name of the data set
    variant: Mapping[str, Any]  # how the data differs from the data set
    lr_scale: float
    batch: int
    budget_batches: float | None  # in training batches of the host without seeds; None is that of the environment

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


class TaskDistribution:
    """Families of tasks. A task seed is a split and a number, so the tasks of different splits are never the same draw.

    Families take turns: each comes once in every block of as many tasks as there are families. A family with
    `heldout: true` has tasks in the split heldout only, and other families in the other splits only.

    Arguments:
        name: of the distribution
        topology: of all hosts, cnn or transformer
        data_set: name of the data set of families that do not name one; `data` is the configured one
        data_sets: functions that load further data sets, by name; those of text take `vocabulary`
        host: arguments of hosts; values or ranges
        variants: how the data of a task may differ from the data set; one is drawn for each task. Values or ranges of
            arguments of `ImageVariant` or `TextVariant`, and of `vocabulary`, the number of tokens of a text
        settings: lr_scale, batch and budget_batches of a task; values or ranges
        families: by name; each may have `heldout`, `host`, `variants`, `data_set` and `settings`, which replace those
            of the distribution
        counts: number of tasks of each split
        seed: random seed of all draws
        repeats: episodes of each task in a round
        split: of the tasks that evaluations draw
        steps: decisions of an episode, one of these numbers for a whole training round: they take turns. None is
            `environment.steps`, which evaluations and validation rounds always have
    """

    def __init__(
        self,
        *,
        name: str,
        topology: Literal["cnn", "transformer"],
        data_set: str,
        data_sets: Mapping[str, Callable[..., Data]],
        host: Mapping[str, Any],
        variants: list[dict[str, Any]],
        settings: Mapping[str, Any],
        families: Mapping[str, dict[str, Any]],
        counts: Mapping[str, int],
        seed: int,
        repeats: Count,
        split: Literal["train", "validation", "test", "heldout"],
        steps: list[int] | None = None,
    ) -> None:
        self.name, self.topology, self.repeats, self.split, self.steps = name, topology, repeats, split, steps
        self._data_set, self._host, self._variants, self._settings = data_set, host, variants, settings
        self._families, self._counts, self._seed = families, counts, seed
        self._data_sets, self._loaded = data_sets, dict[tuple[Any, ...], Data]()
        self._check()

    def _check(self) -> None:
        if self.steps is not None and (not self.steps or min(self.steps) < 1 or len(set(self.steps)) < len(self.steps)):
            raise ValueError(f"tasks.steps={self.steps}: must be different numbers of at least 1, or null.")
        for split in self._counts:
            if split not in TASK_SPLITS:
                raise ValueError(f"tasks.counts.{split}: is not a split; splits are {', '.join(TASK_SPLITS)}.")
        if set(self._settings) != set(SETTINGS):
            raise ValueError(f"tasks.settings={list(self._settings)}: must have exactly {', '.join(SETTINGS)}.")
        self._check_ranges("tasks", self._host, self._variants, self._settings)
        known = ("heldout", "host", "variants", "data_set", "settings")
        for name, family in self._families.items():
            if not family:
                raise ValueError(f"tasks.families.{name}: must set at least one of {', '.join(known)}.")
            if unknown := [key for key in family if key not in known]:
                raise ValueError(
                    f"tasks.families.{name}: {', '.join(unknown)} is unknown; allowed are {', '.join(known)}."
                )
            self._check_data_set(f"tasks.families.{name}.data_set", family.get("data_set", self._data_set))
            settings = family.get("settings", {})
            if unknown := [key for key in settings if key not in SETTINGS]:
                raise ValueError(
                    f"tasks.families.{name}.settings: {', '.join(unknown)} is unknown; allowed are "
                    f"{', '.join(SETTINGS)}."
                )
            self._check_ranges(f"tasks.families.{name}", family.get("host", {}), family.get("variants", []), settings)
        for split, count in self._counts.items():
            if not isinstance(count, int) or count < 0:
                raise ValueError(f"tasks.counts.{split}={count}: must be a whole number of at least 0.")
            if count and not self.families(split):
                raise ValueError(f"tasks.counts.{split}={count}: must be 0, because no family has tasks of this split.")

    def _check_data_set(self, key: str, name: str) -> None:
        known = (CONFIGURED, *self._data_sets)
        if name not in known:
            raise ValueError(f"{key}={name}: must be one of {', '.join(known)}.")

    def _check_ranges(
        self, key: str, host: Mapping[str, Any], variants: list[dict[str, Any]], settings: Mapping[str, Any]
    ) -> None:
        tables = {"host": host, "settings": settings}
        tables |= {f"variants.{number}": variant for number, variant in enumerate(variants)}
        for place, table in tables.items():
            for name, setting in table.items():
                check_range(f"{key}.{place}.{name}", setting)
                _check_numbers(f"{key}.{place}.{name}", name, setting)
        for number, variant in enumerate(variants):
            self._check_variant(f"{key}.variants.{number}", variant)

    def _check_variant(self, key: str, variant: Mapping[str, Any]) -> None:
        arguments = signature(DATA_VARIANTS[self.topology]).parameters
        known = [name for name in arguments if name not in ("base", "rng_seed")]
        known += ["vocabulary"] if self.topology == "transformer" else []
        if unknown := [name for name in variant if name not in known]:
            raise ValueError(f"{key}: {', '.join(unknown)} is unknown; allowed are {', '.join(known)}.")
        for value in listed_values(variant.get("vocabulary", PLAIN_BYTES)):
            if not isinstance(value, int) or value < PLAIN_BYTES:
                raise ValueError(f"{key}.vocabulary={value}: must be {PLAIN_BYTES} (plain bytes) or more (byte pairs).")

    def families(self, split: str) -> list[str]:
        """The families that have tasks of a split."""
        wanted = split == "heldout"
        return [name for name, family in self._families.items() if bool(family.get("heldout")) == wanted]

    def specs(self, *splits: str) -> list[TaskSpec]:
        """The tasks of some splits; of all splits if none is named."""
        chosen = splits or TASK_SPLITS
        return [self.draw(split, number) for split in chosen for number in range(self._counts.get(split, 0))]

    def load_data(self, spec: TaskSpec, load: Callable[..., Data]) -> Data:
        """The data of a task; `load` loads the configured data set. A data set is loaded once for each vocabulary."""
        variant = dict(spec.variant)
        tokens = {"vocabulary": variant.pop("vocabulary")} if "vocabulary" in variant else {}
        key = (spec.data_set, *tokens.values())
        if key not in self._loaded:
            self._loaded[key] = {CONFIGURED: load, **self._data_sets}[spec.data_set](**tokens)
        base = self._loaded[key]
        if not variant:
            return base
        assert isinstance(base, ImageData | TextData)
        if "train" in variant:
            available = len(base.splits["train"]) if isinstance(base, TextData) else base.size("train")
            variant["train"] = min(variant["train"], available)
        return TextVariant(base, **variant) if isinstance(base, TextData) else ImageVariant(base, **variant)

    def draw(self, split: str, number: int) -> TaskSpec:
        """The task with a number in a split."""
        families = self.families(split)
        block, place = divmod(number, len(families))
        order = torch.randperm(len(families), generator=make_generator(f"{split} families", self._seed, block))
        name = families[int(order[place])]
        family, generator = self._families[name], make_generator(f"{split} task", self._seed, number)

        def draw_all(table: Mapping[str, Any]) -> dict[str, Any]:
            return {key: draw(setting, generator) for key, setting in table.items()}

        settings = draw_all({**self._settings, **family.get("settings", {})})
        variants = family.get("variants", self._variants)
        variant = draw_all(draw({"choice": variants or [{}]}, generator))
        host = draw_all({**self._host, **family.get("host", {})})
        host |= {key: variant[key] for key in HOST_SIZES if key in variant}
        return TaskSpec(
            name=f"{split}{number:02d}_{name}",
            family=name,
            split=split,
            host={"_target_": HOSTS[self.topology], **host},
            data_set=family.get("data_set", self._data_set),
            variant={**variant, **({"rng_seed": number} if variant else {})},
            lr_scale=settings["lr_scale"],
            batch=settings["batch"],
            budget_batches=settings["budget_batches"],
        )


def _check_numbers(key: str, name: str, setting: Any) -> None:
    """Refuse values of settings and of data variants that are no numbers, or too small."""
    if name not in NUMBERS:
        return
    kind, least = NUMBERS[name]
    for value in listed_values(setting):
        if value is None and name == "budget_batches":
            continue  # that of the environment
        is_number = isinstance(value, int if kind == "whole" else int | float) and not isinstance(value, bool)
        if not is_number or not value >= least or (name in ABOVE_ZERO and value == 0):
            above = "above 0" if name in ABOVE_ZERO else f"of at least {least}"
            raise ValueError(f"{key}={value}: must be a {kind} number {above}.")
