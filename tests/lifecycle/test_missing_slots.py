"""Slots that a host lacks: a column of the action space that stays empty."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.lifecycle import ActionSpace, Slots, Stage, apply, evict, legal, merge_slot_names
from tests.lifecycle.fixtures_slots import act, play, quick, rules, space

ENVS, SLOTS = 4, 5


@st.composite
def hosts(draw: st.DrawFn) -> Tensor:
    """The slots of each host, at least one: bool [envs, slots]."""
    row = st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS).filter(any)
    return torch.tensor(draw(st.lists(row, min_size=ENVS, max_size=ENVS)))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["core", "full", "lean"]), st.booleans(), hosts(), st.integers(0, 2**31))
def test_a_slot_that_a_host_lacks_is_never_legal_and_stays_empty(
    actions: str, is_quick: bool, exists: Tensor, rng_seed: int
) -> None:
    chosen, rule = space(actions, SLOTS), quick() if is_quick else rules(dwell=1, prune_age=1, cooldown=1)
    empty = Slots.empty(ENVS, SLOTS, exists=exists)
    for one in play(chosen, rule, envs=ENVS, steps=15, seed=rng_seed, exists=exists):
        masks = legal(one.after, chosen, rule)
        assert not (masks.slot[..., :SLOTS] & ~exists.unsqueeze(1)).any()
        assert torch.equal(masks.op[:, 1:], masks.slot[:, 1:].any(-1)), "an op without a legal slot is illegal"
        assert not (one.events.entered & ~exists[..., None]).any()
        assert torch.equal(one.after.exists, exists)
        for name in Slots.__dataclass_fields__:
            values, expected = getattr(one.after, name)[~exists], getattr(empty, name)[~exists]
            assert torch.equal(values.nan_to_num(-7), expected.nan_to_num(-7)), name


def test_all_slots_are_those_that_the_host_has() -> None:
    lean, exists = space("lean", SLOTS), torch.tensor([[True, False, True, True, False], [False, True] + [False] * 3])
    slots = Slots.empty(2, SLOTS, exists=exists)
    assert legal(slots, lean, quick()).slot[:, 1, SLOTS].tolist() == [True, False], "one slot is not several"
    action = act(lean, {"op": "GERMINATE", "slot": "all", "blueprint": "attention"}, {"op": "WAIT"})
    slots, events = apply(slots, action, lean, quick())
    assert torch.equal(events.into(Stage.GERMINATED), exists & torch.tensor([[True], [False]]))
    assert slots.blueprint[0].tolist() == [2, -1, 2, 2, -1]


def test_seeds_are_where_they_would_be_without_the_missing_slots() -> None:
    exists = torch.tensor([[True, False, True, False, True]])
    core, small = space("core", SLOTS), space("core", 3)
    padded, plain = Slots.empty(1, SLOTS, exists=exists), Slots.empty(1, 3)
    for own, other in (("block5", "block3"), ("block1", "block1")):
        padded, _ = apply(padded, act(core, {"op": "GERMINATE", "slot": own}), core, quick())
        plain, _ = apply(plain, act(small, {"op": "GERMINATE", "slot": other}), small, quick())
    assert torch.equal(padded.stage[exists], plain.stage[0])
    assert torch.equal(legal(padded, core, quick()).slot[..., exists[0]], legal(plain, small, quick()).slot)


@pytest.mark.parametrize("op", ["GERMINATE", "ADVANCE", "SET_ALPHA", "PRUNE", "FOSSILIZE"])
def test_every_op_in_a_missing_slot_is_refused_in_one_sentence(op: str) -> None:
    full = space("full", 2)
    slots = Slots.empty(1, 2, exists=torch.tensor([[True, False]]))
    with pytest.raises(ValueError, match=rf"^{op} in slot block2 of environment 0 is illegal now \(its host has no"):
        apply(slots, act(full, {"op": op, "slot": "block2"}), full, rules())


def test_clearing_and_evicting_keep_which_slots_exist() -> None:
    exists = torch.tensor([[True, False]])
    slots = Slots.empty(1, 2, exists=exists).where(exists, stage=Stage.HOLDING)
    assert torch.equal(slots.clear(torch.ones(1, 2, dtype=torch.bool)).exists, exists)
    assert torch.equal(evict(slots, torch.tensor([True]), rules())[0].exists, exists)
    assert torch.equal(slots[torch.tensor([0, 0])].exists, exists.expand(2, -1))
    assert Slots.empty(2, 3).exists.all()


@pytest.mark.parametrize(
    ("named", "merged"),
    [
        ([["a", "b", "c"]], ["a", "b", "c"]),
        ([["a"], ["a", "b"], ["a", "p", "b", "q"]], ["a", "p", "b", "q"]),
        ([["b", "c"], ["a", "b"]], ["a", "b", "c"]),
        ([["a", "b"], ["c", "d"]], ["c", "d", "a", "b"]),
        ([["a", "b"], ["b", "a"]], ["a", "b"]),
    ],
    ids=["one host", "inserted after the one before", "before all", "nothing in common", "orders that disagree"],
)
def test_names_of_several_hosts_are_merged_in_the_order_of_each(named: list[list[str]], merged: list[str]) -> None:
    assert merge_slot_names(named) == merged


@given(st.lists(st.lists(st.integers(0, 9), unique=True).map(sorted), max_size=5))
def test_hosts_that_are_parts_of_one_keep_their_order(parts: list[list[int]]) -> None:
    names = [[f"block{number}" for number in part] for part in parts]
    merged = merge_slot_names([[f"block{number}" for number in range(10)], *names])
    assert merged == [f"block{number}" for number in range(10)]
    union = merge_slot_names(names)
    assert sorted(union) == sorted({name for own in names for name in own})


def test_the_slots_of_a_host_are_named() -> None:
    chosen: ActionSpace = space("core", 3)
    assert chosen.present_slots(torch.tensor([True, False, True])) == ("block1", "block3")
