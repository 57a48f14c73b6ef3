from esper.telemetry.progress import round_line
from tests.ppo.fixtures_environments import Locks, fit, learner


def test_a_rounds_line_shows_figures_under_the_names_they_are_reported_by() -> None:
    world = Locks()
    module = learner(world)
    fit(module, world, rounds=1)
    shown = round_line(1, 1, 0.0, module.latest_metrics)
    assert f"entropy {module.latest_metrics['policy/entropy_op']:.2f}" in shown
    assert f"kl {module.latest_metrics['policy/kl']:.4f}" in shown
    assert module.latest_metrics["policy/entropy_op"] > 0
