from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.controllers import FactoredDistribution, Logits
from esper.controllers.distribution import masked_log_probs, noise_width, normalised_entropy
from esper.lifecycle import Layout, Masks, active, available
from tests.controllers.fixtures_policies import draws, layout, random_masks


def random_logits(spec: Layout, count: int, noise: torch.Generator) -> Logits:
    ops, slots = len(spec.ops), len(spec.slots) + spec.all_slots
    others = {
        head: torch.randn(count, len(spec.users[head]), slots, len(options), generator=noise)
        for head, options in spec.options.items()
        if head not in ("op", "slot")
    }
    slot = torch.randn(count, ops, slots, generator=noise)
    return Logits(torch.randn(count, ops, generator=noise), slot, others)


def every_action(spec: Layout) -> torch.Tensor:
    """All combinations of options, legal or not, unused heads at 0."""
    rows = []
    for index, op in enumerate(spec.ops):
        ranges = [range(len(o)) if op in spec.users[h] else range(1) for h, o in spec.options.items() if h != "op"]
        rows += [[index, *rest] for rest in product(*ranges)]
    return torch.tensor(rows)


def is_legal(spec: Layout, masks: Masks, row: int, action: torch.Tensor) -> bool:
    op = spec.ops[int(action[0])]
    if not masks.op[row, action[0]]:
        return False
    for index, head in enumerate(spec.head_names[1:], 1):
        if op in spec.users[head]:
            mask = masks.slot[row, action[0]] if head == "slot" else masks.others[head][row]
            if not mask[action[index]]:
                return False
    return True


@pytest.mark.parametrize("floors", [{}, {"op": 0.05, "slot": 0.5, "blueprint": 0.1}], ids=["plain", "floors"])
@pytest.mark.parametrize(
    ("actions", "slots"),
    [(actions, slots) for actions in ("core", "full", "lean") for slots in (1, 2, 3, 5, 8)],
)
def test_probabilities_of_legal_actions_sum_to_one_and_of_illegal_actions_are_zero(
    actions: str, slots: int, floors: dict[str, float]
) -> None:
    spec, noise = layout(actions, slots), draws(slots)
    every, count = every_action(spec), 3
    masks, logits = random_masks(spec, count, noise), random_logits(spec, count, noise)
    for row in range(count):
        one = Masks(*[m[row : row + 1].expand(len(every), *m.shape[1:]) for m in (masks.op, masks.slot)], {
            head: m[row : row + 1].expand(len(every), -1) for head, m in masks.others.items()
        })  # fmt: skip
        spread = Logits(
            *[t[row : row + 1].expand(len(every), *t.shape[1:]) for t in (logits.op, logits.slot)],
            {head: t[row : row + 1].expand(len(every), *t.shape[1:]) for head, t in logits.others.items()},
        )
        probability = FactoredDistribution(spread, one, spec, floors, True).log_prob(every).sum(-1).exp()
        legal = torch.tensor([is_legal(spec, masks, row, action) for action in every])
        assert torch.all(probability[~legal] == 0)
        assert torch.all(probability[legal] > 0)
        torch.testing.assert_close(probability.sum(), torch.tensor(1.0))


@given(st.integers(0, 10_000), st.sampled_from(["core", "full", "lean"]), st.integers(1, 8))
def test_every_sampled_action_is_legal_and_unused_heads_are_0(rng_seed: int, actions: str, slots: int) -> None:
    spec, noise = layout(actions, slots), draws(rng_seed)
    masks = random_masks(spec, 20, noise)
    distribution = FactoredDistribution(random_logits(spec, 20, noise), masks, spec, {}, True)
    sampled = distribution.sample(torch.empty(20, noise_width(spec)).exponential_(generator=noise))
    for action in (sampled, distribution.mode()):
        assert all(is_legal(spec, masks, row, action[row]) for row in range(20))
        assert torch.all(action[~spec.uses()[action[:, 0]]] == 0)


@pytest.mark.parametrize("actions", ["core", "lean"])
def test_samples_follow_the_probabilities(actions: str) -> None:
    spec, noise, count = layout(actions), draws(1), 20_000
    masks, logits = random_masks(spec, 1, noise), random_logits(spec, 1, noise)
    masks = masks.each(lambda mask: torch.ones_like(mask))
    many = FactoredDistribution(
        Logits(logits.op.expand(count, -1), logits.slot.expand(count, -1, -1),
               {h: t.expand(count, -1, -1, -1) for h, t in logits.others.items()}),
        masks.each(lambda mask: mask.expand(count, *mask.shape[1:])), spec, {}, False,
    )  # fmt: skip
    action = many.sample(torch.empty(count, noise_width(spec)).exponential_(generator=noise))
    seen = torch.bincount(action[:, 0], minlength=len(spec.ops)) / count
    torch.testing.assert_close(seen, logits.op[0].softmax(-1), atol=0.015, rtol=0)
    frequent = 1 + int(logits.op[0, 1:].argmax())  # WAIT has no slot
    slot = action[action[:, 0] == frequent, 1]
    seen = torch.bincount(slot, minlength=len(spec.options["slot"])) / len(slot)
    torch.testing.assert_close(seen, logits.slot[0, frequent].softmax(-1), atol=0.03, rtol=0)


def test_a_single_legal_action_has_entropy_and_log_prob_of_exactly_0() -> None:
    spec = layout("full", 3)
    masks = random_masks(spec, 5, draws())
    only = Masks(torch.zeros_like(masks.op), torch.zeros_like(masks.slot), masks.others)
    only.op[:, spec.ops.index("WAIT")] = True
    for floors in ({}, {"op": 0.2}):
        distribution = FactoredDistribution(random_logits(spec, 5, draws()), only, spec, floors, True)
        assert torch.all(distribution.entropy() == 0)
        assert torch.all(distribution.log_prob(distribution.mode()) == 0)


def test_normalised_entropy_is_1_for_uniform_options_and_nearly_0_for_certain_ones() -> None:
    mask = torch.tensor([[True, True, True, False]])
    assert normalised_entropy(masked_log_probs(torch.zeros(1, 4), mask), mask).item() == pytest.approx(1)
    certain = torch.tensor([[40.0, 0.0, 0.0, 0.0]])
    assert normalised_entropy(masked_log_probs(certain, mask), mask).item() == pytest.approx(0, abs=1e-6)


def test_a_heads_entropy_does_not_depend_on_how_rarely_its_op_is_chosen() -> None:
    spec, noise = layout(), draws(3)
    masks, logits = random_masks(spec, 8, noise).each(torch.ones_like), random_logits(spec, 8, noise)
    masks.slot[:, spec.ops.index("WAIT")] = False
    rare = Logits(logits.op - 30 * torch.eye(len(spec.ops))[spec.ops.index("GERMINATE")], logits.slot, logits.others)
    often, seldom = (FactoredDistribution(each, masks, spec, {}, True).entropy() for each in (logits, rare))
    torch.testing.assert_close(often[:, 1:], seldom[:, 1:])
    assert not torch.allclose(often[:, 0], seldom[:, 0])


@pytest.mark.parametrize("actions", ["full", "lean"])
def test_entropy_is_positive_exactly_where_a_head_has_a_choice_under_some_legal_op(actions: str) -> None:
    spec, noise = layout(actions, 4), draws(4)
    masks = random_masks(spec, 50, noise)
    entropy = FactoredDistribution(random_logits(spec, 50, noise), masks, spec, {}, True).entropy()
    assert torch.equal(entropy > 0, available(masks, spec))


def test_heads_without_a_choice_are_not_active() -> None:
    spec, noise = layout("core", 1), draws(5)
    masks = random_masks(spec, 50, noise)
    op = FactoredDistribution(random_logits(spec, 50, noise), masks, spec, {}, True).mode()[:, 0]
    is_active = active(masks, op, spec)
    assert not is_active[:, 1].any(), "with one slot there is nothing to choose"
    assert torch.equal(is_active[:, 0], masks.op.sum(-1) >= 2)


@given(st.integers(0, 10_000), st.floats(0.001, 0.9))
def test_a_floor_raises_every_legal_option_and_no_illegal_one(rng_seed: int, floor: float) -> None:
    noise = draws(rng_seed)
    mask = torch.rand(10, 5, generator=noise) < 0.6
    mask[:, 0] = True
    probability = masked_log_probs(10 * torch.randn(10, 5, generator=noise), mask, floor).exp()
    min_prob = torch.full((10,), floor).minimum(0.99 / mask.sum(-1))
    assert torch.all(probability.where(mask, 1.0).amin(-1) >= min_prob.where(mask.sum(-1) > 1, 1.0) - 1e-5)
    assert torch.all(probability[~mask] == 0)
    torch.testing.assert_close(probability.sum(-1), torch.ones(10))


def test_masks_without_a_legal_option_are_refused_and_the_check_can_be_switched_off() -> None:
    spec = layout()
    masks, logits = random_masks(spec, 4, draws()), random_logits(spec, 4, draws())
    masks.op[2] = False
    with pytest.raises(ValueError, match="without a legal option"):
        FactoredDistribution(logits, masks, spec, {}, True)
    FactoredDistribution(logits, masks, spec, {}, False)
    broken = Logits(logits.op * torch.nan, logits.slot, logits.others)
    with pytest.raises(ValueError, match="logits must be finite"):
        FactoredDistribution(broken, random_masks(spec, 4, draws()), spec, {}, True)


def test_gradients_are_finite_where_almost_everything_is_illegal() -> None:
    spec = layout()
    masks, logits = random_masks(spec, 6, draws()), random_logits(spec, 6, draws())
    parts = [logits.op, logits.slot, *logits.others.values()]
    for part in parts:
        part.requires_grad_()
    distribution = FactoredDistribution(logits, masks, spec, {"op": 0.01}, True)
    (distribution.entropy().sum() + distribution.log_prob(distribution.mode()).sum()).backward()
    assert all(torch.isfinite(part.grad).all() for part in parts if part.grad is not None)


def test_without_masking_heads_that_an_op_does_not_use_are_sampled_and_counted() -> None:
    spec, noise = layout("core", 3), draws(0)
    count = 400
    masks, logits = random_masks(spec, count, noise), random_logits(spec, count, noise)
    masked, unmasked = (FactoredDistribution(logits, masks, spec, {}, True, is_masked) for is_masked in (True, False))
    draw = torch.empty(count, noise_width(spec)).exponential_(generator=noise)
    action, full_action = masked.sample(draw), unmasked.sample(draw)
    used = spec.uses(torch.device("cpu"))[action[:, 0]]
    assert torch.equal(action, torch.where(used, full_action, 0))  # heads that are used agree
    blueprint = spec.head_names.index("blueprint")
    idle = ~used[:, blueprint] & (masks.others["blueprint"].sum(-1) > 1)
    assert len(full_action[idle, blueprint].unique()) > 1
    assert (unmasked.log_prob(full_action)[idle, blueprint] < 0).all()
    assert torch.equal(unmasked.log_prob(full_action)[used], masked.log_prob(action)[used])
    is_active = active(masks, action[:, 0], spec, masked=False)
    assert is_active[idle, blueprint].all()
    assert not active(masks, action[:, 0], spec)[idle, blueprint].any()
