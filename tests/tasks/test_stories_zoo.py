"""The text tasks of conf/tasks/stories_zoo.yaml, on synthetic stories."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from esper.config import build, build_environment, check_config, compose_config
from esper.config.build import build_distribution
from esper.data import Data
from esper.hosts import Host
from esper.tasks import TaskDistribution, TaskSpec
from esper.tasks.__main__ import main

STORIES = (
    "data=synthetic_stories", "data.block_size=16", "data.train_bytes=20000", "data.validation_bytes=2000",
    "data.test_bytes=2000", "environment.steps=3", "environment.workers=0", "environment.threads=1",
)  # fmt: skip
SMALL_HOSTS = ("tasks.host.channels=16", "tasks.settings.batch=4", "tasks.settings.budget_batches=30")


def stories_zoo(*overrides: str) -> DictConfig:
    config = compose_config("evaluate", ["+experiment=stories_zoo_ppo", *STORIES, "tasks.split=train", *overrides])
    check_config(config)
    return config


@pytest.fixture(scope="module")
def config() -> DictConfig:
    return stories_zoo()


@pytest.fixture(scope="module")
def distribution(config: DictConfig) -> TaskDistribution:
    built = build_distribution(config)
    assert built is not None
    return built


def outline(spec: TaskSpec) -> Host:
    with torch.device("meta"):
        host: Host = build(OmegaConf.create(dict(spec.host)))
    return host


def test_every_family_is_drawn_and_held_out_ones_only_in_their_split(distribution: TaskDistribution) -> None:
    families = {split: Counter(spec.family for spec in distribution.specs(split)) for split in ("train", "heldout")}
    assert families["train"].keys() == {
        "no_attention", "no_mlp", "no_normalisation", "complete", "complete_little_text",
    }  # fmt: skip
    assert families["heldout"].keys() == {"five_layers", "large_vocabulary"}
    for drawn in families.values():
        assert len(set(drawn.values())) == 1, "families are balanced"


def test_splits_have_different_tasks(distribution: TaskDistribution) -> None:
    specs = distribution.specs()
    settings = [(spec.lr_scale, spec.budget_batches, str(spec.host)) for spec in specs]
    assert len({spec.name for spec in specs}) == len(set(settings)) == len(specs)
    vocabularies = {spec.family: {s.host["vocabulary"] for s in specs if s.family == spec.family} for spec in specs}
    assert vocabularies.pop("large_vocabulary") == {2048}
    assert 2048 not in set().union(*vocabularies.values())


def test_hosts_lack_what_their_family_says_and_have_a_slot_after_each_layer(distribution: TaskDistribution) -> None:
    for spec in distribution.specs():
        host = outline(spec)
        parts = {name.rpartition(".")[2] for name, _ in host.named_modules()}
        has_norm = any(isinstance(module, torch.nn.LayerNorm) for module in host.modules())
        assert ("attention" in parts) == (spec.host["heads"] > 0)
        assert ("attention" in parts) or spec.family in ("no_attention", "large_vocabulary")
        assert ("expand" in parts) == (spec.family != "no_mlp")
        assert has_norm or spec.family in ("no_normalisation", "five_layers")
        assert len(host.slots) == spec.host["layers"]
        assert all(slot.channels % 4 == 0 for slot in host.slots), "the blueprint attention has four heads"


def test_the_outputs_of_a_host_follow_the_vocabulary_of_its_data(
    config: DictConfig, distribution: TaskDistribution
) -> None:
    loads: list[int] = []

    def load(vocabulary: int) -> Data:
        loads.append(vocabulary)
        data: Data = build(config.data, vocabulary=vocabulary)
        return data

    specs = distribution.specs("train")[:15]
    for spec in specs:
        data = distribution.load_data(spec, load)
        vocabulary = spec.variant["vocabulary"]
        outputs = outline(spec)(torch.zeros(1, 16, dtype=torch.long, device="meta")).shape[-1]
        assert data.preparation()["vocabulary"] == vocabulary == outputs >= data.options
        if spec.family == "complete_little_text":
            whole = build(config.data, vocabulary=vocabulary).size("train")
            assert data.size("train") <= min(whole, 30_000 // 16)
    assert len(loads) == len(set(loads)) == len({spec.variant["vocabulary"] for spec in specs}) > 2


def test_a_round_with_several_vocabularies_is_scored_in_bits_per_byte() -> None:
    few = ("environment.envs=4", "environment.validation_samples=8", "tasks.repeats=1", "tasks.counts.train=5")
    environment = build_environment(stories_zoo(*SMALL_HOSTS, *few))
    seeds = [environment.episode_seed("evaluation", 0, index) for index in range(4)]
    tasks = [environment.host_pool.task(episode_seed) for episode_seed in seeds]
    assert len({environment.host_pool.costs(episode_seed).outputs for episode_seed in seeds}) > 1
    environment.reset(seeds)
    names = [op.name for op in environment.space.ops]
    grow = torch.tensor([[names.index("GERMINATE"), 0, 0]]).expand(4, -1)  # in the slot that all hosts have
    for step in range(environment.steps):
        environment.step(grow if step == 0 else torch.zeros_like(grow))
    outcome = environment.outcome()
    for task, loss, score in zip(tasks, outcome["loss"], outcome["score"], strict=True):
        assert torch.allclose(score, task.data.score("validation", loss, loss))
        assert -900 < float(score) < -100
    assert bool((outcome["growth"] > 1).all())


def test_the_command_lists_text_tasks_with_their_vocabulary(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    main(["stories_zoo", "--count", "2", *STORIES, *SMALL_HOSTS, "tasks.variants=[{vocabulary: 257}]"])
    printed = capsys.readouterr().out
    assert "257 tokens" in " ".join(printed.replace("│", " ").split())
    assert "mean of 2" in printed


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tasks.variants=[{colour: grey}]", "tasks.variants.0: colour is unknown; allowed are train, vocabulary."),
        (
            "tasks.variants=[{vocabulary: {choice: [300, 256]}}]",
            "tasks.variants.0.vocabulary=256: must be 257 (plain bytes) or more (byte pairs).",
        ),
        (
            "tasks.families.no_mlp.variants=[{vocabulary: many}]",
            "tasks.families.no_mlp.variants.0.vocabulary=many: must be 257 (plain bytes) or more (byte pairs).",
        ),
    ],
)
def test_bad_variants_are_refused_in_one_sentence(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^tasks") as error:
        stories_zoo(override if "families" not in override else f"+{override}")
    assert str(error.value) == message
