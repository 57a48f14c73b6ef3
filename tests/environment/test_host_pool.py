"""Episodes that draw their host."""

from itertools import product

import pytest
import torch

from esper.config import check_config
from esper.environment import Environment
from esper.records import EpisodeLog, make_record
from esper.rng import derive_seed
from tests.fixtures_environment import config, environment

SINGLE = ("cifar_blind", "cifar_baseline")


@pytest.fixture(scope="module")
def mixed() -> Environment:
    return environment("host=cifar_mixed", "environment.envs=4")


def seeds_of_both(mixed: Environment) -> list[int]:
    """Two of each host, in turn."""
    return [*mixed.host_pool.episode_seeds("test", 0, 0), *mixed.host_pool.episode_seeds("test", 0, 1)]


def test_the_host_of_an_episode_follows_from_its_seed(mixed: Environment) -> None:
    names = [mixed.host_pool.host_name(seed) for seed in range(200)]
    assert 70 < names.count("cifar_blind") < 130
    assert names == [mixed.host_pool.host_name(seed) for seed in range(200)]
    assert [mixed.host_pool.host_name(seed) for seed in seeds_of_both(mixed)] == [*SINGLE, *SINGLE]


def test_every_host_comes_as_often_and_pairs_of_episodes_have_any_two(mixed: Environment) -> None:
    seeds = [mixed.seed("training", 3, index) for index in range(16)]
    assert len(set(seeds)) == 16
    names = [mixed.host_pool.host_name(seed) for seed in seeds]
    assert names.count("cifar_blind") == 8
    pairs = list(zip(names[::2], names[1::2], strict=True))
    assert {pair: pairs.count(pair) for pair in pairs} == dict.fromkeys(product(SINGLE, SINGLE), 2)
    alone = environment("host=cifar_blind")
    assert [alone.seed("training", 3, index) for index in range(4)] == [derive_seed("training", 3, i) for i in range(4)]


def test_an_episode_is_the_same_whatever_other_hosts_there_are(mixed: Environment) -> None:
    seeds = seeds_of_both(mixed)
    germinate = torch.tensor([[1, 0, 1, 0]])  # in the first slot
    mixed.reset(seeds)
    several = [mixed.step(germinate.expand(4, -1)), mixed.step(torch.zeros(4, 4, dtype=torch.long))][-1]
    for name, rows in (("cifar_blind", [0, 2]), ("cifar_baseline", [1, 3])):
        single = environment(f"host={name}")
        single.reset([seeds[row] for row in rows])
        alone = [single.step(germinate.expand(2, -1)), single.step(torch.zeros(2, 4, dtype=torch.long))][-1]
        assert torch.equal(several.observation.base[rows], alone.observation.base)
        assert torch.equal(several.reward[rows], alone.reward)
        assert torch.equal(several.record.now.flops[rows], alone.record.now.flops)
        assert torch.equal(mixed.view.host_parameters[rows], single.view.host_parameters)
        for row, seed in zip(rows, seeds[:2], strict=False):
            assert mixed.batches_for(1e9, {}, seeds[row]) == single.batches_for(1e9, {}, seed)


def test_an_episode_records_the_host_it_has_drawn(mixed: Environment) -> None:
    seeds = mixed.host_pool.episode_seeds("test", 0, 0)
    mixed.reset(seeds)
    log = EpisodeLog(mixed.space, mixed.rules, seeds)
    wait_action = torch.zeros(2, 4, dtype=torch.long)
    log.add(wait_action, mixed.step(wait_action))
    assert [make_record(mixed, log, env, arm="none", score=None, parameters=1.0, flops=1.0, host="cifar_mixed").host for env in range(2)] == list(SINGLE)


def test_hosts_of_unlike_slots_are_refused_in_one_sentence() -> None:
    unlike = config("host=cifar_mixed", "host.hosts.cifar_baseline.blocks=2", "host.hosts.cifar_baseline.pools=2")
    with pytest.raises(ValueError, match=r"^host\.hosts: cifar_baseline has other slots than cifar_blind \("):
        check_config(unlike)
    with pytest.raises(ValueError, match=r"^host\.hosts: must name one host or more"):
        check_config(config("host=cifar_mixed", "host.hosts=null"))
