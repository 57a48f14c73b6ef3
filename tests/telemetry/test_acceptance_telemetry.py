from esper.telemetry.progress import round_line
from tests.ppo.fixtures_environments import MatchingEnv, fit, make_module


def test_the_line_of_a_round_uses_the_names_of_the_reported_metrics() -> None:
    env = MatchingEnv()
    module = make_module(env)
    fit(module, env, rounds=1)
    line = round_line(1, 1, 0.0, module.latest_metrics)
    assert f"entropy {module.latest_metrics['policy/entropy_op']:.2f}" in line
    assert f"kl {module.latest_metrics['policy/kl']:.4f}" in line
    assert module.latest_metrics["policy/entropy_op"] > 0
