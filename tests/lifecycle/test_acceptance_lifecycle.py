import torch

from esper.lifecycle import HEADS, active, available, causal
from tests.controllers.fixtures_policies import draws, layout, random_masks
from tests.lifecycle.fixtures_slots import space


def test_causal_masks_are_on_the_device_of_their_ops_and_their_docstring_states_it() -> None:
    full, meta = layout("full"), torch.device("meta")
    masks, op = random_masks(full, 4, draws()).to(meta), torch.zeros(4, dtype=torch.long, device=meta)
    for mask in (causal(op, full), active(masks, op, full), available(masks, full)):
        assert mask.device == meta
    assert "same device" in (causal.__doc__ or "")


def test_a_mixed_batch_of_ops_in_two_dimensions_gets_each_ops_own_row() -> None:
    full = space("full")
    ops = torch.tensor([[5, 0, 1], [3, 4, 2]])
    mask = causal(ops, full)
    for row, column in ((row, column) for row in range(2) for column in range(3)):
        op = full.ops[int(ops[row, column])]
        assert mask[row, column].tolist() == [op in head.ops for head in HEADS]
