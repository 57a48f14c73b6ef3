from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import pytest
from annotated_types import Ge, Gt, Lt, MinLen
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AllowInfNan

from esper.config import check_config, check_training_config, compose_config, load_preset
from esper.config.signatures import check_value, describe
from esper.lifecycle import Gate


class Table(TypedDict):
    rate: float
    names: list[str] | None


def build_anything(plain=None, *, any_kind: Any = None, either: Any | None = None, gates: list[Gate], **others: Any):  # type: ignore[no-untyped-def]
    return None


def build_gate(gate: Gate, *, rate: float) -> Gate:
    return gate


@pytest.mark.parametrize(
    ("annotation", "good", "bad", "allowed"),
    [
        (int, [0, -3, 10**18], [10**30, True, 1.0, "1", None, [1], float("inf")], "a whole number"),
        (float, [0.5, 1, -2], [True, "1", None, {}, float("nan"), float("inf"), 10**400], "a finite number"),
        (bool, [True, False], [0, "true", None], "true or false"),
        (str, ["", "a"], [1, None, ["a"]], "a string"),
        (int | None, [None, 1], ["", {}], "a whole number, or null"),
        (Path, ["a/b"], [1, None], "a string"),
        (str | Path, ["a/b"], [1], "a string"),
        (Literal["a", 2, None], ["a", 2, None], ["b", 1], "one of a, 2, null"),
        (Annotated[int, Ge(1)], [1], [0, 1.5], "a whole number of at least 1"),
        (Annotated[float, Gt(0), Lt(1)], [0.5], [0, 1], "a finite number above 0 and below 1"),
        (Annotated[float, AllowInfNan()] | None, [float("-inf"), None], ["a"], "a number, or null"),
        (Annotated[str, MinLen(1)], ["a"], [""], "a string that is not empty"),
        (Sequence[str], [[], ["a"]], ["a", [1], {}, None], "a list of strings"),
        (tuple[float, float], [[1, 2.5]], [[1], [1, "a"], "ab", 1], "a list of 2 finite numbers"),
        (Mapping[str, float], [{}, {"a": 1}], [1, [], {1: 1}], "finite numbers by name"),
        (list, [[], [1, "a"]], [1, {}], "a list of any values"),
        (set[int], [[1]], [1, ["a"]], "a list of whole numbers"),
        (dict, [{}, {"a": [1]}], [1, []], "any values by name"),
        (Any, [1, None, "a", []], [], "any value"),
        (TypeVar("T"), [1, None, "a"], [], "a node with a _target_"),
        (Gate, [], [1, None, {}, {"dwell": 1}], "a node with a _target_"),
        (Callable[[int], int], [], [1, "print"], "a node with a _target_"),
    ],
)  # fmt: skip
def test_plain_values_are_checked_without_conversion(
    annotation: Any, good: list[Any], bad: list[Any], allowed: str
) -> None:
    assert describe(annotation) == allowed
    for value in good:
        check_value("key", value, annotation)
    for value in bad:
        with pytest.raises(ValueError, match=rf"^key=.*: must be {allowed}\.$"):
            check_value("key", value, annotation)


def test_the_key_of_a_nested_value_is_in_the_message() -> None:
    with pytest.raises(ValueError, match=r"^a\.b=x: must be a finite number\.$"):
        check_value("a", {"b": "x"}, Mapping[str, float])
    with pytest.raises(ValueError, match=r"^a\.rate=x: must be a finite number\.$"):
        check_value("a", {"rate": "x"}, Table)
    with pytest.raises(ValueError, match=r"^a\.rat: there is no such key; the nearest is rate\.$"):
        check_value("a", {"rat": 1.0}, Table)


PARTIAL = partial(build_gate, rate=1.0)
GATE = {"_target_": "esper.lifecycle.Gate", "dwell": 1}
NODE = {"_target_": f"{__name__}.build_gate", "rate": 1.0, "gate": GATE}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": "x"}, "a.rate=x: must be a finite number."),
        ({"rat": 1.0}, "a.rat: is not an argument of .*build_gate; the nearest is rate."),
        ({"gate": 3}, "a.gate=3: must be a node with a _target_."),
        ({"gate": {**GATE, "dwell": 1.5}}, "a.gate.dwell=1.5: must be a whole number, or null."),
        ({"gate": {"_target_": "esper.lifecycle.Rules"}}, "a.gate._target_=esper.lifecycle.Rules: must build Gate."),
        ({"_target_": 3}, "a._target_=3: must be the full name of a class or function."),
        ({"_target_": "esper.lifecycle.Gatee"}, "a._target_=.*: there is no such class or .*; the nearest is Gate."),
        ({"_target_": "nowhere.at"}, r"a._target_=nowhere.at: cannot be imported \(ModuleNotFoundError: .*\)."),
        ({"_target_": "math.pi"}, "a._target_=math.pi: must be the full name of a class or function."),
        ({"_partial_": "yes"}, "a._partial_=yes: must be true or false."),
    ],
)  # fmt: skip
def test_a_node_is_checked_against_the_signature_of_its_target(changes: dict[str, Any], message: str) -> None:
    check_value("a", NODE, Gate)
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_value("a", {**NODE, **changes}, Gate)


def test_nodes_may_be_built_for_arguments_of_any_type_and_in_lists() -> None:
    node = {"_target_": f"{__name__}.build_anything", "gates": [GATE, GATE], "unknown": GATE}
    check_value("a", {**node, "plain": GATE, "any_kind": GATE, "either": GATE}, Any)
    with pytest.raises(ValueError, match=r"^a\.gates\[1\]\.dwell=x: must be a whole number, or null\.$"):
        check_value("a", {**node, "gates": [GATE, {**GATE, "dwell": "x"}]}, Any)
    with pytest.raises(ValueError, match=r"^a\.gates=3: must be a list of nodes with a _target_\.$"):
        check_value("a", {**node, "gates": 3}, Any)


def test_a_partial_function_is_a_target_without_annotations() -> None:
    check_value("a", {"_target_": f"{__name__}.PARTIAL", "gate": GATE, "rate": "x"}, Any)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner)
                    | st.dictionaries(st.text(), inner), max_leaves=4))  # fmt: skip
def test_any_plain_value_is_accepted_or_refused_in_one_sentence(value: Any) -> None:
    for annotation in (int | None, Mapping[str, float], tuple[int, str], Table, Gate, Literal["a"], list[list[float]]):
        message = ""
        try:
            check_value("key", value, annotation)
        except ValueError as error:
            message = str(error)
        assert not message or (message.startswith("key") and (": must be " in message or ": there is no" in message))


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.seed_lr={a:1}", "optimizer.seed_lr=''", "reward.terms.shaping.weight=[1,2]",
        "optimizer.build.lr='ü'", "data.test=inf", "governor.mean_factor=[]", "governor.snapshot_every=[1,2]",
        "policy.clip=null", "device='32'",
        "optimized_metric=[1,2]", "callbacks.checkpoints.best={}", "trainer.devices={a:1}", "ppo.value_loss=hubber",
        "environment.time_limit=never", "optimizer.schedule.shape=round", "slots.names=block1", "rounds=1.5",
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_before_anything_is_built(override: str) -> None:
    config = compose_config("run", ["+experiment=quickstart", override])
    with pytest.raises(ValueError, match=rf"^{override.partition('=')[0]}=.*: must be .*\.$"):
        check_training_config(config)


@pytest.mark.parametrize(
    "override", ["episodes=0", "schedules=0", "controllers={a:1}", "export=-1", "replay.line=x", "ckpt=3"]
)
def test_keys_of_an_evaluation_are_checked_too(override: str) -> None:
    with pytest.raises(ValueError, match=rf"^{override.partition('=')[0]}="):
        check_config(compose_config("evaluate", ["+experiment=quickstart", override]))


def test_arguments_of_a_preset_are_checked() -> None:
    with pytest.raises(ValueError, match=r"^lifecycle\.steps=ten: must be a whole number\.$"):
        load_preset("lifecycle/default", steps="ten")


@pytest.mark.parametrize(
    ("value", "reason"), [("${nothing}", "Interpolation key 'nothing' not found"), ("???", "Missing")]
)
def test_a_value_that_cannot_be_resolved_is_refused_in_one_sentence(value: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^ppo\.lr: {reason}.*\.$"):
        check_training_config(compose_config("run", ["+experiment=oracle", f"ppo.lr={value}"]))
