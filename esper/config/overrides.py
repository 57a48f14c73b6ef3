"""Keys of overrides, and flat configurations."""

from typing import Any

from omegaconf import DictConfig, OmegaConf


def override_key(override: str) -> str:
    """The key of an override: `ppo.lr` of `+ppo.lr=1e-3`."""
    return override.partition("=")[0].lstrip("+~")


def flatten(config: DictConfig) -> dict[str, Any]:
    """Every value by its full key; interpolations are not resolved."""
    flat: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                walk(value, f"{prefix}.{key}" if prefix else str(key))
        else:
            flat[prefix] = node

    walk(OmegaConf.to_container(config, resolve=False), "")
    return flat
