"""Checks of a whole configuration, before data is loaded and objects are built."""

from collections.abc import Mapping
from importlib.util import find_spec

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from esper.blueprints import blueprint
from esper.config.build import build, grows_hosts, outline_hosts, slot_names
from esper.config.schema import EvaluationConfig, RunConfig, TuneConfig
from esper.config.signatures import check_target, check_value, read_signature
from esper.config.suggest import suggest
from esper.hosts import Host
from esper.plugins import import_user_module
from esper.telemetry.metrics import METRICS, find_metric


def check_training_config(config: DictConfig) -> None:
    """Refuse a configuration of `esper.run` that cannot be trained with."""
    check_types(config, RunConfig)
    _check_device("device", config.device)
    if str(config.trainer.precision) not in ("32", "32-true"):
        raise ValueError(
            f"trainer.precision={config.trainer.precision}: must be 32-true, so that log-probabilities of the update "
            "equal those of the rollout; environment.precision sets the precision of hosts."
        )
    for key in ("optimized_metric", "callbacks.checkpoints.best"):
        metric = OmegaConf.select(config, key)
        if metric is not None and find_metric(metric) is None:
            raise ValueError(f"{key}={metric}: must be a metric of a run; {suggest(metric, [m.tag for m in METRICS])}.")
    settings, envs = build(config.ppo), config.environment.envs
    if settings.minibatches * settings.accumulate > envs:
        raise ValueError(
            f"ppo.minibatches={settings.minibatches}, ppo.accumulate={settings.accumulate}: their product must be at "
            f"most the {envs} episodes of a round (environment.envs)."
        )
    if config.ppo.gamma != config.gamma:
        raise ValueError(f"ppo.gamma={config.ppo.gamma}: must be gamma={config.gamma}, which the reward uses.")
    for split in ("train", "validation") if "_target_" in config.tasks else ():
        if config.tasks.counts.get(split, 0) == 0:
            raise ValueError(
                f"tasks.counts.{split}=0: must be at least 1, because every training run has such episodes."
            )
    if settings.predicts_episode_return and config.environment.get("time_limit") == "truncate":
        raise ValueError(
            f"environment.time_limit=truncate: must be terminate with gamma={config.gamma}, where a critic of whole "
            "episodes would replace every reward; ppo.value_target=rest allows it."
        )
    _check_commit(config)
    if grows_hosts(config):
        _check_growth(config)


def check_config(config: DictConfig) -> None:
    """Refuse a configuration of `esper.evaluate` whose environment of growing hosts cannot be built."""
    check_types(config, EvaluationConfig)
    _check_commit(config)
    _check_growth(config)


def check_tuning_config(config: DictConfig) -> None:
    """Refuse a configuration of `esper.tune` whose environment cannot be built."""
    check_types(config, TuneConfig)
    _check_commit(config)
    if grows_hosts(config):
        _check_growth(config)


def check_types(config: DictConfig, schema: type) -> None:
    """Refuse unknown keys, and values that do not fit the annotations of the schema or of the targets."""
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error.msg).splitlines()[0]}.") from None
    assert isinstance(plain, dict)
    target = config.environment.get("_target_")
    check_target("environment._target_", target)
    unused = set() if _has_rules(config) else {"lifecycle"}
    if schema is not RunConfig:
        unused |= RunConfig.__annotations__.keys() - schema.__annotations__.keys()
    check_value("", {key: value for key, value in plain.items() if key not in unused}, schema)


def _has_rules(config: DictConfig) -> bool:
    """Whether the environment has lifecycle rules."""
    return "rules" in read_signature(config.environment._target_).types


def _check_commit(config: DictConfig) -> None:
    """Refuse rules and actions with which every seed would be lost at the end of an episode."""
    if not _has_rules(config) or config.lifecycle.get("commit") != "explicit":
        return
    ops = config.actions.get("ops", ())
    if "GERMINATE" in ops and "FOSSILIZE" not in ops:
        raise ValueError(
            f"lifecycle.commit=explicit: must be auto (as in lifecycle=quick), because actions.ops={list(ops)} has no "
            "FOSSILIZE, so that every seed would be lost."
        )


def _check_growth(config: DictConfig) -> None:
    import_plugins(config)
    for key in ("device", "data.device"):
        _check_device(key, OmegaConf.select(config, key))
    train = config.data.get("train")
    if train is not None and config.environment.batch > train:
        raise ValueError(f"environment.batch={config.environment.batch}: must be at most data.train={train}.")
    _check_reward(config)
    hosts = outline_hosts(config)
    _check_slots(config, hosts)
    host = next(iter(hosts.values()))
    if config.slots.blueprints is not None and not config.slots.blueprints:
        raise ValueError("slots.blueprints=[]: must name at least one, or be null for all of the host's topology.")
    for name in config.slots.blueprints or ():
        blueprint(host.topology, name)
    kind = "text" if host.topology == "transformer" else "images"
    if (kind == "text") != ("vocabulary" in config.data):
        raise ValueError(
            f"data: must be {kind} for a host of topology {host.topology}; choose another data set or host."
        )


def _check_slots(config: DictConfig, hosts: Mapping[str, Host]) -> None:
    """Refuse slots that no host has, and hosts without any of the chosen slots."""
    names, chosen = slot_names(hosts.values()), config.slots.names
    if chosen is not None and not chosen:
        raise ValueError(f"slots.names=[]: must name at least one of {', '.join(names)}, or be null for all.")
    for name in chosen or ():
        if name not in names:
            owner, has = ("this host", "it has") if len(hosts) == 1 else ("any host", "they have")
            raise ValueError(f"slots.names: {name} is not a slot of {owner}; {has} {', '.join(names)}.")
    for name, host in hosts.items():
        own = [slot.name for slot in host.slots]
        if not set(own) & set(names if chosen is None else chosen):
            key, slots = ("host" if len(hosts) == 1 else f"host.hosts.{name}"), ", ".join(own) or "none"
            raise ValueError(f"{key}: must have at least one of the slots in slots.names, but has {slots}.")


def _check_device(key: str, name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{key}={name}: must be a device of torch, such as cpu or cuda:0.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{key}={name}: there is no CUDA device here; cpu is allowed.")


def _check_reward(config: DictConfig) -> None:
    for name, term in config.reward.terms.items():
        if "gamma" in term and term.gamma != config.gamma:
            raise ValueError(f"reward.terms.{name}.gamma={term.gamma}: must be gamma={config.gamma}, which PPO uses.")


def import_plugins(config: DictConfig) -> None:
    """Import the user's modules that register blueprints (`slots.plugins`)."""
    for name in config.slots.get("plugins") or []:
        import_user_module(name, f"slots.plugins={list(config.slots.plugins)}")


def module_exists(module: str) -> bool:
    """Whether Python can find a module."""
    parts = module.split(".")
    return all(find_spec(".".join(parts[:count])) for count in range(1, len(parts) + 1))
