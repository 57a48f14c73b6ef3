from esper.config import compose_config
from esper.learners import differences, task_of


def test_a_task_differs_by_its_keys_or_by_the_hosts_it_draws() -> None:
    blind, mixed = (
        task_of(compose_config("evaluate", [f"+experiment={name}"])) for name in ("cifar_ppo", "cifar_mixed_ppo")
    )
    assert differences(blind, blind) == differences(mixed, mixed) == []
    assert differences(blind, {**mixed, "environment.steps": 7}) == [
        "host: one with blocks=3, channels=16, kernel=1, pools=3, pool_slots=False, resolution=16, classes=10 -> "
        "one of cifar_blind, cifar_baseline",
        "environment.steps: 20 -> 7",
    ]
    contrast = {
        **task_of(compose_config("evaluate", ["+experiment=cifar_contrast_ppo"])),
        "host.hosts.cifar_blind.channels": 8,
    }
    assert differences(mixed, contrast) == [
        "host: one of cifar_blind, cifar_baseline -> one of cifar_blind, cifar_colour",
        "host.hosts.cifar_blind.channels: 16 -> 8",
    ]
    assert differences(mixed, {**mixed, "host.hosts.cifar_blind.kernel": 5}) == [
        "host.hosts.cifar_blind.kernel: 1 -> 5"
    ]
