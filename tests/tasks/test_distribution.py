"""Task distributions: which task a task seed draws."""

from collections import Counter
from typing import Any

import pytest

from esper.tasks import TASK_SPLITS, TaskDistribution


def distribution(**changes: Any) -> TaskDistribution:
    arguments: dict[str, Any] = {
        "name": "zoo",
        "topology": "cnn",
        "data_set": "data",
        "data_sets": {},
        "host": {"blocks": {"between": [2, 4]}, "channels": {"log": [4, 16]}, "classes": 10},
        "variants": [{}, {"classes": {"between": [2, 9]}}],
        "settings": {"lr_scale": {"log": [0.5, 2.0]}, "batch": 64, "budget_batches": {"log": [300, 3000]}},
        "families": {
            "narrow": {"host": {"channels": 2}},
            "complete": {"host": {"kernel": 3}},
            "deep": {"heldout": True},
        },
        "counts": {"train": 12, "validation": 4, "test": 4, "heldout": 3},
        "seed": 0,
        "repeats": 4,
        "split": "test",
    }
    return TaskDistribution(**{**arguments, **changes})


def test_a_task_seed_always_draws_the_same_task_and_splits_draw_different_ones() -> None:
    specs, again = distribution().specs(), distribution().specs()
    assert [spec.to_dict() for spec in specs] == [spec.to_dict() for spec in again]
    assert len({spec.name for spec in specs}) == len(specs) == 23
    assert len({(spec.lr_scale, spec.budget_batches) for spec in specs}) == len(specs), "no draw is used twice"
    others = distribution(seed=1).specs()
    assert all(spec.lr_scale != other.lr_scale for spec, other in zip(specs, others, strict=True))


def test_a_longer_list_begins_with_the_shorter_one() -> None:
    short, long = distribution().specs("train"), distribution(counts={"train": 40}).specs("train")
    assert [spec.to_dict() for spec in long[:12]] == [spec.to_dict() for spec in short]


def test_families_are_balanced_in_every_prefix_and_held_out_ones_stay_out() -> None:
    specs = distribution().specs("train")
    for length in range(2, 13, 2):
        assert Counter(spec.family for spec in specs[:length]) == {"narrow": length // 2, "complete": length // 2}
    by_split = {split: {spec.family for spec in distribution().specs(split)} for split in TASK_SPLITS}
    assert by_split.pop("heldout") == {"deep"}
    assert all(families == {"narrow", "complete"} for families in by_split.values())


def test_a_family_replaces_settings_and_the_classes_of_the_data_are_those_of_the_host() -> None:
    specs = distribution().specs("train")
    assert {spec.host["channels"] for spec in specs if spec.family == "narrow"} == {2}
    assert {spec.host["_target_"] for spec in specs} == {"esper.hosts.CNNHost"}
    for spec in specs:
        assert spec.host["classes"] == spec.variant.get("classes", 10)
        assert 300 <= spec.budget_batches <= 3000  # type: ignore[operator]
    assert any(spec.variant for spec in specs)
    assert any(not spec.variant for spec in specs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"families": {"narrow": {}}}, "tasks.families.narrow: must set at least one of heldout, host"),
        ({"families": {"narrow": {"hosts": {}}}}, "tasks.families.narrow: hosts is unknown; allowed are heldout, host"),
        ({"families": {"a": {"host": {"channels": {"log": [4]}}}}}, "tasks.families.a.host.channels.log=[4]: must be"),
        ({"families": {"a": {"data_set": "mnist"}}}, "tasks.families.a.data_set=mnist: must be one of data"),
        ({"families": {"a": {"settings": {"lr": 1}}}}, "tasks.families.a.settings: lr is unknown; allowed are"),
        (
            {"variants": [{"hue": 1}]},
            "tasks.variants.0: hue is unknown; allowed are classes, colour, label_noise, train",
        ),
        ({"variants": [{"vocabulary": 300}]}, "tasks.variants.0: vocabulary is unknown; allowed are classes, colour"),
        ({"settings": {"batch": 3}}, "tasks.settings=['batch']: must have exactly lr_scale, batch, budget_batches"),
        ({"steps": [10, 0]}, "tasks.steps=[10, 0]: must be different numbers of at least 1, or null."),
        ({"steps": []}, "tasks.steps=[]: must be different numbers of at least 1, or null."),
        ({"steps": [10, 10]}, "tasks.steps=[10, 10]: must be different numbers of at least 1, or null."),
        ({"counts": {"test": -1}}, "tasks.counts.test=-1: must be a whole number of at least 0."),
        ({"variants": [{"train": 500.5}]}, "tasks.variants.0.train=500.5: must be a whole number of at least 1."),
        ({"variants": [{"label_noise": None}]}, "tasks.variants.0.label_noise=None: must be a decimal number of at"),
        ({"families": {"a": {"settings": {"lr_scale": 0}}}}, "tasks.families.a.settings.lr_scale=0: must be a decimal"),
        ({"counts": {"training": 3}}, "tasks.counts.training: is not a split; splits are train, validation, test"),
        ({"families": {"a": {"heldout": True}}}, "tasks.counts.train=12: must be 0, because no family has tasks"),
    ],
)
def test_bad_distributions_are_refused_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^tasks\.") as error:
        distribution(**changes)
    assert message in str(error.value)
