from esper.telemetry.progress import line
from tests.ppo.worlds import Locks, fit, learner


def test_a_rounds_line_shows_figures_under_the_names_they_are_reported_by() -> None:
    world = Locks()
    module = learner(world)
    fit(module, world, rounds=1)
    shown = line(1, 1, 0.0, module.latest)
    assert f"entropy {module.latest['policy/entropy_op']:.2f}" in shown
    assert f"kl {module.latest['policy/kl']:.4f}" in shown
    assert module.latest["policy/entropy_op"] > 0
