"""Which arms an evaluation runs, and whether they can be compared."""

import math
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from esper.checkpoints import checkpoint_names
from esper.config import grows_hosts, host_nodes, known_tasks, variant_nodes
from esper.config.signatures import check_target
from esper.controllers import find_checkpoint
from esper.evaluation.agents import agent_name, load_agent
from esper.evaluation.arms import ARMS, MOMENT, ORACLE, PREFIX, Arm, arms_of_clock, base_name, default_arms, get_arm
from esper.evaluation.plan_choices import is_distribution, training_config
from esper.evaluation.rule_choices import RULE_ARMS
from esper.hosts import CNNHost, parse_variant
from esper.records import EpisodeRecord, read_lines
from esper.tasks import FixedPlan


def has_budget(config: DictConfig) -> bool:
    """Whether episodes have a budget of FLOPs instead of a number of batches."""
    return "batches" in config.environment and config.environment.batches is None


def selected_arms(config: DictConfig) -> list[str]:
    """The requested arms, and the reference if it is named or another arm is derived from it."""
    has_checkpoint, is_budgeted = bool(checkpoint_names(config.ckpt)), has_budget(config)
    requested, existing = config.controllers, arms_of_clock(is_budgeted)
    if requested is None:
        arms = [*default_arms(is_budgeted), *(["ppo"] if has_checkpoint else [])]
    elif requested in ("all", "rules"):
        with_policies = has_checkpoint and requested == "all"
        listed = {name: arm for name, arm in existing.items() if arm.is_default and name != ORACLE}
        arms = [name for name, arm in listed.items() if with_policies or arm.needs != "ckpt"]
        arms = [name for name in arms if not name.endswith("_lr") or config.search.lr_scales]
        arms = [name for name in arms if name != "best_fixed" or fixed_plan(config) is not None]
        arms = [name for name in arms if name != "net2net" or config.net2net_host in _common_widths(name, config)]
    else:
        arms = list(dict.fromkeys([requested] if isinstance(requested, str) else map(str, requested)))
    if (agent := agent_name(config)) is not None and agent not in arms:
        arms.append(agent)
    for name in arms:
        check_arm(name, config)
    derived = [
        name for name in arms if get_arm(name).needs == "reference" and not (name == "replay" and config.replay.records)
    ]
    if (derived or config.reference) and reference_arm(config) not in arms:
        arms.append(reference_arm(config))
    if is_distribution(config) and is_budgeted and "best_static" in arms:
        arms.append(ORACLE)  # each task is searched already
    return list(dict.fromkeys(part for name in arms for part in _with_prefixes(name, config)))


def _with_prefixes(name: str, config: DictConfig) -> list[str]:
    """The arm best_static with its shorter searches; every other arm alone."""
    if name != "best_static":
        return [name]
    return [*(f"{name}@{budgets:g}" for budgets in list(config.search.budgets)[:-1]), name]


def check_arm(name: str, config: DictConfig) -> None:
    """Refuse the name of an arm that does not exist, or not with the clock of this evaluation."""
    base, at, number = name.partition("@")
    known, is_budgeted = dict.fromkeys([*arms_of_clock(has_budget(config)), *config.controller]), has_budget(config)
    if name == agent_name(config):
        return
    if base not in ARMS and base not in config.controller:
        raise ValueError(
            f"controllers: {name} is unknown; must be of {', '.join(known)}, or all for every arm, or rules for those "
            "without a ckpt."
        )
    arm = get_arm(base)
    if base not in known:
        other = f"; use {arm.replaced_by}" if arm.replaced_by else ""
        need = (
            f"exists without a budget of FLOPs only{other}"
            if is_budgeted
            else ("needs a budget of FLOPs; environment=budget sets one")
        )
        raise ValueError(f"controllers: {name} {need}.")
    if at:
        _check_number(name, arm, number, config)
    if base == "net2net" and config.net2net_host not in (known_widths := _common_widths(name, config)):
        allowed = ", ".join(known_widths) or "none, as only CNNHost can be widened"
        raise ValueError(f"net2net_host={config.net2net_host}: must be a wider variant of the host; it has {allowed}.")
    if base == ORACLE and not is_distribution(config):
        raise ValueError(
            f"controllers: {name} needs a task distribution; with tasks=single the report names the arm with the best "
            "plan."
        )
    if base == "best_fixed" and fixed_plan(config) is None:
        raise ValueError(
            f"controllers: {name} needs known plans of training tasks, but tasks={config.tasks.get('name', 'single')} "
            "has none; python -m esper.tasks NAME --headroom --write measures those of a distribution."
        )
    if arm.has_search and is_budgeted:
        check_search(config)
        if is_distribution(config) and name in RULE_ARMS and not config.tasks.counts.get("train", 0):
            raise ValueError(f"tasks.counts.train=0: must be at least 1 for the arm {name}, a rule for all tasks.")
        if base.endswith("_lr") and not config.search.lr_scales:
            raise ValueError(f"search.lr_scales=null: must be a list of factors for the arm {name}.")


def fixed_plan(config: DictConfig) -> FixedPlan | None:
    """The best plan for all training tasks of the distribution, if it is known."""
    return known_tasks(config).fixed_plan


def widths(config: DictConfig) -> list[str]:
    """The variants that every host can be widened to without changing its function."""
    targets = [check_target("host._target_", node._target_) for node in host_nodes(config).values()]
    if not all(isinstance(target, type) and issubclass(target, CNNHost) for target in targets):
        return []
    first, *others = variant_nodes(config).values()
    return [name for name in first if not parse_variant(name)[1] and all(name in other for other in others)]


def _common_widths(name: str, config: DictConfig) -> list[str]:
    """The variants for net2net; without a moment in its name it is searched on training tasks, which need them too."""
    if name == "net2net" and is_distribution(config):
        own = widths(training_config(config))
        return [width for width in widths(config) if width in own]
    return widths(config)


def _check_number(name: str, arm: Arm, number: str, config: DictConfig) -> None:
    """Refuse a number after @ that an arm does not take."""
    if not arm.number:
        numbered = ", ".join(name for name, other in ARMS.items() if other.number)
        raise ValueError(f"controllers: {name} must be without a number; {numbered} take one.")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if arm.number == MOMENT and not 0 <= value <= 1:
        raise ValueError(f"controllers: {name} must have {MOMENT} after @, such as {base_name(name)}@0.25.")
    if arm.number == PREFIX and value not in list(config.search.budgets)[:-1]:
        allowed = ", ".join(f"{budgets:g}" for budgets in list(config.search.budgets)[:-1]) or "none"
        raise ValueError(f"controllers: {name} must have {PREFIX} before the last after @, which are {allowed}.")


def check_search(config: DictConfig) -> None:
    """Refuse a search without a budget."""
    budgets = list(config.search.budgets)
    if not budgets or budgets[0] < 1 or sorted(set(budgets)) != budgets:
        raise ValueError(
            f"search.budgets={budgets}: must be numbers of budgets of an episode, at least 1 and ascending, such as "
            "[1,4,16]."
        )


def reference_arm(config: DictConfig) -> str:
    without_checkpoint = "gated" if has_budget(config) else "schedule"
    own = agent_name(config) or ("ppo" if checkpoint_names(config.ckpt) else without_checkpoint)
    return str(config.reference or own)


def check_agent(config: DictConfig) -> None:
    """Refuse an agent that cannot be loaded, or that has the name of another arm."""
    if config.agent is None:
        return
    name = load_agent(config.agent).__name__
    if name in ARMS or name in config.controller:
        raise ValueError(f"agent={config.agent}: the class must not have the name of an arm, because it is one.")


def check_arms(config: DictConfig) -> None:
    """Refuse arms that cannot run, before anything is built."""
    if not grows_hosts(config):
        raise ValueError(f"environment={config.environment._target_}: must be one that grows hosts.")
    check_agent(config)
    known = arms_of_clock(has_budget(config))
    if config.controllers is not None and not config.controllers:
        raise ValueError(f"controllers=[]: must name at least one of {', '.join(known)}, or be null, all or rules.")
    reference = reference_arm(config)
    own = [name for name in (agent_name(config),) if name is not None]
    allowed = [name for name in dict.fromkeys([*known, *config.controller, *own]) if get_arm(name).needs != "reference"]
    if base_name(reference) not in allowed:
        raise ValueError(f"reference={reference}: must be one of {', '.join(allowed)}.")
    arms = selected_arms(config)
    others = [name for name in arms if name != reference]
    if config.primary is not None and config.primary not in others:
        raise ValueError(f"primary={config.primary}: must be null or one of {', '.join(others)}.")
    for name in arms:
        if get_arm(name).needs == "ckpt" and not checkpoint_names(config.ckpt):
            value = "null" if config.ckpt is None else config.ckpt
            raise ValueError(f"ckpt={value}: must name a checkpoint or a run's directory for the arm {name}.")
        needs_two = name == "ppo_permuted" or (name == "replay" and not config.replay.records)
        if config.episodes < 2 and needs_two:
            raise ValueError(f"episodes={config.episodes}: must be at least 2 for the arm {name}.")
    if "ppo_permuted" in arms and config.environment.envs < 2:
        raise ValueError(f"environment.envs={config.environment.envs}: must be at least 2 for the arm ppo_permuted.")
    needs_count = "best_open_loop" in arms and not has_budget(config)
    if needs_count and not checkpoint_names(config.ckpt) and config.schedules is None:
        raise ValueError("schedules=null: must be a number for the arm best_open_loop without a ckpt.")
    if "replay" in arms and config.replay.records:
        load_recorded_actions(config)
    for name in checkpoint_names(config.ckpt):
        find_checkpoint(name)
    check_export(config, arms)


def check_export(config: DictConfig, arms: Sequence[str]) -> None:
    selector = config.export
    if not (selector is None or selector in ("best", *arms) or isinstance(selector, int)):
        raise ValueError(
            f"export={selector}: must be best, an arm of this evaluation ({', '.join(arms)}), or the number of a line."
        )


def load_recorded_actions(config: DictConfig) -> list[dict[str, str]]:
    """The actions of the episode that `replay` repeats."""
    path, line = config.replay.records, config.replay.line
    lines = list(read_lines(Path(path)))
    if not lines:
        raise ValueError(f"replay.records={path}: has no episodes.")
    if not 0 <= line < len(lines):
        raise ValueError(f"replay.line={line}: must be between 0 and {len(lines) - 1}.")
    try:
        episode = EpisodeRecord.from_dict(lines[line])
    except ValueError as error:
        raise ValueError(f"replay.records={path}: line {line} {error}.") from None
    return [step.action for step in episode.steps]
