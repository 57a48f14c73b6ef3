import pickle

import pytest

from esper.config import host_variants, variant_nodes
from esper.hosts import VARIANTS, CNNHost, GPTHost
from tests.fixtures_environment import config, text_config


def test_builders_of_all_variants_survive_pickling_as_workers_need() -> None:
    builders = pickle.loads(pickle.dumps(host_variants(config())))["host"]
    assert tuple(builders) == VARIANTS
    assert [slot.channels for slot in builders["wide2"]().slots] == [16, 32, 64]
    text = host_variants(text_config())["host"]["wide2_deep1"]()
    assert isinstance(text, GPTHost)
    assert text.slots[0].channels == 32


def test_each_of_several_hosts_has_its_variants() -> None:
    builders = host_variants(config("host=cifar_mixed"), ["wide2"])
    assert {name: [*each] for name, each in builders.items()} == {"cifar_blind": ["wide2"], "cifar_baseline": ["wide2"]}
    assert builders["cifar_blind"]["wide2"]().slots[0].channels == 32
    assert builders["cifar_baseline"]["wide2"]().slots[0].channels == 16


def test_no_host_is_built_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CNNHost, "__init__", lambda *args, **kwargs: pytest.fail("built a host"))
    assert host_variants(config())["host"]


def test_the_node_of_a_variant_has_plain_arguments_without_references() -> None:
    node = variant_nodes(config())["host"]["deep1"]
    assert node == {
        "_target_": "esper.hosts.CNNHost", "blocks": 3, "channels": 8, "kernel": 3, "pools": 3, "pool_slots": False,
        "resolution": 8, "classes": 10, "extra_blocks": 1,
    }  # fmt: skip


def test_a_host_that_a_function_builds_has_no_variants() -> None:
    changed = config().copy()
    changed.host = {"_target_": "tests.config.test_variants.make_host"}
    assert host_variants(changed) == {"host": {}}


def make_host() -> CNNHost:
    raise NotImplementedError
