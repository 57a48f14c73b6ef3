"""Checks of a whole configuration, before data is loaded and objects are built."""

from importlib import import_module
from importlib.util import find_spec

import torch
from omegaconf import DictConfig, OmegaConf

from esper.blueprints import blueprint
from esper.config.build import build, grows_hosts, outline_host
from esper.config.compose import compose_config
from esper.config.suggest import suggest
from esper.rewards import terms as reward_terms
from esper.telemetry.metrics import METRICS, find_metric


def check_training_config(config: DictConfig) -> None:
    """Refuse a configuration of `esper.run` that cannot be trained with."""
    check_top_level_keys(config, "run")
    counts = {"rounds": config.rounds, "environment.envs": config.environment.envs, "decisions": config.decisions or 1}
    for key, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{key}={value}: must be a whole number of at least 1.")
    if not isinstance(config.validate_every, int) or config.validate_every < 0:
        raise ValueError(f"validate_every={config.validate_every}: must be a whole number of at least 0.")
    start = config.get("start")
    if start is not None and not (isinstance(start, str) and start):
        raise ValueError(f"start={start}: must name one trained controller, or be null.")
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
    if grows_hosts(config):
        check_config(config)


def check_config(config: DictConfig) -> None:
    """Refuse a configuration whose environment of growing hosts cannot be built."""
    import_plugins(config)
    for key in ("envs", "steps", "batch", "batches", "validation_batch", "gradient_stride"):
        value = config.environment[key]
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"environment.{key}={value}: must be a whole number of at least 1.")
    if str(config.device).startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={config.device}: there is no CUDA device here; cpu is allowed.")
    train = config.data.get("train")
    if train is not None and config.environment.batch > train:
        raise ValueError(f"environment.batch={config.environment.batch}: must be at most data.train={train}.")
    _check_reward(config)
    host = outline_host(config)
    names = [slot.name for slot in host.slots]
    chosen = config.slots.names
    if chosen is not None and not chosen:
        raise ValueError(f"slots.names=[]: must name at least one of {', '.join(names)}, or be null for all.")
    for name in chosen or ():
        if name not in names:
            raise ValueError(f"slots.names: {name} is not a slot of this host; it has {', '.join(names)}.")
    if config.slots.blueprints is not None and not config.slots.blueprints:
        raise ValueError("slots.blueprints=[]: must name at least one, or be null for all of the host's topology.")
    for name in config.slots.blueprints or ():
        blueprint(host.topology, name)
    kind = "text" if host.topology == "transformer" else "images"
    if (kind == "text") != ("vocabulary" in config.data):
        raise ValueError(
            f"data: must be {kind} for a host of topology {host.topology}; choose another data set or host."
        )


def _check_reward(config: DictConfig) -> None:
    known = [
        name
        for name, term in vars(reward_terms).items()
        if isinstance(term, type) and "weight" in vars(term).get("__annotations__", {})
    ]
    for name, term in config.reward.terms.items():
        if "_target_" not in term:
            raise ValueError(f"reward.terms.{name}: has no _target_; the chosen reward has no such term.")
        target = str(term._target_)
        if target.startswith(f"{reward_terms.__name__}.") and target.rpartition(".")[2] not in known:
            raise ValueError(f"reward.terms.{name}._target_={target}: must be one of {', '.join(sorted(known))}.")
        if "gamma" in term and term.gamma != config.gamma:
            raise ValueError(f"reward.terms.{name}.gamma={term.gamma}: must be gamma={config.gamma}, which PPO uses.")


def check_top_level_keys(config: DictConfig, name: str) -> None:
    """Refuse unknown top-level keys; nested keys are checked against the signatures of their targets."""
    known = [str(key) for key in compose_config(name)]
    for key in map(str, config):
        if key not in known:
            raise ValueError(f"{key}: there is no such key; {suggest(key, known)}.")


def import_plugins(config: DictConfig) -> None:
    """Import the user's modules that register blueprints (`slots.plugins`)."""
    names = config.slots.get("plugins") or []
    if isinstance(names, str):
        raise ValueError(f"slots.plugins={names}: must be a list, [{names}].")
    for name in names:
        if not module_exists(name):
            raise ValueError(f"slots.plugins: there is no module {name}; its directory must be here or on PYTHONPATH.")
        import_module(name)


def module_exists(module: str) -> bool:
    """Whether Python can find a module."""
    parts = module.split(".")
    return all(find_spec(".".join(parts[:count])) for count in range(1, len(parts) + 1))
