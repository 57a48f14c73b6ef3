"""Build objects from nodes of the configuration."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from esper.blueprints import blueprints
from esper.command_line import CONF
from esper.config.compose import compose_config, flatten, group_names
from esper.config.signatures import check_names, check_target, check_value
from esper.data import DataError
from esper.environment import Environment, HostTask
from esper.hosts import VARIANTS, Host, variant_arguments
from esper.lifecycle import ActionSpace, merge_slot_names
from esper.tasks import TaskDistribution, TaskList, TaskSpec


def load_preset(preset: str, **changes: object) -> Any:
    """Build the object of a preset: `load_preset("host/cifar_baseline")`, `load_preset("data/cifar10", train=1000)`.

    Keyword arguments override the values of the preset.
    """
    group = preset.partition("/")[0]
    if not (CONF / f"{preset}.yaml").is_file():
        known = ", ".join(sorted(f"{group}/{path.stem}" for path in (CONF / group).glob("*.yaml")))
        raise ValueError(f"preset={preset}: must be one of {known or ', '.join(sorted(group_names()))}.")
    node = compose_config(preset)[group]
    if "_target_" not in node:
        raise ValueError(f"preset={preset}: has several parts and no _target_; choose a preset of one object.")
    plain = {name: value for name, value in changes.items() if _is_plain(value)}  # other objects are not configured
    with suppress(OmegaConfBaseException):  # a preset may refer to keys outside of it
        check_value(group, OmegaConf.to_container(OmegaConf.merge(node, plain), resolve=True), Any)
    return build(node, **changes, _partial_=False)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bool | int | float | str | None)


def build(node: DictConfig, **changes: object) -> Any:
    """Build the object that a node describes; keyword arguments override the values of the node.

    Constructors get plain lists and dictionaries, never nodes of the configuration.
    """
    target = node.get("_target_", "configuration")
    for key, value in flatten(node).items():
        if key.rpartition(".")[2] == "_target_":
            check_target(key, value)
    if "_target_" in node:
        check_names(target, [*map(str, node), *changes])
    is_partial = changes.pop("_partial_", node.get("_partial_", False))
    dataclasses = {key: value for key, value in changes.items() if is_dataclass(value)}  # Hydra would convert them
    others = {key: value for key, value in changes.items() if key not in dataclasses}
    try:
        make = partial(instantiate(node, **others, _partial_=True, _convert_="object"), **dataclasses)
        return make if is_partial else make()
    except InstantiationException as error:  # Hydra wraps the message of the constructor in its own
        cause = error.__cause__
        if isinstance(cause, ValueError | DataError):
            raise cause from None
        reason = str(cause or error).splitlines()[0].rstrip(".:")
        raise ValueError(f"{target}: {reason}.") from None
    except (RuntimeError, MisconfigurationException, ArithmeticError, MemoryError) as error:  # for extreme numbers
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{target}: {reason.rstrip('.')}.") from None
    except TypeError as error:
        raise ValueError(f"{target}: {error}.") from None


def build_with(node: DictConfig, **available: object) -> Any:
    """Build a node with those of the offered arguments that its target accepts."""
    accepted = signature(get_object(node._target_)).parameters
    return build(node, _partial_=False, **{name: value for name, value in available.items() if name in accepted})


def build_vector_env(config: DictConfig) -> Any:
    """The environment that a policy trains in: growing hosts, or another kind of environment."""
    if grows_hosts(config):
        return build_environment(config)
    available = {"space": partial(build_action_space, config), "rules": partial(build, config.lifecycle)}
    accepted = signature(get_object(config.environment._target_)).parameters
    built = {name: make() for name, make in available.items() if name in accepted}
    return build_with(config.environment, **built, reward=build(config.reward))


def build_environment(config: DictConfig, envs: int | None = None) -> Environment:
    """The environment of growing hosts; `envs` overrides the number of environments."""
    changes: dict[str, Any] = {} if envs is None else {"envs": envs}
    if "_target_" in config.tasks:
        repeats = 1 if _is_evaluation(config) else config.tasks.repeats  # evaluations compare arms, not episodes
        changes |= {"split": config.tasks.split, "repeats": repeats}
        if (steps := config.tasks.get("steps")) is not None:
            changes["round_steps"] = list(steps)
    environment: Environment = build(
        config.environment,
        tasks=build_tasks(config),
        space=build_action_space(config),
        rules=build(config.lifecycle),
        optimizer=build(config.optimizer),
        governor=build(config.governor),
        reward=build(config.reward),
        _partial_=False,
        **changes,
    )
    return environment


def build_tasks(config: DictConfig) -> dict[str, HostTask]:
    """The tasks that episodes are drawn from, by name: those of the distribution, or one for each host."""
    load, variants, nodes = partial(build, config.data), host_variants(config), host_nodes(config)
    builders = {name: _host_builder(node) for name, node in nodes.items()}
    if (distribution := build_distribution(config)) is None:
        data = load()
        return {name: HostTask(builder, data, variants=variants[name]) for name, builder in builders.items()}
    known = known_tasks(config)
    return {
        spec.name: HostTask(
            builders[spec.name],
            distribution.load_data(spec, load),
            batch=spec.batch,
            variants=variants[spec.name],
            lr_scale=spec.lr_scale,
            budget_batches=spec.budget_batches,
            family=spec.family,
            split=spec.split,
            label_noise=spec.variant.get("label_noise", 0.0),
            known=None if (found := known.find(spec)) is None else found.scores,
        )
        for spec in task_specs(config)
    }


def known_tasks(config: DictConfig, *, any_share: bool = False) -> TaskList:
    """What is known of the configured tasks; nothing if they were measured with other settings.

    Scores belong to whole budgets. With `any_share`, a list counts for a share of the budget, too.
    """
    if "_target_" not in config.tasks:
        return TaskList("single", (), {})
    known = TaskList.load(config.tasks.name)
    settings = {**({} if any_share else {"environment.budget_share": 1.0}), **known.settings}
    settings.pop("environment.steps", None)  # of decisions, which fixed plans do not make
    is_same = all(OmegaConf.select(config, key) == value for key, value in settings.items())
    return known if is_same else TaskList(known.name, (), {})


def build_distribution(config: DictConfig) -> TaskDistribution | None:
    """The task distribution; None if there is none."""
    return build(config.tasks, _partial_=False) if "_target_" in config.tasks else None


def task_specs(config: DictConfig) -> list[TaskSpec]:
    """The tasks of a distribution that a command draws: of an evaluation one split, else train and validation."""
    distribution = build_distribution(config)
    if distribution is None:
        return []
    if not _is_evaluation(config):
        return distribution.specs("train", "validation")
    if not (specs := distribution.specs(distribution.split)):
        raise ValueError(f"tasks.split={distribution.split}: {distribution.name} has no tasks of this split.")
    return specs


def _is_evaluation(config: DictConfig) -> bool:
    """Whether a configuration is one of `esper.evaluate`; experiments set keys of `esper.run` in it too."""
    return "controllers" in config


def _host_builder(node: DictConfig) -> Callable[[], Host]:
    """Builds a new host with each call. One without nested objects needs no Hydra, so that workers start quickly."""
    has_nested = any(key.endswith("._target_") for key in flatten(node))
    builder: Callable[[], Host] = partial(build, node) if has_nested else build(node, _partial_=True)
    return builder


def build_action_space(config: DictConfig) -> ActionSpace:
    """The action space over the slots of all configured hosts."""
    return _build_action_space(config, outline_hosts(config))


def build_padded_space(config: DictConfig) -> ActionSpace:
    """The action space over the slots of all tasks of a distribution, so that it does not depend on the split."""
    distribution = build_distribution(config)
    if distribution is None:
        return build_action_space(config)
    return _build_action_space(config, _outline({spec.name: _spec_node(spec) for spec in distribution.specs()}))


def _build_action_space(config: DictConfig, hosts: Mapping[str, Host]) -> ActionSpace:
    chosen = config.slots.names
    slots = [name for name in slot_names(hosts.values()) if chosen is None or name in chosen]
    names = config.slots.blueprints or list(blueprints(next(iter(hosts.values())).topology))
    space: ActionSpace = build(config.actions, _partial_=False, slots=slots, blueprints=list(names))
    return space


def host_nodes(config: DictConfig) -> dict[str, DictConfig]:
    """The nodes of the hosts that episodes are drawn from, by name; a single host has the name host.

    In a task distribution the name of a host is that of its task.
    """
    if specs := task_specs(config):
        return {spec.name: _spec_node(spec) for spec in specs}
    if "hosts" not in config.host:
        return {"host": config.host}
    if not config.host.hosts:
        raise ValueError("host.hosts={}: must have at least one host; host=cifar_mixed is an example.")
    return {str(name): node for name, node in config.host.hosts.items()}


def _spec_node(spec: TaskSpec) -> DictConfig:
    return OmegaConf.create(dict(spec.host))


def variant_nodes(config: DictConfig, names: Sequence[str] = VARIANTS) -> dict[str, dict[str, DictConfig]]:
    """The nodes of wider and deeper variants of each host: by host, then by variant, without those it does not have."""
    return {name: _variant_nodes(node, names) for name, node in host_nodes(config).items()}


def _variant_nodes(node: DictConfig, names: Sequence[str]) -> dict[str, DictConfig]:
    target = get_object(node._target_)
    if not (isinstance(target, type) and issubclass(target, Host)):
        return {}
    arguments = OmegaConf.to_container(node, resolve=True)
    assert isinstance(arguments, dict)
    plain = {str(key): value for key, value in arguments.items()}
    changed = {name: variant_arguments(target, plain, name) for name in names}
    return {name: OmegaConf.create(each) for name, each in changed.items() if each is not None}


def host_variants(config: DictConfig, names: Sequence[str] = VARIANTS) -> dict[str, dict[str, Callable[[], Host]]]:
    """Builders of the variants of each host: by host, then by variant. Nothing is built yet."""
    return {
        host: {name: _host_builder(node) for name, node in variants.items()}
        for host, variants in variant_nodes(config, names).items()
    }


def outline_hosts(config: DictConfig) -> dict[str, Host]:
    """The hosts on the meta device, without weights, by name. All must have the same topology."""
    return _outline(host_nodes(config))


def _outline(nodes: Mapping[str, DictConfig]) -> dict[str, Host]:
    with torch.device("meta"):
        hosts: dict[str, Host] = {name: build(node) for name, node in nodes.items()}
    (first, host), *others = hosts.items()
    for name, other in others:
        if host.topology != other.topology:
            raise ValueError(
                f"host.hosts.{name}: must have the topology of {first} ({host.topology}), but has {other.topology}."
            )
    return hosts


def outline_host(config: DictConfig) -> Host:
    """The host on the meta device, without weights. Of several hosts it is the first."""
    return next(iter(outline_hosts(config).values()))


def slot_names(hosts: Iterable[Host]) -> list[str]:
    """The slots of all hosts by name, each once, in the order of each host."""
    return merge_slot_names([slot.name for slot in host.slots] for host in hosts)


def grows_hosts(config: DictConfig) -> bool:
    """Whether the environment is one of growing hosts."""
    return bool(config.environment._target_ == "esper.environment.Environment")
