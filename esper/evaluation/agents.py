"""Agents of other people as arms of an evaluation: `agent=module:Class`."""

import sys
from collections.abc import Mapping
from hashlib import blake2b
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from esper.config import build_padded_space
from esper.config.suggest import suggest
from esper.controllers import AgentController, AgentInterface, CheckedController, Controller
from esper.environment import Environment
from esper.plugins import import_user_module


def agent_name(config: DictConfig) -> str | None:
    """The arm of the agent: the name of its class; None without an agent."""
    return None if config.agent is None else config.agent.rpartition(":")[2]


def load_agent(path: str) -> type:
    """The class of an agent, from its import path `module:Class`."""
    module, _, name = path.partition(":")
    if not (module and name.isidentifier()):
        raise ValueError(f"agent={path}: must be module:Class, such as my_agent:MyAgent.")
    import_user_module(module, f"agent={path}")
    found = vars(sys.modules[module])
    if not isinstance(found.get(name), type):
        classes = [key for key, value in found.items() if isinstance(value, type)]
        raise ValueError(f"agent={path}: {module} has no class {name}; {suggest(name, classes)}.")
    agent: type = found[name]
    if not callable(getattr(agent, "act", None)):
        raise ValueError(
            f"agent={path}: {name} must have a method act(observation, info), or begin and act of a Controller."
        )
    _accepted_arguments(path, agent, dict.fromkeys(_offered_names(agent)))
    return agent


def build_agent(config: DictConfig, environment: Environment) -> Controller[Any]:
    """The controller of the agent; its actions are checked."""
    path = str(config.agent)
    agent, name = load_agent(path), f"agent={path}"
    if is_controller(agent):
        offered = {"space": environment.space, "rules": environment.rules}
        controller: Controller[Any] = agent(**_accepted_arguments(path, agent, offered))
        return CheckedController(controller, environment.space, name=name)
    interface = AgentInterface(environment, build_padded_space(config))
    arguments = _accepted_arguments(path, agent, {"actions": interface.action_names, "columns": interface.columns})
    return AgentController(interface, lambda: agent(**arguments), name=name, flops=getattr(agent, "flops", 0))


def agent_settings(path: str) -> dict[str, str]:
    """What episodes of an agent depend on, as far as it is known: its import path, and the code of its module."""
    file = sys.modules[load_agent(path).__module__].__file__
    code = b"" if file is None else Path(file).read_bytes()
    return {"agent": path, "code": blake2b(code, digest_size=8).hexdigest()}


def is_controller(agent: type) -> bool:
    """Whether a class is a Controller, which decides for all environments, and not a plain agent."""
    return callable(getattr(agent, "begin", None))


def _offered_names(agent: type) -> tuple[str, ...]:
    """The arguments that a constructor may have."""
    return ("space", "rules") if is_controller(agent) else ("actions", "columns")


def _accepted_arguments(path: str, agent: type, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the offered arguments that the constructor has; it must not need others."""
    parameters = signature(agent).parameters.values()
    for parameter in parameters:
        is_needed = parameter.default is Parameter.empty and parameter.kind in (
            Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
        )  # fmt: skip
        if is_needed and (parameter.name not in offered or parameter.kind is Parameter.POSITIONAL_ONLY):
            raise ValueError(
                f"agent={path}: the argument {parameter.name} of {agent.__name__} must have a default, or be one of "
                f"{', '.join(offered)}."
            )
    return {parameter.name: offered[parameter.name] for parameter in parameters if parameter.name in offered}
