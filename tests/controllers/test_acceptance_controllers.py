from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from esper.controllers import Policy, PolicyController, RunningStatistics
from tests.controllers.fixtures_policies import draws, layout, policy, random_inputs, run_inputs
from tests.fixtures_environment import environment


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every call of Module.compile; nothing is compiled."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: calls.append(options))
    return calls


def test_a_compiled_policy_is_not_wrapped() -> None:
    net = policy(compile="default")
    assert type(net) is Policy
    assert list(net.state_dict()) == list(policy().state_dict())
    assert net.compile_mode == "default"


def test_compilation_uses_dynamic_shapes_and_allows_graph_breaks(compiled: list[dict[str, Any]]) -> None:
    policy()
    assert compiled == []
    policy(compile="default")
    policy(compile="reduce-overhead")
    common = {"dynamic": True, "fullgraph": False}
    assert compiled == [{"mode": None, **common}, {"mode": "reduce-overhead", **common}]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiler_error_is_raised() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no such kernel")

    net = policy(layers=0)
    net.compile(backend=broken, dynamic=True)
    inputs = random_inputs(net.layout, 2, draws())
    with pytest.raises(Exception, match="no such kernel"):
        run_inputs(net, inputs)


def test_a_policys_floors_reach_its_actions_through_the_masks() -> None:
    spec = layout()
    inputs, seen = random_inputs(spec, 30, draws()), {}
    for floor in (0.0, 0.2):
        net = policy(spec, gains={"hidden": 1.4, "policy": 50.0, "value": 1.0}, floors={"op": floor})
        distribution = net.distribution(run_inputs(net, inputs).logits, inputs.masks, explore=True)
        ops = [
            torch.full((30, len(spec.options)), 0).index_fill(1, torch.tensor([0]), op) for op in range(len(spec.ops))
        ]
        seen[floor] = torch.stack([distribution.log_prob(op)[:, 0] for op in ops], -1).exp()
    legal = inputs.masks.op
    assert seen[0.0][legal].min() < 0.01, "without a floor the policy is nearly certain"
    assert seen[0.2][legal].min() >= 0.2 - 1e-6
    assert not seen[0.2][~legal].any()


def test_the_lstm_reads_layer_normalised_features_and_no_other_layer_of_the_core_has_a_norm() -> None:
    net = policy(layers=1)
    seen: list[torch.Tensor] = []
    assert net.memory is not None
    net.memory.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    inputs = random_inputs(net.layout, 5, draws())
    run_inputs(net, replace(inputs, base=50 * inputs.base))
    torch.testing.assert_close(seen[0].mean(-1), torch.zeros(5, 1), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen[0].var(-1, unbiased=False), torch.ones(5, 1), atol=1e-3, rtol=0)
    assert sum(isinstance(module, nn.LayerNorm) for module in (*net.features.modules(), *net.heads.modules())) == 0


def test_the_default_policy_starts_nearly_uniform_with_hidden_layers_of_gain_root_2() -> None:
    net = policy()
    gains = {
        2**0.5: [net.slot.encode, *net.features, *[head[0] for head in net.heads.values()], net.critic[0]],
        0.1: [head[-1] for head in net.heads.values()],
        1.0: [net.critic[-1]],
    }
    for gain, layers in gains.items():
        for layer in layers:
            assert torch.linalg.matrix_norm(layer.weight, 2).item() == pytest.approx(gain, rel=1e-4)
            assert not layer.bias.any()


def test_acting_records_no_gradient_and_evaluating_actions_does() -> None:
    net = policy()
    inputs, controller = random_inputs(net.layout, 3, draws()), PolicyController(net, greedy=False)
    choice, memory = controller.decide(inputs, controller.begin([0, 1, 2]))
    assert choice.log_prob.is_inference()
    assert choice.value.is_inference()
    assert memory.state[0].is_inference()
    output = run_inputs(net, inputs)
    distribution = net.distribution(output.logits, inputs.masks)
    assert distribution.log_prob(choice.action.clone()).requires_grad
    assert distribution.entropy().requires_grad
    assert output.value.requires_grad


@torch.no_grad()
def test_the_lstm_state_is_carried_from_step_to_step_in_a_real_environment() -> None:
    env = environment(envs=2)
    net = policy(env.layout)
    controller = PolicyController(net, greedy=False)
    observation, memory = env.reset([1, 2]), controller.begin([1, 2])
    choices, seen = [], []
    for _ in range(3):
        seen.append(observation)
        choice, memory = controller.decide(observation, memory)
        choices.append(choice)
        observation = env.step(choice.action).observation  # raises if the action is illegal
    blueprints = torch.stack([each.blueprints for each in seen], 1)
    base, slots = (torch.stack([getattr(choice, part) for choice in choices], 1) for part in ("base", "slots"))
    whole = net(base, slots, blueprints, net.begin(2), choices[0].context)
    torch.testing.assert_close(whole.value, torch.stack([choice.value for choice in choices], 1))
    torch.testing.assert_close(whole.state[0], memory.state[0])


def test_running_statistics_document_that_they_are_not_thread_safe() -> None:
    assert "several threads" in (RunningStatistics.__doc__ or "")
