"""The feature sets by name, and the page that lists them."""

from collections.abc import Mapping

from esper.lifecycle import ActionSpace, Layout
from esper.observation.descriptors import CANDIDATE_COLUMNS
from esper.observation.features import ABSOLUTE, FeatureSet
from esper.observation.scale_free import SCALE_FREE

FEATURE_SETS: dict[str, FeatureSet] = {features.name: features for features in (ABSOLUTE, SCALE_FREE)}
MEANINGS = {
    "absolute": "Scores in points, losses and norms as they are: for one host, data set and length of episodes.",
    "scale_free": "Ratios and shares, for any host, data set and budget: with `environment=budget`.",
}


def make_layout(
    space: ActionSpace, features: FeatureSet, traits: Mapping[str, tuple[str, ...]] | None = None
) -> Layout:
    """What a policy observes and chooses with these features; `traits` are those of blueprints, by name."""
    return Layout.from_space(
        space,
        base=features.base_groups,
        slot=features.slot_groups,
        candidate=CANDIDATE_COLUMNS,
        features=features.name,
        traits=traits,
    )


def observation_page() -> str:
    """docs/observation.md: every feature, as Markdown."""
    lines = ["# Observation features", ""]
    lines += [
        "An observation has one row of host features and one row of features per slot, scaled to about [-1, 1].",
        "A value that was not measured yet is -1. `symlog(x)` is sign(x) ln(1 + abs(x)) / 3, clipped to [-2, 2].",
        "`environment.features` chooses one of two sets.",
        "",
        "`observation_page()` generates this page from `features.py` and `scale_free.py` in `esper/observation/`.",
    ]
    for features in FEATURE_SETS.values():
        lines += ["", f"## {features.name}", "", MEANINGS[features.name]]
        for title, table in (("Host", features.base), ("Each slot", features.per_slot)):
            lines += ["", f"### {title}: {sum(feature.width for feature in table)} values", ""]
            lines += ["| feature | width | optional group | meaning |", "|---|---|---|---|"]
            lines += [f"| `{f.name}` | {f.width} | {f.group or ''} | {f.meaning} |" for f in table]
    lines += [
        "",
        "## Blueprints",
        "",
        f"Each blueprint in each slot is described by {len(CANDIDATE_COLUMNS)} values: {', '.join(CANDIDATE_COLUMNS)}.",
        "`parameters` and `flops` are ln(seed / host) / 3; `reach` is 1 - 1 / (1 + positions that it sees).",
        "An observation also has the blueprint of each seed, which slots exist, and the masks. Features of a slot",
        "that only other hosts have are 0.",
        "",
        "## Optional groups",
        "",
        "A model outside of esper may lack some features. Those of a missing group are 0 after normalisation, and",
        "a flag for each group shows it. While a policy trains, each group is missing in a tenth of the episodes",
        "(`policy.group_dropout`).",
        "",
    ]
    return "\n".join(lines)
