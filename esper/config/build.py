"""From a node of the configuration to the object it describes."""

import re
from dataclasses import is_dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_class, get_object, instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig

from esper.blueprints import blueprints
from esper.config.compose import CONF, compose_config, group_names
from esper.config.suggest import suggest
from esper.data import DataError
from esper.environment import Environment
from esper.hosts import Host
from esper.lifecycle import ActionSpace
from esper.renames import KEYS, TARGETS


def load_preset(preset: str, **changes: object) -> Any:
    """Build what a preset describes: `load_preset("host/cifar_baseline")`, `load_preset("data/cifar10", train=1000)`.

    Keyword arguments win over the preset's values.
    """
    group = preset.partition("/")[0]
    if not (CONF / f"{preset}.yaml").is_file():
        known = ", ".join(sorted(f"{group}/{path.stem}" for path in (CONF / group).glob("*.yaml")))
        raise ValueError(f"preset={preset}: there is none of that name; there are {known or sorted(group_names())}.")
    node = compose_config(preset)[group]
    if "_target_" not in node:
        raise ValueError(f"preset={preset}: is several in one; name one of them.")
    return build(node, **changes, _partial_=False)


def build(node: DictConfig, **changes: object) -> Any:
    """Build what a node of a configuration describes; keyword arguments win over its values.

    Nothing that is built ever sees a piece of configuration: containers arrive as plain ones, objects as themselves.
    """
    target = node.get("_target_", "configuration")
    if target in TARGETS:
        raise ValueError(f"_target_={target}: is now {TARGETS[target]}.")
    later = changes.pop("_partial_", node.get("_partial_", False))
    objects = {key: value for key, value in changes.items() if is_dataclass(value)}  # Hydra would take them for config
    rest = {key: value for key, value in changes.items() if key not in objects}
    try:
        make = partial(instantiate(node, **rest, _partial_=True, _convert_="object"), **objects)
        return make if later else make()
    except InstantiationException as error:  # Hydra's wrapper hides the sentence that says what is wrong
        cause = error.__cause__
        if isinstance(cause, ValueError | DataError):
            raise cause from None
        reason = str(cause or error).splitlines()[0].rstrip(".:")
        raise ValueError(f"{target}: {reason}.") from None
    except (RuntimeError, MisconfigurationException) as error:
        raise ValueError(f"{target}: {str(error).splitlines()[0].rstrip('.')}.") from None
    except TypeError as error:
        wrong = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if wrong:
            word = str(wrong[1])
            known = list(signature(get_class(target)).parameters)
            new = next((new for old, new in KEYS.items() if old.endswith(f".{word}") and new in known), None)
            hint = suggest(word, known) if new is None else f"it is now {new}"
            raise ValueError(f"{target}: has no argument {word}; {hint}.") from None
        raise ValueError(f"{target}: {error}.") from None


def build_with(node: DictConfig, **offers: object) -> Any:
    """Build a node with those of the offered arguments that it can take."""
    takes = signature(get_object(node._target_)).parameters
    return build(node, _partial_=False, **{name: value for name, value in offers.items() if name in takes})


def build_vector_env(config: DictConfig) -> Any:
    """What a checked configuration lets a policy play: growing hosts, or another kind of environment."""
    if grows_hosts(config):
        return build_environment(config)
    offers = {"space": partial(build_action_space, config), "rules": partial(build, config.lifecycle)}
    takes = signature(get_object(config.environment._target_)).parameters
    found = {name: make() for name, make in offers.items() if name in takes}
    return build_with(config.environment, **found, reward=build(config.reward))


def build_environment(config: DictConfig, envs: int | None = None) -> Environment:
    """The environment that a checked configuration describes; `envs` wins over its number of environments."""
    changes = {} if envs is None else {"envs": envs}
    environment: Environment = build(
        config.environment,
        hosts={name: partial(build, node) for name, node in host_nodes(config).items()},
        data=build(config.data),
        space=build_action_space(config),
        rules=build(config.lifecycle),
        optimizer=build(config.optimizer),
        governor=build(config.governor),
        reward=build(config.reward),
        _partial_=False,
        **changes,
    )
    return environment


def build_action_space(config: DictConfig) -> ActionSpace:
    """What may be done, in the slots of the host that a configuration has."""
    host = outline_host(config)
    ordered = [slot.name for slot in host.slots if config.slots.names is None or slot.name in config.slots.names]
    offered = config.slots.blueprints or list(blueprints(host.topology))
    space: ActionSpace = build(config.actions, _partial_=False, slots=ordered, blueprints=list(offered))
    return space


def host_nodes(config: DictConfig) -> dict[str, DictConfig]:
    """The configuration of the host, or of each of several that episodes draw from, by name."""
    if "hosts" not in config.host:
        return {"host": config.host}
    if not config.host.hosts:
        raise ValueError("host.hosts: must name one host or more, as host=cifar_mixed does.")
    return {str(name): node for name, node in config.host.hosts.items()}


def outline_host(config: DictConfig) -> Host:
    """The host, or the first of several that have the same slots, without its weights."""
    with torch.device("meta"):
        found: dict[str, Host] = {name: build(node) for name, node in host_nodes(config).items()}
    (first, host), *others = found.items()
    for name, other in others:
        names = [[slot.name for slot in some.slots] for some in (host, other)]
        if names[0] != names[1] or host.topology != other.topology:
            raise ValueError(
                f"host.hosts: {name} has other slots than {first} ({', '.join(names[1])}; {', '.join(names[0])}), and "
                "a controller cannot play both."
            )
    return host


def grows_hosts(config: DictConfig) -> bool:
    """Whether hosts are grown, rather than another kind of environment played."""
    return bool(config.environment._target_ == "esper.environment.Environment")
