"""Several hosts: the episode seed determines the host of an episode."""

from itertools import product

import pytest
import torch
from omegaconf import DictConfig

from esper.config import build_environment, check_config
from esper.environment import Environment
from esper.records import EpisodeLog, make_record
from esper.rng import derive_seed
from tests.fixtures_environment import config, environment, text_config

SINGLE = ("cifar_blind", "cifar_baseline")


@pytest.fixture(scope="module")
def mixed() -> Environment:
    return environment("host=cifar_mixed", "environment.envs=4")


def seeds_of_both_hosts(mixed: Environment) -> list[int]:
    """Two episode seeds of each host, alternating."""
    return [*mixed.host_pool.episode_seeds("test", 0, 0), *mixed.host_pool.episode_seeds("test", 0, 1)]


def test_the_episode_seed_determines_the_host(mixed: Environment) -> None:
    names = [mixed.host_pool.host_name(episode_seed) for episode_seed in range(200)]
    assert 70 < names.count("cifar_blind") < 130
    assert names == [mixed.host_pool.host_name(episode_seed) for episode_seed in range(200)]
    assert [mixed.host_pool.host_name(episode_seed) for episode_seed in seeds_of_both_hosts(mixed)] == [
        *SINGLE,
        *SINGLE,
    ]


def test_hosts_and_pairs_of_hosts_come_equally_often(mixed: Environment) -> None:
    episode_seeds = [mixed.episode_seed("training", 3, index) for index in range(16)]
    assert len(set(episode_seeds)) == 16
    names = [mixed.host_pool.host_name(episode_seed) for episode_seed in episode_seeds]
    assert names.count("cifar_blind") == 8
    pairs = list(zip(names[::2], names[1::2], strict=True))
    assert {pair: pairs.count(pair) for pair in pairs} == dict.fromkeys(product(SINGLE, SINGLE), 2)
    single = environment("host=cifar_blind")
    expected = [derive_seed("training", 3, index) for index in range(4)]
    assert [single.episode_seed("training", 3, index) for index in range(4)] == expected


def test_an_episode_does_not_depend_on_the_other_hosts(mixed: Environment) -> None:
    episode_seeds = seeds_of_both_hosts(mixed)
    germinate = torch.tensor([[1, 0, 1, 0]])  # in the first slot
    mixed.reset(episode_seeds)
    mixed_step = [mixed.step(germinate.expand(4, -1)), mixed.step(torch.zeros(4, 4, dtype=torch.long))][-1]
    for name, rows in (("cifar_blind", [0, 2]), ("cifar_baseline", [1, 3])):
        single = environment(f"host={name}")
        single.reset([episode_seeds[row] for row in rows])
        single_step = [single.step(germinate.expand(2, -1)), single.step(torch.zeros(2, 4, dtype=torch.long))][-1]
        assert torch.equal(mixed_step.observation.base[rows], single_step.observation.base)
        assert torch.equal(mixed_step.reward[rows], single_step.reward)
        assert torch.equal(mixed_step.record.now.flops[rows], single_step.record.now.flops)
        assert torch.equal(mixed.view.host_parameters[rows], single.view.host_parameters)
        for row, episode_seed in zip(rows, episode_seeds[:2], strict=False):
            assert mixed.batches_for(1e9, {}, episode_seeds[row]) == single.batches_for(1e9, {}, episode_seed)


def test_an_episode_record_has_the_host_of_the_episode(mixed: Environment) -> None:
    episode_seeds = mixed.host_pool.episode_seeds("test", 0, 0)
    mixed.reset(episode_seeds)
    log = EpisodeLog(mixed.space, mixed.rules, episode_seeds)
    wait = torch.zeros(2, 4, dtype=torch.long)
    log.add(wait, mixed.step(wait))
    known = {"arm": "none", "score": None, "parameters": 1.0, "flops": 1.0, "host": "cifar_mixed"}
    assert [make_record(mixed, log, env, **known).host for env in range(2)] == list(SINGLE)


def test_hosts_with_different_slots_are_refused_in_one_sentence() -> None:
    different = config("host=cifar_mixed", "host.hosts.cifar_baseline.blocks=2", "host.hosts.cifar_baseline.pools=2")
    with pytest.raises(ValueError, match=r"^host\.hosts\.cifar_baseline: must have the slots .* of cifar_blind \("):
        check_config(different)
    with pytest.raises(ValueError, match=r"^host\.hosts=\{\}: must have at least one host"):
        check_config(config("host=cifar_mixed", "host.hosts=null"))


@pytest.mark.parametrize(
    ("composed", "message"),
    [
        (config("host.classes=3"), r"^host\.classes=3: must be at least 10, the classes of synthetic_images\.$"),
        (
            config("host=cifar_mixed", "host.hosts.cifar_blind.classes=9"),
            r"^host\.hosts\.cifar_blind\.classes=9: must be at least 10, the classes of synthetic_images\.$",
        ),
        (text_config("host.vocabulary=100"), r"^host\.vocabulary=100: must be at least 257, the tokens of synthetic_"),
        (text_config("host.block_size=8"), r"^host\.block_size=8: must be at least the 16 tokens of the text\.$"),
    ],
    ids=["classes", "classes of one of several hosts", "vocabulary", "block size"],
)
def test_a_host_that_is_too_small_for_the_data_is_refused_in_one_sentence(composed: DictConfig, message: str) -> None:
    check_config(composed)
    with pytest.raises(ValueError, match=message):
        build_environment(composed)
