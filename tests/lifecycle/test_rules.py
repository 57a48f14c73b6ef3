import math

import pytest
import torch

from esper.config import load_preset
from esper.lifecycle import Gate, Rules, SeedMeasurements, Slots, Stage, gates
from esper.lifecycle.rules import passes_gate
from tests.lifecycle.fixtures_slots import rules


def in_stage(stage: Stage, **values: float) -> Slots:
    slots = Slots.empty(1, 1)
    return slots.where(torch.ones(1, 1, dtype=torch.bool), **{"stage": stage, "alpha_target": 1, **values})


@pytest.mark.parametrize(("steps", "default"), [(5, 1), (20, 2), (150, 15)])
def test_durations_default_to_a_tenth_of_the_episode(steps: int, default: int) -> None:
    preset = load_preset("lifecycle/default", steps=steps)
    assert preset.dwell == {
        Stage.GERMINATED: 0,
        Stage.TRAINING: default,
        Stage.BLENDING: default,
        Stage.HOLDING: default,
    }
    assert (preset.prune_age, preset.cooldown, preset.max_live) == (default, default, None)


@pytest.mark.parametrize("stage", [Stage.TRAINING, Stage.BLENDING, Stage.HOLDING])
def test_dwell_counts_steps_in_the_stage(stage: Stage) -> None:
    rule = rules(dwell=4)
    assert not passes_gate(in_stage(stage, alpha=1, steps_in_stage=3, age=9), rule).item()
    assert passes_gate(in_stage(stage, alpha=1, steps_in_stage=4), rule).item()


def test_a_seed_leaves_blending_only_at_full_alpha_and_after_its_ramp() -> None:
    ready = {"steps_in_stage": 9, "ramp_ticks": 3, "ramp_done": 3}
    assert passes_gate(in_stage(Stage.BLENDING, alpha=1, **ready), rules()).item()
    assert not passes_gate(in_stage(Stage.BLENDING, alpha=0.7, **ready), rules()).item()
    assert not passes_gate(in_stage(Stage.BLENDING, alpha=1, **{**ready, "ramp_done": 2}), rules()).item()


@pytest.mark.parametrize(("health", "passes"), [(math.nan, False), (0.4, False), (0.5, True), (1.0, True)])
def test_a_required_health_must_be_measured_and_reached(health: float, passes: bool) -> None:
    slots = in_stage(Stage.TRAINING, steps_in_stage=9, health=health)
    assert passes_gate(slots, rules(health=0.5)).item() is passes
    assert gates(slots, rules(health=0.5))["health"].item() is passes
    assert passes_gate(slots, rules(health=None)).item()


@pytest.mark.parametrize(("contribution", "passes"), [(math.nan, False), (-3.0, True), (2.0, True)])
def test_minus_infinity_requires_only_that_the_contribution_was_measured(contribution: float, passes: bool) -> None:
    slots = in_stage(Stage.HOLDING, alpha=1, steps_in_stage=9, contribution=contribution)
    assert passes_gate(slots, rules(contribution=-math.inf)).item() is passes


def test_a_contribution_below_the_threshold_keeps_a_seed_from_fossilising() -> None:
    slots = in_stage(Stage.HOLDING, alpha=1, steps_in_stage=9, contribution=0.9)
    assert not passes_gate(slots, rules(contribution=1.0)).item()
    assert passes_gate(slots, rules(contribution=0.5)).item()


def test_stages_without_a_gate_never_pass_one() -> None:
    for stage in (Stage.DORMANT, Stage.FOSSILIZED, Stage.PRUNED):
        assert not passes_gate(in_stage(stage, alpha=1, steps_in_stage=99), rules()).item()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"steps": 0}, r"environment\.steps=0: must be at least 1"),
        ({"cooldown": -1}, r"lifecycle\.cooldown=-1: must be at least 0"),
        ({"prune_age": -2}, r"lifecycle\.prune_age=-2"),
        ({"ramp": -1}, r"lifecycle\.ramp=-1: must be at least 0, or null for the tempo of the action"),
        ({"max_live": 0}, r"lifecycle\.max_live=0: must be at least 1, or null"),
        ({"gates": {"training": Gate()}}, r"must have exactly the keys germinated, training, blending, holding"),
    ],
)
def test_invalid_rules_are_refused_in_one_sentence(changes: dict[str, object], sentence: str) -> None:
    gate = {stage: Gate() for stage in ("germinated", "training", "blending", "holding")}
    valid = {"steps": 10, "gates": gate, "prune_age": None, "cooldown": None, "max_live": None}
    Rules(**valid)
    with pytest.raises(ValueError, match=sentence):
        Rules(**{**valid, **changes})


def test_a_gate_with_a_nan_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="health=nan: must be a number, or null"):
        Gate(health=math.nan)


@pytest.mark.parametrize("preset", ["default", "quick"])
def test_a_preset_builds_gates(preset: str) -> None:
    assert all(type(gate) is Gate for gate in load_preset(f"lifecycle/{preset}", steps=20).gates.values())


def test_the_preset_default_has_the_defaults_of_the_signature_which_saved_configurations_without_the_keys_get() -> None:
    preset, old = load_preset("lifecycle/default", steps=20), rules(steps=20)
    assert (preset.commit, preset.ramp) == (old.commit, old.ramp) == ("explicit", None)


def test_the_preset_quick_has_no_dwell_times_and_commits_automatically() -> None:
    preset = load_preset("lifecycle/quick", steps=150)
    assert set(preset.dwell.values()) == {0}
    assert (preset.commit, preset.ramp, preset.prune_age, preset.cooldown) == ("auto", 0, 1, 1)


def test_empty_measurements_are_nan() -> None:
    measured = SeedMeasurements.none(Slots.empty(2, 3))
    assert measured.contribution.isnan().all()
    assert measured.health.isnan().all()
