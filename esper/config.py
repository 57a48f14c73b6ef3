"""Where the configuration lives, how it is checked before anything is built, and how it becomes objects."""

import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, InstantiationException, MissingConfigException
from hydra.utils import get_class, get_object, instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from esper.blueprints import blueprint, blueprints
from esper.data import DataError
from esper.environment import Environment
from esper.hosts import Host
from esper.lifecycle import ActionSpace
from esper.rewards import terms as reward_terms
from esper.telemetry.glossary import GLOSSARY, find

_PACKAGED = Path(__file__).parent / "conf"  # in an installed wheel
OURS = ("hydra", "main", "schema")  # where Hydra finds configuration by itself
CONF = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent / "conf"


def load(preset: str, **changes: object) -> Any:
    """Build what a preset describes: `load("host/cifar_baseline")`, `load("data/cifar10", train=1000)`.

    Keyword arguments win over the preset's values.
    """
    group = preset.partition("/")[0]
    if not (CONF / f"{preset}.yaml").is_file():
        known = ", ".join(sorted(f"{group}/{path.stem}" for path in (CONF / group).glob("*.yaml")))
        raise ValueError(f"preset={preset}: there is none of that name; there are {known or sorted(_groups())}.")
    node = compose_config(preset)[group]
    if "_target_" not in node:
        raise ValueError(f"preset={preset}: is several in one; name one of them.")
    return build(node, **changes, _partial_=False)


def compose_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """A configuration, composed as by the command line; a Hydra application that is running stays as it is."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose(config_name=name, overrides=[*overrides, *_elsewhere()])
    finally:
        GlobalHydra.instance().hydra = running


def _elsewhere() -> list[str]:
    """The directories of configuration that the running application was given besides ours, as an override."""
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    given = [f"'{source.schema}://{source.path}'" for source in sources if source.provider not in OURS]
    return [f"hydra.searchpath=[{','.join(given)}]"] if given else []


def import_plugins(config: DictConfig) -> None:
    """Import the modules of the user's own that register blueprints."""
    names = config.slots.get("plugins") or []
    if isinstance(names, str):
        raise ValueError(f"slots.plugins={names}: must be a list, [{names}].")
    for name in names:
        if not there(name):
            raise ValueError(f"slots.plugins: there is no module {name}; its directory must be here or on PYTHONPATH.")
        import_module(name)


def there(module: str) -> bool:
    """Whether Python can find a module."""
    parts = module.split(".")
    return all(find_spec(".".join(parts[:count])) for count in range(1, len(parts) + 1))


def _groups() -> list[str]:
    return [path.name for path in CONF.iterdir() if path.is_dir()]


def build(node: DictConfig, **changes: object) -> Any:
    """Build what a node of a configuration describes; keyword arguments win over its values.

    Nothing that is built ever sees a piece of configuration: containers arrive as plain ones, objects as themselves.
    """
    target = node.get("_target_", "configuration")
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
            raise ValueError(f"{target}: {word} is no setting of it; {nearest(word, known)}.") from None
        raise ValueError(f"{target}: {error}.") from None


def check(config: DictConfig) -> None:
    """Refuse a configuration that cannot work, in one sentence, before data is loaded or anything is built."""
    import_plugins(config)
    for key in ("envs", "steps", "batch", "batches", "validation_batch", "gradient_stride"):
        value = config.environment[key]
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"environment.{key}={value}: must be a whole number of at least 1.")
    if str(config.device).startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={config.device}: there is no CUDA device here; cpu is allowed.")
    train = config.data.get("train")
    if train is not None and config.environment.batch > train:
        raise ValueError(f"environment.batch={config.environment.batch}: is larger than data.train={train}.")
    _check_reward(config)
    host = _outline(config)
    names = [slot.name for slot in host.slots]
    chosen = config.slots.names
    if chosen is not None and not chosen:
        raise ValueError(f"slots.names=[]: must name at least one of {', '.join(names)}, or be null for all.")
    for name in chosen or ():
        if name not in names:
            raise ValueError(f"slots.names: {name} is no slot of this host; it has {', '.join(names)}.")
    if config.slots.blueprints is not None and not config.slots.blueprints:
        raise ValueError("slots.blueprints=[]: must name at least one, or be null for all that fit the host.")
    for name in config.slots.blueprints or ():
        blueprint(host.topology, name)
    kind = {"cnn": "images", "transformer": "text"}.get(host.topology)
    if (kind == "text") != ("vocabulary" in config.data):
        raise ValueError(f"data: a host of topology {host.topology} needs {kind}; choose another data set or host.")


def hosts(config: DictConfig) -> dict[str, DictConfig]:
    """The configuration of the host, or of each of several that episodes draw from, by name."""
    if "hosts" not in config.host:
        return {"host": config.host}
    if not config.host.hosts:
        raise ValueError("host.hosts: must name one host or more, as host=cifar_mixed does.")
    return {str(name): node for name, node in config.host.hosts.items()}


def _outline(config: DictConfig) -> Host:
    """The host, or the first of several that have the same slots, without its weights."""
    with torch.device("meta"):
        found: dict[str, Host] = {name: build(node) for name, node in hosts(config).items()}
    (first, host), *others = found.items()
    for name, other in others:
        names = [[slot.name for slot in some.slots] for some in (host, other)]
        if names[0] != names[1] or host.topology != other.topology:
            raise ValueError(
                f"host.hosts: {name} has other slots than {first} ({', '.join(names[1])}; {', '.join(names[0])}), and "
                "a controller cannot play both."
            )
    return host


def _check_reward(config: DictConfig) -> None:
    known = [
        name
        for name, term in vars(reward_terms).items()
        if isinstance(term, type) and "weight" in vars(term).get("__annotations__", {})
    ]
    for name, term in config.reward.terms.items():
        if "_target_" not in term:
            raise ValueError(f"reward.terms.{name}: has no _target_; the chosen reward has no such term to change.")
        target = str(term._target_)
        if target.startswith(f"{reward_terms.__name__}.") and target.rpartition(".")[2] not in known:
            raise ValueError(f"reward.terms.{name}: {target} is unknown; there are {', '.join(sorted(known))}.")
        if "gamma" in term and term.gamma != config.gamma:
            raise ValueError(f"reward.terms.{name}.gamma={term.gamma}: must be gamma={config.gamma}, which PPO uses.")


def check_learning(config: DictConfig) -> None:
    """Refuse a configuration that nothing can be learned with, before data is loaded or anything is built."""
    unknown_keys(config, "run")
    whole = {"rounds": config.rounds, "environment.envs": config.environment.envs, "decisions": config.decisions or 1}
    for key, value in whole.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{key}={value}: must be a whole number of at least 1.")
    if not isinstance(config.validate_every, int) or config.validate_every < 0:
        raise ValueError(f"validate_every={config.validate_every}: must be a whole number of at least 0.")
    start = config.get("start")
    if start is not None and not (isinstance(start, str) and start):
        raise ValueError(f"start={start}: must name one trained controller, or be null.")
    if str(config.trainer.precision) not in ("32", "32-true"):
        raise ValueError(
            f"trainer.precision={config.trainer.precision}: must be 32-true, so that the policy learns from exactly "
            "what it did; hosts have environment.precision."
        )
    for key in ("optimized_metric", "callbacks.checkpoints.best"):
        metric = OmegaConf.select(config, key)
        if metric is not None and find(metric) is None:
            raise ValueError(f"{key}={metric}: is reported by no run; {nearest(metric, [m.tag for m in GLOSSARY])}.")
    settings, envs = build(config.ppo), config.environment.envs
    if settings.minibatches * settings.accumulate > envs:
        raise ValueError(
            f"ppo.minibatches={settings.minibatches}, ppo.accumulate={settings.accumulate}: their product must be at "
            f"most the {envs} episodes of a round (environment.envs)."
        )
    if config.ppo.gamma != config.gamma:
        raise ValueError(f"ppo.gamma={config.ppo.gamma}: must be gamma={config.gamma}, which the reward uses.")
    if grows(config):
        check(config)


def grows(config: DictConfig) -> bool:
    """Whether hosts are grown, rather than another kind of environment played."""
    return bool(config.environment._target_ == "esper.environment.Environment")


def unknown_keys(config: DictConfig, name: str) -> None:
    """Refuse keys at the top that no configuration of this name has; deeper ones are known by what they build."""
    known = [str(key) for key in compose_config(name)]
    for key in map(str, config):
        if key not in known:
            raise ValueError(f"{key}: there is no such key; {nearest(key, known)}.")


def nearest(key: str, known: Sequence[str]) -> str:
    """The known key that was probably meant, in words."""
    found = get_close_matches(key, known, 1, 0.0)
    return f"the nearest is {found[0]}" if found else "there are none"


def build_offered(node: DictConfig, **offers: object) -> Any:
    """Build a node with those of the offered arguments that it can take."""
    takes = signature(get_object(node._target_)).parameters
    return build(node, _partial_=False, **{name: value for name, value in offers.items() if name in takes})


def build_world(config: DictConfig) -> Any:
    """What a checked configuration lets a policy play: growing hosts, or another kind of environment."""
    if grows(config):
        return build_environment(config)
    offers = {"space": partial(build_space, config), "rules": partial(build, config.lifecycle)}
    takes = signature(get_object(config.environment._target_)).parameters
    found = {name: make() for name, make in offers.items() if name in takes}
    return build_offered(config.environment, **found, reward=build(config.reward))


def entry(main: Callable[[], None], name: str) -> None:
    """Run a Hydra application; what it cannot understand of the command line is said in one sentence."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # lets its errors come here
    warnings.filterwarnings("ignore", "(?s).*is validated against ConfigStore schema")  # our launchers
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(_sentence(error, name))
    except PermissionError as error:
        sys.exit(f"{error.filename}: {error.strerror}.")
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it


def _sentence(error: Exception, name: str) -> str:
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        more = "; pip install 'esper[sweep]' brings more" if group.startswith("hydra/") else ""
        return f"{group}={option}: there is no such option; there are {', '.join(error.options)}{more}."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrong = re.match(r"Could not (?:override|append to config|delete from config).*'([^']+)'", lines[0])
    if isinstance(error, ConfigCompositionException) and wrong:
        config = compose_config(name)
        keys = [str(key) for key in config] + [path.name for path in CONF.iterdir() if path.is_dir()]
        key = str(wrong[1])
        parent, _, _ = key.rpartition(".")
        found = OmegaConf.select(config, parent) if parent else None
        if isinstance(found, DictConfig):
            keys = [f"{parent}.{name}" for name in map(str, found)]
        return f"{key}: there is no such key; {nearest(key, keys)}."
    return " ".join(lines)


def build_environment(config: DictConfig, envs: int | None = None) -> Environment:
    """The environment that a checked configuration describes; `envs` wins over its number of environments."""
    changes = {} if envs is None else {"envs": envs}
    environment: Environment = build(
        config.environment,
        hosts={name: partial(build, node) for name, node in hosts(config).items()},
        data=build(config.data),
        space=build_space(config),
        rules=build(config.lifecycle),
        optimizer=build(config.optimizer),
        governor=build(config.governor),
        reward=build(config.reward),
        _partial_=False,
        **changes,
    )
    return environment


def build_space(config: DictConfig) -> ActionSpace:
    """What may be done, in the slots of the host that a configuration has."""
    host = _outline(config)
    ordered = [slot.name for slot in host.slots if config.slots.names is None or slot.name in config.slots.names]
    offered = config.slots.blueprints or list(blueprints(host.topology))
    space: ActionSpace = build(config.actions, _partial_=False, slots=ordered, blueprints=list(offered))
    return space
