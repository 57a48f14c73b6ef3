import pytest
import torch

from esper.lifecycle import HEADS, ActionSpace, Blend, Curve, Head, Op
from esper.lifecycle import actions as actions_module
from tests.lifecycle.fixtures_slots import act, space


def test_the_documented_table_of_ops_and_heads_matches_the_head_table() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (actions_module.__doc__ or "").splitlines()
        if line.startswith("|")
    ]
    assert rows[0] == ["op", "heads"]
    documented = {op: [] if heads == "none" else heads.split(", ") for op, heads in rows[2:]}
    assert documented == {op.name: [head.name for head in HEADS[1:] if op in head.ops] for op in Op}


def test_core_has_four_ops_and_four_heads_and_advances_automatically() -> None:
    core = space("core", slots=4)
    assert [op.name for op in core.ops] == ["WAIT", "GERMINATE", "PRUNE", "FOSSILIZE"]
    assert [(head.name, head.size) for head in core.heads] == [("op", 4), ("slot", 4), ("blueprint", 3), ("blend", 3)]
    assert core.auto_advance


def test_full_has_six_ops_and_eight_heads_and_waits_for_advance() -> None:
    full = space("full")
    assert [(head.name, head.size) for head in full.heads] == [
        ("op", 6),
        ("slot", 3),
        ("blueprint", 3),
        ("blend", 3),
        ("tempo", 3),
        ("alpha_target", 3),
        ("alpha_speed", 4),
        ("alpha_curve", 5),
    ]
    assert not full.auto_advance


def test_lean_has_three_ops_and_three_heads_and_one_more_option_for_all_slots() -> None:
    lean = space("lean", slots=4)
    assert [op.name for op in lean.ops] == ["WAIT", "GERMINATE", "PRUNE"]
    assert [(head.name, head.size) for head in lean.heads] == [("op", 3), ("slot", 5), ("blueprint", 3)]
    assert lean.slots == ("block1", "block2", "block3", "block4")
    assert lean.slot_options == lean.heads[1].options == (*lean.slots, "all")
    assert lean.auto_advance
    decision = lean.decode(act(lean, {"op": "GERMINATE", "slot": "all", "blueprint": "attention"}))
    assert (decision.slot.item(), decision.blend.item()) == (4, Blend.ADD)


def test_full_without_advance_advances_automatically() -> None:
    ops = ("WAIT", "GERMINATE", "SET_ALPHA", "PRUNE", "FOSSILIZE")
    assert space("full", ops=ops).auto_advance


def test_decoding_fills_in_fixed_options_for_heads_that_are_left_out_or_unused() -> None:
    core = space("core")
    decision = core.decode(act(core, {"op": "GERMINATE", "slot": "block3", "blueprint": "attention", "blend": "GATED"}))
    assert decision.op.tolist() == [Op.GERMINATE]
    assert decision.slot.tolist() == [2]
    assert decision.blueprint.tolist() == [2]
    assert decision.blend.tolist() == [Blend.GATED]
    assert decision.tempo.tolist() == [3]
    assert decision.alpha_target.tolist() == [1.0]

    full = space("full")
    germinate = {"op": "GERMINATE", "tempo": "SLOW", "alpha_target": "MOST", "alpha_curve": "SIGMOID_SHARP"}
    prune = {"op": "PRUNE", "tempo": "SLOW", "alpha_speed": "SLOW", "alpha_curve": "SIGMOID_SHARP"}
    decision = full.decode(act(full, germinate, prune))
    assert decision.tempo.tolist() == [8, 3]
    assert decision.alpha_target[0] == torch.tensor(0.7)
    assert decision.alpha_speed.tolist() == [3, 8]
    assert decision.alpha_curve.tolist() == [Curve.LINEAR, Curve.SIGMOID_SHARP]


@pytest.mark.parametrize("actions", ["core", "full", "lean"])
def test_a_decoded_head_has_float32_for_float_values_and_int64_for_whole_numbers(actions: str) -> None:
    chosen = space(actions)
    decision = chosen.decode(act(chosen, {"op": "GERMINATE"}, {"op": "WAIT"}))
    for head in HEADS:
        expected = torch.float32 if head.name == "alpha_target" else torch.int64  # the only head with float values
        assert head.dtype == expected, head.name
        assert getattr(decision, head.name).dtype == expected, head.name
    assert Head("mixed", ("NONE", "HALF"), (0, 0.5), frozenset()).dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ops": ["WAIT", "GROW"]}, r"actions\.ops: GROW is unknown; allowed are WAIT, GERMINATE"),
        ({"ops": ["GERMINATE"]}, "WAIT must be among them"),
        ({"heads": ["slot"]}, "op must be among them"),
        ({"heads": ["op", "slots"]}, "slots is unknown"),
        ({"heads": ["op", "slot", "blend"]}, r"actions\.fixed\.blueprint must name one of norm, conv_light"),
        ({"fixed": {"tempo": "SLOWLY", "alpha_target": "FULL"}}, "SLOWLY is unknown; allowed are FAST, STANDARD, SLOW"),
        ({"heads": ["op", "blueprint", "blend"]}, "slot must be among them if there are several slots"),
        ({"fixed": {"alpha_target": "HALF"}}, r"actions\.fixed\.alpha_target: must be FULL without SET_ALPHA"),
        ({"heads": ["op", "slot", "blueprint", "blend", "alpha_target"]}, "must be FULL without SET_ALPHA"),
        ({"slots": []}, "at least one"),
        ({"slots": ["block1", "all"]}, r"^actions\.slots=\['block1', 'all'\]: no slot may be named all, which is"),
        (
            {"all_slots": True, "slots": ["block1"], "heads": ["op", "blueprint", "blend"]},
            r"^actions\.all_slots=true: slot must be among actions\.heads=\['op', 'blueprint', 'blend'\]\.",
        ),
        ({"slots": ["block1", "block1"]}, "each once"),
    ],
)
def test_an_invalid_space_is_refused_in_one_sentence(changes: dict[str, object], sentence: str) -> None:
    valid = {
        "slots": ["block1", "block2"],
        "blueprints": ["norm", "conv_light"],
        "ops": ["WAIT", "GERMINATE", "PRUNE"],
        "heads": ["op", "slot", "blueprint", "blend"],
        "fixed": {"tempo": "FAST", "alpha_target": "FULL", "alpha_speed": "FAST", "alpha_curve": "LINEAR"},
    }
    ActionSpace(**valid)
    with pytest.raises(ValueError, match=sentence):
        ActionSpace(**{**valid, **changes})
