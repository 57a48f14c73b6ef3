import torch

from esper.lifecycle import HEADS, Op, Slots, Stage, active, available, causal, legal
from tests.lifecycle.fixtures_slots import act, rules, space


def test_the_causal_mask_of_every_op_matches_the_head_table() -> None:
    full = space("full")
    mask = causal(torch.arange(len(full.ops)), full)
    for row, op in enumerate(full.ops):
        assert mask[row].tolist() == [op in head.ops for head in HEADS]
    assert mask[Op.WAIT].sum() == 1  # only the op


def test_the_causal_mask_keeps_the_shape_of_its_ops() -> None:
    core = space("core")
    assert causal(torch.zeros(3, 5, dtype=torch.long), core).shape == (3, 5, 4)


def test_with_every_slot_empty_only_wait_and_germinate_are_legal() -> None:
    core = space("core")
    masks = legal(Slots.empty(2, 3), core, rules())
    assert masks.op.tolist() == [[True, True, False, False]] * 2
    assert masks.slot[:, 1].all()
    assert not masks.slot[:, [0, 2, 3]].any()
    assert masks.others["blueprint"].all()


def test_a_seed_in_one_slot_blocks_no_other_slot() -> None:
    core = space("core")
    slots = Slots.empty(1, 3)
    first = torch.tensor([[True, False, False]])
    for stage in (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED, Stage.PRUNED):
        masks = legal(slots.where(first, stage=stage), core, rules())
        assert masks.under("slot", torch.tensor([1])).tolist() == [[False, True, True]]


def test_max_live_counts_live_seeds_but_not_fossils() -> None:
    core = space("core")
    slots = Slots.empty(1, 3).where(torch.tensor([[True, True, False]]), stage=Stage.HOLDING)
    assert not legal(slots, core, rules(max_live=2)).op[0, 1]
    assert legal(slots, core, rules(max_live=3)).op[0, 1]
    fossil = slots.where(torch.tensor([[True, False, False]]), stage=Stage.FOSSILIZED)
    assert legal(fossil, core, rules(max_live=2)).op[0, 1]


def test_an_op_in_all_slots_is_legal_where_it_is_legal_in_at_least_two() -> None:
    lean = space("lean")
    empty = Slots.empty(1, 3)
    assert legal(empty, lean, rules()).slot[0, :, 3].tolist() == [False, True, False]  # WAIT, GERMINATE, PRUNE
    one = empty.where(torch.tensor([[True, False, False]]), stage=Stage.HOLDING, age=9)
    assert legal(one, lean, rules()).slot[0, :, 3].tolist() == [False, True, False]
    two = empty.where(torch.tensor([[True, True, False]]), stage=Stage.HOLDING, age=9)
    masks = legal(two, lean, rules())
    assert masks.slot[0, :, 3].tolist() == [False, False, True]
    assert masks.slot[0, 1].tolist() == [False, False, True, False]
    assert available(masks, lean).tolist() == [[True, True, True]]


def test_seeds_in_all_slots_must_fit_under_max_live() -> None:
    lean = space("lean")
    for max_live, is_legal in ((3, True), (2, False)):
        masks = legal(Slots.empty(1, 3), lean, rules(max_live=max_live))
        assert masks.slot[0, 1].tolist() == [True, True, True, is_legal]
    two = Slots.empty(1, 3).where(torch.tensor([[True, True, False]]), stage=Stage.HOLDING, age=9)
    assert legal(two, lean, rules(max_live=2)).slot[0, 2].tolist() == [True, True, False, True], "pruning all may"


def test_prune_and_fossilise_are_legal_in_different_slots() -> None:
    core = space("core")
    slots = Slots.empty(1, 3)
    slots = slots.where(torch.tensor([[True, False, False]]), stage=Stage.HOLDING, alpha=1, steps_in_stage=9, age=20)
    slots = slots.where(torch.tensor([[False, True, False]]), stage=Stage.TRAINING, age=20)
    masks = legal(slots, core, rules())
    assert masks.under("slot", torch.tensor([core.ops.index(Op.PRUNE)])).tolist() == [[True, True, False]]
    assert masks.under("slot", torch.tensor([core.ops.index(Op.FOSSILIZE)])).tolist() == [[True, False, False]]


def test_advance_is_not_legal_if_seeds_advance_automatically() -> None:
    slots = Slots.empty(1, 1).where(torch.tensor([[True]]), stage=Stage.TRAINING, steps_in_stage=9, age=9)
    full = space("full", slots=1)
    assert legal(slots, full, rules()).op[0, Op.ADVANCE]
    automatic = space("full", slots=1, ops=("WAIT", "GERMINATE", "SET_ALPHA", "PRUNE", "FOSSILIZE"))
    masks = legal(slots, automatic, rules())
    assert [op.name for op, is_legal in zip(automatic.ops, masks.op[0], strict=True) if is_legal] == ["WAIT", "PRUNE"]


def test_a_head_is_active_only_if_the_op_uses_it_and_it_has_a_choice() -> None:
    core = space("core", slots=1)
    masks = legal(Slots.empty(2, 1), core, rules())
    op = act(core, {"op": "GERMINATE"}, {"op": "WAIT"})[:, 0]
    # op, slot (only one to choose), blueprint, blend
    assert active(masks, op, core).tolist() == [[True, False, True, True], [True, False, False, False]]


def test_a_head_is_available_if_it_has_a_choice_with_some_legal_op() -> None:
    core = space("core", slots=2)
    empty = Slots.empty(1, 2)
    assert available(legal(empty, core, rules()), core).tolist() == [[True, True, True, True]]
    one_left = empty.where(torch.tensor([[True, False]]), stage=Stage.FOSSILIZED)
    assert available(legal(one_left, core, rules()), core).tolist() == [[True, False, True, True]]
    fossils = empty.where(torch.ones(1, 2, dtype=torch.bool), stage=Stage.FOSSILIZED)
    assert available(legal(fossils, core, rules()), core).tolist() == [[False, False, False, False]]
