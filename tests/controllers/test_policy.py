import pytest
import torch

from esper.controllers import Policy, PolicyController
from esper.controllers.policy import MIN_HEAD_HIDDEN
from esper.lifecycle import HEAD_NAMES
from tests.controllers.fixtures_policies import draws, layout, policy, random_inputs


def random_sequences(
    net: Policy, steps: int, envs: int = 2, rng_seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    noise, spec = draws(rng_seed), net.layout
    return (
        torch.randn(envs, steps, spec.base, generator=noise),
        torch.randn(envs, steps, len(spec.slots), spec.slot, generator=noise),
        torch.randint(0, len(spec.blueprints) + 1, (envs, steps, len(spec.slots)), generator=noise),
    )


@pytest.mark.parametrize("slots", [1, 3, 4, 5])
@pytest.mark.parametrize("actions", ["core", "full"])
def test_the_head_table_sizes_every_head(actions: str, slots: int) -> None:
    net = policy(layout(actions, slots))
    output = net(*random_sequences(net, 3), net.begin(2))
    assert tuple(net.heads) == net.layout.head_names == tuple(h for h in HEAD_NAMES if h in net.layout.options)
    assert output.logits.op.shape == (6, len(net.layout.ops))
    assert output.logits.slot.shape == (6, len(net.layout.ops), slots)
    for head, table in output.logits.others.items():
        assert table.shape == (6, len(net.layout.users[head]), slots, len(net.layout.options[head]))
    assert output.value.shape == (2, 3)


def test_a_whole_sequence_gives_the_same_as_step_by_step() -> None:
    net = policy(layers=2)
    inputs, state = random_sequences(net, 5), net.begin(2)
    whole = net(*inputs, state)
    for step in range(5):
        one = net(*[part[:, step : step + 1] for part in inputs], state)
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
        difference = (net(*inputs, net.begin(2)).value - net(*changed, net.begin(2)).value).abs()
        assert bool((difference[:, 1:] > 0).any()) is has_memory
        assert (difference[:, 0] > 0).all()


def test_environments_are_independent() -> None:
    net = policy()
    inputs = random_sequences(net, 4, envs=3)
    changed = [part.clone() for part in inputs]
    changed[0][1] += 1
    before, after = (net(*each, net.begin(3)).value for each in (inputs, changed))
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


def test_the_logits_of_a_slot_depend_on_its_blueprint() -> None:
    net = policy(layout("core", 3), layers=0)
    base, slots, blueprints = random_sequences(net, 1, envs=1)
    other = blueprints.clone()
    other[..., 2] = (blueprints[..., 2] + 1) % (len(net.layout.blueprints) + 1)
    mine, theirs = (net(base, slots, each, net.begin(1)).logits.slot[0] for each in (blueprints, other))
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
    torch.testing.assert_close(net(*inputs, net.begin(2)).value, plain(*inputs, plain.begin(2)).value)
    assert list(net.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("actions", ["core", "full"])
def test_forward_and_distribution_run_on_the_meta_device(actions: str) -> None:
    net = policy(layout(actions), validate=False).to("meta")
    inputs = [part.to("meta") for part in random_sequences(net, 3)]
    output = net(*inputs, net.begin(2))
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
    parts = (inputs.base, inputs.slots, inputs.blueprints, inputs.exists)
    subset = type(inputs)(*(part[rows] for part in parts), inputs.masks.each(lambda m: m[rows]))
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
def test_stored_log_probs_equal_those_of_a_second_forward_pass() -> None:
    net = policy(layout("full", 4))
    controller, inputs = PolicyController(net, greedy=False), random_inputs(layout("full", 4), 30, draws())
    choice, _ = controller.decide(inputs, controller.begin(range(30)))
    output = net(choice.base[:, None], choice.slots[:, None], inputs.blueprints[:, None], net.begin(30))
    again = net.distribution(output.logits, inputs.masks).log_prob(choice.action)
    torch.testing.assert_close(choice.log_prob, again, atol=1e-6, rtol=0)
