"""Variants of hosts: plainly wider and deeper networks, by names such as wide2, deep1 and wide1.5_deep2."""

import re
from collections.abc import Mapping
from typing import Any

from esper.hosts.host import Host

VARIANTS = ("wide1.5", "wide2", "wide3", "deep1", "wide2_deep1")  # those that a search tries
VARIANT_NAME = re.compile(r"(?=[wd])(?:wide(?P<width>\d+(?:\.\d+)?))?(?:(?:^|_)deep(?P<depth>\d+))?")


def parse_variant(name: str) -> tuple[float, int]:
    """The factor of the width and the number of further layers of a variant's name."""
    match = VARIANT_NAME.fullmatch(name)
    width, depth = (float(match["width"] or 1), int(match["depth"] or 0)) if match else (1.0, 0)
    if width < 1 or (width, depth) == (1, 0):
        raise ValueError(f"variant={name}: must be wideF with a factor above 1, deepN, or wideF_deepN.")
    return width, depth


def variant_arguments(host: type[Host], arguments: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Keyword arguments of a variant of a host; None if the host has no such variant.

    A class with its own constructor needs its own `variant_arguments`: those of its base class need not fit.
    """
    width, depth = parse_variant(name)
    if not issubclass(_owner(host, "variant_arguments"), _owner(host, "__init__")):
        return None
    changed = host.variant_arguments(arguments, width=width, depth=depth)
    return None if changed == host.variant_arguments(arguments, width=1.0, depth=0) else changed


def _owner(host: type[Host], name: str) -> type:
    """The class that defines a method of a host."""
    return next(parent for parent in host.__mro__ if name in vars(parent))
