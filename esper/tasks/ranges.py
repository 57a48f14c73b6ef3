"""Ranges that the settings of a task are drawn from.

A setting is a plain value, or a mapping with one of these keys:

| key     | draws                                                       |
|---------|-------------------------------------------------------------|
| choice  | one of a list, all equally likely                           |
| between | from the first to the second number, both included          |
| log     | the same, with equal shares for equal ratios (log-uniform)  |

Whole numbers draw whole numbers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

RANGE_KINDS = ("choice", "between", "log")


def check_range(key: str, setting: object) -> None:
    """Refuse a setting that nothing can be drawn from."""
    if not isinstance(setting, Mapping):
        return
    if len(setting) != 1 or next(iter(setting)) not in RANGE_KINDS:
        raise ValueError(
            f"{key}={dict(setting)}: must be a value, or a range with one key of {', '.join(RANGE_KINDS)}."
        )
    ((kind, values),) = setting.items()
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(f"{key}.{kind}={values}: must be a list that is not empty.")
    if kind == "choice":
        return
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    least = 0 if kind == "log" else -math.inf
    if len(values) != 2 or not is_number or not least < values[0] <= values[1]:
        above = " above 0" if kind == "log" else ""
        raise ValueError(f"{key}.{kind}={list(values)}: must be two numbers{above}, the smaller one first.")


def listed_values(setting: Any) -> list[Any]:
    """The values that a setting names: its only value, those of a choice, or both ends of a range."""
    return list(next(iter(setting.values()))) if isinstance(setting, Mapping) else [setting]


def draw(setting: Any, generator: torch.Generator) -> Any:
    """The value of a setting; every setting takes one random number, so that others do not depend on its range."""
    share = float(torch.rand((), generator=generator, dtype=torch.float64))
    if not isinstance(setting, Mapping):
        return setting
    ((kind, values),) = setting.items()
    if kind == "choice":
        return values[int(share * len(values))]
    low, high = values
    is_whole = isinstance(low, int) and isinstance(high, int)
    if kind == "log":
        number = math.exp(math.log(low) + share * (math.log(high + is_whole) - math.log(low)))
    else:
        number = low + share * (high + is_whole - low)
    return min(high, math.floor(number)) if is_whole else number
