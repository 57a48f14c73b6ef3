from dataclasses import replace

import pytest
import torch

from esper.controllers import (
    Policy,
    PolicyController,
    check_transferable,
    contract_differences,
    known_options,
    map_weights,
)
from esper.lifecycle import Layout
from tests.controllers.fixtures_policies import draws, layout, policy, random_inputs, random_masks, run_inputs


def trained(spec: Layout, rng_seed: int = 3) -> Policy:
    """A policy with statistics, and weights that are certain of what they choose."""
    net = policy(spec, rng_seed, gains={"hidden": 1.4, "policy": 3.0, "value": 1.0})
    inputs = random_inputs(spec, 50, draws(9))
    valid = torch.ones(50, 1, dtype=torch.bool)
    net.fold(net.moments(inputs.base[:, None] * 3 + 1, inputs.slots[:, None] * 2, valid, inputs.exists))
    return net


def transferred(net: Policy, spec: Layout) -> Policy:
    """The policy in another layout, as an evaluation loads it."""
    check_transferable(net.layout, spec, "ckpt=x")
    fitted = policy(spec, 8)
    fitted.load_state_dict(map_weights(net.layout, net.state_dict(), fitted), strict=False)
    fitted.known = known_options(net.layout, spec)
    return fitted


def check_actions_are_legal(net: Policy, spec: Layout) -> torch.Tensor:
    inputs = random_inputs(spec, 60, draws(5))
    others = {head: torch.ones_like(mask) for head, mask in inputs.masks.others.items()}  # as the lifecycle has them
    inputs = replace(inputs, masks=replace(inputs.masks, others=others))
    for greedy in (True, False):
        controller = PolicyController(net, greedy=greedy)
        action, _ = controller.act(inputs, controller.begin(range(60)))
        used = spec.uses()[action[:, 0]]
        for index, head in enumerate(spec.head_names):
            legal = inputs.masks.under(head, action[:, 0]).gather(1, action[:, index : index + 1]).squeeze(1)
            assert legal[used[:, index]].all()
    return action


def with_options(spec: Layout, head: str, options: tuple[str, ...]) -> Layout:
    users = {**spec.users, head: options} if head == "op" else spec.users
    return replace(spec, options={**spec.options, head: options}, users=users)


def test_with_nothing_added_the_weights_are_the_same_bit_for_bit() -> None:
    net = trained(layout("full", 3))
    fitted = transferred(net, layout("full", 3))
    assert fitted.known == {}
    assert contract_differences(net.layout, fitted.layout) == []
    for mine, theirs in zip(net.state_dict().values(), fitted.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("slots", [1, 2, 5, 8])
def test_a_controller_of_three_slots_acts_in_any_number_of_slots(slots: int) -> None:
    spec = layout("full", slots)
    check_actions_are_legal(transferred(trained(layout("full", 3)), spec), spec)


@torch.no_grad()
def test_a_new_feature_in_the_middle_has_no_effect_and_the_others_keep_theirs() -> None:
    net, before = trained(layout()), layout()
    now = replace(before, base=("new", *before.base), slot=(before.slot[0], "also_new", *before.slot[1:]))
    fitted = transferred(net, now)
    old = random_inputs(before, 20, draws(1))
    extra = 100 * torch.randn(20, 1, generator=draws(2))
    by_slot = extra[:, None].expand(-1, 3, -1)
    new = replace(
        old,
        base=torch.cat([extra, old.base], 1),
        slots=torch.cat([old.slots[..., :1], by_slot, old.slots[..., 1:]], -1),
    )
    torch.testing.assert_close(run_inputs(fitted, new).logits.op, run_inputs(net, old).logits.op)
    torch.testing.assert_close(run_inputs(fitted, new).logits.slot, run_inputs(net, old).logits.slot)
    assert contract_differences(before, now) == ["new feature: also_new, new"]


@torch.no_grad()
def test_a_feature_that_is_gone_counts_as_its_mean() -> None:
    net, before = trained(layout()), layout()
    now = replace(before, base=before.base[:2] + before.base[3:])
    old = random_inputs(before, 20, draws(1))
    shortened = replace(old, base=torch.cat([old.base[:, :2], old.base[:, 3:]], 1))
    old.base[:, 2] = net.base_statistics.mean[2]
    torch.testing.assert_close(
        run_inputs(transferred(net, now), shortened).logits.op, run_inputs(net, old).logits.op, atol=1e-5, rtol=1e-5
    )


@torch.no_grad()
def test_a_feature_replaced_by_another_of_equal_width_is_noticed() -> None:
    net, before = trained(layout()), layout()
    now = replace(before, base=(*before.base[:2], "other", *before.base[3:]))
    fitted, inputs = transferred(net, now), random_inputs(before, 20, draws(1))
    assert not torch.allclose(run_inputs(fitted, inputs).logits.op, run_inputs(net, inputs).logits.op)
    changed = replace(inputs, base=inputs.base.clone())
    changed.base[:, 2] += 5
    assert torch.equal(run_inputs(fitted, inputs).logits.op, run_inputs(fitted, changed).logits.op)
    assert contract_differences(before, now) == ["new feature: other", "gone feature: c"]


@torch.no_grad()
def test_a_new_blueprint_is_unknown_and_the_others_keep_their_names() -> None:
    net, before = trained(layout()), layout()
    names = ("later", *before.blueprints)
    now = with_options(replace(before, blueprints=names), "blueprint", names)
    fitted = transferred(net, now)
    table, old = fitted.candidates.names.weight, net.candidates.names.weight
    assert torch.equal(table[1], old[0])
    assert torch.equal(table[2:], old[1:])
    action = check_actions_are_legal(fitted, now)
    assert (action[:, now.head_names.index("blueprint")] == 0).any(), "it may be chosen, by its descriptor"


@torch.no_grad()
def test_a_blueprint_that_does_something_else_now_is_unknown() -> None:
    first, second, *others = layout().blueprints
    traits = {first: ("spatial", "reach 1"), second: ("normalising", "reach 0")}
    net = trained(replace(layout(), traits=traits))
    now = replace(layout(), traits={**traits, second: ("spatial", "reach 2")})
    fitted = transferred(net, now)
    table, old = fitted.candidates.names.weight, net.candidates.names.weight
    assert torch.equal(table[2], old[0])
    assert torch.equal(table[1], old[1])
    assert torch.equal(table[3:], old[3:])
    assert contract_differences(net.layout, now) == [f"changed blueprint: {second}"]
    assert contract_differences(layout(), now) == [], "a checkpoint without what blueprints did"
    assert others


def test_a_new_op_and_a_new_option_are_never_chosen() -> None:
    before = layout("full", 3)
    ops, blends = (*before.ops, "SPLIT"), ("NEW", *before.options["blend"])
    now = with_options(with_options(before, "op", ops), "blend", blends)
    fitted = transferred(trained(before), now)
    action = check_actions_are_legal(fitted, now)
    assert (action[:, 0] != ops.index("SPLIT")).all()
    germinates = action[:, 0] == ops.index("GERMINATE")
    assert germinates.any()
    assert (action[germinates, now.head_names.index("blend")] != 0).all()


@torch.no_grad()
def test_a_head_that_more_ops_use_chooses_as_before_for_the_op_it_knows() -> None:
    net, before = trained(layout("full", 3)), layout("full", 3)
    ops = (*before.ops, "SPLIT")
    users = {**before.users, "op": ops, "tempo": ("SPLIT", "GERMINATE")}
    now = replace(before, options={**before.options, "op": ops}, users=users)
    inputs = random_inputs(before, 20, draws(1))
    old, new = (run_inputs(each, inputs).logits.others["tempo"] for each in (net, transferred(net, now)))
    assert old.shape[1] == 1
    torch.testing.assert_close(new[:, 1:], old)


def test_an_op_that_is_not_allowed_is_dropped() -> None:
    before, now = layout("full", 3), layout("core", 3)
    action = check_actions_are_legal(transferred(trained(before), now), now)
    assert len(action[:, 0].unique()) > 2


def test_a_controller_that_does_not_know_all_slots_never_chooses_them() -> None:
    before, now = layout("core", 3), layout("lean", 3)
    fitted = transferred(trained(before), now)
    action = check_actions_are_legal(fitted, now)
    assert (action[:, 1] != now.options["slot"].index("all")).all()
    assert len(action[:, 0].unique()) == 3
    assert contract_differences(before, now) == ["gone op: FOSSILIZE", "gone head: blend", "new slot option: all"]


def test_a_controller_that_knows_all_slots_acts_where_they_are_no_option() -> None:
    before, now = layout("lean", 3), layout("core", 5)
    action = check_actions_are_legal(transferred(trained(before), now), now)
    assert (action[:, 0] != now.ops.index("FOSSILIZE")).all()
    germinates = action[:, 0] == now.ops.index("GERMINATE")
    assert germinates.any()
    assert (action[germinates, now.head_names.index("blend")] == now.options["blend"].index("ADD")).all()
    assert contract_differences(before, now) == ["new op: FOSSILIZE", "new head: blend", "gone slot option: all"]


def test_a_controller_that_knows_all_slots_chooses_them_in_any_number_of_slots() -> None:
    net = trained(layout("lean", 3))
    for slots in (1, 2, 8):
        spec = layout("lean", slots)
        fitted = transferred(net, spec)
        assert fitted.known == {}
        for mine, theirs in zip(net.parameters(), fitted.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        action = check_actions_are_legal(fitted, spec)
        assert (action[:, 1] == slots).any() == (slots > 1)


@torch.no_grad()
def test_the_bias_of_all_slots_is_mapped_by_op() -> None:
    before = layout("lean", 3)
    net = trained(before)
    net.all_slots.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    ops = ("WAIT", "SPLIT", "PRUNE", "GERMINATE")
    fitted = transferred(net, with_options(before, "op", ops))
    assert fitted.all_slots.bias.tolist() == [1, 0, 3, 2]


def test_a_new_head_takes_its_default_option() -> None:
    before, now = layout("core", 3), layout("full", 3)
    now = replace(now, defaults={**now.defaults, "tempo": "SLOW"})
    fitted = transferred(trained(before), now)
    action = check_actions_are_legal(fitted, now)
    germinates = action[:, 0] == now.ops.index("GERMINATE")
    assert germinates.any()
    assert (action[germinates, now.head_names.index("tempo")] == now.options["tempo"].index("SLOW")).all()


def test_what_cannot_be_mapped_is_refused_by_name() -> None:
    spec = layout()
    with pytest.raises(ValueError, match=r"^ckpt=x: was trained with environment.features=other, but .* absolute;"):
        check_transferable(replace(spec, features="other"), spec, "ckpt=x")
    with pytest.raises(ValueError, match=r"^ckpt=x: was trained with ops LEFT, RIGHT, of which this task has none"):
        check_transferable(with_options(spec, "op", ("LEFT", "RIGHT")), spec, "ckpt=x")
    with pytest.raises(ValueError, match=r"^ckpt=x: was trained without the op WAIT"):
        check_transferable(with_options(spec, "op", ("GERMINATE",)), spec, "ckpt=x")
    with pytest.raises(ValueError, match=r"^ckpt=x: was trained with blend options GLUE, of which .* none \(ADD, "):
        check_transferable(with_options(spec, "blend", ("GLUE",)), spec, "ckpt=x")


def test_random_masks_of_this_test_leave_every_op_a_choice() -> None:
    """Otherwise the tests above would pass without a decision."""
    masks = random_masks(layout("full", 3), 60, draws(5))
    assert (masks.op.sum(-1) >= 2).float().mean() > 0.9
