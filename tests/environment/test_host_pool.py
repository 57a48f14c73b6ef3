"""Several hosts: the episode seed determines the host of an episode."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from esper.config import build, build_environment, check_config
from esper.data import Data
from esper.environment import Environment, HostTask
from esper.environment.host_pool import HostPool
from esper.hosts import CNNHost
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


@cache
def data() -> Data:
    images: Data = build(config().data)
    return images


def make_task(blocks: int = 1, **settings: Any) -> HostTask:
    arguments = {"channels": 1, "kernel": 1, "pools": 0, "pool_slots": False, "resolution": 8, "classes": 10}
    return HostTask(partial(CNNHost, **arguments, blocks=blocks), data(), batch=4, **settings)


def pool(hosts: int) -> HostPool:
    return HostPool({f"host{index}": make_task() for index in range(hosts)}, ["block1"])


@pytest.mark.parametrize("count", range(1, 17))
def test_each_host_comes_equally_often_in_every_prefix(count: int) -> None:
    hosts = pool(count)
    orders = {}
    for purpose, run_seed in (("training", 3), ("training", 4), ("validation", 3)):
        episode_seeds = [hosts.episode_seed(purpose, run_seed, index) for index in range(4 * count)]
        assert len(set(episode_seeds)) == len(episode_seeds)
        names = [hosts.host_name(episode_seed) for episode_seed in episode_seeds]
        blocks = [names[start : start + count] for start in range(0, len(names), count)]
        assert all(set(block) == set(hosts.names) for block in blocks)
        orders[purpose, run_seed] = blocks
    if count > 4:
        assert len({tuple(block) for block in orders["training", 3]}) == 4, "neighbours vary"
        assert len({str(blocks) for blocks in orders.values()}) == 3


def test_a_single_host_has_derived_seeds() -> None:
    expected = [derive_seed("training", 3, index) for index in range(4)]
    assert [pool(1).episode_seed("training", 3, index) for index in range(4)] == expected


def test_a_pool_refuses_slots_of_no_host_and_hosts_without_slots() -> None:
    hosts = {f"host{blocks}": make_task(blocks) for blocks in (1, 2)}
    assert HostPool(hosts, ["block1", "block2"]).exists_by_host().tolist() == [[True, False], [True, True]]
    with pytest.raises(
        ValueError, match=r"^slots\.names=block3: is not a slot of host1, host2; must be one of block1, b"
    ):
        HostPool(hosts, ["block3"])
    with pytest.raises(ValueError, match=r"^host host1: must have at least one of the slots block2, but has block1\.$"):
        HostPool(hosts, ["block2"])


def test_families_take_turns_and_each_task_is_repeated_in_a_row() -> None:
    families = {"narrow": 3, "linear": 2, "deep": 1}
    tasks = {f"{family} {n}": make_task(family=family) for family, count in families.items() for n in range(count)}
    hosts = HostPool(tasks, ["block1"], repeats=4)
    episode_seeds = [hosts.episode_seed("training", 0, index) for index in range(48)]
    assert len(set(episode_seeds)) == 48
    names = [hosts.host_name(episode_seed) for episode_seed in episode_seeds]
    for start in range(0, 48, 24):  # a block
        block = names[start : start + 24]
        drawn = block[::4]
        assert block == [name for name in drawn for _ in range(4)]
        assert set(drawn) == set(tasks)
        assert {name.split()[0] for name in drawn[:3]} == set(families)
        assert {name.split()[0] for name in drawn[3:5]} == {"narrow", "linear"}


def test_training_validation_and_evaluation_draw_tasks_of_their_own_split() -> None:
    splits = ("train", "validation", "test", "heldout")
    tasks = {f"{split} {number}": make_task(split=split) for split in splits for number in range(2)}
    hosts = HostPool(tasks, ["block1"], split="heldout")

    def drawn(purpose: str) -> set[str]:
        return {hosts.host_name(hosts.episode_seed(purpose, 0, index)).split()[0] for index in range(8)}

    assert (drawn("training"), drawn("warm-up"), drawn("validation")) == ({"train"}, {"train"}, {"validation"})
    assert drawn("evaluation") == {"heldout"}
    assert len(hosts.episode_seeds("search", 0, 0)) == 2
    with pytest.raises(ValueError, match=r"^tasks: has no task of the split test, which evaluation episodes draw from"):
        HostPool({"only": make_task(split="train")}, ["block1"], split="test").episode_seed("evaluation", 0, 0)


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


def test_hosts_of_different_topologies_are_refused_in_one_sentence() -> None:
    text = "{_target_: esper.hosts.GPTHost, vocabulary: 257, channels: 16, heads: 2, layers: 2, segments: 2, " \
        "block_size: 16, dropout: 0.0}"  # fmt: skip
    with pytest.raises(
        ValueError, match=r"^host\.hosts\.gpt: must have the topology of cifar_blind \(cnn\), but has t"
    ):
        check_config(config("host=cifar_mixed", f"+host.hosts.gpt={text}"))
    with pytest.raises(ValueError, match=r"^host\.hosts=\{\}: must have at least one host"):
        check_config(config("host=cifar_mixed", "host.hosts=null"))


@pytest.mark.parametrize(
    ("compose", "message"),
    [
        (
            partial(config, "host.classes=3"),
            r"^host\.classes=3: must be at least 10, the classes of synthetic_images\.$",
        ),
        (
            partial(config, "host=cifar_mixed", "host.hosts.cifar_blind.classes=9"),
            r"^host\.hosts\.cifar_blind\.classes=9: must be at least 10, the classes of synthetic_images\.$",
        ),
        (
            partial(text_config, "host.vocabulary=100"),
            r"^host\.vocabulary=100: must be at least 257, the tokens of synthetic_",
        ),
        (
            partial(text_config, "host.block_size=8"),
            r"^host\.block_size=8: must be at least the 16 tokens of the text\.$",
        ),
    ],
    ids=["classes", "classes of one of several hosts", "vocabulary", "block size"],
)
def test_a_host_that_is_too_small_for_the_data_is_refused_in_one_sentence(
    compose: Callable[[], DictConfig], message: str
) -> None:
    composed = compose()
    check_config(composed)
    with pytest.raises(ValueError, match=message):
        build_environment(composed)
