"""Overrides as they are typed, and a configuration as flat keys."""

from typing import Any

from omegaconf import DictConfig, OmegaConf


def override_key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def flatten(config: DictConfig) -> dict[str, Any]:
    """Every value under its full key, interpolations as they are written."""
    found: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                walk(value, f"{prefix}.{key}" if prefix else str(key))
        else:
            found[prefix] = node

    walk(OmegaConf.to_container(config, resolve=False), "")
    return found
