from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from esper.controllers import EpisodeContext, LSTMState, Policy, PolicyController
from esper.controllers.policy import MIN_HEAD_HIDDEN, PolicyOutput
from esper.lifecycle import HEAD_NAMES
from esper.observation import PolicyInputs
from tests.controllers.fixtures_policies import draws, layout, policy, random_context, random_inputs


def random_sequences(
    net: Policy, steps: int, envs: int = 2, rng_seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    noise, spec = draws(rng_seed), net.layout
    return (
        torch.randn(envs, steps, len(spec.base_inputs), generator=noise),
        torch.randn(envs, steps, len(spec.slots), len(spec.slot), generator=noise),
        torch.randint(0, len(spec.blueprints) + 1, (envs, steps, len(spec.slots)), generator=noise),
    )


def run(
    net: Policy,
    inputs: Sequence[torch.Tensor],
    state: LSTMState | None = None,
    context: EpisodeContext | None = None,
) -> PolicyOutput:
    envs = len(inputs[0])
    output: PolicyOutput = net(*inputs, state or net.begin(envs), context or random_context(net.layout, envs, draws()))
    return output


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("actions", ["core", "full", "lean"])
def test_the_head_table_sizes_every_head(actions: str, slots: int) -> None:
    net = policy(layout(actions, slots))
    output = run(net, random_sequences(net, 3))
    assert tuple(net.heads) == net.layout.head_names == tuple(h for h in HEAD_NAMES if h in net.layout.options)
    assert output.logits.op.shape == (6, len(net.layout.ops))
    options = slots + 1 if actions == "lean" else slots
    assert output.logits.slot.shape == (6, len(net.layout.ops), options)
    for head, table in output.logits.others.items():
        assert table.shape == (6, len(net.layout.users[head]), options, len(net.layout.options[head]))
    assert output.value.shape == (2, 3)


def test_a_whole_sequence_gives_the_same_as_step_by_step() -> None:
    net = policy(layers=2)
    inputs, state = random_sequences(net, 5), net.begin(2)
    whole = run(net, inputs, state)
    for step in range(5):
        one = run(net, [part[:, step : step + 1] for part in inputs], state)
        state = one.state
        torch.testing.assert_close(one.value[:, 0], whole.value[:, step])
    for mine, theirs in zip(state, whole.state, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_policy_depends_on_past_observations_only_with_an_lstm() -> None:
    for layers, has_memory in ((1, True), (0, False)):
        net = policy(layers=layers)
        inputs = random_sequences(net, 4)
        changed = [part.clone() for part in inputs]
        changed[0][:, 0] += 1
        difference = (run(net, inputs).value - run(net, changed).value).abs()
        assert bool((difference[:, 1:] > 0).any()) is has_memory
        assert (difference[:, 0] > 0).all()


def test_environments_are_independent() -> None:
    net = policy()
    inputs = random_sequences(net, 4, envs=3)
    changed = [part.clone() for part in inputs]
    changed[0][1] += 1
    before, after = (run(net, each).value for each in (inputs, changed))
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


def test_the_logits_of_a_slot_depend_on_its_blueprint() -> None:
    net = policy(layout("core", 3), layers=0)
    base, slots, blueprints = random_sequences(net, 1, envs=1)
    other = blueprints.clone()
    other[..., 2] = (blueprints[..., 2] + 1) % (len(net.layout.blueprints) + 1)
    mine, theirs = (run(net, (base, slots, each)).logits.slot[0] for each in (blueprints, other))
    assert not torch.equal(mine[:, 2], theirs[:, 2])


def test_initialisation_is_orthogonal_with_the_requested_gains() -> None:
    net = policy(gains={"hidden": 1.5, "policy": 0.01, "value": 2.0}, forget_bias=3.0, layers=1)
    for name, head in {**dict(net.heads.items()), "value": net.critic}.items():
        weight = list(head.children())[-1].weight
        gram = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
        gain = 2.0 if name == "value" else 0.01
        torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram)), atol=1e-5, rtol=1e-4)
    quarter = 16
    total = net.memory.bias_ih_l0 + net.memory.bias_hh_l0
    assert torch.equal(total[quarter : 2 * quarter], torch.full((quarter,), 3.0))
    assert not total[:quarter].any()
    assert not total[2 * quarter :].any()


def test_heads_are_half_as_wide_as_the_lstm_and_at_least_32_wide() -> None:
    assert policy(hidden=16).sizes["head_hidden"] == MIN_HEAD_HIDDEN == 32
    assert policy(hidden=128).sizes["head_hidden"] == 64
    assert policy(hidden=16, head_hidden=8).sizes["head_hidden"] == 8


def test_the_feature_network_has_the_requested_depth() -> None:
    assert [len(policy(depth=depth).features) for depth in (1, 3)] == [1, 3]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden": 0}, r"policy.hidden=0: must be at least 1"),
        ({"layers": -1}, r"policy.layers=-1: must be a whole number of at least 0 and of at most 1000"),
        ({"head_hidden": 0}, r"policy.head_hidden=0: must be at least 1"),
        ({"floors": {"slt": 0.1}}, r"policy.floors.*op, slot, blueprint, blend"),
        ({"floors": {"op": 1.0}}, r"policy.floors.*\[0, 1\)"),
        ({"momentum": 0.0}, r"momentum=0.0"),
    ],
)
def test_bad_sizes_are_refused_in_one_sentence(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        policy(**change)


def test_the_same_rng_seed_gives_the_same_weights() -> None:
    mine, theirs, other = policy(rng_seed=1), policy(rng_seed=1), policy(rng_seed=2)
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))
    assert not torch.equal(mine.features[0].weight, other.features[0].weight)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler reads it
@pytest.mark.parametrize("layers", [0, 1])
def test_a_compiled_network_gives_the_same_output_and_state_dict_names(layers: int) -> None:
    """Only the LSTM, which the compiler does not support, may break the graph."""
    plain, net = policy(layers=layers), policy(layers=layers)
    net.compile(backend="eager", fullgraph=layers == 0)
    inputs = random_sequences(net, 3)
    torch.testing.assert_close(run(net, inputs).value, run(plain, inputs).value)
    assert list(net.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("actions", ["core", "full", "lean"])
def test_forward_and_distribution_run_on_the_meta_device(actions: str) -> None:
    net = policy(layout(actions), validate=False).to("meta")
    inputs = [part.to("meta") for part in random_sequences(net, 3)]
    output = run(net, inputs, context=random_context(net.layout, 2, draws()).to(torch.device("meta")))
    masks = random_inputs(net.layout, 6, draws()).masks.to(torch.device("meta"))
    distribution = net.distribution(output.logits, masks)
    action = distribution.mode()
    assert distribution.log_prob(action).shape == distribution.entropy().shape == action.shape


def test_the_actions_of_an_episode_do_not_depend_on_other_episodes() -> None:
    net = policy()
    controller = PolicyController(net, greedy=False)
    inputs = random_inputs(net.layout, 3, draws())
    all_actions, _ = controller.act(inputs, controller.begin([7, 8, 9]))
    rows = [2, 0]
    parts = {name: part[rows] for name, part in vars(inputs).items() if name != "masks"}
    subset = PolicyInputs(**parts, masks=inputs.masks.each(lambda mask: mask[rows]))
    actions, _ = controller.act(subset, controller.begin([9, 7]))
    assert torch.equal(all_actions[rows], actions)


def test_greedy_actions_do_not_depend_on_the_episode_seed_and_sampled_actions_do() -> None:
    net = policy()
    inputs = random_inputs(net.layout, 40, draws())
    greedy, sampled = PolicyController(net, greedy=True), PolicyController(net, greedy=False)
    first, second = range(40), range(40, 80)
    assert torch.equal(greedy.act(inputs, greedy.begin(first))[0], greedy.act(inputs, greedy.begin(second))[0])
    assert not torch.equal(sampled.act(inputs, sampled.begin(first))[0], sampled.act(inputs, sampled.begin(second))[0])


@torch.no_grad()
@pytest.mark.parametrize("actions", ["core", "full", "lean"])
@pytest.mark.parametrize("slots", [1, 2, 4, 8])
def test_stored_log_probs_equal_those_of_a_second_forward_pass(actions: str, slots: int) -> None:
    net = policy(layout(actions, slots))
    controller, inputs = PolicyController(net, greedy=False), random_inputs(layout(actions, slots), 30, draws())
    choice, _ = controller.decide(inputs, controller.begin(range(30)))
    sequences = (choice.base[:, None], choice.slots[:, None], inputs.blueprints[:, None])
    output = run(net, sequences, context=choice.context)
    again = net.distribution(output.logits, inputs.masks).log_prob(choice.action)
    torch.testing.assert_close(choice.log_prob, again, atol=1e-6, rtol=0)


def certain(actions: str, slots: int, attention: int) -> Policy:
    """A policy with large logits; those of all slots differ from those of an average slot."""
    net = policy(layout(actions, slots), attention=attention, gains={"hidden": 1.4, "policy": 3.0, "value": 1.0})
    if net.all_slots is not None:
        for part in net.all_slots.parameters():
            torch.nn.init.normal_(part, generator=draws(2))
    return net


@torch.no_grad()
@pytest.mark.parametrize("actions", ["full", "lean"])
@pytest.mark.parametrize("attention", [0, 2])
def test_permuting_slots_permutes_the_logits_and_leaves_those_of_all_slots(attention: int, actions: str) -> None:
    net = certain(actions, 5, attention)
    base, slots, blueprints = random_sequences(net, 3)
    context, order = random_context(net.layout, 2, draws(1)), [3, 0, 4, 1, 2]
    moved = replace(context, exists=context.exists[:, order], candidates=context.candidates[:, order])
    plain = run(net, (base, slots, blueprints), context=context)
    permuted = run(net, (base, slots[:, :, order], blueprints[:, :, order]), context=moved)
    order = order + [5] * net.layout.all_slots
    torch.testing.assert_close(permuted.value, plain.value)
    torch.testing.assert_close(permuted.logits.op, plain.logits.op)
    torch.testing.assert_close(permuted.logits.slot, plain.logits.slot[..., order])
    for head, table in plain.logits.others.items():
        torch.testing.assert_close(permuted.logits.others[head], table[:, :, order])


@torch.no_grad()
@pytest.mark.parametrize("actions", ["full", "lean"])
@pytest.mark.parametrize("attention", [0, 2])
def test_slots_that_do_not_exist_change_nothing(attention: int, actions: str) -> None:
    """Their features, seeds and candidates are arbitrary."""
    small, padded = certain(actions, 2, attention), certain(actions, 5, attention)
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), padded.parameters(), strict=True))
    base, slots, blueprints = random_sequences(padded, 3)
    context = random_context(padded.layout, 2, draws(1))
    own = replace(context, exists=context.exists[:, :2], candidates=context.candidates[:, :2])
    context.exists[:, 2:] = False
    plain = run(small, (base, slots[:, :, :2], blueprints[:, :, :2]), context=own)
    output = run(padded, (base, slots, blueprints), context=context)
    kept = [0, 1] + [5] * padded.layout.all_slots
    torch.testing.assert_close(output.value, plain.value)
    torch.testing.assert_close(output.logits.slot[..., kept], plain.logits.slot)
    for head, table in plain.logits.others.items():
        torch.testing.assert_close(output.logits.others[head][:, :, kept], table)


@pytest.mark.parametrize("actions", ["core", "lean"])
def test_an_episode_samples_the_same_actions_next_to_hosts_with_more_slots(actions: str) -> None:
    small, padded = policy(layout(actions, 2)), policy(layout(actions, 5))
    inputs = random_inputs(padded.layout, 40, draws())
    inputs.exists[:, 2:] = False
    slot = inputs.masks.slot
    slot[..., 2:5] = False
    slot[..., 5:] &= slot[..., :2].all(-1, keepdim=True)
    inputs.masks.op.copy_(slot.any(-1))
    inputs.masks.op[:, 0] = True
    masks = replace(inputs.masks, slot=slot[..., [0, 1] + [5] * padded.layout.all_slots])
    parts = {name: getattr(inputs, name)[:, :2] for name in ("slots", "blueprints", "exists", "candidates")}
    own = replace(inputs, **parts, masks=masks)
    for step in range(2):
        mine, theirs = (
            _act_twice(PolicyController(net, greedy=False), each)[step]
            for net, each in ((small, own), (padded, inputs))
        )
        assert torch.equal(mine, torch.where(theirs == 5, 2, theirs))  # all slots come behind them
        assert len(mine.unique(dim=0)) > 4
        assert (mine[:, 1] == 2).any() == padded.layout.all_slots


def _act_twice(controller: PolicyController, inputs: PolicyInputs) -> list[torch.Tensor]:
    """A generator that drew too much for the first action would give another second one."""
    memory, actions = controller.begin(range(len(inputs.base))), []
    for _ in range(2):
        action, memory = controller.act(inputs, memory)
        actions.append(action)
    return actions


@torch.no_grad()
def test_a_blueprint_is_chosen_by_its_descriptor_in_the_slot_and_by_its_name() -> None:
    net = policy(layout("core", 3))
    inputs, context = random_sequences(net, 1), random_context(net.layout, 2, draws(1))
    plain = run(net, inputs, context=context).logits.others["blueprint"][:, 0]
    other = replace(context, candidates=context.candidates.clone())
    other.candidates[:, 1, 2] += 1
    changed = run(net, inputs, context=other).logits.others["blueprint"][:, 0] != plain
    assert changed[:, 1, 2].all()
    unnamed = replace(context, named=context.named.clone())
    unnamed.named[:, 0] = False
    by_name = run(net, inputs, context=unnamed).logits.others["blueprint"][:, 0] != plain
    assert by_name[:, :, 0].all()


@torch.no_grad()
def test_all_slots_are_judged_like_an_average_slot_before_training() -> None:
    """With equal slots, the logits of all of them are those of each; the blueprints are compared by their mean keys."""
    net = policy(layout("lean", 3), gains={"hidden": 1.4, "policy": 3.0, "value": 1.0})
    base, slots, blueprints = random_sequences(net, 2)
    context = random_context(net.layout, 2, draws(1))
    same = replace(context, candidates=context.candidates[:, :1].expand_as(context.candidates))
    output = run(net, (base, slots[:, :, :1].expand_as(slots), torch.zeros_like(blueprints)), context=same)
    torch.testing.assert_close(output.logits.slot[..., 3], output.logits.slot[..., 0])
    torch.testing.assert_close(output.logits.others["blueprint"][:, :, 3], output.logits.others["blueprint"][:, :, 0])
    net.all_slots.bias[net.layout.ops.index("GERMINATE")] += 5
    changed = run(net, (base, slots[:, :, :1].expand_as(slots), torch.zeros_like(blueprints)), context=same)
    difference = changed.logits.slot - output.logits.slot
    expected = torch.zeros_like(difference)
    expected[:, net.layout.ops.index("GERMINATE"), 3] = 5
    torch.testing.assert_close(difference, expected)


def test_the_option_of_all_slots_learns_and_only_it_has_additional_weights() -> None:
    lean, core = policy(layout("lean", 3)), policy(layout("core", 3))
    new = {name for name, _ in lean.named_parameters()} - {name for name, _ in core.named_parameters()}
    assert new == {"all_slots.change.weight", "all_slots.change.bias", "all_slots.bias"}
    assert core.all_slots is None
    run(lean, random_sequences(lean, 3)).logits.slot[..., 3].square().sum().backward()
    assert all(lean.get_parameter(name).grad.abs().sum() > 0 for name in new)


@torch.no_grad()
def test_two_blueprints_without_names_and_with_equal_descriptors_are_equally_likely() -> None:
    net = policy(layout("core", 3))
    context = random_context(net.layout, 2, draws(1))
    context.candidates[:, :, 1] = context.candidates[:, :, 0]
    context.named[:, :2] = False
    table = run(net, random_sequences(net, 1), context=context).logits.others["blueprint"]
    assert torch.equal(table[..., 0], table[..., 1])


def test_a_missing_group_of_features_has_no_effect_and_is_flagged() -> None:
    net = policy()
    first, second = random_inputs(net.layout, 4, draws(1)), random_inputs(net.layout, 4, draws(2))
    mixed = replace(first, base=first.base.clone(), slots=first.slots.clone())
    mixed.base[:, 5], mixed.slots[:, :, 3] = second.base[:, 5], second.slots[:, :, 3]  # the group contribution
    available = torch.ones(4, len(net.layout.groups), dtype=torch.bool)
    assert not torch.equal(net.normalised(first, available)[0], net.normalised(mixed, available)[0])
    available[:, net.layout.groups.index("contribution")] = False
    for mine, theirs in zip(net.normalised(first, available), net.normalised(mixed, available), strict=True):
        assert torch.equal(mine, theirs)
    flags = net.normalised(first, available)[0][:, -len(net.layout.groups) :]
    assert torch.equal(flags, available.float())


def test_groups_and_names_are_missing_in_a_tenth_of_training_episodes_and_in_no_other() -> None:
    net = policy(group_dropout=0.1, name_dropout=0.1)
    training = PolicyController(net, greedy=False, explore=True).begin(range(2000))
    for known in (training.available, training.named):
        torch.testing.assert_close(known.float().mean(0), torch.full(known.shape[1:], 0.9), atol=0.03, rtol=0)
    again = PolicyController(net, greedy=False, explore=True).begin(range(1000, 1010))
    assert torch.equal(again.available, training.available[1000:1010])
    evaluated = PolicyController(net, greedy=False).begin(range(100))
    assert evaluated.available.all()
    assert evaluated.named.all()


@torch.no_grad()
def test_floors_of_heads_that_the_action_space_lacks_have_no_effect() -> None:
    """A controller with such floors may be loaded in another action space."""
    inputs = random_inputs(layout("lean"), 40, draws())
    actions = []
    for floors in ({"op": 0.1}, {"op": 0.1, "blend": 0.3}):
        controller = PolicyController(policy(layout("lean"), floors=floors), greedy=False, explore=True)
        actions.append(controller.act(inputs, controller.begin(range(40)))[0])
    assert torch.equal(*actions)


@torch.no_grad()
def test_floors_are_part_of_training_episodes_only_and_their_log_probs_are_stored() -> None:
    net = policy(floors={"op": 0.2}, gains={"hidden": 1.0, "policy": 30.0, "value": 1.0})
    inputs = random_inputs(net.layout, 400, draws())
    decisions = {}
    for explore in (False, True):
        controller = PolicyController(net, greedy=False, explore=explore)
        decisions[explore], _ = controller.decide(inputs, controller.begin(range(400)))
    assert torch.equal(decisions[False].log_prob, decisions[False].behaviour)
    trained = decisions[True]
    has_choice = inputs.masks.op.sum(-1) > 1
    assert (trained.behaviour[has_choice, 0].exp() >= 0.2 - 1e-6).all()
    assert trained.log_prob[has_choice, 0].exp().min() < 0.01
    assert torch.equal(trained.log_prob[:, 1:], trained.behaviour[:, 1:])
