"""Controllers by name, with the lifecycle rules and the actions that they decide about."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esper.controllers import (
    Controller,
    FragrowController,
    GatedController,
    HeuristicController,
    NoGrowth,
    PolicyController,
    SavedController,
    ScheduleController,
    TunedRule,
    build_policy,
    read_controller,
)
from esper.lifecycle import FEW_HEADS, PLAIN_OPTIONS, ActionSpace, Gate, Rules
from esper.observation import FEATURE_SETS, FeatureSet, make_layout

FIRST_CHOICE = ("depthwise", "window", "mlp_small", "conv_small", "lora")  # of rules with one blueprint
CHEAP_FIRST = ("depthwise", "window", "norm", "attention", "conv_small", "conv_light", "mlp_small", "lora")
RULE_OPS = ("WAIT", "GERMINATE", "PRUNE", "FOSSILIZE")
RULE_SETTINGS: dict[str, dict[str, Any]] = {  # as in conf/controller with automatic commits, which a test compares
    "gated": {"earliest": 0.0, "wait": 0.15, "min_contribution": 0.0},
    "tuned_rule": {
        "start": 0.1, "trial": 0.1, "plant": 0.1, "candidates": 3, "min_worth": 0.02, "price": 0.05, "enough": 0.5,
        "positions": 2.0, "normalising": 0.0, "gating": 0.0,
    },
    "fragrow": {"max_interval": 1.0, "latest": 0.9},
    "heuristic": {
        "plateau_gain": 0.5, "plateau_steps": 2, "earliest": 0.1, "latest": 0.9, "cooldown": 0.1,
        "steady_range": (-0.05, 0.03), "calm_steps": 2, "max_drop": 2.0, "patience": 0.1, "min_contribution": 0.5,
        "prune_penalty": 2.0, "penalty_decay": 0.5, "max_penalty": 3.0,
    },
}  # fmt: skip


AnyController = Controller[Any]


@dataclass(frozen=True)
class DecisionMaker:
    """What decides about growth, and about what."""

    name: str
    space: ActionSpace
    rules: Rules
    features: FeatureSet
    build: Callable[[Sequence[str]], AnyController]  # from the optional groups of features that are missing


def choose_controller(
    controller: object,
    *,
    slots: Sequence[str],
    blueprints: Sequence[str],
    traits: Mapping[str, tuple[str, ...]],
    steps: int,
    settings: Mapping[str, Any] | None = None,
) -> DecisionMaker:
    """The decision-maker that `controller` means.

    Arguments:
        controller: pretrained, a name of RULES, the path of a checkpoint or of a run, a Controller, or a function that
            returns one for an ActionSpace
        slots, blueprints: that it chooses from
        traits: what each blueprint does
        steps: number of decisions
        settings: that replace the defaults of a rule
    """
    space = ActionSpace(slots=slots, blueprints=blueprints, ops=RULE_OPS, heads=FEW_HEADS, fixed=PLAIN_OPTIONS)
    rules = quick_rules(steps)
    if isinstance(controller, str) and controller in RULES:
        build = RULES[controller]
        return DecisionMaker(
            controller,
            space,
            rules,
            FEATURE_SETS["scale_free"],
            lambda missing: build(space, rules, dict(settings or {})),
        )
    if settings:
        raise ValueError(f"settings={dict(settings)}: are for controller={', '.join(RULES)}, not {controller!r}.")
    if not isinstance(controller, str):
        made: Any = controller if hasattr(controller, "act") else None
        name = type(controller).__name__
        if made is None and not callable(controller):
            raise ValueError(
                f"controller={controller!r}: must be pretrained, {', '.join(RULES)}, a checkpoint, or a Controller."
            )
        factory: Any = controller
        return DecisionMaker(
            name, space, rules, FEATURE_SETS["scale_free"], lambda missing: made if made is not None else factory(space)
        )
    try:
        saved = read_controller(controller)
    except ValueError as error:
        if controller.replace("_", "").isalpha() and "there is no such file" in str(error):
            raise ValueError(
                f"controller={controller}: must be pretrained, {', '.join(RULES)}, a checkpoint, or a Controller."
            ) from None
        raise
    return _trained(saved, slots, blueprints, traits, steps)


def quick_rules(steps: int) -> Rules:
    """A new seed is the identity, so it blends in at once; it is kept unless it is pruned."""
    gates = {
        "germinated": Gate(dwell=0),
        "training": Gate(dwell=0),
        "blending": Gate(dwell=0, full_alpha=True),
        "holding": Gate(dwell=0, health=0.1),  # a non-finite seed has health 0
    }
    return Rules(steps=steps, gates=gates, prune_age=1, cooldown=1, max_live=None, commit="auto", ramp=0)


def _trained(
    saved: SavedController,
    slots: Sequence[str],
    blueprints: Sequence[str],
    traits: Mapping[str, tuple[str, ...]],
    steps: int,
) -> DecisionMaker:
    """A trained controller with the ops, the heads and the rules that it was trained with."""
    fixed = {**PLAIN_OPTIONS, **saved.layout.defaults, **(saved.actions.get("fixed") or {})}
    space = ActionSpace(
        slots=slots,
        blueprints=blueprints,
        ops=saved.layout.ops,
        heads=saved.layout.head_names,
        fixed=fixed,
        all_slots=saved.layout.all_slots,
    )
    features = FEATURE_SETS[saved.layout.features]
    layout = make_layout(space, features, traits)
    policy = build_policy(saved, layout)
    return DecisionMaker(
        saved.path.stem,
        space,
        _saved_rules(saved, steps),
        features,
        lambda missing: PolicyController(policy, greedy=saved.is_greedy, missing=missing),
    )


def _saved_rules(saved: SavedController, steps: int) -> Rules:
    """The rules of a controller's training; seeds are always committed automatically."""
    settings = {key: value for key, value in saved.lifecycle.items() if not key.startswith("_")}
    if not settings:
        return quick_rules(steps)
    gates = {
        stage: Gate(**{key: value for key, value in gate.items() if not key.startswith("_")})
        for stage, gate in settings["gates"].items()
    }
    return Rules(**{**settings, "gates": gates, "steps": steps, "commit": "auto"})


def _first(space: ActionSpace) -> list[str]:
    """The blueprint of rules that grow one: a usual one, or the first that there is."""
    return [*FIRST_CHOICE, *space.blueprints]


def _gated(space: ActionSpace, rules: Rules, settings: dict[str, Any]) -> AnyController:
    return GatedController(space, **{"blueprint": _first(space), **RULE_SETTINGS["gated"], **settings})


def _tuned_rule(space: ActionSpace, rules: Rules, settings: dict[str, Any]) -> AnyController:
    return TunedRule(space, **{**RULE_SETTINGS["tuned_rule"], **settings})


def _fragrow(space: ActionSpace, rules: Rules, settings: dict[str, Any]) -> AnyController:
    return FragrowController(space, **{"blueprint": _first(space), **RULE_SETTINGS["fragrow"], **settings})


def _heuristic(space: ActionSpace, rules: Rules, settings: dict[str, Any]) -> AnyController:
    own = [name for name in CHEAP_FIRST if name in space.blueprints] or list(space.blueprints)
    return HeuristicController(space, **{"blueprints": own, **RULE_SETTINGS["heuristic"], **settings})


def _schedule(space: ActionSpace, rules: Rules, settings: dict[str, Any]) -> AnyController:
    entries = [{"at": at, "slot": slot, "blueprint": _first(space)} for at, slot in ((0.25, "middle"), (0.5, "last"))]
    return ScheduleController(space, **{"entries": entries, "rules": rules, **settings})


def _none(space: ActionSpace, rules: Rules, settings: dict[str, Any]) -> AnyController:
    return NoGrowth(space, **settings)


RULES: dict[str, Callable[[ActionSpace, Rules, dict[str, Any]], AnyController]] = {
    "gated": _gated,
    "tuned_rule": _tuned_rule,
    "fragrow": _fragrow,
    "heuristic": _heuristic,
    "schedule": _schedule,
    "none": _none,
}
