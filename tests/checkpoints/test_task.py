from esper.checkpoints import describe_differences, task_settings
from esper.config import compose_config


def test_differences_of_tasks_are_described_by_key_and_by_host() -> None:
    blind, mixed = (
        task_settings(compose_config("evaluate", [f"+experiment={name}"]))
        for name in ("cifar_batches_ppo", "cifar_mixed_ppo")
    )
    assert describe_differences(blind, blind) == describe_differences(mixed, mixed) == []
    assert describe_differences(blind, {**mixed, "environment.steps": 7}) == [
        "host: one with blocks=3, channels=16, kernel=1, pools=3, pool_slots=False, resolution=16, classes=10 -> "
        "one of cifar_blind, cifar_baseline",
        "environment.steps: 20 -> 7",
    ]
    contrast = {
        **task_settings(compose_config("evaluate", ["+experiment=cifar_contrast_ppo"])),
        "host.hosts.cifar_blind.channels": 8,
    }
    assert describe_differences(mixed, contrast) == [
        "host: one of cifar_blind, cifar_baseline -> one of cifar_blind, cifar_colour",
        "host.hosts.cifar_blind.channels: 16 -> 8",
    ]
    assert describe_differences(mixed, {**mixed, "host.hosts.cifar_blind.kernel": 5}) == [
        "host.hosts.cifar_blind.kernel: 1 -> 5"
    ]
