"""The feature sets by name, and the page that lists them."""

from esper.observation.features import ABSOLUTE, FeatureSet
from esper.observation.scale_free import SCALE_FREE

FEATURE_SETS: dict[str, FeatureSet] = {features.name: features for features in (ABSOLUTE, SCALE_FREE)}
MEANINGS = {
    "absolute": "Scores in points, losses and norms as they are: for one host, data set and length of episodes.",
    "scale_free": "Ratios and shares, for any host, data set and budget: with `environment=budget`.",
}


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
            lines += ["| feature | width | meaning |", "|---|---|---|"]
            lines += [f"| `{feature.name}` | {feature.width} | {feature.meaning} |" for feature in table]
    lines += [
        "",
        "An observation also has each slot's blueprint, as an index for an embedding (0 is no seed), whether the host "
        "has each slot,",
        "and the masks. The features of a slot that only other hosts have are 0.",
        "",
    ]
    return "\n".join(lines)
